//! A store in memory that replies as late as a remote one, and that can fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::sleep;
use tollgate::Key;
use tollgate::store::{
    Claim, Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Store, StoreError,
    StoreListener, StoreReply, UnusedPermits, Usage,
};

/// A store whose replies take a trip. While it fails, no call arrives.
#[derive(Default)]
pub(crate) struct Remote {
    pub(crate) shared: Arc<MemoryStore>,
    pub(crate) fails: AtomicBool,
}

impl Remote {
    const TRIP: Duration = Duration::from_millis(5);
}

impl Store for Remote {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let reply = if self.fails.load(Ordering::Relaxed) {
            StoreReply::Ready(Err(StoreError::Lost))
        } else {
            self.shared.lease(request)
        };
        let StoreReply::Ready(reply) = reply else {
            unreachable!("memory replies at once")
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(Remote::TRIP).await;
            reply
        }))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.shared.give_back(key, spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.shared.peek(request)
    }

    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        let (shared, listener) = (self.shared.clone(), listener.clone());
        tokio::spawn(async move {
            sleep(Remote::TRIP).await;
            shared.claim(claim, &listener);
        });
    }
}
