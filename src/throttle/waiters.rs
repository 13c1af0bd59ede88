//! The waiters of one key: a paced queue in real time, with wakers and timers.
//!
//! Each waiter has a timer. Only the timer of the first waiter without a permit follows the queue's next slot; the
//! timer of every other waiter fires when that waiter must give up. So a slot wakes one task, not all of them.
//!
//! Every change of the queue ends in [`Waiters::grant_due`], which grants what is due and sets that timer.

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::paced_queue::{Flight, Number, PacedQueue};
use super::peer_view::Mark;
use super::sync_state::{CasRequest, StoreChange};
use super::sync_task_state::SyncTaskState;
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::key_map::Evict;
use crate::signal::Signal;
use crate::store::Register;
use crate::wakers::Wakers;

/// How long a request that cannot wait for its turn waits for an answer of the store.
const LONGEST_QUESTION: Duration = Duration::from_secs(1);

/// How long the pace of an idle key is worth keeping.
const WORTHLESS_AFTER: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(super) struct Waiters {
    pub(super) queue: PacedQueue,
    waiting: BTreeMap<Number, Waiter>,
    /// When a request arrived or was answered last, or the key was held or released.
    last_used: Instant,
    sync_task: SyncTaskState,
    /// The tasks that wait until the register has what happened here.
    written_wakers: Vec<Waker>,
}

/// A request that waits for its turn.
#[derive(Debug)]
struct Waiter {
    /// Until when the request can wait for its turn.
    latest: Instant,
    /// Until when the request waits at least for the store to say whether it may leave at once.
    answer_by: Instant,
    /// The request's turn, which its task has not collected yet.
    granted: Option<Flight>,
    /// The moment at which the timer stands.
    wakes_at: Instant,
    timer: Option<Timer>,
    waker: Option<Waker>,
}

/// Why a request cannot wait for its turn, and when it could have left if that is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct TooLate {
    /// Whether the key is on hold for longer than the request can wait.
    pub(super) is_held: bool,
    pub(super) retry_at: Option<Instant>,
}

/// What the sync task does next.
pub(super) enum NextSync {
    Send(CasRequest),
    SleepUntil(Instant),
    End,
}

/// What becomes of a request that arrives.
pub(super) enum Arrival {
    Leaves(Flight),
    Waits(Number),
    TooLate(TooLate),
    /// Too many requests wait.
    Full,
}

impl Waiters {
    pub(super) fn new(queue: PacedQueue, now: Instant) -> Self {
        Waiters {
            queue,
            waiting: BTreeMap::new(),
            last_used: now,
            sync_task: SyncTaskState::Absent,
            written_wakers: Vec::new(),
        }
    }

    /// Admits or queues a request that arrives now and can wait until `latest`, unless `max_queue` others wait.
    pub(super) fn arrived(
        &mut self,
        latest: Instant,
        max_queue: usize,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Arrival {
        self.last_used = now;
        if let Some(late) = self.held_beyond(latest, now) {
            return Arrival::TooLate(late);
        }
        let number = self.queue.arrived(now);
        if self.waiting.is_empty()
            && let Some(flight) = self.queue.depart(now)
        {
            // No other request waits, so the flight is this request's.
            return Arrival::Leaves(flight);
        }
        self.wait(number, latest, now);
        self.grant_due(now, Some(number), wakers);
        if let Some(flight) = self.collect(number) {
            return Arrival::Leaves(flight);
        }
        if self.waits_until(number, now) <= now {
            let late = TooLate { is_held: false, retry_at: self.queue.slot() };
            self.leave(number, now, wakers);
            return Arrival::TooLate(late);
        }
        if self.queue.waiting() > max_queue {
            self.leave(number, now, wakers);
            return Arrival::Full;
        }
        Arrival::Waits(number)
    }

    fn wait(&mut self, number: Number, latest: Instant, now: Instant) {
        let answer_by = if latest <= now { clock::after(now, LONGEST_QUESTION) } else { latest };
        let waiter = Waiter { latest, answer_by, granted: None, wakes_at: latest, timer: None, waker: None };
        self.waiting.insert(number, waiter);
    }

    /// Polls the wait of request `number`.
    pub(super) fn poll(
        &mut self,
        number: Number,
        now: Instant,
        cx: &mut Context<'_>,
        wakers: &mut Wakers,
    ) -> Poll<Result<Flight, TooLate>> {
        self.grant_due(now, Some(number), wakers);
        if let Some(flight) = self.collect(number) {
            return Poll::Ready(Ok(flight));
        }
        let is_first = self.first() == Some(number);
        let look_at = self.look_at().filter(|_| is_first);
        let latest = self.waits_until(number, now);
        let late = match self.held_beyond(latest, now) {
            Some(late) => Some(late),
            None if latest <= now => Some(TooLate { is_held: false, retry_at: self.queue.slot() }),
            None => None,
        };
        if let Some(late) = late {
            self.leave(number, now, wakers);
            return Poll::Ready(Err(late));
        }
        let Some(waiter) = self.waiting.get_mut(&number) else {
            // The request has left the queue, so nothing polls it again.
            return Poll::Pending;
        };
        waiter.wake_at(look_at.map_or(latest, |at| at.min(latest)));
        waiter.waker = Some(cx.waker().clone());
        let wakes_at = waiter.wakes_at;
        if waiter.timer.get_or_insert_with(|| Timer::at(wakes_at)).poll(cx).is_ready() {
            // The timer came due after `now` was read.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Ends the wait of request `number`. If its turn had come, the next request has it.
    pub(super) fn leave(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        match self.waiting.remove(&number).and_then(|waiter| waiter.granted) {
            Some(flight) => self.queue.unsent(flight, now),
            None => {
                self.queue.leave(number);
            }
        }
        self.grant_due(now, None, wakers);
    }

    /// Ends a request in flight with its answer. If the upstream refused the request and it can wait until `back_until`,
    /// puts it back to its old place and returns true.
    pub(super) fn answered(
        &mut self,
        flight: Flight,
        signal: &Signal,
        back_until: Option<Instant>,
        now: Instant,
        wakers: &mut Wakers,
    ) -> bool {
        self.last_used = now;
        let number = flight.number;
        let held_before = self.queue.pace_state.held_until;
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
        self.wake_held(held_before, wakers);
        self.grant_due(now, None, wakers);
        is_back
    }

    /// Ends a request in flight without an answer.
    pub(super) fn lost(&mut self, flight: Flight, now: Instant, wakers: &mut Wakers) {
        self.queue.lost(flight, now);
        self.grant_due(now, None, wakers);
    }

    /// Ends a request that was not sent although its turn had come.
    pub(super) fn unsent(&mut self, flight: Flight, now: Instant, wakers: &mut Wakers) {
        self.queue.unsent(flight, now);
        self.grant_due(now, None, wakers);
    }

    /// Holds the key until `until`.
    pub(super) fn hold_until(&mut self, until: Instant, now: Instant, wakers: &mut Wakers) {
        self.last_used = now;
        self.queue.hold_until(until, now);
        self.wake_held(None, wakers);
        self.grant_due(now, None, wakers);
    }

    /// Ends the hold of the key.
    pub(super) fn release(&mut self, now: Instant, wakers: &mut Wakers) {
        self.last_used = now;
        self.queue.release(now);
        self.grant_due(now, None, wakers);
    }

    /// Grants every turn that is due, and sets the timer of the first waiter without one. The task that waits for request
    /// `polled` runs already, so it is not woken.
    fn grant_due(&mut self, now: Instant, polled: Option<Number>, wakers: &mut Wakers) {
        while let Some(flight) = self.queue.depart(now) {
            let number = flight.number;
            let Some(waiter) = self.waiting.get_mut(&number) else {
                self.queue.unsent(flight, now);
                continue;
            };
            waiter.granted = Some(flight);
            if polled != Some(number) {
                wakers.add(waiter.waker.take());
            }
        }
        let look_at = self.look_at();
        if let Some(first) = self.waiting.values_mut().find(|waiter| waiter.granted.is_none())
            && let Some(at) = look_at
        {
            first.wake_at(at.min(first.latest));
        }
    }

    /// Takes the turn of request `number`, if it has come.
    fn collect(&mut self, number: Number) -> Option<Flight> {
        let flight = self.waiting.get_mut(&number)?.granted.take()?;
        self.waiting.remove(&number);
        Some(flight)
    }

    /// Returns the first request that waits for its turn.
    fn first(&self) -> Option<Number> {
        self.waiting.iter().find(|(_, waiter)| waiter.granted.is_none()).map(|(number, _)| *number)
    }

    /// Returns when to poll the first waiter again if nothing else happens.
    fn look_at(&self) -> Option<Instant> {
        self.queue.look_at().into_iter().chain(self.sync_task.late_at(&self.queue)).min()
    }

    /// Returns until when request `number` waits. A request that cannot wait for its turn still waits for an answer of the
    /// store, if one is under way.
    fn waits_until(&self, number: Number, now: Instant) -> Instant {
        let Some(waiter) = self.waiting.get(&number) else { return now };
        match self.queue.awaits_register() {
            true => waiter.latest.max(waiter.answer_by),
            false => waiter.latest,
        }
    }

    /// Returns the refusal of a request that can wait until `latest`, if the key is on hold for longer.
    fn held_beyond(&self, latest: Instant, now: Instant) -> Option<TooLate> {
        let until = self.queue.pace_state.held_until.filter(|until| *until > now && *until > latest)?;
        Some(TooLate { is_held: true, retry_at: Some(until) })
    }

    /// If the hold ends later than `held_before`, wakes the waiters that cannot wait for its end.
    fn wake_held(&mut self, held_before: Option<Instant>, wakers: &mut Wakers) {
        let Some(until) = self.queue.pace_state.held_until.filter(|until| Some(*until) > held_before) else {
            return;
        };
        for waiter in self.waiting.values_mut().filter(|waiter| waiter.latest < until) {
            wakers.add(waiter.waker.take());
        }
    }

    // ── for a pace that processes share ──

    /// Waits until the register has everything that happened before `mark`. If it has not, wakes the task once it has, and
    /// returns the moment at which to poll again at the latest.
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
        Err(self.sync_task.late_at(&self.queue).unwrap_or_else(|| SyncTaskState::late_if_called(now)))
    }

    fn wake_written(&mut self, wakers: &mut Wakers) {
        self.written_wakers.drain(..).for_each(|waker| wakers.add(Some(waker)));
    }

    /// Calls the sync task if a compare-and-set is due. Returns the number of a task to start if none serves the key, or
    /// if the one that does is late.
    pub(super) fn needs_sync_task(&mut self, now: Instant, wakers: &mut Wakers) -> Option<u64> {
        if self.sync_task.is_late(&self.queue, now) {
            // The runtime of the task makes no progress, or the store does not answer.
            self.queue.cas_answered(Err(StoreError::Lost), now, now);
            self.sync_task = SyncTaskState::Absent;
            self.wake_written(wakers);
            self.grant_due(now, None, wakers);
        }
        let due = self.queue.next_cas_at()?;
        self.sync_task.call(due, now, wakers)
    }

    /// Returns what sync task `number` does next. A task that sleeps is woken if something is due earlier.
    pub(super) fn next_sync(&mut self, number: u64, now: Instant, cx: &Context<'_>) -> NextSync {
        if !self.sync_task.is(number) {
            return NextSync::End;
        }
        let request = self.queue.next_cas(now);
        let at = self.queue.next_cas_at();
        if request.is_none() && at.is_none() {
            self.sync_task = SyncTaskState::Absent;
            return NextSync::End;
        }
        self.sync_task.ran(number, at, cx);
        match (request, at) {
            (Some(request), _) => NextSync::Send(request),
            (None, Some(at)) => NextSync::SleepUntil(at),
            (None, None) => NextSync::End,
        }
    }

    /// Takes the store's answer to the compare-and-set that sync task `number` sent at `sent`.
    pub(super) fn cas_answered(
        &mut self,
        number: u64,
        answer: Result<Register, StoreError>,
        sent: Instant,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Option<StoreChange> {
        if !self.sync_task.is(number) {
            return None;
        }
        let held_before = self.queue.pace_state.held_until;
        let change = self.queue.cas_answered(answer, sent, now);
        self.wake_written(wakers);
        self.peers_changed(held_before, now, wakers);
        change
    }

    /// Notes that sync task `number` was dropped with its runtime, and wakes the waiters, whose tasks start another.
    /// `sent` is when it sent a compare-and-set that is not answered.
    pub(super) fn sync_task_lost(
        &mut self,
        number: u64,
        sent: Option<Instant>,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        if !self.sync_task.is(number) {
            return;
        }
        self.sync_task = SyncTaskState::Absent;
        self.wake_written(wakers);
        if let Some(sent) = sent {
            self.queue.cas_answered(Err(StoreError::Lost), sent, now);
        }
        self.waiting.values_mut().for_each(|waiter| wakers.add(waiter.waker.take()));
    }

    /// Takes the register that another process has written.
    pub(super) fn register_changed(&mut self, register: Register, now: Instant, wakers: &mut Wakers) {
        let held_before = self.queue.pace_state.held_until;
        self.queue.register_changed(register, now);
        self.peers_changed(held_before, now, wakers);
    }

    fn peers_changed(&mut self, held_before: Option<Instant>, now: Instant, wakers: &mut Wakers) {
        self.wake_held(held_before, wakers);
        self.grant_due(now, None, wakers);
        // The requests that waited only for the store's answer have it now.
        for waiter in self.waiting.values_mut().filter(|waiter| waiter.latest <= now) {
            wakers.add(waiter.waker.take());
        }
    }
}

impl Waiter {
    fn wake_at(&mut self, at: Instant) {
        if self.wakes_at == at {
            return;
        }
        self.wakes_at = at;
        if let Some(timer) = &mut self.timer {
            timer.set(at);
        }
    }
}

impl Evict for Waiters {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        let is_idle = self.waiting.is_empty() && self.queue.in_flight == 0;
        is_idle.then(|| {
            self.queue.pace_state.held_until.map_or(self.last_used, |until| until.max(self.last_used))
        })
    }

    fn worthless_from(&self) -> Option<Instant> {
        Some(clock::after(self.idle_from()?, WORTHLESS_AFTER))
    }
}
