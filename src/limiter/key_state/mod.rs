//! The line of one key in this process: the permits at hand, and the queue of those who wait.
//!
//! One store call at a time books for all who wait. Where nobody waits, a key in heavy use fetches a few permits ahead,
//! so that the next calls need no store; how many follows from how fast they are used.

mod answer;
mod booking;
mod hold;
mod leftover;
#[cfg(test)]
mod properties;
mod refusal;
mod refused;
mod remaining;
mod stated;
mod wait;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::prefetched::Prefetched;
use super::queue::{Number, Queue};
use super::reservation::{Patience, Settled, Slot};
use super::session::StoreSession;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::key_map::Idle;
use crate::limit::Terms;
use crate::store::{Answer, Lease, Need, Refusal, Store};
use crate::wakers::Wakers;

use answer::slot;
pub(super) use hold::is_any_uncertain;
use hold::{Holding, Passage};
use refused::Refused;
use remaining::Words;
pub(super) use remaining::is_of_use;
use stated::Lesson;
pub use stated::{Learn, Learned};
pub(super) use wait::Place;

/// What a line needs to know of its gate.
pub(super) struct Desk<'a> {
    pub(super) key: Key,
    pub(super) store: &'a Arc<dyn Store>,
    pub(super) terms: &'a Arc<Terms>,
    pub(super) now: Instant,
    pub(super) max_waiting: usize,
    /// Whether a request that cannot be counted passes.
    pub(super) fails_open: bool,
    /// The longest that a word of the upstream holds the key.
    pub(super) max_hold: Duration,
}

impl Desk<'_> {
    /// Whether waiters look after the store's calls themselves: they may be lost with the runtime of a caller.
    fn is_watched(&self) -> bool {
        self.store.background().is_none()
    }
}

pub(super) struct Line {
    prefetched: Prefetched,
    /// Only while somebody waits.
    queue: Option<Box<Queue>>,
    life: Duration,
    /// Whether the store takes a trip to answer.
    later: bool,
    /// When somebody looks whether permits at hand were left over.
    sweep_at: Option<Instant>,
    /// The session with a store that has a server, which may lose its state.
    session: Option<Box<StoreSession>>,
    /// Whether what is booked was granted by this process, as the store is away.
    alone: bool,
    hold: Option<Box<Holding>>,
    /// What the upstream said of each limit.
    words: Option<Box<Words>>,
    /// What the upstream has stated of its limits.
    lesson: Option<Box<Lesson>>,
    /// Whether others use a limit of the key too, as the store says.
    shared: bool,
    /// Units that could still go, as the store said last.
    free: u64,
    /// Whether a call is under way that may bring more than the upstream says is left.
    tightens: bool,
    /// What the store refused last, if it takes a trip to answer.
    refused: Option<Box<Refused>>,
}

/// What is to be done for a line without its lock.
pub(super) enum Errand {
    /// Run a call to its end.
    Call(CallNumber, Call),
    /// Come back after so long: others may join the next call meanwhile.
    Gather(Duration),
    /// Pass on after so long what the upstream says meanwhile.
    PassOn(Duration),
}

/// The number of a call. An answer to another than the last one is late.
pub(super) type CallNumber = u64;

/// A store's answer that is still to come.
pub(super) type Call = Pin<Box<dyn Future<Output = Result<Lease, StoreError>> + Send>>;

impl Idle for Line {
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

impl Line {
    /// A line in which nobody waits. `life` is how long its permits live at first.
    pub(super) fn new(life: Duration, now: Instant) -> Self {
        Line {
            prefetched: Prefetched::new(now),
            queue: None,
            life,
            later: false,
            sweep_at: None,
            session: None,
            alone: false,
            hold: None,
            words: None,
            lesson: None,
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

    /// A permit at hand, if nobody waits for one.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Slot> {
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
        desk: &Desk<'_>,
        cost: u32,
        patience: Patience,
        number: Number,
        wakers: &mut Wakers,
    ) -> (Option<Settled>, Option<Errand>) {
        if let Some(slot) = self.take(cost, desk.now) {
            return (Some(Settled::Granted(slot)), None);
        }
        let held = self.held(desk.now);
        let too_long = held.filter(|left| clock::after(desk.now, *left) > patience.latest);
        if let Some(left) = too_long
            && !self.asks_for_release(desk.now)
        {
            return (Some(Settled::Refused(Refusal { wait: Some(left), limit: None })), None);
        }
        let refused = self.refused.as_ref();
        if let Some(refusal) = refused.and_then(|refused| refused.of(cost, patience, desk.now)) {
            return (Some(Settled::Refused(refusal)), None);
        }
        let is_open = held.is_none() && self.passage(desk.max_hold, desk.now) == Passage::Open;
        if self.queue.is_none() && !self.later && is_open {
            return self.enter_empty(desk, cost, patience, number);
        }
        let queue = self.queue.get_or_insert_default();
        if queue.waiting() >= desk.max_waiting {
            return (Some(Settled::QueueFull), None);
        }
        if let Some(wait) = queue.paused_beyond(patience, desk.now) {
            return (Some(Settled::Refused(Refusal { wait: Some(wait), limit: None })), None);
        }
        queue.wait(number, cost, patience, desk.now, held);
        let asked = if too_long.is_some() { self.inquire(desk, wakers) } else { None };
        let errand = asked.or_else(|| self.step(desk, Some(number), wakers));
        let settled = self.collect(number);
        self.close(desk);
        (settled, errand)
    }

    /// Nobody waits: a store that answers at once is asked for this one alone, and for what may be fetched ahead.
    fn enter_empty(
        &mut self,
        desk: &Desk<'_>,
        cost: u32,
        patience: Patience,
        number: Number,
    ) -> (Option<Settled>, Option<Errand>) {
        let prefetch = self.prefetched.order(desk.terms, self.prefetch_life(desk), desk.now);
        let left = self.prefetched.clear();
        let need = Need { cost, count: 1 };
        let ask = self.ask(desk, std::slice::from_ref(&need), prefetch, patience.latest, left.as_slice());
        match desk.store.lease(ask) {
            Answer::Now(Err(error)) => (Some(Settled::Failed(error)), None),
            Answer::Now(Ok(lease)) => {
                let bounds = self.remember(desk, &lease, desk.now, desk.now);
                if lease.is_word_of_store() {
                    self.hold_answered(lease.held, desk.now, bounds);
                }
                let Some(segment) = lease.segments.first() else {
                    let learning = lease.learning.map(|wait| Refusal { wait: Some(wait), limit: None });
                    let refusal = lease.refused.or(learning).unwrap_or(Refusal::NEVER);
                    return (Some(Settled::Refused(refusal)), None);
                };
                let slot = slot(&lease, segment, (desk.now, clock::now()));
                if segment.wait.is_zero() {
                    return (Some(Settled::Granted(slot)), None);
                }
                let queue = self.queue.get_or_insert_default();
                queue.wait(number, cost, patience, desk.now, None);
                queue.answered([slot], None, Duration::ZERO, desk.now, &mut Wakers::default());
                (None, None)
            }
            Answer::Later(call) => {
                let queue = self.queue.get_or_insert_default();
                queue.wait(number, cost, patience, desk.now, None);
                let called = queue.asking(&[need], desk.now, desk.is_watched());
                self.later = true;
                (None, Some(Errand::Call(called, call)))
            }
        }
    }

    /// A permit comes back that was surely not used: it goes to the next in line, else back to the store.
    pub(super) fn give_back(&mut self, desk: &Desk<'_>, slot: Slot, wakers: &mut Wakers) -> Option<Errand> {
        let held = self.held(desk.now).is_some();
        self.probe_comes_back();
        self.refused = None;
        let Some(queue) = &mut self.queue else {
            if held || !self.prefetched.put(&slot, desk.now) {
                desk.store.give_back(desk.key, desk.terms, &[slot.unused()]);
            }
            return None;
        };
        if held {
            queue.returns.push(slot.unused());
        } else {
            queue.add(slot);
        }
        let errand = self.step(desk, None, wakers);
        self.close(desk);
        errand
    }

    /// Drops a queue in which nobody is left, and gives back what was to go with the next call.
    fn close(&mut self, desk: &Desk<'_>) {
        if let Some(queue) = self.queue.take_if(|queue| queue.is_done(desk.now))
            && !queue.returns.is_empty()
        {
            desk.store.give_back(desk.key, desk.terms, &queue.returns);
        }
    }
}

/// One count for the process: a line may be forgotten and opened anew while somebody means to come back to its place.
pub(super) fn next_number() -> Number {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
