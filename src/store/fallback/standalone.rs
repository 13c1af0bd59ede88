//! The ledger of a process that goes on with its fallback share, and the permits that it has to
//! charge the store with.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::idle_keys::CHARGE_INTERVAL;
use super::planned::{OfShare, PlannedPermits};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::{Charge, Ledger, LimitSpec, Micros, UnusedPermits, micros_down, micros_up};
use crate::rng::jittered;
use crate::store::memory::book;
use crate::store::{
    ClientSession, Demand, Grant, Lease, LeaseRequest, OwnedLeaseRequest, Refusal, Source,
};

/// The most entries of permits that the store does not know of. If there are more, entries with
/// close slots are merged.
const MOST_UNCHARGED: usize = 400;

/// Entries are merged if their slots lie in the same part of the longest window, which has this
/// many parts.
const PARTS: u64 = 20;

/// How long the task waits between two calls for an idle key while the store fails. Jittered.
const PROBE_INTERVAL: Duration = Duration::from_millis(1000);

/// For how long a process uses only its share after the store replies again. The other processes
/// call the store once a second, and so charge it within this time.
const SWITCH_TIME: Micros = 2_500_000;

/// The state of a key while the store cannot be reached.
pub(super) struct StandaloneLedger {
    /// The limits of the share.
    pub(super) spec: Arc<LimitSpec>,
    ledger: Ledger,
    /// Permits that the process granted itself and the store does not know of, in the order of
    /// their slots.
    uncharged: VecDeque<UnusedPermits>,
    /// The permits of the store that count in the ledger too.
    planned: PlannedPermits,
    /// The longest window, for which permits count.
    window: Micros,
    /// When the store began to reply again. `None` while it cannot be reached.
    back: Option<Micros>,
    /// When the limiter last requested permits.
    requested_at: Micros,
    /// What the limiter knew of the store then.
    session: ClientSession,
    /// When the store was last called, by the limiter or to charge it.
    called_at: Micros,
    /// The limits of the whole fleet, under which the store is charged.
    whole_spec: Arc<LimitSpec>,
}

/// The stage of a process that goes on with its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The store cannot be reached.
    Alone,
    /// The store replies again. Other processes may not have charged it yet.
    Back,
    /// All processes have charged the store, and the limit is shared again.
    Together,
}

impl StandaloneLedger {
    /// Makes the ledger of a process whose share of the quota is `own`, after the store failed to
    /// reply to `request`. Recent use counts in `ledger`.
    pub(super) fn new(
        ledger: Ledger,
        own: LimitSpec,
        request: &OwnedLeaseRequest,
        now: Micros,
    ) -> Self {
        StandaloneLedger {
            spec: Arc::new(own),
            ledger,
            uncharged: VecDeque::new(),
            planned: PlannedPermits::default(),
            window: micros_up(request.spec.quota().longest_memory()),
            back: None,
            requested_at: now,
            session: request.session,
            called_at: now,
            whole_spec: request.spec.clone(),
        }
    }

    /// Returns from when the ledger can be dropped.
    pub(super) fn idle_from(&self) -> Micros {
        self.ledger.fresh_from().max(
            self.uncharged
                .back()
                .map_or(0, |owed| owed.slot + self.window),
        )
    }

    /// Notes that the store failed to reply.
    pub(super) fn store_failed(&mut self) {
        self.back = None;
    }

    /// Notes that the limiter requests permits, and knows `session` of the store. Returns whether
    /// the store replied to the last call.
    pub(super) fn on_request(&mut self, session: ClientSession, now: Micros) -> bool {
        self.requested_at = now;
        self.session = session;
        self.called_at = now;
        self.back.is_some()
    }

    /// Returns a request without demands if the store was not called lately, and whether the store
    /// replied to the last call.
    pub(super) fn own_request(
        &mut self,
        key: Key,
        now: Micros,
    ) -> Option<(OwnedLeaseRequest, bool)> {
        let since = |moment: Micros| Duration::from_micros(now.saturating_sub(moment));
        // Once the store replies, other processes rely on what this process charges, so it charges
        // at once.
        let interval = if self.back.is_some() {
            CHARGE_INTERVAL
        } else {
            jittered(PROBE_INTERVAL)
        };
        if since(self.called_at) < interval {
            return None;
        }
        self.called_at = now;
        let session = ClientSession {
            since: self.session.since.saturating_add(since(self.requested_at)),
            ..self.session
        };
        Some((
            OwnedLeaseRequest::without_demands(key, &self.whole_spec, session),
            self.back.is_some(),
        ))
    }

    /// Books the demands of a request. The lease is only a *plan* until
    /// [`grant`](StandaloneLedger::grant) grants it.
    pub(super) fn book(
        &mut self,
        request: &LeaseRequest<'_>,
        now: Instant,
    ) -> Result<Lease, StoreError> {
        let at = clock::micros(now);
        let moment = self.ledger.advance(&self.spec, at);
        let largest = self.spec.quota().largest_cost();
        let demands: Vec<Demand> = request
            .demands
            .iter()
            .copied()
            .filter(|demand| demand.cost <= largest)
            .collect();
        if let (None, Some(demand)) = (demands.first(), request.demands.first()) {
            return Err(StoreError::AboveShare {
                cost: demand.cost,
                share: largest,
            });
        }
        let own = LeaseRequest {
            spec: &self.spec,
            demands: &demands,
            prefetch: 0,
            returns: &[],
            // `charge` has counted them.
            charges: &[],
            ..*request
        };
        let mut lease = book(&mut self.ledger, moment, &own);
        if demands.len() < request.demands.len() {
            lease.refused = lease.refused.or(Some(Refusal::NEVER));
        }
        Ok(lease)
    }

    /// Counts units that the process used without a permit. They are charged to the store later.
    pub(super) fn charge(&mut self, charges: &[Charge], now: Instant) {
        let now = clock::micros(now);
        self.ledger.advance(&self.spec, now);
        let slack = micros_up(self.whole_spec.transit_slack());
        for &charge in charges {
            self.ledger.charge(&self.spec, charge);
            let slot = now.saturating_sub(micros_down(charge.age));
            self.owe(UnusedPermits {
                slot,
                stamp: slot + slack,
                units: charge.units,
                incarnation: Source::STANDALONE_INCARNATION,
            });
        }
    }

    /// Adds units that the store does not know of.
    fn owe(&mut self, owed: UnusedPermits) {
        let after = self
            .uncharged
            .partition_point(|other| other.slot <= owed.slot);
        self.uncharged.insert(after, owed);
        self.merge();
    }

    /// Grants a plan. The permits are charged to the store later. `reply` is the store's reply to
    /// the same call, if there is one.
    pub(super) fn grant(&mut self, plan: Lease, now: Instant, reply: Option<&Lease>) -> Lease {
        for &Grant {
            cost,
            count,
            slot,
            stamp,
            ..
        } in plan.grants.iter()
        {
            self.owe(UnusedPermits {
                slot,
                stamp,
                units: u64::from(cost) * u64::from(count),
                incarnation: Source::STANDALONE_INCARNATION,
            });
        }
        let Lease {
            grants, refused, ..
        } = plan;
        match reply {
            Some(reply) => {
                let source = Source::StandaloneWithReply { granted_at: now };
                Lease {
                    grants,
                    refused,
                    prefetched: None,
                    recovering: None,
                    source,
                    ..reply.clone()
                }
            }
            None => {
                let source = Source::Standalone { granted_at: now };
                Lease {
                    grants,
                    refused,
                    source,
                    ..Lease::default()
                }
            }
        }
    }

    /// Grants a plan after the store has failed again, although it replied to the call before.
    pub(super) fn grant_after_failure(&mut self, plan: Lease, now: Instant) -> Lease {
        self.store_failed();
        self.grant(plan, now, None)
    }

    /// Returns what `read` returns of the ledger.
    pub(super) fn read<T>(
        &mut self,
        now: Instant,
        read: impl FnOnce(&mut Ledger, &LimitSpec, Micros) -> T,
    ) -> T {
        let now = self.ledger.advance(&self.spec, clock::micros(now));
        read(&mut self.ledger, &self.spec, now)
    }

    /// Takes back unused permits that the process granted itself.
    pub(super) fn take_back(&mut self, unused: UnusedPermits, now: Micros) {
        self.ledger.advance(&self.spec, now);
        self.ledger.take_back(unused);
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

    /// Notes what the store granted of a plan. The rest of the plan does not count.
    pub(super) fn store_granted(&mut self, plan: &Lease, granted: &[Grant], now: Instant) {
        let rest = self.planned.add(&plan.grants, granted);
        self.uncount(rest, clock::micros(now));
    }

    /// Takes back unused permits that the store granted. They count no more in the share.
    pub(super) fn take_back_planned(&mut self, unused: &UnusedPermits, now: Micros) {
        let planned = self.planned.take(unused);
        self.uncount(planned, now);
    }

    fn uncount(&mut self, permits: OfShare, now: Micros) {
        self.ledger.advance(&self.spec, now);
        for unused in permits {
            self.ledger.take_back(unused);
        }
    }

    /// Notes that the store replies. From now on the store grants permits. Gives up the permits
    /// that this process granted itself and whose slots lie ahead.
    pub(super) fn on_reply(&mut self, now: Instant) -> Stage {
        let now = clock::micros(now);
        while let Some(ahead) = self
            .uncharged
            .back()
            .copied()
            .filter(|owed| owed.slot > now)
        {
            self.uncharged.pop_back();
            self.ledger.take_back(ahead);
        }
        let since = *self.back.get_or_insert(now);
        if now >= since + SWITCH_TIME {
            Stage::Together
        } else {
            Stage::Back
        }
    }

    /// Bounds the wait of a plan's refusal by the end of the switch, because the store decides from
    /// then on. The share may be used up for much longer.
    pub(super) fn refuse_until_shared(&self, plan: Lease, now: Instant) -> Lease {
        let now = clock::micros(now);
        let shared_at = self.back.unwrap_or(now) + SWITCH_TIME;
        let longest = Duration::from_micros(shared_at.saturating_sub(now));
        let refused = plan.refused.map(|refusal| Refusal {
            wait: Some(refusal.wait.map_or(longest, |wait| wait.min(longest))),
            ..refusal
        });
        Lease { refused, ..plan }
    }

    /// Takes in the end of a charge that no request of the limiter caused. Returns whether the
    /// limit is shared again.
    ///
    /// The limit is not shared while permits lie ahead. The limiter gives them back with its next
    /// call.
    pub(super) fn on_charged(&mut self, has_reply: bool, now: Instant) -> bool {
        if !has_reply {
            self.back = None;
            return false;
        }
        let now = clock::micros(now);
        let since = *self.back.get_or_insert(now);
        now >= since + SWITCH_TIME && self.uncharged.is_empty()
    }

    /// Takes out the permits whose deadline has passed, as charges in a few parts, the oldest
    /// first. They count as charged whatever the outcome of the call is.
    pub(super) fn take_charges(&mut self, now: Instant) -> Vec<Charge> {
        let now = clock::micros(now);
        let slack = micros_up(self.whole_spec.transit_slack());
        let width = self.window / Charge::MOST as u64 + 1;
        let mut charges: Vec<Charge> = Vec::new();
        let mut part = None;
        let mut later = VecDeque::new();
        for owed in std::mem::take(&mut self.uncharged) {
            let end = owed.stamp.saturating_sub(slack);
            let age = now.saturating_sub(end);
            if end > now {
                later.push_back(owed);
            } else if age < self.window {
                let age_of_part = age / width;
                // A permit that was valid for longer than those after it goes with them: counting
                // it later is safe.
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
        }
        self.uncharged = later;
        charges
    }

    /// Merges entries with close slots. A merged entry has the slot of its last part.
    fn merge(&mut self) {
        let near = (self.window / PARTS).max(1);
        while self.uncharged.len() > MOST_UNCHARGED {
            let before = self.uncharged.len();
            let mut merged: VecDeque<UnusedPermits> = VecDeque::new();
            for owed in self.uncharged.drain(..) {
                match merged.back_mut() {
                    Some(last) if owed.slot / near == last.slot / near => {
                        *last = UnusedPermits {
                            units: last.units + owed.units,
                            ..owed
                        };
                    }
                    _ => merged.push_back(owed),
                }
            }
            self.uncharged = merged;
            if self.uncharged.len() == before {
                break;
            }
        }
    }
}
