//! Stores for the tests of the layers.

use std::sync::Arc;
use std::time::Duration;

use tollgate::Key;
use tollgate::store::{Answer, Ask, Lease, MemoryStore, Store, StoreError, Terms, Unused, Usage};

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
        Failing { error: StoreError::Away(Arc::new(refused)), later }
    }

    fn answer<T: Send + 'static>(&self) -> Answer<T> {
        let error = self.error.clone();
        if self.later { Answer::Later(Box::pin(async { Err(error) })) } else { Answer::Now(Err(error)) }
    }
}

impl Store for Failing {
    fn lease(&self, _: Ask<'_>) -> Answer<Lease> {
        self.answer()
    }

    fn give_back(&self, _: Key, _: &Arc<Terms>, _: &[Unused]) {}

    fn peek(&self, _: Key, _: &Arc<Terms>) -> Answer<Usage> {
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
        Distant { store: MemoryStore::default(), trip }
    }
}

impl Store for Distant {
    fn lease(&self, ask: Ask<'_>) -> Answer<Lease> {
        let Answer::Now(lease) = self.store.lease(ask) else { unreachable!("memory answers at once") };
        let trip = self.trip;
        Answer::Later(Box::pin(async move {
            clock::pass(trip).await;
            lease
        }))
    }

    fn give_back(&self, key: Key, terms: &Arc<Terms>, unused: &[Unused]) {
        self.store.give_back(key, terms, unused);
    }

    fn peek(&self, key: Key, terms: &Arc<Terms>) -> Answer<Usage> {
        self.store.peek(key, terms)
    }
}
