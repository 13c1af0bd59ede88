//! The state of one key in this process: the permits at hand, and the queue of waiters.
//!
//! One store call at a time books for all waiters. If no request waits, a key in heavy use prefetches a few permits, so that
//! the next requests need no store call. Their number follows from how fast they are used.

mod answer;
mod booking;
mod context;
mod hold;
mod key_hold;
mod leftover;
mod probation;
#[cfg(test)]
mod properties;
mod refusal;
mod refused;
mod remaining;
mod stated;
mod wait;

use std::time::{Duration, Instant};

use super::prefetched::Prefetched;
use super::queue::{Number, Queue};
use super::reservation::{Reservation, Settled, WaitBound};
use super::session::KeySession;
use crate::clock;
use crate::key_map::Evict;
use crate::store::{Demand, Refusal, StoreReply};

use answer::slot;
pub(super) use context::{Call, Effect, KeyContext, Work};
pub(super) use hold::HoldSource;
use key_hold::KeyHold;
pub(super) use key_hold::NewHold;
use probation::Passage;
pub(super) use probation::is_any_uncertain;
use refused::Refused;
use remaining::RemainingTracker;
pub(super) use remaining::is_of_use;
use stated::StatedLimits;
pub use stated::{HeaderTrust, StatedLimit};
pub(super) use wait::Ticket;

pub(super) struct KeyState {
    prefetched: Prefetched,
    /// Present only while requests wait.
    queue: Option<Box<Queue>>,
    life: Duration,
    /// Whether the store takes a trip to answer.
    later: bool,
    /// When permits at hand that were left over are next given back.
    sweep_at: Option<Instant>,
    /// The session with a store that has a server, which may lose its state.
    session: Option<Box<KeySession>>,
    /// Whether this process granted the booked permits itself, because the store is unreachable.
    alone: bool,
    hold: Option<Box<KeyHold>>,
    /// What the upstream stated about the rest of each limit.
    remaining: Option<Box<RemainingTracker>>,
    /// What the upstream has stated of its limits.
    stated: Option<Box<StatedLimits>>,
    /// Whether other clients use a limit of the key as well, by the store's last answer.
    shared: bool,
    /// Units that could still be sent, by the store's last answer.
    free: u64,
    /// Whether a call is under way that may grant more than the upstream states is left.
    tightens: bool,
    /// What the store refused last, if it takes a trip to answer.
    refused: Option<Box<Refused>>,
}

impl Evict for KeyState {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        let hold = self.hold_matters_until();
        self.queue.is_none().then(|| self.prefetched.until().max(hold.unwrap_or(self.prefetched.until())))
    }

    fn worthless_from(&self) -> Option<Instant> {
        let remembered = self.session.as_ref().map(|session| session.until());
        let learned = self.learned_until();
        let last =
            |idle: Instant| idle.max(self.prefetched.soon()).max(remembered.max(learned).unwrap_or(idle));
        self.idle_from().map(last)
    }
}

impl KeyState {
    /// Makes the state of a key without waiters. `life` is how long its permits live at first.
    pub(super) fn new(life: Duration, now: Instant) -> Self {
        KeyState {
            prefetched: Prefetched::new(now),
            queue: None,
            life,
            later: false,
            sweep_at: None,
            session: None,
            alone: false,
            hold: None,
            remaining: None,
            stated: None,
            shared: false,
            free: 0,
            tightens: false,
            refused: None,
        }
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Units at hand.
    pub(super) fn at_hand(&self, now: Instant) -> u32 {
        self.prefetched.units(now)
    }

    /// Takes a permit at hand, if no request waits for one.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Reservation> {
        if self.waiting() > 0 { None } else { self.prefetched.take(cost, now) }
    }

    /// The same, for a request that leaves at once.
    #[inline]
    pub(super) fn spend(&mut self, cost: u32, now: Instant) -> bool {
        self.waiting() == 0 && self.prefetched.spend(cost, now)
    }

    /// Enters a request. Returns `None` if it waits, under `number`.
    pub(super) fn enter(
        &mut self,
        ctx: &mut KeyContext<'_>,
        cost: u32,
        bound: WaitBound,
        number: Number,
    ) -> Option<Settled> {
        if let Some(slot) = self.take(cost, ctx.now) {
            return Some(Settled::Granted(slot));
        }
        let held = self.held(ctx.now);
        let too_long = held.filter(|left| clock::after(ctx.now, *left) > bound.latest);
        if let Some(left) = too_long
            && !self.asks_for_release(ctx.now)
        {
            return Some(Settled::Refused(Refusal { wait: Some(left), limit: None }));
        }
        let refused = self.refused.as_ref();
        if let Some(refusal) = refused.and_then(|refused| refused.of(cost, bound, ctx.now)) {
            return Some(Settled::Refused(refusal));
        }
        let is_open = held.is_none() && self.passage(ctx.max_hold, ctx.now) == Passage::Open;
        if self.queue.is_none() && !self.later && is_open {
            return self.enter_empty(ctx, cost, bound, number);
        }
        let queue = self.queue.get_or_insert_default();
        if queue.waiting() >= ctx.max_queue {
            return Some(Settled::QueueFull);
        }
        if let Some(wait) = queue.paused_beyond(bound, ctx.now) {
            return Some(Settled::Refused(Refusal { wait: Some(wait), limit: None }));
        }
        queue.wait(number, cost, bound, ctx.now, held);
        if too_long.is_some() {
            self.inquire(ctx);
        }
        self.step(ctx, Some(number));
        let settled = self.collect(number, cost);
        self.close(ctx);
        settled
    }

    /// Enters a request while no other request waits. A store that answers at once is asked for this request alone, and
    /// for permits to prefetch.
    fn enter_empty(
        &mut self,
        ctx: &mut KeyContext<'_>,
        cost: u32,
        bound: WaitBound,
        number: Number,
    ) -> Option<Settled> {
        let prefetch = self.prefetched.order(ctx.spec, self.prefetch_life(ctx), ctx.now);
        let left = self.prefetched.clear();
        let demand = Demand { cost, count: 1 };
        let request =
            self.request(ctx, std::slice::from_ref(&demand), prefetch, bound.latest, left.as_slice());
        match ctx.store.lease(request) {
            StoreReply::Ready(Err(error)) => Some(Settled::Failed(error)),
            StoreReply::Ready(Ok(lease)) => {
                let bounds = self.remember(ctx, &lease, ctx.now, ctx.now);
                if lease.source.has_reply() {
                    self.hold_answered(lease.hold, ctx.now, bounds);
                }
                let Some(grant) = lease.grants.first() else {
                    let learning = lease.recovering.map(|wait| Refusal { wait: Some(wait), limit: None });
                    let refusal = lease.refused.or(learning).unwrap_or(Refusal::NEVER);
                    return Some(Settled::Refused(refusal));
                };
                let slot = slot(&lease, grant, (ctx.now, clock::now()));
                if grant.wait.is_zero() {
                    return Some(Settled::Granted(slot));
                }
                let queue = self.queue.get_or_insert_default();
                queue.wait(number, cost, bound, ctx.now, None);
                queue.answered([slot], None, Duration::ZERO, ctx.now, &mut ctx.work.wakers);
                None
            }
            StoreReply::Pending(call) => {
                let queue = self.queue.get_or_insert_default();
                queue.wait(number, cost, bound, ctx.now, None);
                let called = queue.asking(&[demand], ctx.now, ctx.is_watched());
                self.later = true;
                ctx.work.effects.push(Effect::Call(called, call));
                None
            }
        }
    }

    /// Takes back a permit that was surely not used. It goes to the next waiter, else back to the store.
    pub(super) fn give_back(&mut self, ctx: &mut KeyContext<'_>, slot: Reservation) {
        let held = self.held(ctx.now).is_some();
        self.probe_comes_back();
        self.refused = None;
        let Some(queue) = &mut self.queue else {
            if held || !self.prefetched.put(&slot, ctx.now) {
                ctx.store.give_back(ctx.key, ctx.spec, &[slot.unused()]);
            }
            return;
        };
        if held {
            queue.returns.push(slot.unused());
        } else {
            queue.add(slot);
        }
        self.step(ctx, None);
        self.close(ctx);
    }

    /// Drops a queue without waiters, and gives back the permits that the next call would have returned.
    fn close(&mut self, ctx: &KeyContext<'_>) {
        if let Some(queue) = self.queue.take_if(|queue| queue.is_done(ctx.now))
            && !queue.returns.is_empty()
        {
            ctx.store.give_back(ctx.key, ctx.spec, &queue.returns);
        }
    }
}
