//! The goals of a scenario.

use serde::Deserialize;

use crate::metrics::Metrics;

/// What the recommended pace should reach in a scenario, as means over ten seeds. A goal that is not given counts as
/// reached.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Goal {
    /// At most this share of the requests is refused, in per cent.
    pub refused: Option<f64>,
    /// At least this share of the limit is used, in per cent.
    pub used: Option<f64>,
    /// No call waits longer, in seconds.
    pub longest: Option<f64>,
    /// Jain's index is not below this.
    pub jain: Option<f64>,
}

impl Goal {
    /// Returns the name, the value and the goal of each metric that misses its goal.
    pub fn missed(&self, metrics: &Metrics) -> Vec<(&'static str, f64, f64)> {
        let most = [
            ("refused", metrics.retry_pct_pooled, self.refused),
            ("longest", metrics.max_wait, self.longest),
        ];
        let least = [
            ("used", metrics.util_pct, self.used),
            ("jain", metrics.jain, self.jain),
        ];
        let given =
            |(name, value, goal): (&'static str, f64, Option<f64>)| Some((name, value, goal?));
        let above = most.into_iter().filter_map(given);
        let below = least.into_iter().filter_map(given);
        above
            .filter(|(_, value, goal)| value > goal)
            .chain(below.filter(|(_, value, goal)| value < goal))
            .collect()
    }
}
