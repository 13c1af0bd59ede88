//! A store for the property tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::StoreError;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::store::{
    Grant, Lease, LeaseRequest, MemoryStore, PeekRequest, Store, StoreReply, UnusedPermits, Usage,
};

/// A store in memory that decides when it is called. With `later`, its answers arrive later. It
/// counts the units that it granted, and the units that were given back.
pub(super) struct Wire {
    pub(super) store: Arc<MemoryStore>,
    pub(super) later: bool,
    pub(super) away: AtomicBool,
    pub(super) granted: AtomicU64,
    pub(super) returned: AtomicU64,
}

impl Wire {
    pub(super) fn count_back(&self, unused: &[UnusedPermits]) {
        self.returned.fetch_add(
            unused.iter().map(|unused| unused.units).sum(),
            Ordering::Relaxed,
        );
    }
}

impl Store for Wire {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.count_back(request.returns);
        let answer = if self.away.load(Ordering::Relaxed) {
            StoreReply::Ready(Err(StoreError::Away(Arc::new(std::io::Error::other(
                "no route",
            )))))
        } else {
            self.store.lease(request)
        };
        if let StoreReply::Ready(Ok(lease)) = &answer {
            let units = lease.all_grants().map(Grant::units).sum();
            self.granted.fetch_add(units, Ordering::Relaxed);
        }
        match answer {
            StoreReply::Ready(answer) if self.later => {
                StoreReply::Pending(Box::pin(std::future::ready(answer)))
            }
            answer => answer,
        }
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.count_back(unused);
        self.store.give_back(key, spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.store.peek(request)
    }
}
