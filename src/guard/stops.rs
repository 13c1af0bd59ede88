//! The stops of a guard: until when the requests of a key are stopped, and how long the next stop is.
//!
//! Each process keeps its own list. A process that trips publishes a hold, from which the others learn of
//! the stop. The length of the hold says how often it was doubled. So the next stop is twice as long,
//! whichever process trips.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::clock::{self, SleepMark};
use crate::guarded::SAME_CAUSE;
use crate::key::Key;
use crate::locks::lock;
use crate::store::HoldState;

/// The stops of all keys that a guard counts under.
pub(super) struct Stops {
    first: Duration,
    longest: Duration,
    /// The most keys. Holds of other keys are heard, too, and it is not known which they are.
    most: usize,
    stops: Mutex<StopsByKey>,
}

struct StopsByKey {
    stops: BTreeMap<Key, Stop>,
    /// When the stops that are over were last removed.
    cleaned: Option<Instant>,
    /// When it was last looked whether the machine has slept.
    sleep: SleepMark,
}

/// How often the stops that are over are removed at most. To look at all of them takes long.
const CLEANING: Duration = Duration::from_secs(1);

/// The last stop of a key.
#[derive(Clone, Copy, Debug)]
struct Stop {
    until: Instant,
    /// How often in a row its guard had tripped, including this stop. 0 after a release.
    number: u32,
    /// Whether the guard of this process has stopped the key, now or before. A hold that was heard of may be that of a key
    /// under which no guard counts.
    is_own: bool,
    /// How often the key had been released before, as far as this process knows.
    releases: u32,
}

/// A stop that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NewStop {
    pub(super) span: Duration,
    /// How often in a row the guard has tripped.
    pub(super) number: u32,
}

impl Stops {
    pub(super) fn new(first: Duration, longest: Duration, most: usize) -> Self {
        Stops {
            first,
            longest,
            most,
            stops: Mutex::new(StopsByKey {
                stops: BTreeMap::new(),
                cleaned: None,
                sleep: SleepMark::new(),
            }),
        }
    }

    /// Runs `act` on the stops. If the machine has slept, they end earlier, as the holds that they began do.
    fn with<R>(&self, act: impl FnOnce(&mut StopsByKey) -> R) -> R {
        let mut by_key = lock(&self.stops);
        let slept = by_key.sleep.look_now();
        if !slept.is_zero() {
            for stop in by_key.stops.values_mut() {
                stop.until = clock::before(stop.until, slept);
            }
        }
        act(&mut by_key)
    }

    /// Returns the length of the stop with this number.
    fn span(&self, number: u32) -> Duration {
        let doubled = self
            .first
            .saturating_mul(1 << number.saturating_sub(1).min(20));
        doubled.min(self.longest)
    }

    /// Returns the number of a stop that lasts for `span`.
    fn number(&self, span: Duration) -> u32 {
        let at_least = (1..20).find(|number| self.span(*number) + SAME_CAUSE >= span);
        at_least.unwrap_or(20)
    }

    /// Returns for how long `key` is stopped.
    pub(super) fn left(&self, key: Key, now: Instant) -> Option<Duration> {
        let until = self.with(|by_key| by_key.stops.get(&key).map(|stop| stop.until))?;
        (until > now).then(|| until - now)
    }

    /// Returns the keys that are stopped, and how often each had been released before.
    pub(super) fn in_force(&self, now: Instant) -> Vec<(Key, u32)> {
        self.with(|by_key| {
            let in_force = by_key.stops.iter().filter(|(_, stop)| stop.until > now);
            in_force.map(|(key, stop)| (*key, stop.releases)).collect()
        })
    }

    /// Begins a stop, because there were too many bad answers. The last one answers a request that was
    /// sent at `sent`. Returns `None` if that was before the end of the last stop.
    pub(super) fn trip(
        &self,
        key: Key,
        sent: Instant,
        releases: u32,
        now: Instant,
    ) -> Option<NewStop> {
        self.with(|by_key| {
            let last = by_key.stops.get(&key);
            if last.is_some_and(|last| sent < last.until || now < last.until) {
                return None;
            }
            let last = last.filter(|last| now < clock::after(last.until, self.longest));
            let number = last.map_or(1, |last| last.number.saturating_add(1));
            let span = self.span(number);
            self.insert(
                by_key,
                key,
                Stop {
                    until: clock::after(now, span),
                    number,
                    is_own: true,
                    releases,
                },
                now,
            );
            Some(NewStop { span, number })
        })
    }

    /// Takes in that another process has stopped `key`. Returns whether that is a new stop.
    pub(super) fn heard(&self, key: Key, held: HoldState, now: Instant) -> bool {
        let span = held.remaining;
        self.with(|by_key| {
            let until = clock::after(now, span);
            let last = by_key.stops.get(&key);
            if last.is_some_and(|last| until <= clock::after(last.until, SAME_CAUSE)) {
                return false;
            }
            // A process that does not know of earlier stops stops the key for a shorter time.
            let last = last.filter(|last| now < clock::after(last.until, self.longest));
            let number = self.number(span).max(last.map_or(0, |last| last.number));
            let is_own = last.is_some_and(|last| last.is_own);
            let stop = Stop {
                until,
                number,
                is_own,
                releases: held.releases,
            };
            self.insert(by_key, key, stop, now);
            true
        })
    }

    /// Ends the stop of `key`. Returns when it would have ended, if it is not over.
    pub(super) fn release(&self, key: Key, now: Instant) -> Option<Instant> {
        self.with(|by_key| {
            let stop = by_key.stops.get_mut(&key)?;
            let until = stop.until;
            if until <= now {
                return None;
            }
            // Answers to requests that were sent before do not trip the guard again.
            stop.until = now;
            stop.number = 0;
            Some(until)
        })
    }

    fn insert(&self, by_key: &mut StopsByKey, key: Key, stop: Stop, now: Instant) {
        let StopsByKey { stops, cleaned, .. } = by_key;
        let is_full =
            |stops: &BTreeMap<Key, Stop>| stops.len() >= self.most && !stops.contains_key(&key);
        if is_full(stops) && cleaned.is_none_or(|at| clock::after(at, CLEANING) <= now) {
            *cleaned = Some(now);
            stops.retain(|_, stop| match stop.is_own {
                // An own stop that is over says how long the next one is.
                true => clock::after(stop.until, self.longest) > now,
                false => stop.until > now,
            });
        }
        if is_full(stops) && stop.is_own {
            let spare = stops
                .iter()
                .filter(|(_, old)| !old.is_own || old.until <= now);
            let spare = spare.min_by_key(|(_, old)| (old.is_own, old.until));
            if let Some(spare) = spare.map(|(key, _)| *key) {
                stops.remove(&spare);
            }
        }
        if !is_full(stops) {
            stops.insert(key, stop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn held(seconds: u64) -> HoldState {
        HoldState::new(secs(seconds), 0)
    }

    #[test]
    fn stops_double_up_to_the_longest() {
        let (stops, mut now) = (Stops::new(secs(60), secs(300), 10), clock::now());
        let key = Key::new("a");
        for (number, expected) in (1..).zip([60, 120, 240, 300, 300]) {
            let span = secs(expected);
            assert_eq!(stops.trip(key, now, 0, now), Some(NewStop { span, number }));
            assert_eq!(stops.left(key, now), Some(span));
            now += span;
        }
        now += secs(300);
        assert_eq!(
            stops.trip(key, now, 0, now).map(|stop| stop.span),
            Some(secs(60))
        );
    }

    #[test]
    fn stop_of_another_process_counts_as_own() {
        let (stops, now) = (Stops::new(secs(60), secs(3600), 10), clock::now());
        let key = Key::new("a");
        let late = Duration::from_millis(30);
        assert!(stops.heard(key, held(120), now));
        assert!(!stops.heard(key, held(120), now + late));
        assert_eq!(stops.trip(key, now, 0, now + late), None);
        let end = now + secs(121);
        let span = secs(240);
        assert_eq!(
            stops.trip(key, end, 0, end),
            Some(NewStop { span, number: 3 })
        );
    }

    /// A process that has just started does not know of earlier stops, and stops the key for the shortest time.
    #[test]
    fn a_short_stop_of_another_process_does_not_undo_the_doubling() {
        let (stops, mut now) = (Stops::new(secs(60), secs(3600), 10), clock::now());
        let key = Key::new("a");
        for _ in 0..3 {
            now += stops.trip(key, now, 0, now).unwrap().span;
        }
        assert!(stops.heard(key, held(60), now));
        now += secs(61);
        let stop = stops.trip(key, now, 0, now).unwrap();
        assert_eq!((stop.span, stop.number), (secs(480), 4));
    }

    #[test]
    fn answers_to_requests_before_a_release_do_not_trip() {
        let (stops, now) = (Stops::new(secs(60), secs(3600), 10), clock::now());
        let key = Key::new("a");
        stops.trip(key, now, 0, now);
        let later = now + secs(10);
        assert_eq!(stops.release(key, later), Some(now + secs(60)));
        assert_eq!(stops.release(key, later), None);
        assert_eq!(stops.trip(key, later - secs(1), 0, later), None);
        let span = secs(60);
        assert_eq!(
            stops.trip(key, later, 0, later),
            Some(NewStop { span, number: 1 })
        );
    }

    /// The hold that a stop began has ended, too, so answers count again.
    #[test]
    fn stops_go_on_while_the_machine_sleeps() {
        let (stops, now) = (Stops::new(secs(60), secs(3600), 10), clock::now());
        let key = Key::new("a");
        stops.trip(key, now, 0, now);
        clock::pretended::sleep(secs(50));
        assert_eq!(stops.left(key, now), Some(secs(10)));
        clock::pretended::sleep(secs(10));
        assert_eq!(stops.left(key, now), None);
        let again = stops.trip(key, now, 0, now);
        assert_eq!(again.map(|stop| stop.number), Some(2));
    }

    /// Other layers over the same store may hold more keys than there is room for.
    #[test]
    fn holds_of_other_keys_leave_the_own_stops() {
        let (stops, mut now) = (Stops::new(secs(60), secs(3600), 3), clock::now());
        let own = Key::new("own");
        let hear_others = |now| {
            for number in 0..10 {
                stops.heard(Key::new(format!("{number}")), held(5), now);
            }
        };
        hear_others(now);
        for (number, expected) in (1..).zip([60, 120, 240]) {
            let span = secs(expected);
            assert_eq!(stops.trip(own, now, 0, now), Some(NewStop { span, number }));
            assert_eq!(stops.left(own, now), Some(span));
            now += span;
            hear_others(now);
        }
    }

    /// A stop that is over makes room for one that begins.
    #[test]
    fn own_stops_that_are_over_make_room() {
        let (stops, mut now) = (Stops::new(secs(60), secs(3600), 2), clock::now());
        for name in ["a", "b", "c", "d"] {
            let key = Key::new(name);
            stops.trip(key, now, 0, now).unwrap();
            assert_eq!(stops.left(key, now), Some(secs(60)), "{name}");
            now += secs(31);
        }
    }

    #[test]
    fn keys_are_bounded() {
        let (stops, now) = (Stops::new(secs(60), secs(3600), 3), clock::now());
        for number in 0..10 {
            stops.heard(Key::new(format!("{number}")), held(5), now);
        }
        assert_eq!(stops.with(|by_key| by_key.stops.len()), 3);
        stops.heard(Key::new("later"), held(5), now + secs(6));
        assert_eq!(stops.with(|by_key| by_key.stops.len()), 1);
    }
}
