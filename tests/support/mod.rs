//! Shared by the tests: clocks, counts, upstreams without sockets, stores that fail or are distant.
#![allow(dead_code, reason = "each binary of tests uses its part")]
#![allow(unused_imports, reason = "each binary of tests uses its part")]

pub(crate) mod busy;
pub(crate) mod channels;
mod clock;
pub(crate) mod counted;
#[cfg(feature = "redis")]
pub(crate) mod in_flight;
pub(crate) mod over;
#[cfg(feature = "redis")]
pub(crate) mod patient;
pub(crate) mod remote;
mod service;
mod store;

use std::time::Duration;

use tollgate::limiter::KeyStatus;
use tollgate::stats::Stats;
use tollgate::{Key, Limited, RateLimitLayer};

pub(crate) use clock::{
    far_future, long_ago, now, pass, paused, paused_runtime, roll_dice, settle, soon,
};
pub(crate) use service::{Upstream, get, limited, ok, other_error};
pub(crate) use store::{Distant, Failing};

/// The time between two calls under `Quota::per_second(1)`, in milliseconds: a second, the validity
/// of a permit, and the default `transit_slack`.
pub(crate) const SECOND: u64 = 1030;

pub(crate) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns the state of `key` under `limit`.
pub(crate) async fn peek(limit: &RateLimitLayer, key: Key) -> KeyStatus {
    limit
        .limiter()
        .peek(key)
        .await
        .expect("the memory store is there")
}

/// Returns how many units of the first limit are used under [`Key::ALL`].
pub(crate) async fn used(limit: &RateLimitLayer) -> u64 {
    peek(limit, Key::ALL).await.limits[0].used
}

/// Returns how many requests wait under [`Key::ALL`].
pub(crate) async fn waiting(limit: &RateLimitLayer) -> usize {
    peek(limit, Key::ALL).await.waiting
}

/// Names the source of a refusal: the one function that programs need for both ecosystems.
pub(crate) fn who_said_no(error: &(dyn std::error::Error + 'static)) -> &'static str {
    match Limited::find(error) {
        Some(Limited::Local { .. }) => "local",
        Some(Limited::Upstream { .. }) => "upstream",
        Some(Limited::Store { .. }) => "store",
        Some(_) => "newer than this test",
        None => "inner",
    }
}

/// Returns a value of [`Stats::values`](tollgate::stats::Stats::values). `None` if it is missing.
pub(crate) fn value(stats: &Stats, name: &str) -> Option<f64> {
    stats
        .values()
        .find_map(|(other, value)| (other == name).then_some(value))
}

/// Returns a count of [`Stats::values`](tollgate::stats::Stats::values).
#[track_caller]
pub(crate) fn count_of(stats: &Stats, name: &str) -> u64 {
    let count = value(stats, name).unwrap_or_else(|| panic!("{name} is missing in {stats:?}"));
    assert_eq!(count.fract(), 0.0, "{name} is no count");
    count as u64
}
