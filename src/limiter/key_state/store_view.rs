//! What this process knows of its store, for one key: how the store answers, and the store's clock
//! and state. Also how long the permits of the next call are to be valid.

use std::time::{Duration, Instant};

use crate::clock;
use crate::error::StoreError;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::limiter::reservation::Reservation;
use crate::limiter::session::{KeySession, TimeBounds};
use crate::quota::{LIFE, Limit};
use crate::store::{ClientSession, Grant, Lease, Refusal, Source, trust};
use crate::tuning::{LIVES_IN_WINDOW, LONGEST_ASKED_LIFE, WAKE_UP};
use crate::wait_queue::WaitBound;

/// What this process knows of its store, for one key.
pub(in crate::limiter) struct StoreView {
    /// Whether the store answers later, after a round trip to a server, and not at once.
    pub(super) answers_later: bool,
    /// Whether this process granted the booked permits itself, because the store is unreachable.
    pub(super) is_standalone: bool,
    /// Whether other clients use a limit of the key as well, by the store's last answer.
    pub(super) has_external_usage: bool,
    /// Whether a call is under way that may grant more than the upstream states is left.
    pub(super) tightens: bool,
    /// Units that could still be sent, by the store's last answer. No limit has more than fit here.
    free: u32,
    /// How long the permits of the next call are valid, in nanoseconds.
    life_nanos: u64,
    /// What is known of a store that has a server.
    remote: Option<Box<RemoteView>>,
}

/// What this process knows of a store that has a server, for one key.
struct RemoteView {
    /// The session with the store, which may lose its state.
    session: KeySession,
    /// The store's last refusal.
    refusal: Option<Box<StoreRefusal>>,
    /// The last slot of a joint request that this key moved: it was later than the other keys allowed.
    /// The next slot is hardly earlier.
    last_joint: Option<Instant>,
}

/// What a lease showed of the store.
pub(super) struct Observed {
    /// When the store made the lease.
    pub(super) bounds: TimeBounds,
    /// Whether the store has lost its state.
    pub(super) has_lost_state: bool,
    /// Whether the permits that were granted before are void, because the ledger that made this
    /// lease does not know of them.
    pub(super) voids_permits: bool,
}

impl StoreView {
    /// Makes the view of a store that was not called yet. `life` is how long permits are valid at
    /// first.
    pub(super) fn new(life: Duration) -> Self {
        StoreView {
            answers_later: false,
            is_standalone: false,
            has_external_usage: false,
            tightens: false,
            free: 0,
            life_nanos: nanos(life),
            remote: None,
        }
    }

    /// Returns the units that could still be sent, by the store's last answer.
    pub(super) fn free(&self) -> u64 {
        u64::from(self.free)
    }

    /// Returns how long the permits of the next call are valid.
    pub(super) fn life(&self) -> Duration {
        Duration::from_nanos(self.life_nanos)
    }

    /// Returns the session with a store that has a server.
    fn session(&self) -> Option<&KeySession> {
        self.remote.as_ref().map(|remote| &remote.session)
    }

    fn session_mut(&mut self) -> Option<&mut KeySession> {
        self.remote.as_mut().map(|remote| &mut remote.session)
    }

    /// Returns what a call states about the session with the store.
    pub(super) fn client_session(&self, now: Instant) -> ClientSession {
        let session = self.session().map(|session| session.client_session(now));
        session.unwrap_or_default()
    }

    /// Takes in what a lease states besides its slots. It is the answer to a call that was sent at
    /// `sent`.
    pub(super) fn observe(
        &mut self,
        spec: &LimitSpec,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> Observed {
        // The store and the process on its own count apart. Permits of the one are not known to the
        // other.
        let is_standalone = lease.source.is_standalone();
        let has_changed_ledger = self.is_standalone != is_standalone;
        self.is_standalone = is_standalone;
        let mut has_lost_state = false;
        let bounds = match lease.source {
            Source::Store => {
                self.has_external_usage = lease.external_usage;
                self.free = u32::try_from(lease.free).unwrap_or(u32::MAX);
                has_lost_state = self.update_session(spec, lease, sent, now);
                match self.session().filter(|_| self.answers_later) {
                    Some(session) => session.bounds(),
                    None => TimeBounds::new(sent, now),
                }
            }
            Source::Standalone { granted_at } => {
                if let Some(session) = self.session_mut() {
                    session.count(lease, spec.quota().longest_memory(), now);
                }
                TimeBounds::at(granted_at)
            }
        };
        Observed {
            bounds,
            has_lost_state,
            voids_permits: has_changed_ledger || has_lost_state,
        }
    }

    /// Takes in the clock and the incarnation of a store that may lose its state. Returns whether
    /// it has lost its state since the last answer.
    fn update_session(
        &mut self,
        spec: &LimitSpec,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> bool {
        if !self.answers_later {
            return false;
        }
        let remote = self.remote.get_or_insert_with(|| {
            Box::new(RemoteView {
                session: KeySession::new(lease, sent, now),
                refusal: None,
                last_joint: None,
            })
        });
        let session = &mut remote.session;
        let has_lost_state = session.incarnation() != lease.incarnation;
        session.update(lease, spec.quota().longest_memory(), sent, now);
        has_lost_state
    }

    /// Returns the last slot of a joint request that this key moved. It may have passed.
    pub(in crate::limiter) fn last_joint(&self) -> Option<Instant> {
        self.remote.as_ref()?.last_joint
    }

    /// Takes in the slot of a joint request that this key moved.
    pub(super) fn note_joint(&mut self, slot: Instant) {
        if let Some(remote) = &mut self.remote {
            remote.last_joint = Some(slot);
        }
    }

    /// Returns until when the session with the store matters.
    pub(super) fn session_until(&self) -> Option<Instant> {
        self.session().map(KeySession::until)
    }

    /// Subtracts permits that are given back from those that the session counts as granted.
    pub(super) fn forget(&mut self, unused: &[UnusedPermits]) {
        if let Some(session) = self.session_mut() {
            session.forget(unused);
        }
    }

    /// Counts units that were used at `now` without a permit.
    pub(super) fn count_charge(&mut self, units: u64, now: Instant) {
        if let Some(session) = self.session_mut() {
            session.count_charge(units, now);
        }
    }

    /// Returns whether the state in the store was written more often than its last answer stated.
    pub(in crate::limiter) fn is_behind(&self, writes: u64) -> bool {
        self.session()
            .is_some_and(|session| session.writes() < writes)
    }

    /// Returns whether the ledger that grants now has granted `slot`, by the store's last answer.
    pub(super) fn knows(&self, slot: &Reservation) -> bool {
        if self.is_standalone {
            return slot.incarnation == Source::STANDALONE_INCARNATION;
        }
        self.session()
            .is_none_or(|session| session.incarnation() == slot.incarnation)
    }

    /// Notes that an event of the store may have been missed.
    pub(super) fn doubt(&mut self) {
        if let Some(session) = self.session_mut() {
            session.doubt();
        }
        self.forget_refusal();
    }

    /// Returns whether permits that were granted before may be used at `at`. If not, the store has
    /// to confirm them first.
    pub(super) fn is_trusted(&self, spec: &LimitSpec, at: Instant) -> bool {
        let is_trusted =
            |session: &KeySession| session.is_trusted(trust(spec.quota().longest_memory()), at);
        self.is_standalone || self.session().is_none_or(is_trusted)
    }

    /// Takes in which cost the store refused, if it refused one. If the limiter fails open, nothing
    /// is kept: each request has to call the store, because it may pass uncounted.
    pub(super) fn note_refusal(
        &mut self,
        refused: Option<u32>,
        lease: &Lease,
        fails_open: bool,
        now: Instant,
    ) {
        if lease.source.is_standalone() || fails_open {
            return;
        }
        if let Some(remote) = &mut self.remote {
            let before = remote.refusal.as_deref().copied();
            remote.refusal = StoreRefusal::after(before, refused, lease.refused, now).map(Box::new);
        }
    }

    /// Returns the refusal of a request for which the store is not called. The store has refused
    /// such a request lately, and is not to be called again yet.
    pub(in crate::limiter) fn repeated_refusal(
        &self,
        cost: u32,
        bound: WaitBound,
        now: Instant,
    ) -> Option<Refusal> {
        self.remote.as_ref()?.refusal.as_ref()?.of(cost, bound, now)
    }

    /// Forgets the last refusal, because it may no longer be true.
    pub(in crate::limiter) fn forget_refusal(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.refusal = None;
        }
    }

    /// Checks that an answer did not take longer than any permit is valid.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooSlow`], if permits of the lease have expired on their way.
    pub(super) fn check_speed(
        &self,
        spec: &LimitSpec,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> Result<(), StoreError> {
        // The validity of a permit counts from when the call was sent.
        let took = now.saturating_duration_since(sent);
        let longest = self.longest_life(spec);
        let mut grants = lease.grants.iter();
        let is_too_slow = took >= self.life()
            && self.life() >= longest
            && !lease.source.is_standalone()
            && grants.any(|grant| grant.wait.saturating_add(grant.validity) <= took);
        if is_too_slow {
            Err(StoreError::TooSlow { took, longest })
        } else {
            Ok(())
        }
    }

    /// Returns the shortest time for which a slot ahead must be usable. A slot that is usable for
    /// less is given back.
    ///
    /// After a slow round trip, little is left of the validity of a permit, and a waiter that wakes
    /// late would lose its slot. So the next permits are valid for longer, up to the longest
    /// validity. Once that is reached, any slot is used.
    pub(super) fn least_use(&self, spec: &LimitSpec) -> Duration {
        if self.life() < self.longest_life(spec) {
            spec.life() / 2
        } else {
            Duration::ZERO
        }
    }

    /// Sets the validity of the next permits after an answer. It depends on how exactly the clock
    /// of the store is known (`bounds`), and on whether permits expired before they arrived
    /// (`died`).
    pub(super) fn adapt_life(&mut self, spec: &LimitSpec, bounds: TimeBounds, died: bool) {
        let adapted = if died {
            self.life() * 2
        } else {
            self.life() - self.life() / 8
        };
        self.set_life(spec, bounds, adapted);
    }

    /// Does the same after an answer for one request only. The validity does not shrink: it shrinks
    /// if the request wakes in time.
    pub(super) fn raise_life(&mut self, spec: &LimitSpec, bounds: TimeBounds, died: bool) {
        let raised = if died { self.life() * 2 } else { self.life() };
        self.set_life(spec, bounds, raised);
    }

    /// Goes on under another quota. The validity of permits depends more on how late tasks wake than on
    /// the quota, so it stays if the quota allows it.
    pub(super) fn quota_changed(&mut self, spec: &LimitSpec) {
        let life = match self.session_until() {
            Some(_) => self.life().min(self.longest_life(spec)),
            None => Duration::ZERO,
        };
        self.life_nanos = nanos(life.max(spec.life()));
        self.forget_refusal();
    }

    fn set_life(&mut self, spec: &LimitSpec, bounds: TimeBounds, life: Duration) {
        let trips = bounds.span().saturating_mul(2).saturating_add(WAKE_UP);
        let least = if self.answers_later {
            spec.life().max(trips)
        } else {
            spec.life()
        };
        self.life_nanos = nanos(least.max(life).min(self.longest_life(spec)));
    }

    /// Lengthens the validity of the next permits, because a permit expired before its waiter woke.
    pub(super) fn lengthen_life(&mut self, spec: &LimitSpec) {
        self.life_nanos = nanos((self.life() * 2).min(self.longest_life(spec)));
    }

    /// Shortens the validity of the next permits a little, because a waiter woke in time.
    pub(super) fn shorten_life(&mut self, spec: &LimitSpec) {
        self.life_nanos = nanos((self.life() - self.life() / 64).max(spec.life()));
    }

    /// Returns the longest validity of a permit. It is reached if permits expire before they are
    /// used.
    fn longest_life(&self, spec: &LimitSpec) -> Duration {
        if !self.answers_later && spec.life() < LIFE {
            // A longer validity would lose more of the rate than the quota allows.
            return spec.life();
        }
        LONGEST_ASKED_LIFE
            .max(spec.quota().shortest_window() / LIVES_IN_WINDOW)
            .max(spec.life())
    }

    /// Returns the validity of prefetched permits: a two-hundredth of the shortest window, or that
    /// of the other permits if it is longer.
    pub(super) fn prefetch_life(&self, spec: &LimitSpec) -> Duration {
        self.life().max(spec.quota().shortest_window() / 200)
    }
}

/// Returns a span in nanoseconds.
fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns when this process may use a grant: never before its slot, and never after its deadline.
/// The store made the lease between `earliest` and `latest`.
pub(super) fn slot(
    lease: &Lease,
    grant: &Grant,
    TimeBounds { earliest, latest }: TimeBounds,
) -> Reservation {
    // The store's time is cut to whole microseconds.
    let lasts = grant
        .wait
        .saturating_add(grant.validity)
        .saturating_sub(Duration::from_micros(1));
    Reservation {
        at: clock::after(latest, grant.wait),
        until: clock::after(earliest, lasts),
        cost: grant.cost,
        count: grant.count,
        slot: grant.slot,
        stamp: grant.stamp,
        incarnation: lease.permit_incarnation(),
        lender: None,
        probe: None,
        is_at_once: true,
    }
}

/// How often the store is called until the first slot, after it has refused a request.
const TIMES: u32 = 4;

/// The shortest pause between two calls.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// Two first slots that are no further apart are one slot.
const SAME_SLOT: Duration = Duration::from_millis(20);

/// A refusal of the store, kept for a while. If a later request cannot wait for the first slot either, it is refused without
/// a call to the store.
#[derive(Clone, Copy, Debug)]
struct StoreRefusal {
    /// The units of the refused request. A request with fewer units may find room.
    cost: u32,
    /// The limit that refused it.
    limit: Option<Limit>,
    /// The first slot that the refused request could have had.
    slot: Instant,
    /// When the store is called again, because permits may have been given back.
    ask_at: Instant,
    /// How long after a refusal the store is called again.
    pause: Duration,
}

impl StoreRefusal {
    /// Returns what is kept after an answer. `cost` is the cost of the request that it refused, if
    /// it refused one. `before` is what was kept until then.
    fn after(
        before: Option<StoreRefusal>,
        cost: Option<u32>,
        refusal: Option<Refusal>,
        now: Instant,
    ) -> Option<StoreRefusal> {
        let (cost, Refusal { wait, limit }) = cost.zip(refusal)?;
        let slot = clock::after(now, wait?);
        let is_same =
            |before: &StoreRefusal| slot.max(before.slot) - slot.min(before.slot) <= SAME_SLOT;
        let pause = match before.filter(is_same) {
            Some(before) => before.pause,
            None => ((slot - now) / TIMES).max(SHORTEST_PAUSE),
        };
        let ask_at = clock::after(now, pause).min(slot);
        Some(StoreRefusal {
            cost,
            limit,
            slot,
            ask_at,
            pause,
        })
    }

    /// Returns the refusal of a request that cannot wait for the first slot, if the store is not to
    /// be called yet.
    fn of(&self, cost: u32, bound: WaitBound, now: Instant) -> Option<Refusal> {
        let &StoreRefusal { slot, limit, .. } = self;
        let refuses = now < self.ask_at && cost >= self.cost && bound.latest < slot;
        refuses.then(|| Refusal {
            wait: Some(slot - now),
            limit,
        })
    }
}
