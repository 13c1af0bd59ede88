//! The wait of a request in the queue of its key: its polls, its permit, and its leave.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::context::KeyContext;
use super::{KeyState, refused_for};
use crate::clock;
use crate::error::StoreError;
use crate::limiter::queue::{Number, Queue};
use crate::limiter::reservation::{Reservation, Settled, WaitBound};
use crate::store::Refusal;

/// The place of a waiter in the queue of its key.
#[derive(Debug)]
pub(in crate::limiter) struct Ticket {
    pub(in crate::limiter) number: Number,
    pub(in crate::limiter) cost: u32,
    pub(in crate::limiter) bound: WaitBound,
    /// How often the waiter's turn has come, this time included. It waits again if it could not
    /// leave in time.
    pub(in crate::limiter) turns: u32,
}

impl KeyState {
    /// Polls a waiter. Ready with the way in which its wait ended.
    pub(in crate::limiter) fn poll(
        &mut self,
        ctx: &mut KeyContext<'_>,
        waiter: &mut Ticket,
        cx: &mut Context<'_>,
    ) -> Poll<Settled> {
        if let Some(settled) = self.collect_alive(ctx, waiter) {
            self.close(ctx);
            return Poll::Ready(settled);
        }
        self.step(ctx, Some(waiter.number));
        if let Some(settled) = self.collect_alive(ctx, waiter) {
            self.close(ctx);
            return Poll::Ready(settled);
        }
        // The state of the key was dropped, and there was no room to make it anew for a second
        // wait.
        let Some(queue) = self
            .queue
            .as_mut()
            .filter(|queue| queue.is_waiting(waiter.number, waiter.cost))
        else {
            return Poll::Ready(Settled::Refused(Refusal::NEVER));
        };
        if queue.is_over(waiter.number, waiter.cost, ctx.now) {
            let settled = waited_too_long(queue, waiter, ctx.now);
            self.leave(ctx, waiter);
            return Poll::Ready(settled);
        }
        queue.register(waiter.number, waiter.cost, ctx.now, cx);
        Poll::Pending
    }

    /// Returns how the wait ended.
    ///
    /// If its permit expired before it was polled, or if the key was put on hold meanwhile, a
    /// waiter may not leave. It waits again, in its old place.
    fn collect_alive(&mut self, ctx: &KeyContext<'_>, waiter: &mut Ticket) -> Option<Settled> {
        let settled = self.collect(waiter.number, waiter.cost)?;
        let held = self.hold.left(ctx.now);
        match (settled, held) {
            (Settled::Granted(slot), Some(left)) => {
                self.probe_comes_back();
                self.queue
                    .get_or_insert_default()
                    .returns
                    .push(slot.unused());
                self.wait_for_hold(ctx, waiter, left)
            }
            (Settled::Granted(slot), None) if slot.until <= ctx.now => {
                self.wait_again(ctx, waiter, slot);
                None
            }
            (Settled::Granted(slot), None) => {
                self.store.shorten_life(ctx.spec);
                Some(Settled::Granted(slot))
            }
            // No request passes uncounted while the key is on hold.
            (Settled::Failed(_), Some(left)) if ctx.fails_open => {
                self.wait_for_hold(ctx, waiter, left)
            }
            (settled, _) => Some(settled),
        }
    }

    /// Returns a waiter to its old place until the hold ends after `left`, or refuses it if it
    /// cannot wait that long.
    fn wait_for_hold(
        &mut self,
        ctx: &KeyContext<'_>,
        waiter: &Ticket,
        left: Duration,
    ) -> Option<Settled> {
        let Ticket {
            number,
            cost,
            bound,
            ..
        } = *waiter;
        if clock::after(ctx.now, left) > bound.latest {
            return Some(refused_for(left));
        }
        self.queue
            .get_or_insert_default()
            .wait(number, cost, bound, ctx.now, Some(left));
        None
    }

    /// Returns a waiter whose permit `died` to its old place.
    fn wait_again(&mut self, ctx: &KeyContext<'_>, waiter: &mut Ticket, died: Reservation) {
        waiter.turns += 1;
        if waiter.turns == 2 && waiter.bound.is_none {
            // It cannot wait at all. It was late because its machine stood still, so it asks once
            // more for a free permit.
            waiter.bound.latest = waiter.bound.latest.max(ctx.now);
        }
        self.store.lengthen_life(ctx.spec);
        self.probe_comes_back();
        let held = self.hold.left(ctx.now);
        let queue = self.queue.get_or_insert_default();
        queue.returns.push(died.unused());
        queue.wait(waiter.number, waiter.cost, waiter.bound, ctx.now, held);
    }

    /// Returns a waiter that could not use its permit in time to its old place. Its permit is given
    /// back.
    pub(in crate::limiter) fn return_late(
        &mut self,
        ctx: &mut KeyContext<'_>,
        waiter: &mut Ticket,
        died: Reservation,
    ) {
        self.wait_again(ctx, waiter, died);
        self.step(ctx, Some(waiter.number));
    }

    /// Takes how the wait of `number` ended, if it has.
    pub(super) fn collect(&mut self, number: Number, cost: u32) -> Option<Settled> {
        self.queue.as_mut()?.collect(number, cost)
    }

    /// Removes a waiter from the queue. Its permit goes to the next waiter, else back to the store.
    pub(in crate::limiter) fn leave(&mut self, ctx: &mut KeyContext<'_>, waiter: &Ticket) {
        let held = self.hold.left(ctx.now).is_some();
        let Some(queue) = &mut self.queue else { return };
        if let Some(Settled::Granted(slot)) = queue.leave(waiter.number, waiter.cost) {
            if held {
                queue.returns.push(slot.unused());
            } else {
                queue.add(slot);
            }
            self.probe_comes_back();
        }
        self.step(ctx, None);
        self.close(ctx);
    }
}

/// Returns the outcome for a waiter that can wait no longer.
fn waited_too_long(queue: &Queue, waiter: &Ticket, now: Instant) -> Settled {
    if !waiter.bound.by_deadline
        && let Some(waited) = queue.unanswered_for(now)
    {
        // The store may have booked a slot without this process knowing.
        return Settled::Failed(StoreError::NoAnswer { waited });
    }
    let wait = queue
        .last_slot(waiter.cost)
        .map(|slot| slot.saturating_duration_since(now));
    Settled::Refused(Refusal { wait, limit: None })
}
