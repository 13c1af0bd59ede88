//! Booking: when the store is asked for the waiters of a key, and for what.
//!
//! [`KeyState::step`] is run whenever something changed: a request came or left, a slot is due, the store answered. It hands out the
//! slots that are due and decides by [`KeyState::next_call`] whether the store is asked. One call at a time is under way; it books
//! for all waiters without a slot.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::KeyState;
use super::context::{Effect, KeyContext};
use super::hold::ASK_AGAIN;
use super::probation::Passage;
use crate::clock;
use crate::error::StoreError;
use crate::limit::UnusedPermits;
use crate::limiter::queue::CallNumber;
use crate::limiter::queue::{Gathering, Number};
use crate::store::{Demand, Lease, LeaseRequest, StoreReply};

/// The most permits that the store is asked for in one call, so that a server is never busy with one call for long.
const MOST_ASKED: usize = 500;

/// The most calls in a row to a store that answers at once: one for each need that it refuses, and one more.
const MOST_ROUNDS: usize = 64;

/// Whether the store is called now.
enum NextCall {
    /// It is not needed, or a call is under way already.
    None,
    /// It is called after this delay, so that other requests can join the call, or when a hold ends.
    Gather(Duration),
    /// It is called now for these needs. If there are none, it confirms what was booked.
    Lease(SmallVec<[Demand; 2]>),
}

/// What became of a call to the store.
enum Called {
    /// The store answered at once.
    Answered,
    /// The answer is still to come, and the call is left to be run.
    UnderWay,
}

impl KeyState {
    /// Brings the key up to date: hands out the slots that are due, gives back slots that no waiter needs, and asks the store for
    /// waiters without a slot. `me` is being polled and needs no waking.
    pub(super) fn step(&mut self, ctx: &mut KeyContext<'_>, me: Option<Number>) {
        let mut now = ctx.now;
        // A store that answers at once may bring slots that are due, or refuse one need and leave those after it undecided.
        for _ in 0..MOST_ROUNDS {
            let Some(died) = self.hand_out_due(ctx, me, now) else { return };
            match self.next_call(ctx, now) {
                NextCall::None => break,
                NextCall::Gather(delay) => {
                    ctx.work.effects.push(Effect::Gather(delay));
                    break;
                }
                NextCall::Lease(demands) => match self.send(ctx, &demands, died, now) {
                    // The store asked the time after we did.
                    Called::Answered => now = clock::now(),
                    Called::UnderWay => break,
                },
            }
        }
        self.return_unused(ctx, now);
    }

    /// Hands out the slots that are due. Returns whether permits had expired before a waiter took them; `None` if there is no
    /// queue.
    fn hand_out_due(&mut self, ctx: &mut KeyContext<'_>, me: Option<Number>, now: Instant) -> Option<bool> {
        let most = match self.passage(ctx.max_hold, now) {
            // The store has to confirm them first.
            _ if !self.is_trusted(ctx, now) => 0,
            Passage::Open => usize::MAX,
            Passage::Probe => 1,
            Passage::Probing(_) => 0,
        };
        let is_probe = most == 1;
        let queue = self.queue.as_mut()?;
        queue.take_from(&mut self.prefetched, now);
        let handed_out = queue.hand_out(most, now, me, &mut ctx.work.wakers);
        if is_probe && handed_out.count > 0 {
            self.probe_leaves(now);
        }
        Some(handed_out.died)
    }

    /// Decides whether the store is called.
    fn next_call(&mut self, ctx: &KeyContext<'_>, now: Instant) -> NextCall {
        let (trusted, held) = (self.is_trusted(ctx, now), self.held(now));
        let passage = self.passage(ctx.max_hold, now);
        let Some(queue) = &mut self.queue else { return NextCall::None };
        let is_doubtful = !trusted && queue.is_due(now);
        queue.trim();
        if queue.is_calling(now) {
            return NextCall::None;
        }
        queue.give_up_call();
        let is_open = held.is_none() && passage == Passage::Open;
        let confirms = is_doubtful || (is_open && self.confirms_next_slot(ctx, now));
        let Some(queue) = &mut self.queue else { return NextCall::None };
        let demands = queue.needs(match passage {
            Passage::Open if !self.later => usize::MAX,
            Passage::Open => MOST_ASKED,
            Passage::Probe | Passage::Probing(_) => 1,
        });
        if demands.is_empty() && !confirms {
            return NextCall::None;
        }
        let probing = match passage {
            Passage::Probing(left) => Some(left),
            Passage::Open | Passage::Probe => None,
        };
        if let Some(left) = held.or(probing) {
            // What is booked when the hold ends, or when the probe has passed, is booked by what is known then.
            if queue.gathering == Gathering::UnderWay {
                return NextCall::None;
            }
            queue.gather_for(left, now);
            return NextCall::Gather(left);
        }
        if self.later && !confirms {
            match queue.gathering {
                Gathering::NotYet => return NextCall::Gather(queue.gather(now)),
                Gathering::UnderWay if !queue.gathers_too_long(now) => return NextCall::None,
                Gathering::UnderWay | Gathering::Done => {}
            }
        }
        NextCall::Lease(demands)
    }

    /// Calls the store for `demands`. If permits `died` since the last call, those of later calls are valid for longer.
    fn send(&mut self, ctx: &mut KeyContext<'_>, demands: &[Demand], died: bool, now: Instant) -> Called {
        let is_open = self.passage(ctx.max_hold, now) == Passage::Open;
        let queue = self.queue.get_or_insert_default();
        // Permits are scarce if slots lie ahead: none are fetched in advance.
        let is_scarce = queue.last_booked().is_some();
        let latest = queue.latest().unwrap_or(ctx.now);
        let mut returns = std::mem::take(&mut queue.returns);
        let prefetch = if self.later && !is_scarce && !demands.is_empty() && is_open {
            self.prefetched.order(ctx.spec, self.prefetch_life(ctx), ctx.now)
        } else {
            0
        };
        returns.extend(self.prefetched.clear());
        if died {
            self.lengthen_life(ctx);
        }
        let answer = ctx.store.lease(self.request(ctx, demands, prefetch, latest, &returns));
        let queue = self.queue.get_or_insert_default();
        match answer {
            StoreReply::Ready(answer) => {
                queue.asking(demands, ctx.now, false);
                self.answered(ctx, answer, ctx.now, clock::now());
                Called::Answered
            }
            StoreReply::Pending(call) => {
                self.later = true;
                let number = queue.asking(demands, ctx.now, ctx.is_watched());
                ctx.work.effects.push(Effect::Call(number, call));
                Called::UnderWay
            }
        }
    }

    /// Gives back the permits that no waiter needs, unless a call that takes them along is near.
    fn return_unused(&mut self, ctx: &KeyContext<'_>, now: Instant) {
        let is_blocked = self.held(now).is_some() || self.passage(ctx.max_hold, now) != Passage::Open;
        let Some(queue) = &mut self.queue else { return };
        let gathers = queue.gathering == Gathering::UnderWay && !is_blocked;
        if !queue.returns.is_empty() && !queue.is_calling(now) && !gathers {
            ctx.store.give_back(ctx.key, ctx.spec, &std::mem::take(&mut queue.returns));
        }
    }

    /// Returns the request to the store: for `demands`, and for `prefetch` permits in advance.
    pub(super) fn request<'a>(
        &mut self,
        ctx: &'a KeyContext<'_>,
        demands: &'a [Demand],
        prefetch: u32,
        latest: Instant,
        returns: &'a [UnusedPermits],
    ) -> LeaseRequest<'a> {
        let memory = self.session.as_mut().map(|session| {
            session.forget(returns);
            session.client_session(ctx.now)
        });
        LeaseRequest {
            key: ctx.key,
            spec: ctx.spec,
            demands: demands,
            prefetch,
            latest: latest.saturating_duration_since(ctx.now),
            validity: self.life,
            prefetch_validity: self.prefetch_life(ctx),
            returns,
            charges: &[],
            session: memory.unwrap_or_default(),
            hold: self.held_for_store(ctx.now),
            remaining: self.left(ctx.spec, ctx.max_hold, ctx.now),
        }
    }

    /// Calls the store although no request waits: it learns what this process knows of the key, and answers what it knows. Does
    /// nothing while another call is under way.
    pub(in crate::limiter) fn inquire(&mut self, ctx: &mut KeyContext<'_>) {
        if self.queue.as_ref().is_some_and(|queue| queue.is_calling(ctx.now)) {
            return;
        }
        let returns = self.queue.as_mut().map(|queue| std::mem::take(&mut queue.returns)).unwrap_or_default();
        match ctx.store.lease(self.request(ctx, &[], 0, ctx.now, &returns)) {
            StoreReply::Ready(answer) => {
                self.answered(ctx, answer, ctx.now, clock::now());
            }
            StoreReply::Pending(call) => {
                self.later = true;
                let queue = self.queue.get_or_insert_default();
                queue.give_up_call();
                let number = queue.asking(&[], ctx.now, ctx.is_watched());
                ctx.work.effects.push(Effect::Call(number, call));
            }
        }
    }

    /// The store answered the call that was sent at `sent`. What an answer brings that counts as lost goes back.
    pub(in crate::limiter) fn call_answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        number: CallNumber,
        answer: Result<Lease, StoreError>,
        sent: Instant,
    ) {
        if !self.queue.as_ref().is_some_and(|queue| queue.is_call(number)) {
            if let Ok(lease) = answer {
                ctx.store.give_back(ctx.key, ctx.spec, &lease.unused());
            }
            return;
        }
        let answer = self.unless_too_slow(ctx, answer, sent);
        let failed = answer.is_err();
        self.answered(ctx, answer, sent, ctx.now);
        if self.tightens {
            return self.tighten(ctx);
        }
        // If this sends a hold to the store, the step only hands out permits.
        self.resend_hold(ctx);
        self.step(ctx, None);
        if ctx.work.effects.is_empty() {
            self.pass_on(ctx);
        }
        self.close(ctx);
        if failed && ctx.work.effects.is_empty() && self.doubts_hold(ctx.now) {
            ctx.work.effects.push(Effect::PassOn(ASK_AGAIN));
        }
    }

    /// The delay in which others `joined` the next call is over. If they did not, its task was dropped with its runtime.
    pub(in crate::limiter) fn gathered(&mut self, ctx: &mut KeyContext<'_>, joined: bool) {
        let is_held = self.held(ctx.now).is_some();
        let Some(queue) = &mut self.queue else { return };
        if is_held && !joined {
            // The other waiters have runtimes of their own.
            queue.gathering = Gathering::NotYet;
            queue.wake_all(&mut ctx.work.wakers);
            return;
        }
        queue.gathering = Gathering::Done;
        self.step(ctx, None);
        if let Some(queue) = self.queue.as_mut().filter(|queue| queue.gathering == Gathering::Done) {
            queue.gathering = Gathering::NotYet;
        }
        self.close(ctx);
    }
}
