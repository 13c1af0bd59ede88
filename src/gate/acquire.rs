//! Waiting for a permit: the place in the line, and the future that users hold.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::flight::Unseated;
use super::limiter::{Entry, Limiter, Reached, Started, refused, report, told};
use super::line::{Place, next_number};
use super::permit::{Permit, Wait};
use super::queue::{ANSWER, Number};
use super::seat::{Seat, Sitting};
use super::slot::{Patience, Settled, Slot};
use crate::clock::{self, Timer};
use crate::error::{Limited, Report, StoreError};
use crate::events;
use crate::key::Key;
use crate::store::Refusal;

/// One who waits: for a seat, where calls in flight are limited, then for a slot. Dropping it gives up its place.
#[derive(Debug)]
pub(crate) struct Waiter {
    limiter: Limiter,
    key: Key,
    host: Option<Key>,
    place: Place,
    stage: Stage,
    seat: Option<Seat>,
    since: Instant,
    label: Box<str>,
}

// ForSeat => InLine | Held | Nowhere
// InLine, Held => Nowhere
// Nowhere => InLine, when the permit died before it could be used
#[derive(Debug)]
enum Stage {
    ForSeat {
        number: Number,
        until: Instant,
        timer: Option<Timer>,
    },
    InLine,
    /// Where no rate is limited, and the key is held.
    Held {
        until: Instant,
        timer: Option<Timer>,
    },
    Nowhere,
}

impl Waiter {
    pub(super) fn new(
        limiter: Limiter,
        &Entry { key, cost, host, .. }: &Entry,
        patience: Patience,
        since: Instant,
        label: Box<str>,
    ) -> Self {
        let place = Place { number: 0, cost, patience, turns: 1 };
        Waiter { limiter, key, host, place, stage: Stage::Nowhere, seat: None, since, label }
    }

    /// It waits for a seat.
    pub(super) fn for_seat(mut self, number: Number) -> Self {
        let latest = self.place.patience.latest;
        // One who cannot wait still waits for what the store answers.
        let until = if latest <= self.since { clock::after(self.since, ANSWER) } else { latest };
        self.stage = Stage::ForSeat { number, until, timer: None };
        self
    }

    /// It waits for a slot.
    pub(super) fn in_line(mut self, number: Number, seat: Option<Seat>) -> Self {
        self.place.number = number;
        (self.stage, self.seat) = (Stage::InLine, seat);
        self
    }

    /// It waits for the end of a hold.
    pub(super) fn held_until(mut self, until: Instant, seat: Option<Seat>) -> Self {
        self.place.number = next_number();
        (self.stage, self.seat) = (Stage::Held { until, timer: None }, seat);
        self
    }

    /// Its permit died before it could be used: it waits in its old place.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        let (slot, seat) = permit.into_parts();
        self.seat = seat;
        let Some(slot) = slot else { return };
        self.stage = Stage::InLine;
        let place = &mut self.place;
        // Without room for the line, the next poll finds no place and ends the wait.
        let opened = self.limiter.open_line(self.key, clock::now(), |line, desk, wakers| {
            ((), line.return_late(desk, place, slot, wakers))
        });
        if opened.is_err() {
            self.limiter.give_back(self.key, slot);
        }
    }

    fn permit(&mut self, slot: Option<Slot>, now: Instant) -> Permit {
        let (turns, label) = (self.place.turns, self.label.clone());
        let waited = now.saturating_duration_since(self.since);
        events::waited(&label, waited, turns);
        let permit = Permit::new(self.limiter.clone(), self.key, slot, self.seat.take());
        permit.after(Wait { label, waited, turns, host: self.host })
    }

    fn report(&self, refusal: Refusal, now: Instant) -> Report {
        report(self.label.clone(), refusal, self.since, now, self.place.turns)
    }

    fn failed(&mut self, source: StoreError, now: Instant) -> Result<Permit, Limited> {
        if self.limiter.passes(&source) {
            events::passed(&self.label, &source);
            return Ok(self.permit(None, now));
        }
        Err(told(Limited::Store { source, report: self.report(Refusal::NEVER, now) }))
    }

    fn settled(&mut self, settled: Settled, now: Instant) -> Result<Permit, Limited> {
        self.stage = Stage::Nowhere;
        match settled {
            Settled::Granted(slot) if self.seat.as_ref().is_some_and(|seat| seat.is_lost(now)) => {
                // The process stood still while it waited for its slot.
                self.limiter.give_back(self.key, slot);
                Err(told(Limited::Store {
                    source: StoreError::SeatLost,
                    report: self.report(Refusal::NEVER, now),
                }))
            }
            Settled::Granted(slot) => Ok(self.permit(Some(slot), now)),
            Settled::Refused(refusal) => {
                let (reason, refusal) = self.limiter.why(self.key, self.place.patience, refusal, now);
                Err(refused(reason, self.report(refusal, now)))
            }
            Settled::Failed(source) => self.failed(source, now),
        }
    }

    /// It waits for its seat, and then lines up for a slot. Ready when that is not needed, or not to be had.
    fn poll_seat(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Permit, Limited>> {
        let Stage::ForSeat { number, until, timer } = &mut self.stage else { return Poll::Pending };
        let number = *number;
        let key = self.key;
        let seated = match self.limiter.poll_seat(key, number, now, cx) {
            Poll::Ready(seated) => seated,
            Poll::Pending => {
                ready!(timer.get_or_insert_with(|| Timer::at(*until)).poll(cx));
                self.limiter.leave_seats(key, number);
                Err(Unseated::Refused)
            }
        };
        self.stage = Stage::Nowhere;
        if self.place.patience.is_none {
            // It waited for the store's answer alone, and asks for its slot as it asked for its seat.
            self.place.patience.latest = self.place.patience.latest.max(now);
        }
        let patience = self.place.patience;
        let reached = match self.limiter.seated(key, patience, seated) {
            Sitting::Sits(seat) => {
                self.seat = seat;
                let entry = Entry { key, cost: self.place.cost, deadline: None, host: self.host };
                self.limiter.line_up(&entry, patience, now)
            }
            Sitting::Ended(reached) => reached,
            Sitting::Waits(_) => unreachable!("its wait has ended"),
        };
        Poll::Ready(match reached {
            Reached::Slot(slot) => Ok(self.permit(slot, now)),
            Reached::Place(number) => {
                self.place.number = number;
                self.stage = Stage::InLine;
                return Poll::Pending;
            }
            Reached::Later(until) => {
                self.place.number = next_number();
                self.stage = Stage::Held { until, timer: None };
                return Poll::Pending;
            }
            Reached::Refused(reason, refusal) => Err(refused(reason, self.report(refusal, now))),
            Reached::Failed(source) => self.failed(source, now),
        })
    }
}

impl Future for Waiter {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let waiter = &mut *self;
        if let Poll::Ready(done) = waiter.poll_seat(now, cx) {
            return Poll::Ready(done);
        }
        match &mut waiter.stage {
            Stage::InLine => {}
            Stage::Held { until, timer } => {
                let Place { number, patience, .. } = waiter.place;
                let Some(left) = waiter.limiter.poll_hold(waiter.key, number, now, cx) else {
                    waiter.stage = Stage::Nowhere;
                    return Poll::Ready(Ok(waiter.permit(None, now)));
                };
                let end = clock::after(now, left);
                if end > patience.latest {
                    waiter.limiter.leave_hold(waiter.key, number);
                    let refusal = Refusal { wait: Some(left), limit: None };
                    return Poll::Ready(waiter.settled(Settled::Refused(refusal), now));
                }
                if end != *until {
                    (*until, *timer) = (end, None);
                }
                ready!(timer.get_or_insert_with(|| Timer::at(end)).poll(cx));
                // It was due between asking the time and asking the timer.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Stage::ForSeat { .. } | Stage::Nowhere => return Poll::Pending,
        }
        let place = &mut waiter.place;
        let polled =
            waiter.limiter.at_line(waiter.key, now, |line, desk, wakers| line.poll(desk, place, cx, wakers));
        let polled = polled.unwrap_or(Poll::Ready(Settled::Refused(Refusal::NEVER)));
        polled.map(|settled| waiter.settled(settled, now))
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        match self.stage {
            Stage::ForSeat { number, .. } => self.limiter.leave_seats(self.key, number),
            Stage::InLine => {
                let place = &self.place;
                self.limiter.at_line(self.key, clock::now(), |line, desk, wakers| {
                    ((), line.leave(desk, place, wakers))
                });
            }
            Stage::Held { .. } => self.limiter.leave_hold(self.key, self.place.number),
            Stage::Nowhere => {}
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
                    let started = limiter.start(entry, || limiter.label(entry.key, None));
                    let Step::New(limiter, entry) = std::mem::replace(&mut self.0, Step::Done) else {
                        continue;
                    };
                    match started {
                        Started::Granted(slot, seat) => {
                            return Poll::Ready(Ok(Permit::new(limiter, entry.key, slot, seat)));
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
