//! The metrics of a run.

use serde::Serialize;

use super::caller::Caller;

/// The metrics of a run, or their means over several runs. Times are in seconds. A metric that does
/// not apply is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Metrics {
    /// Refused requests / requests sent, in per cent; the mean over callers.
    pub retry_pct: f64,
    /// Refused requests / requests sent, in per cent; over all requests.
    pub retry_pct_pooled: f64,
    /// The longest wait before one request.
    pub max_sleep: f64,
    /// The longest wait of a call: its duration without the time that its requests took.
    pub max_wait: f64,
    /// The wait that 99 % of the calls did not exceed.
    pub p99_wait: f64,
    /// The sample standard deviation, over callers, of requests sent.
    pub stdev: f64,
    /// The Jain index of successes: 1 if all callers have the same number, 1/n if one has all.
    pub jain: f64,
    /// The Jain index if all callers that are there at a moment had equal shares at each moment. It is less
    /// than 1 if some of them join later or leave earlier.
    pub even_jain: f64,
    /// Accepted requests / requests that the server could accept, in per cent.
    pub util_pct: f64,
    /// When the last caller stopped, if callers stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clear: Option<f64>,
    /// Successes per caller with the run's strategy / successes per caller in groups with
    /// strategies of their own, if there are both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Calls of the store / requests sent, if the store was called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_calls: Option<f64>,
}

/// The counts of a run, from which its metrics follow.
pub(super) struct Tally<'a> {
    pub(super) callers: &'a [Caller],
    /// The waits of all calls that ended.
    pub(super) waits: Vec<f64>,
    /// The longest wait of the calls that did not end.
    pub(super) longest_open: f64,
    pub(super) taken: f64,
    pub(super) supply: f64,
    /// When the run ended, in seconds.
    pub(super) over: f64,
    pub(super) clear: Option<f64>,
    pub(super) fair_groups: Option<&'a [usize]>,
    /// For each group, whether it has a strategy of its own.
    pub(super) foreign: &'a [bool],
    pub(super) store_calls: u64,
}

impl Tally<'_> {
    /// Returns the metrics of the run.
    pub(super) fn metrics(mut self) -> Metrics {
        let shares = self.callers.iter().filter(|caller| caller.sent > 0);
        let shares: Vec<f64> = shares
            .map(|caller| caller.refused as f64 / caller.sent as f64)
            .collect();
        let sum = |of: fn(&Caller) -> u64| self.callers.iter().map(of).sum::<u64>() as f64;
        let compared: Vec<&Caller> = self
            .callers
            .iter()
            .filter(|caller| {
                self.fair_groups
                    .is_none_or(|fair| fair.contains(&caller.group))
            })
            .collect();
        let sent: Vec<f64> = compared.iter().map(|caller| caller.sent as f64).collect();
        let passed: Vec<f64> = compared.iter().map(|caller| caller.passed as f64).collect();
        let p99 = (self.waits.len() as f64 * 0.99).ceil() as usize;
        let p99_wait = match p99.checked_sub(1) {
            Some(index) => *self.waits.select_nth_unstable_by(index, f64::total_cmp).1,
            None => 0.0,
        };
        let of_group = |foreign: bool| {
            let callers = self
                .callers
                .iter()
                .filter(|caller| self.foreign[caller.group] == foreign);
            mean(
                &callers
                    .map(|caller| caller.passed as f64)
                    .collect::<Vec<_>>(),
            )
        };
        Metrics {
            retry_pct: 100.0 * mean(&shares),
            retry_pct_pooled: 100.0 * sum(|caller| caller.refused)
                / sum(|caller| caller.sent).max(1.0),
            max_sleep: self
                .callers
                .iter()
                .map(|caller| caller.max_sleep)
                .fold(0.0, f64::max),
            max_wait: self.waits.iter().copied().fold(self.longest_open, f64::max),
            p99_wait,
            stdev: deviation(&sent),
            jain: jain(&passed),
            even_jain: jain(&even_shares(&compared, self.over)),
            util_pct: 100.0 * self.taken / self.supply,
            clear: self.clear,
            share: self
                .foreign
                .contains(&true)
                .then(|| of_group(false) / of_group(true)),
            store_calls: (self.store_calls > 0)
                .then(|| self.store_calls as f64 / sum(|caller| caller.sent).max(1.0)),
        }
    }
}

impl Metrics {
    /// Returns each metric with its name in files.
    pub fn named(&self) -> [(&'static str, Option<f64>); 12] {
        [
            ("retry_pct", Some(self.retry_pct)),
            ("retry_pct_pooled", Some(self.retry_pct_pooled)),
            ("max_sleep", Some(self.max_sleep)),
            ("max_wait", Some(self.max_wait)),
            ("p99_wait", Some(self.p99_wait)),
            ("stdev", Some(self.stdev)),
            ("jain", Some(self.jain)),
            ("even_jain", Some(self.even_jain)),
            ("util_pct", Some(self.util_pct)),
            ("clear", self.clear),
            ("share", self.share),
            ("store_calls", self.store_calls),
        ]
    }

    fn from_each(of: impl Fn(usize) -> Option<f64>) -> Self {
        let number = |index| of(index).unwrap_or(f64::NAN);
        Metrics {
            retry_pct: number(0),
            retry_pct_pooled: number(1),
            max_sleep: number(2),
            max_wait: number(3),
            p99_wait: number(4),
            stdev: number(5),
            jain: number(6),
            even_jain: number(7),
            util_pct: number(8),
            clear: of(9),
            share: of(10),
            store_calls: of(11),
        }
    }

    /// Returns the means of `runs`, and their sample standard deviations.
    pub fn mean_and_deviation(runs: &[Metrics]) -> (Metrics, Metrics) {
        let column = |index: usize| {
            runs.iter()
                .map(|run| run.named()[index].1)
                .collect::<Option<Vec<f64>>>()
        };
        (
            Metrics::from_each(|index| column(index).map(|column| mean(&column))),
            Metrics::from_each(|index| column(index).map(|column| deviation(&column))),
        )
    }
}

/// Returns the Jain index of `values`.
fn jain(values: &[f64]) -> f64 {
    let squares = values.iter().map(|value| value * value).sum::<f64>();
    match squares > 0.0 {
        true => values.iter().sum::<f64>().powi(2) / (values.len() as f64 * squares),
        false => 1.0,
    }
}

/// Returns for how many seconds of a run each caller would have the server alone, if those that are there at
/// a moment had equal shares. The run ends after `over` seconds.
fn even_shares(callers: &[&Caller], over: f64) -> Vec<f64> {
    let mut changes: Vec<f64> = callers
        .iter()
        .flat_map(|caller| [caller.join, caller.leave])
        .map(|at| at.min(over))
        .collect();
    changes.push(over);
    changes.sort_unstable_by(f64::total_cmp);
    let mut shares = vec![0.0; callers.len()];
    for (&from, &to) in changes
        .iter()
        .zip(&changes[1..])
        .filter(|(from, to)| from < to)
    {
        let there: Vec<bool> = callers
            .iter()
            .map(|caller| caller.join <= from && from < caller.leave)
            .collect();
        let count = there.iter().filter(|is_there| **is_there).count();
        for (share, _) in shares
            .iter_mut()
            .zip(there)
            .filter(|(_, is_there)| *is_there)
        {
            *share += (to - from) / count as f64;
        }
    }
    shares
}

fn mean(values: &[f64]) -> f64 {
    // `sum` returns -0 for an empty slice.
    values.iter().fold(0.0, |sum, value| sum + value) / values.len().max(1) as f64
}

/// Returns the sample standard deviation.
fn deviation(values: &[f64]) -> f64 {
    let middle = mean(values);
    let squares = values
        .iter()
        .map(|value| (value - middle).powi(2))
        .sum::<f64>();
    if values.len() < 2 {
        0.0
    } else {
        (squares / (values.len() - 1) as f64).sqrt()
    }
}
