//! What happened when, for charts.

use super::server::Verdict;

/// What happened when in one run. Times are in seconds, callers are numbered from 0.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Trace {
    /// When, which caller, and how long it was held back before this request.
    pub held: Vec<(f64, usize, f64)>,
    /// When, which caller, whether the server accepted, and what was left then.
    pub judged: Vec<(f64, usize, bool, f64)>,
}

impl Trace {
    pub(super) fn held(&mut self, now: f64, caller: usize, held: f64) {
        self.held.push((now, caller, held));
    }

    pub(super) fn judged(&mut self, now: f64, caller: usize, verdict: &Verdict) {
        self.judged.push((now, caller, verdict.ok, verdict.remaining));
    }
}
