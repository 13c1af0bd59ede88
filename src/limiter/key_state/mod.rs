//! The state of one key in this process: the permits at hand, the queue of waiters, the hold, and
//! what the upstream stated.
//!
//! One store call at a time books for all waiters. If no request waits, a key in heavy use
//! prefetches a few permits, so that the next requests need no store call. The faster they are
//! used, the more it prefetches.
//!
//! | file | what it has |
//! |---|---|
//! | `context` | what a visit to the state works with, and the work it leaves |
//! | `mod` | the entrance of a request, and the return of a permit |
//! | `ticket` | the wait of a request in the queue |
//! | `booking` | when the store is called, and for what |
//! | `answer` | what an answer of the store means |
//! | `store_refusal` | a refusal of the store, kept for the next requests |
//! | `leftover` | prefetched permits that are not used |
//! | `hold` | one hold: when it ends, and how this process knows; a value |
//! | `probation` | what follows a hold that was cut |
//! | `upstream_refusals` | how long a refusal of the upstream holds the key; a value |
//! | `key_hold` | what the key does about its hold |
//! | `remaining_headers` | what the upstream states about the rest of one limit; a value |
//! | `remaining`, `stated` | what the key does about that, and about stated limits |

mod answer;
mod booking;
mod context;
mod hold;
mod key_hold;
mod leftover;
mod probation;
#[cfg(test)]
mod properties;
mod remaining;
mod remaining_headers;
mod stated;
mod store_refusal;
mod ticket;
mod upstream_refusals;

use std::time::{Duration, Instant};

use super::prefetched::Prefetched;
use super::queue::{Number, Queue};
use super::reservation::{Reservation, Settled, WaitBound};
use super::session::KeySession;
use crate::clock;
use crate::key_map::Evict;
use crate::store::{Demand, Lease, Refusal, StoreReply};

use answer::slot;
pub(super) use context::{Effect, KeyContext, LeaseFuture, Work};
pub(super) use hold::HoldSource;
use key_hold::KeyHold;
pub(super) use key_hold::NewHold;
pub(super) use probation::is_any_uncertain;
use remaining::RemainingTracker;
pub(super) use remaining_headers::is_of_use;
use stated::StatedLimits;
pub use stated::{HeaderTrust, StatedLimit};
use store_refusal::StoreRefusal;
pub(super) use ticket::Ticket;

/// The state of one key in this process.
pub(super) struct KeyState {
    prefetched: Prefetched,
    /// Present only while requests wait, a call is under way or a result is to be collected.
    queue: Option<Box<Queue>>,
    /// How long the permits of the next call are valid.
    life: Duration,
    /// Whether the store answers later, after a round trip to a server, and not at once.
    later: bool,
    /// When unused prefetched permits are next given back. `None` if no task does so.
    sweep_at: Option<Instant>,
    /// The session with a store that has a server, which may lose its state.
    session: Option<Box<KeySession>>,
    /// Whether this process granted the booked permits itself, because the store is unreachable.
    alone: bool,
    hold: Option<Box<KeyHold>>,
    /// What the upstream stated about the rest of each limit.
    remaining: Option<Box<RemainingTracker>>,
    /// The limits that the upstream has stated.
    stated: Option<Box<StatedLimits>>,
    /// Whether other clients use a limit of the key as well, by the store's last answer.
    shared: bool,
    /// Units that could still be sent, by the store's last answer.
    free: u64,
    /// Whether a call is under way that may grant more than the upstream states is left.
    tightens: bool,
    /// The store's last refusal, if the store answers `later`.
    refused: Option<Box<StoreRefusal>>,
}

impl Evict for KeyState {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        let prefetched = self.prefetched.until();
        let is_idle = self.queue.is_none();
        is_idle.then(|| {
            self.hold_matters_until()
                .map_or(prefetched, |hold| hold.max(prefetched))
        })
    }

    fn worthless_from(&self) -> Option<Instant> {
        let idle = self.idle_from()?.max(self.prefetched.soon());
        let session = self
            .session
            .as_ref()
            .map_or(idle, |session| session.until());
        let stated = self.stated_until().unwrap_or(idle);
        Some(idle.max(session).max(stated))
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

    /// Returns how many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Returns the units at hand.
    pub(super) fn at_hand(&self, now: Instant) -> u32 {
        self.prefetched.units(now)
    }

    /// Takes a permit at hand, if no request waits for one.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Reservation> {
        if self.waiting() > 0 {
            None
        } else {
            self.prefetched.take(cost, now)
        }
    }

    /// Takes a permit at hand for a request that leaves at once, if no request waits for one.
    /// Returns whether it did.
    #[inline]
    pub(super) fn spend(&mut self, cost: u32, now: Instant) -> bool {
        self.waiting() == 0 && self.prefetched.spend(cost, now)
    }

    /// Enters a request. Returns `None` if it waits, under `number`.
    ///
    /// The cheapest step comes first. The steps are: a permit at hand, a refusal that needs no
    /// call, a call for this request alone, and a place in the queue.
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
        let held_too_long = held.filter(|left| clock::after(ctx.now, *left) > bound.latest);
        // One such request asks the store for a release, and waits for the answer.
        let inquires = held_too_long.is_some() && self.asks_for_release(ctx.now);
        if let Some(left) = held_too_long
            && !inquires
        {
            return Some(refused_for(left));
        }
        if let Some(refusal) = self.repeated_refusal(cost, bound, ctx.now) {
            return Some(Settled::Refused(refusal));
        }
        let asks_alone =
            self.queue.is_none() && !self.later && self.is_clear(ctx.max_hold, ctx.now);
        if asks_alone {
            return self.enter_alone(ctx, cost, bound, number);
        }
        if self.waiting() >= ctx.max_queue {
            return Some(Settled::QueueFull);
        }
        let queue = self.queue.get_or_insert_default();
        if let Some(pause) = queue.paused_beyond(bound, ctx.now) {
            return Some(refused_for(pause));
        }
        queue.wait(number, cost, bound, ctx.now, held);
        if inquires {
            self.inquire(ctx);
        }
        self.step(ctx, Some(number));
        let settled = self.collect(number, cost);
        self.close(ctx);
        settled
    }

    /// Enters a request while no other request waits. Calls the store for this request alone, and
    /// for permits to prefetch. As far as the key knows, its store answers at once.
    fn enter_alone(
        &mut self,
        ctx: &mut KeyContext<'_>,
        cost: u32,
        bound: WaitBound,
        number: Number,
    ) -> Option<Settled> {
        let demands = [Demand { cost, count: 1 }];
        let prefetch = self
            .prefetched
            .order(ctx.spec, self.prefetch_life(ctx), ctx.now);
        let returns = self.prefetched.clear();
        let request = self.request(ctx, &demands, prefetch, bound.latest, returns.as_slice());
        match ctx.store.lease(request) {
            StoreReply::Ready(Ok(lease)) => self.leased_alone(ctx, &lease, cost, bound, number),
            StoreReply::Ready(Err(error)) => Some(Settled::Failed(error)),
            StoreReply::Pending(call) => {
                self.queue
                    .get_or_insert_default()
                    .wait(number, cost, bound, ctx.now, None);
                self.call_under_way(ctx, &demands, call);
                None
            }
        }
    }

    /// Takes in the lease for a request that entered alone. Returns `None` if its slot lies ahead,
    /// so that it waits.
    fn leased_alone(
        &mut self,
        ctx: &mut KeyContext<'_>,
        lease: &Lease,
        cost: u32,
        bound: WaitBound,
        number: Number,
    ) -> Option<Settled> {
        let bounds = self.remember(ctx, lease, ctx.now, ctx.now);
        if lease.source.has_reply() {
            self.hold_answered(lease.hold, ctx.now, bounds);
        }
        let Some(grant) = lease.grants.first() else {
            let recovering = lease.recovering.map(|wait| Refusal {
                wait: Some(wait),
                limit: None,
            });
            return Some(Settled::Refused(
                lease.refused.or(recovering).unwrap_or(Refusal::NEVER),
            ));
        };
        let slot = slot(lease, grant, (ctx.now, clock::now()));
        if grant.wait.is_zero() {
            return Some(Settled::Granted(slot));
        }
        let queue = self.queue.get_or_insert_default();
        queue.wait(number, cost, bound, ctx.now, None);
        queue.answered([slot], None, Duration::ZERO, ctx.now, &mut ctx.work.wakers);
        None
    }

    /// Returns the refusal of a request that needs no call: the store has refused such a request
    /// lately, and is not to be called again yet.
    fn repeated_refusal(&self, cost: u32, bound: WaitBound, now: Instant) -> Option<Refusal> {
        self.refused.as_ref()?.of(cost, bound, now)
    }

    /// Takes back a permit that was surely not used. It goes to the next waiter, else back to the
    /// store.
    pub(super) fn give_back(&mut self, ctx: &mut KeyContext<'_>, slot: Reservation) {
        let is_held = self.held(ctx.now).is_some();
        self.probe_comes_back();
        self.refused = None;
        let Some(queue) = &mut self.queue else {
            if is_held || !self.prefetched.put(&slot, ctx.now) {
                ctx.store.give_back(ctx.key, ctx.spec, &[slot.unused()]);
            }
            return;
        };
        if is_held {
            queue.returns.push(slot.unused());
        } else {
            queue.add(slot);
        }
        self.step(ctx, None);
        self.close(ctx);
    }

    /// Drops a queue without waiters, and gives back the permits that the next call would have
    /// returned.
    fn close(&mut self, ctx: &KeyContext<'_>) {
        if let Some(queue) = self.queue.take_if(|queue| queue.is_done(ctx.now))
            && !queue.returns.is_empty()
        {
            ctx.store.give_back(ctx.key, ctx.spec, &queue.returns);
        }
    }
}

/// Refuses a request that would have to wait for `wait`.
fn refused_for(wait: Duration) -> Settled {
    Settled::Refused(Refusal {
        wait: Some(wait),
        limit: None,
    })
}
