//! The series of a gate or a store: its stats as counters and gauges with names and labels.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Key, Label, SharedString};

use super::names;
use crate::quota::Limit;
use crate::stats::{KeySeries, Requests, Stats, WithKeys};
#[cfg(feature = "redis")]
use crate::store::StoreStats;

/// The statuses that a signal reads as a refusal, each with a series of its own. All others are
/// `other`: a server cannot make more series.
const STATUSES: [&str; 10] = [
    "400", "402", "403", "418", "420", "429", "430", "503", "509", "529",
];

/// The values of all series at one moment.
#[derive(Default)]
pub(super) struct Series {
    /// What only grows.
    pub(super) counters: BTreeMap<Key, u64>,
    /// What is now. A gauge that is missing is 0.
    pub(super) gauges: BTreeMap<Key, f64>,
}

impl Series {
    /// Adds the counts of a gate to those of the other gates with its name.
    pub(super) fn add_counters(&mut self, (stats, keys): &WithKeys) {
        match keys {
            None => self.add_requests(stats, None, &stats.requests, stats.units),
            Some(keys) => self.add_requests_of_keys(stats, keys),
        }
        let mut add = |name, labels: &[(&'static str, SharedString)], count: u64| {
            if count > 0 {
                let sum = self.counters.entry(key(name, stats, labels)).or_default();
                *sum += count;
            }
        };
        add(names::SENT_AGAIN, &[], stats.sent_again);
        for (reason, count) in stats.refusals.iter() {
            add(
                names::REFUSALS,
                &[("reason", reason.to_owned().into())],
                count,
            );
        }
        for (status, count) in stats.upstream_refusals.iter() {
            let known = STATUSES.into_iter().find(|known| *known == status);
            let status = known.unwrap_or("other").into();
            add(names::UPSTREAM_REFUSALS, &[("status", status)], count);
        }
        for (cause, count) in stats.holds.iter() {
            add(names::HOLDS, &[("cause", cause.to_owned().into())], count);
        }
        // These begin at 0, too.
        if let Some(guard) = &stats.guard {
            let counts = [
                (names::BAD_ANSWERS, guard.bad),
                (names::GUARD_TRIPS, guard.trips),
            ];
            for (name, count) in counts {
                *self.counters.entry(key(name, stats, &[])).or_default() += count;
            }
        }
    }

    /// Adds what a gate has counted by key. What its keys with series have not counted is `other`.
    fn add_requests_of_keys(&mut self, stats: &Stats, keys: &[KeySeries]) {
        let (mut others, mut units) = (stats.requests, stats.units);
        for key in keys {
            self.add_requests(stats, Some(&key.name), &key.requests, key.units);
            others.merge(&key.requests, u64::saturating_sub);
            units = units.saturating_sub(key.units);
        }
        self.add_requests(stats, Some("other"), &others, units);
    }

    fn add_requests(
        &mut self,
        stats: &Stats,
        of_key: Option<&str>,
        requests: &Requests,
        units: u64,
    ) {
        let mut add = |name, label: (&'static str, SharedString), count: u64| {
            let of_key = of_key.map(|of_key| ("key", SharedString::from(of_key.to_owned())));
            let labels: Vec<_> = of_key.into_iter().chain([label]).collect();
            *self.counters.entry(key(name, stats, &labels)).or_default() += count;
        };
        // Also outcomes that no request had yet: the first one is then an increase, which alerts see.
        for (outcome, count) in requests.by_outcome() {
            add(names::REQUESTS, ("outcome", outcome.into()), count);
        }
        if units > 0 {
            add(names::UNITS, ("unit", stats.unit.into()), units);
        }
    }

    /// Adds the state of a gate to those of the other gates with its name.
    pub(super) fn add_gauges(&mut self, stats: &Stats) {
        let mut sum =
            |name, value: u64| self.merge(key(name, stats, &[]), value as f64, |a, b| a + b);
        sum(names::KEYS, stats.keys as u64);
        sum(names::KEYS_HELD, stats.keys_held as u64);
        sum(names::KEYS_ALONE, stats.keys_alone as u64);
        sum(names::KEYS_WITH_SET_QUOTA, stats.keys_with_set_quota as u64);
        sum(names::KEYS_LIMIT, stats.max_keys as u64);
        sum(names::WAITING, stats.waiting as u64);
        sum(names::AT_HAND, stats.at_hand);
        sum(names::UNKNOWN_CLASSES, stats.unknown_classes);
        if let Some(calls) = stats.in_flight {
            sum(names::IN_FLIGHT, calls.in_use);
            sum(names::IN_FLIGHT_WAITING, calls.waiting);
        }
        let mut longest = |name, span: Option<Duration>| {
            let seconds = span.unwrap_or_default().as_secs_f64();
            self.merge(key(name, stats, &[]), seconds, f64::max);
        };
        longest(names::OLDEST_WAIT, stats.oldest_wait);
        longest(names::HOLD_SECONDS, stats.longest_hold);
        let draining = f64::from(u8::from(stats.draining));
        self.merge(key(names::DRAINING, stats, &[]), draining, f64::max);
        if let Some(pace) = stats.pace {
            let per_second = pace.per_second.unwrap_or_default();
            self.merge(key(names::PACE, stats, &[]), per_second, f64::min);
            let processes = key(names::PACE_PROCESSES, stats, &[]);
            self.merge(processes, pace.processes.into(), f64::max);
        }
        for limit in &stats.limits {
            let (Limit::Sliding { count, window }
            | Limit::Bucket { count, window, .. }
            | Limit::Fixed { count, window }) = *limit
            else {
                continue;
            };
            let labels = [
                ("limit", limit.to_string().into()),
                ("unit", stats.unit.into()),
            ];
            let units = key(names::LIMIT_UNITS, stats, &labels);
            self.merge(units, count.into(), f64::max);
            let seconds = key(names::LIMIT_WINDOW, stats, &labels);
            self.merge(seconds, window.as_secs_f64(), f64::max);
        }
    }

    /// Adds the counts of a store to those of the other stores with its prefix.
    #[cfg(feature = "redis")]
    pub(super) fn add_store_counters(&mut self, stats: &StoreStats) {
        let mut add = |name, labels: &[(&'static str, &'static str)], count| {
            let key = store_key(name, &stats.prefix, labels);
            *self.counters.entry(key).or_default() += count;
        };
        let by_call = stats.by_call();
        let in_use = by_call.filter(|(_, calls)| calls.by_result().any(|(_, count)| count > 0));
        for (call, calls) in in_use {
            for (result, count) in calls.by_result() {
                let labels = [("call", call), ("result", result)];
                add(names::STORE_CALLS, &labels, count);
            }
        }
        add(names::STORE_CONNECTS, &[], stats.connects());
    }

    /// Adds the state of a store: 0 if one of those with its prefix has not its connections.
    #[cfg(feature = "redis")]
    pub(super) fn add_store_gauges(&mut self, stats: &StoreStats) {
        if let Some(up) = stats.is_up() {
            let up = f64::from(u8::from(up));
            let gauge = self
                .gauges
                .entry(store_key(names::STORE_UP, &stats.prefix, &[]));
            gauge.and_modify(|all| *all = all.min(up)).or_insert(up);
        }
        let deaf = f64::from(u8::from(stats.is_subscribed() == Some(false)));
        let key = store_key(names::STORE_DEAF, &stats.prefix, &[]);
        self.merge(key, deaf, f64::max);
    }

    /// Adds a gauge that no gate has.
    pub(super) fn set_gauge(&mut self, key: Key, value: f64) {
        self.merge(key, value, f64::max);
    }

    fn merge(&mut self, key: Key, value: f64, merge: impl Fn(f64, f64) -> f64) {
        if value == 0.0 {
            return;
        }
        match self.gauges.entry(key) {
            Entry::Vacant(entry) => drop(entry.insert(value)),
            Entry::Occupied(mut entry) => {
                let merged = merge(*entry.get(), value);
                entry.insert(merged);
            }
        }
    }
}

/// Makes the key of the series `name` of a gate.
fn key(name: &'static str, stats: &Stats, labels: &[(&'static str, SharedString)]) -> Key {
    let limiter = Label::new("limiter", limiter(&stats.name));
    let others = labels
        .iter()
        .map(|(name, value)| Label::new(*name, value.clone()));
    Key::from_parts(
        name,
        std::iter::once(limiter).chain(others).collect::<Vec<_>>(),
    )
}

/// Makes the key of the series `name` of a store.
#[cfg(feature = "redis")]
pub(super) fn store_key(
    name: &'static str,
    prefix: &Arc<str>,
    labels: &[(&'static str, &'static str)],
) -> Key {
    let store = Label::new("store", SharedString::from(prefix.clone()));
    let others = labels
        .iter()
        .map(|(name, value)| Label::from_static_parts(name, value));
    Key::from_parts(
        name,
        std::iter::once(store).chain(others).collect::<Vec<_>>(),
    )
}

/// Returns the value of the label `limiter`.
pub(super) fn limiter(name: &Arc<str>) -> SharedString {
    SharedString::from(name.clone())
}
