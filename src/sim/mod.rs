//! A laboratory: fleets of clients against servers with limits, in virtual time.
//!
//! It runs the lines and the [paces](crate::pace) that clients run, not copies of them; what servers say goes through the same headers and
//! is read by the same code. Hours take a fraction of a second, and the same seed gives the same run.
//!
//! ```
//! use tollgate::sim::{Scenarios, Strategy, run};
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
//! `cargo run --release --features sim --example simulate` runs the [public set](Scenarios::public), or a file of your own, and prints a table.
//!
//! # What is simulated
//!
//! A fleet of processes, each with one line that its callers share. A caller calls, waits for success, and calls again.
//! A request takes a time drawn anew for each; the server judges it half-way. Everything that happens is taken in the order
//! of its time, and of its planning where two are at the same time.
//!
//! What this does not do: sockets, threads, and the wakers of the gate. Those are tested where they are.

mod chart;
mod fleet;
mod headers;
mod lines;
mod metrics;
mod report;
mod scenario;
mod server;
mod strategy;
mod sweep;
mod trace;

use std::fmt;

use fleet::Fleet;
pub use metrics::Metrics;
pub use report::{picture, report};
pub use scenario::{Background, Change, Group, Headers, Latency, Lie, Scenario, Scenarios, Server};
pub use strategy::{Brief, Strategy};
pub use sweep::{Runs, sweep};
pub use trace::Trace;

/// A group of a scenario has a strategy that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownStrategy(String);

impl fmt::Display for UnknownStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no strategy {:?}", self.0)
    }
}

impl std::error::Error for UnknownStrategy {}

/// Runs `scenario` with `strategy` in every group that has none of its own.
///
/// # Errors
///
/// [`UnknownStrategy`] where a group names a strategy that does not come with tollgate.
pub fn run(scenario: &Scenario, strategy: &Strategy, seed: u64) -> Result<Metrics, UnknownStrategy> {
    Ok(fleet(scenario, strategy, seed)?.run())
}

/// The same, and what happened when.
///
/// # Errors
///
/// As [`run`].
pub fn trace(
    scenario: &Scenario,
    strategy: &Strategy,
    seed: u64,
) -> Result<(Metrics, Trace), UnknownStrategy> {
    let mut fleet = fleet(scenario, strategy, seed)?;
    fleet.trace = Some(Trace::default());
    let metrics = fleet.run();
    Ok((metrics, fleet.trace.take().unwrap_or_default()))
}

fn fleet<'a>(scenario: &'a Scenario, strategy: &Strategy, seed: u64) -> Result<Fleet<'a>, UnknownStrategy> {
    for name in scenario.fleet.iter().filter_map(|group| group.strategy.as_deref()) {
        Strategy::named(name).ok_or_else(|| UnknownStrategy(name.to_owned()))?;
    }
    let others = |name: &str| Strategy::named(name).expect("it was just found");
    Ok(Fleet::new(scenario, strategy, &others, seed))
}
