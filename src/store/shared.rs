//! A store, as builders take it.

use std::fmt;
use std::sync::Arc;

use super::Store;

/// A store, as [`RateLimitBuilder::store`](crate::RateLimitBuilder::store) and
/// [`AdaptiveThrottleBuilder::store`](crate::AdaptiveThrottleBuilder::store) take it. Clones are the
/// same store.
///
/// A [`MemoryStore`](super::MemoryStore) or a `RedisStore` becomes one by [`From`], with or without an
/// [`Arc`] around it.
///
/// ```
/// use tollgate::store::{MemoryStore, SharedStore};
///
/// let store = SharedStore::from(MemoryStore::new(1_000_000));
/// ```
#[derive(Clone)]
pub struct SharedStore(pub(crate) Arc<dyn Store>);

impl<S: Store> From<S> for SharedStore {
    fn from(store: S) -> Self {
        SharedStore(Arc::new(store))
    }
}

impl<S: Store> From<Arc<S>> for SharedStore {
    fn from(store: Arc<S>) -> Self {
        SharedStore(store)
    }
}

impl From<Arc<dyn Store>> for SharedStore {
    fn from(store: Arc<dyn Store>) -> Self {
        SharedStore(store)
    }
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedStore").finish_non_exhaustive()
    }
}
