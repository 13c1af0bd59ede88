//! A run that has ended: what its tasks and the service saw.

use std::collections::BTreeMap;
use std::time::Duration;

use upstream::{Arrival, Log, Rule};

use crate::args::Args;
use crate::callers::Outcome;
use crate::shared_redis::Spent;

/// A run that has ended.
pub(crate) struct Run {
    /// The name of the run: the head of its column.
    pub(crate) name: &'static str,
    /// What the tasks saw.
    pub(crate) outcome: Outcome,
    /// What the service saw.
    pub(crate) log: Log,
    /// The time that tollgate keeps free between two windows, if it is fixed.
    pub(crate) margin: Option<Duration>,
    /// What the run cost Redis, if that is known.
    pub(crate) spent: Option<Spent>,
}

impl Run {
    /// Combines what the tasks saw and what the service saw.
    pub(crate) fn new(name: &'static str, mut outcome: Outcome, log: Log) -> Run {
        outcome.took.sort_unstable();
        Run {
            name,
            outcome,
            log,
            margin: None,
            spent: None,
        }
    }

    /// Returns how many calls the service accepted.
    pub(crate) fn answered(&self) -> usize {
        self.log.iter().filter(|arrival| arrival.accepted).count()
    }

    /// Returns how many calls the service refused.
    pub(crate) fn refused(&self) -> usize {
        self.log.len() - self.answered()
    }

    /// Returns which fraction of all calls the service refused.
    pub(crate) fn refused_of_all(&self) -> f64 {
        self.refused() as f64 / self.log.len().max(1) as f64
    }

    /// Returns the fraction of the tightest rule that was used, with windows longer by `margin`.
    pub(crate) fn used(&self, rules: &[Rule], margin: Duration) -> Option<f64> {
        let longer = |rule: &Rule| Rule::new(rule.count, rule.window + margin);
        rules
            .iter()
            .filter_map(|rule| self.log.used(longer(rule)))
            .max_by(f64::total_cmp)
    }

    /// Returns the time within which `percent` of the answers came.
    pub(crate) fn took(&self, percent: usize) -> Option<Duration> {
        let took = &self.outcome.took;
        took.get((took.len() * percent).div_ceil(100).checked_sub(1)?)
            .copied()
    }

    /// Returns the fewest and the most answers of a task.
    pub(crate) fn answers_per_task(&self, args: &Args) -> (u64, u64) {
        self.answers(args.processes * args.tasks, |arrival| {
            arrival.who.as_deref()
        })
    }

    /// Returns the fewest and the most answers of a process.
    pub(crate) fn answers_per_process(&self, args: &Args) -> (u64, u64) {
        self.answers(args.processes, |arrival| {
            who(arrival).map(|(process, _)| process)
        })
    }

    fn answers(&self, callers: u32, caller: impl Fn(&Arrival) -> Option<&str>) -> (u64, u64) {
        let mut answers: BTreeMap<&str, u64> = BTreeMap::new();
        for arrival in self.log.iter().filter(|arrival| arrival.accepted) {
            if let Some(caller) = caller(arrival) {
                *answers.entry(caller).or_default() += 1;
            }
        }
        let fewest = if answers.len() < callers as usize {
            None
        } else {
            answers.values().min()
        };
        (
            fewest.copied().unwrap_or(0),
            answers.values().max().copied().unwrap_or(0),
        )
    }

    /// Returns the rule that was exceeded by the largest number of calls, and the number of calls
    /// in its window.
    pub(crate) fn furthest_over(&self, rules: &[Rule]) -> Option<(Rule, usize)> {
        let counts = rules
            .iter()
            .map(|rule| (*rule, self.log.largest_count(rule.window)));
        counts
            .filter(|(rule, count)| *count > rule.count as usize)
            .max_by_key(|(rule, count)| count - rule.count as usize)
    }
}

/// Returns the process and the task that made a call.
pub(crate) fn who(arrival: &Arrival) -> Option<(&str, &str)> {
    arrival.who.as_deref()?.split_once('.')
}
