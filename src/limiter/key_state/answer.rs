//! What an answer of the store means for a key: the store's clock and state, the granted slots, and
//! the validity of permits.

use std::time::{Duration, Instant};

use super::KeyState;
use super::context::KeyContext;
use super::store_refusal::StoreRefusal;
use crate::clock;
use crate::error::StoreError;
use crate::limit::LimitSpec;
use crate::limiter::queue::Answered;
use crate::limiter::reservation::{Reservation, Settled};
use crate::limiter::session::KeySession;
use crate::quota::LIFE;
use crate::store::{Grant, Lease, Refusal, Source, trust};

/// The longest validity of a permit, unless a twentieth of the shortest window is longer.
const LONGEST_LIFE: Duration = Duration::from_millis(20);

/// The validity of permits allows for a task that wakes this late.
const WAKE_UP: Duration = Duration::from_millis(5);

impl KeyState {
    /// Takes in the answer to the call that was sent at `sent`.
    pub(super) fn answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        answer: Result<Lease, StoreError>,
        sent: Instant,
        now: Instant,
    ) {
        match answer {
            Ok(lease) => self.granted(ctx, &lease, sent, now),
            Err(error) => self.failed(ctx, error, now),
        }
        if self.queue.is_some() {
            self.obey_hold(now, &mut ctx.work.wakers);
        }
    }

    /// Takes in a lease, the answer to a call that was sent at `sent`.
    fn granted(&mut self, ctx: &mut KeyContext<'_>, lease: &Lease, sent: Instant, now: Instant) {
        let bounds = self.remember(ctx, lease, sent, now);
        let precedes_release =
            lease.source.has_reply() && self.hold.answered(lease.hold, sent, bounds);
        let least = self.least_use(ctx);
        let Some(queue) = &mut self.queue else { return };
        if let Some(wait) = lease.recovering {
            return queue.pause(wait, now, &mut ctx.work.wakers);
        }
        let slots = lease.grants.iter().map(|grant| slot(lease, grant, bounds));
        let refusal = Settled::Refused(lease.refused.unwrap_or(Refusal::NEVER));
        let end = if precedes_release {
            None
        } else {
            Some(&refusal)
        };
        let Answered { died, refused } =
            queue.answered(slots, end, least, now, &mut ctx.work.wakers);
        if precedes_release {
            // The store decided while the key was on hold. The next call asks for all waiters
            // again.
            queue.give_up_slots();
            return;
        }
        // If the limiter fails open, each request has to call the store: it may pass uncounted.
        if self.later && !lease.source.is_standalone() && !ctx.fails_open {
            let before = self.refused.as_deref().copied();
            self.refused = StoreRefusal::after(before, refused, lease.refused, now).map(Box::new);
        }
        self.adapt_life(ctx.spec, bounds, died);
    }

    /// Takes in that the store failed.
    fn failed(&mut self, ctx: &mut KeyContext<'_>, error: StoreError, now: Instant) {
        let is_trusted = self.is_trusted(ctx, now);
        let held = self.hold.left(now);
        let least = self.least_use(ctx);
        let Some(queue) = &mut self.queue else { return };
        if let Some(left) = held.filter(|_| ctx.fails_open) {
            // No request passes uncounted while the key is on hold.
            return queue.pause(left, now, &mut ctx.work.wakers);
        }
        if !is_trusted && queue.is_due(now) {
            // The store may have lost the slots that it booked.
            queue.void();
        }
        queue.answered(
            [],
            Some(&Settled::Failed(error)),
            least,
            now,
            &mut ctx.work.wakers,
        );
    }

    /// Returns an error instead of an answer that took longer than any permit is valid, and gives
    /// back what it brought.
    pub(super) fn unless_too_slow(
        &self,
        ctx: &KeyContext<'_>,
        answer: Result<Lease, StoreError>,
        sent: Instant,
    ) -> Result<Lease, StoreError> {
        let lease = answer?;
        // The validity of a permit counts from when the call was sent.
        let took = ctx.now.saturating_duration_since(sent);
        let longest = self.longest_life(ctx.spec);
        let expired = |grant: &Grant| grant.wait.saturating_add(grant.validity) <= took;
        let is_too_slow = took >= self.life
            && self.life >= longest
            && !lease.source.is_standalone()
            && lease.grants.iter().any(expired);
        if is_too_slow {
            ctx.store.give_back(ctx.key, ctx.spec, &lease.unused());
            return Err(StoreError::TooSlow { took, longest });
        }
        Ok(lease)
    }

    /// Keeps what a lease states besides its slots. Returns two moments by the clock of this
    /// process: the store made the lease between them.
    pub(super) fn remember(
        &mut self,
        ctx: &KeyContext<'_>,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> (Instant, Instant) {
        let is_alone = lease.source.is_standalone();
        if self.alone != is_alone {
            // The store and the process on its own count apart. Permits of the one are not known to
            // the other.
            self.alone = is_alone;
            self.forget_permits();
        }
        let bounds = match lease.source {
            Source::Store => {
                self.shared = lease.external_usage;
                self.free = lease.free;
                self.remember_session(ctx, lease, sent, now)
                    .unwrap_or((sent, now))
            }
            Source::StandaloneWithReply { granted_at } => {
                self.shared = lease.external_usage;
                self.free = 0;
                self.remember_session(ctx, lease, sent, now);
                (granted_at, granted_at)
            }
            Source::Standalone { granted_at } => {
                if let Some(session) = &mut self.session {
                    session.count(lease, ctx.spec.quota().longest_memory(), now);
                }
                (granted_at, granted_at)
            }
        };
        if let Some(grant) = &lease.prefetched {
            self.prefetched
                .fill(&slot(lease, grant, (bounds.0, bounds.0)));
        }
        bounds
    }

    /// Takes in the clock and the incarnation of a store that may lose its state. Returns two
    /// moments, between which the store made the lease.
    fn remember_session(
        &mut self,
        ctx: &KeyContext<'_>,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> Option<(Instant, Instant)> {
        if !self.later {
            return None;
        }
        let session = self
            .session
            .get_or_insert_with(|| Box::new(KeySession::new(lease, sent, now)));
        let has_lost_state = session.incarnation() != lease.incarnation;
        session.update(lease, ctx.spec.quota().longest_memory(), sent, now);
        let bounds = session.bounds();
        if has_lost_state {
            self.forget_permits();
            self.hold.store_lost_state(now);
        }
        Some(bounds)
    }

    /// Drops the permits that were granted before, because the store does not know of them. Waiters
    /// keep their places.
    fn forget_permits(&mut self) {
        self.prefetched.clear();
        if let Some(queue) = &mut self.queue {
            queue.void();
        }
    }

    /// Returns whether permits that were granted before may be used. If not, the store has to
    /// confirm them first.
    pub(super) fn is_trusted(&self, ctx: &KeyContext<'_>, now: Instant) -> bool {
        let is_trusted = |session: &KeySession| {
            session.is_trusted(trust(ctx.spec.quota().longest_memory()), now)
        };
        self.alone || self.session.as_deref().is_none_or(is_trusted)
    }

    /// Returns whether the store is called now to confirm the next slot, so that the answer arrives
    /// before the slot is due. If it is too early for that, the waiter of the slot wakes in time.
    pub(super) fn confirms_next_slot(&mut self, ctx: &KeyContext<'_>, now: Instant) -> bool {
        let Some(slot) = self.queue.as_ref().and_then(|queue| queue.next_slot()) else {
            return false;
        };
        if self.is_trusted(ctx, slot) {
            return false;
        }
        let lead = trust(ctx.spec.quota().longest_memory()) / 4;
        let at = slot.checked_sub(lead).unwrap_or(now);
        let Some(queue) = self
            .queue
            .as_mut()
            .filter(|queue| queue.confirmed != Some(slot))
        else {
            return false;
        };
        if at > now {
            queue.wake_before(slot, at);
            return false;
        }
        queue.confirmed = Some(slot);
        true
    }

    /// Returns for how long a slot ahead must be usable.
    ///
    /// After a slow round trip, little is left of the validity of a permit, and a waiter that wakes
    /// late would lose its slot. So the next permits are valid for longer, up to the longest
    /// validity. Once that is reached, any slot is used.
    fn least_use(&self, ctx: &KeyContext<'_>) -> Duration {
        if self.life < self.longest_life(ctx.spec) {
            ctx.spec.life() / 2
        } else {
            Duration::ZERO
        }
    }

    /// Sets the validity of the next permits. It depends on how exactly the clock of the store is
    /// known (`bounds`), and on whether permits expired before they arrived (`died`).
    fn adapt_life(&mut self, spec: &LimitSpec, bounds: (Instant, Instant), died: bool) {
        let uncertain = bounds.1.saturating_duration_since(bounds.0);
        let trips = uncertain.saturating_mul(2).saturating_add(WAKE_UP);
        let least = if self.later {
            spec.life().max(trips)
        } else {
            spec.life()
        };
        let adapted = if died {
            self.life * 2
        } else {
            self.life - self.life / 8
        };
        self.life = least.max(adapted).min(self.longest_life(spec));
    }

    /// Returns the longest validity of a permit. It is reached if permits expire before they are
    /// used.
    pub(super) fn longest_life(&self, spec: &LimitSpec) -> Duration {
        if !self.later && spec.life() < LIFE {
            // A longer validity would lose more of the rate than the quota allows.
            return spec.life();
        }
        LONGEST_LIFE
            .max(spec.quota().shortest_window() / 20)
            .max(spec.life())
    }

    /// Returns the validity of prefetched permits: a two-hundredth of the shortest window, or
    /// `life` if that is longer.
    pub(super) fn prefetch_life(&self, ctx: &KeyContext<'_>) -> Duration {
        self.life.max(ctx.spec.quota().shortest_window() / 200)
    }
}

/// Returns when this process may use a grant: never before its slot, and never after its deadline.
/// The store made the lease between `earliest` and `latest`.
pub(super) fn slot(
    lease: &Lease,
    grant: &Grant,
    (earliest, latest): (Instant, Instant),
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
    }
}
