//! A token bucket: the generic cell rate algorithm, advanced from deadlines.

use super::Micros;

/// At most `capacity` units back to back; `count` come back every `window`.
///
/// Keeps the *theoretical arrival time*: when the bucket will be full again. It is advanced from the stamp of each
/// permit, not from its slot, so the bucket of an upstream never runs dry however late in its life a permit arrives.
///
/// Moments are kept in microseconds times `count`: one unit is then exactly `window`, and no period is ever rounded.
#[derive(Debug)]
pub(super) struct Bucket {
    capacity: u128,
    count: u128,
    window: u128,
    /// When the bucket is full again.
    full_at: u128,
    /// The stamp at which `full_at` last started anew: permits with earlier stamps no longer shape it.
    base: u128,
    /// How far `full_at` may move back without a permit since `base` losing what it stands on.
    slack: u128,
}

impl Bucket {
    pub(super) fn new(capacity: u32, count: u32, window: Micros) -> Self {
        Bucket {
            capacity: u128::from(capacity),
            count: u128::from(count),
            window: u128::from(window),
            full_at: 0,
            base: 0,
            slack: 0,
        }
    }

    fn scaled(&self, moment: Micros) -> u128 {
        u128::from(moment) * self.count
    }

    pub(super) fn first_slot(&self, from: Micros, cost: u64) -> Micros {
        let ahead = self.capacity.saturating_sub(u128::from(cost)) * self.window;
        let slot = self.full_at.saturating_sub(ahead).div_ceil(self.count);
        from.max(u64::try_from(slot).unwrap_or(u64::MAX))
    }

    /// How many units may go at `slot`.
    pub(super) fn room(&self, slot: Micros) -> u64 {
        let missing = self.full_at.saturating_sub(self.scaled(slot)).div_ceil(self.window);
        u64::try_from(self.capacity.saturating_sub(missing)).unwrap_or(u64::MAX)
    }

    pub(super) fn used(&self, now: Micros) -> u64 {
        u64::try_from(self.capacity).unwrap_or(u64::MAX).saturating_sub(self.room(now))
    }

    pub(super) fn insert(&mut self, stamp: Micros, units: u64) {
        let stamp = self.scaled(stamp);
        if stamp >= self.full_at {
            self.full_at = stamp;
            self.base = stamp;
            self.slack = u128::MAX;
        } else {
            self.slack = self.slack.min(self.full_at - stamp);
        }
        self.full_at += u128::from(units) * self.window;
    }

    /// Takes units out again that were inserted under `stamp` and never used, as far as no permit granted since
    /// stands on them.
    pub(super) fn subtract(&mut self, stamp: Micros, units: u64) {
        if self.scaled(stamp) < self.base {
            return;
        }
        let back = (u128::from(units) * self.window).min(self.slack).min(self.full_at - self.base);
        self.full_at -= back;
        if self.slack != u128::MAX {
            self.slack -= back;
        }
    }

    pub(super) fn fresh_from(&self) -> Micros {
        u64::try_from(self.full_at.div_ceil(self.count)).unwrap_or(u64::MAX)
    }
}
