//! Waiting for a permit: the place in the line, and the future that users hold.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use super::limiter::{Entry, Limiter, Started, report, told};
use super::line::Place;
use super::permit::{Permit, Wait};
use super::queue::Number;
use super::slot::{Patience, Settled};
use crate::clock;
use crate::error::Limited;
use crate::events;
use crate::key::Key;
use crate::store::Refusal;

/// A place in the line. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Waiter {
    limiter: Limiter,
    key: Key,
    place: Place,
    /// Whether it is in the line now.
    waits: bool,
    since: Instant,
    label: Box<str>,
}

impl Waiter {
    pub(super) fn new(
        limiter: Limiter,
        &Entry { key, cost, .. }: &Entry,
        number: Number,
        patience: Patience,
        since: Instant,
        label: Box<str>,
    ) -> Self {
        let place = Place { number, cost, patience, turns: 1 };
        Waiter { limiter, key, place, waits: true, since, label }
    }

    /// Its permit died before it could be used: it waits in its old place.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        let Some(slot) = permit.into_slot() else { return };
        self.waits = true;
        let place = &mut self.place;
        // Without room for the line, the next poll finds no place and ends the wait.
        let opened = self.limiter.open_line(self.key, clock::now(), |line, desk, wakers| {
            ((), line.return_late(desk, place, slot, wakers))
        });
        if opened.is_err() {
            self.limiter.give_back(self.key, slot);
        }
    }

    fn settled(&mut self, settled: Settled, now: Instant) -> Result<Permit, Limited> {
        self.waits = false;
        let turns = self.place.turns;
        let label = self.label.clone();
        match settled {
            Settled::Granted(slot) => {
                let waited = now.saturating_duration_since(self.since);
                events::waited(&label, waited, turns);
                let permit = Permit::new(self.limiter.clone(), self.key, Some(slot));
                Ok(permit.after(Wait { label, waited, turns }))
            }
            Settled::Refused(refusal) => {
                let reason = self.place.patience.reason(self.limiter.max_wait());
                let report = report(label, self.limiter.which(refusal), self.since, now, turns);
                Err(told(Limited::Local { reason, report }))
            }
            Settled::Failed(source) if self.limiter.passes(&source) => {
                events::passed(&label, &source);
                let waited = now.saturating_duration_since(self.since);
                Ok(Permit::new(self.limiter.clone(), self.key, None).after(Wait { label, waited, turns }))
            }
            Settled::Failed(source) => {
                let report = report(label, Refusal::NEVER, self.since, now, turns);
                Err(told(Limited::Store { source, report }))
            }
        }
    }
}

impl Future for Waiter {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let waiter = &mut *self;
        let place = &mut waiter.place;
        let polled =
            waiter.limiter.at_line(waiter.key, now, |line, desk, wakers| line.poll(desk, place, cx, wakers));
        let polled = polled.unwrap_or(Poll::Ready(Settled::Refused(Refusal::NEVER)));
        polled.map(|settled| waiter.settled(settled, now))
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.waits {
            let place = &self.place;
            self.limiter
                .at_line(self.key, clock::now(), |line, desk, wakers| ((), line.leave(desk, place, wakers)));
        }
    }
}

/// The future of a [`Permit`]; made by [`Limiter::acquire`], which tells its errors and cancel safety.
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Acquire(Step);

// New => Waiting | done
// Waiting => done
#[derive(Debug)]
enum Step {
    New(Limiter, Entry),
    Waiting(Box<Waiter>),
    Done,
}

impl Acquire {
    pub(super) fn new(limiter: Limiter, entry: Entry) -> Self {
        Acquire(Step::New(limiter, entry))
    }

    /// The units it takes. Default: 1. A cost of 0 passes at once.
    ///
    /// Has no effect once the future was polled; nor has [`deadline`](Acquire::deadline).
    pub fn cost(mut self, cost: u32) -> Self {
        if let Step::New(_, entry) = &mut self.0 {
            entry.cost = cost;
        }
        self
    }

    /// The moment by which the request must leave; `max_wait` holds besides. Default: none.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        if let Step::New(_, entry) = &mut self.0 {
            entry.deadline = Some(deadline);
        }
        self
    }
}

impl Future for Acquire {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                Step::New(limiter, entry) => {
                    let started = limiter.start(entry, || entry.key.label(None));
                    let Step::New(limiter, entry) = std::mem::replace(&mut self.0, Step::Done) else {
                        continue;
                    };
                    match started {
                        Started::Granted(slot) => {
                            return Poll::Ready(Ok(Permit::new(limiter, entry.key, slot)));
                        }
                        Started::Limited(limited) => return Poll::Ready(Err(limited)),
                        Started::Waiting(waiter) => self.0 = Step::Waiting(waiter),
                    }
                }
                Step::Waiting(waiter) => {
                    let polled = Pin::new(&mut **waiter).poll(cx);
                    if polled.is_ready() {
                        self.0 = Step::Done;
                    }
                    return polled;
                }
                Step::Done => panic!("an Acquire future was polled after it was ready"),
            }
        }
    }
}
