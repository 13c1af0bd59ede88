//! The states of all keys, and the way to visit one.

use std::time::Instant;

use super::key_state::KeyState;
use super::quotas::QuotaId;
use super::reservation::{Counting, Reservation};
use super::unlocked::UnlockedPermits;
use crate::key::Key;
use crate::key_map::{Full, KeyMap};

/// The states of all keys of a limiter.
///
/// A visit has the lock of the key's shard. Permits of [`Key::ALL`] are taken without a visit if
/// they can be: see [`UnlockedPermits`].
pub(super) struct KeyStates {
    /// The state of each key. Boxed, so that the table stays small.
    map: KeyMap<Box<KeyState>>,
    /// The permits at hand of [`Key::ALL`], while no thread visits its state.
    unlocked: UnlockedPermits,
}

impl KeyStates {
    /// Makes a map for the states of at most `max_keys` keys. No permit expires before `now`.
    pub(super) fn new(max_keys: usize, now: Instant) -> Self {
        KeyStates {
            map: KeyMap::new(max_keys),
            unlocked: UnlockedPermits::new(now),
        }
    }

    /// Takes a permit at hand for a request that leaves at once, if no request waits for one, and
    /// counts the request. Returns whether it did.
    #[inline]
    pub(super) fn spend(&self, key: Key, cost: u32, quota: QuotaId, now: Instant) -> bool {
        if quota != QuotaId::NONE {
            let spend =
                |state: &mut KeyState| state.limits.has_quota(quota) && state.spend(cost, now);
            return self.find(key, spend) == Some(true);
        }
        key == Key::ALL && self.unlocked.spend(cost, now)
            || self.find(key, |state| state.spend(cost, now)) == Some(true)
    }

    /// Takes a permit at hand, if no request waits for one.
    #[inline]
    pub(super) fn take(
        &self,
        key: Key,
        cost: u32,
        quota: QuotaId,
        counting: Counting,
        now: Instant,
    ) -> Option<Reservation> {
        if quota != QuotaId::NONE {
            let take = |state: &mut KeyState| {
                let has_quota = state.limits.has_quota(quota);
                has_quota.then(|| state.take_at_once(cost, counting, now))
            };
            return self.find(key, take).flatten().flatten();
        }
        if key == Key::ALL
            && let Some(slot) = self.unlocked.take(cost, counting, now)
        {
            return Some(slot);
        }
        self.find(key, |state| state.take_at_once(cost, counting, now))
            .flatten()
    }

    /// Takes a permit of one unit that is at hand without a visit, and counts the request.
    // Inlined, so that the permit is written to its final place at once.
    #[inline(always)]
    pub(super) fn take_one_unlocked(
        &self,
        key: Key,
        quota: QuotaId,
        now: Instant,
    ) -> Option<Reservation> {
        if key == Key::ALL && quota == QuotaId::NONE {
            self.unlocked.take_one(now)
        } else {
            None
        }
    }

    /// Returns the requests and units of [`Key::ALL`] that were counted without a visit.
    pub(super) fn unlocked_counts(&self) -> (u64, u64) {
        // A visit collects what was taken of the last offer.
        self.find(Key::ALL, |_| ());
        self.unlocked.counts()
    }

    /// Reads the states of all keys: see [`KeyMap::fold`].
    pub(super) fn fold<A: Default>(
        &self,
        mut visit: impl FnMut(&mut A, Key, &mut KeyState),
        add: impl FnMut(&mut A, A),
    ) -> A {
        let visit = |sum: &mut A, key, state: &mut Box<KeyState>| {
            self.visit(key, state, |state| visit(sum, key, state));
        };
        self.map.fold(visit, add)
    }

    /// Returns the number of keys.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Visits the state of `key`, if there is any.
    #[inline]
    pub(super) fn find<R>(&self, key: Key, visit: impl FnOnce(&mut KeyState) -> R) -> Option<R> {
        self.map.find(key, |state| self.visit(key, state, visit))
    }

    /// Visits the state of `key`, which is made first if there is none. Evicted states go to
    /// `forgotten`.
    ///
    /// # Errors
    ///
    /// [`Full`] if there is no room for one more state.
    pub(super) fn enter<R>(
        &self,
        key: Key,
        now: Instant,
        make: impl FnOnce() -> KeyState,
        mut forgotten: impl FnMut(Key, Box<KeyState>),
        visit: impl FnOnce(&mut KeyState) -> R,
    ) -> Result<R, Full> {
        let forgotten = |key, mut state: Box<KeyState>| {
            if key == Key::ALL {
                state.collect(&self.unlocked);
            }
            forgotten(key, state);
        };
        let make = || Box::new(make());
        let visit = |state: &mut Box<KeyState>| self.visit(key, state, visit);
        self.map.enter(key, now, make, forgotten, visit)
    }

    /// Visits the states of all keys, a shard at a time.
    pub(super) fn for_each(&self, mut visit: impl FnMut(Key, &mut KeyState)) {
        self.map
            .for_each(|key, state| self.visit(key, state, |state| visit(key, state)));
    }

    /// Visits `state`, whose lock the caller holds.
    #[inline]
    fn visit<R>(
        &self,
        key: Key,
        state: &mut KeyState,
        visit: impl FnOnce(&mut KeyState) -> R,
    ) -> R {
        if key != Key::ALL {
            return visit(state);
        }
        state.collect(&self.unlocked);
        let done = visit(state);
        state.offer(&self.unlocked);
        done
    }
}
