//! The line of one key in this process: the permits at hand, and the queue of those who wait.
//!
//! One store call at a time books for all who wait. Where nobody waits, a key in heavy use fetches a few permits ahead,
//! so that the next calls need no store; how many follows from how fast they are used.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::queue::{Number, Patience, Queue, Settled, Slot, Wakers};
use super::stock::Stock;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::keyed::Idle;
use crate::limit::{Terms, Unused};
use crate::store::{Answer, Ask, Lease, Memory, Need, Refusal, Segment, Store};

/// What a line needs to know of its gate.
pub(super) struct Desk<'a> {
    pub(super) key: Key,
    pub(super) store: &'a Arc<dyn Store>,
    pub(super) terms: &'a Arc<Terms>,
    pub(super) now: Instant,
    pub(super) max_waiting: usize,
}

/// How long after its slot a permit is usable, unless wake-ups come late. With the default `transit_slack`, the margin
/// is 20 ms.
pub(crate) const LIFE: Duration = Duration::from_millis(10);

/// The longest life, for windows that are not longer than twenty times that.
const LONGEST_LIFE: Duration = Duration::from_millis(20);

/// How late a task may wake.
const WAKE_UP: Duration = Duration::from_millis(5);

pub(super) struct Line {
    stock: Stock,
    /// Only while somebody waits.
    queue: Option<Box<Queue>>,
    life: Duration,
    memory: Memory,
}

/// A store's answer that is still to come.
pub(super) type Call = Pin<Box<dyn Future<Output = Result<Lease, StoreError>> + Send>>;

/// What came of entering a line.
pub(super) enum Entered {
    Granted(Slot),
    Waiting(Number),
    Refused(Refusal),
    Failed(StoreError),
    LineFull,
}

impl Idle for Line {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        self.queue.is_none().then(|| self.stock.until())
    }
}

impl Line {
    pub(super) fn new(now: Instant) -> Self {
        Line { stock: Stock::new(now), queue: None, life: LIFE, memory: Memory::default() }
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Units at hand.
    pub(super) fn at_hand(&self, now: Instant) -> u32 {
        self.stock.units(now)
    }

    /// A permit at hand, if nobody waits for one.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Slot> {
        if self.queue.is_some() { None } else { self.stock.take(cost, now) }
    }

    /// The same, for a request that leaves at once.
    #[inline]
    pub(super) fn spend(&mut self, cost: u32, now: Instant) -> bool {
        self.queue.is_none() && self.stock.spend(cost, now)
    }

    /// One enters: it gets a permit, a place in the line, or a refusal.
    pub(super) fn enter(
        &mut self,
        desk: &Desk<'_>,
        cost: u32,
        patience: Patience,
        wakers: &mut Wakers,
    ) -> (Entered, Option<Call>) {
        if self.queue.is_none() {
            return self.enter_empty(desk, cost, patience);
        }
        let queue = self.queue.get_or_insert_default();
        if queue.waiting() >= desk.max_waiting {
            return (Entered::LineFull, None);
        }
        let number = next_number();
        queue.wait(number, cost, patience, desk.now);
        let call = self.step(desk, Some(number), wakers);
        let entered = match self.collect(number) {
            Some(Settled::Granted(slot)) => Entered::Granted(slot),
            Some(Settled::Refused(refusal)) => Entered::Refused(refusal),
            Some(Settled::Failed(error)) => Entered::Failed(error),
            None => Entered::Waiting(number),
        };
        self.close();
        (entered, call)
    }

    /// Nobody waits: the store is asked for this one alone, and for what may be fetched ahead.
    fn enter_empty(&mut self, desk: &Desk<'_>, cost: u32, patience: Patience) -> (Entered, Option<Call>) {
        if let Some(slot) = self.take(cost, desk.now) {
            return (Entered::Granted(slot), None);
        }
        let prefetch = self.stock.order(desk.terms, self.stock_life(desk), desk.now);
        let left = self.stock.clear();
        let need = Need { cost, count: 1 };
        let ask = self.ask(desk, std::slice::from_ref(&need), prefetch, patience.latest, left.as_slice());
        match desk.store.lease(ask) {
            Answer::Now(Err(error)) => (Entered::Failed(error), None),
            Answer::Now(Ok(lease)) => {
                self.remember(&lease, desk.now);
                let Some(segment) = lease.segments.first() else {
                    let refusal = lease.refused.unwrap_or(Refusal::NEVER);
                    return (Entered::Refused(refusal), None);
                };
                let slot = slot(segment, desk.now, clock::now());
                if segment.wait.is_zero() {
                    return (Entered::Granted(slot), None);
                }
                let queue = self.queue.get_or_insert_default();
                let number = next_number();
                queue.wait(number, cost, patience, desk.now);
                queue.answered([slot], None, Duration::ZERO, &mut Wakers::default());
                (Entered::Waiting(number), None)
            }
            Answer::Later(call) => {
                let queue = self.queue.get_or_insert_default();
                let number = next_number();
                queue.wait(number, cost, patience, desk.now);
                queue.asking(&[need]);
                (Entered::Waiting(number), Some(call))
            }
        }
    }

    fn ask<'a>(
        &self,
        desk: &'a Desk<'_>,
        needs: &'a [Need],
        prefetch: u32,
        latest: Instant,
        returns: &'a [Unused],
    ) -> Ask<'a> {
        Ask {
            key: desk.key,
            terms: desk.terms,
            needs,
            prefetch,
            latest: latest.saturating_duration_since(desk.now),
            life: self.life,
            prefetch_life: self.stock_life(desk),
            returns,
            memory: self.memory,
        }
    }

    /// Keeps what a lease says besides its segments.
    fn remember(&mut self, lease: &Lease, sent: Instant) {
        self.memory = Memory { incarnation: lease.incarnation, hold_version: lease.hold_version };
        if let Some(segment) = &lease.prefetched {
            self.stock.fill(&slot(segment, sent, sent));
        }
    }

    /// What is fetched ahead may live for a two-hundredth of the window.
    fn stock_life(&self, desk: &Desk<'_>) -> Duration {
        self.life.max(desk.terms.quota().shortest_window() / 200)
    }

    /// Brings the line up to date: slots that are due go out, slots nobody needs go back, the store is asked for those
    /// who have none. `me` is being polled and needs no waking.
    fn step(&mut self, desk: &Desk<'_>, me: Option<Number>, wakers: &mut Wakers) -> Option<Call> {
        // An answer at once may bring slots that are due at once; a second round hands them out, and more are never
        // needed: what a store grants is alive.
        let mut now = desk.now;
        for _ in 0..3 {
            let queue = self.queue.as_mut()?;
            let died = queue.hand_out(now, me, wakers);
            queue.trim();
            let needs = queue.needs();
            if needs.is_empty() || queue.is_calling() {
                break;
            }
            let mut returns = std::mem::take(&mut queue.returns);
            returns.extend(self.stock.clear());
            let latest = queue.latest().unwrap_or(desk.now);
            if died {
                self.lengthen_life(desk);
            }
            match desk.store.lease(self.ask(desk, &needs, 0, latest, &returns)) {
                Answer::Now(answer) => {
                    // The store asked the time after we did.
                    now = clock::now();
                    self.mark_asked(&needs);
                    self.answered(answer, desk.now, now, wakers);
                }
                Answer::Later(call) => {
                    self.mark_asked(&needs);
                    return Some(call);
                }
            }
        }
        let queue = self.queue.as_mut()?;
        if !queue.returns.is_empty() && !queue.is_calling() {
            desk.store.give_back(desk.key, desk.terms, &std::mem::take(&mut queue.returns));
        }
        None
    }

    fn mark_asked(&mut self, needs: &[Need]) {
        if let Some(queue) = &mut self.queue {
            queue.asking(needs);
        }
    }

    /// The call sent at `sent` has been answered.
    fn answered(
        &mut self,
        answer: Result<Lease, StoreError>,
        sent: Instant,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        if let Ok(lease) = &answer {
            self.remember(lease, sent);
        }
        let Some(queue) = &mut self.queue else { return };
        let trip = now.saturating_duration_since(sent);
        match answer {
            Ok(lease) => {
                let slots = lease.segments.iter().map(|segment| slot(segment, sent, now));
                let end = Settled::Refused(lease.refused.unwrap_or(Refusal::NEVER));
                queue.answered(slots, Some(&end), trip, wakers);
            }
            Err(error) => queue.answered([], Some(&Settled::Failed(error)), trip, wakers),
        }
    }

    /// The call sent at `sent`, which answered later, has been answered.
    pub(super) fn call_answered(
        &mut self,
        desk: &Desk<'_>,
        answer: Result<Lease, StoreError>,
        sent: Instant,
        wakers: &mut Wakers,
    ) -> Option<Call> {
        // A permit's life counts from when the call was sent: one that took longer brought only dead ones.
        let took = desk.now.saturating_duration_since(sent);
        let longest = longest_life(desk.terms);
        let too_slow = took >= self.life && self.life >= longest;
        self.life = self.life.max(took.saturating_mul(2).saturating_add(WAKE_UP)).min(longest);
        let answer = if too_slow { answer.and(Err(StoreError::TooSlow { took, longest })) } else { answer };
        self.answered(answer, sent, desk.now, wakers);
        let call = self.step(desk, None, wakers);
        self.close();
        call
    }

    /// One who waits is polled.
    pub(super) fn poll(
        &mut self,
        desk: &Desk<'_>,
        waiter: &mut Place,
        cx: &mut Context<'_>,
        wakers: &mut Wakers,
    ) -> (Poll<Settled>, Option<Call>) {
        let mut call = None;
        if let Some(settled) = self.collect_alive(desk, waiter) {
            self.close();
            return (Poll::Ready(settled), None);
        }
        for _ in 0..2 {
            call = call.or(self.step(desk, Some(waiter.number), wakers));
            if let Some(settled) = self.collect_alive(desk, waiter) {
                self.close();
                return (Poll::Ready(settled), call);
            }
            // Without a place there is nothing to wait for: the line could not be opened when it was to wait again.
            let Some(queue) =
                self.queue.as_mut().filter(|queue| queue.is_waiting(waiter.number, waiter.cost))
            else {
                return (Poll::Ready(Settled::Refused(Refusal::NEVER)), call);
            };
            if queue.is_over(waiter.number, waiter.cost, desk.now) {
                let slot = queue.last_slot(waiter.cost);
                let wait = slot.map(|slot| slot.saturating_duration_since(desk.now));
                call = call.or(self.leave(desk, waiter, wakers));
                return (Poll::Ready(Settled::Refused(Refusal { wait, limit: None })), call);
            }
            if queue.poll(waiter.number, waiter.cost, desk.now, cx).is_pending() {
                return (Poll::Pending, call);
            }
        }
        // The timer was due between asking the time and asking the timer.
        cx.waker().wake_by_ref();
        (Poll::Pending, call)
    }

    /// How the wait ended; one whose permit died before it was polled waits again, in its old place.
    fn collect_alive(&mut self, desk: &Desk<'_>, waiter: &mut Place) -> Option<Settled> {
        let settled = self.collect(waiter.number)?;
        let Settled::Granted(slot) = settled else { return Some(settled) };
        if slot.until > desk.now {
            self.life = (self.life - self.life / 64).max(LIFE);
            return Some(settled);
        }
        self.wait_again(desk, waiter, slot);
        None
    }

    fn wait_again(&mut self, desk: &Desk<'_>, waiter: &mut Place, died: Slot) {
        waiter.turns += 1;
        self.lengthen_life(desk);
        let queue = self.queue.get_or_insert_default();
        queue.returns.push(died.unused());
        queue.wait(waiter.number, waiter.cost, waiter.patience, desk.now);
    }

    /// One who had its permit could not use it in time: it waits in its old place.
    pub(super) fn return_late(
        &mut self,
        desk: &Desk<'_>,
        waiter: &mut Place,
        died: Slot,
        wakers: &mut Wakers,
    ) -> Option<Call> {
        self.wait_again(desk, waiter, died);
        self.step(desk, Some(waiter.number), wakers)
    }

    /// A permit died before its holder woke: the next ones live longer.
    fn lengthen_life(&mut self, desk: &Desk<'_>) {
        self.life = (self.life * 2).min(longest_life(desk.terms));
    }

    fn collect(&mut self, number: Number) -> Option<Settled> {
        self.queue.as_mut()?.collect(number)
    }

    /// One stops waiting: what it had goes to the next in line, else back to the store.
    pub(super) fn leave(&mut self, desk: &Desk<'_>, waiter: &Place, wakers: &mut Wakers) -> Option<Call> {
        let queue = self.queue.as_mut()?;
        queue.leave(waiter.number, waiter.cost);
        if let Some(Settled::Granted(slot)) = queue.collect(waiter.number) {
            queue.add(slot);
        }
        let call = self.step(desk, None, wakers);
        self.close();
        call
    }

    /// A permit comes back that was surely not used: it goes to the next in line, else back to the store.
    pub(super) fn give_back(&mut self, desk: &Desk<'_>, slot: Slot, wakers: &mut Wakers) -> Option<Call> {
        let Some(queue) = &mut self.queue else {
            if !self.stock.put(&slot, desk.now) {
                desk.store.give_back(desk.key, desk.terms, &[slot.unused()]);
            }
            return None;
        };
        queue.add(slot);
        let call = self.step(desk, None, wakers);
        self.close();
        call
    }

    fn close(&mut self) {
        if self.queue.as_ref().is_some_and(|queue| queue.is_done()) {
            self.queue = None;
        }
    }
}

/// One count for the process: a line may be forgotten and opened anew while somebody means to come back to its place.
fn next_number() -> Number {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The place of one who waits.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) number: Number,
    pub(super) cost: u32,
    pub(super) patience: Patience,
    /// How often it was its turn, this time included.
    pub(super) turns: u32,
}

/// When this process may use a segment: never before its slot, wherever the answer was on its way, and never after its
/// deadline, whenever the call was counted. A microsecond is for the store's time being cut to whole ones.
fn slot(segment: &Segment, sent: Instant, arrived: Instant) -> Slot {
    let lasts = segment.wait.saturating_add(segment.life).saturating_sub(Duration::from_micros(1));
    Slot {
        at: clock::after(arrived, segment.wait),
        until: clock::after(sent, lasts),
        cost: segment.cost,
        count: segment.count,
        slot: segment.slot,
        stamp: segment.stamp,
    }
}

fn longest_life(terms: &Terms) -> Duration {
    LONGEST_LIFE.max(terms.quota().shortest_window() / 20)
}
