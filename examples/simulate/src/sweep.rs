//! Runs of scenarios x strategies x seeds, on all cores.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::drive::run;
use super::error::RunError;
use super::metrics::Metrics;
use super::scenario::Scenario;
use super::strategy::Strategy;

/// The runs of one scenario with one strategy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Runs {
    /// The name of the scenario.
    pub scenario: String,
    /// The name of the strategy.
    pub strategy: String,
    /// The metrics of each seed.
    pub runs: Vec<Metrics>,
}

impl Runs {
    /// Returns the means over the seeds.
    pub fn mean(&self) -> Metrics {
        Metrics::mean_and_deviation(&self.runs).0
    }

    /// Returns the sample standard deviations over the seeds.
    pub fn deviation(&self) -> Metrics {
        Metrics::mean_and_deviation(&self.runs).1
    }
}

/// Runs every scenario with every strategy and every seed, on all cores. Calls `told` after each
/// run.
///
/// Returns the runs in the order of scenarios, then of strategies. The number of cores does not
/// change the result.
///
/// # Errors
///
/// [`RunError::Scenario`] for the first scenario that cannot be run. The scenarios after it are not
/// run.
pub fn sweep(
    scenarios: &[(String, Scenario)],
    strategies: &[Strategy],
    seeds: RangeInclusive<u64>,
    told: impl Fn() + Sync,
) -> Result<Vec<Runs>, RunError> {
    let jobs: Vec<(&Scenario, &Strategy, u64)> = scenarios
        .iter()
        .flat_map(|(_, scenario)| strategies.iter().map(move |strategy| (scenario, strategy)))
        .flat_map(|(scenario, strategy)| seeds.clone().map(move |seed| (scenario, strategy, seed)))
        .collect();
    let next = AtomicUsize::new(0);
    let done = Mutex::new(vec![None; jobs.len()]);
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((scenario, strategy, seed)) = jobs.get(index) else {
                break;
            };
            let metrics = run(scenario, strategy, *seed);
            if metrics.is_err() {
                // Skips the jobs that no core has taken yet.
                next.store(jobs.len(), Ordering::Relaxed);
            }
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            done[index] = Some(metrics);
            told();
        }
    };
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut done = done
        .into_iter()
        .map(|metrics| metrics.expect("one core has run each job"));
    let mut all = Vec::new();
    for (scenario, _) in scenarios {
        for strategy in strategies {
            let runs = done
                .by_ref()
                .take(seeds.clone().count())
                .collect::<Result<_, RunError>>();
            let runs = runs.map_err(|error| RunError::Scenario {
                name: scenario.clone(),
                source: Box::new(error),
            })?;
            let strategy = strategy.name().to_owned();
            all.push(Runs {
                scenario: scenario.clone(),
                strategy,
                runs,
            });
        }
    }
    Ok(all)
}
