//! The names of the metrics. They are API: dashboards and alerts depend on them.

use metrics::{KeyName, Metadata, Recorder, Unit};

/// What is given to the recorder about a series, besides its name and labels.
pub(super) const METADATA: Metadata<'static> =
    Metadata::new("tollgate", metrics::Level::INFO, Some("tollgate::metrics"));

pub(super) const REQUESTS: &str = "tollgate_requests_total";
pub(super) const REFUSALS: &str = "tollgate_refusals_total";
pub(super) const UNITS: &str = "tollgate_units_total";
pub(super) const SENT_AGAIN: &str = "tollgate_sent_again_total";
pub(super) const UPSTREAM_REFUSALS: &str = "tollgate_upstream_refusals_total";
pub(super) const HOLDS: &str = "tollgate_holds_total";
pub(super) const BAD_ANSWERS: &str = "tollgate_bad_answers_total";
pub(super) const GUARD_TRIPS: &str = "tollgate_guard_trips_total";
pub(super) const STORE_CALLS: &str = "tollgate_store_calls_total";
pub(super) const STORE_CONNECTS: &str = "tollgate_store_connects_total";

pub(super) const WAIT_SECONDS: &str = "tollgate_wait_seconds";
pub(super) const STORE_CALL_SECONDS: &str = "tollgate_store_call_seconds";

pub(super) const LIMIT_UNITS: &str = "tollgate_limit_units";
pub(super) const LIMIT_WINDOW: &str = "tollgate_limit_window_seconds";
pub(super) const STORE_UP: &str = "tollgate_store_up";
pub(super) const STORE_DEAF: &str = "tollgate_store_deaf";
pub(super) const BUILD_INFO: &str = "tollgate_build_info";

const COUNTERS: [(&str, &str); 10] = [
    (REQUESTS, "Requests, each once, by outcome"),
    (REFUSALS, "Requests refused by this process, by reason"),
    (UNITS, "Cost of the requests that got a permit"),
    (SENT_AGAIN, "Requests that had been sent before"),
    (
        UPSTREAM_REFUSALS,
        "Requests refused by the upstream, by status",
    ),
    (HOLDS, "Times that a key was put on hold, by cause"),
    (BAD_ANSWERS, "Answers that the ban guard counts"),
    (GUARD_TRIPS, "Trips of the ban guard"),
    (STORE_CALLS, "Calls to Redis, by subject and result"),
    (STORE_CONNECTS, "Connections made to Redis"),
];

const HISTOGRAMS: [(&str, &str); 2] = [
    (
        WAIT_SECONDS,
        "How long requests waited that got a permit after a wait",
    ),
    (STORE_CALL_SECONDS, "How long calls to Redis took"),
];

const GAUGES: [(&str, &str); 20] = [
    (
        "tollgate_unknown_classes",
        "Classes of requests that have no share",
    ),
    (
        LIMIT_UNITS,
        "Units that a limit allows in its window, for each key",
    ),
    (LIMIT_WINDOW, "Window of a limit"),
    (
        "tollgate_hold_seconds",
        "Longest time for which a key stays on hold",
    ),
    ("tollgate_keys", "Keys with state in this process"),
    ("tollgate_keys_held", "Keys on hold"),
    (
        "tollgate_keys_alone",
        "Keys that go on without the store, which is unreachable",
    ),
    (
        "tollgate_keys_with_set_quota",
        "Keys with a quota that an operator has set",
    ),
    ("tollgate_keys_limit", "Most keys that may have state"),
    ("tollgate_waiting", "Requests that wait"),
    (
        "tollgate_oldest_wait_seconds",
        "How long the request waits that has waited longest",
    ),
    (
        "tollgate_permits_at_hand",
        "Units prefetched and not used yet",
    ),
    ("tollgate_in_flight", "Calls in flight"),
    (
        "tollgate_in_flight_waiting",
        "Requests that wait for an in-flight slot",
    ),
    (
        "tollgate_pace_per_second",
        "Requests that may leave in a second, of all processes that share the pace",
    ),
    ("tollgate_pace_processes", "Processes that share the pace"),
    ("tollgate_draining", "1 if the limiter is drained"),
    (
        STORE_UP,
        "1 if the store has its connections to Redis, else 0",
    ),
    (
        STORE_DEAF,
        "1 if the store does not receive what other processes tell it",
    ),
    (BUILD_INFO, "1, with the version of tollgate"),
];

/// Returns the gauge of the [value](crate::stats::Stats::values) with this name. Some values are counters.
pub(super) fn gauge_of(value: &str) -> Option<&'static str> {
    let mut names = GAUGES.iter().map(|(name, _)| *name);
    names.find(|name| name.strip_prefix("tollgate_") == Some(value))
}

fn unit(name: &str) -> Option<Unit> {
    name.ends_with("_seconds").then_some(Unit::Seconds)
}

/// Gives the recorder the unit and the meaning of each metric.
pub(super) fn describe(recorder: &dyn Recorder) {
    for (name, text) in COUNTERS {
        recorder.describe_counter(KeyName::from_const_str(name), None, text.into());
    }
    for (name, text) in GAUGES {
        recorder.describe_gauge(KeyName::from_const_str(name), unit(name), text.into());
    }
    for (name, text) in HISTOGRAMS {
        recorder.describe_histogram(KeyName::from_const_str(name), unit(name), text.into());
    }
}
