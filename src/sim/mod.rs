//! A laboratory: fleets of clients against servers with limits, in virtual time.
//!
//! It runs the lines, the [paces](crate::pace) and the gates that clients run, not copies of them; what servers say goes
//! through the same headers and is read by the same code. Hours take a fraction of a second, and the same seed gives the
//! same run.
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
//! `cargo run --release --features sim --example simulate` runs the [public set](Scenarios::public), or a file of your own,
//! and prints a table; `--scenarios limited --strategies limit` runs [the second](Scenarios::limited).
//!
//! # What is simulated
//!
//! A fleet of processes, each with one line, or one gate, that its callers share. A caller calls, waits for success, and
//! calls again.
//! A request takes a time drawn anew for each; the server judges it half-way. Everything that happens is taken in the order
//! of its time, and of its planning where two are at the same time.
//!
//! A [pace](Strategy::new) is run on its pure line, without a task. A [gate](Strategy::gate) is run as it is, with its tasks,
//! timers and wakers, in a runtime whose time is virtual: `limit`, which is told the quota and counts in a store that all
//! processes share and that [may fail](StoreModel); `fair-gate`, the gate around the line of `fair`, with the same results;
//! and `fair-shared`, the same gate whose processes [share](crate::AdaptiveThrottleBuilder::store) one pace through the store.
//!
//! What this does not do: sockets and threads. Those are tested where they are.

mod caller;
mod chart;
mod fleet;
mod gates;
mod headers;
mod metrics;
mod queue_process;
mod report;
mod scenario;
mod server;
mod store;
mod strategy;
mod sweep;
mod trace;

use std::fmt;
use std::time::Duration;

use crate::config_error::ConfigError;
use crate::rng::Dice;
use fleet::Fleet;
pub use gates::Wire;
pub use metrics::Metrics;
pub use report::{picture, report};
pub use scenario::{
    Background, Change, Group, Headers, Latency, Lie, Scenario, Scenarios, Server, StoreModel,
};
use strategy::Make;
pub use strategy::{Brief, Strategy};
pub use sweep::{Runs, sweep};
pub use trace::Trace;

/// A scenario and a strategy do not go together.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunError {
    /// A group of the scenario names a strategy that does not come with tollgate.
    UnknownStrategy(String),
    /// A gate cannot be made of what the scenario says.
    Gate {
        /// The name of the strategy.
        strategy: String,
        /// What is wrong.
        source: ConfigError,
    },
    /// Of several scenarios this one cannot be run.
    Scenario {
        /// Its name.
        name: String,
        /// What is wrong.
        source: Box<RunError>,
    },
}

impl RunError {
    fn gate(strategy: &str, source: ConfigError) -> Self {
        RunError::Gate { strategy: strategy.to_owned(), source }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::UnknownStrategy(name) => {
                let all = Strategy::all();
                let names: Vec<_> = all.iter().map(Strategy::name).collect();
                write!(f, "there is no strategy {name:?}; there are {}", names.join(", "))
            }
            RunError::Gate { strategy, source } => write!(f, "strategy {strategy:?}: {source}"),
            RunError::Scenario { name, source } => write!(f, "scenario {name:?}: {source}"),
        }
    }
}

impl std::error::Error for RunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RunError::UnknownStrategy(_) => None,
            RunError::Gate { source, .. } => Some(source),
            RunError::Scenario { source, .. } => Some(&**source),
        }
    }
}

/// Runs `scenario` with `strategy` in every group that has none of its own.
///
/// # Errors
///
/// [`RunError`] where a group names a strategy that does not come with tollgate, or a gate cannot be made.
pub fn run(scenario: &Scenario, strategy: &Strategy, seed: u64) -> Result<Metrics, RunError> {
    Ok(run_with(scenario, strategy, seed, None)?.0)
}

/// The same, and what happened when.
///
/// # Errors
///
/// As [`run`].
pub fn trace(scenario: &Scenario, strategy: &Strategy, seed: u64) -> Result<(Metrics, Trace), RunError> {
    let (metrics, trace) = run_with(scenario, strategy, seed, Some(Trace::default()))?;
    Ok((metrics, trace.unwrap_or_default()))
}

fn run_with(
    scenario: &Scenario,
    strategy: &Strategy,
    seed: u64,
    trace: Option<Trace>,
) -> Result<(Metrics, Option<Trace>), RunError> {
    let of_group = |group: &Group| match &group.strategy {
        Some(name) => Strategy::named(name).ok_or_else(|| RunError::UnknownStrategy(name.clone())),
        None => Ok(strategy.clone()),
    };
    let strategies = scenario.fleet.iter().map(of_group).collect::<Result<Vec<_>, _>>()?;
    if strategies.iter().any(|strategy| matches!(strategy.make(), Make::Gate(_))) {
        return gates::run(scenario, &strategies, seed, trace);
    }
    let mut fleet = Fleet::new(scenario, &strategies, seed, None)?;
    fleet.trace = trace;
    Ok((fleet.run(), fleet.trace.take()))
}

fn exponential(dice: &mut Dice, mean: f64) -> f64 {
    -mean * (1.0 - dice.roll()).ln()
}

fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
