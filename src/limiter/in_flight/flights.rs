//! The calls in flight of all keys.

use std::time::{Duration, Instant};

use super::flight::Flight;
use crate::key::Key;
use crate::key_map::{Full, KeyMap};
use crate::limiter::settings::Settings;
use crate::store::Claim;

/// The calls in flight of all keys.
pub(in crate::limiter) struct Flights {
    keyed: KeyMap<Flight>,
    /// The limit: calls in flight at the same time, for each key.
    limit: u32,
    /// How long a claim counts that is not repeated.
    ttl: Duration,
}

/// The result of a change to the calls in flight of a key.
pub(in crate::limiter) struct Acted<R> {
    pub(in crate::limiter) done: R,
    /// The claim to send to the store after the lock is released.
    pub(in crate::limiter) claim: Option<Claim>,
}

impl Flights {
    /// Returns `None` if the settings do not limit calls in flight.
    pub(in crate::limiter) fn new(settings: &Settings) -> Option<Self> {
        let limit = settings.spec.quota().most_in_flight()?;
        Some(Flights {
            keyed: KeyMap::new(settings.max_keys),
            limit,
            ttl: settings.in_flight_ttl,
        })
    }

    /// Returns the limit of each key.
    pub(in crate::limiter) fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns how many requests of `key` wait in this process.
    pub(in crate::limiter) fn waiting(&self, key: Key) -> usize {
        self.with(key, |flight| flight.waiting()).unwrap_or(0)
    }

    /// Runs `act` on the calls in flight of `key`, if there are any.
    pub(in crate::limiter) fn with<R>(
        &self,
        key: Key,
        act: impl FnOnce(&mut Flight) -> R,
    ) -> Option<R> {
        self.keyed.find(key, act)
    }

    /// The same as [`with`](Flights::with), and then makes the claim that follows.
    pub(in crate::limiter) fn act<R>(
        &self,
        key: Key,
        act: impl FnOnce(&mut Flight) -> R,
    ) -> Option<Acted<R>> {
        self.keyed.find(key, |flight| self.acted(key, flight, act))
    }

    /// The same as [`act`](Flights::act) for a key that may be new.
    pub(in crate::limiter) fn with_new<R>(
        &self,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut Flight) -> R,
    ) -> Result<Acted<R>, Full> {
        self.keyed.enter(
            key,
            now,
            || Flight::new(now),
            |_, _| (),
            |flight| self.acted(key, flight, act),
        )
    }

    fn acted<R>(
        &self,
        key: Key,
        flight: &mut Flight,
        act: impl FnOnce(&mut Flight) -> R,
    ) -> Acted<R> {
        let done = act(flight);
        Acted {
            done,
            claim: flight.claim(key, self.limit, self.ttl),
        }
    }
}
