//! The events of a run, for charts.

use super::server::Verdict;

/// The events of one run. Times are in seconds since the start. Callers count from 0.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Trace {
    /// For each request sent: the time, the caller, and how long the request waited.
    pub held: Vec<(f64, usize, f64)>,
    /// For each request judged: the time, the caller, whether the server accepted it, and what was
    /// left then.
    pub judged: Vec<(f64, usize, bool, f64)>,
}

impl Trace {
    pub(super) fn held(&mut self, now: f64, caller: usize, held: f64) {
        self.held.push((now, caller, held));
    }

    pub(super) fn judged(&mut self, now: f64, caller: usize, verdict: &Verdict) {
        self.judged
            .push((now, caller, verdict.ok, verdict.remaining));
    }
}
