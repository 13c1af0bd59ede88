//! A token bucket: the generic cell rate algorithm. It counts each permit from its stamp.
//!
//! Twin: `store/redis/lua/bucket.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

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
/// Moments are in microseconds times `count`. One unit then takes exactly `window`, and no moment
/// is rounded.
#[derive(Debug)]
pub(super) struct Bucket {
    /// The units of a full bucket.
    capacity: u128,
    /// The units that are refilled in each `window`.
    count: u128,
    /// In microseconds. Also the time in which one unit is refilled, in microseconds times `count`.
    window: u128,
    /// When the bucket is full again.
    full_at: u128,
    /// The last stamp by which the bucket was full, so that `full_at` started anew from it. Permits
    /// with earlier stamps no longer affect `full_at`.
    base: u128,
    /// The most by which returned permits may move `full_at` back, in microseconds times `count`.
    /// Up to this bound, each permit since `base` still counts in full from its stamp. `u128::MAX`
    /// if there is no bound.
    refundable: u128,
    /// Each permit that is booked ahead with this slot or a later one got the first slot for which
    /// the bucket had units. [`Micros::MAX`] if there is no such permit.
    queued_from: Micros,
    /// The last permits that were booked ahead with a later slot than the bucket required, because
    /// another limit delayed them.
    delayed: VecDeque<DelayedPermit>,
}

/// A permit of `Bucket::delayed`. With these values it can be taken back in full.
#[derive(Debug)]
struct DelayedPermit {
    slot: Micros,
    /// The time in which its units are refilled, in microseconds times `count`.
    units: u128,
    /// `Bucket::full_at` before the permit was booked.
    before: u128,
    /// `Bucket::full_at` after it was booked.
    after: u128,
    /// `Bucket::queued_from` before it was booked.
    queued_from: Micros,
}

/// The greatest age that is assumed of a statement of the upstream. An older statement counts as
/// this old.
const LONGEST_AGO: Micros = 5_000_000;

/// The most delayed permits that are kept. A permit that was dropped from them can be taken back
/// only as far as later permits allow (`Bucket::refundable`).
const MOST_DELAYED: usize = 32;

impl Bucket {
    /// Makes a full bucket.
    pub(super) fn new(capacity: u32, count: u32, window: Micros) -> Self {
        Bucket {
            capacity: u128::from(capacity),
            count: u128::from(count),
            window: u128::from(window),
            full_at: 0,
            base: 0,
            refundable: 0,
            queued_from: Micros::MAX,
            delayed: VecDeque::new(),
        }
    }

    /// Returns a moment in microseconds times `count`.
    fn scaled(&self, moment: Micros) -> u128 {
        u128::from(moment) * self.count
    }

    /// Returns the first moment, not before `from`, at which `cost` units may leave.
    pub(super) fn first_slot(&self, from: Micros, cost: u64) -> Micros {
        from.max(self.room_for(u128::from(cost)))
    }

    /// Returns the first moment at which the bucket holds `units`.
    fn room_for(&self, units: u128) -> Micros {
        let ahead = self.capacity.saturating_sub(units) * self.window;
        u64::try_from(self.full_at.saturating_sub(ahead).div_ceil(self.count)).unwrap_or(u64::MAX)
    }

    /// Returns how many units may be used at `slot`.
    pub(super) fn room(&self, slot: Micros) -> u64 {
        let missing = self
            .full_at
            .saturating_sub(self.scaled(slot))
            .div_ceil(self.window);
        u64::try_from(self.capacity.saturating_sub(missing)).unwrap_or(u64::MAX)
    }

    /// Returns how many units are missing at `now`.
    pub(super) fn used(&self, now: Micros) -> u64 {
        u64::try_from(self.capacity)
            .unwrap_or(u64::MAX)
            .saturating_sub(self.room(now))
    }

    /// Takes in a statement of the upstream that was made `ago` microseconds ago: `left` units were
    /// left. From now on the bucket holds at most these units and the units refilled since. Returns
    /// whether it held more.
    pub(super) fn see(&mut self, now: Micros, ago: Micros, left: u64) -> bool {
        let back = (u128::from(ago.min(LONGEST_AGO)) * self.count).div_ceil(self.window) + 1;
        let most = left.saturating_add(u64::try_from(back).unwrap_or(u64::MAX));
        let gone = self.room(now).saturating_sub(most);
        if gone > 0 {
            self.insert(now, now, gone, false);
        }
        gone > 0
    }

    /// Takes the units of a permit out of the bucket. `ahead` states whether its slot is later than
    /// now.
    pub(super) fn insert(&mut self, slot: Micros, stamp: Micros, units: u64, ahead: bool) {
        let stamp = self.scaled(stamp);
        let before = self.full_at;
        let queued = self.room_for(u128::from(units)) == slot && stamp < before;
        if stamp >= before {
            self.full_at = stamp;
            self.base = stamp;
            self.refundable = u128::MAX;
        } else {
            self.refundable = self.refundable.min(before - stamp);
        }
        let units = u128::from(units) * self.window;
        self.full_at += units;
        if !ahead {
            self.forget_queue();
        } else if queued {
            self.queued_from = self.queued_from.min(slot);
        } else {
            let queued_from = std::mem::replace(&mut self.queued_from, Micros::MAX);
            self.delayed.push_back(DelayedPermit {
                slot,
                units,
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
    /// these units. So they leave the bucket empty at most. If fewer units count for this reason,
    /// earlier permits can no longer be taken back.
    pub(super) fn charge(&mut self, now: Micros, stamp: Micros, units: u64) {
        let empty = self
            .full_at
            .max(self.scaled(now) + self.capacity * self.window);
        let most = u64::try_from(self.capacity).unwrap_or(u64::MAX);
        self.insert(now, stamp, units.min(most), false);
        if self.full_at > empty {
            (self.full_at, self.base, self.refundable) = (empty, empty, u128::MAX);
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
    /// (`Bucket::refundable`).
    pub(super) fn subtract(&mut self, unused: UnusedPermits) {
        let units = u128::from(unused.units) * self.window;
        if unused.slot >= self.queued_from && self.room_for(0) == unused.slot {
            self.full_at -= units;
            return;
        }
        if let Some(permit) = self.delayed.back_mut()
            && (permit.slot, permit.after) == (unused.slot, self.full_at)
            && units <= permit.units
        {
            permit.units -= units;
            permit.after -= units;
            self.full_at = permit.after;
            if permit.units == 0 {
                self.full_at = permit.before;
                self.queued_from = permit.queued_from;
                self.delayed.pop_back();
            }
            return;
        }
        if self.scaled(unused.stamp) < self.base {
            return;
        }
        let back = units
            .min(self.refundable)
            .min(self.full_at.saturating_sub(self.base));
        self.full_at -= back;
        if self.refundable != u128::MAX {
            self.refundable -= back;
        }
        self.forget_queue();
    }

    /// Returns the first moment at which the bucket is full.
    pub(super) fn fresh_from(&self) -> Micros {
        u64::try_from(self.full_at.div_ceil(self.count)).unwrap_or(u64::MAX)
    }
}
