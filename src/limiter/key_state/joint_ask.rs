//! One call to the store for one key of a joint request.

use std::time::{Duration, Instant};

use super::KeyState;
use super::calls::{Ask, SentCall, TakenIn};
use super::context::KeyContext;
use super::store_view::slot;
use crate::error::StoreError;
use crate::limit::LimitSpec;
use crate::limiter::queue::Returns;
use crate::limiter::reservation::{NoSlot, Reservation};
use crate::store::{Demand, JointCall, Lease, Refusal, StoreReply};
use crate::wait_queue::WaitBound;

/// What a joint request asks of one of its keys.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct JointAsk {
    pub(in crate::limiter) cost: u32,
    /// When the request can leave at the earliest, by what its other keys allow.
    pub(in crate::limiter) earliest: Instant,
    pub(in crate::limiter) bound: WaitBound,
    /// The slot that the request had so far. It is given back with the call.
    pub(in crate::limiter) replaces: Option<Reservation>,
    /// How often the limits of the key had changed when it was asked.
    pub(in crate::limiter) changes: u32,
}

/// What became of a [`JointAsk`].
#[derive(Debug)]
pub(in crate::limiter) enum JointAnswer {
    Granted {
        slot: Reservation,
        /// How much later than in the store's time the slot may be used, because the clock of the
        /// store is not known exactly.
        uncertain: Duration,
        /// Whether the store decided about several keys in one step, and this one allows the
        /// request last.
        is_last: bool,
        /// How often the limits of the key had changed, of those that the store has granted it under.
        changes: u32,
    },
    /// The store decides nothing for this time, because it lost its state.
    Paused(Duration),
    /// The store is asked again. It did not decide about this key, because another one refused, or it decided while the key
    /// was on hold, which has been released since.
    Again,
    No(NoSlot),
}

impl JointAsk {
    /// Calls the store. If the store decides about several keys in one step, it puts the call to
    /// `joint` instead of sending it.
    ///
    /// # Errors
    ///
    /// The outcome, if it is known without a call.
    pub(in crate::limiter) fn send(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        joint: &JointCall,
    ) -> Result<(SentCall, StoreReply<Lease>), JointAnswer> {
        let &JointAsk { cost, bound, .. } = self;
        let now = ctx.now;
        let mut returns = Returns::new();
        returns.extend(self.replaces.map(|slot| slot.unused()));
        let known = match state.hold.left(now) {
            Some(left) if bound.is_too_long(left, now) => {
                // One such request asks the store for a release.
                (!state.hold.take_inquiry(now)).then_some(Refusal::for_span(left))
            }
            _ => state.store.repeated_refusal(cost, bound, now),
        };
        if let Some(refusal) = known {
            state.give_back_now(ctx, &returns);
            return Err(JointAnswer::No(NoSlot::TooLate(refusal)));
        }
        let held = state.hold.left(now).unwrap_or_default();
        let earliest = self.earliest.saturating_duration_since(now).max(held);
        let demands = [Demand::new(cost, 1).earliest(earliest)];
        let is_clear = state.hold.is_clear(ctx.max_hold, now);
        let prefetches = earliest.is_zero() && is_clear && !ctx.settles;
        let ask = Ask::slots(&demands, bound.latest, returns).prefetching(prefetches);
        Ok(state.call(ctx, ask.joint(joint)))
    }

    pub(in crate::limiter) fn answered(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        answer: Result<Lease, StoreError>,
    ) -> JointAnswer {
        let is_unchanged = state.limits.changes() == self.changes;
        let outcome = match state.take_in(ctx, call, answer) {
            Ok(taken_in) => self.granted(state, ctx, &taken_in, is_unchanged),
            Err(error) => JointAnswer::No(NoSlot::Failed(error)),
        };
        go_on(state, ctx);
        outcome
    }

    fn granted(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        taken_in: &TakenIn,
        is_unchanged: bool,
    ) -> JointAnswer {
        let &TakenIn {
            ref lease,
            bounds,
            precedes_release,
        } = taken_in;
        if let Some(wait) = lease.recovering {
            return match wait.is_zero() {
                true => JointAnswer::Again,
                false => JointAnswer::Paused(wait),
            };
        }
        let held = state.hold.left(ctx.now);
        match (lease.grants.first(), held) {
            (Some(grant), _) if precedes_release => {
                let slot = slot(lease, grant, bounds);
                state.give_back_now(ctx, &[slot.unused()]);
                JointAnswer::Again
            }
            (None, _) if precedes_release => JointAnswer::Again,
            (Some(grant), _) => {
                state
                    .store
                    .note_refusal(None, lease, ctx.fails_open, ctx.now);
                let died = self.replaces.is_some_and(|slot| slot.until <= ctx.now);
                state.store.raise_life(ctx.spec, bounds, died);
                let slot = slot(lease, grant, bounds);
                if slot.at > self.earliest.max(ctx.now) {
                    state.store.note_joint(slot.at);
                }
                JointAnswer::Granted {
                    slot,
                    uncertain: bounds.span(),
                    is_last: lease.is_last,
                    // The answer itself may state a quota that was set: the slot is under that one.
                    changes: if is_unchanged {
                        state.limits.changes()
                    } else {
                        self.changes
                    },
                }
            }
            (None, Some(left)) => JointAnswer::No(NoSlot::for_span(left)),
            (None, None) => {
                // If units may come back, the store is asked again soon.
                if !ctx.settles {
                    let cost = Some(self.cost);
                    state
                        .store
                        .note_refusal(cost, lease, ctx.fails_open, ctx.now);
                }
                JointAnswer::No(NoSlot::TooLate(lease.refused.unwrap_or(Refusal::NEVER)))
            }
        }
    }
}

/// Calls the store to confirm what it has granted.
pub(in crate::limiter) fn ask_to_confirm(
    state: &mut KeyState,
    ctx: &mut KeyContext<'_>,
) -> (SentCall, StoreReply<Lease>) {
    state.call(ctx, Ask::nothing(Returns::new(), ctx.now))
}

/// Takes in the answer to a call that has asked for nothing.
pub(in crate::limiter) fn confirmed(
    state: &mut KeyState,
    ctx: &mut KeyContext<'_>,
    call: SentCall,
    answer: Result<Lease, StoreError>,
) {
    // Whoever has asked looks at what the state knows then.
    let _ = state.take_in(ctx, call, answer);
    go_on(state, ctx);
}

/// Goes on after an answer, with the requests that wait for this key alone.
pub(super) fn go_on(state: &mut KeyState, ctx: &mut KeyContext<'_>) {
    state.after_answer(ctx);
    state.step(ctx, None);
}

/// Takes in whether a slot of a joint request was used. If it expired before the request left, the
/// next slots are valid for longer.
pub(in crate::limiter) fn ended(state: &mut KeyState, ctx: &KeyContext<'_>, is_used: bool) {
    if is_used {
        state.store.shorten_life(ctx.spec);
    } else {
        state.store.lengthen_life(ctx.spec);
    }
}

impl KeyState {
    /// Returns whether a slot of a joint request may be used: the store is known to have it, and it was
    /// booked under the limits that the key has now, after `changes` of them.
    pub(in crate::limiter) fn has_confirmed(
        &self,
        spec: &LimitSpec,
        slot: &Reservation,
        changes: u32,
        now: Instant,
    ) -> bool {
        let is_known = self.store.is_trusted(spec, now) && self.store.knows(slot);
        is_known && self.limits.changes() == changes
    }
}
