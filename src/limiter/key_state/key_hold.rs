//! The hold of a key: until when no request may leave, after a refusal by the upstream or by an
//! operator.
//!
//! Permits at hand, and permits booked before its end, go back to the store. Waiters that cannot
//! wait until its end are refused. The other waiters get new slots, which a store that knows of the
//! hold grants for the time after it.

use std::collections::BTreeMap;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::KeyState;
use super::context::KeyContext;
use super::hold::{Hold, HoldSource};
use super::probation::{LONGEST_PROBATION, Uncertain};
use super::upstream_refusals::{HoldSpan, UpstreamRefusals};
use crate::clock;
use crate::limiter::queue::Number;
use crate::quota::Limit;
use crate::store::HoldState;
use crate::wakers::Wakers;

/// The hold of a key, and what depends on it.
pub(super) struct KeyHold {
    pub(super) hold: Hold,
    /// What was learned from the refusals of the upstream.
    refusals: UpstreamRefusals,
    /// When this process last sent a refusal to the store.
    sent_at: Option<Instant>,
    /// Whether the store has lost the hold, so that it has to be sent again.
    resends: bool,
    /// The tasks that wait only for the end of the hold.
    waiting: BTreeMap<Number, Waker>,
    /// Present while an accepted request would change anything.
    uncertain: Option<Uncertain>,
}

/// A hold that follows from a refusal of the upstream.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct NewHold {
    pub(in crate::limiter) held: HoldState,
    /// Whether it is sent to the store.
    pub(in crate::limiter) is_sent: bool,
}

/// The shortest time between two refusals that this process sends to the store, unless the hold is
/// longer by a tenth.
const SEND_AGAIN: Duration = Duration::from_secs(1);

impl KeyHold {
    /// Makes a hold that is over.
    fn new(now: Instant) -> Box<Self> {
        Box::new(KeyHold {
            hold: Hold::new(now),
            refusals: UpstreamRefusals::default(),
            sent_at: None,
            resends: false,
            waiting: BTreeMap::new(),
            uncertain: None,
        })
    }

    /// Returns until when the hold, or what was learned from it, matters.
    fn matters_until(&self) -> Instant {
        let probation = if self.hold.is_cut() {
            LONGEST_PROBATION
        } else {
            Duration::ZERO
        };
        clock::after(self.hold.end(), self.refusals.matters_for().max(probation))
    }

    /// Sets whether an accepted request would change anything. As long as it would, all responses
    /// are read.
    fn set_uncertain(&mut self, is_uncertain: bool) {
        if is_uncertain {
            self.uncertain.get_or_insert_with(Uncertain::new);
        } else {
            self.uncertain = None;
        }
    }
}

impl KeyState {
    /// Returns for how long the key is on hold.
    pub(in crate::limiter) fn held(&self, now: Instant) -> Option<Duration> {
        self.hold.as_ref()?.hold.left(now)
    }

    /// Returns until when the hold, or what was learned from it, matters.
    pub(super) fn hold_matters_until(&self) -> Option<Instant> {
        self.hold.as_ref().map(|hold| hold.matters_until())
    }

    /// Returns the hold for a call to the store. Its rest is zero if the store knows of it.
    pub(super) fn held_for_store(&self, now: Instant) -> HoldState {
        // The ledger of a process on its own knows of no hold.
        self.hold
            .as_ref()
            .map(|hold| hold.hold.for_store(self.alone, now))
            .unwrap_or_default()
    }

    /// Returns how often holds of the key were released.
    pub(in crate::limiter) fn releases(&self) -> u32 {
        self.hold.as_ref().map_or(0, |hold| hold.hold.releases())
    }

    /// Takes in the hold that the store replied to a call sent at `sent`. The store's time lay
    /// within `bounds`.
    ///
    /// Returns whether the store decided before a release that this process knows of.
    pub(super) fn hold_answered(
        &mut self,
        held: HoldState,
        sent: Instant,
        bounds: (Instant, Instant),
    ) -> bool {
        if self.hold.is_none() && held.is_none() {
            return false;
        }
        let hold = self.hold.get_or_insert_with(|| KeyHold::new(sent));
        let precedes_release = hold.hold.answered(held, sent, bounds);
        if hold.hold.is_cut() {
            hold.set_uncertain(true);
        }
        precedes_release
    }

    /// Puts the key on hold, or releases it.
    pub(in crate::limiter) fn hold(
        &mut self,
        ctx: &mut KeyContext<'_>,
        held: HoldState,
        source: HoldSource,
    ) {
        let hold = self.hold.get_or_insert_with(|| KeyHold::new(ctx.now));
        if hold.hold.adopt(held, source, ctx.now) {
            if hold.hold.is_cut() {
                hold.set_uncertain(true);
            }
            self.hold_changed(ctx);
        }
    }

    /// Gives up permits that may no longer be used, after the hold has changed, and goes on with
    /// the others.
    pub(in crate::limiter) fn hold_changed(&mut self, ctx: &mut KeyContext<'_>) {
        self.refused = None;
        if let Some(hold) = &mut self.hold {
            ctx.work
                .wakers
                .add(std::mem::take(&mut hold.waiting).into_values());
        }
        self.obey(ctx.now, &mut ctx.work.wakers);
        let is_held = self.held(ctx.now).is_some();
        if let Some(queue) = &mut self.queue {
            // Slots after the hold are given up as well. So all waiters book again at its end, by
            // what is allowed then. But a bucket cannot take back a single slot between the slots
            // of other processes. So these slots stay.
            let is_paced = |limit: &Limit| matches!(limit, Limit::Bucket { .. });
            if !is_held || !ctx.spec.quota().limits().iter().any(is_paced) {
                queue.give_up_slots();
            }
            // After a release, the next call does not wait for the end of the hold.
            if !is_held {
                queue.end_delay();
            }
        }
        self.step(ctx, None);
        self.close(ctx);
    }

    /// Gives back permits at hand, and permits booked before the end of the hold.
    pub(super) fn obey(&mut self, now: Instant, wakers: &mut Wakers) {
        let Some(left) = self.held(now) else { return };
        // The next call returns them, and the session subtracts them then.
        let unused = self.prefetched.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.extend(unused);
        queue.withdraw(clock::after(now, left), now, wakers);
    }

    /// Asks the store to confirm the hold and the bookings, even if no request waits. A store that
    /// came back with an older state grants booked slots to other processes until it is asked.
    pub(in crate::limiter) fn confirm(&mut self, ctx: &mut KeyContext<'_>) {
        let is_at_stake = self.held(ctx.now).is_some() || self.is_booked();
        if self.later && is_at_stake {
            self.inquire(ctx);
        }
    }

    /// Returns whether slots are booked ahead.
    pub(in crate::limiter) fn is_booked(&self) -> bool {
        self.queue
            .as_ref()
            .is_some_and(|queue| queue.last_booked().is_some())
    }

    /// Notes that the store has lost its state, and the hold with it.
    pub(super) fn hold_forgotten(&mut self, now: Instant) {
        if let Some(hold) = &mut self.hold {
            hold.hold.store_lost_state(now);
            hold.resends = true;
        }
    }

    /// Sends the hold to a store that lost its state, before a process that does not know the hold
    /// calls it.
    pub(super) fn resend_hold(&mut self, ctx: &mut KeyContext<'_>) {
        if self
            .hold
            .as_mut()
            .is_some_and(|hold| std::mem::take(&mut hold.resends))
        {
            self.confirm(ctx);
        }
    }

    /// Notes that a hold, a release or a booking may have been missed.
    pub(in crate::limiter) fn doubt(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.hold.doubt();
        }
        if let Some(session) = &mut self.session {
            session.doubt();
        }
        self.refused = None;
    }

    /// Returns whether the key is on hold and a release may have been missed.
    pub(super) fn doubts_hold(&self, now: Instant) -> bool {
        self.hold
            .as_ref()
            .is_some_and(|hold| hold.hold.is_doubted(now))
    }

    /// Returns whether a request that is held asks the store for a release that may have been
    /// missed. Notes that it does: one request asks for all.
    pub(in crate::limiter) fn asks_for_release(&mut self, now: Instant) -> bool {
        self.hold
            .as_mut()
            .is_some_and(|hold| hold.hold.asks_for_release(now))
    }

    /// Takes in a refusal of a request that was sent at `sent`. Returns the hold that follows, if
    /// it is longer than the present one.
    pub(in crate::limiter) fn refused_upstream(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        sent: Instant,
        now: Instant,
    ) -> Option<NewHold> {
        let hold = self.hold.get_or_insert_with(|| KeyHold::new(now));
        let before = hold.hold.left(now);
        hold.set_uncertain(true);
        let HoldSpan { left, cut } =
            hold.refusals
                .refused(retry_after, max_hold, before, sent, now)?;
        let before = before.unwrap_or_default();
        let is_recent = hold
            .sent_at
            .is_some_and(|sent_at| clock::after(sent_at, SEND_AGAIN) > now);
        let is_sent = !is_recent || left > before.saturating_add(before / 10);
        if is_sent {
            hold.sent_at = Some(now);
        }
        let held = HoldState {
            remaining: left,
            releases: hold.hold.releases(),
            cut,
        };
        Some(NewHold { held, is_sent })
    }

    /// Takes in that the upstream accepted a request sent at `sent`. Returns whether that ends a
    /// probation. Then other requests may leave, and the store has to be notified.
    pub(in crate::limiter) fn accepted_upstream(&mut self, sent: Instant, now: Instant) -> bool {
        let Some(hold) = self
            .hold
            .as_mut()
            .filter(|hold| hold.hold.left(now).is_none())
        else {
            return false;
        };
        hold.refusals.accepted(sent);
        let is_released = hold.hold.accepted(sent);
        if !hold.hold.is_cut() && !hold.refusals.is_waiting() {
            hold.set_uncertain(false);
        }
        is_released
    }

    /// Returns how many tasks wait only for the end of the hold.
    pub(in crate::limiter) fn waiting_for_hold(&self) -> usize {
        self.hold.as_ref().map_or(0, |hold| hold.waiting.len())
    }

    /// Returns for how long no request may leave. The task is woken when that changes.
    pub(in crate::limiter) fn poll_hold(
        &mut self,
        number: Number,
        max_hold: Duration,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let left = self.blocked(max_hold, now)?;
        self.hold
            .as_mut()?
            .waiting
            .insert(number, cx.waker().clone());
        Some(left)
    }

    /// Returns for how long no request may leave, for a waiter that also waits for other things and
    /// becomes the probe only when it leaves. The task is woken when the key is put on hold or
    /// released.
    pub(in crate::limiter) fn watch_hold(
        &mut self,
        number: Number,
        max_hold: Duration,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let hold = self.hold.get_or_insert_with(|| KeyHold::new(now));
        hold.waiting.insert(number, cx.waker().clone());
        self.waits(max_hold, now)
    }

    /// Removes a task that waits for the end of the hold.
    pub(in crate::limiter) fn leave_hold(&mut self, number: Number) {
        if let Some(hold) = &mut self.hold {
            hold.waiting.remove(&number);
        }
    }
}
