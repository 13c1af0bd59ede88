//! What a key does with a request that enters now. Looks at the state and changes nothing:
//! [`Ticket::enter`](super::Ticket::enter) decides by the same rules, and then acts.

use std::time::Duration;

use super::KeyState;
use super::context::KeyContext;
use super::key_hold::HoldOrigin;
use super::stated_limits::StatedLimit;
use crate::error::Reason;
use crate::limiter::quotas::QuotaId;
use crate::limiter::reservation::NoSlot;
use crate::store::Demand;
use crate::wait_queue::WaitBound;

/// What a key would do with a request that enters now, before the store is asked.
#[derive(Default)]
pub(in crate::limiter) struct Outlook {
    /// Whether the request would take a permit at hand.
    pub(in crate::limiter) has_permit: bool,
    pub(in crate::limiter) at_hand: u32,
    /// The units that a call for the request would give back.
    pub(in crate::limiter) returning: u64,
    /// How long the key stays on hold.
    pub(in crate::limiter) held: Option<Duration>,
    /// How a request is refused during the hold. `None` if the key has no state.
    pub(in crate::limiter) hold_reason: Option<Reason>,
    /// How many kinds of requests the upstream refuses alone.
    pub(in crate::limiter) kinds: usize,
    /// Why the key is on hold.
    pub(in crate::limiter) origin: Option<HoldOrigin>,
    /// For how long no request may leave, because of the hold or a probe.
    pub(in crate::limiter) blocked: Option<Duration>,
    /// The refusal that the request would get without a call to the store.
    pub(in crate::limiter) refused: Option<NoSlot>,
    /// How many requests wait for a slot.
    pub(in crate::limiter) waiting: usize,
    /// The permits that requests without a slot would get before the request.
    pub(in crate::limiter) ahead: Vec<Demand>,
    /// How long at least the request waits for a slot: while the store is not called, and until the last slot of the
    /// requests of the same cost, which get the first slots.
    pub(in crate::limiter) least_wait: Duration,
    /// How long its permit would be valid.
    pub(in crate::limiter) validity: Duration,
    /// The limits that the upstream has stated.
    pub(in crate::limiter) learned: Vec<StatedLimit>,
    /// The quota that requests have stated.
    pub(in crate::limiter) stated: Option<QuotaId>,
}

/// The most permits of other requests that the question to the store has.
const MOST_AHEAD: usize = 1000;

impl KeyState {
    /// Returns whether a request calls the store for itself alone: no other waits, and the store
    /// answers at once.
    pub(super) fn asks_alone(&self, ctx: &KeyContext<'_>) -> bool {
        self.queue.is_none()
            && !self.store.answers_later
            && !ctx.settles
            && self.hold.is_clear(ctx.max_hold, ctx.now)
    }

    /// Returns the refusal of a request for which no permit is at hand, and that no hold refuses, if what this process
    /// knows is enough. One that `is_back` has its place in the queue.
    pub(super) fn refusal_without_call(
        &self,
        cost: u32,
        bound: WaitBound,
        is_back: bool,
        ctx: &KeyContext<'_>,
    ) -> Option<NoSlot> {
        if let Some(refusal) = self.store.repeated_refusal(cost, bound, ctx.now)
            && !self.may_borrow(ctx)
            && !self.has_spare(cost)
        {
            return Some(NoSlot::TooLate(refusal));
        }
        if !is_back && self.queued() >= ctx.max_queue {
            return Some(NoSlot::queue_full(ctx.max_queue));
        }
        if let Some(no_slot) = self.stopped_by_probe(bound, ctx) {
            return Some(no_slot);
        }
        let queue = self.queue.as_ref();
        let paused = queue.and_then(|queue| queue.paused_for(ctx.now));
        let wait = self
            .undivided_beyond(ctx, bound.latest)
            .or_else(|| paused.filter(|left| bound.is_too_long(*left, ctx.now)));
        wait.map(NoSlot::for_span)
    }

    /// Refuses a request that can wait no longer for the response to a probe, which may arrive at any time.
    pub(super) fn stopped_by_probe(
        &self,
        bound: WaitBound,
        ctx: &KeyContext<'_>,
    ) -> Option<NoSlot> {
        let is_held = self.hold.left(ctx.now).is_some();
        if is_held || bound.patience_ends(ctx.now).is_some() {
            return None;
        }
        let left = self.hold.would_block_for(ctx.max_hold, ctx.now)?;
        Some(NoSlot::for_span(left))
    }

    /// Returns what the key would do with a request of `cost` units.
    pub(in crate::limiter) fn outlook(
        &self,
        cost: u32,
        bound: WaitBound,
        ctx: &KeyContext<'_>,
    ) -> Outlook {
        let now = ctx.now;
        let waiting = self.waiting();
        let at_hand = self.at_hand(now);
        let queue = self.queue.as_deref();
        let ahead = queue
            .map(|queue| queue.needs(MOST_AHEAD))
            .unwrap_or_default();
        let mut wanted = u64::from(cost);
        for demand in &ahead {
            wanted += u64::from(demand.cost) * u64::from(demand.count);
        }
        let is_clear = self.hold.is_clear(ctx.max_hold, now);
        let refused = self.refusal_without_call(cost, bound, false, ctx);
        let returns = queue.map_or(0, |queue| {
            queue.returns.own.iter().map(|unused| unused.units).sum()
        });
        let pause = queue.and_then(|queue| queue.paused_for(now));
        let last_slot = queue.filter(|_| waiting > 0);
        let last_slot = last_slot.and_then(|queue| queue.last_slot(cost));
        let last_slot = last_slot.map(|slot| slot.saturating_duration_since(now));
        Outlook {
            has_permit: u64::from(at_hand) >= wanted
                && (waiting == 0 || is_clear && refused.is_none()),
            at_hand,
            returning: self.prefetched.to_return() + returns,
            held: self.hold.left(now),
            hold_reason: Some(self.hold.reason(now)),
            kinds: self.hold.kinds().len(),
            origin: self.hold.origin(),
            blocked: self.hold.would_block_for(ctx.max_hold, now),
            refused,
            waiting,
            ahead: ahead.to_vec(),
            least_wait: pause.max(last_slot).unwrap_or_default(),
            validity: self.store.life(),
            learned: self.limits.learned(now),
            stated: self.limits.quota_id(),
        }
    }
}
