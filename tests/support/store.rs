//! Stores for the tests of the layers.

use std::sync::Arc;
use std::time::Duration;

use tollgate::Key;
use tollgate::store::{
    Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Store, StoreError, StoreReply,
    UnusedPermits, Usage,
};

use super::clock;

/// A store that fails. `later` says whether it takes a trip to find out.
pub(crate) struct Failing {
    pub(crate) error: StoreError,
    pub(crate) later: bool,
}

impl Failing {
    /// A store that cannot be reached.
    pub(crate) fn away(later: bool) -> Self {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        Failing {
            error: StoreError::Away(Arc::new(refused)),
            later,
        }
    }

    fn answer<T: Send + 'static>(&self) -> StoreReply<T> {
        let error = self.error.clone();
        if self.later {
            StoreReply::Pending(Box::pin(async { Err(error) }))
        } else {
            StoreReply::Ready(Err(error))
        }
    }
}

impl Store for Failing {
    fn lease(&self, _: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.answer()
    }

    fn give_back(&self, _: Key, _: &Arc<LimitSpec>, _: &[UnusedPermits]) {}

    fn peek(&self, _: PeekRequest) -> StoreReply<Usage> {
        self.answer()
    }
}

/// A store whose leases take a trip to arrive.
pub(crate) struct Distant {
    store: MemoryStore,
    trip: Duration,
}

impl Distant {
    pub(crate) fn new(trip: Duration) -> Self {
        Distant {
            store: MemoryStore::default(),
            trip,
        }
    }
}

impl Store for Distant {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let StoreReply::Ready(lease) = self.store.lease(request) else {
            unreachable!("memory answers at once")
        };
        let trip = self.trip;
        StoreReply::Pending(Box::pin(async move {
            clock::pass(trip).await;
            lease
        }))
    }
}
