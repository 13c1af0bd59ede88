//! What a line remembers of a store that may lose its state: enough for the store to tell that it did, and to charge
//! what was granted before.

use std::time::{Duration, Instant};

use crate::clock;
use crate::store::{Lease, Memory, Segment, Unused};

pub(super) struct Remembered {
    incarnation: u64,
    seen: u64,
    /// When the last answer arrived.
    heard_at: Instant,
    /// When the store was last told.
    told_at: Instant,
    /// From this moment the store may have forgotten the key for good reason.
    until: Instant,
    /// Units granted since `turned`, and in the window before that: together never fewer than in the last window.
    granted: u64,
    granted_before: u64,
    turned: Instant,
    stamp: u64,
}

impl Remembered {
    /// Of a store's first answer; `None` of one that loses nothing.
    pub(super) fn new(lease: &Lease, now: Instant) -> Option<Self> {
        let &Lease { incarnation, now: seen, .. } = lease;
        let remembered = Remembered {
            incarnation,
            seen,
            heard_at: now,
            told_at: now,
            until: now,
            granted: 0,
            granted_before: 0,
            turned: now,
            stamp: 0,
        };
        (incarnation != 0).then_some(remembered)
    }

    /// Takes in an answer to a call that was sent at `sent`; `window` is the longest of the quota.
    pub(super) fn update(&mut self, lease: &Lease, window: Duration, sent: Instant, now: Instant) {
        self.incarnation = lease.incarnation;
        self.seen = lease.now;
        self.heard_at = now;
        self.until = clock::after(sent, lease.remember);
        if now.saturating_duration_since(self.turned) >= window {
            let idle = now.saturating_duration_since(self.turned) >= window.saturating_mul(2);
            self.granted_before = if idle { 0 } else { self.granted };
            self.granted = 0;
            self.turned = now;
        }
        for segment in lease.segments.iter().chain(&lease.prefetched) {
            let &Segment { cost, count, stamp, .. } = segment;
            self.granted = self.granted.saturating_add(u64::from(cost) * u64::from(count));
            self.stamp = self.stamp.max(stamp);
        }
    }

    /// What was given back need not be charged.
    pub(super) fn forget(&mut self, unused: &[Unused]) {
        let ours = unused.iter().filter(|unused| unused.incarnation == self.incarnation);
        let mut units = ours.map(|unused| unused.units).sum::<u64>();
        for granted in [&mut self.granted, &mut self.granted_before] {
            let back = units.min(*granted);
            *granted -= back;
            units -= back;
        }
    }

    /// What the store is told with the next call.
    pub(super) fn tell(&mut self, now: Instant) -> Memory {
        self.told_at = now;
        if now >= self.until {
            return Memory::default();
        }
        Memory {
            incarnation: self.incarnation,
            seen: self.seen,
            since: now.saturating_duration_since(self.heard_at),
            granted: self.granted.saturating_add(self.granted_before),
            stamp: self.stamp,
        }
    }

    /// When the store was last told.
    pub(super) fn told_at(&self) -> Instant {
        self.told_at
    }

    /// Until when it is of use.
    pub(super) fn until(&self) -> Instant {
        self.until
    }
}
