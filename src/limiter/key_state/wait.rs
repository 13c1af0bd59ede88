//! Waiting in a line: being polled, being late, leaving.

use std::task::{Context, Poll};
use std::time::Duration;

use super::{Desk, Errand, Line};
use crate::clock;
use crate::error::StoreError;
use crate::limiter::queue::Number;
use crate::limiter::reservation::{Patience, Settled, Slot};
use crate::store::Refusal;
use crate::wakers::Wakers;

/// The place of one who waits.
#[derive(Debug)]
pub(in crate::limiter) struct Place {
    pub(in crate::limiter) number: Number,
    pub(in crate::limiter) cost: u32,
    pub(in crate::limiter) patience: Patience,
    /// How often it was its turn, this time included.
    pub(in crate::limiter) turns: u32,
}

impl Line {
    /// One who waits is polled.
    pub(in crate::limiter) fn poll(
        &mut self,
        desk: &Desk<'_>,
        waiter: &mut Place,
        cx: &mut Context<'_>,
        wakers: &mut Wakers,
    ) -> (Poll<Settled>, Option<Errand>) {
        let mut errand = None;
        if let Some(settled) = self.collect_alive(desk, waiter) {
            self.close(desk);
            return (Poll::Ready(settled), None);
        }
        for _ in 0..2 {
            errand = errand.or(self.step(desk, Some(waiter.number), wakers));
            if let Some(settled) = self.collect_alive(desk, waiter) {
                self.close(desk);
                return (Poll::Ready(settled), errand);
            }
            // Without a place there is nothing to wait for: the line could not be opened when it was to wait again.
            let Some(queue) =
                self.queue.as_mut().filter(|queue| queue.is_waiting(waiter.number, waiter.cost))
            else {
                return (Poll::Ready(Settled::Refused(Refusal::NEVER)), errand);
            };
            if queue.is_over(waiter.number, waiter.cost, desk.now) {
                let unanswered = queue.unanswered_for(desk.now).filter(|_| !waiter.patience.by_deadline);
                if let Some(waited) = unanswered {
                    // Its slot may be there, and nobody knows.
                    errand = errand.or(self.leave(desk, waiter, wakers));
                    return (Poll::Ready(Settled::Failed(StoreError::NoAnswer { waited })), errand);
                }
                let slot = queue.last_slot(waiter.cost);
                let wait = slot.map(|slot| slot.saturating_duration_since(desk.now));
                errand = errand.or(self.leave(desk, waiter, wakers));
                return (Poll::Ready(Settled::Refused(Refusal { wait, limit: None })), errand);
            }
            if queue.poll(waiter.number, waiter.cost, desk.now, cx).is_pending() {
                return (Poll::Pending, errand);
            }
        }
        // The timer was due between asking the time and asking the timer.
        cx.waker().wake_by_ref();
        (Poll::Pending, errand)
    }

    /// How the wait ended; one whose permit died before it was polled waits again, in its old place.
    fn collect_alive(&mut self, desk: &Desk<'_>, waiter: &mut Place) -> Option<Settled> {
        let settled = self.collect(waiter.number)?;
        let Settled::Granted(slot) = settled else { return Some(settled) };
        if let Some(left) = self.held(desk.now) {
            return self.held_back(desk, waiter, slot, left);
        }
        if slot.until > desk.now {
            self.life = (self.life - self.life / 64).max(desk.terms.life());
            return Some(settled);
        }
        self.wait_again(desk, waiter, slot);
        None
    }

    /// One that was about to leave when the key was held waits in its old place, if it can wait so long.
    fn held_back(&mut self, desk: &Desk<'_>, waiter: &Place, slot: Slot, left: Duration) -> Option<Settled> {
        let Place { number, cost, patience, .. } = *waiter;
        self.probe_comes_back();
        let queue = self.queue.get_or_insert_default();
        queue.returns.push(slot.unused());
        if clock::after(desk.now, left) > patience.latest {
            return Some(Settled::Refused(Refusal { wait: Some(left), limit: None }));
        }
        queue.wait(number, cost, patience, desk.now, Some(left));
        None
    }

    fn wait_again(&mut self, desk: &Desk<'_>, waiter: &mut Place, died: Slot) {
        waiter.turns += 1;
        if waiter.turns == 2 && waiter.patience.is_none {
            // It cannot wait at all, and was late because its machine stood still: once more, it asks for what is free.
            waiter.patience.latest = waiter.patience.latest.max(desk.now);
        }
        self.lengthen_life(desk);
        self.probe_comes_back();
        let held = self.held(desk.now);
        let queue = self.queue.get_or_insert_default();
        queue.returns.push(died.unused());
        queue.wait(waiter.number, waiter.cost, waiter.patience, desk.now, held);
    }

    /// One who had its permit could not use it in time: it waits in its old place.
    pub(in crate::limiter) fn return_late(
        &mut self,
        desk: &Desk<'_>,
        waiter: &mut Place,
        died: Slot,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        self.wait_again(desk, waiter, died);
        self.step(desk, Some(waiter.number), wakers)
    }

    /// A permit died before its holder woke: the next ones live longer.
    pub(super) fn lengthen_life(&mut self, desk: &Desk<'_>) {
        self.life = (self.life * 2).min(self.longest_life(desk.terms));
    }

    pub(super) fn collect(&mut self, number: Number) -> Option<Settled> {
        self.queue.as_mut()?.collect(number)
    }

    /// One stops waiting: what it had goes to the next in line, else back to the store.
    pub(in crate::limiter) fn leave(
        &mut self,
        desk: &Desk<'_>,
        waiter: &Place,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        let held = self.held(desk.now).is_some();
        let queue = self.queue.as_mut()?;
        queue.leave(waiter.number, waiter.cost);
        if let Some(Settled::Granted(slot)) = queue.collect(waiter.number) {
            if held {
                queue.returns.push(slot.unused());
            } else {
                queue.add(slot);
            }
            self.probe_comes_back();
        }
        let errand = self.step(desk, None, wakers);
        self.close(desk);
        errand
    }
}
