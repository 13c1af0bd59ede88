//! Waiting for a permit: the place in the line, and the future that users hold.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::engine::{Entry, Limiter, Reached, Started, refused, report, told};
use super::hosts::apart;
use super::in_flight::Unseated;
use super::key_state::{Place, next_number};
use super::permit::{Permit, Wait};
use super::queue::{ANSWER, Number};
use super::reservation::{Patience, Settled, Slot};
use super::seat::{Seat, Sitting};
use crate::clock::{self, Timer};
use crate::error::{Limited, Reason, Report, StoreError};
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

// Apart => ForSeat | InLine | Held | Nowhere
// ForSeat => InLine | Held | Nowhere
// InLine, Held => Nowhere | Apart, if its host was held meanwhile
// Nowhere => InLine, when the permit died before it could be used
#[derive(Debug)]
enum Stage {
    /// The requests to its host are held, and not those to others.
    Apart {
        until: Instant,
        timer: Option<Timer>,
    },
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
        // It watches the hold of its host under this number, wherever it waits.
        let number = if apart(key, host).is_some() { next_number() } else { 0 };
        let place = Place { number, cost, patience, turns: 1 };
        Waiter { limiter, key, host, place, stage: Stage::Nowhere, seat: None, since, label }
    }

    /// It waits for a seat.
    pub(super) fn for_seat(mut self, number: Number) -> Self {
        self.wait_for_seat(number, self.since);
        self
    }

    fn wait_for_seat(&mut self, number: Number, now: Instant) {
        let latest = self.place.patience.latest;
        // One who cannot wait still waits for what the store answers.
        let until = if latest <= now { clock::after(now, ANSWER) } else { latest };
        self.stage = Stage::ForSeat { number, until, timer: None };
    }

    /// It waits for the end of the hold of its host.
    pub(super) fn held_apart(mut self, until: Instant) -> Self {
        self.stage = Stage::Apart { until, timer: None };
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
        let sitting = self.limiter.seated(key, self.place.patience, seated);
        self.sits(sitting, now).map_or(Poll::Pending, Poll::Ready)
    }

    /// It lines up for a slot, unless it waits for a seat. Returns how its wait has ended, if it has.
    fn sits(&mut self, sitting: Sitting, now: Instant) -> Option<Result<Permit, Limited>> {
        let (key, patience) = (self.key, self.place.patience);
        let reached = match sitting {
            Sitting::Sits(seat) => {
                self.seat = seat;
                let entry = Entry { key, cost: self.place.cost, deadline: None, host: self.host };
                // One that waited for the end of a hold has a number, and so its place before those that came later.
                let number = (self.place.number > 0).then_some(self.place.number);
                self.limiter.line_up(&entry, number, patience, now)
            }
            Sitting::Ended(reached) => reached,
            Sitting::Waits(number) => {
                self.wait_for_seat(number, now);
                return None;
            }
        };
        match reached {
            Reached::Slot(slot) => Some(Ok(self.permit(slot, now))),
            Reached::Place(number) => {
                self.place.number = number;
                self.stage = Stage::InLine;
                None
            }
            Reached::Later(until) => {
                if self.place.number == 0 {
                    self.place.number = next_number();
                }
                self.stage = Stage::Held { until, timer: None };
                None
            }
            Reached::Refused(reason, refusal) => Some(Err(refused(reason, self.report(refusal, now)))),
            Reached::Failed(source) => Some(self.failed(source, now)),
        }
    }

    /// It waits for the end of the hold of its host, and then comes for a seat and a slot. Returns how its wait has ended, if
    /// it has.
    fn poll_apart(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Option<Result<Permit, Limited>>> {
        let Some(hold) = apart(self.key, self.host) else { return Poll::Ready(None) };
        let Place { number, patience, .. } = self.place;
        if let Some(left) = self.limiter.poll_apart(hold, number, now, cx) {
            // What it has would keep others waiting.
            self.leave_place();
            let end = clock::after(now, left);
            if end > patience.latest {
                let report = self.report(Refusal { wait: Some(left), limit: None }, now);
                return Poll::Ready(Some(Err(refused(Reason::Held, report))));
            }
            let mut timer = match std::mem::replace(&mut self.stage, Stage::Nowhere) {
                Stage::Apart { until, timer } if until == end => timer,
                _ => None,
            };
            let is_over = timer.get_or_insert_with(|| Timer::at(end)).poll(cx).is_ready();
            self.stage = Stage::Apart { until: end, timer };
            if is_over {
                // It was due between asking the time and asking the timer.
                cx.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        if !matches!(self.stage, Stage::Apart { .. }) {
            return Poll::Ready(None);
        }
        self.stage = Stage::Nowhere;
        let sitting = match &self.limiter.0.flights {
            Some(flights) => self.limiter.sit(flights, self.key, patience, now),
            None => Sitting::Sits(None),
        };
        Poll::Ready(self.sits(sitting, now))
    }

    /// Its turn has come: whether it may leave, or its host was held meanwhile. Then it gives up what it has and waits again.
    fn leaves(&mut self, permit: Permit, now: Instant) -> Option<Permit> {
        let hold = apart(self.key, self.host);
        let Some(left) = hold.and_then(|hold| self.limiter.leaves_apart(hold, now)) else {
            return Some(permit);
        };
        if let (Some(slot), _) = permit.into_parts() {
            self.limiter.give_back(self.key, slot);
        }
        self.place.turns += 1;
        self.stage = Stage::Apart { until: clock::after(now, left), timer: None };
        None
    }
}

impl Future for Waiter {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let now = clock::now();
            let done = match ready!(self.poll_apart(now, cx)) {
                Some(done) => done,
                None => ready!(self.poll_permit(now, cx)),
            };
            match done {
                Ok(permit) => {
                    if let Some(permit) = self.leaves(permit, now) {
                        return Poll::Ready(Ok(permit));
                    }
                }
                Err(limited) => return Poll::Ready(Err(limited)),
            }
        }
    }
}

impl Waiter {
    fn poll_permit(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Permit, Limited>> {
        let waiter = self;
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
            Stage::Apart { .. } | Stage::ForSeat { .. } | Stage::Nowhere => return Poll::Pending,
        }
        let place = &mut waiter.place;
        let polled =
            waiter.limiter.at_line(waiter.key, now, |line, desk, wakers| line.poll(desk, place, cx, wakers));
        let polled = polled.unwrap_or(Poll::Ready(Settled::Refused(Refusal::NEVER)));
        polled.map(|settled| waiter.settled(settled, now))
    }
}

impl Waiter {
    /// Gives up its place, and its seat if it has one. A wait for the hold of its host goes on.
    fn leave_place(&mut self) {
        self.seat = None;
        match self.stage {
            Stage::Apart { .. } => return,
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
        self.stage = Stage::Nowhere;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.leave_place();
        if let Some(hold) = apart(self.key, self.host) {
            self.limiter.leave_hold(hold, self.place.number);
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
