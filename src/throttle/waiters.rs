//! The line of one key, with those who wait for it in real time.

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::paced_queue::{Flight, Number, PacedQueue};
use super::peer_view::{CasRequest, Mark, StoreChange};
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::key_map::Idle;
use crate::rng::dice;
use crate::signal::Signal;
use crate::store::Register;
use crate::wakers::Wakers;

/// How long one waits for the others' word who cannot wait for its turn.
const ANSWER: Duration = Duration::from_secs(1);

/// Who is to tell the others and does not come within it has a runtime that stands still.
const COMES: Duration = Duration::from_secs(1);

/// A store that has not answered within it is away.
const ANSWERS: Duration = Duration::from_secs(10);

/// What was learned is worth nothing any more after so long without a call.
const WORTHLESS: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(super) struct Waiters {
    queue: PacedQueue,
    waiters: BTreeMap<Number, Waiter>,
    last_used: Instant,
    /// Who tells the others, where the line is shared.
    sync_task: SyncTaskState,
    /// The tasks that wait until something is in the register.
    written_wakers: Vec<Waker>,
}

/// Whether somebody tells the others of what happens here.
#[derive(Debug)]
enum SyncTaskState {
    Nobody,
    Somebody {
        number: u64,
        /// The next moment at which something is due, if nothing happens before.
        at: Option<Instant>,
        waker: Option<Waker>,
        /// Since when it should have come.
        called: Option<Instant>,
    },
}

/// One who waits.
#[derive(Debug)]
struct Waiter {
    latest: Instant,
    /// Until when it waits at least to hear from the others whether it may leave at once.
    answer_by: Instant,
    /// It may leave.
    granted: Option<Flight>,
    /// For when its timer stands.
    wakes_at: Instant,
    timer: Option<Timer>,
    waker: Option<Waker>,
}

/// Why one can wait no longer, and when it could have left, if that is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct TooLate {
    pub(super) is_held: bool,
    pub(super) retry_at: Option<Instant>,
}

/// What the teller is to do.
pub(super) enum NextSync {
    Now(CasRequest),
    At(Instant),
    Nothing,
}

/// How one arrives.
pub(super) enum Arrival {
    Leaves(Flight),
    Waits(Number),
    TooLate(TooLate),
    Full,
}

impl Waiters {
    pub(super) fn new(queue: PacedQueue, now: Instant) -> Self {
        Waiters {
            queue,
            waiters: BTreeMap::new(),
            last_used: now,
            sync_task: SyncTaskState::Nobody,
            written_wakers: Vec::new(),
        }
    }

    /// One arrives, who can wait until `latest`.
    pub(super) fn arrived(
        &mut self,
        latest: Instant,
        most: usize,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Arrival {
        self.last_used = now;
        if let Some(over) = self.held_beyond(latest, now) {
            return Arrival::TooLate(over);
        }
        let number = self.queue.arrived(now);
        if self.waiters.is_empty()
            && let Some(flight) = self.queue.depart(now)
        {
            // Nobody else waits, so it is this one.
            return Arrival::Leaves(flight);
        }
        self.wait(number, latest, now);
        self.tend(now, Some(number), wakers);
        if let Some(flight) = self.collect(number) {
            return Arrival::Leaves(flight);
        }
        if self.patience(number, now) <= now {
            let over = TooLate { is_held: false, retry_at: self.queue.slot() };
            self.leave(number, now, wakers);
            return Arrival::TooLate(over);
        }
        if self.queue.waiting() > most {
            self.leave(number, now, wakers);
            return Arrival::Full;
        }
        Arrival::Waits(number)
    }

    fn wait(&mut self, number: Number, latest: Instant, now: Instant) {
        let answer_by = if latest <= now { clock::after(now, ANSWER) } else { latest };
        let waiter = Waiter { latest, answer_by, granted: None, wakes_at: latest, timer: None, waker: None };
        self.waiters.insert(number, waiter);
    }

    /// One who waits is polled.
    pub(super) fn poll(
        &mut self,
        number: Number,
        now: Instant,
        cx: &mut Context<'_>,
        wakers: &mut Wakers,
    ) -> Poll<Result<Flight, TooLate>> {
        self.tend(now, Some(number), wakers);
        if let Some(flight) = self.collect(number) {
            return Poll::Ready(Ok(flight));
        }
        let is_first = self.first() == Some(number);
        let look_at = self.look_at().filter(|_| is_first);
        let latest = self.patience(number, now);
        let over = match self.held_beyond(latest, now) {
            Some(over) => Some(over),
            None if latest <= now => Some(TooLate { is_held: false, retry_at: self.queue.slot() }),
            None => None,
        };
        if let Some(over) = over {
            self.leave(number, now, wakers);
            return Poll::Ready(Err(over));
        }
        let Some(waiter) = self.waiters.get_mut(&number) else {
            // It left; nobody polls it then.
            return Poll::Pending;
        };
        waiter.wakes_at(look_at.map_or(latest, |at| at.min(latest)));
        waiter.waker = Some(cx.waker().clone());
        let wakes_at = waiter.wakes_at;
        if waiter.timer.get_or_insert_with(|| Timer::at(wakes_at)).poll(cx).is_ready() {
            // It was due between asking the time and asking the timer.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// One stops waiting; if it had its turn, the next has it.
    pub(super) fn leave(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        match self.waiters.remove(&number).and_then(|waiter| waiter.granted) {
            Some(flight) => self.queue.unsent(flight, now),
            None => {
                self.queue.leave(number);
            }
        }
        self.tend(now, None, wakers);
    }

    /// An answer has come. With `back_until`, a refused call waits in its old place until then: `true`; else, or where
    /// that is too early, it ends.
    pub(super) fn answered(
        &mut self,
        flight: Flight,
        signal: &Signal,
        back_until: Option<Instant>,
        now: Instant,
        wakers: &mut Wakers,
    ) -> bool {
        self.last_used = now;
        let (number, held) = (flight.number, self.queue.held_until());
        let refused = self.queue.answered(flight, signal, now);
        let mut is_back = false;
        if let (Some(refused), Some(latest)) = (refused, back_until)
            && latest > now
            && self.held_beyond(latest, now).is_none()
        {
            self.queue.back(refused, now);
            self.wait(number, latest, now);
            is_back = true;
        }
        if self.queue.held_until() > held {
            self.wake_held(wakers);
        }
        self.tend(now, None, wakers);
        is_back
    }

    /// A call on its way ends without an answer.
    pub(super) fn lost(&mut self, flight: Flight, now: Instant, wakers: &mut Wakers) {
        self.queue.lost(flight, now);
        self.tend(now, None, wakers);
    }

    /// A call that may have left did not.
    pub(super) fn unsent(&mut self, flight: Flight, now: Instant, wakers: &mut Wakers) {
        self.queue.unsent(flight, now);
        self.tend(now, None, wakers);
    }

    /// Nothing leaves before `until`.
    pub(super) fn hold_until(&mut self, until: Instant, now: Instant, wakers: &mut Wakers) {
        self.last_used = now;
        self.queue.hold_until(until, now);
        self.wake_held(wakers);
        self.tend(now, None, wakers);
    }

    /// Ends the hold.
    pub(super) fn release(&mut self, now: Instant, wakers: &mut Wakers) {
        self.last_used = now;
        self.queue.release(now);
        self.tend(now, None, wakers);
    }

    // ── with others ──

    /// What happened here up to now, for [`poll_shared`](Self::poll_shared); `None` if the line is not shared.
    pub(super) fn mark(&self) -> Option<Mark> {
        self.queue.mark()
    }

    /// Waits until the register has all that happened before `mark`. If nothing wakes the task, it polls again at the moment
    /// that is returned.
    pub(super) fn poll_written(
        &mut self,
        mark: Mark,
        now: Instant,
        cx: &Context<'_>,
    ) -> Result<Result<(), StoreError>, Instant> {
        match self.queue.is_written(mark) {
            Ok(false) => {}
            Ok(true) => return Ok(Ok(())),
            Err(error) => return Ok(Err(error)),
        }
        if !self.written_wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            self.written_wakers.push(cx.waker().clone());
        }
        Err(self.sync_task_due_by().unwrap_or_else(|| clock::after(now, COMES)))
    }

    fn wake_written(&mut self, wakers: &mut Wakers) {
        self.written_wakers.drain(..).for_each(|waker| wakers.add(Some(waker)));
    }

    /// The number of one who is to be found to tell the others, if nobody does or who does never comes: from now on it does.
    pub(super) fn needs_sync_task(&mut self, now: Instant, wakers: &mut Wakers) -> Option<u64> {
        if self.sync_task_is_late(now) {
            // Its runtime is there and does nothing; or the store does not answer.
            self.queue.cas_answered(Err(StoreError::Lost), now, now);
            self.sync_task = SyncTaskState::Nobody;
            self.wake_written(wakers);
            self.tend(now, None, wakers);
        }
        let due = self.queue.next_cas_at()?;
        if let SyncTaskState::Somebody { at, waker, called, .. } = &mut self.sync_task {
            if at.is_none_or(|at| due < at) {
                wakers.add(waker.take());
            }
            if due <= now {
                called.get_or_insert(now);
            }
            return None;
        }
        let number = dice();
        self.sync_task = SyncTaskState::Somebody { number, at: None, waker: None, called: Some(now) };
        Some(number)
    }

    /// From when it is too late for who tells the others to come.
    fn sync_task_due_by(&self) -> Option<Instant> {
        let SyncTaskState::Somebody { called, .. } = &self.sync_task else { return None };
        match self.queue.cas_sent_at() {
            Some(asked) => Some(clock::after(asked, ANSWERS)),
            None => called.or(self.queue.next_cas_at()).map(|due| clock::after(due, COMES)),
        }
    }

    fn sync_task_is_late(&self, now: Instant) -> bool {
        let is_called = matches!(self.sync_task, SyncTaskState::Somebody { called: Some(_), .. });
        (is_called || self.queue.cas_sent_at().is_some())
            && self.sync_task_due_by().is_some_and(|by| by <= now)
    }

    /// When to look after the first who waits, if nothing happens before.
    fn look_at(&self) -> Option<Instant> {
        self.queue.look_at().into_iter().chain(self.sync_task_due_by()).min()
    }

    fn is_served_by(&self, sync_task: u64) -> bool {
        matches!(self.sync_task, SyncTaskState::Somebody { number, .. } if number == sync_task)
    }

    /// What teller `number` is to tell now; else it is woken when there is something, at the latest at a moment. Where
    /// nothing is to come, or another has taken its place, it ends.
    pub(super) fn tell(&mut self, number: u64, now: Instant, cx: &Context<'_>) -> NextSync {
        if !self.is_served_by(number) {
            return NextSync::Nothing;
        }
        let exchange = self.queue.next_cas(now);
        let at = self.queue.next_cas_at();
        self.sync_task = match exchange.is_some() || at.is_some() {
            true => {
                SyncTaskState::Somebody { number, at, waker: at.map(|_| cx.waker().clone()), called: None }
            }
            false => SyncTaskState::Nobody,
        };
        exchange.map(NextSync::Now).or(at.map(NextSync::At)).unwrap_or(NextSync::Nothing)
    }

    /// The answer of the store to teller `number`.
    pub(super) fn cas_answered(
        &mut self,
        number: u64,
        answer: Result<Register, StoreError>,
        asked: Instant,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Option<StoreChange> {
        if !self.is_served_by(number) {
            return None;
        }
        let held = self.queue.held_until();
        let away = self.queue.cas_answered(answer, asked, now);
        self.wake_written(wakers);
        self.register_adopted(held, now, wakers);
        away
    }

    /// Teller `number` is gone with its runtime: who waits finds another.
    pub(super) fn sync_task_lost(
        &mut self,
        number: u64,
        asked: Option<Instant>,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        if !self.is_served_by(number) {
            return;
        }
        self.sync_task = SyncTaskState::Nobody;
        self.wake_written(wakers);
        if let Some(asked) = asked {
            self.queue.cas_answered(Err(StoreError::Lost), asked, now);
        }
        self.waiters.values_mut().for_each(|waiter| wakers.add(waiter.waker.take()));
    }

    /// Another process has changed what is shared.
    pub(super) fn register_changed(&mut self, register: Register, now: Instant, wakers: &mut Wakers) {
        let held = self.queue.held_until();
        self.queue.register_changed(register, now);
        self.register_adopted(held, now, wakers);
    }

    /// What others did may have been missed. Answers whether anybody waits for them.
    pub(super) fn events_missed(&mut self, now: Instant) -> bool {
        self.queue.events_missed(now)
    }

    fn register_adopted(&mut self, held: Option<Instant>, now: Instant, wakers: &mut Wakers) {
        if self.queue.held_until() > held {
            self.wake_held(wakers);
        }
        self.tend(now, None, wakers);
        for waiter in self.waiters.values_mut().filter(|waiter| waiter.latest <= now) {
            wakers.add(waiter.waker.take());
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Lets all leave who may, and sets the timer of the first of the others; `me` needs no waking.
    fn tend(&mut self, now: Instant, me: Option<Number>, wakers: &mut Wakers) {
        while let Some(flight) = self.queue.depart(now) {
            let number = flight.number;
            let Some(waiter) = self.waiters.get_mut(&number) else {
                self.queue.unsent(flight, now);
                continue;
            };
            waiter.granted = Some(flight);
            if me != Some(number) {
                wakers.add(waiter.waker.take());
            }
        }
        let look_at = self.look_at();
        if let Some(first) = self.waiters.values_mut().find(|waiter| waiter.granted.is_none())
            && let Some(at) = look_at
        {
            first.wakes_at(at.min(first.latest));
        }
    }

    fn first(&self) -> Option<Number> {
        self.waiters.iter().find(|(_, waiter)| waiter.granted.is_none()).map(|(number, _)| *number)
    }

    /// Until when `number` waits. Who cannot wait at all does so for the others' word, where they are asked.
    fn patience(&self, number: Number, now: Instant) -> Instant {
        let Some(waiter) = self.waiters.get(&number) else { return now };
        if self.queue.awaits_register() { waiter.latest.max(waiter.answer_by) } else { waiter.latest }
    }

    /// The turn of `number`, if it has come.
    fn collect(&mut self, number: Number) -> Option<Flight> {
        let flight = self.waiters.get_mut(&number)?.granted.take()?;
        self.waiters.remove(&number);
        Some(flight)
    }

    fn held_beyond(&self, latest: Instant, now: Instant) -> Option<TooLate> {
        let until = self.queue.held_until().filter(|until| *until > now && *until > latest)?;
        Some(TooLate { is_held: true, retry_at: Some(until) })
    }

    /// Those who cannot wait for the end of the hold need not wait at all.
    fn wake_held(&mut self, wakers: &mut Wakers) {
        let Some(until) = self.queue.held_until() else { return };
        for waiter in self.waiters.values_mut().filter(|waiter| waiter.latest < until) {
            wakers.add(waiter.waker.take());
        }
    }
}

impl Waiter {
    fn wakes_at(&mut self, at: Instant) {
        if self.wakes_at == at {
            return;
        }
        self.wakes_at = at;
        if let Some(timer) = &mut self.timer {
            timer.set(at);
        }
    }
}

impl Idle for Waiters {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        let is_idle = self.waiters.is_empty() && self.queue.in_flight() == 0;
        is_idle.then(|| self.queue.held_until().map_or(self.last_used, |until| until.max(self.last_used)))
    }

    fn worthless_from(&self) -> Option<Instant> {
        Some(clock::after(self.idle_from()?, WORTHLESS))
    }
}
