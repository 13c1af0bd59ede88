//! A store decorator: while the store cannot be reached, each process goes on with a fallback share
//! of the limit.
//!
//! ```text
//!  together ──> the store fails: alone ──> it replies again: back ──> 2.5 s later: together
//! ```
//!
//! - *Together*: the process records what the store grants.
//! - *Alone*: the process has a ledger of its own with its share of every limit. The recorded
//!   grants count in it.
//! - *Back*: the process charges the store with what it used alone, each unit once and with its
//!   age. It requests no more than its share of the store: what it plans is booked in its own ledger
//!   and in the store, and permits that come back free both. After 2.5 s all processes have done so,
//!   and the limit is shared again.
//!
//! The process never repeats a charge. So before the first one, it makes a call that books nothing,
//! to find out whether the store replies.
//!
//! In-flight limits have no shares: while the store cannot be reached, no in-flight slot is
//! granted.

mod history;
mod idle_keys;
mod plan;
mod planned;
mod share;
mod standalone;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use smallvec::SmallVec;

use super::memory::usage;
use super::{
    ClientSession, Grants, Lease, LeaseRequest, LimitSpec, OwnedLeaseRequest, PeekRequest, Source,
    Store, StoreError, StoreReply, UnusedPermits, Usage, label,
};
use crate::clock;
use crate::events;
use crate::key::Key;
use crate::key_map::KeyMap;
use history::GrantHistory;
use plan::{granted_demands, no_earlier};
pub(crate) use share::Share;
use standalone::{Stage, StandaloneLedger};

/// A store with a fallback.
pub(crate) struct FallbackStore(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    /// The share of a process that the store granted nothing lately. `None` if such a process gets
    /// no share.
    share: Option<Share>,
    histories: KeyMap<GrantHistory>,
    /// Whether a task charges the store for idle keys.
    is_charging: AtomicBool,
}

impl FallbackStore {
    /// Decorates `store`. The grants of up to `max_keys` keys are recorded.
    pub(crate) fn new(store: Arc<dyn Store>, share: Option<Share>, max_keys: usize) -> Self {
        FallbackStore(Arc::new(Inner {
            store,
            share,
            histories: KeyMap::new(max_keys),
            is_charging: AtomicBool::new(false),
        }))
    }
}

/// Returns whether `error` means that the store cannot be reached, so that the process goes on
/// alone.
fn is_unreachable(error: &StoreError) -> bool {
    !matches!(error, StoreError::Full { .. } | StoreError::Unsupported(_))
}

impl Inner {
    /// Takes in the store's reply to a request while the limit is shared. Returns what the limiter
    /// gets for it.
    fn on_reply(
        self: &Arc<Self>,
        request: &OwnedLeaseRequest,
        reply: Result<Lease, StoreError>,
    ) -> Result<Lease, StoreError> {
        let now = clock::now();
        match reply {
            Ok(lease) => {
                let record = |history: &mut GrantHistory| {
                    history.record(&lease, &request.spec, request.sent, now)
                };
                // If there is no room for one more key, its grants are not recorded.
                let _ = self.histories.enter(
                    request.key,
                    clock::micros(now),
                    GrantHistory::default,
                    |_, _| (),
                    record,
                );
                Ok(lease)
            }
            Err(error) if is_unreachable(&error) => {
                // Other calls of the key may have failed before, and have begun the ledger.
                let mut begun = None;
                let go_alone = |history: &mut GrantHistory| {
                    if let Some(ledger) = history.standalone() {
                        ledger.store_failed();
                    } else {
                        let ledger = history.start_standalone(request, now, self.share)?;
                        begun = Some(*ledger.spec.quota());
                    }
                    let ledger = history.standalone()?;
                    ledger.charge(&request.charges, now);
                    let plan = ledger.book(&request.request(&request.demands), now);
                    Some(plan.map(|plan| ledger.grant(plan, now, None)))
                };
                let lease = self
                    .histories
                    .enter(
                        request.key,
                        clock::micros(now),
                        GrantHistory::default,
                        |_, _| (),
                        go_alone,
                    )
                    .ok();
                let lease = lease.flatten();
                if let Some(share) = begun {
                    events::alone(&label(&*self.store, request.key, None), &share, &error);
                }
                if lease.is_some() {
                    idle_keys::keep_charging(self);
                }
                lease.unwrap_or(Err(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Requests permits while the process has a ledger of its own. `is_back` states whether the
    /// store replied to the last call.
    ///
    /// 1. If the store did not reply to the last call, this call probes it first.
    /// 2. If the store does not reply, or recovers a lost state, the ledger of the process grants.
    /// 3. If the store replies, this call charges it, and requests no more than the ledger of the
    ///    process would grant. This plan is granted without the store if the store fails now.
    /// 4. Once the limit is shared again, the ledger is dropped, and the store gets the request of
    ///    the limiter as it is.
    async fn lease_alone(
        self: &Arc<Self>,
        mut request: OwnedLeaseRequest,
        is_back: bool,
    ) -> Result<Lease, StoreError> {
        let charges = std::mem::take(&mut request.charges);
        let probed = match is_back {
            true => None,
            false => match self.probe(&request).await {
                Ok(reply) => Some(reply),
                Err(error) if is_unreachable(&error) => None,
                Err(error) => return Err(error),
            },
        };
        let now = clock::now();
        let stage = self.histories.find(request.key, |history| {
            let ledger = history.standalone()?;
            ledger.charge(&charges, now);
            if !is_back
                && probed
                    .as_ref()
                    .is_none_or(|reply| reply.recovering.is_some())
            {
                let plan = ledger.book(&request.request(&request.demands), now);
                return Some((
                    Stage::Alone,
                    plan.map(|plan| ledger.grant(plan, now, probed.as_ref())),
                ));
            }
            let stage = ledger.on_reply(now);
            if stage == Stage::Together {
                request.charges = ledger.take_charges(now);
                history.end_standalone();
                return Some((stage, Ok(Lease::default())));
            }
            let plan = ledger.book(&request.request(&request.demands), now);
            let plan = plan.map(|plan| ledger.refuse_until_shared(plan, now));
            // A request above the share of this process makes no call that could carry them.
            if plan.is_ok() {
                request.charges = ledger.take_charges(now);
            }
            Some((stage, plan))
        });
        let (stage, plan) = match stage.flatten() {
            Some((stage, plan)) => {
                if stage == Stage::Together {
                    events::together(&label(&*self.store, request.key, None));
                }
                (stage, plan?)
            }
            None => {
                request.charges = charges;
                (Stage::Together, Lease::default())
            }
        };
        if stage == Stage::Alone {
            return Ok(plan);
        }
        if let Some(Lease {
            incarnation,
            writes,
            now: seen,
            ..
        }) = probed
        {
            let trip = now.saturating_duration_since(request.sent);
            request.session = ClientSession {
                incarnation,
                writes,
                seen,
                since: Duration::ZERO,
                trip,
                ..request.session
            };
        }
        if !is_back {
            request.returns.clear();
        }
        request.sent = now;
        if stage == Stage::Back {
            request.prefetch = 0;
            request.demands = granted_demands(&request.demands, &plan);
            // The store may grant an earlier slot than the plan. The permit then has to be valid
            // until after the slot of the plan.
            let last = plan
                .grants
                .iter()
                .map(|grant| grant.wait)
                .max()
                .unwrap_or_default();
            request.validity = request.validity.saturating_add(last);
        }
        let reply = self
            .store
            .lease(request.request(&request.demands))
            .arrives()
            .await;
        if stage == Stage::Back
            && let Err(error) = &reply
            && is_unreachable(error)
        {
            let now = clock::now();
            let grant = |history: &mut GrantHistory| {
                Some(history.standalone()?.grant_after_failure(plan, now))
            };
            return self
                .histories
                .find(request.key, grant)
                .flatten()
                .ok_or(StoreError::Lost);
        }
        let mut reply = self.on_reply(&request, reply);
        if stage == Stage::Back {
            let mut granted = Grants::default();
            if let Ok(lease) = &mut reply {
                lease.grants = no_earlier(&lease.grants, &plan.grants);
                granted.clone_from(&lease.grants);
            }
            let note = |history: &mut GrantHistory| {
                if let Some(ledger) = history.standalone() {
                    ledger.store_granted(&plan, &granted, clock::now());
                }
            };
            self.histories.find(request.key, note);
        }
        let lease = reply?;
        Ok(Lease {
            refused: lease.refused.or(plan.refused),
            ..lease
        })
    }

    /// Calls the store without demands, to find out whether it replies and has its state.
    fn probe(
        &self,
        request: &OwnedLeaseRequest,
    ) -> impl Future<Output = Result<Lease, StoreError>> + use<> {
        let probe = LeaseRequest {
            prefetch: 0,
            remaining: None,
            returns: &[],
            ..request.request(&[])
        };
        self.store.lease(probe).arrives()
    }

    /// Takes back unused permits, each in the ledger that granted it.
    fn take_back(&self, key: Key, unused: &[UnusedPermits]) {
        let now = clock::micros(clock::now());
        self.histories.find(key, |history| {
            unused
                .iter()
                .for_each(|unused| history.take_back(*unused, now));
        });
    }
}

impl Store for FallbackStore {
    crate::delegate_store!(self => *self.0.store; implements lease, give_back, peek);

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let inner = &self.0;
        let mut owned = OwnedLeaseRequest::new(&request);
        owned
            .returns
            .retain(|unused| !Source::granted_standalone(unused));
        if !request.returns.is_empty() {
            inner.take_back(request.key, request.returns);
        }
        let on_request = |history: &mut GrantHistory| {
            Some(
                history
                    .standalone()?
                    .on_request(owned.session, clock::micros(owned.sent)),
            )
        };
        if let Some(is_back) = inner.histories.find(owned.key, on_request).flatten() {
            let inner = inner.clone();
            return StoreReply::Pending(Box::pin(async move {
                inner.lease_alone(owned, is_back).await
            }));
        }
        let now = LeaseRequest {
            joint: request.joint,
            ..owned.request(&owned.demands)
        };
        match inner.store.lease(now) {
            StoreReply::Ready(reply) => StoreReply::Ready(inner.on_reply(&owned, reply)),
            StoreReply::Pending(reply) => {
                let inner = inner.clone();
                StoreReply::Pending(Box::pin(async move { inner.on_reply(&owned, reply.await) }))
            }
        }
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.0.take_back(key, unused);
        let of_store = unused
            .iter()
            .filter(|unused| !Source::granted_standalone(unused));
        let of_store: SmallVec<[UnusedPermits; 4]> = of_store.copied().collect();
        if !of_store.is_empty() {
            self.0.store.give_back(key, spec, &of_store);
        }
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        let inner = self.0.clone();
        let asked = request.clone();
        let own = move |error| {
            let read = |ledger: &mut StandaloneLedger| Usage {
                degraded: true,
                ..ledger.read(clock::now(), |ledger, spec, now| {
                    usage(ledger, spec, &asked, now)
                })
            };
            inner
                .histories
                .find(asked.key, |history| history.standalone().map(read))
                .flatten()
                .ok_or(error)
        };
        match self.0.store.peek(request) {
            StoreReply::Ready(usage) => StoreReply::Ready(usage.or_else(own)),
            StoreReply::Pending(usage) => {
                StoreReply::Pending(Box::pin(async move { usage.await.or_else(own) }))
            }
        }
    }
}
