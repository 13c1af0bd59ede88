//! The session of one key with a store that has a server: the store's clock as this process knows
//! it, and the recent grants.
//!
//! `store/session.rs` has what is known after a single reply. This file combines the replies.

use std::time::{Duration, Instant};

use crate::clock;
use crate::limit::{Micros, micros_down};
use crate::store::{ClientSession, Lease, StoreSession, UnusedPermits};

/// Between which moments, by the clock of this process, something happened in the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeBounds {
    pub(super) earliest: Instant,
    pub(super) latest: Instant,
}

impl TimeBounds {
    pub(super) fn new(earliest: Instant, latest: Instant) -> Self {
        TimeBounds { earliest, latest }
    }

    /// It happened at this moment.
    pub(super) fn at(moment: Instant) -> Self {
        TimeBounds::new(moment, moment)
    }

    /// Returns how uncertain it is when it happened.
    pub(super) fn span(self) -> Duration {
        self.latest.saturating_duration_since(self.earliest)
    }
}

/// The session of one key with a store.
///
/// A reply states the store's time. The store read that time after the call was sent and before the
/// reply arrived. Earlier replies narrow these bounds, so one slow round trip does not shorten the
/// validity of permits.
pub(super) struct KeySession {
    /// The last reply of the store.
    reply: StoreSession,
    /// When the store's clock showed the time of the last reply.
    bounds: TimeBounds,
    /// The longest round trip of a call lately.
    trip: Duration,
    /// Whether an event of the store may have been missed since the last reply.
    doubted: bool,
    /// What was granted lately. Together with `granted_before` it is never less than what was used
    /// in the last window.
    granted: GrantedUnits,
    /// What was granted before `granted`.
    granted_before: GrantedUnits,
}

/// Units that a store granted in some span of time.
#[derive(Clone, Copy, Default)]
struct GrantedUnits {
    /// How many units were granted.
    units: u64,
    /// When the span began, in the store's time.
    from: Micros,
    /// The last moment at which one of them may be used.
    until: Option<Instant>,
}

impl GrantedUnits {
    /// Adds units that may be used until then.
    fn add(&mut self, units: u64, until: Instant) {
        self.units = self.units.saturating_add(units);
        self.until = self.until.max(Some(until));
    }
}

impl KeySession {
    /// Begins a session with a reply to the call that was sent at `sent`.
    /// [`update`](KeySession::update) takes in the reply.
    pub(super) fn new(lease: &Lease, sent: Instant, now: Instant) -> Self {
        KeySession {
            reply: StoreSession::of(lease, sent, now),
            bounds: TimeBounds::new(sent, now),
            trip: Duration::ZERO,
            doubted: false,
            granted: GrantedUnits::default(),
            granted_before: GrantedUnits::default(),
        }
    }

    /// Takes in a reply to the call that was sent at `sent`. The longest window of the quota is
    /// `window`.
    pub(super) fn update(&mut self, lease: &Lease, window: Duration, sent: Instant, now: Instant) {
        self.bound_clock(lease.now, sent, now);
        self.reply = StoreSession::of(lease, sent, now);
        self.doubted = false;
        self.trip = self.reply.round_trip().max(self.trip - self.trip / 16);
        self.count_grants(lease, lease.now, window, now);
    }

    /// Counts permits that the process granted itself while the store could not be reached.
    pub(super) fn count(&mut self, lease: &Lease, window: Duration, now: Instant) {
        let passed = now.saturating_duration_since(self.bounds.latest);
        let store_now = self.reply.seen.saturating_add(micros_down(passed));
        self.count_grants(lease, store_now, window, now);
    }

    /// Counts the permits of a lease. The store's time is `store_now`.
    fn count_grants(&mut self, lease: &Lease, store_now: Micros, window: Duration, now: Instant) {
        // `granted` becomes `granted_before` if it began a window ago, and if the units of the
        // present `granted_before` can no longer count.
        let before_until = self.granted_before.until;
        let is_over = before_until.is_none_or(|until| clock::after(until, window) <= now);
        let since_a_window = self.granted.from.saturating_add(micros_down(window)) <= store_now;
        if is_over && since_a_window {
            self.granted_before = std::mem::take(&mut self.granted);
            self.granted.from = store_now;
        }
        for grant in lease.all_grants() {
            let until = clock::after(now, grant.wait.saturating_add(grant.validity));
            self.granted.add(grant.units(), until);
        }
    }

    /// Counts units that this process used at `now` without a permit.
    pub(super) fn count_charge(&mut self, units: u64, now: Instant) {
        self.granted.add(units, now);
    }

    /// Takes in that the store's time was `seen` between `sent` and `now`.
    ///
    /// Earlier replies bound it as well. The clocks may run apart by a two-thousandth. If the
    /// bounds contradict each other, one of the clocks was set, and only the new bounds count.
    fn bound_clock(&mut self, seen: Micros, sent: Instant, now: Instant) {
        let last_seen = self.reply.seen;
        let passed = Duration::from_micros(seen.saturating_sub(last_seen));
        let drift = passed / 2000;
        let TimeBounds { earliest, latest } = self.bounds;
        let earliest = clock::after(earliest, passed.saturating_sub(drift)).max(sent);
        let latest = clock::after(latest, passed.saturating_add(drift)).min(now);
        self.bounds = match seen >= last_seen && earliest <= latest {
            true => TimeBounds::new(earliest, latest),
            false => TimeBounds::new(sent, now),
        };
    }

    /// Returns when the store's clock showed the time of its last reply.
    pub(super) fn bounds(&self) -> TimeBounds {
        self.bounds
    }

    /// Subtracts permits that were granted lately and are given back.
    pub(super) fn forget(&mut self, unused: &[UnusedPermits]) {
        let incarnation = self.incarnation();
        let from = self.granted.from;
        let lately = unused
            .iter()
            .filter(|unused| unused.incarnation == incarnation && unused.slot >= from);
        self.granted.units = self
            .granted
            .units
            .saturating_sub(lately.map(|unused| unused.units).sum());
    }

    /// Returns what the next call states about the session. If the session has expired, or if the
    /// machine slept, the call states no more than which state it was of: releases of a state that is there no more do
    /// not count.
    pub(super) fn client_session(&self, now: Instant) -> ClientSession {
        let is_of_use = self.incarnation() != 0;
        let session = is_of_use.then(|| self.reply.client_session(now));
        let Some(session) = session.flatten() else {
            return ClientSession {
                incarnation: self.incarnation(),
                ..ClientSession::default()
            };
        };
        let granted = self.granted.units.saturating_add(self.granted_before.units);
        ClientSession {
            trip: self.trip,
            granted,
            ..session
        }
    }

    /// Returns how often the store's state had been written, as its last reply stated.
    pub(super) fn writes(&self) -> u64 {
        self.reply.writes
    }

    /// Returns the incarnation of the store's state; 0 for a store that loses nothing.
    pub(super) fn incarnation(&self) -> u64 {
        self.reply.incarnation
    }

    /// Returns whether permits may be used without another reply of the store. A reply confirms
    /// earlier permits for the time `trust`.
    pub(super) fn is_trusted(&self, trust: Duration, now: Instant) -> bool {
        self.incarnation() == 0
            || (!self.doubted && now.saturating_duration_since(self.reply.sent) <= trust)
    }

    /// Notes that an event may have been missed. The store has to confirm earlier permits before
    /// they are used.
    pub(super) fn doubt(&mut self) {
        self.doubted = true;
    }

    /// Returns when the session expires.
    pub(super) fn until(&self) -> Instant {
        self.reply.until
    }
}
