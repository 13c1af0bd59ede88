//! The series of a gate or a store: its stats as counters and gauges with names and labels.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use metrics::{Key, Label, SharedString};

use super::names;
use crate::quota::Limit;
use crate::stats::{Counted, KeySeries, Stats, WithKeys};
#[cfg(feature = "redis")]
use crate::store::StoreStats;

/// The statuses of most refusals, each with a series of its own. All others, such as that of an error code in a 500, are
/// `other`: a server cannot make more series.
const STATUSES: [&str; 10] = [
    "400", "402", "403", "418", "420", "429", "430", "503", "509", "529",
];

/// The values of all series at one moment.
#[derive(Clone)]
pub(super) struct Series {
    /// What only grows.
    pub(super) counters: BTreeMap<Key, u64>,
    /// What is now. A gauge that is missing is 0.
    pub(super) gauges: BTreeMap<Key, f64>,
}

impl Series {
    pub(super) const fn new() -> Self {
        Series {
            counters: BTreeMap::new(),
            gauges: BTreeMap::new(),
        }
    }

    /// Adds the counts of a gate to those of the other gates with its name.
    pub(super) fn add_counters(&mut self, (stats, keys): &WithKeys) {
        match keys {
            None => self.add_requests(stats, None, &stats.counted),
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
        if let Some(guard) = &stats.gate.guard {
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
        let mut others = stats.counted;
        for key in keys {
            self.add_requests(stats, Some(&key.name), &key.counted);
            others.merge(&key.counted, u64::saturating_sub);
        }
        self.add_requests(stats, Some("other"), &others);
    }

    fn add_requests(&mut self, stats: &Stats, of_key: Option<&str>, counted: &Counted) {
        let mut add = |name, label: (&'static str, SharedString), count: u64| {
            let of_key = of_key.map(|of_key| ("key", SharedString::from(of_key.to_owned())));
            let labels: Vec<_> = of_key.into_iter().chain([label]).collect();
            *self.counters.entry(key(name, stats, &labels)).or_default() += count;
        };
        // Also outcomes that no request had yet: the first one is then an increase, which alerts see.
        for (outcome, count) in counted.requests.by_outcome() {
            add(names::REQUESTS, ("outcome", outcome.into()), count);
        }
        if counted.units > 0 {
            add(names::UNITS, ("unit", stats.unit.into()), counted.units);
        }
    }

    /// Adds the state of a gate to those of the other gates with its name.
    pub(super) fn add_gauges(&mut self, stats: &Stats) {
        let waiting = ("waiting", stats.waiting as f64);
        for (value, now) in stats.values().chain([waiting]) {
            if let Some(name) = names::gauge_of(value) {
                self.merge(key(name, stats, &[]), now, merged_by(value));
            }
        }
        for limit in stats.limits() {
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
        let mut add = |name, labels: &[(&'static str, SharedString)], count| {
            let key = key_of(name, ("store", &stats.prefix), labels);
            *self.counters.entry(key).or_default() += count;
        };
        let by_call = stats.by_call();
        let in_use = by_call.filter(|(_, calls)| calls.by_result().any(|(_, count)| count > 0));
        for (call, calls) in in_use {
            for (result, count) in calls.by_result() {
                let labels = [("call", call.into()), ("result", result.into())];
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
            let key = key_of(names::STORE_UP, ("store", &stats.prefix), &[]);
            let gauge = self.gauges.entry(key);
            gauge.and_modify(|all| *all = all.min(up)).or_insert(up);
        }
        let deaf = f64::from(u8::from(stats.is_subscribed() == Some(false)));
        let key = key_of(names::STORE_DEAF, ("store", &stats.prefix), &[]);
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

/// Returns what the gauges of gates with one name are together. Most are added.
fn merged_by(value: &str) -> fn(f64, f64) -> f64 {
    match value {
        "pace_per_second" => f64::min,
        "pace_processes" | "draining" => f64::max,
        _ if value.ends_with("_seconds") => f64::max,
        _ => |one, other| one + other,
    }
}

/// Makes the key of the series `name` of a gate.
fn key(name: &'static str, stats: &Stats, labels: &[(&'static str, SharedString)]) -> Key {
    key_of(name, ("limiter", &stats.name), labels)
}

/// Makes the key of the series `name` of a gate or a store, which is the first label.
pub(super) fn key_of(
    name: &'static str,
    (label, owner): (&'static str, &Arc<str>),
    others: &[(&'static str, SharedString)],
) -> Key {
    let owner = Label::new(label, SharedString::from(owner.clone()));
    let others = others
        .iter()
        .map(|(label, value)| Label::new(*label, value.clone()));
    Key::from_parts(
        name,
        std::iter::once(owner).chain(others).collect::<Vec<_>>(),
    )
}
