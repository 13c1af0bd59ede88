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
///
/// # Permits that come back
///
/// Settled requests give back a part of most permits, so the bucket has to take back almost all of it. For
/// the proof above, each permit that is left has to count in full from its stamp: `full_at` is at least the stamp
/// plus the time in which the units of this permit and of all later ones are refilled. The bucket keeps no
/// single permits. It keeps two groups of the last ones, and this about the *young* group:
///
/// > `full_at` is at least the newest stamp plus the time in which all units of the group are refilled.
///
/// If this does not hold with a new permit, the permit begins the next young group, and the group before becomes
/// the *old* one. Permits of earlier groups are not taken back. Under load, a group lasts until about a whole bucket was used.
///
/// *Why each permit still counts in full.* Of the young group, it follows from what is kept. Units of the young group
/// come back in full, because both sides become less by the same time. Units of the old group come back as far as the young
/// group allows. What was kept about the old group still holds for it, because each later
/// permit moved `full_at` by its units at least. Earlier permits lose units that were theirs or came later, so for
/// them both sides become less as well.
///
/// A new young group begins behind the newest stamp. So a stamp states the group of a permit. A permit with
/// an earlier stamp than permits before it may count as one of the old group.
///
/// The last permits that are booked ahead come back in full by their order. Others that are booked ahead stay:
/// `subtract` says why.
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
    /// The latest stamp of a permit.
    newest: Micros,
    /// The permits with this stamp or a later one are the young group. All others have earlier stamps.
    young_from: Micros,
    /// The ticks in which the units since the young group began are refilled.
    young: u128,
    /// The permits with this stamp or a later one, up to the young group, are the old group.
    old_from: Micros,
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

/// The most delayed permits that are kept.
const MOST_DELAYED: usize = 32;

/// The most ticks in which a whole bucket is refilled, if a unit takes exactly as long as the quota says.
const MOST_TICKS: u128 = 4_503_599_627_370_496;

/// The fewest ticks in which a unit of any other bucket is refilled.
const UNIT_TICKS: u128 = 1_048_576;

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
            newest: 0,
            young_from: 0,
            young: 0,
            old_from: 0,
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
        let queued =
            self.room_for(before, u128::from(units)) == slot && self.ticks_at(stamp) < before;
        self.full_at = self.after(before, stamp, units);
        self.add_to_group(stamp, u128::from(units) * self.unit);
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

    /// Adds units that are part of `full_at` now to the young group, or begins the next one with them.
    fn add_to_group(&mut self, stamp: Micros, units: u128) {
        let newest = self.newest.max(stamp);
        if self.full_at >= self.ticks_at(newest) + self.young + units {
            self.young += units;
        } else {
            self.old_from = self.young_from;
            self.young_from = self.young_from.max(self.newest + 1);
            self.young = units;
        }
        self.newest = newest;
    }

    /// Counts units that were used without a permit. The upstream accepted them, so its bucket had
    /// these units. So they leave the bucket empty at most.
    pub(super) fn charge(&mut self, now: Micros, stamp: Micros, units: u64) {
        let empty = self.full_at.max(self.empty_at(now));
        self.insert(now, stamp, units, false);
        self.cut(empty);
    }

    /// Takes in that the bucket is empty at most at `moment`, whatever it counts.
    pub(super) fn leave_empty_at_most(&mut self, moment: Micros) {
        self.cut(self.empty_at(moment));
    }

    /// Takes in that the bucket has limited nothing until `now`, so that it may count more than it ever
    /// held: after the last of these permits it is empty at most.
    pub(super) fn resume(&mut self, now: Micros) {
        self.leave_empty_at_most(now.max(self.newest));
    }

    /// Returns when a bucket is full again that is empty at `moment`.
    fn empty_at(&self, moment: Micros) -> u128 {
        self.ticks_at(moment) + self.capacity * self.unit
    }

    /// Moves `full_at` back to `latest`. If it was later, fewer units than those of all permits count, so none of them
    /// can be taken back any more.
    fn cut(&mut self, latest: u128) {
        if self.full_at >= latest {
            self.full_at = latest;
            self.young_from = self.young_from.max(self.newest + 1);
            (self.old_from, self.young) = (self.young_from, 0);
            self.forget_queue();
        }
    }

    /// Forgets in which order permits were booked ahead. From now on none of them is taken back in
    /// full for this reason.
    fn forget_queue(&mut self) {
        self.queued_from = Micros::MAX;
        self.delayed.clear();
    }

    /// Takes back units of permits that were not used: in full, if no later permit depends on them. Of others, only if
    /// their slot has come: those of the young group in full, and those of the old group as far as the young one
    /// allows.
    pub(super) fn subtract(&mut self, now: Micros, unused: UnusedPermits) {
        let mut units = u128::from(unused.units) * self.unit;
        if self.is_last_queued(unused.slot) {
            self.take_last(self.full_at.saturating_sub(units), units);
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
            let mut full_at = permit.after;
            if permit.units == 0 {
                full_at = permit.before;
                self.queued_from = permit.queued_from;
                self.delayed.pop_back();
            }
            self.take_last(full_at, taken);
        }
        // After a refusal by the upstream, a whole queue comes back. If its units came back out of order, a full bucket
        // would allow a burst, although other clients have emptied that of the upstream.
        if units == 0 || unused.slot > now || unused.stamp < self.old_from {
            return;
        }
        if unused.stamp >= self.young_from {
            units = units.min(self.young);
            self.young -= units;
        } else {
            let needed = self.ticks_at(self.newest) + self.young;
            units = units.min(self.full_at.saturating_sub(needed));
        }
        self.full_at -= units;
        self.forget_queue();
    }

    /// Takes back units of the last permit. Without them, the bucket is full again at `full_at`.
    fn take_last(&mut self, full_at: u128, units: u128) {
        self.full_at = full_at;
        self.young = self.young.saturating_sub(units);
        self.newest = self.newest.min(self.rounded_up(full_at));
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
    use proptest::sample::select;

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
            prop_assert!(bucket.capacity * bucket.unit + bucket.ticks <= 2 * MOST_TICKS);
        }
    }

    /// What happens to a bucket of `CAPACITY` units. Permits are numbered from the newest one.
    #[derive(Clone, Debug)]
    enum Op {
        Wait(Micros),
        /// Another limit delays the permit. Without a life, it counts from its slot.
        Permit {
            delay: Micros,
            life: Micros,
            units: u64,
        },
        TakeBack {
            permit: usize,
            percent: u64,
        },
        Charge {
            ago: Micros,
            units: u64,
        },
    }

    const CAPACITY: u64 = 20;

    fn op() -> impl Strategy<Value = Op> {
        let wait = prop_oneof![0u64..3, 0u64..40, 0u64..500];
        let delay = prop_oneof![9 => Just(0), 1 => 0u64..200];
        let permit = prop_oneof![0usize..3, 0usize..40];
        prop_oneof![
            2 => wait.prop_map(Op::Wait),
            4 => (delay, 0u64..60, 1..=CAPACITY)
                .prop_map(|(delay, life, units)| Op::Permit { delay, life, units }),
            4 => (permit, prop_oneof![Just(100), 1u64..100])
                .prop_map(|(permit, percent)| Op::TakeBack { permit, percent }),
            1 => (0u64..300, 1..2 * CAPACITY).prop_map(|(ago, units)| Op::Charge { ago, units }),
        ]
    }

    /// A permit, in the order in which they were granted.
    struct Granted {
        slot: Micros,
        stamp: Micros,
        /// The units that have not come back.
        units: u64,
        /// Whether a charge has emptied the bucket since.
        is_forgotten: bool,
    }

    /// Applies `ops`. After each of them, each permit still counts in full from its stamp: the bucket is
    /// not full before its units, and those of all later permits, are refilled from there.
    fn check(ops: &[Op], count: u32, window: Micros) -> Result<(), TestCaseError> {
        let mut bucket = BucketState::new(CAPACITY as u32, count, window);
        let (mut now, mut permits) = (NOW, Vec::<Granted>::new());
        for op in ops {
            match *op {
                Op::Wait(span) => now += span,
                Op::Permit { delay, life, units } => {
                    let slot = bucket.first_slot(now, units, PermitTime::MOMENT, &[]) + delay;
                    // The bucket takes permits with one slot ahead for each other.
                    if slot > now && permits.iter().any(|permit| permit.slot == slot) {
                        continue;
                    }
                    let (stamp, is_forgotten) = (slot + life, false);
                    bucket.insert(slot, stamp, units, slot > now);
                    permits.push(Granted {
                        slot,
                        stamp,
                        units,
                        is_forgotten,
                    });
                }
                Op::TakeBack { permit, percent } => {
                    let Some(permit) = permits.iter_mut().rev().nth(permit) else {
                        continue;
                    };
                    let units = (permit.units * percent).div_ceil(100);
                    permit.units -= units;
                    let unused = UnusedPermits::new(permit.slot, permit.stamp, units, 0);
                    bucket.subtract(now, unused);
                }
                Op::Charge { ago, units } => {
                    let empty = bucket.empty_at(now).max(bucket.full_at);
                    bucket.charge(now, now - ago, units.min(CAPACITY));
                    if bucket.full_at >= empty {
                        permits
                            .iter_mut()
                            .for_each(|permit| permit.is_forgotten = true);
                    }
                    let (slot, stamp, units) = (0, now - ago, 0);
                    permits.push(Granted {
                        slot,
                        stamp,
                        units,
                        is_forgotten: true,
                    });
                }
            }
            let mut units = 0;
            for permit in permits
                .iter()
                .rev()
                .take_while(|permit| !permit.is_forgotten)
            {
                units += u128::from(permit.units) * bucket.unit;
                let counts =
                    permit.units == 0 || bucket.full_at >= bucket.ticks_at(permit.stamp) + units;
                prop_assert!(counts, "{op:?}: full at {}", bucket.full_at);
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(histories::config(2000))]

        /// Whatever comes back, and in whatever order, takes nothing from the permits that were granted since.
        #[test]
        fn returned_units_leave_later_permits_in_full(
            ops in prop::collection::vec(op(), 1..60),
            count in 1u32..8,
            window in select(vec![5u64, 20, 100]),
        ) {
            check(&ops, count, window)?;
        }
    }
}
