//! What a process knows of a store with a server: how the store's clock relates to its own, and what a store that lost its state
//! needs to find that out.

use std::time::{Duration, Instant};

use crate::clock;
use crate::limit::micros_down;
use crate::store::{ClientSession, Grant, Lease, UnusedPermits};

/// The session of one key with a store.
pub(super) struct StoreSession {
    /// The incarnation of the store's state; 0 for a store that loses nothing.
    incarnation: u64,
    /// How often the state had been written, by the last answer.
    writes: u64,
    /// The store's time in the last answer, in microseconds.
    seen: u64,
    /// The store's clock showed `seen` at some moment between these two.
    earliest: Instant,
    latest: Instant,
    /// When the last call that was answered was sent.
    sent: Instant,
    /// When its answer arrived.
    heard: Instant,
    /// The longest round trip of a call lately.
    trip: Duration,
    /// By how much the wall clock was ahead when the last answer arrived, in microseconds.
    wall_ahead: i64,
    /// Whether a message may have been missed since the last answer.
    doubted: bool,
    /// From this moment the store may have dropped the key because it was idle.
    until: Instant,
    /// What was granted lately. With `granted_before` it is never less than what was used in the last window.
    granted: Granted,
    /// What was granted before that.
    granted_before: Granted,
}

/// Units that were granted, and when they may be used. `from` is in the store's time.
#[derive(Clone, Copy, Default)]
struct Granted {
    units: u64,
    from: u64,
    until: Option<Instant>,
}

impl StoreSession {
    pub(super) fn new(lease: &Lease, sent: Instant, now: Instant) -> Self {
        StoreSession {
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

    /// Takes in an answer to a call that was sent at `sent`; `window` is the longest window of the quota.
    pub(super) fn update(&mut self, lease: &Lease, window: Duration, sent: Instant, now: Instant) {
        self.set_clock(lease.now, sent, now);
        self.incarnation = lease.incarnation;
        self.writes = lease.writes;
        self.sent = sent;
        self.heard = now;
        self.doubted = false;
        self.trip = now.saturating_duration_since(sent).max(self.trip - self.trip / 16);
        self.wall_ahead = clock::wall_ahead();
        self.until = clock::after(sent, lease.session_ttl);
        self.count_from(lease, lease.now, window, now);
    }

    /// Counts what the process granted itself while the store could not be reached.
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
        for &Grant { cost, count, wait, validity: life, .. } in lease.grants.iter().chain(&lease.prefetched) {
            let until = clock::after(now, wait.saturating_add(life));
            self.granted.units = self.granted.units.saturating_add(u64::from(cost) * u64::from(count));
            self.granted.until = self.granted.until.max(Some(until));
        }
    }

    /// Takes in that the store's time was `seen` between `sent` and `now`.
    ///
    /// Earlier answers bound it as well, so that one slow trip harms no permit. The clocks may run apart by a two-thousandth. If the
    /// bounds contradict each other, one of the clocks was set, and only the new ones count.
    fn set_clock(&mut self, seen: u64, sent: Instant, now: Instant) {
        let passed = Duration::from_micros(seen.saturating_sub(self.seen));
        let drift = passed / 2000;
        let earliest = clock::after(self.earliest, passed.saturating_sub(drift)).max(sent);
        let latest = clock::after(self.latest, passed.saturating_add(drift)).min(now);
        let agree = seen >= self.seen && earliest <= latest;
        self.earliest = if agree { earliest } else { sent };
        self.latest = if agree { latest } else { now };
        self.seen = seen;
    }

    /// Returns the two moments between which the store's time was the time in its last answer.
    pub(super) fn bounds(&self) -> (Instant, Instant) {
        (self.earliest, self.latest)
    }

    /// Subtracts permits that were granted lately and are given back.
    pub(super) fn forget(&mut self, unused: &[UnusedPermits]) {
        let (incarnation, from) = (self.incarnation, self.granted.from);
        let lately = unused.iter().filter(|unused| unused.incarnation == incarnation && unused.slot >= from);
        self.granted.units = self.granted.units.saturating_sub(lately.map(|unused| unused.units).sum());
    }

    /// Returns what the next call sends to the store. After a sleep of the machine it sends nothing, since the monotonic clock does
    /// not show how long the machine slept.
    pub(super) fn tell(&self, now: Instant) -> ClientSession {
        let since = now.saturating_duration_since(self.heard);
        if now >= self.until || self.incarnation == 0 || clock::has_slept(self.wall_ahead, since) {
            return ClientSession::default();
        }
        ClientSession {
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

    /// Returns whether earlier permits may be used, or the store has to confirm them first.
    pub(super) fn is_trusted(&self, trust: Duration, now: Instant) -> bool {
        self.incarnation == 0 || (!self.doubted && now.saturating_duration_since(self.sent) <= trust)
    }

    /// Notes that a message may have been missed: the store has to confirm earlier permits before they are used.
    pub(super) fn doubt(&mut self) {
        self.doubted = true;
    }

    /// Returns until when the session is of use.
    pub(super) fn until(&self) -> Instant {
        self.until
    }
}
