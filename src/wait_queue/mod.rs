//! A queue of requests that wait, with their wakers, timers and outcomes. Both engines keep their
//! waiters in it.
//!
//! A request enters the queue with a number. Requests with smaller numbers come first, so a request
//! that enters again with its old number is back in its old place. The future of the request holds
//! the number and nothing else of the queue. The queue needs no lock of its own: it is part of the
//! state of a key, which is behind the key's lock.
//!
//! A wait ends in two steps. First the owner of the queue settles it: the request waits no longer,
//! its task is woken, and its outcome is kept. Then the task runs, and its future collects the
//! outcome. The future may be dropped at any time, also between these two steps. It then calls
//! [`leave`](WaitQueue::leave), which returns the outcome, so that the owner can pass on what was
//! granted.
//!
//! The queue never wakes a task itself. It adds the waker to [`Wakers`], which the owner wakes once
//! it has released the lock.
//!
//! # Timers
//!
//! Each waiter has a moment at which its task wakes if its wait has not ended by then. The timer is
//! created when the future is first polled, and follows that moment. A timer only wakes the task.
//! The owner decides whether a wait is over, by the time that it has read. If the timer fires after
//! the owner has read the time and before the poll ends, the task is woken at once. It then polls
//! again, with a later time.

mod bound;
#[cfg(test)]
mod properties;

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};
use std::task::{Context, Waker};
use std::time::Instant;

use crate::clock::{self, Timer};
use crate::tuning::MISSED;
use crate::wakers::Wakers;

pub(crate) use bound::WaitBound;

/// The number of a request in its queue: a smaller number is earlier.
pub(crate) type Number = u64;

/// Returns whether the request of a slot that has expired at `until` has not come for it.
pub(crate) fn is_missed(until: Instant, now: Instant) -> bool {
    clock::after(until, MISSED) <= now
}

/// Requests that wait, each with a `T`, and the outcomes of waits that have ended.
#[derive(Debug)]
pub(crate) struct WaitQueue<T, O> {
    waiting: BTreeMap<Number, Waiter<T>>,
    /// The outcomes that no future has collected yet.
    settled: BTreeMap<Number, O>,
}

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Waiter<T> {
    /// What the owner of the queue knows of the request.
    pub(crate) request: T,
    /// When the task wakes if the wait has not ended by then.
    timer: Timer,
    /// The task that polled the wait last, unless it was woken or runs since.
    waker: Option<Waker>,
}

/// What a request had when it left the queue.
#[derive(Debug, PartialEq)]
pub(crate) enum Left<T, O> {
    /// It waited.
    Waiting(T),
    /// Its wait had ended with this outcome.
    Settled(O),
}

impl<T, O> Default for WaitQueue<T, O> {
    fn default() -> Self {
        WaitQueue {
            waiting: BTreeMap::new(),
            settled: BTreeMap::new(),
        }
    }
}

impl<T, O> WaitQueue<T, O> {
    /// Returns how many requests wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns whether no request waits and all outcomes were collected.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.settled.is_empty()
    }

    /// Adds a request that waits. Its task wakes at `wakes_at`, unless that moment is changed.
    pub(crate) fn enter(&mut self, number: Number, request: T, wakes_at: Instant) {
        self.waiting.insert(
            number,
            Waiter {
                request,
                timer: Timer::at(wakes_at),
                waker: None,
            },
        );
    }

    /// Adds a request that does not wait, but has an outcome to collect.
    pub(crate) fn enter_settled(&mut self, number: Number, outcome: O) {
        self.settled.insert(number, outcome);
    }

    /// Removes a request, whether its wait has ended or not.
    pub(crate) fn leave(&mut self, number: Number) -> Option<Left<T, O>> {
        match self.waiting.remove(&number) {
            Some(waiter) => Some(Left::Waiting(waiter.request)),
            None => self.settled.remove(&number).map(Left::Settled),
        }
    }

    /// Returns the outcome of a wait that has ended. The queue forgets the request.
    pub(crate) fn collect(&mut self, number: Number) -> Option<O> {
        self.settled.remove(&number)
    }

    /// Notes that the task of a request runs. The end of its wait does not wake it, unless it
    /// [registers](Waiter::register) again.
    pub(crate) fn runs(&mut self, number: Number) {
        if let Some(waiter) = self.waiting.get_mut(&number) {
            waiter.waker = None;
        }
    }

    /// Ends the wait of a request.
    ///
    /// # Errors
    ///
    /// The outcome, if the request does not wait.
    pub(crate) fn settle(
        &mut self,
        number: Number,
        outcome: O,
        wakers: &mut Wakers,
    ) -> Result<(), O> {
        let Some(waiter) = self.waiting.remove(&number) else {
            return Err(outcome);
        };
        self.settled.insert(number, outcome);
        wakers.add(waiter.waker);
        Ok(())
    }

    /// Ends the wait of the first request, and returns what its owner knew of it.
    pub(crate) fn settle_first(&mut self, outcome: O, wakers: &mut Wakers) -> Option<T> {
        let (number, waiter) = self.waiting.pop_first()?;
        self.settled.insert(number, outcome);
        wakers.add(waiter.waker);
        Some(waiter.request)
    }

    /// Ends the wait of each request for which `outcome` returns one. Returns how many these are.
    pub(crate) fn settle_where(
        &mut self,
        mut outcome: impl FnMut(Number, &T) -> Option<O>,
        wakers: &mut Wakers,
    ) -> usize {
        let mut ended = Vec::new();
        for (number, waiter) in &self.waiting {
            if let Some(outcome) = outcome(*number, &waiter.request) {
                ended.push((*number, outcome));
            }
        }
        let count = ended.len();
        for (number, outcome) in ended {
            // It waits, so there is no error.
            let _ = self.settle(number, outcome, wakers);
        }
        count
    }

    /// Wakes the tasks of the requests that `which` selects. The requests go on waiting.
    pub(crate) fn wake_where(&mut self, which: impl Fn(&T) -> bool, wakers: &mut Wakers) {
        for waiter in self.waiting.values_mut() {
            if which(&waiter.request) {
                wakers.add(waiter.waker.take());
            }
        }
    }

    /// Returns a request that waits.
    pub(crate) fn get(&self, number: Number) -> Option<&Waiter<T>> {
        self.waiting.get(&number)
    }

    /// Returns a request that waits.
    pub(crate) fn get_mut(&mut self, number: Number) -> Option<&mut Waiter<T>> {
        self.waiting.get_mut(&number)
    }

    /// Returns the requests whose outcomes no future has collected, in order.
    pub(crate) fn uncollected(&self) -> impl Iterator<Item = (Number, &O)> {
        self.settled
            .iter()
            .map(|(number, outcome)| (*number, outcome))
    }

    /// Returns the numbers in `range` of the requests that wait, in order.
    pub(crate) fn numbers(
        &self,
        range: impl RangeBounds<Number>,
    ) -> impl DoubleEndedIterator<Item = Number> {
        self.waiting.range(bounds(range)).map(|(number, _)| *number)
    }

    /// Returns the requests that wait, in order.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (Number, &Waiter<T>)> {
        self.waiting
            .iter()
            .map(|(number, waiter)| (*number, waiter))
    }

    /// Returns the requests that wait with numbers in `range`, in order.
    pub(crate) fn iter_mut(
        &mut self,
        range: impl RangeBounds<Number>,
    ) -> impl DoubleEndedIterator<Item = (Number, &mut Waiter<T>)> {
        self.waiting
            .range_mut(bounds(range))
            .map(|(number, waiter)| (*number, waiter))
    }
}

/// Makes one type of all ranges: a map has a copy of its search for each type.
fn bounds(range: impl RangeBounds<Number>) -> (Bound<Number>, Bound<Number>) {
    (range.start_bound().cloned(), range.end_bound().cloned())
}

impl<T> Waiter<T> {
    /// Returns when the task wakes if the wait has not ended by then.
    pub(crate) fn wakes_at(&self) -> Instant {
        self.timer.moment()
    }

    /// Changes when the task wakes if the wait has not ended by then.
    pub(crate) fn wake_at(&mut self, at: Instant) {
        self.timer.set(at);
    }

    /// Registers the task that polls the wait. It wakes when the wait ends, or at
    /// [`wakes_at`](Self::wakes_at). If that moment has come, the task is woken at once.
    pub(crate) fn register(&mut self, cx: &mut Context<'_>) {
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => self.waker = Some(cx.waker().clone()),
        }
        self.timer.wake(cx);
    }
}
