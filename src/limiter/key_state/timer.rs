//! The timer of a key: when its state is visited next, even if no request comes, and what is done then.
//!
//! Seven things happen without a request: a batching delay ends, permits at hand expire, the store is sent what it does
//! not know, other parts are asked for slots, a round of statements goes on, the waiters behind a front that is not polled
//! go on, and during a hold the clocks show whether the machine has slept. Each part of the state knows its own moment, and
//! [`KeyState::timer`] is the first of them. At the end of a visit, if no task sleeps until that moment or an earlier one,
//! another task starts ([`KeyState::wants_visit`]). It makes one visit, which does all that is due
//! ([`KeyState::on_time`]), and ends. If a moment was put off meanwhile, there is nothing to do. So a permit that is
//! taken, or permits at hand that are replaced, change no task.
//!
//! A round of statements, or one that asks other parts for slots, may be lost with the runtime of its task. So while it is
//! under way, the key has a moment at which it counts as lost and begins again.
//!
//! The tasks of a store without a background run in the runtimes of callers. If such a runtime ends, the task that is
//! dropped notes it ([`KeyState::visit_lost`]), and the next visit starts another task. If no thread drives the runtime
//! any longer, a visit does itself what is late by [`ANSWER`] ([`KeyState::catch_up`]).

use std::time::Instant;

use super::KeyState;
use super::context::{KeyContext, Work};
use crate::clock;
use crate::tuning::ANSWER;

impl KeyState {
    /// Returns when the key has something to do, even if no request comes.
    #[inline]
    fn timer(&self, now: Instant) -> Option<Instant> {
        let moments = [
            self.gathers_until(),
            self.passes_on_at(),
            self.borrows_at(),
            self.states_at(),
            self.prefetched.sweeps_at(),
            self.wakes_at(now),
            self.goes_on_at(now),
        ];
        moments.into_iter().flatten().min()
    }

    /// Returns when the batching delay of the next call ends.
    fn gathers_until(&self) -> Option<Instant> {
        self.queue.as_ref()?.gathering.until()
    }

    fn goes_on_at(&self, now: Instant) -> Option<Instant> {
        self.queue.as_ref()?.goes_on_at(now)
    }

    /// Has the permits at hand given back when they expire, so that an idle process takes nothing from other processes,
    /// and a refusal of the store is not remembered beyond that. A request that asked a store in this process alone
    /// needs no task for it: the next call returns them.
    pub(in crate::limiter) fn sweep_later(&mut self) {
        self.prefetched.sweep();
    }

    /// Ends a visit that leaves `work`. Returns when another task has to visit the key, if one has to.
    pub(in crate::limiter) fn wants_visit(&mut self, work: &Work, now: Instant) -> Option<Instant> {
        let Some(at) = self.timer(now) else {
            self.pending.take_if(|pending| {
                let is_stated = !pending.remaining.is_empty() || pending.charges.is_some();
                !is_stated && pending.visits.is_empty()
            });
            return None;
        };
        // In a runtime that ends, another task would be dropped at once, and then the next, without end.
        if work.is_visit_lost {
            return None;
        }
        // Requests wait for a batching delay, so its task runs where one of them does. The runtime of an earlier task may
        // rest.
        if !work.begins_delay && !self.is_left_alone(Some(at)) {
            return None;
        }
        self.pending.get_or_insert_default().visits.push(at);
        Some(at)
    }

    /// Returns when to look whether the machine has slept, if requests wait for the end of a hold: no timer of theirs
    /// fires earlier because of that.
    fn wakes_at(&self, now: Instant) -> Option<Instant> {
        let left = self.hold.left(now)?;
        let is_awaited = self.hold.waiting() > 0 || self.waiting() > 0;
        is_awaited
            .then(|| clock::after(now, clock::look_again(left)))
            .filter(|at| *at < clock::after(now, left))
    }

    /// Begins a visit. If the machine has slept, the hold ends earlier. If the task that was to visit the key is so late
    /// that it counts as lost, does what it was to do.
    pub(in crate::limiter) fn catch_up(&mut self, ctx: &mut KeyContext<'_>) {
        if self.hold.wake(ctx.now) {
            self.hold_changed(ctx);
        }
        let Some(pending) = &mut self.pending else {
            // No task was to visit it.
            return;
        };
        let late = |at| clock::after(at, ANSWER) <= ctx.now;
        pending.visits.retain(|at| !late(*at));
        if self.timer(ctx.now).is_some_and(late) {
            self.on_time(ctx);
        }
    }

    /// Does what is due by now.
    pub(in crate::limiter) fn on_time(&mut self, ctx: &mut KeyContext<'_>) {
        let now = ctx.now;
        if let Some(pending) = &mut self.pending {
            // A task that is later than this one finds nothing to do.
            pending.visits.retain(|at| *at > now);
        }
        let is_due = |moment: Option<Instant>| moment.is_some_and(|at| at <= now);
        if is_due(self.gathers_until()) {
            self.gathered(ctx);
        } else if self.queue.as_ref().is_some_and(|queue| queue.goes_on(now)) {
            self.step(ctx, None);
        }
        if is_due(self.passes_on_at()) {
            self.pass_on_now(ctx);
        }
        if is_due(self.borrows_at()) {
            self.begin_to_borrow(ctx);
        }
        if is_due(self.states_at()) {
            self.want_statements(ctx);
        }
        if is_due(self.prefetched.sweeps_at()) {
            self.give_back_prefetched(ctx);
        }
    }

    /// Goes on without the task that was to visit the key at `at`: it was dropped with its runtime.
    pub(in crate::limiter) fn visit_lost(&mut self, ctx: &mut KeyContext<'_>, at: Instant) {
        ctx.work.is_visit_lost = true;
        if let Some(pending) = &mut self.pending
            && let Some(lost) = pending.visits.iter().position(|visit| *visit == at)
        {
            pending.visits.remove(lost);
        }
        let gathers_until = self.gathers_until();
        let moments = [
            gathers_until,
            self.states_at(),
            self.wakes_at(ctx.now),
            self.goes_on_at(ctx.now),
        ];
        if !self.is_left_alone(moments.into_iter().flatten().min()) {
            return;
        }
        self.hold.wake_all(&mut ctx.work.wakers);
        let is_blocked = self.hold.blocked_for(ctx.max_hold, ctx.now).is_some();
        let Some(queue) = &mut self.queue else { return };
        if gathers_until.is_some() && !is_blocked && !queue.is_paused(ctx.now) {
            self.gathered(ctx);
        } else {
            // The first waiter that is polled has another task started, in its own runtime.
            queue.wake_all(&mut ctx.work.wakers);
        }
    }

    /// Returns whether no task visits the key by `moment`.
    fn is_left_alone(&self, moment: Option<Instant>) -> bool {
        let visits = self.pending.iter().flat_map(|pending| &pending.visits);
        moment.is_some_and(|moment| visits.min().is_none_or(|visit| *visit > moment))
    }
}
