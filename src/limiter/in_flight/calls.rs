//! The calls in flight of all keys.

use std::time::Instant;

use super::claims::ClaimTerms;
use super::key_calls::KeyCalls;
use crate::key::Key;
use crate::key_map::{Full, KeyMap};
use crate::limiter::settings::Settings;
use crate::stats::InFlightStats;
use crate::store::Claim;

/// The calls in flight of all keys.
pub(in crate::limiter) struct InFlightCalls {
    keyed: KeyMap<KeyCalls>,
    /// What claims state. A key may have another limit than the configured one.
    terms: ClaimTerms,
}

/// The result of a change to the calls in flight of a key.
pub(in crate::limiter) struct Acted<R> {
    pub(in crate::limiter) done: R,
    /// The claim to send to the store after the lock is released.
    pub(in crate::limiter) claim: Option<Claim>,
    /// Whether a task has to begin that looks for slots that are not collected.
    pub(in crate::limiter) begins_to_look: bool,
}

impl InFlightCalls {
    /// Returns `None` if the settings do not limit calls in flight.
    pub(in crate::limiter) fn new(settings: &Settings) -> Option<Self> {
        let limit = settings.spec.quota().most_in_flight()?;
        let part = settings.part;
        let class = part.and_then(|part| part.class);
        Some(InFlightCalls {
            keyed: KeyMap::new(settings.max_keys),
            terms: ClaimTerms {
                limit,
                class: class.map_or(0, Key::number_of_class),
                share: part.map_or(0, |part| settings.quotas.percent(part.index)),
                ttl: settings.in_flight_ttl,
            },
        })
    }

    pub(in crate::limiter) fn limit(&self, key: Key) -> u32 {
        let own = self.with(key, |calls| calls.own_limit()).flatten();
        own.unwrap_or(self.terms.limit)
    }

    /// Gives `key` this limit. Returns the claim that follows. If there is no room for the key, does
    /// nothing: its request is refused.
    pub(in crate::limiter) fn set_limit(
        &self,
        key: Key,
        limit: Option<u32>,
        now: Instant,
    ) -> Option<Claim> {
        let own = self.own_limit(limit);
        let claim = self.enter(key, limit, now, |calls| {
            calls.set_own_limit(own);
            // This grants no slot, so no task has to begin that looks for slots.
            calls.claim(key, self.terms)
        });
        claim.ok()?
    }

    /// Returns a limit, if it is not the configured one.
    fn own_limit(&self, limit: Option<u32>) -> Option<u32> {
        limit.filter(|limit| *limit != self.terms.limit)
    }

    /// Returns how many requests of `key` wait in this process.
    pub(in crate::limiter) fn waiting(&self, key: Key) -> usize {
        self.with(key, |calls| calls.waiting()).unwrap_or(0)
    }

    /// Returns whether a request of `key` gets a slot at once, if the store has `free` ones.
    pub(in crate::limiter) fn is_free(&self, key: Key, free: u64) -> bool {
        let is_any = free > 0;
        let known = self.with(key, |calls| {
            calls.waiting() == 0 && (is_any || calls.has_free())
        });
        known.unwrap_or(is_any)
    }

    /// Returns the calls in flight of all keys.
    pub(in crate::limiter) fn stats(&self) -> InFlightStats {
        let mut sum = InFlightStats::default();
        self.keyed.for_each(|_, calls| {
            sum.in_use += u64::from(calls.in_use());
            sum.waiting += calls.waiting() as u64;
        });
        sum
    }

    pub(in crate::limiter) fn has_room(&self, key: Key, now: Instant) -> bool {
        self.keyed.has_room(key, now)
    }

    /// Runs `act` on the calls in flight of `key`, if there are any.
    pub(in crate::limiter) fn with<R>(
        &self,
        key: Key,
        act: impl FnOnce(&mut KeyCalls) -> R,
    ) -> Option<R> {
        self.keyed.find(key, act)
    }

    /// The same as [`with`](InFlightCalls::with), and then makes the claim that follows.
    pub(in crate::limiter) fn act<R>(
        &self,
        key: Key,
        act: impl FnOnce(&mut KeyCalls) -> R,
    ) -> Option<Acted<R>> {
        self.keyed.find(key, |calls| self.acted(key, calls, act))
    }

    /// The same as [`act`](InFlightCalls::act) for a key that may be new, which has the limit `limit`.
    pub(in crate::limiter) fn with_new<R>(
        &self,
        key: Key,
        limit: Option<u32>,
        now: Instant,
        act: impl FnOnce(&mut KeyCalls) -> R,
    ) -> Result<Acted<R>, Full> {
        self.enter(key, limit, now, |calls| self.acted(key, calls, act))
    }

    fn enter<R>(
        &self,
        key: Key,
        limit: Option<u32>,
        now: Instant,
        act: impl FnOnce(&mut KeyCalls) -> R,
    ) -> Result<R, Full> {
        let own = self.own_limit(limit);
        self.keyed
            .enter(key, now, || KeyCalls::new(own, now), |_, _| (), act)
    }

    fn acted<R>(
        &self,
        key: Key,
        calls: &mut KeyCalls,
        act: impl FnOnce(&mut KeyCalls) -> R,
    ) -> Acted<R> {
        let done = act(calls);
        Acted {
            done,
            claim: calls.claim(key, self.terms),
            begins_to_look: calls.begins_to_look(),
        }
    }
}
