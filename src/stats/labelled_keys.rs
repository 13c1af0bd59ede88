//! The keys of a gate that have metrics of their own: see `metrics_keys` of the builders.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::key_counts::Counted;
use super::values::{KeyStats, Stats};
use crate::clock;
use crate::key::Key;
use crate::locks::lock;

/// A key without requests for this long frees its place for another one.
const IDLE: Duration = Duration::from_secs(3600);

/// The most keys that have series in the life of a gate, with places or without.
const MOST_SERIES: usize = 10_000;

/// How many of the busiest keys may get a free place.
const MOST_CANDIDATES: usize = 1000;

/// What was counted of the requests of a key since it got a place.
#[derive(Clone, Debug)]
pub(crate) struct KeySeries {
    pub(crate) name: Box<str>,
    pub(crate) counted: Counted,
}

/// The stats of a gate, and the series of its keys. `None` if none has series of its own.
pub(crate) type WithKeys = (Stats, Option<Vec<KeySeries>>);

/// The keys that have places.
#[derive(Default)]
pub(crate) struct LabelledKeys {
    /// The most keys.
    most: AtomicUsize,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    keys: BTreeMap<Key, Place>,
    /// Keys that had a place before.
    former: BTreeMap<Key, Place>,
    /// Whether keys have been looked at before.
    has_begun: bool,
}

struct Place {
    series: KeySeries,
    /// What the state of the key had counted when it was read last.
    seen: Counted,
    /// When the key last had a request.
    active_at: Instant,
}

impl Place {
    /// Adds what was counted since the last time. `stats` are those of the key, if it has state.
    fn take_in(&mut self, stats: Option<&KeyStats>, now: Instant) {
        let Some(stats) = stats else {
            self.seen = Default::default();
            return;
        };
        let counted = stats.counted;
        // The state may have been forgotten and made anew meanwhile. Then it counts from zero. Units alone fall if
        // permits are given back.
        if counted.requests.total() < self.seen.requests.total() {
            self.seen = Counted::default();
        }
        if counted != self.seen {
            self.active_at = now;
        }
        let mut more = counted;
        more.merge(&self.seen, u64::saturating_sub);
        self.series.counted.merge(&more, u64::wrapping_add);
        // A series does not fall: units that were given back are made up for by the next ones.
        self.seen.merge(&counted, u64::max);
    }
}

impl LabelledKeys {
    /// Sets how many keys have places.
    pub(super) fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Returns what the keys with places have counted. `None` if no key may have one. `stats` returns the
    /// stats of a key with state. New keys, which `busiest` returns, get the free places.
    pub(super) fn read(
        &self,
        stats: impl Fn(Key) -> Option<KeyStats>,
        busiest: impl Fn(usize) -> Vec<Key>,
    ) -> Option<Vec<KeySeries>> {
        let most = self.most.load(Ordering::Relaxed);
        if most == 0 {
            return None;
        }
        let now = clock::now();
        let mut places = lock(&self.places);
        let Places {
            keys,
            former,
            has_begun,
        } = &mut *places;
        for (key, place) in keys.iter_mut() {
            place.take_in(stats(*key).as_ref(), now);
        }
        let idle = keys
            .iter()
            .filter(|(_, place)| now.saturating_duration_since(place.active_at) >= IDLE);
        let idle: Vec<Key> = idle.map(|(key, _)| *key).collect();
        for key in idle {
            former.extend(keys.remove_entry(&key));
        }
        if keys.len() < most {
            for key in busiest(MOST_CANDIDATES) {
                if keys.len() == most {
                    break;
                }
                // No series is dropped, because a recorder keeps it, and what it counted would be counted under `other` again.
                if keys.len() + former.len() >= MOST_SERIES && !former.contains_key(&key) {
                    continue;
                }
                let Some(stats) = stats(key).filter(|_| !keys.contains_key(&key)) else {
                    continue;
                };
                let seen = stats.counted;
                let series = match former.remove(&key) {
                    Some(place) if place.seen == seen => {
                        // It is still idle.
                        former.insert(key, place);
                        continue;
                    }
                    Some(place) => place.series,
                    None => KeySeries {
                        name: stats.name.clone(),
                        counted: Counted::default(),
                    },
                };
                // What it has counted without a place is part of `other`.
                let seen = if *has_begun { seen } else { Default::default() };
                let mut place = Place {
                    series,
                    seen,
                    active_at: now,
                };
                place.take_in(Some(&stats), now);
                keys.insert(key, place);
            }
        }
        *has_begun = true;
        let all = keys.values().chain(former.values());
        Some(all.map(|place| place.series.clone()).collect())
    }
}
