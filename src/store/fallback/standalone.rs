//! A process on its own: the ledger of its fallback share, and what it owes the store for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{LOOK, OFTEN, OTHERS};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::{Charge, Ledger, LimitSpec, Micros, UnusedPermits, micros_up};
use crate::rng::jittered;
use crate::store::memory::book;
use crate::store::{ClientSession, Demand, Grant, Lease, LeaseRequest, OwnedLeaseRequest, Refusal, Source};

/// The most entries of permits that the store does not know of. Beyond it, entries that lie close together are joined.
const MOST_OWED: usize = 400;

/// Entries are joined within this part of the longest window.
const PARTS: u64 = 20;

/// The state of a key while the store cannot be reached.
pub(super) struct StandaloneLedger {
    /// The limits of the share.
    pub(super) spec: Arc<LimitSpec>,
    ledger: Ledger,
    /// Permits that the process granted itself and the store does not know of, by their slots, in order.
    owed: VecDeque<UnusedPermits>,
    /// The longest window, for which permits count.
    window: Micros,
    /// When the store began to answer again.
    back: Option<Micros>,
    /// When the limiter last asked for permits.
    asked_at: Micros,
    /// What the limiter knew of the store then.
    session: ClientSession,
    /// When the store was last charged, or an attempt was made.
    tried: Micros,
    /// The limits that the store is charged under.
    all: Arc<LimitSpec>,
}

/// The stage of a process that goes on with its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The store cannot be reached.
    Alone,
    /// The store answers again. Other processes may not have charged it yet.
    Back,
    /// All processes have charged the store: the limit is shared again.
    Together,
}

impl StandaloneLedger {
    /// Makes the ledger of a process whose share of the quota is `own`. `ledger` holds what was used lately.
    pub(super) fn new(ledger: Ledger, own: LimitSpec, asked: &OwnedLeaseRequest, now: Micros) -> Self {
        StandaloneLedger {
            spec: Arc::new(own),
            ledger,
            owed: VecDeque::new(),
            window: micros_up(asked.spec.quota().longest_memory()),
            back: None,
            asked_at: now,
            session: asked.memory,
            tried: now,
            all: asked.spec.clone(),
        }
    }

    /// Returns from when the ledger can be dropped.
    pub(super) fn idle_from(&self) -> Micros {
        self.ledger.fresh_from().max(self.owed.back().map_or(0, |owed| owed.slot + self.window))
    }

    /// The limiter asks for permits, and knows `session` of the store. Returns whether the store answered the last call.
    pub(super) fn asks(&mut self, session: ClientSession, now: Micros) -> bool {
        self.asked_at = now;
        self.session = session;
        self.tried = now;
        self.back.is_some()
    }

    /// Returns a call without needs if the limiter has not asked lately, and whether the store answered the last call.
    pub(super) fn call_in_its_place(&mut self, key: Key, now: Micros) -> Option<(OwnedLeaseRequest, bool)> {
        let since = |moment: Micros| Duration::from_micros(now.saturating_sub(moment));
        // Once the store answers, the other processes rely on what this one uses being charged at once.
        let interval = if self.back.is_some() { OFTEN } else { jittered(LOOK) };
        if since(self.tried) < interval {
            return None;
        }
        self.tried = now;
        let session =
            ClientSession { since: self.session.since.saturating_add(since(self.asked_at)), ..self.session };
        Some((OwnedLeaseRequest::without_needs(key, &self.all, session), self.back.is_some()))
    }

    /// Books what is needed. The lease is a plan until it is granted.
    pub(super) fn book(&mut self, request: &LeaseRequest<'_>, now: Instant) -> Result<Lease, StoreError> {
        let at = clock::micros(now);
        let moment = self.ledger.advance(&self.spec, at);
        let largest = self.spec.quota().largest_cost();
        let demands: Vec<Demand> =
            request.demands.iter().copied().filter(|demand| demand.cost <= largest).collect();
        if let (None, Some(demand)) = (demands.first(), request.demands.first()) {
            return Err(StoreError::AboveShare { cost: demand.cost, share: largest });
        }
        let own = LeaseRequest { spec: &self.spec, demands: &demands, prefetch: 0, returns: &[], ..*request };
        let mut lease = book(&mut self.ledger, moment, &own);
        if demands.len() < request.demands.len() {
            lease.refused = lease.refused.or(Some(Refusal::NEVER));
        }
        Ok(lease)
    }

    /// Grants a plan. `reply` is the store's reply to the same call, if the store replied.
    pub(super) fn grant(&mut self, plan: Lease, now: Instant, reply: Option<&Lease>) -> Lease {
        for &Grant { cost, count, slot, stamp, .. } in plan.grants.iter() {
            let after = self.owed.partition_point(|other| other.slot <= slot);
            let units = u64::from(cost) * u64::from(count);
            self.owed.insert(
                after,
                UnusedPermits { slot, stamp, units, incarnation: Source::STANDALONE_INCARNATION },
            );
        }
        self.thin();
        let Lease { grants, refused, .. } = plan;
        match reply {
            Some(reply) => {
                let source = Source::StandaloneWithReply { granted_at: now };
                Lease { grants, refused, prefetched: None, recovering: None, source, ..reply.clone() }
            }
            None => {
                let source = Source::Standalone { granted_at: now };
                Lease { grants, refused, source, ..Lease::default() }
            }
        }
    }

    /// The store had answered, and fails again: the process grants the plan itself.
    pub(super) fn gone_again(&mut self, plan: Lease, now: Instant) -> Lease {
        self.back = None;
        self.grant(plan, now, None)
    }

    pub(super) fn look<T>(&mut self, now: Instant, look: impl FnOnce(&mut Ledger, Micros) -> T) -> T {
        let now = self.ledger.advance(&self.spec, clock::micros(now));
        look(&mut self.ledger, now)
    }

    /// Takes back a permit that the process granted itself.
    pub(super) fn take_back(&mut self, unused: UnusedPermits, now: Micros) {
        self.ledger.advance(&self.spec, now);
        self.ledger.take_back(unused);
        let mut units = unused.units;
        for owed in self.owed.iter_mut().filter(|owed| owed.slot == unused.slot) {
            let back = units.min(owed.units);
            owed.units -= back;
            units -= back;
        }
        self.owed.retain(|owed| owed.units > 0);
    }

    /// The store answers again, and is asked from now on. Gives up permits that lie ahead.
    pub(super) fn back(&mut self, now: Instant) -> Stage {
        let now = clock::micros(now);
        while let Some(ahead) = self.owed.back().copied().filter(|owed| owed.slot > now) {
            self.owed.pop_back();
            self.ledger.take_back(ahead);
        }
        let since = *self.back.get_or_insert(now);
        if now >= since + OTHERS { Stage::Together } else { Stage::Back }
    }

    /// Takes in the end of a charge of the store that no call of the limiter caused; `answered` states whether the store answered.
    /// Returns whether the limit is shared again. It is not while permits lie ahead; the limiter gives them back with its next call.
    pub(super) fn charged(&mut self, answered: bool, now: Instant) -> bool {
        if !answered {
            self.back = None;
            return false;
        }
        let now = clock::micros(now);
        let since = *self.back.get_or_insert(now);
        now >= since + OTHERS && self.owed.is_empty()
    }

    /// Takes out what can be charged: permits whose deadline has passed, in a few parts, the oldest first. They count as charged
    /// whatever the outcome of the call.
    pub(super) fn take_charges(&mut self, now: Instant) -> Vec<Charge> {
        let now = clock::micros(now);
        let slack = micros_up(self.all.transit_slack());
        let width = self.window / Charge::MOST as u64 + 1;
        let mut charges: Vec<Charge> = Vec::new();
        let (mut part, mut later) = (None, VecDeque::new());
        for owed in std::mem::take(&mut self.owed) {
            let end = owed.stamp.saturating_sub(slack);
            let age = now.saturating_sub(end);
            if end > now {
                later.push_back(owed);
            } else if age < self.window {
                let age_of_part = age / width;
                // A permit that was valid for longer than those after it goes with them: counting it later is safe.
                match charges.last_mut().filter(|_| part.is_some_and(|part| age_of_part >= part)) {
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
        }
        self.owed = later;
        charges
    }

    /// Joins entries that lie close together. They count from the last of them.
    fn thin(&mut self) {
        let near = (self.window / PARTS).max(1);
        while self.owed.len() > MOST_OWED {
            let before = self.owed.len();
            let mut joined: VecDeque<UnusedPermits> = VecDeque::new();
            for owed in self.owed.drain(..) {
                match joined.back_mut() {
                    Some(last) if owed.slot / near == last.slot / near => {
                        *last = UnusedPermits { units: last.units + owed.units, ..owed };
                    }
                    _ => joined.push_back(owed),
                }
            }
            self.owed = joined;
            if self.owed.len() == before {
                break;
            }
        }
    }
}
