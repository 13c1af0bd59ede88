//! A token bucket: the generic cell rate algorithm, advanced from deadlines.
//!
//! Twin: `store/redis/lua/bucket.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::{Micros, UnusedPermits};

/// Allows at most `capacity` units back to back; `count` units are refilled every `window`.
///
/// Keeps the *theoretical arrival time*: when the bucket will be full again. It is advanced from
/// the stamp of each permit, not from its slot, so the bucket of an upstream is never empty, even
/// if a permit arrives at the end of its life.
///
/// Moments are kept in microseconds times `count`: one unit is then exactly `window`, and no period
/// is ever rounded.
#[derive(Debug)]
pub(super) struct Bucket {
    capacity: u128,
    count: u128,
    window: u128,
    /// When the bucket is full again.
    full_at: u128,
    /// The stamp at which `full_at` last started anew. Permits with earlier stamps no longer affect
    /// it.
    base: u128,
    /// How far `full_at` may move back without a permit since `base` losing what it stands on.
    slack: u128,
    /// All permits booked ahead with this slot or a later one queued: each got the first slot for
    /// which the bucket had units.
    queued_from: Micros,
    /// The last permits booked ahead that did not queue, because another limit made them wait
    /// longer.
    marks: VecDeque<Mark>,
}

/// `full_at` before and after a permit that did not queue, so that it can be taken back whole.
#[derive(Debug)]
struct Mark {
    slot: Micros,
    units: u128,
    before: u128,
    after: u128,
    queued_from: Micros,
}

/// The greatest age of a statement by the upstream; an older one is treated as this old.
const LONGEST_AGO: Micros = 5_000_000;

/// The most marks that are kept. Beyond that, a booking without a mark can be taken back only as
/// far as no later permit was granted after it.
const MOST_MARKS: usize = 32;

impl Bucket {
    pub(super) fn new(capacity: u32, count: u32, window: Micros) -> Self {
        Bucket {
            capacity: u128::from(capacity),
            count: u128::from(count),
            window: u128::from(window),
            full_at: 0,
            base: 0,
            slack: 0,
            queued_from: Micros::MAX,
            marks: VecDeque::new(),
        }
    }

    fn scaled(&self, moment: Micros) -> u128 {
        u128::from(moment) * self.count
    }

    pub(super) fn first_slot(&self, from: Micros, cost: u64) -> Micros {
        from.max(self.room_for(u128::from(cost)))
    }

    /// Returns when the bucket holds `units`.
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

    pub(super) fn used(&self, now: Micros) -> u64 {
        u64::try_from(self.capacity)
            .unwrap_or(u64::MAX)
            .saturating_sub(self.room(now))
    }

    /// Takes in that the upstream stated, `ago`, that `left` units are left. The bucket then holds
    /// at most these units and the units refilled since. Returns whether it held more.
    pub(super) fn see(&mut self, now: Micros, ago: Micros, left: u64) -> bool {
        let back = (u128::from(ago.min(LONGEST_AGO)) * self.count).div_ceil(self.window) + 1;
        let most = left.saturating_add(u64::try_from(back).unwrap_or(u64::MAX));
        let gone = self.room(now).saturating_sub(most);
        if gone > 0 {
            self.insert(now, now, gone, false);
        }
        gone > 0
    }

    pub(super) fn insert(&mut self, slot: Micros, stamp: Micros, units: u64, ahead: bool) {
        let stamp = self.scaled(stamp);
        let before = self.full_at;
        let queued = self.room_for(u128::from(units)) == slot && stamp < before;
        if stamp >= before {
            self.full_at = stamp;
            self.base = stamp;
            self.slack = u128::MAX;
        } else {
            self.slack = self.slack.min(before - stamp);
        }
        let units = u128::from(units) * self.window;
        self.full_at += units;
        if !ahead {
            self.forget_queue();
        } else if queued {
            self.queued_from = self.queued_from.min(slot);
        } else {
            let queued_from = std::mem::replace(&mut self.queued_from, Micros::MAX);
            self.marks.push_back(Mark {
                slot,
                units,
                before,
                after: self.full_at,
                queued_from,
            });
            if self.marks.len() > MOST_MARKS {
                self.marks.pop_front();
            }
        }
    }

    /// Counts units that were used without a permit. They leave the bucket empty at most, because
    /// the upstream that accepted them had these units. If they are cut for that, earlier permits
    /// can no longer be taken back.
    pub(super) fn charge(&mut self, now: Micros, stamp: Micros, units: u64) {
        let empty = self
            .full_at
            .max(self.scaled(now) + self.capacity * self.window);
        let most = u64::try_from(self.capacity).unwrap_or(u64::MAX);
        self.insert(now, stamp, units.min(most), false);
        if self.full_at > empty {
            (self.full_at, self.base, self.slack) = (empty, empty, u128::MAX);
        }
    }

    fn forget_queue(&mut self) {
        self.queued_from = Micros::MAX;
        self.marks.clear();
    }

    /// Takes units out again that were inserted and never used.
    ///
    /// The last booking ahead is taken back whole, because no permit was granted after it. Any
    /// other booking is taken back as far as no later permit was granted after it.
    pub(super) fn subtract(&mut self, unused: UnusedPermits) {
        let units = u128::from(unused.units) * self.window;
        if unused.slot >= self.queued_from && self.room_for(0) == unused.slot {
            self.full_at -= units;
            return;
        }
        if let Some(mark) = self.marks.back_mut()
            && (mark.slot, mark.after) == (unused.slot, self.full_at)
            && units <= mark.units
        {
            mark.units -= units;
            mark.after -= units;
            self.full_at = mark.after;
            if mark.units == 0 {
                self.full_at = mark.before;
                self.queued_from = mark.queued_from;
                self.marks.pop_back();
            }
            return;
        }
        if self.scaled(unused.stamp) < self.base {
            return;
        }
        let back = units
            .min(self.slack)
            .min(self.full_at.saturating_sub(self.base));
        self.full_at -= back;
        if self.slack != u128::MAX {
            self.slack -= back;
        }
        self.forget_queue();
    }

    pub(super) fn fresh_from(&self) -> Micros {
        u64::try_from(self.full_at.div_ceil(self.count)).unwrap_or(u64::MAX)
    }
}
