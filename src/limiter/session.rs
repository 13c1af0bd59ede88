//! What a line remembers of a store that takes a trip to answer: how its time lies to ours, and enough for one that lost
//! its state to tell.

use std::time::{Duration, Instant};

use crate::clock;
use crate::limit::micros_down;
use crate::store::{Lease, Memory, Segment, Unused};

pub(super) struct Remembered {
    incarnation: u64,
    writes: u64,
    /// Between which moments of ours it was that time of the store's.
    seen: u64,
    earliest: Instant,
    latest: Instant,
    /// When the last call that was answered was sent, and when its answer arrived.
    sent: Instant,
    heard: Instant,
    /// The longest trip of a call and its answer lately.
    trip: Duration,
    /// By how much the wall clock was ahead when the last answer arrived.
    wall_ahead: i64,
    /// Whether something may have been missed since.
    doubted: bool,
    /// From this moment the store may have forgotten the key for good reason.
    until: Instant,
    /// What was granted lately, and before that: together never less than what was used in the last window.
    granted: Granted,
    granted_before: Granted,
}

/// Units, and from when to when they may be used; `from` in the store's time.
#[derive(Clone, Copy, Default)]
struct Granted {
    units: u64,
    from: u64,
    until: Option<Instant>,
}

impl Remembered {
    pub(super) fn new(lease: &Lease, sent: Instant, now: Instant) -> Self {
        Remembered {
            incarnation: lease.incarnation,
            writes: lease.writes,
            seen: lease.now,
            earliest: sent,
            latest: now,
            sent,
            heard: now,
            trip: Duration::ZERO,
            wall_ahead: 0,
            doubted: false,
            until: now,
            granted: Granted::default(),
            granted_before: Granted::default(),
        }
    }

    /// Takes in an answer to a call that was sent at `sent`; `window` is for how long its quota remembers.
    pub(super) fn update(&mut self, lease: &Lease, window: Duration, sent: Instant, now: Instant) {
        self.set_clock(lease.now, sent, now);
        (self.incarnation, self.writes) = (lease.incarnation, lease.writes);
        (self.sent, self.heard, self.doubted) = (sent, now, false);
        self.trip = now.saturating_duration_since(sent).max(self.trip - self.trip / 16);
        self.wall_ahead = clock::wall_ahead();
        self.until = clock::after(sent, lease.remember);
        self.count_from(lease, lease.now, window, now);
    }

    /// Counts what the process granted itself while the store was away.
    pub(super) fn count(&mut self, lease: &Lease, window: Duration, now: Instant) {
        let passed = now.saturating_duration_since(self.latest);
        self.count_from(lease, self.seen.saturating_add(micros_down(passed)), window, now);
    }

    /// Counts what a lease grants; the store's time is `theirs`.
    fn count_from(&mut self, lease: &Lease, theirs: u64, window: Duration, now: Instant) {
        // What was granted a window ago makes room once what came before it is a window old.
        let old = |granted: &Granted| granted.until.is_none_or(|until| clock::after(until, window) <= now);
        if old(&self.granted_before) && self.granted.from.saturating_add(micros_down(window)) <= theirs {
            self.granted_before = std::mem::take(&mut self.granted);
            self.granted.from = theirs;
        }
        for &Segment { cost, count, wait, life, .. } in lease.segments.iter().chain(&lease.prefetched) {
            let until = clock::after(now, wait.saturating_add(life));
            self.granted.units = self.granted.units.saturating_add(u64::from(cost) * u64::from(count));
            self.granted.until = self.granted.until.max(Some(until));
        }
    }

    /// The store's time was `seen` between `sent` and `now`. Earlier answers may know better: so one slow trip harms
    /// nobody. Clocks that run apart by a two-thousandth are allowed for; where the two do not agree, one of them stepped.
    fn set_clock(&mut self, seen: u64, sent: Instant, now: Instant) {
        let passed = Duration::from_micros(seen.saturating_sub(self.seen));
        let drift = passed / 2000;
        let earliest = clock::after(self.earliest, passed.saturating_sub(drift)).max(sent);
        let latest = clock::after(self.latest, passed.saturating_add(drift)).min(now);
        let agree = seen >= self.seen && earliest <= latest;
        (self.earliest, self.latest) = if agree { (earliest, latest) } else { (sent, now) };
        self.seen = seen;
    }

    /// Between which moments the store's time was what its last answer said.
    pub(super) fn bounds(&self) -> (Instant, Instant) {
        (self.earliest, self.latest)
    }

    /// What was granted lately and given back need not be charged.
    pub(super) fn forget(&mut self, unused: &[Unused]) {
        let (incarnation, from) = (self.incarnation, self.granted.from);
        let lately = unused.iter().filter(|unused| unused.incarnation == incarnation && unused.slot >= from);
        self.granted.units = self.granted.units.saturating_sub(lately.map(|unused| unused.units).sum());
    }

    /// What the store is told with the next call. A machine that slept since the last answer remembers nothing: for how
    /// long it slept, the monotonic clock does not know.
    pub(super) fn tell(&self, now: Instant) -> Memory {
        let since = now.saturating_duration_since(self.heard);
        if now >= self.until || self.incarnation == 0 || clock::has_slept(self.wall_ahead, since) {
            return Memory::default();
        }
        Memory {
            incarnation: self.incarnation,
            writes: self.writes,
            seen: self.seen,
            since,
            trip: self.trip,
            granted: self.granted.units.saturating_add(self.granted_before.units),
        }
    }

    pub(super) fn writes(&self) -> u64 {
        self.writes
    }

    pub(super) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Whether what was granted before may still be used, or the store has to be asked first.
    pub(super) fn is_trusted(&self, trust: Duration, now: Instant) -> bool {
        self.incarnation == 0 || (!self.doubted && now.saturating_duration_since(self.sent) <= trust)
    }

    /// What others did may have been missed: before what was granted is used, the store is asked.
    pub(super) fn doubt(&mut self) {
        self.doubted = true;
    }

    /// Until when it is of use.
    pub(super) fn until(&self) -> Instant {
        self.until
    }
}
