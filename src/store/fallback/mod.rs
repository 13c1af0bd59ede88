//! A store decorator: while the store cannot be reached, each process goes on with a fallback share
//! of the limit.
//!
//! ```text
//!  together ──> the store fails: alone ──> it replies again: together
//! ```
//!
//! - *Together*: the process records what the store grants.
//! - *Alone*: the process has a ledger of its own with its share of every limit. The recorded
//!   grants count in it.
//!
//! When the store replies again, the process charges it with what it used alone, each unit once and
//! with its age. From then on the store decides. It may grant what other processes have used alone and
//! not charged yet: they do so within 1.5 s of the store's return. So a window in which the store comes
//! back may have the limit and the shares.
//!
//! The process never repeats a charge for what it used alone. So before it charges, it makes a call that books nothing, to
//! find out whether the store replies. What was charged stays in the record of grants: if the store
//! fails again, it counts in the share.
//!
//! In-flight limits have no shares: while the store cannot be reached, no in-flight slot is
//! granted.

mod history;
mod idle_keys;
mod share;
mod standalone;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use smallvec::SmallVec;

use super::memory::usage;
use super::{
    Lease, LeaseRequest, LimitSpec, OwnedLeaseRequest, PeekRequest, Source, Store, StoreError,
    StoreReply, UnusedPermits, Usage, label,
};
use crate::clock;
use crate::events;
use crate::key::Key;
use crate::key_map::{Full, KeyMap};
use crate::limit::Charge;
use history::GrantHistory;
pub(crate) use share::Share;
use standalone::StandaloneLedger;

/// A store with a fallback.
pub(crate) struct FallbackStore(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    /// The share of a process that is new, or that the store granted nothing lately. `None` if such a process gets
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

    /// Returns how many keys have a ledger of their own, because the store cannot be reached.
    pub(crate) fn keys_alone(&self) -> usize {
        self.0.keys_alone()
    }
}

/// Who decides about a request of a process that has been alone.
enum Decision {
    /// The process has decided.
    Alone(Result<Box<Lease>, StoreError>),
    /// The store, which is charged with this.
    Together(Vec<Charge>),
}

/// Returns whether `error` means that the store cannot be reached, so that the process goes on
/// alone.
fn is_unreachable(error: &StoreError) -> bool {
    !matches!(error, StoreError::Full { .. } | StoreError::Unsupported(_))
}

impl Inner {
    /// Returns how many keys have a ledger of their own.
    fn keys_alone(&self) -> usize {
        let mut alone = 0;
        self.histories.for_each(|_, history| {
            alone += usize::from(history.standalone().is_some());
        });
        alone
    }

    /// Runs `with` on the history of a key. Makes it if there is none.
    ///
    /// # Errors
    ///
    /// [`Full`] if there is no room for one more key.
    fn with_history<R>(
        &self,
        key: Key,
        now: Instant,
        with: impl FnOnce(&mut GrantHistory) -> R,
    ) -> Result<R, Full> {
        let (now, make) = (clock::micros(now), GrantHistory::default);
        self.histories.enter(key, now, make, |_, _| (), with)
    }

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
                let _ = self.with_history(request.key, now, record);
                Ok(lease)
            }
            Err(error) if is_unreachable(&error) => {
                // Other calls of the key may have failed before, and have begun the ledger.
                let mut begun = None;
                let go_alone = |history: &mut GrantHistory| {
                    if history.standalone().is_none() {
                        let ledger = history.start_standalone(request, now, self.share)?;
                        begun = Some(*ledger.spec.quota());
                    }
                    Some(history.standalone()?.lease(request, now))
                };
                let lease = self.with_history(request.key, now, go_alone);
                let lease = lease.ok().flatten();
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

    /// Requests permits while the process has a ledger of its own.
    ///
    /// 1. A call without demands finds out whether the store replies.
    /// 2. If not, the ledger of the process grants.
    /// 3. Otherwise the ledger is dropped. The store gets the request of the limiter, and is charged
    ///    with what the process used alone. If the store has lost its state, the request waits, as it does
    ///    without an outage.
    async fn lease_alone(
        self: &Arc<Self>,
        mut request: OwnedLeaseRequest,
    ) -> Result<Lease, StoreError> {
        let probed = match self.probe(&request).await {
            Ok(reply) => Some(reply),
            Err(error) if is_unreachable(&error) => None,
            Err(error) => return Err(error),
        };
        let now = clock::now();
        let decide = |history: &mut GrantHistory| {
            let ledger = history.standalone()?;
            if probed.is_none() {
                let lease = ledger.lease(&request, now);
                return Some(Decision::Alone(lease.map(Box::new)));
            }
            ledger.charge(&request.charges, now);
            let owed = history.take_charges(now);
            // The permits whose slots lie ahead are given up.
            history.end_standalone();
            Some(Decision::Together(owed))
        };
        let was_alone = match self.histories.find(request.key, decide).flatten() {
            Some(Decision::Alone(lease)) => {
                // The task may have ended with the runtime of the caller that started it.
                idle_keys::keep_charging(self);
                return lease.map(|lease| *lease);
            }
            Some(Decision::Together(owed)) => {
                events::together(&label(&*self.store, request.key, None));
                request.charges = owed;
                true
            }
            // Another call has ended it meanwhile.
            None => false,
        };
        if let Some(reply) = probed {
            request.follow(&reply, now);
        }
        request.sent = now;
        let reply = self.store.lease(request.as_request()).arrives().await;
        if was_alone {
            // They are in the record of grants, and are not repeated.
            request.charges.clear();
        }
        self.on_reply(&request, reply)
    }

    /// Calls the store without demands, to find out whether it replies.
    async fn probe(&self, request: &OwnedLeaseRequest) -> Result<Lease, StoreError> {
        let probe = LeaseRequest {
            demands: &[],
            prefetch: 0,
            remaining: None,
            returns: &[],
            charges: &[],
            ..request.as_request()
        };
        self.store.lease(probe).arrives().await
    }

    /// Takes back unused permits, each in the ledger that granted it. Returns those that the store granted.
    fn take_back(&self, key: Key, unused: &[UnusedPermits]) -> SmallVec<[UnusedPermits; 4]> {
        let now = clock::micros(clock::now());
        let take_back = |history: &mut GrantHistory| {
            unused
                .iter()
                .for_each(|unused| history.take_back(*unused, now));
        };
        if !unused.is_empty() {
            self.histories.find(key, take_back);
        }
        let of_store = |unused: &&UnusedPermits| !Source::granted_standalone(unused);
        unused.iter().filter(of_store).copied().collect()
    }
}

impl Store for FallbackStore {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.0.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let inner = self.0.clone();
        let request = LeaseRequest {
            returns: &inner.take_back(request.key, request.returns),
            ..request
        };
        let owned = OwnedLeaseRequest::new(&request);
        let on_request = |history: &mut GrantHistory| {
            let ledger = history.standalone()?;
            ledger.on_request(owned.session, clock::micros(owned.sent));
            Some(())
        };
        let is_alone = inner.histories.find(owned.key, on_request).flatten();
        if is_alone.is_some() {
            return StoreReply::Pending(Box::pin(async move { inner.lease_alone(owned).await }));
        }
        let reply = inner.store.lease(request);
        reply.then(move |reply| StoreReply::Ready(inner.on_reply(&owned, reply)))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        let of_store = self.0.take_back(key, unused);
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
        let peeked = self.0.store.peek(request);
        peeked.then(move |usage| StoreReply::Ready(usage.or_else(own)))
    }
}
