//! What was seen of a run, by the tasks and by the service.

use std::collections::BTreeMap;
use std::time::Duration;

use upstream::{Arrival, Log, Rule};

use crate::args::Args;
use crate::run::Outcome;
use crate::shared::Spent;

/// A run that is over.
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) outcome: Outcome,
    pub(crate) log: Log,
    /// What tollgate kept free between two windows, where that is a fixed time.
    pub(crate) margin: Option<Duration>,
    /// What Redis spent on it.
    pub(crate) spent: Option<Spent>,
}

impl Run {
    /// What the tasks saw, and what the service saw.
    pub(crate) fn new(name: &'static str, mut outcome: Outcome, log: Log) -> Run {
        outcome.took.sort_unstable();
        Run { name, outcome, log, margin: None, spent: None }
    }

    pub(crate) fn answered(&self) -> usize {
        self.log.iter().filter(|arrival| arrival.accepted).count()
    }

    pub(crate) fn refused(&self) -> usize {
        self.log.len() - self.answered()
    }

    pub(crate) fn refused_of_all(&self) -> f64 {
        self.refused() as f64 / self.log.len().max(1) as f64
    }

    /// Which share of the tightest rule was used, if each were longer by `margin`.
    pub(crate) fn used(&self, rules: &[Rule], margin: Duration) -> Option<f64> {
        let longer = |rule: &Rule| Rule::new(rule.count, rule.window + margin);
        rules.iter().filter_map(|rule| self.log.used(longer(rule))).max_by(f64::total_cmp)
    }

    /// What `percent` of the answers took at most.
    pub(crate) fn took(&self, percent: usize) -> Option<Duration> {
        let took = &self.outcome.took;
        took.get((took.len() * percent).div_ceil(100).checked_sub(1)?).copied()
    }

    /// The fewest and the most answers that a task got.
    pub(crate) fn answers_per_task(&self, args: &Args) -> (u64, u64) {
        self.answers(args.processes * args.tasks, |arrival| arrival.who.as_deref())
    }

    /// The fewest and the most answers that a process got.
    pub(crate) fn answers_per_process(&self, args: &Args) -> (u64, u64) {
        self.answers(args.processes, |arrival| who(arrival).map(|(process, _)| process))
    }

    fn answers(&self, callers: u32, caller: impl Fn(&Arrival) -> Option<&str>) -> (u64, u64) {
        let mut answers: BTreeMap<&str, u64> = BTreeMap::new();
        for arrival in self.log.iter().filter(|arrival| arrival.accepted) {
            if let Some(caller) = caller(arrival) {
                *answers.entry(caller).or_default() += 1;
            }
        }
        let fewest = if answers.len() < callers as usize { None } else { answers.values().min() };
        (fewest.copied().unwrap_or(0), answers.values().max().copied().unwrap_or(0))
    }

    /// The rule that most calls were above, and how many calls came in its window.
    pub(crate) fn furthest_over(&self, rules: &[Rule]) -> Option<(Rule, usize)> {
        let counts = rules.iter().map(|rule| (*rule, self.log.largest_count(rule.window)));
        counts
            .filter(|(rule, count)| *count > rule.count as usize)
            .max_by_key(|(rule, count)| count - rule.count as usize)
    }
}

/// The process and the task that made a call.
pub(crate) fn who(arrival: &Arrival) -> Option<(&str, &str)> {
    arrival.who.as_deref()?.split_once('.')
}
