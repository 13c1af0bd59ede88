//! The grants of the store to a process, from which its fallback share follows.
//!
//! Time is divided into windows as long as the longest window of the quota. They are aligned in the
//! store's time, so they are the same for all processes. The share of a process is the least that
//! it was granted in one of the last windows.
//!
//! Why the least? A process cannot know how long ago other processes lost the store. The least of
//! the last windows is never more than the process was granted when the first of them lost the
//! store. So the shares of all processes never add up to more than the limit.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Share;
use super::standalone::{PARTS, StandaloneLedger};
use crate::clock;
use crate::key::Key;
use crate::key_map::Evict;
use crate::limit::{Charge, Ledger, LimitSpec, Micros, UnusedPermits, is_set, micros_up};
use crate::store::memory::KeyLedger;
use crate::store::{ClientSession, Lease, OwnedLeaseRequest, Source, StoreSession};
use crate::tuning::DETECTION_TIME;

/// How many windows the share depends on, at least and at most.
const WINDOWS: std::ops::RangeInclusive<u64> = 2..=8;

/// The most parts that are kept, including those whose slots lie ahead.
const MOST_PARTS: usize = 400;

/// The recent grants of a key, and the process's own ledger while the store cannot be reached.
#[derive(Default)]
pub(super) struct GrantHistory {
    /// The units that the store granted, by their slots in the store's time, in order.
    granted: VecDeque<WindowPart>,
    /// The last reply of the store, which maps the store's time to the time of this process. `None`
    /// before the first reply.
    session: Option<StoreSession>,
    /// The length of a window: how long used units count, plus the validity of a permit and the
    /// slack.
    window: Micros,
    /// The quota version under which the store granted. Grants of another quota say nothing of the
    /// share.
    version: u32,
    /// How many units may be used in a window.
    units: u64,
    /// The first window that was observed in full.
    first: u64,
    /// Whether `first` follows a change of the quota. Then all processes began anew in the window before it.
    follows_change: bool,
    /// The process's own ledger. Set from the first failed call until the limit is shared again.
    standalone: Option<Box<StandaloneLedger>>,
    /// The share during the last outage.
    last_share: Option<Share>,
}

/// Units with slots in one part of a window.
#[derive(Clone, Copy)]
struct WindowPart {
    number: u64,
    /// The last of their slots.
    last: Micros,
    units: u64,
}

impl Evict for GrantHistory {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        let counts_until = match self.granted.back() {
            Some(last) => self.local_time(last.last) + self.window,
            None => 0,
        };
        let standalone = self
            .standalone
            .as_ref()
            .and_then(|ledger| ledger.idle_from());
        standalone.max(Some(counts_until))
    }
}

impl GrantHistory {
    /// Returns the process's own ledger, if it has one.
    pub(super) fn standalone(&mut self) -> Option<&mut StandaloneLedger> {
        self.standalone.as_deref_mut()
    }

    /// Returns what a call states about the store. `known` is what the limiter knows.
    ///
    /// A call to a store that has lost its state also states which units that state had granted, and the store charges
    /// them. Only one call may state them. That may be a call that the process makes while it is alone, of
    /// which the limiter does not know.
    pub(super) fn session(&self, known: ClientSession, now: Instant) -> ClientSession {
        let Some(last) = &self.session else {
            return known;
        };
        let Some(ledger) = &self.standalone else {
            let is_of_last = known.incarnation == last.incarnation;
            let granted = if is_of_last { known.granted } else { 0 };
            return ClientSession { granted, ..known };
        };
        match last.client_session(now) {
            Some(session) => ClientSession {
                granted: ledger.granted(),
                ..session
            },
            // As the limiter does: releases of a state that is there no more do not count.
            None => ClientSession {
                incarnation: last.incarnation,
                ..ClientSession::default()
            },
        }
    }

    /// Returns a request of the process's own ledger without demands, if the store was not called lately.
    ///
    /// A store that has lost its state takes a set quota from any call that states it, for its whole life. So none is
    /// stated that may have ended. The next request of the limiter states what applies then. If none comes, the ledger
    /// ends when its permits count no more.
    pub(super) fn own_request(&mut self, key: Key, now: Instant) -> Option<OwnedLeaseRequest> {
        let replied_at = self.session.as_ref().map(|session| session.received);
        let ledger = self.standalone()?;
        let spec = &ledger.whole_spec;
        // A use renews a set quota only if less than half of its life is left.
        let applies_for = spec.quota_life() / 2;
        let applies = replied_at.is_some_and(|at| now < clock::after(at, applies_for));
        if !is_set(spec.quota_version()) || applies {
            return ledger.own_request(key, clock::micros(now));
        }
        if ledger.idle_from() <= Some(clock::micros(now)) {
            self.end_standalone();
        }
        None
    }

    /// Returns what the store is charged with: the permits of the process's own ledger whose slots
    /// have come. They count as charged whatever the outcome of the call is. If the store fails again,
    /// they count in the share.
    pub(super) fn take_charges(&mut self, now: Instant) -> Vec<Charge> {
        let now = clock::micros(now);
        let Some(ledger) = &mut self.standalone else {
            return Vec::new();
        };
        let owed = ledger.take_due(now);
        let charges = ledger.charges(&owed, now);
        for owed in owed {
            self.add(self.store_time(owed.slot), owed.units);
        }
        charges
    }

    /// Ends the process's own ledger, because the store replies again. Returns what the store is charged
    /// with, which includes `charges`. Permits whose slots lie ahead are given up.
    pub(super) fn end_with_charges(
        &mut self,
        charges: &[Charge],
        now: Instant,
    ) -> Option<Vec<Charge>> {
        self.standalone()?.charge(charges, now);
        let owed = self.take_charges(now);
        self.end_standalone();
        Some(owed)
    }

    /// Ends the process's own ledger if the store knows of all permits. Otherwise the process stays alone: the
    /// limiter gives these permits up with its next request. Returns whether the ledger has ended.
    pub(super) fn end_if_charged(&mut self) -> bool {
        let is_charged = self
            .standalone()
            .is_some_and(|ledger| !ledger.owes_permits());
        if is_charged {
            self.end_standalone();
        }
        is_charged
    }

    fn end_standalone(&mut self) {
        self.standalone = None;
        // In the present window, the process was bound to its share for a time. So it does not
        // count.
        self.first = self.window_at(self.store_time(clock::micros(clock::now()))) + 1;
    }

    /// Returns the number of the window that a moment of the store's time lies in.
    fn window_at(&self, moment: Micros) -> u64 {
        moment / (self.width() * PARTS)
    }

    /// Returns the length of a part.
    fn width(&self) -> Micros {
        (self.window / PARTS).max(1)
    }

    /// Returns how many windows the share depends on.
    fn windows(&self) -> u64 {
        (micros_up(DETECTION_TIME).div_ceil(self.window.max(1)) + 1)
            .clamp(*WINDOWS.start(), *WINDOWS.end())
    }

    /// Maps a moment of the store's time to the time of this process.
    fn local_time(&self, moment: Micros) -> Micros {
        self.session
            .as_ref()
            .map_or(moment, |session| session.local_time(moment))
    }

    /// Maps a moment of this process to the store's time.
    fn store_time(&self, moment: Micros) -> Micros {
        self.session
            .as_ref()
            .map_or(moment, |session| session.store_time(moment))
    }

    /// Records the lease that the store granted to a call that was sent at `sent`.
    pub(super) fn record(&mut self, lease: &Lease, spec: &LimitSpec, sent: Instant, now: Instant) {
        let window = micros_up(spec.quota().longest_memory() + spec.life() + spec.transit_slack());
        let set = lease.set_quota.as_ref();
        let version = set.map_or(spec.quota_version(), |set| set.version);
        let quota = set.and_then(|set| set.quota).unwrap_or(*spec.quota());
        let (_, units) = quota.longest();
        if (self.window, self.version, self.units) != (window, version, units) {
            self.granted.clear();
            self.follows_change = self.session.is_some();
            (self.window, self.version, self.units) = (window, version, units);
            self.first = self.window_at(lease.now) + 1;
        }
        self.session = Some(StoreSession::of(lease, sent, now));
        let oldest = (lease.now / self.width()).saturating_sub(PARTS * (self.windows() + 1));
        while self
            .granted
            .front()
            .is_some_and(|part| part.number < oldest)
        {
            self.granted.pop_front();
        }
        for grant in lease.all_grants() {
            self.add(grant.slot, grant.units());
        }
    }

    /// Adds units with a slot. If there are too many parts, they count in the last part.
    fn add(&mut self, slot: Micros, units: u64) {
        let number = slot / self.width();
        let place = self
            .granted
            .binary_search_by_key(&number, |part| part.number);
        let index = match place {
            Ok(index) => index,
            Err(index) if self.granted.len() < MOST_PARTS => {
                let part = WindowPart {
                    number,
                    last: slot,
                    units: 0,
                };
                self.granted.insert(index, part);
                index
            }
            Err(_) => self.granted.len() - 1,
        };
        let part = &mut self.granted[index];
        part.units = part.units.saturating_add(units);
        part.last = part.last.max(slot);
    }

    /// Takes back unused permits, in the ledger that granted them.
    pub(super) fn take_back(&mut self, unused: UnusedPermits, now: Micros) {
        if Source::granted_standalone(&unused) {
            if let Some(ledger) = self.standalone() {
                ledger.take_back(unused, now);
            }
            return;
        }
        let number = unused.slot / self.width();
        if let Ok(index) = self
            .granted
            .binary_search_by_key(&number, |part| part.number)
        {
            let part = &mut self.granted[index];
            part.units = part.units.saturating_sub(unused.units);
        }
    }

    /// Makes a ledger of the process's share, after the store failed to reply to `request`. Returns
    /// `None` if the process has no share.
    ///
    /// The share is what the process was granted in the last windows before the request. If no window was
    /// observed in full, the share is that of the last outage. If there is none, or if the process was
    /// granted nothing, the share is `configured`. It is a part of the quota, whatever quota the key has.
    pub(super) fn start_standalone(
        &mut self,
        request: &OwnedLeaseRequest,
        now: Instant,
        configured: Option<Share>,
    ) -> Option<&mut StandaloneLedger> {
        let OwnedLeaseRequest {
            spec,
            validity,
            sent,
            ..
        } = request;
        let now = clock::micros(now);
        let moment = self.store_time(clock::micros(*sent));
        let share = match (self.least_granted(moment), self.last_share) {
            (None, Some(last)) => last,
            (units, _) => match units.unwrap_or_else(|| self.granted_since_change(moment)) {
                0 => configured?,
                units => Share {
                    part: units.min(self.units),
                    of: self.units,
                },
            },
        };
        self.last_share = Some(share);
        // The earlier grants are charged under the longest limit, into which they fit. The other
        // limits begin with what that limit has counted.
        let (longest, _) = spec.quota().longest();
        let longest = share.limits(longest, spec);
        let (moment, width) = (self.store_time(now), self.width());
        let recent = moment.saturating_sub(self.window) / width..=moment / width;
        let counted = self
            .granted
            .iter()
            .filter(|part| recent.contains(&part.number));
        let mut ledger = KeyLedger::new(Ledger::new(&longest, now));
        ledger.with(&longest, now, |ledger, now| {
            for part in counted {
                // The last slots of the present part may lie ahead: these units count early.
                let until = self
                    .local_time(part.last)
                    .saturating_add(micros_up(*validity));
                let age = Duration::from_micros(now.saturating_sub(until));
                ledger.charge(&longest, Charge::new(age, part.units));
            }
        });
        let ledger = StandaloneLedger::new(ledger, share, request, now);
        Some(self.standalone.insert(Box::new(ledger)))
    }

    /// Returns the least units of a window before a moment of the store's time, if there is one.
    fn least_granted(&self, moment: Micros) -> Option<u64> {
        let now = self.window_at(moment);
        let before = self.first.max(now.saturating_sub(self.windows()))..now;
        before.map(|window| self.granted_in(window)).min()
    }

    /// Returns the units of the window that a moment of the store's time lies in, if all processes began
    /// anew with it. Otherwise 0: those of a process that has just begun were a part of what others were
    /// granted before.
    fn granted_since_change(&self, moment: Micros) -> u64 {
        if self.follows_change {
            self.granted_in(self.window_at(moment))
        } else {
            0
        }
    }

    fn granted_in(&self, window: u64) -> u64 {
        self.granted
            .iter()
            .filter(|part| part.number / PARTS == window)
            .fold(0, |sum, part| sum.saturating_add(part.units))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::quota::Quota;
    use crate::store::{Demand, Grant, HoldState, LeaseRequest, PeekRequest, SetQuota};

    const SLACK: Duration = Duration::from_millis(10);

    fn spec(quota: Quota) -> LimitSpec {
        LimitSpec::new(quota, SLACK, SLACK)
    }

    /// Asks for one permit.
    fn request(spec: &Arc<LimitSpec>) -> OwnedLeaseRequest {
        OwnedLeaseRequest::new(&LeaseRequest::new(Key::ALL, spec, &[Demand::new(1, 1)]))
    }

    /// Returns a lease of some units at the beginning of a window of `spec`. The test ends long before the
    /// window does.
    fn lease(spec: &LimitSpec, units: u32, quota: Option<SetQuota>) -> Lease {
        let window = micros_up(spec.quota().longest_memory() + spec.life() + SLACK);
        let at = 1000 * window + window / 10;
        let mut lease = Lease {
            now: at,
            set_quota: quota.map(Box::new),
            ..Lease::default()
        };
        let mut grant = Grant::new(units, 1, Duration::ZERO, SLACK);
        (grant.slot, grant.stamp) = (at, at + 20_000);
        lease.grants.push(grant);
        lease
    }

    fn share_of(ledger: Option<&mut StandaloneLedger>) -> Option<Quota> {
        ledger.map(|ledger| *ledger.spec.quota())
    }

    /// Fifty of a hundred units, and then five of twenty.
    #[test]
    fn grants_before_a_set_quota_are_no_share_of_it() {
        let (own, set) = (spec(Quota::per_second(100)), Quota::per_second(20));
        let (mut history, now) = (GrantHistory::default(), clock::now());
        history.record(&lease(&own, 50, None), &own, now, now);
        let told = SetQuota::new(1, Some(set), SLACK, SLACK);
        history.record(&lease(&own, 5, Some(told)), &own, now, now);
        let informed = Arc::new(spec(set).with_quota_version(1, SLACK));
        history.record(&lease(&own, 0, None), &informed, now, now);
        let ledger = history.start_standalone(&request(&informed), now, None);
        assert_eq!(share_of(ledger), Some(set.part(5, 20)));
    }

    /// Fifty of a hundred units of one plan, and then the store fails to reply about another plan, or grants five of it.
    #[test]
    fn grants_of_another_plan_are_the_same_part_of_it() {
        let (gold, free) = (spec(Quota::per_second(100)), spec(Quota::per_second(20)));
        for (granted, expected) in [(None, (10, 20)), (Some(5), (5, 20))] {
            let (mut history, now) = (GrantHistory::default(), clock::now());
            history.record(&lease(&gold, 0, None), &gold, now, now);
            // As after a set quota, all grants of the present window count.
            history.follows_change = true;
            history.record(&lease(&gold, 50, None), &gold, now, now);
            if let Some(units) = granted {
                history.record(&lease(&free, units, None), &free, now, now);
            }
            let request = request(&Arc::new(free.clone()));
            let ledger = history.start_standalone(&request, now, None);
            let (part, of) = expected;
            assert_eq!(share_of(ledger), Some(free.quota().part(part, of)));
        }
    }

    /// The limiter states a set quota as long as it applies. A task that stated it later would bring it back.
    #[test]
    fn the_task_states_no_set_quota_that_may_have_ended() {
        let (minute, second) = (Duration::from_secs(60), Duration::from_secs(1));
        let set = spec(Quota::per_hour(100)).with_quota_version(1, minute);
        let (mut history, now) = (GrantHistory::default(), clock::now());
        history.record(&lease(&set, 5, None), &set, now, now);
        let set = Arc::new(set);
        standalone(&mut history, &request(&set), now);
        let mut asks = |after| {
            history
                .own_request(Key::ALL, clock::after(now, after))
                .is_some()
        };
        assert!(asks(10 * second), "it applies");
        assert!(!asks(31 * second), "a use 31 s ago may have left it 29 s");
    }

    /// Fifty units of a hundred are used when the store fails, and one is booked ahead.
    #[test]
    fn a_slot_ahead_hides_no_units_used_before_it() {
        let own = Arc::new(spec(Quota::per_hour(100)));
        let (mut history, now) = (GrantHistory::default(), clock::now());
        let mut granted = lease(&own, 50, None);
        let mut ahead = Grant::new(1, 1, Duration::from_millis(5), SLACK);
        ahead.slot = granted.now + 5000;
        granted.grants.push(ahead);
        history.record(&granted, &own, now, now);
        let request = request(&own);
        let ledger = standalone(&mut history, &request, now);
        let peek = PeekRequest::new(Key::ALL, &own);
        assert_eq!(ledger.usage(&peek, now).limits[0].used, 51);
    }

    /// What the store granted to a process that has just begun is a part of what others were granted before.
    #[test]
    fn new_process_has_its_configured_share_only() {
        let quota = Quota::per_second(100);
        let own = Arc::new(spec(quota));
        let (mut history, now) = (GrantHistory::default(), clock::now());
        history.record(&lease(&own, 40, None), &own, now, now);
        let request = request(&own);
        assert!(history.start_standalone(&request, now, None).is_none());
        let ledger = history.start_standalone(&request, now, Share::new(0.25));
        assert_eq!(share_of(ledger), Some(quota.part(1, 4)));
    }

    /// Returns the ledger of a process with all of a quota.
    fn standalone<'a>(
        history: &'a mut GrantHistory,
        request: &OwnedLeaseRequest,
        now: Instant,
    ) -> &'a mut StandaloneLedger {
        let ledger = history.start_standalone(request, now, Share::new(1.0));
        ledger.expect("it has a configured share")
    }

    #[test]
    fn holds_end_while_the_machine_sleeps() {
        let minute = Duration::from_secs(60);
        let (mut history, now) = (GrantHistory::default(), clock::now());
        let mut request = request(&Arc::new(spec(Quota::per_minute(10))));
        let ledger = standalone(&mut history, &request, now);
        request.hold = HoldState::new(minute, 0);
        let held = ledger.lease(&request, now).unwrap();
        assert!(held.refused.is_some());
        clock::pretended::sleep(minute);
        request.hold = HoldState::default();
        let free = ledger.lease(&request, now).unwrap();
        assert_eq!(free.refused, None);
    }

    /// An outage of some minutes.
    #[test]
    fn permits_that_count_no_more_are_forgotten() {
        let (mut history, now) = (GrantHistory::default(), clock::now());
        let request = request(&Arc::new(spec(Quota::per_second(100))));
        let ledger = standalone(&mut history, &request, now);
        let mut last = now;
        for _ in 0..3000 {
            last = clock::after(last, Duration::from_millis(60));
            let lease = ledger.lease(&request, last).unwrap();
            assert_eq!(lease.grants.len(), 1);
        }
        let owed = ledger.take_due(clock::micros(last));
        assert!((20..500).contains(&owed.len()), "{}", owed.len());
    }
}
