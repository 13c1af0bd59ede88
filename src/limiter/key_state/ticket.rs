//! The place of a request in the queue of its key: it enters, waits, collects its permit, and
//! leaves.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::KeyState;
use super::calls::{Ask, SentCall, TakenIn};
use super::context::KeyContext;
use super::store_view::slot;
use crate::clock;
use crate::error::StoreError;
use crate::limiter::queue::{Number, Queue, Returns};
use crate::limiter::reservation::{NoSlot, Reservation};
use crate::limiter::session::TimeBounds;
use crate::store::{Demand, Lease, Refusal, StoreReply};
use crate::tuning::ANSWER;
use crate::wait_queue::WaitBound;

/// The place of a request in the queue of its key.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct Ticket {
    pub(in crate::limiter) number: Number,
    pub(in crate::limiter) cost: u32,
    pub(in crate::limiter) bound: WaitBound,
}

impl Ticket {
    pub(in crate::limiter) fn new(number: Number, cost: u32, bound: WaitBound) -> Self {
        Ticket {
            number,
            cost,
            bound,
        }
    }

    /// Enters the request. Returns `None` if it waits. One that `is_back` has its place in the queue, although it has
    /// waited for something else meanwhile.
    ///
    /// The cheapest step comes first. The steps are: a permit at hand, a refusal that needs no
    /// call, a call for this request alone, and a place in the queue.
    pub(in crate::limiter) fn enter(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        is_back: bool,
    ) -> Option<Result<Reservation, NoSlot>> {
        if let Some(slot) = state.take(self.cost, ctx.now) {
            return Some(Ok(slot));
        }
        let held = state.hold.left(ctx.now);
        // One request that is held for too long asks the store for a release, and waits for the answer.
        let held_too_long = held.filter(|left| self.bound.is_too_long(*left, ctx.now));
        let inquires = held_too_long.is_some() && state.hold.take_inquiry(ctx.now);
        if let Some(left) = held_too_long
            && !inquires
        {
            return Some(Err(NoSlot::for_span(left)));
        }
        if let Some(no_slot) = state.refusal_without_call(self.cost, self.bound, is_back, ctx) {
            if inquires {
                state.inquire(ctx);
            }
            return Some(Err(no_slot));
        }
        if state.asks_alone(ctx) && state.are_parts_stated(ctx, ctx.now) {
            return self.enter_alone(state, ctx);
        }
        self.wait(state.queue.get_or_insert_default(), ctx.now, held);
        if inquires {
            state.inquire(ctx);
        }
        self.step(state, ctx)
    }

    /// Brings the key up to date for the request, which is in the queue. Returns how its wait has ended, if it has.
    fn step(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
    ) -> Option<Result<Reservation, NoSlot>> {
        state.step(ctx, Some((self.number, self.cost)));
        match self.collect(state, ctx.now)? {
            Err(NoSlot::Failed(cause)) => self.store_failed(state, ctx, cause),
            ended => Some(ended),
        }
    }

    /// Enters the request while no other request waits. Calls the store for this request alone, and
    /// for permits to prefetch. The store has answered all earlier calls of this key at once.
    fn enter_alone(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
    ) -> Option<Result<Reservation, NoSlot>> {
        let demands = [Demand::new(self.cost, 1)];
        let ask = Ask::slots(&demands, self.bound.latest, Returns::new()).prefetching(true);
        match state.call(ctx, ask) {
            (call, StoreReply::Ready(answer)) => self.answered_alone(state, ctx, call, answer),
            (call, StoreReply::Pending(answer)) => {
                self.wait(state.queue.get_or_insert_default(), ctx.now, None);
                state.call_under_way(ctx, &demands, call, answer);
                None
            }
        }
    }

    /// Takes in the answer for a request that entered alone. It waits if its slot lies ahead.
    fn answered_alone(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        answer: Result<Lease, StoreError>,
    ) -> Option<Result<Reservation, NoSlot>> {
        let taken_in = state.take_in(ctx, call, answer);
        state.after_answer(ctx);
        let lease = match taken_in {
            Ok(TakenIn { lease, .. }) => lease,
            Err(error) => return self.store_failed(state, ctx, error),
        };
        let Some(grant) = lease.grants.first() else {
            if lease.refused.is_some() && state.may_borrow(ctx) {
                // In the queue it asks the other parts.
                self.wait(state.queue.get_or_insert_default(), ctx.now, None);
                return self.step(state, ctx);
            }
            let recovering = lease.recovering.map(Refusal::for_span);
            let refusal = lease.refused.or(recovering).unwrap_or(Refusal::NEVER);
            return Some(Err(NoSlot::TooLate(refusal)));
        };
        let slot = slot(&lease, grant, TimeBounds::new(ctx.now, clock::now()));
        if grant.wait.is_zero() {
            return Some(Ok(slot));
        }
        let queue = state.queue.get_or_insert_default();
        self.wait(queue, ctx.now, None);
        queue.answered([slot], None, Duration::ZERO, ctx.now, &mut ctx.work.wakers);
        state.borrow_later(ctx);
        None
    }

    /// Polls the wait. Ready with its outcome. The permit may have expired: then the request
    /// [comes back](Ticket::come_back).
    pub(in crate::limiter) fn poll(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Reservation, NoSlot>> {
        if let Some(settled) = self.collect_usable(state, ctx) {
            // There is room for another permit on its way.
            if state
                .queue
                .as_ref()
                .is_some_and(|queue| queue.is_due(ctx.now))
            {
                state.step(ctx, None);
            }
            return Poll::Ready(settled);
        }
        state.step(ctx, Some((self.number, self.cost)));
        if let Some(settled) = self.collect_usable(state, ctx) {
            return Poll::Ready(settled);
        }
        let stopped = state.stopped_by_probe(self.bound, ctx);
        // The state of the key was dropped, and there was no room to make it anew for a second
        // wait.
        let Some(queue) = state
            .queue
            .as_mut()
            .filter(|queue| queue.is_waiting(self.number, self.cost))
        else {
            return Poll::Ready(Err(NoSlot::NEVER));
        };
        if stopped.is_some() || queue.is_over(self.number, self.cost, ctx.now) {
            let no_slot = match stopped.unwrap_or_else(|| self.waited_too_long(queue, ctx.now)) {
                NoSlot::Failed(cause) if ctx.fails_open => {
                    match state.hold.pass(ctx.max_hold, ctx.now) {
                        Ok(probe) => NoSlot::Uncounted(cause, probe),
                        Err(left) => NoSlot::for_span(left),
                    }
                }
                no_slot => no_slot,
            };
            self.leave(state, ctx);
            return Poll::Ready(Err(no_slot));
        }
        queue.register(self.number, self.cost, ctx.now, cx);
        Poll::Pending
    }

    /// Takes the outcome of the wait, if it has ended.
    fn collect(&self, state: &mut KeyState, now: Instant) -> Option<Result<Reservation, NoSlot>> {
        state.queue.as_mut()?.collect(self.number, self.cost, now)
    }

    /// Takes the outcome of the wait, if it has ended and the request can use it.
    ///
    /// If the key was put on hold meanwhile, the request may not leave. It waits again, in its old place.
    fn collect_usable(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
    ) -> Option<Result<Reservation, NoSlot>> {
        let settled = self.collect(state, ctx.now)?;
        let held = state.hold.left(ctx.now);
        match (settled, held) {
            (Ok(slot), Some(left)) => {
                state.probe_comes_back(ctx, slot.probe);
                state.queue.get_or_insert_default().returns.add(&slot);
                self.wait_for_hold(state, ctx.now, left).map(Err)
            }
            (Ok(slot), None) => {
                if slot.until > ctx.now {
                    state.store.shorten_life(ctx.spec);
                }
                Some(Ok(slot))
            }
            (Err(NoSlot::Failed(cause)), _) => self.store_failed(state, ctx, cause),
            (settled, _) => Some(settled),
        }
    }

    /// Puts the request in its place in the queue. If the key is on hold for `held`, the store is
    /// called when the hold ends.
    fn wait(&self, queue: &mut Queue, now: Instant, held: Option<Duration>) {
        queue.wait(self.number, self.cost, self.bound, now, held);
    }

    /// Returns the request to its old place until no hold or probe stops it, after `left`. Refuses it if a hold
    /// lasts longer than it can wait. The response to a probe may arrive at any time.
    fn wait_for_hold(&self, state: &mut KeyState, now: Instant, left: Duration) -> Option<NoSlot> {
        let is_held = state.hold.left(now).is_some();
        if is_held && self.bound.is_too_long(left, now) {
            return Some(NoSlot::for_span(left));
        }
        self.wait(state.queue.get_or_insert_default(), now, Some(left));
        None
    }

    /// Decides what becomes of the request after the store has failed. If requests pass uncounted, none does so
    /// while the key is on hold, or while a probe is on its way: it waits, in its old place.
    fn store_failed(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        cause: StoreError,
    ) -> Option<Result<Reservation, NoSlot>> {
        if !ctx.fails_open || matches!(cause, StoreError::Full { .. }) {
            return Some(Err(NoSlot::Failed(cause)));
        }
        match state.hold.pass(ctx.max_hold, ctx.now) {
            Ok(probe) => Some(Err(NoSlot::Uncounted(cause, probe))),
            Err(left) => {
                let refused = self.wait_for_hold(state, ctx.now, left);
                if refused.is_none() {
                    state.step(ctx, Some((self.number, self.cost)));
                }
                refused.map(Err)
            }
        }
    }

    /// Returns a request that could not leave with its permit to its old place.
    pub(in crate::limiter) fn come_back(
        &self,
        state: &mut KeyState,
        ctx: &mut KeyContext<'_>,
        slot: Option<Reservation>,
    ) {
        let held = state.hold.left(ctx.now);
        self.wait(state.queue.get_or_insert_default(), ctx.now, held);
        if let Some(slot) = slot {
            if slot.until <= ctx.now {
                state.store.lengthen_life(ctx.spec);
            }
            Self::give_up(state, ctx, slot);
        }
        state.step(ctx, Some((self.number, self.cost)));
    }

    /// Gives up a permit: it goes to the first waiter, or back to the store if no request can use it.
    fn give_up(state: &mut KeyState, ctx: &mut KeyContext<'_>, slot: Reservation) {
        let is_held = state.hold.left(ctx.now).is_some();
        let queue = state.queue.get_or_insert_default();
        if is_held || slot.until <= ctx.now {
            queue.returns.add(&slot);
            queue.missed(1, ctx.now);
            if queue.waiting() > 1 {
                // If one came too late, others do, too. One call books for all of them.
                state.go_on_later(ctx);
            }
        } else {
            queue.add(slot);
        }
        state.probe_comes_back(ctx, slot.probe);
    }

    /// Removes the request from the queue. Its permit goes to the next waiter, else back to the
    /// store.
    pub(in crate::limiter) fn leave(&self, state: &mut KeyState, ctx: &mut KeyContext<'_>) {
        let Some(queue) = &mut state.queue else {
            return;
        };
        if let Some(Ok(slot)) = queue.leave(self.number, self.cost) {
            Self::give_up(state, ctx, slot);
        }
        state.step(ctx, None);
    }

    /// Returns the outcome for a request that can wait no longer.
    fn waited_too_long(&self, queue: &Queue, now: Instant) -> NoSlot {
        // A call that was sent just now says nothing of the store. One that got lost was sent soon after the request came,
        // which has waited for `ANSWER` since.
        let unanswered = queue.unanswered_for(now);
        if !self.bound.is_by_deadline()
            && let Some(waited) = unanswered.filter(|waited| *waited >= ANSWER / 2)
        {
            // The store may have booked a slot without this process knowing.
            return NoSlot::Failed(StoreError::NoAnswer { waited });
        }
        let wait = queue
            .last_slot(self.cost)
            .map(|slot| slot.saturating_duration_since(now));
        NoSlot::TooLate(Refusal { wait, limit: None })
    }
}
