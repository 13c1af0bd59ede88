//! A store decorator of a process that trusts no headers: limits that other processes have learned from
//! them do not limit it.
//!
//! The quota of a key is one for all processes, and the store keeps it. So a process that trusts no headers
//! ends a learned quota when a reply states one, and makes its call again. A question about the key is answered as
//! if the learned quota had ended. A process that has learned the quota does
//! not learn another one of the key for a minute after that end: otherwise each of its responses would begin it anew.

use std::sync::Arc;

use super::{
    Change, ChangeKind, Lease, LeaseRequest, LimitSpec, OwnedLeaseRequest, PeekRequest, SetQuota,
    Store, StoreError, StoreReply, Usage,
};
use crate::clock;

/// A store that ends learned quotas.
pub(crate) struct UnlearningStore(Arc<dyn Store>);

impl UnlearningStore {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        UnlearningStore(store)
    }
}

/// Returns the set quota that a reply states, if it was learned.
fn learned(stated: &Option<Box<SetQuota>>) -> Option<&SetQuota> {
    stated.as_deref().filter(|set| set.is_learned())
}

/// Ends the learned quota that the reply `first` states, and makes the call again.
async fn without_learned(
    store: Arc<dyn Store>,
    mut request: OwnedLeaseRequest,
    first: Lease,
) -> Result<Lease, StoreError> {
    let Some(set) = learned(&first.set_quota) else {
        return Ok(first);
    };
    // With this version, the store ends only a learned quota.
    let end = LimitSpec::none().with_quota_version(set.version, set.life);
    let change = Change::Quota {
        kind: ChangeKind::End,
        life: set.life,
    };
    let ended = store.change(request.key, &Arc::new(end), change);
    if ended.arrives().await.is_err() {
        return Ok(without_quota(first));
    }
    store.give_back(request.key, &request.spec, &first.unused());
    request.follow(&first, clock::now());
    // The first call has counted them.
    request.returns.clear();
    request.charges.clear();
    request.remaining = None;
    let again = store.lease(request.as_request());
    again.arrives().await.map(without_quota)
}

/// Removes a learned quota from a lease. The next call ends it.
fn without_quota(lease: Lease) -> Lease {
    Lease {
        set_quota: lease.set_quota.filter(|set| !set.is_learned()),
        ..lease
    }
}

/// Returns the question for what would hold after the end of the learned quota that `reply` states, if it states
/// one. The version of the end is newer than that of the quota. A question changes nothing in the store.
fn after_end(mut request: PeekRequest, reply: &Result<Usage, StoreError>) -> Option<PeekRequest> {
    let set = learned(&reply.as_ref().ok()?.set_quota)?;
    let spec = LimitSpec::clone(&request.spec).with_quota_version(set.version + 1, set.life);
    request.spec = Arc::new(spec);
    Some(request)
}

impl Store for UnlearningStore {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.0)
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        let (store, asked) = (self.0.clone(), request.clone());
        self.0
            .peek(request)
            .then(move |reply| match after_end(asked, &reply) {
                Some(again) => store.peek(again),
                None => StoreReply::Ready(reply),
            })
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let store = self.0.clone();
        let owned = OwnedLeaseRequest::new(&request);
        self.0.lease(request).then(move |reply| match reply {
            // The caller has a lock, and the end of the quota is told to listeners.
            Ok(first) if learned(&first.set_quota).is_some() => {
                StoreReply::Pending(Box::pin(without_learned(store, owned, first)))
            }
            reply => StoreReply::Ready(reply),
        })
    }
}
