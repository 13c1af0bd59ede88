//! The states of all keys, and the way to visit one.

use std::time::Instant;

use super::key_state::KeyState;
use super::prefetched::Offer;
use super::quotas::QuotaId;
use super::reservation::{CountedAs, Reservation};
use super::unlocked::UnlockedPermits;
use crate::clock::Moment;
use crate::key::Key;
use crate::key_map::{Evict, Full, KeyMap};

/// The states of all keys of a limiter.
///
/// A visit has the lock of the key's shard. Permits at hand are taken without a visit if they can be:
/// those of [`Key::ALL`] without a lock ([`UnlockedPermits`]), those of other keys from the table.
pub(super) struct KeyStates {
    map: KeyMap<KeyRow>,
    /// The permits at hand of [`Key::ALL`], while no thread visits its state.
    unlocked: UnlockedPermits,
}

/// What the table has of a key.
struct KeyRow {
    /// The permits at hand, while no thread visits the state. Not used for [`Key::ALL`].
    offer: Offer,
    /// Boxed, so that the table stays small.
    state: Box<KeyState>,
}

impl Evict for KeyRow {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        self.state.idle_from(self.offer.until().instant())
    }

    fn worthless_from(&self) -> Option<Instant> {
        self.state.worthless_from(self.offer.until().instant())
    }
}

impl KeyRow {
    #[inline]
    fn visit<R>(&mut self, visit: impl FnOnce(&mut KeyState) -> R) -> R {
        self.state.collect(&mut self.offer);
        let done = visit(&mut self.state);
        self.state.offer(&mut self.offer);
        done
    }
}

impl KeyStates {
    /// Makes a map for the states of at most `max_keys` keys.
    pub(super) fn new(max_keys: usize) -> Self {
        KeyStates {
            map: KeyMap::new(max_keys),
            unlocked: UnlockedPermits::new(),
        }
    }

    /// Takes a permit at hand for a request that leaves at once, if no request waits for one, and
    /// counts the request. Returns whether it did.
    #[inline]
    pub(super) fn spend(&self, key: Key, cost: u32, quota: QuotaId, now: Moment) -> bool {
        if key != Key::ALL {
            let spent = self.map.find(key, |row| {
                row.state.limits.has_quota(quota) && row.offer.take(cost, CountedAs::Request, now)
            });
            return spent == Some(true);
        }
        quota == QuotaId::NONE && self.unlocked.spend(cost, now)
            || self
                .take_visiting(cost, quota, CountedAs::Request, now)
                .is_some()
    }

    /// Takes a permit at hand, if no request waits for one.
    #[inline]
    pub(super) fn take(
        &self,
        key: Key,
        cost: u32,
        quota: QuotaId,
        counting: CountedAs,
        now: Moment,
    ) -> Option<Reservation> {
        if key != Key::ALL {
            let slot = self.map.find(key, |row| {
                let taken =
                    row.state.limits.has_quota(quota) && row.offer.take(cost, counting, now);
                taken.then(|| row.state.offered(cost, now.instant()))
            });
            return slot.flatten().flatten();
        }
        if quota == QuotaId::NONE
            && let Some(slot) = self.unlocked.take(cost, counting, now)
        {
            return Some(slot);
        }
        self.take_visiting(cost, quota, counting, now)
    }

    /// Takes a permit at hand of [`Key::ALL`] in a visit.
    fn take_visiting(
        &self,
        cost: u32,
        quota: QuotaId,
        counting: CountedAs,
        now: Moment,
    ) -> Option<Reservation> {
        let slot = self.find(Key::ALL, |state| {
            let may_take = state.limits.has_quota(quota);
            may_take.then(|| state.take_at_once(cost, counting, now.instant()))
        });
        slot.flatten().flatten()
    }

    /// Takes a permit of one unit of [`Key::ALL`] for a request that leaves at once, if one is at hand without a
    /// visit. Counts the request.
    #[inline]
    pub(super) fn spend_one_unlocked(&self, now: Moment) -> bool {
        self.unlocked.spend(1, now)
    }

    /// Takes a permit of one unit of [`Key::ALL`] that is at hand without a visit, and counts the request.
    // Inlined, so that the permit is written to its final place at once.
    #[inline(always)]
    pub(super) fn take_one_unlocked(&self, now: Moment) -> Option<Reservation> {
        self.unlocked.take_one(now)
    }

    /// Returns the requests and units of [`Key::ALL`] that were counted without a visit since its state was
    /// made. The counts of former states are those of the gate alone.
    pub(super) fn unlocked_counts_of_state(&self) -> (u64, u64) {
        self.find(Key::ALL, |_| ());
        self.unlocked.counts_of_state()
    }

    /// Notes units of [`Key::ALL`] that were counted without a visit, and whose permit was given back.
    pub(super) fn give_back_unlocked(&self, units: u64) {
        self.unlocked.give_back(units);
    }

    /// Returns the requests and units of [`Key::ALL`] that were counted without a visit.
    pub(super) fn unlocked_counts(&self) -> (u64, u64) {
        // A visit collects what was taken of the last offer.
        self.find(Key::ALL, |_| ());
        self.unlocked.counts()
    }

    pub(super) fn has_room(&self, key: Key, now: Instant) -> bool {
        self.map.has_room(key, now)
    }

    /// Visits the state of `key`, if there is any.
    pub(super) fn find<R>(&self, key: Key, visit: impl FnOnce(&mut KeyState) -> R) -> Option<R> {
        let (mut visit, mut done) = (Some(visit), None);
        self.visit_known(key, &mut |state| {
            done = visit.take().map(|visit| visit(state));
        });
        done
    }

    /// Returns what `read` returns of the state of `key`, or the default value if there is no state.
    pub(super) fn read<R: Default>(&self, key: Key, read: impl FnOnce(&mut KeyState) -> R) -> R {
        self.find(key, read).unwrap_or_default()
    }

    // Not generic: each of sixty callers had a copy.
    fn visit_known(&self, key: Key, visit: &mut dyn FnMut(&mut KeyState)) {
        self.map.find(key, |row| self.visit(key, row, visit));
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
        self.map.enter(
            key,
            now,
            || KeyRow {
                offer: Offer::none(Moment::of(now)),
                state: Box::new(make()),
            },
            |key, row| forgotten(key, self.forget(key, row)),
            |row| self.visit(key, row, visit),
        )
    }

    /// Takes the permits at hand of a row that is evicted back into its state.
    fn forget(&self, key: Key, row: KeyRow) -> Box<KeyState> {
        let KeyRow {
            mut offer,
            mut state,
        } = row;
        if key == Key::ALL {
            state.collect_unlocked(&self.unlocked);
            self.unlocked.forget_state();
        } else {
            state.collect(&mut offer);
        }
        state
    }

    /// Visits the states of all keys, a shard at a time.
    pub(super) fn for_each(&self, mut visit: impl FnMut(Key, &mut KeyState)) {
        self.map
            .for_each(|key, row| self.visit(key, row, |state| visit(key, state)));
    }

    /// Visits the state of `row`, whose lock the caller holds.
    #[inline]
    fn visit<R>(&self, key: Key, row: &mut KeyRow, visit: impl FnOnce(&mut KeyState) -> R) -> R {
        if key != Key::ALL {
            return row.visit(visit);
        }
        row.state.collect_unlocked(&self.unlocked);
        let done = visit(&mut row.state);
        row.state.offer_unlocked(&self.unlocked);
        done
    }
}
