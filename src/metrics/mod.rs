//! The counts of all layers of this process as metrics of the crate [`metrics`](https://docs.rs/metrics).
//!
//! Install a recorder, such as the one of `metrics-exporter-prometheus`, and then call
//! [`publish_every`]. The page [operate](crate::guide::operate#metrics) lists the metrics, and has a
//! dashboard and alerts.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//! use tollgate::{Key, Quota, RateLimitLayer, metrics::WAIT_BUCKETS};
//!
//! let page = PrometheusBuilder::new()
//!     .set_buckets_for_metric(Matcher::Full("tollgate_wait_seconds".into()), &WAIT_BUCKETS)?;
//! # #[cfg(feature = "redis")]
//! let page = page.set_buckets_for_metric(
//!     Matcher::Full("tollgate_store_call_seconds".into()),
//!     &tollgate::metrics::STORE_CALL_BUCKETS, // of a store in Redis
//! )?;
//! let page = page.install_recorder()?;
//! tollgate::metrics::publish_every(Duration::from_secs(5));
//!
//! let layer = RateLimitLayer::builder(Quota::per_second(50)).name("github").build()?;
//! let permit = layer.limiter().acquire(Key::ALL).await?;
//! # drop(permit);
//! # tokio::time::sleep(Duration::from_secs(6)).await;
//! // Five seconds later, on the page that Prometheus reads:
//! let line = r#"tollgate_requests_total{limiter="github",outcome="passed"} 1"#;
//! assert!(page.render().contains(line));
//! # Ok(())
//! # }
//! ```
//!
//! The program and tollgate must use the same `metrics` 0.24. If `cargo tree --duplicates` lists `metrics`,
//! nothing is published, and there is no error.

// A file imports only files that stand above it in this table.
//
// | file | what it has |
// |---|---|
// | `names` | the names of the metrics |
// | `series` | the stats of gates and stores as counters and gauges |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{Key, Label, Recorder};

use self::names::METADATA;
use self::series::Series;
use crate::clock;
use crate::locks::lock;
use crate::stats::{self, Exporter, WaitRecorder, WithKeys};
#[cfg(feature = "redis")]
use crate::store::{self, StoreStats};

mod names;
mod series;

/// The upper bounds of buckets for `tollgate_wait_seconds`, in seconds: those of
/// [`Stats::waits`](crate::stats::Stats::waits).
///
/// The recorder gets each wait, and counts it in buckets of its own. `metrics-exporter-prometheus`
/// needs them for a histogram. Without buckets it makes a summary, and the dashboard and the alerts
/// do not work.
pub const WAIT_BUCKETS: [f64; 17] = stats::WAIT_SECONDS;

/// The upper bounds of buckets for `tollgate_store_call_seconds`, in seconds: those of
/// [`StoreCalls::latency`](crate::store::StoreCalls::latency).
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub const STORE_CALL_BUCKETS: [f64; 17] = store::CALL_SECONDS;

/// What the recorder was given.
struct Published {
    counters: BTreeMap<Key, u64>,
    /// The gauges that are not 0.
    gauges: BTreeSet<Key>,
}

static PUBLISHED: Mutex<Published> = Mutex::new(Published {
    counters: BTreeMap::new(),
    gauges: BTreeSet::new(),
});

/// The counts of gates that were dropped since the first publish.
static DROPPED: Mutex<Series> = Mutex::new(Series::new());

/// Gives the installed recorder what was counted since the last call, and the present state.
///
/// The first call gives it all counts since the layers were built. From then on, each wait is recorded
/// when it ends: earlier waits are in no histogram. So call it once at the start of the program, after
/// the recorder is installed. What is given to no recorder is lost. Call it again at the end of the
/// program, for the last counts.
///
/// Series of layers with equal names are summed. A layer that was dropped keeps its counts, and its
/// gauges become 0. Outcomes of requests, and what a ban guard counts, begin at 0, all other series when
/// they are not 0.
///
/// It reads [`stats::all`], and calls no store.
pub fn publish() {
    stats::export_to(Exporter {
        wait_recorder,
        #[cfg(feature = "redis")]
        call_recorder,
        dropped,
    });
    let mut published = lock(&PUBLISHED);
    let series = series();
    metrics::with_recorder(|recorder| {
        names::describe(recorder);
        published.update(recorder, &series);
    });
}

/// Calls [`publish`] now, and then each `interval` until the Tokio runtime ends. 5 s is a good
/// interval. It should not be longer than the one at which the metrics are collected.
///
/// # Panics
///
/// If it is called outside of a Tokio runtime with timers, or if `interval` is zero.
pub fn publish_every(interval: Duration) {
    assert!(
        !interval.is_zero(),
        "the interval of publish_every must be longer than zero"
    );
    publish();
    tokio::spawn(async move {
        loop {
            clock::sleep(interval).await;
            publish();
        }
    });
}

/// Returns the values of all series now.
fn series() -> Series {
    #[cfg(feature = "redis")]
    let stores = stores();
    // None of these is dropped before the end of this function, so each gate is counted once.
    let gates = stats::all_but_noted();
    let mut series = lock(&DROPPED).clone();
    for gate in &gates {
        let gate = gate.with_keys();
        series.add_counters(&gate);
        series.add_gauges(&gate.0);
    }
    #[cfg(feature = "redis")]
    for stats in &stores {
        series.add_store_counters(stats);
        series.add_store_gauges(stats);
    }
    let version = Label::from_static_parts("version", env!("CARGO_PKG_VERSION"));
    series.set_gauge(Key::from_parts(names::BUILD_INFO, vec![version]), 1.0);
    series
}

impl Published {
    /// Gives the recorder the differences to `series`.
    ///
    /// Only `Counter::increment`, `Gauge::set` and `Histogram::record` are used. Some recorders, such
    /// as the one for OpenTelemetry, have no others.
    fn update(&mut self, recorder: &dyn Recorder, series: &Series) {
        for (key, count) in &series.counters {
            let before = self.counters.get(key).copied();
            let more = count.saturating_sub(before.unwrap_or(0));
            if before.is_some() && more == 0 {
                continue;
            }
            let counter = recorder.register_counter(key, &METADATA);
            if more > 0 {
                counter.increment(more);
            }
            self.counters.insert(key.clone(), *count);
        }
        for key in &self.gauges {
            if !series.gauges.contains_key(key) {
                recorder.register_gauge(key, &METADATA).set(0.0);
            }
        }
        for (key, value) in &series.gauges {
            recorder.register_gauge(key, &METADATA).set(*value);
        }
        self.gauges = series.gauges.keys().cloned().collect();
    }
}

/// Keeps the counts of a gate that is dropped.
fn dropped(gate: &WithKeys) {
    lock(&DROPPED).add_counters(gate);
}

/// Returns the stats of the stores that exist, and keeps the counts of those that were dropped.
#[cfg(feature = "redis")]
fn stores() -> Vec<StoreStats> {
    let mut living = Vec::new();
    for (stats, is_last) in store::stores::take() {
        match is_last {
            true => lock(&DROPPED).add_store_counters(&stats),
            false => living.push(stats),
        }
    }
    living
}

/// Makes what records how long the calls of the stores with this prefix took.
#[cfg(feature = "redis")]
fn call_recorder(prefix: &Arc<str>, call: &'static str) -> WaitRecorder {
    let labels = [("call", call.into())];
    recorder(series::key_of(
        names::STORE_CALL_SECONDS,
        ("store", prefix),
        &labels,
    ))
}

/// Makes what records the waits of the gates called `name`.
fn wait_recorder(name: &Arc<str>) -> WaitRecorder {
    recorder(series::key_of(names::WAIT_SECONDS, ("limiter", name), &[]))
}

/// Makes what records into the histogram `key`.
fn recorder(key: Key) -> WaitRecorder {
    let histogram = metrics::with_recorder(|recorder| recorder.register_histogram(&key, &METADATA));
    Box::new(move |wait| histogram.record(wait.as_secs_f64()))
}
