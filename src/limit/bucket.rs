//! A token bucket: the generic cell rate algorithm. It counts each permit from its stamp.
//!
//! Twin: `store/redis/lua/bucket.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::advance::AdvanceBooking;
use super::algorithm::PermitTime;
use super::{Micros, UnusedPermits};

/// Allows at most `capacity` units at once, and refills `count` units in each `window`.
///
/// The bucket keeps the moment at which it will be full again, which is known as the *theoretical
/// arrival time*. Each permit moves this moment later, by the time in which its units are refilled.
/// If the bucket is full at the stamp of the permit, the moment starts anew from that stamp.
///
/// The stamp counts, not the slot. So the bucket of the upstream always has the units, even if a
/// permit arrives there at the end of its life.
///
/// # Ticks
///
/// If 300 units are refilled in a second, a unit takes 3333 and a third microseconds. So the bucket counts
/// time in *ticks*. A microsecond has `count` of them, and a unit takes as many of them as the window has
/// microseconds. No moment is rounded.
///
/// Numbers of Lua are exact up to 2^53. If a whole bucket took more than half of that, its ticks are
/// coarser: a unit takes 2^20 or somewhat more of them, rounded up. Such a bucket loses less than a
/// millionth of its rate, and never gives more. Only a large one does: 1.3 million units that are refilled
/// in an hour, or 60,000 in a day.
///
/// # Advance bookings
///
/// Advance bookings are not part of `full_at`, because nothing could then go before them. They are
/// *replayed* on it in their order: each moves the moment later, as a permit does. A new permit is
/// allowed if each booking behind it still finds its units at its slot.
///
/// *Why the bucket never has too few units.* Take the permits that were used in a time from `t1` to
/// `t2`, and the last of them in the order of the replay. At its check, the moment was at least
/// `t1` plus the time in which the units of the others are refilled. It was at most the slot of the
/// last permit plus the time for `capacity` less its own units, so at most `t2` plus that time. So
/// all units together are at most `capacity` and the units refilled from `t1` to `t2`. This holds
/// for any order, if a new permit keeps the check of each permit behind it.
///
/// A new permit has no effect behind a booking whose slot the moment does not pass: from there, the
/// moment starts anew from a stamp. So each booking has a latest moment that may stand before it, and
/// one pass over the bookings, the last one first, finds all of them. Joined bookings count as one permit. Their check may fail
/// although that of each part holds, so then a new permit that affects them goes behind them.
#[derive(Clone, Debug)]
pub(super) struct BucketState {
    /// Whether the limit is the pace of a part (`lending.rs`), as the present caller states it.
    pub(super) is_pace: bool,
    /// The units of a full bucket.
    capacity: u128,
    /// The ticks in which one unit is refilled.
    unit: u128,
    /// The ticks of a microsecond.
    ticks: u128,
    /// When the bucket is full again, in ticks.
    full_at: u128,
    /// The last stamp by which the bucket was full, so that `full_at` started anew from it. Permits
    /// with earlier stamps no longer affect `full_at`.
    base: Micros,
    /// The most ticks by which returned permits may move `full_at` back. Up to this bound, each permit
    /// since `base` still counts in full from its stamp. [`UNBOUNDED`] if there is no bound.
    refundable: u128,
    /// Each permit that is booked ahead with this slot or a later one got the first slot for which
    /// the bucket had units. [`Micros::MAX`] if there is no such permit.
    queued_from: Micros,
    /// The last permits that were booked ahead with a later slot than the bucket required, because
    /// another limit delayed them.
    delayed: VecDeque<DelayedPermit>,
}

/// A permit of `BucketState::delayed`. With these values it can be taken back in full.
#[derive(Clone, Debug)]
struct DelayedPermit {
    slot: Micros,
    /// The ticks in which its units are refilled.
    units: u128,
    /// `BucketState::full_at` before the permit was booked.
    before: u128,
    /// `BucketState::full_at` after it was booked.
    after: u128,
    /// `BucketState::queued_from` before it was booked.
    queued_from: Micros,
}

/// The greatest age that is assumed of a statement of the upstream. An older statement counts as
/// this old.
const LONGEST_AGO: Micros = 5_000_000;

/// The most delayed permits that are kept. A permit that was dropped from them can be taken back
/// only as far as later permits allow (`BucketState::refundable`).
const MOST_DELAYED: usize = 32;

/// The most ticks in which a whole bucket is refilled, if a unit takes exactly as long as the quota says.
const MOST_TICKS: u128 = 4_503_599_627_370_496;

/// The fewest ticks in which a unit of any other bucket is refilled.
const UNIT_TICKS: u128 = 1_048_576;

/// `BucketState::refundable` if no permit has a bound. A bucket has fewer ticks.
const UNBOUNDED: u128 = 2 * MOST_TICKS;

impl BucketState {
    /// Makes a full bucket.
    pub(super) fn new(capacity: u32, count: u32, window: Micros) -> Self {
        let (capacity, count, window) = (capacity.into(), count.into(), window.into());
        let (mut unit, mut ticks): (u128, u128) = (window, count);
        if capacity * window > MOST_TICKS {
            ticks = (count * UNIT_TICKS).div_ceil(window);
            unit = (window * ticks).div_ceil(count);
        }
        BucketState {
            is_pace: false,
            capacity,
            unit,
            ticks,
            full_at: 0,
            base: 0,
            refundable: 0,
            queued_from: Micros::MAX,
            delayed: VecDeque::new(),
        }
    }

    fn ticks_at(&self, moment: Micros) -> u128 {
        u128::from(moment) * self.ticks
    }

    /// Returns the first whole microsecond that is not before a moment in ticks.
    fn rounded_up(&self, moment: u128) -> Micros {
        u64::try_from(moment.div_ceil(self.ticks)).unwrap_or(u64::MAX)
    }

    /// Returns the first moment, not before `from`, at which `cost` units may leave.
    pub(super) fn first_slot(
        &self,
        from: Micros,
        cost: u64,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> Micros {
        let (before, behind) = split_at(advance, from);
        let mut full_at = self.full_after(before);
        let mut from = from;
        let latest = self.latest_full(behind);
        for (next, latest) in behind.iter().zip(latest) {
            // The permit would be replayed before `next`.
            let slot = from.max(self.room_for(full_at, u128::from(cost)));
            let stamp = slot.saturating_add(open.length());
            let full_then = self.after(full_at, stamp, cost);
            if slot < next.slot && full_then <= self.ticks_at(latest) {
                return slot;
            }
            full_at = self.after(full_at, next.stamp, next.units);
            from = next.slot;
        }
        from.max(self.room_for(full_at, u128::from(cost)))
    }

    /// Returns the first moment at which a bucket that is full again at `full_at` holds `units`.
    fn room_for(&self, full_at: u128, units: u128) -> Micros {
        let ahead = self.capacity.saturating_sub(units) * self.unit;
        self.rounded_up(full_at.saturating_sub(ahead))
    }

    /// Returns when a bucket is full again after a permit. Before the permit, it is `full_at`.
    fn after(&self, full_at: u128, stamp: Micros, units: u64) -> u128 {
        full_at.max(self.ticks_at(stamp)) + u128::from(units) * self.unit
    }

    /// Returns when the bucket is full again after `bookings`.
    fn full_after(&self, bookings: &[AdvanceBooking]) -> u128 {
        bookings.iter().fold(self.full_at, |full_at, booking| {
            self.after(full_at, booking.stamp, booking.units)
        })
    }

    /// Returns for each of `bookings` the latest moment at which the bucket may be full again before
    /// it, so that it and those behind it find their units.
    fn latest_full(&self, bookings: &[AdvanceBooking]) -> impl Iterator<Item = Micros> + use<> {
        let mut latest = Micros::MAX;
        let from_last = bookings.iter().rev().map(|booking| {
            latest = self.latest_full_before(booking, latest);
            latest
        });
        let moments: SmallVec<[Micros; 8]> = from_last.collect();
        moments.into_iter().rev()
    }

    /// Returns the latest whole microsecond at which the bucket may be full again before a booking, so
    /// that the booking finds its units, and the bucket is full again at `latest` at the latest. If there
    /// is no such moment, returns the slot: then earlier permits must leave the bucket full.
    fn latest_full_before(&self, booking: &AdvanceBooking, latest: Micros) -> Micros {
        let slot = self.ticks_at(booking.slot);
        let units = u128::from(booking.units) * self.unit;
        let full = self.capacity * self.unit;
        match self.ticks_at(latest).checked_sub(units) {
            Some(before) if before >= self.ticks_at(booking.stamp) && units <= full => {
                let before = before.min(slot + full - units) / self.ticks;
                u64::try_from(before).unwrap_or(u64::MAX)
            }
            _ => booking.slot,
        }
    }

    /// Returns how many units may be used at `slot`.
    pub(super) fn room(&self, slot: Micros, open: PermitTime, advance: &[AdvanceBooking]) -> u64 {
        let (before, behind) = split_at(advance, slot);
        let full_at = self.full_after(before);
        let missing = full_at
            .saturating_sub(self.ticks_at(slot))
            .div_ceil(self.unit);
        let most = self.capacity.saturating_sub(missing);
        let latest = self.latest_full(behind).next().unwrap_or(Micros::MAX);
        let full_at = self.after(full_at, slot.saturating_add(open.length()), 0);
        let fits = self.ticks_at(latest).saturating_sub(full_at) / self.unit;
        u64::try_from(most.min(fits)).unwrap_or(u64::MAX)
    }

    /// Returns how many units are missing at `now`, without the advance bookings.
    pub(super) fn used(&self, now: Micros) -> u64 {
        u64::try_from(self.capacity)
            .unwrap_or(u64::MAX)
            .saturating_sub(self.room(now, PermitTime::MOMENT, &[]))
    }

    /// Takes in a statement of the upstream that was made `ago` microseconds ago: `left` units were
    /// left. From now on the bucket holds at most these units and the units refilled since. Returns
    /// whether it held more.
    pub(super) fn see(&mut self, now: Micros, ago: Micros, left: u64) -> bool {
        let back = self.ticks_at(ago.min(LONGEST_AGO)).div_ceil(self.unit) + 1;
        let most = left.saturating_add(u64::try_from(back).unwrap_or(u64::MAX));
        let gone = self.room(now, PermitTime::MOMENT, &[]).saturating_sub(most);
        if gone > 0 {
            self.insert(now, now, gone, false);
        }
        gone > 0
    }

    /// Takes the units of a permit out of the bucket. `ahead` states whether its slot is later than
    /// now.
    pub(super) fn insert(&mut self, slot: Micros, stamp: Micros, units: u64, ahead: bool) {
        let before = self.full_at;
        let stamp_at = self.ticks_at(stamp);
        let queued = self.room_for(before, u128::from(units)) == slot && stamp_at < before;
        if stamp_at >= before {
            (self.base, self.refundable) = (stamp, UNBOUNDED);
        } else {
            self.refundable = self.refundable.min(before - stamp_at);
        }
        self.full_at = self.after(before, stamp, units);
        if !ahead {
            self.forget_queue();
        } else if queued {
            self.queued_from = self.queued_from.min(slot);
        } else {
            let queued_from = std::mem::replace(&mut self.queued_from, Micros::MAX);
            self.delayed.push_back(DelayedPermit {
                slot,
                units: u128::from(units) * self.unit,
                before,
                after: self.full_at,
                queued_from,
            });
            if self.delayed.len() > MOST_DELAYED {
                self.delayed.pop_front();
            }
        }
    }

    /// Counts units that were used without a permit. The upstream accepted them, so its bucket had
    /// these units. So they leave the bucket empty at most. Fewer units may count for this reason, so
    /// earlier permits can no longer be taken back.
    pub(super) fn charge(&mut self, now: Micros, stamp: Micros, units: u64) {
        let empty = self
            .full_at
            .max(self.ticks_at(now) + self.capacity * self.unit);
        self.insert(now, stamp, units, false);
        if self.full_at >= empty {
            (self.full_at, self.base, self.refundable) = (empty, self.rounded_up(empty), UNBOUNDED);
        }
    }

    /// Forgets in which order permits were booked ahead. From now on none of them is taken back in
    /// full for this reason.
    fn forget_queue(&mut self) {
        self.queued_from = Micros::MAX;
        self.delayed.clear();
    }

    /// Takes back units of permits that were not used.
    ///
    /// The last permits that were booked ahead are taken back in full, because no later permit
    /// depends on them. Any other permit is taken back only as far as later permits allow
    /// (`BucketState::refundable`).
    pub(super) fn subtract(&mut self, unused: UnusedPermits) {
        let mut units = u128::from(unused.units) * self.unit;
        if self.is_last_queued(unused.slot) {
            self.full_at -= units;
            return;
        }
        while units > 0
            && let Some(permit) = self.delayed.back_mut()
            && (permit.slot, permit.after) == (unused.slot, self.full_at)
        {
            let taken = units.min(permit.units);
            units -= taken;
            permit.units -= taken;
            permit.after -= taken;
            self.full_at = permit.after;
            if permit.units == 0 {
                self.full_at = permit.before;
                self.queued_from = permit.queued_from;
                self.delayed.pop_back();
            }
        }
        if units == 0 || unused.stamp < self.base {
            return;
        }
        let since_base = self.full_at.saturating_sub(self.ticks_at(self.base));
        let back = units.min(self.refundable).min(since_base);
        self.full_at -= back;
        self.refundable -= back;
        self.forget_queue();
    }

    /// Returns whether the last permit was booked in order and has this slot.
    fn is_last_queued(&self, slot: Micros) -> bool {
        slot >= self.queued_from && self.room_for(self.full_at, 0) == slot
    }

    /// Returns whether unused permits are all of the last delayed permits that have their slot.
    fn are_last_delayed(&self, unused: UnusedPermits) -> bool {
        let mut units = u128::from(unused.units) * self.unit;
        let mut full_at = self.full_at;
        for permit in self.delayed.iter().rev() {
            if (permit.slot, permit.after) != (unused.slot, full_at) || permit.units > units {
                return false;
            }
            units -= permit.units;
            full_at = permit.before;
            if units == 0 {
                return true;
            }
        }
        false
    }

    /// Returns whether the slot of unused permits would be given again once they are taken back: they
    /// are the last ones, or the bucket has as many units besides them.
    pub(super) fn would_give_again(&self, unused: UnusedPermits) -> bool {
        self.is_last_queued(unused.slot)
            || self.are_last_delayed(unused)
            || self.room_for(self.full_at, u128::from(unused.units)) <= unused.slot
    }

    /// Returns the first moment at which the bucket is full.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        self.rounded_up(self.full_after(advance))
    }
}

/// Returns the bookings with slots up to `slot`, and those behind it.
fn split_at(advance: &[AdvanceBooking], slot: Micros) -> (&[AdvanceBooking], &[AdvanceBooking]) {
    advance.split_at(advance.partition_point(|booking| booking.slot <= slot))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Micros = 1_700_000_000_000_000;

    proptest! {
        #![proptest_config(histories::config(1000))]

        /// The time in which any number of units is refilled: never shorter than the quota says, exact
        /// for most buckets, and at most a millionth longer for all. Lua can count its ticks.
        #[test]
        fn bucket_loses_at_most_a_millionth_of_its_rate(
            capacity in prop_oneof![1u32..1000, 1u32..=1_000_000_000],
            count in prop_oneof![1u32..1000, 1u32..=1_000_000_000],
            window in prop_oneof![1_000u64..10_000_000, 1_000u64..100_000_000_000],
            part in 0.0..1.0,
        ) {
            let span = |units: u32| {
                (u128::from(units) * u128::from(window)).div_ceil(u128::from(count))
            };
            prop_assume!(span(capacity) <= 400 * 86_400_000_000);
            let units = (f64::from(capacity) * part) as u32 + 1;
            let mut bucket = BucketState::new(capacity, count, window);
            bucket.insert(NOW, NOW, capacity.into(), false);
            let slot = bucket.first_slot(NOW, units.min(capacity).into(), PermitTime::MOMENT, &[]);
            let (waited, exact) = (u128::from(slot - NOW), span(units.min(capacity)));
            let is_exact = u128::from(capacity) * u128::from(window) <= MOST_TICKS;
            let longest = if is_exact { exact } else { exact + exact.div_ceil(1_000_000) };
            prop_assert!((exact..=longest).contains(&waited), "{} of {}", waited, exact);
            prop_assert!(bucket.capacity * bucket.unit + bucket.ticks <= UNBOUNDED);
        }
    }
}
