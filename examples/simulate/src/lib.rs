//! A simulation of fleets of clients against servers with limits, in virtual time.
//!
//! The simulation runs the queues, the [paces](tollgate::pace) and the gates that programs run, not
//! copies of them. The servers' responses carry real headers, which the same code reads. Hours take
//! a fraction of a second, and the same seed gives the same run.
//!
//! ```
//! use tollgate_simulate::{Scenarios, Strategy, run};
//!
//! let scenarios = Scenarios::read(r#"{
//!     "two workers, one bucket": {
//!         "fleet": [{"procs": 2, "tasks": 1}],
//!         "server": {"kind": "bucket", "cap": 100, "refill": 1, "start": 0},
//!         "headers": {"remaining": true},
//!         "latency": [0.1, 0.2, 0],
//!         "hint": [100, 100],
//!         "duration": 600
//!     }
//! }"#)?;
//! let fair = Strategy::named("fair").unwrap();
//! let metrics = run(&scenarios.0[0].1, &fair, 1)?;
//! assert!(metrics.retry_pct < 1.0 && metrics.jain > 0.99);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `cargo run --release -p tollgate-simulate --example simulate` runs the [public
//! set](Scenarios::public), or a file of your own, and prints a table.
//! `--scenarios limited --strategies limit` runs [the second set](Scenarios::limited), and
//! `--scenarios real` servers that count as [real limiters](Scenarios::real) do.
//!
//! # What is simulated
//!
//! A fleet consists of processes, each with one queue or one gate that its callers share. A caller
//! makes a call, waits until it succeeds, and makes the next. Each request takes a random time; the
//! server judges it half-way. Events happen in the order of their time, and events at the same time
//! in the order in which they were planned.
//!
//! A [pace](Strategy::new) runs on its queue, without a task. A [gate](Strategy::gate) runs with
//! its tasks, timers and wakers, in a runtime with virtual time:
//!
//! - `limit` knows the quota, and counts in a store that all processes share and that [may
//!   fail](StoreModel);
//! - `fair-gate` is the throttle around the queue of `fair`, with the same results;
//! - `fair-shared` is the same throttle, whose processes
//!   [share](tollgate::AdaptiveThrottleBuilder::store) one pace through the store.
//!
//! The simulation has no sockets and no threads, which are tested separately.

mod brief;
mod caller;
mod clock;
mod drive;
mod error;
mod fleet;
mod gates;
mod headers;
mod known_gates;
mod metrics;
mod numbers;
pub mod pace;
mod process;
mod queue_process;
mod report;
mod scenario;
mod schedule;
mod server;
mod store;
mod strategy;
mod sweep;
mod trace;
mod weighted;

pub use brief::Brief;
pub use drive::{run, trace};
pub use error::RunError;
pub use gates::Wire;
pub use metrics::Metrics;
pub use report::{picture, report};
pub use scenario::{
    Background, Change, Goal, Group, Headers, Latency, Lie, Scenario, Scenarios, Server, StoreModel,
};
pub use strategy::Strategy;
pub use sweep::{Runs, sweep};
pub use trace::Trace;
