//! The ledger of a process that goes on with its fallback share, and the permits that it has to
//! charge the store with.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Share;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::key_map::Evict;
use crate::limit::{Charge, LimitSpec, Micros, UnusedPermits, micros_down, micros_up};
use crate::rng::jittered;
use crate::store::memory::{KeyLedger, book, usage};
use crate::store::{
    Demand, Lease, LeaseRequest, OwnedLeaseRequest, PeekRequest, Refusal, Source, Usage,
};

/// With so many entries of permits that the store does not know of, old ones are forgotten, and those with close slots
/// become one.
const MANY_UNCHARGED: usize = 400;

/// How many parts a window has. Units whose slots lie in the same part may be kept as one entry.
pub(super) const PARTS: u64 = 20;

/// How long the task waits between two calls for an idle key while the store fails. Jittered.
const PROBE_INTERVAL: Duration = Duration::from_millis(1000);

/// The state of a key while the store cannot be reached.
pub(super) struct StandaloneLedger {
    share: Share,
    /// The limits of the whole fleet, which the limiter stated last. The store is charged under them.
    pub(super) whole_spec: Arc<LimitSpec>,
    /// The limits of the share.
    pub(super) spec: Arc<LimitSpec>,
    ledger: KeyLedger,
    /// Permits that the process granted itself and the store does not know of, in the order of
    /// their slots.
    uncharged: VecDeque<UnusedPermits>,
    /// At this length, `uncharged` is shortened.
    shorten_at: usize,
    /// The units that the store has counted for this process: those that it had granted, and those that it was charged
    /// with since.
    granted: u64,
    /// When the store was last called, by the limiter or to charge it.
    called_at: Micros,
}

impl StandaloneLedger {
    /// Makes the ledger of a process with a share, after the store failed to reply to `request`. Recent use counts in
    /// `ledger`.
    pub(super) fn new(
        ledger: KeyLedger,
        share: Share,
        request: &OwnedLeaseRequest,
        now: Micros,
    ) -> Self {
        let whole_spec = request.spec.clone();
        let own = share.limits(*whole_spec.quota(), &whole_spec);
        StandaloneLedger {
            share,
            whole_spec,
            spec: Arc::new(own),
            ledger,
            uncharged: VecDeque::new(),
            shorten_at: MANY_UNCHARGED,
            granted: request.session.granted,
            called_at: now,
        }
    }

    pub(super) fn idle_from(&self) -> Option<Micros> {
        let last = self.uncharged.back();
        let counts_until = last.map_or(0, |owed| owed.slot + self.window());
        self.ledger.idle_from().max(Some(counts_until))
    }

    /// Returns the longest window, for which permits count.
    fn window(&self) -> Micros {
        micros_up(self.whole_spec.quota().longest_memory())
    }

    /// Notes that the limiter calls the store.
    pub(super) fn on_request(&mut self, now: Micros) {
        self.called_at = now;
    }

    /// Returns the units that the store has counted for this process. Those that it may still be charged with are not
    /// among them.
    pub(super) fn granted(&self) -> u64 {
        self.granted
    }

    /// Returns a request without demands if the store was not called lately.
    pub(super) fn own_request(&mut self, key: Key, now: Micros) -> Option<OwnedLeaseRequest> {
        let since_call = Duration::from_micros(now.saturating_sub(self.called_at));
        if since_call < jittered(PROBE_INTERVAL) {
            return None;
        }
        self.called_at = now;
        let request = LeaseRequest::new(key, &self.whole_spec, &[]);
        Some(OwnedLeaseRequest::new(&request))
    }

    /// Counts the charges of a request, and decides about its demands. What is counted and granted is
    /// charged to the store later.
    ///
    /// # Errors
    ///
    /// [`StoreError::AboveShare`] if each demand costs more than the share. Then no charge is counted,
    /// because the limiter repeats the charges of a call that failed.
    pub(super) fn lease(
        &mut self,
        request: &OwnedLeaseRequest,
        now: Instant,
    ) -> Result<Lease, StoreError> {
        self.follow(&request.spec);
        let largest = self.spec.quota().largest_cost();
        let is_above = |demand: &Demand| demand.cost > largest;
        if let Some(demand) = request.demands.first()
            && request.demands.iter().all(is_above)
        {
            return Err(StoreError::AboveShare {
                cost: demand.cost,
                share: largest,
            });
        }
        self.charge(&request.charges, now);
        // The first demand above the share is refused for good. The limiter asks again for those after it.
        let fitting = request
            .demands
            .iter()
            .take_while(|demand| !is_above(demand))
            .count();
        let own = LeaseRequest {
            spec: &self.spec,
            demands: &request.demands[..fitting],
            prefetch: 0,
            returns: &[],
            charges: &[],
            ..request.as_request()
        };
        let at = clock::micros(now);
        let booked = self
            .ledger
            .with(&self.spec, at, |ledger, now| book(ledger, now, &own));
        let Lease {
            grants,
            mut refused,
            ..
        } = booked;
        if fitting < request.demands.len() {
            refused = refused.or(Some(Refusal::NEVER));
        }
        for grant in grants.iter() {
            self.owe(grant.unused(Source::STANDALONE_INCARNATION), at);
        }
        Ok(Lease {
            grants,
            refused,
            source: Source::Standalone { granted_at: now },
            ..Lease::default()
        })
    }

    /// Takes in the limits that the limiter states. The process has the same share of them.
    fn follow(&mut self, whole_spec: &Arc<LimitSpec>) {
        if self.whole_spec != *whole_spec {
            self.whole_spec = whole_spec.clone();
            self.spec = Arc::new(self.share.limits(*whole_spec.quota(), whole_spec));
        }
    }

    /// Counts units that the process used without a permit. They are charged to the store later.
    pub(super) fn charge(&mut self, charges: &[Charge], now: Instant) {
        let now = clock::micros(now);
        let spec = &self.spec;
        self.ledger.with(spec, now, |ledger, _| {
            charges
                .iter()
                .for_each(|&charge| ledger.charge(spec, charge));
        });
        let slack = micros_up(self.whole_spec.transit_slack());
        for charge in charges {
            let slot = now.saturating_sub(micros_down(charge.age));
            let incarnation = Source::STANDALONE_INCARNATION;
            self.owe(
                UnusedPermits::new(slot, slot + slack, charge.units, incarnation),
                now,
            );
        }
    }

    /// Adds units that the store does not know of.
    fn owe(&mut self, owed: UnusedPermits, now: Micros) {
        let after = self
            .uncharged
            .partition_point(|other| other.slot <= owed.slot);
        self.uncharged.insert(after, owed);
        if self.uncharged.len() >= self.shorten_at {
            self.shorten_uncharged(now);
        }
    }

    /// Returns the usage of the share.
    pub(super) fn usage(&mut self, request: &PeekRequest, now: Instant) -> Usage {
        let spec = &self.spec;
        let usage = self.ledger.with(spec, clock::micros(now), |ledger, now| {
            usage(ledger, spec, request, now)
        });
        Usage {
            degraded: true,
            ..usage
        }
    }

    /// Takes back unused permits that the process granted itself.
    pub(super) fn take_back(&mut self, unused: UnusedPermits, now: Micros) {
        self.ledger
            .with(&self.spec, now, |ledger, _| ledger.take_back(unused));
        let mut units = unused.units;
        for owed in self
            .uncharged
            .iter_mut()
            .filter(|owed| owed.slot == unused.slot)
        {
            let back = units.min(owed.units);
            owed.units -= back;
            units -= back;
        }
        self.uncharged.retain(|owed| owed.units > 0);
    }

    /// Returns whether there are permits that the store does not know of.
    pub(super) fn owes_permits(&self) -> bool {
        !self.uncharged.is_empty()
    }

    /// Takes out the permits whose slots have come, the oldest first. The store is charged with them.
    pub(super) fn take_due(&mut self, now: Micros) -> Vec<UnusedPermits> {
        let due = self.uncharged.partition_point(|owed| owed.slot <= now);
        let due: Vec<_> = self.uncharged.drain(..due).collect();
        let units = due.iter().map(|owed| owed.units);
        self.granted = units.fold(self.granted, u64::saturating_add);
        due
    }

    /// Returns permits as charges in a few parts. Permits that are older than the longest window
    /// count no more.
    pub(super) fn charges(&self, owed: &[UnusedPermits], now: Micros) -> Vec<Charge> {
        let width = self.window() / Charge::MOST as u64 + 1;
        let mut charges: Vec<Charge> = Vec::new();
        let mut part = None;
        for owed in owed {
            let age = self.age(owed, now);
            if age >= self.window() {
                continue;
            }
            let age_of_part = age / width;
            // A permit that was valid for longer than those after it goes with them: counting it
            // later is safe.
            match charges
                .last_mut()
                .filter(|_| part.is_some_and(|part| age_of_part >= part))
            {
                Some(last) => {
                    last.units = last.units.saturating_add(owed.units);
                    last.age = last.age.min(Duration::from_micros(age));
                }
                None => {
                    charges.push(Charge::new(Duration::from_micros(age), owed.units));
                    part = Some(age_of_part);
                }
            }
        }
        charges
    }

    /// Returns how long ago permits were used, at least.
    fn age(&self, owed: &UnusedPermits, now: Micros) -> Micros {
        let slack = micros_up(self.whole_spec.transit_slack());
        now.saturating_sub(owed.stamp.saturating_sub(slack))
    }

    /// Forgets the entries that count no more, and merges those with close slots. A merged entry has the slot of
    /// its last part.
    fn shorten_uncharged(&mut self, now: Micros) {
        let near = (self.window() / PARTS).max(1);
        let uncharged = mem::take(&mut self.uncharged).into_iter();
        let counting = uncharged.filter(|owed| self.age(owed, now) < self.window());
        let mut merged: Vec<_> = counting.collect();
        merged.dedup_by(|owed, last| {
            let is_near = owed.slot / near == last.slot / near;
            if is_near {
                let units = last.units + owed.units;
                *last = UnusedPermits { units, ..*owed };
            }
            is_near
        });
        self.uncharged = merged.into();
        // Many entries may lie far ahead and far apart. A visit to all of them for each new one would be slow.
        self.shorten_at = MANY_UNCHARGED.max(2 * self.uncharged.len());
    }
}
