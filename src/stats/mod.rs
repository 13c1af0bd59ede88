//! What the limiters and throttles of this process have done, and what happens to them.
//!
//! [`Limiter::stats`](crate::Limiter::stats) and [`Throttle::stats`](crate::Throttle::stats) read the
//! counts of one gate, and [`all`] those of all gates of this process. They are plain values: how
//! they get into a metrics system is up to the program. `on_event` of both builders takes a closure
//! that is called with each [`Event`].
//!
//! ```
//! use tollgate::{Key, Quota, RateLimitLayer, stats};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = RateLimitLayer::builder(Quota::per_second(1)).name("github").build()?.limiter();
//! for _ in 0..3 {
//!     drop(limiter.acquire(Key::ALL).await?);
//! }
//! let stats = limiter.stats();
//! assert_eq!((stats.requests().passed, stats.requests().waited), (1, 2));
//! assert!(stats.waits().quantile(0.99) > Some(std::time::Duration::from_secs(1)));
//! assert!(stats::all().iter().any(|stats| stats.name() == "github"));
//! # Ok(())
//! # }
//! ```

// | file | what it has |
// |---|---|
// | `histogram` | how long requests waited |
// | `values` | what a gate has counted, as plain values |
// | `event` | what happens to a gate |
// | `key_counts` | what is counted by key, and the counts of one key, which are a part of its state |
// | `labelled_keys` | the keys of a gate that have metrics of their own |
// | `exporter` | what an exporter of metrics gets besides the stats |
// | `class_check` | whether requests have classes, and these have a share |
// | `tally` | the counts of a gate |
// | `drain` | the end of a gate |
// | `open_request` | a request that waits, until its outcome is known |
// | `registry` | all gates of this process |

use std::sync::Arc;
use std::time::Duration;

use crate::error::StoreError;
use crate::join::join_all;

mod class_check;
mod drain;
mod event;
#[cfg(feature = "metrics")]
mod exporter;
mod histogram;
mod key_counts;
#[cfg(feature = "metrics")]
mod labelled_keys;
mod open_request;
mod registry;
mod tally;
mod values;

pub use drain::Drained;
pub(crate) use drain::drain as drain_gate;
pub use event::Event;
pub(crate) use event::Handler;
#[cfg(all(feature = "metrics", feature = "redis"))]
pub(crate) use exporter::{ExportedWaits, is_exporting};
#[cfg(feature = "metrics")]
pub(crate) use exporter::{Exporter, WaitRecorder, export_to};
pub use histogram::Histogram;
#[cfg(feature = "metrics")]
pub(crate) use histogram::WAIT_SECONDS;
#[cfg(feature = "redis")]
pub(crate) use histogram::WaitCounts;
#[cfg(all(feature = "metrics", feature = "redis"))]
pub(crate) use histogram::seconds;
#[cfg(feature = "metrics")]
pub(crate) use key_counts::Counted;
pub(crate) use key_counts::{KeyCounts, shown};
#[cfg(feature = "metrics")]
pub(crate) use labelled_keys::{KeySeries, WithKeys};
pub(crate) use open_request::OpenRequest;
#[cfg(feature = "metrics")]
pub(crate) use registry::all_but_noted;
pub(crate) use registry::{Engine, Flush, register, unregister};
pub(crate) use tally::{Tally, Waiting, is_series_name};
#[cfg(any(feature = "grpc", feature = "tracing"))]
pub(crate) use values::name_of_reason;
pub use values::{Cause, Counts, KeyStats, Requests, Stats};
pub(crate) use values::{GateState, GuardStats, InFlightStats, Outcome, PaceStats};

/// Returns the stats of all limiters and throttles of this process that still exist, the oldest first.
///
/// Clones of a layer are one limiter. Reading them calls no store. It visits the state of each key: a 128th
/// of the keys under one lock, or at most some 7000.
pub fn all() -> Vec<Stats> {
    registry::all().iter().map(|gate| gate.stats()).collect()
}

/// Drains all limiters and throttles of this process, also those of libraries that the program uses:
/// see [`Limiter::drain`](crate::Limiter::drain), which drains one. Returns the sum of what each did.
///
/// All of them are drained at the same time. A request that gets its turn at one layer and then enters
/// another one around the client is refused there.
///
/// # Errors
///
/// The first [`StoreError`], after all are drained.
///
/// # Cancel safety
///
/// As for [`Limiter::drain`](crate::Limiter::drain).
///
/// # Panics
///
/// If requests wait and the future is polled outside of a Tokio runtime with timers.
pub async fn drain_all(within: Duration) -> Result<Drained, StoreError> {
    // Guards go on counting: requests that are let leave may be answered.
    let mut gates = registry::all();
    gates.retain(|gate| !gate.tally().is_of_guard());
    drain_gates(gates, within).await
}

/// Drains `gates` at the same time.
pub(crate) async fn drain_gates(
    gates: Vec<Arc<dyn Engine>>,
    within: Duration,
) -> Result<Drained, StoreError> {
    let drains = gates.into_iter().map(|gate| drain_gate(gate, within));
    let drains: Result<Vec<Drained>, _> = join_all(drains).await.into_iter().collect();
    let mut all = Drained::default();
    drains?.iter().for_each(|drained| all.add(drained));
    Ok(all)
}
