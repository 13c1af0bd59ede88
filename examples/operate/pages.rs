//! What the program serves: the metrics, and its limits as text.

use std::fmt::Write as _;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tollgate::metrics::{STORE_CALL_BUCKETS, WAIT_BUCKETS};
use tollgate::stats::{self, Stats};

use crate::common;

/// Installs the recorder of the program. Its other metrics are on the same page.
pub(crate) fn install_recorder() -> Result<PrometheusHandle, BuildError> {
    let metric = |name: &str| Matcher::Full(name.to_owned());
    PrometheusBuilder::new()
        .set_buckets_for_metric(metric("tollgate_wait_seconds"), &WAIT_BUCKETS)?
        .set_buckets_for_metric(metric("tollgate_store_call_seconds"), &STORE_CALL_BUCKETS)?
        .install_recorder()
}

pub(crate) fn router(metrics: PrometheusHandle) -> Router {
    Router::new()
        .route("/limits", get(async || limits(&stats::all())))
        .route(
            "/metrics",
            get(async move || {
                // The page has the counts of this moment.
                tollgate::metrics::publish();
                metrics.render()
            }),
        )
}

/// Shows all limits, and what they do now.
fn limits(all: &[Stats]) -> String {
    let seconds = |span: Option<Duration>| match span {
        Some(span) if !span.is_zero() => common::span(span),
        _ => "-".to_owned(),
    };
    let row = |stats: &Stats| {
        let requests = stats.requests();
        let hold = stats.values().find(|(name, _)| *name == "hold_seconds");
        let hold = hold.map(|(_, seconds)| Duration::from_secs_f64(seconds));
        let limits: Vec<String> = stats.limits().iter().map(ToString::to_string).collect();
        [
            stats.name().to_string(),
            limits.join(", "),
            (requests.passed + requests.waited + requests.uncounted).to_string(),
            (requests.refused + requests.store).to_string(),
            stats.waiting().to_string(),
            seconds(stats.waits().quantile(0.99)),
            seconds(hold),
        ]
    };
    let rows: Vec<_> = all.iter().map(row).collect();
    let titles = [
        "limiter", "limits", "sent", "refused", "waiting", "p99 wait", "hold",
    ];
    let mut page = common::table(titles, &rows);
    for stats in all.iter().filter(|stats| stats.refusals().total() > 0) {
        let _ = write!(page, "\n{} refused:", stats.name());
        for (reason, count) in stats.refusals().iter().filter(|(_, count)| *count > 0) {
            let _ = write!(page, " {reason} {count}");
        }
    }
    page + "\n"
}
