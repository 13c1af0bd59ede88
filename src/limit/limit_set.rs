//! All limits of one key. A permit counts in all of them or in none.
//!
//! Twin: `store/redis/lua/ledger.lua`, and step 3 of `main.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::advance::{AdvanceBooking, TOLERANCE};
use super::algorithm::{Algorithm, PermitTime};
use super::fixed::Fixed;
use super::limit_state::LimitState;
use super::limit_states::LimitStates;
use super::set_quota::SetQuotaState;
use super::{LimitSpec, Micros, UnusedPermits, UpstreamRemaining, micros_up};
use crate::quota::Limit;

/// How much longer the limits of a part apply than those of other keys: 4 s.
///
/// Twin: `STATED_AHEAD` in `store/redis/lua/layout.lua`.
pub(crate) const STATED_AHEAD: Micros = 4_000_000;

/// The most limits of one key. A limit that only other callers state is *foreign* to the present
/// caller.
pub(super) const MOST_LIMITS: usize = 32;

/// The most rounds of the search for a slot that all limits allow. Some limits have no such slot,
/// for example fixed windows with different guards.
const MOST_ROUNDS: usize = 1000;

/// All limits of one key.
///
/// If callers state different limits for one key, all of these limits apply to all callers. A limit
/// applies until no caller has stated it for at least two windows and a second, or until there are
/// too many limits. While a set quota applies, only its limits do (`set_quota.rs`).
#[derive(Clone, Debug)]
pub(super) struct LimitSet {
    states: LimitStates,
}

impl LimitSet {
    /// Makes a set without limits.
    pub(super) fn new() -> Self {
        LimitSet {
            states: LimitStates::NONE,
        }
    }

    /// Moves the boundaries of fixed windows to a wall clock that is `ahead` microseconds ahead of
    /// the ledger's time.
    pub(super) fn align(&mut self, ahead: i64, now: Micros) {
        self.states
            .all_mut()
            .for_each(|state| state.rule.align(ahead, now));
    }

    /// Takes in which limit is the pace of the part, as the present caller states it.
    pub(super) fn set_pace(&mut self, pace: Option<Limit>) {
        for state in self.states.limiting_mut() {
            state.set_pace(pace == Some(state.limit));
        }
    }

    /// Returns the limits that apply to an owner: those that are not paused, without the pace.
    fn owned(&mut self) -> impl Iterator<Item = &mut LimitState> {
        self.states.limiting_mut().filter(|state| !state.is_pace())
    }

    pub(super) fn advance(&mut self, now: Micros) {
        self.states.all_mut().for_each(|state| state.advance(now));
    }

    /// Adds the limits of `spec`, or records that a caller stated them. Forgets the limits that no
    /// longer apply. The wall clock is `ahead` microseconds ahead of the ledger's time.
    pub(super) fn state(
        &mut self,
        spec: &LimitSpec,
        now: Micros,
        ahead: i64,
        mut set_quota: Option<&mut SetQuotaState>,
    ) {
        let stated_at = stated_at(spec, now);
        let ours = spec.limits();
        for limit in ours {
            let mut limiting = self.states.limiting_mut();
            match limiting.find(|state| state.limit == *limit) {
                // A statement is recorded only if the last record is older than half a window. So
                // most refusals do not change the state.
                Some(state)
                    if now.saturating_sub(state.last_stated) > micros_up(limit.window()) / 2 =>
                {
                    state.last_stated = stated_at
                }
                Some(_) => {}
                None => {
                    let state = self.begin(*limit, spec, now, ahead, set_quota.as_deref_mut());
                    self.states.push(state);
                }
            }
        }
        // A call without limits, such as a hold, says nothing about which apply: if it forgot those of a
        // quota that has just ended, their use would be forgotten before the next request states them.
        if !ours.is_empty() && self.states.all().len() > ours.len() {
            self.forget_foreign(ours, now);
        }
    }

    /// Makes the limits of `spec` those of a set quota. The others are paused.
    pub(super) fn set(
        &mut self,
        spec: &LimitSpec,
        now: Micros,
        ahead: i64,
        quota: &mut SetQuotaState,
    ) {
        let limits = spec.limits();
        for limit in limits {
            if self.states.all().all(|state| state.limit != *limit) {
                let mut state = self.begin(*limit, spec, now, ahead, Some(quota));
                // What is booked ahead comes back, because another quota allowed it.
                if let Algorithm::Bucket(bucket) = &mut state.rule {
                    bucket.leave_empty_at_most(now);
                }
                self.states.push(state);
            }
        }
        self.states.pause_others(limits);
        for state in self.states.limiting_mut() {
            state.last_stated = now;
        }
    }

    /// Ends a set quota. Its limits count as if callers stated them last at `moment`, and no limit is
    /// paused any more. If the quota was learned, its limits apply no longer, unless callers state them:
    /// one response may have stated a window of a year.
    pub(super) fn unset(&mut self, moment: Micros, was_learned: bool) {
        for state in self.states.limiting_mut() {
            state.last_stated = moment;
            if was_learned {
                state.last_stated = (2 * moment).saturating_sub(state.in_force_until() + 1);
            }
        }
        let limiting = self.states.limiting().len();
        for paused in self.states.all_mut().skip(limiting) {
            if let Algorithm::Bucket(bucket) = &mut paused.rule {
                bucket.resume(moment);
            }
        }
        self.states.pause_none();
    }

    /// Forgets the paused limits that no caller has stated for long. Those of a set quota apply.
    pub(super) fn forget_paused(&mut self, now: Micros) {
        let ours: Vec<Limit> = self.limits().collect();
        debug_assert!(!ours.is_empty(), "a set quota has a limit");
        self.forget_foreign(&ours, now);
    }

    /// Forgets the limits besides `ours` that no longer apply. If too many are left, forgets those of
    /// them that would be forgotten next.
    ///
    /// The next caller that states such a limit adds it again, with the use that the other limits
    /// remember. So a large fleet goes on even if the upstream states another limit to each
    /// process.
    fn forget_foreign(&mut self, ours: &[Limit], now: Micros) {
        self.states
            .retain(|state| ours.contains(&state.limit) || state.in_force_until() >= now);
        while self.states.all().len() > MOST_LIMITS {
            let all = self.states.all();
            let foreign = all.filter(|state| !ours.contains(&state.limit));
            let Some(first) = foreign.min_by_key(|state| state.in_force_until()) else {
                return;
            };
            let first = first.limit;
            self.states.retain(|state| state.limit != first);
        }
    }

    /// Makes the state of a limit that is new to this key. If the key has a set quota, or the end of one,
    /// notes there which permits the limit may not know.
    fn begin(
        &self,
        limit: Limit,
        spec: &LimitSpec,
        now: Micros,
        ahead: i64,
        quota: Option<&mut SetQuotaState>,
    ) -> LimitState {
        if let Some(quota) = quota {
            quota.begin(self.log_end().max(now), self.would_know_all(limit));
        }
        let rule = self.rule_for(limit, now, ahead, micros_up(spec.transit_slack()));
        LimitState::new(limit, rule, stated_at(spec, now))
    }

    /// Returns whether a limit that is new to this key would begin with a log of all permits, so that it
    /// counts each that comes back. Permits that left the log have a stamp that is over.
    fn would_know_all(&self, limit: Limit) -> bool {
        match limit {
            _ if self.states.all().next().is_none() => true,
            Limit::Fixed { .. } => self.same_windows(limit).is_some(),
            _ => self.longest_window().is_some(),
        }
    }

    /// Returns the fixed windows that are as long as those of a limit, if it has fixed windows.
    fn same_windows(&self, limit: Limit) -> Option<&Fixed> {
        let Limit::Fixed { window, .. } = limit else {
            return None;
        };
        self.states.all().find_map(|state| match &state.rule {
            Algorithm::Fixed(fixed) if state.limit.window() == window => Some(&**fixed),
            _ => None,
        })
    }

    /// Returns the sliding window that remembers for longest.
    fn longest_window(&self) -> Option<&LimitState> {
        let all = self.states.all();
        let windows = all.filter(|state| matches!(state.rule, Algorithm::Window(_)));
        windows.max_by_key(|state| state.limit.window())
    }

    /// Makes the algorithm of a limit that is new to this key. It starts with the use that the
    /// other limits remember. For a fixed window, that of another one of the same length; or else the
    /// log of the longest sliding window; or else that of the limit that remembers the most units.
    fn rule_for(&self, limit: Limit, now: Micros, ahead: i64, transit_slack: Micros) -> Algorithm {
        if let Some(same) = self.same_windows(limit) {
            return Algorithm::Fixed(Box::new(same.with_limit(limit.count())));
        }
        let mut rule = Algorithm::new(limit, ahead);
        let uses = match self.longest_window() {
            Some(longest) => longest.rule.earlier_use(now, transit_slack),
            None => {
                let all = self.states.all();
                let uses = all.map(|state| state.rule.earlier_use(now, transit_slack));
                let most = uses.max_by_key(|uses| uses.iter().map(|used| used.units).sum::<u64>());
                most.unwrap_or_default()
            }
        };
        for used in uses.into_iter().filter(|used| used.units > 0) {
            match &mut rule {
                // What was used before leaves a bucket empty at most, and not in debt for as long
                // as the window remembers.
                Algorithm::Bucket(bucket) if used.last_slot <= now => {
                    bucket.charge(used.last_slot, used.stamp, used.units);
                }
                rule => rule.insert_due(used.last_slot, used),
            }
        }
        rule.advance(now);
        rule
    }

    /// Forgets what is reserved for other clients.
    pub(super) fn forget_others(&mut self) {
        self.states.all_mut().for_each(LimitState::forget_others);
    }

    /// Takes in what the upstream states is left of a limit, in a ledger that was made at
    /// `made_at`. Returns whether less is allowed than before.
    pub(super) fn see(
        &mut self,
        left: &UpstreamRemaining,
        now: Micros,
        made_at: Micros,
        transit_slack: Micros,
        advance: &[AdvanceBooking],
    ) -> bool {
        let mut limiting = self.states.limiting_mut();
        let stated = limiting.find(|state| state.limit == left.limit);
        stated.is_some_and(|state| state.see(left, now, made_at, transit_slack, advance))
    }

    /// Returns the first limit that applies besides `ours`.
    pub(super) fn foreign(&self, ours: &[Limit]) -> Option<Limit> {
        let has_others = self.states.limiting().len() > ours.len();
        let mut limits = self.limits().filter(|limit| !ours.contains(limit));
        has_others.then(|| limits.next()).flatten()
    }

    /// Returns the limits that are not paused.
    pub(super) fn limits(&self) -> impl Iterator<Item = Limit> {
        self.states.limiting().map(|state| state.limit)
    }

    /// Returns all limits, also those that are paused.
    #[cfg(test)]
    pub(super) fn all_limits(&self) -> impl Iterator<Item = Limit> {
        self.states.all().map(|state| state.limit)
    }

    /// Returns the largest cost that every limit allows. `None` if there is no limit.
    pub(super) fn largest_cost(&mut self) -> Option<u32> {
        let costs = self.owned().map(|state| state.limit.largest_cost());
        costs.min()
    }

    /// Returns the first moment, not before `from`, at which every limit allows `cost`, and the
    /// limit that allows it last.
    pub(super) fn first_slot(
        &mut self,
        from: Micros,
        cost: u64,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> (Micros, Option<Limit>) {
        let mut slot = from;
        let mut limit = None;
        for _ in 0..MOST_ROUNDS {
            let before = slot;
            for state in self.states.limiting_mut() {
                let first = match open.borrows {
                    None if state.is_pace() => slot,
                    None => state.first_slot(slot, cost, open, advance),
                    // Of the pace, a permit of any cost needs one unit.
                    Some(_) if state.is_pace() => state.first_slot(slot, 1, open, advance),
                    Some(percent) => state.first_slot_lent(slot, cost, percent, open, advance),
                };
                if first == Micros::MAX {
                    return (first, Some(state.limit));
                }
                if first > slot {
                    slot = first;
                    limit = (!state.is_pace()).then_some(state.limit);
                }
            }
            // If one limit moved the slot, the other limits have to allow it too. Each limit moves
            // it only later.
            if slot == before {
                return (slot, limit);
            }
        }
        (Micros::MAX, None)
    }

    /// Returns how many units may leave at `slot`, which is now, or not before the first slot of one unit.
    pub(super) fn room(
        &mut self,
        slot: Micros,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> u64 {
        let rooms = self.owned().map(|state| state.room(slot, open, advance));
        rooms.min().unwrap_or(u64::MAX)
    }

    /// Returns whether a permit with this slot becomes an advance booking, if its first free slot
    /// is `free`.
    pub(super) fn is_in_advance(
        &self,
        slot: Micros,
        free: Micros,
        advance: &[AdvanceBooking],
    ) -> bool {
        let windows = self.states.all().map(|state| state.limit.window());
        let tolerance = windows.min().map_or(0, |window| micros_up(window) / 50);
        slot > free.saturating_add(tolerance.max(TOLERANCE))
            || (advance.first().is_some_and(|first| first.slot <= slot) && self.has_bucket())
    }

    /// Returns whether one of the limits is a bucket, which counts permits in the order of their
    /// slots.
    fn has_bucket(&self) -> bool {
        let mut states = self.states.all();
        states.any(|state| matches!(state.rule, Algorithm::Bucket(_)))
    }

    /// Returns for how long a permit is valid at a slot: for the life that its caller asks for, but no longer than
    /// the fixed windows that have the slot, which may be those of another caller.
    pub(super) fn longest_life(&self, slot: Micros, open: PermitTime) -> Micros {
        let limiting = self.states.limiting();
        let lives = limiting.filter_map(|state| match &state.rule {
            Algorithm::Fixed(fixed) => Some(fixed.longest_life(slot, open.guard)),
            _ => None,
        });
        lives.fold(open.life, Micros::min)
    }

    /// Returns how far the slots of joined advance bookings may be apart.
    pub(super) fn longest_join(&self) -> Micros {
        let spans = self.states.all().map(|state| state.rule.longest_join());
        spans.min().unwrap_or(Micros::MAX)
    }

    /// Counts units of a permit in every limit.
    pub(super) fn insert(&mut self, now: Micros, slot: Micros, stamp: Micros, units: u64) {
        for state in self.states.all_mut() {
            state.rule.insert(now, slot, stamp, units);
        }
    }

    /// Counts units of an advance booking, whose slot has come, in every limit.
    pub(super) fn insert_due(&mut self, now: Micros, booking: AdvanceBooking) {
        for state in self.states.all_mut() {
            state.rule.insert_due(now, booking);
            // The stamp may have left the window as well.
            state.rule.advance(now);
        }
    }

    /// Counts units in every limit that were used at `used_at` or earlier, even beyond the limit. If
    /// they are more than a limit, as many as the limit count.
    pub(super) fn charge(
        &mut self,
        now: Micros,
        used_at: Micros,
        transit_slack: Micros,
        units: u64,
    ) {
        for state in self.states.all_mut() {
            let units = units.min(u64::from(state.limit.largest_cost()));
            state.rule.charge(now, used_at, transit_slack, units);
        }
    }

    /// Takes back permits that were not used.
    pub(super) fn subtract(&mut self, now: Micros, unused: UnusedPermits) {
        for state in self.states.all_mut() {
            state.subtract(now, unused);
        }
    }

    /// Returns whether the limits would give the slot of unused permits again, once they are taken back.
    /// The pace of a part does not matter: it delays no owner.
    pub(super) fn would_give_again(
        &mut self,
        unused: UnusedPermits,
        advance: &[AdvanceBooking],
    ) -> bool {
        self.owned()
            .all(|state| state.rule.would_give_again(unused, advance))
    }

    /// Takes in that advance bookings came back unused.
    pub(super) fn returned(&mut self, now: Micros, unused: UnusedPermits) {
        for state in self.states.all_mut() {
            state.returned(now, unused);
        }
    }

    /// Returns a moment that is not before the slot of any permit in the logs.
    pub(super) fn log_end(&self) -> Micros {
        let ends = self.states.all().map(|state| state.rule.log_end());
        ends.max().unwrap_or(0)
    }

    /// Returns whether units of a limit are reserved for other clients at a moment.
    pub(super) fn is_reserved(&self, at: Micros) -> bool {
        self.states.limiting().any(|state| state.reserved(at) > 0)
    }

    /// Returns whether other clients are known to use a limit too.
    pub(super) fn is_shared(&self) -> bool {
        self.states.limiting().any(LimitState::is_shared)
    }

    /// Returns each limit with its used units, its free units, and the units reserved for other
    /// clients.
    pub(super) fn usage(
        &mut self,
        now: Micros,
        advance: &[AdvanceBooking],
    ) -> impl Iterator<Item = (Limit, u64, u64, u64)> {
        self.owned().map(move |state| {
            (
                state.limit,
                state.rule.used_and_booked(now, advance),
                state.room(now, PermitTime::MOMENT, advance),
                state.reserved(now),
            )
        })
    }

    /// Returns for each limit the first moment, not before `from`, at which it allows `cost`.
    /// `Micros::MAX` if it never does.
    pub(super) fn first_slots(
        &mut self,
        from: Micros,
        cost: u32,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> impl Iterator<Item = Micros> {
        self.owned().map(move |state| {
            if cost > state.limit.largest_cost() {
                Micros::MAX
            } else {
                state.first_slot(from, u64::from(cost), open, advance)
            }
        })
    }

    /// Returns the first moment from which new limits would grant the same. The limits of a part are
    /// kept as long as they apply, because callers that use only other parts state them, too.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        let is_part = self.states.limiting().any(LimitState::is_pace);
        let moments = self.states.all().map(|state| {
            let from = state.fresh_from(advance);
            if is_part {
                from.max(state.in_force_until())
            } else {
                from
            }
        });
        moments.max().unwrap_or(0)
    }
}

/// Returns when limits that are stated at `now` count as stated. Those of a part count as stated later, so
/// that a process that uses other parts need not state them often.
fn stated_at(spec: &LimitSpec, now: Micros) -> Micros {
    match spec.lending() {
        Some(_) => now + STATED_AHEAD,
        None => now,
    }
}
