//! What a strategy knows of a scenario.

use std::time::Duration;

use super::numbers::span;
use super::scenario::Scenario;
use tollgate::OnStoreError;
use tollgate::Quota;

/// What a pace or a gate knows of the scenario at the start.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Brief {
    /// The server's limit and window, if the scenario gives them as a hint.
    pub hint: Option<(u32, Duration)>,
    /// The interval between requests with which every caller starts.
    pub start_interval: Duration,
    /// The quota for gates that need one. Default: the hint, as a sliding window.
    pub quota: Option<Quota>,
    /// How much the transit time to the server may vary, if the scenario states it.
    pub transit_slack: Option<Duration>,
    /// What happens to a request when the store does not respond.
    pub on_store_error: OnStoreError,
    /// The fraction of the quota for a process that has no recent grants, if the scenario states
    /// it.
    pub fallback_share: Option<f64>,
}

impl Brief {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let hint = scenario.hint.map(|(limit, window)| (limit, span(window)));
        Brief {
            hint,
            start_interval: span(scenario.start_interval),
            quota: scenario
                .quota
                .or(hint.map(|(limit, window)| Quota::new(limit, window))),
            transit_slack: scenario.transit_slack.map(span),
            on_store_error: scenario.on_store_error,
            fallback_share: scenario.fallback_share,
        }
    }
}
