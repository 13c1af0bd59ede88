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

use super::{
    Lease, LeaseRequest, LimitSpec, OwnedLeaseRequest, PeekRequest, Source, Store, StoreError,
    StoreReply, UnusedPermits, Usage, label,
};
use crate::clock;
use crate::events;
use crate::key::Key;
use crate::key_map::{Full, KeyMap};
use history::GrantHistory;
pub(crate) use share::Share;
use standalone::StandaloneLedger;

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

    /// Runs `with` on the process's own ledger of a key. `None` if the key has none.
    fn with_standalone<R>(
        &self,
        key: Key,
        with: impl FnOnce(&mut StandaloneLedger) -> R,
    ) -> Option<R> {
        self.histories
            .find(key, |history| history.standalone().map(with))
            .flatten()
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
                // If there is no room for one more key, its grants are not recorded.
                let _ = self.with_history(request.key, now, |history| {
                    history.record(&lease, &request.spec, request.sent, now);
                });
                Ok(lease)
            }
            Err(error) if is_unreachable(&error) => self.go_alone(request, error, now),
            Err(error) => Err(error),
        }
    }

    /// Decides about a request with the process's own ledger, because the store failed with `error`.
    fn go_alone(
        self: &Arc<Self>,
        request: &OwnedLeaseRequest,
        error: StoreError,
        now: Instant,
    ) -> Result<Lease, StoreError> {
        // Other calls of the key may have failed before, and have begun the ledger.
        let mut begun = None;
        let decided = self.with_history(request.key, now, |history| {
            if history.standalone().is_none() {
                let ledger = history.start_standalone(request, now, self.share)?;
                begun = Some(*ledger.spec.quota());
            }
            Some(history.standalone()?.lease(request, now))
        });
        if let Some(share) = begun {
            events::alone(&label(&*self.store, request.key, None), &share, &error);
        }
        let Ok(Some(lease)) = decided else {
            return Err(error);
        };
        idle_keys::keep_charging(self);
        lease
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
        let probed = self.probe(&mut request).await;
        let now = clock::now();
        // Another call may have ended the ledger meanwhile.
        let mut was_alone = false;
        match probed {
            Ok(()) => {
                let owed = self.histories.find(request.key, |history| {
                    history.end_with_charges(&request.charges, now)
                });
                if let Some(owed) = owed.flatten() {
                    was_alone = true;
                    events::together(&label(&*self.store, request.key, None));
                    request.charges = owed;
                }
            }
            Err(error) if is_unreachable(&error) => {
                let lease = self.with_standalone(request.key, |ledger| ledger.lease(&request, now));
                if let Some(lease) = lease {
                    // The task may have ended with the runtime of the caller that started it.
                    idle_keys::keep_charging(self);
                    return lease;
                }
            }
            Err(error) => return Err(error),
        }
        let reply = self.store.lease(request.as_request()).arrives().await;
        if was_alone {
            // They are in the record of grants, and are not repeated.
            request.charges.clear();
        }
        self.on_reply(&request, reply)
    }

    /// Calls the store without demands, to find out whether it replies. The request follows the reply: if the store has
    /// lost its state, only the first call states which units it had granted.
    async fn probe(&self, request: &mut OwnedLeaseRequest) -> Result<(), StoreError> {
        let sent = clock::now();
        let known = request.session;
        let session = self
            .histories
            .find(request.key, |history| history.session(known, sent));
        (request.session, request.sent) = (session.unwrap_or(known), sent);
        let probe = LeaseRequest {
            demands: &[],
            prefetch: 0,
            remaining: None,
            returns: &[],
            charges: &[],
            ..request.as_request()
        };
        let reply = self.store.lease(probe).arrives().await;
        let now = clock::now();
        if let Ok(lease) = &reply {
            self.histories.find(request.key, |history| {
                history.record(lease, &request.spec, sent, now);
            });
            request.follow(lease, now);
        }
        request.sent = now;
        reply.map(drop)
    }

    /// Takes back unused permits, each in the ledger that granted it. Returns those that the store granted.
    fn take_back(&self, key: Key, unused: &[UnusedPermits]) -> SmallVec<[UnusedPermits; 4]> {
        if !unused.is_empty() {
            let now = clock::micros(clock::now());
            self.histories.find(key, |history| {
                for unused in unused {
                    history.take_back(*unused, now);
                }
            });
        }
        unused
            .iter()
            .filter(|unused| !Source::granted_standalone(unused))
            .copied()
            .collect()
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
        let mut session = request.session;
        let is_alone = inner.histories.find(owned.key, |history| {
            session = history.session(session, owned.sent);
            let ledger = history.standalone();
            ledger
                .map(|ledger| ledger.on_request(clock::micros(owned.sent)))
                .is_some()
        });
        if is_alone == Some(true) {
            return StoreReply::Pending(Box::pin(async move { inner.lease_alone(owned).await }));
        }
        let reply = inner.store.lease(LeaseRequest { session, ..request });
        reply.then(move |reply| StoreReply::Ready(inner.on_reply(&owned, reply)))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        let of_store = self.0.take_back(key, unused);
        if !of_store.is_empty() {
            self.0.store.give_back(key, spec, &of_store);
        }
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        let (inner, asked) = (self.0.clone(), request.clone());
        self.0.store.peek(request).then(move |usage| {
            StoreReply::Ready(usage.or_else(|error| {
                inner
                    .with_standalone(asked.key, |ledger| ledger.usage(&asked, clock::now()))
                    .ok_or(error)
            }))
        })
    }
}
