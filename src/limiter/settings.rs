//! What a gate is built from.

use std::sync::Arc;
use std::time::Duration;

use super::key_state::Learn;
#[cfg(doc)]
use crate::error::Limited;
use crate::key::Key;
use crate::limit::Terms;
use crate::store::Store;

/// The key that a refusal of a key's call holds, by the name of its scope.
pub(crate) type OnScope = Box<dyn Fn(Key, &str) -> Option<Key> + Send + Sync>;

/// What a gate is built from, checked.
pub(crate) struct Settings {
    pub(crate) terms: Arc<Terms>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: usize,
    pub(crate) max_keys: usize,
    pub(crate) in_flight_life: Duration,
    pub(crate) max_hold: Duration,
    pub(crate) learn: Learn,
    pub(crate) on_scope: Option<OnScope>,
    pub(crate) on_store_error: OnStoreError,
}

/// What becomes of a request when the store cannot be asked.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStoreError {
    /// It is refused with [`Limited::Store`]: the limit holds, whatever it costs.
    #[default]
    FailClosed,
    /// It passes, uncounted: the upstream may be called more often than the limit allows.
    FailOpen,
    /// It goes on with the share of this process: what the store granted it in each window lately, the least of them; over
    /// all processes that is no more than the limit. A process that was granted nothing has the share that
    /// [`fallback_share`](crate::RateLimitBuilder::fallback_share) says, or none: then it is as with `FailClosed`.
    ///
    /// What the store granted lately counts in the share, and what was used alone is told to the store when it is back,
    /// before anybody takes more than a share: the page `guide::many_processes` tells the bounds. Calls in flight have no
    /// shares: nobody is given a place while the store is away.
    FallbackShare,
}
