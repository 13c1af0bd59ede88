//! What a limiter is built from.

use std::sync::Arc;
use std::time::Duration;

use super::key_state::HeaderTrust;
use super::quotas::Quotas;
#[cfg(doc)]
use crate::error::Limited;
use crate::guarded::Watch;
use crate::key::Key;
use crate::limit::LimitSpec;
#[cfg(doc)]
use crate::quota::Quota;
use crate::stats::Tally;
use crate::store::{FallbackStore, Store};

/// Returns the key to put on hold after a refusal that names a scope. Takes the key of the refused
/// call and the scope. `None` puts no key on hold.
pub(crate) type OnScope = Arc<dyn Fn(Key, &str) -> Option<Key> + Send + Sync>;

/// What a limiter is built from. The builder has checked it.
pub(crate) struct Settings {
    /// The limits of each key.
    pub(crate) spec: Arc<LimitSpec>,
    /// The quotas that requests state in place of the configured one. Shared by the cores of all units.
    pub(crate) quotas: Arc<Quotas>,
    /// Whether these are the limits of a further unit: see `cores`.
    pub(crate) is_further_unit: bool,
    /// The part of the quota that these are the limits of, if it is divided among classes.
    pub(crate) part: Option<PartOfQuota>,
    /// The name of the limit in errors, if it has one.
    pub(crate) name: Option<&'static str>,
    /// The counts of the limiter, and its name in them.
    pub(crate) tally: Tally,
    /// Where permits are counted.
    pub(crate) store: Arc<dyn Store>,
    /// The store that was set. `store` is the same, or goes on alone when this one is away.
    pub(crate) shared_store: Arc<dyn Store>,
    /// The same as `store`, if it goes on alone when `shared_store` is away.
    pub(crate) fallback: Option<Arc<FallbackStore>>,
    /// The longest wait of a request.
    pub(crate) max_wait: Duration,
    /// How long a request waits for its slot even if `max_wait` is shorter: see [`Quota::least_wait`].
    pub(crate) least_wait: Duration,
    /// How many requests of one key may wait in this process.
    pub(crate) max_queue: usize,
    /// How many keys may have state in this process.
    pub(crate) max_keys: usize,
    /// How long a crashed process's calls in flight keep counting against the limit.
    pub(crate) in_flight_ttl: Duration,
    /// The longest hold that a response of the upstream causes. Zero if responses cause none.
    pub(crate) max_hold: Duration,
    /// Which limits that the upstream states replace the configured ones.
    pub(crate) learn: HeaderTrust,
    pub(crate) on_scope: Option<OnScope>,
    /// Stops keys with too many bad answers, if there is one.
    pub(crate) guard: Option<Arc<dyn Watch>>,
    /// Whether its stats have the counts of the guard. Of several limits with one guard, the first has them.
    pub(crate) reports_guard: bool,
    pub(crate) on_store_error: OnStoreError,
    /// Whether the true cost of a request may be stated after its response.
    pub(crate) settles: bool,
    /// Whether each request should state the units that are limited. Not if a settlement or the program charges them.
    pub(crate) needs_cost: bool,
    /// Whether a request that costs more than a limit allows waits for the whole limit.
    pub(crate) waits_above_limit: bool,
    /// How late the upstream counts. Zero if it counts a request when it arrives, or if a limit is not
    /// a sliding window: then a settlement moves no units to another moment.
    pub(crate) counted_within: Duration,
}

/// Which part of a quota a class of requests has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartOfQuota {
    /// Its place among the parts. The rest is the first.
    pub(crate) index: usize,
    /// The class. `None` for the rest, which all classes without a share have together.
    pub(crate) class: Option<&'static str>,
}

/// What happens to a request if the store fails. Default: [`FailClosed`](OnStoreError::FailClosed).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStoreError {
    /// The request is refused with [`Limited::Store`]. The limit is kept, and nothing is sent while
    /// the store is unreachable.
    ///
    /// This is the default, because only this keeps the limit in all cases.
    #[default]
    FailClosed,
    /// The request passes uncounted. The upstream may receive more requests than the limit allows.
    FailOpen,
    /// The process counts for itself, and sends at most its share of the limit.
    ///
    /// The share is the smallest number of units that the store granted to this process in one of
    /// the last windows. So the shares of all processes together do not exceed the limit. A process
    /// without grants, or one that is new, has the share that
    /// [`fallback_share`](crate::RateLimitBuilder::fallback_share) sets. Without that setting, its
    /// requests are refused, as with `FailClosed`.
    ///
    /// Units that the store granted shortly before count against the share. When the store is
    /// reachable again, each process reports what it used meanwhile. While the store is lost, or
    /// comes back, a window may have the limit and the shares. The page
    /// [`guide::many_processes`](crate::guide::many_processes#shares) has the bounds. Calls in
    /// flight have no shares: no call is admitted while the store is unreachable.
    FallbackShare,
}
