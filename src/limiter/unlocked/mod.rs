//! Permits at hand that threads take without a lock.
//!
//! Many limiters have one key only, [`Key::ALL`](crate::Key::ALL), and all threads take permits of
//! it. So its permits at hand are in one of two places. While a thread visits the state of the key,
//! under its lock, they are in [`Prefetched`]. Otherwise they are here, in one atomic word. A visit
//! begins with [`collect`](UnlockedPermits::collect) and ends with
//! [`offer`](UnlockedPermits::offer). A thread that finds too few units here visits the state.
//!
//! So all rules of the state hold as if each permit were taken under the lock:
//!
//! - While requests wait, a visit offers nothing, so no request overtakes them.
//! - When a hold begins, the visit that notes it gives all permits up.
//! - Each unit is taken once: a visit takes the whole word in one step.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::prefetched::Prefetched;
use super::reservation::{CountedAs, Reservation};
use crate::clock::Moment;

/// The permits of one slot that threads take without a lock.
pub(super) struct UnlockedPermits {
    /// From the low bits to the high ones: the units left, the number of the offer, and when the
    /// units expire.
    word: AtomicU64,
    /// Slot, stamp (both in the store's time) and incarnation of the units. They change only while
    /// the word has no units. A thread that reads them and then takes units has read those of the
    /// same offer, because the word has the number of the offer, unless it stood still for 256 offers
    /// that expire in the same step.
    slot: AtomicU64,
    stamp: AtomicU64,
    incarnation: AtomicU64,
    /// The units of the offer. Changes only under the lock of the state.
    offered: AtomicU64,
    /// The units that were taken, of all past offers. Changes only under the lock of the state.
    used: AtomicU64,
    /// How many more units were taken than requests counted. The requests are `used` less this, so a
    /// request of one unit changes only the word.
    uncounted: AtomicU64,
    /// The requests and units of the states that were forgotten, and the units that were given back since.
    former: [AtomicU64; 2],
}

const UNITS_BITS: u32 = 16;
const OFFER_BITS: u32 = 8;
const UNITS: u64 = (1 << UNITS_BITS) - 1;
const OFFER: u64 = ((1 << OFFER_BITS) - 1) << UNITS_BITS;

/// The expiry is counted in steps of 2^18 ns, a quarter of a millisecond, and rounded down. In a
/// process that runs for longer than nine years, the expiry has too many bits. Then nothing is
/// offered.
const STEP_BITS: u32 = 18;
const MOST_STEPS: u64 = u64::MAX >> (UNITS_BITS + OFFER_BITS);

impl UnlockedPermits {
    /// Makes a place without permits.
    pub(super) fn new() -> Self {
        UnlockedPermits {
            word: AtomicU64::new(0),
            slot: AtomicU64::new(0),
            stamp: AtomicU64::new(0),
            incarnation: AtomicU64::new(0),
            offered: AtomicU64::new(0),
            used: AtomicU64::new(0),
            uncounted: AtomicU64::new(0),
            former: [const { AtomicU64::new(0) }; 2],
        }
    }

    /// Takes the units of a request that leaves at once, and counts it. Returns whether there were
    /// enough.
    #[inline]
    pub(super) fn spend(&self, cost: u32, now: Moment) -> bool {
        if cost == 1 {
            self.spend_units(cost, now)
        } else {
            let extra = u64::from(cost) - 1;
            self.with_uncounted(extra, || self.spend_units(cost, now).then_some(()))
                .is_some()
        }
    }

    /// Runs `take`, which takes `extra` more units than the requests that it counts. They are noted
    /// before, so that never more requests are counted than there were.
    fn with_uncounted<T>(&self, extra: u64, take: impl FnOnce() -> Option<T>) -> Option<T> {
        self.uncounted.fetch_add(extra, Ordering::Relaxed);
        let taken = take();
        if taken.is_none() {
            self.uncounted.fetch_sub(extra, Ordering::Relaxed);
        }
        taken
    }

    /// Returns the requests that were counted here, and the units that were taken. The caller has
    /// collected what was left of the last offer.
    pub(super) fn counts(&self) -> (u64, u64) {
        let used = self.used.load(Ordering::Relaxed);
        let uncounted = self.uncounted.load(Ordering::Relaxed);
        (used.saturating_sub(uncounted), used)
    }

    /// Returns the requests and units that were counted here since the state of the key was made.
    pub(super) fn counts_of_state(&self) -> (u64, u64) {
        let (requests, units) = self.counts();
        let [former_requests, former_units] = &self.former;
        (
            requests.saturating_sub(former_requests.load(Ordering::Relaxed)),
            units.saturating_sub(former_units.load(Ordering::Relaxed)),
        )
    }

    /// Notes units that were counted here, and whose permit was given back.
    pub(super) fn give_back(&self, units: u64) {
        let [_, former_units] = &self.former;
        former_units.fetch_add(units, Ordering::Relaxed);
    }

    /// Notes that the state of the key is forgotten. The caller has collected what was left of the last offer.
    pub(super) fn forget_state(&self) {
        let (requests, units) = self.counts();
        let [former_requests, former_units] = &self.former;
        former_requests.store(requests, Ordering::Relaxed);
        former_units.store(units, Ordering::Relaxed);
    }

    #[inline]
    fn spend_units(&self, cost: u32, now: Moment) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        while self.find(word, cost, now).is_some() {
            match self.take_from(word, cost) {
                Ok(_) => return true,
                Err(changed) => word = changed,
            }
        }
        false
    }

    /// Takes a permit. Counts a request, or only its units.
    #[inline]
    pub(super) fn take(&self, cost: u32, counting: CountedAs, now: Moment) -> Option<Reservation> {
        let extra = match counting {
            CountedAs::Request => u64::from(cost) - 1,
            CountedAs::Units => u64::from(cost),
        };
        if extra == 0 {
            self.take_units(cost, now)
        } else {
            self.with_uncounted(extra, || self.take_units(cost, now))
        }
    }

    /// Takes a permit of one unit, and counts a request.
    #[inline(always)]
    pub(super) fn take_one(&self, now: Moment) -> Option<Reservation> {
        self.take_units(1, now)
    }

    #[inline(always)]
    fn take_units(&self, cost: u32, now: Moment) -> Option<Reservation> {
        let mut word = self.word.load(Ordering::Acquire);
        while let Some(until) = self.find(word, cost, now) {
            let slot = self.slot.load(Ordering::Relaxed);
            let stamp = self.stamp.load(Ordering::Relaxed);
            let incarnation = self.incarnation.load(Ordering::Relaxed);
            match self.take_from(word, cost) {
                Ok(_) => {
                    return Some(Reservation {
                        at: now.instant(),
                        until: until.instant(),
                        cost,
                        count: 1,
                        slot,
                        stamp,
                        incarnation,
                        lender: None,
                        probe: None,
                        is_at_once: true,
                    });
                }
                Err(changed) => word = changed,
            }
        }
        None
    }

    /// Returns when the units of `word` expire, if they are enough and have not expired.
    #[inline]
    fn find(&self, word: u64, cost: u32, now: Moment) -> Option<Moment> {
        if u64::from(cost) > word & UNITS {
            return None;
        }
        let steps = word >> (UNITS_BITS + OFFER_BITS);
        let until = Moment::from_nanos(steps << STEP_BITS);
        (now < until).then_some(until)
    }

    /// Takes units out of a `word` that has enough of them.
    #[inline]
    fn take_from(&self, word: u64, cost: u32) -> Result<u64, u64> {
        let left = word - u64::from(cost);
        self.word
            .compare_exchange_weak(word, left, Ordering::AcqRel, Ordering::Acquire)
    }

    /// Moves the permits of `prefetched` here. The caller has the lock of the state, and has
    /// collected what was left of the last offer.
    pub(super) fn offer(&self, prefetched: &mut Prefetched) {
        let Some(until) = prefetched.until().map(steps) else {
            return;
        };
        if until > MOST_STEPS {
            return;
        }
        let Some(permits) = prefetched.take_units(UNITS as u32) else {
            return;
        };
        self.slot.store(permits.slot, Ordering::Relaxed);
        self.stamp.store(permits.stamp, Ordering::Relaxed);
        self.incarnation
            .store(permits.incarnation, Ordering::Relaxed);
        let last = self.word.load(Ordering::Relaxed);
        let offer = last.wrapping_add(1 << UNITS_BITS) & OFFER;
        self.offered
            .store(u64::from(permits.count), Ordering::Relaxed);
        let word = until << (UNITS_BITS + OFFER_BITS) | offer | u64::from(permits.count);
        self.word.store(word, Ordering::Release);
    }

    /// Moves the permits that are left back to `prefetched`. The caller has the lock of the state.
    pub(super) fn collect(&self, prefetched: &mut Prefetched) {
        // The number of the offer stays.
        let word = self.word.fetch_and(OFFER, Ordering::AcqRel);
        let left = word & UNITS;
        prefetched.put_units(left as u32);
        let taken = self.offered.load(Ordering::Relaxed) - left;
        self.offered.store(0, Ordering::Relaxed);
        let used = self.used.load(Ordering::Relaxed);
        self.used.store(used + taken, Ordering::Relaxed);
    }
}

/// Returns the whole steps until `at`.
fn steps(at: Instant) -> u64 {
    Moment::of(at).nanos() >> STEP_BITS
}
