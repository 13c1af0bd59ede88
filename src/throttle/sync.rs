//! The supervision of the sync task of one key.
//!
//! A sync task writes the register for all waiters of a key. If the store has no background, it runs in the runtime of a
//! caller, and that runtime may be dropped or make no progress. So the waiters watch the task. If it is
//! late, or was lost, the next change of the key starts another one. A task that was replaced ends
//! once it notices that its number is out of date.

use std::ops::ControlFlow;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::event_log::LogMark;
use super::paced_queue::PacedQueue;
use super::sync_state::{CasRequest, StoreChange};
use crate::clock;
use crate::error::StoreError;
use crate::rng::dice;
use crate::store::Register;
use crate::wakers::{Wakers, add_task};

/// A sync task that was called and has not run within this time belongs to a runtime that makes no
/// progress.
const LONGEST_START: Duration = Duration::from_secs(1);

/// A store that has not answered within this time is unreachable.
const LONGEST_ANSWER: Duration = Duration::from_secs(10);

/// Whether a sync task serves a key, and the tasks that wait until it has written the register.
#[derive(Debug, Default)]
pub(super) struct SyncSupervisor {
    /// The task that serves the key.
    task: Option<RunningTask>,
    written_wakers: Vec<Waker>,
    /// How the store's reachability has changed, until that is reported.
    change: Option<StoreChange>,
}

#[derive(Debug)]
struct RunningTask {
    /// A task with another number has been replaced, and ends.
    number: u64,
    /// When the task runs next, if nothing wakes it earlier.
    runs_at: Option<Instant>,
    waker: Option<Waker>,
    /// When the task was called, if it has not run since.
    called_at: Option<Instant>,
}

/// What the sync task does next.
pub(super) enum NextSync {
    Send(CasRequest),
    SleepUntil(Instant),
    End,
}

impl SyncSupervisor {
    /// Returns whether the task with this number serves the key.
    pub(super) fn is_served_by(&self, number: u64) -> bool {
        self.task.as_ref().is_some_and(|task| task.number == number)
    }

    /// Returns the moment at which the task, or its call of the store, is late.
    pub(super) fn late_at(&self, queue: &PacedQueue) -> Option<Instant> {
        let task = self.task.as_ref()?;
        match queue.cas_sent_at() {
            Some(sent) => Some(clock::after(sent, LONGEST_ANSWER)),
            None => task
                .called_at
                .or(queue.next_cas_at())
                .map(|due| clock::after(due, LONGEST_START)),
        }
    }

    /// Returns whether the task was called, or called the store, and is late.
    fn is_late(&self, queue: &PacedQueue, now: Instant) -> bool {
        let is_called = self
            .task
            .as_ref()
            .is_some_and(|task| task.called_at.is_some());
        (is_called || queue.cas_sent_at().is_some())
            && self.late_at(queue).is_some_and(|at| at <= now)
    }

    /// Polls the wait until the register has everything that happened before `mark`. If it goes on, the task is woken when
    /// the register was written, and the caller has to poll again at the returned moment at the latest.
    pub(super) fn poll_written(
        &mut self,
        queue: &PacedQueue,
        mark: LogMark,
        now: Instant,
        cx: &Context<'_>,
    ) -> ControlFlow<Result<(), StoreError>, Instant> {
        match queue.is_written(mark) {
            Ok(false) => {}
            Ok(true) => return ControlFlow::Break(Ok(())),
            Err(error) => return ControlFlow::Break(Err(error)),
        }
        add_task(&mut self.written_wakers, cx);
        let late_at = self.late_at(queue);
        ControlFlow::Continue(late_at.unwrap_or_else(|| clock::after(now, LONGEST_START)))
    }

    /// Ends the compare-and-set under way with the store's `answer`, and wakes the tasks that wait until the register is
    /// written.
    pub(super) fn cas_answered(
        &mut self,
        queue: &mut PacedQueue,
        answer: Result<Register, StoreError>,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        if let Some(change) = queue.cas_answered(answer, now) {
            self.change = Some(change);
        }
        wakers.add(self.written_wakers.drain(..));
    }

    /// Returns how the store's reachability has changed since the last call, if it has.
    pub(super) fn take_change(&mut self) -> Option<StoreChange> {
        self.change.take()
    }

    /// Gives up the task if it is late: its runtime makes no progress, or the store does not answer.
    /// Returns whether the task was late.
    pub(super) fn give_up_late_task(
        &mut self,
        queue: &mut PacedQueue,
        now: Instant,
        wakers: &mut Wakers,
    ) -> bool {
        let is_late = self.is_late(queue, now);
        if is_late {
            self.end_task(queue, now, wakers);
        }
        is_late
    }

    /// Lets a sync task run when the next compare-and-set is due. Wakes the task that serves the
    /// key, or returns the number of a task to start.
    pub(super) fn call_task(
        &mut self,
        queue: &PacedQueue,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Option<u64> {
        let due = queue.next_cas_at()?;
        let Some(task) = &mut self.task else {
            let number = dice();
            self.task = Some(RunningTask {
                number,
                runs_at: None,
                waker: None,
                called_at: Some(now),
            });
            return Some(number);
        };
        if task.runs_at.is_none_or(|at| due < at) {
            wakers.add(task.waker.take());
        }
        if due <= now {
            task.called_at.get_or_insert(now);
        }
        None
    }

    /// Returns what sync task `number` does next. A task that sleeps is woken if something is due
    /// earlier.
    pub(super) fn next(
        &mut self,
        number: u64,
        queue: &mut PacedQueue,
        now: Instant,
        cx: &Context<'_>,
    ) -> NextSync {
        if !self.is_served_by(number) {
            return NextSync::End;
        }
        let request = queue.next_cas(now);
        let runs_at = queue.next_cas_at();
        let next = match (request, runs_at) {
            (Some(request), _) => NextSync::Send(request),
            (None, Some(at)) => NextSync::SleepUntil(at),
            (None, None) => {
                self.task = None;
                return NextSync::End;
            }
        };
        let waker = runs_at.map(|_| cx.waker().clone());
        self.task = Some(RunningTask {
            number,
            runs_at,
            waker,
            called_at: None,
        });
        next
    }

    /// Notes that sync task `number` was dropped with its runtime. Returns whether the task served the key.
    pub(super) fn task_lost(
        &mut self,
        number: u64,
        queue: &mut PacedQueue,
        now: Instant,
        wakers: &mut Wakers,
    ) -> bool {
        let is_served = self.is_served_by(number);
        if is_served {
            self.end_task(queue, now, wakers);
        }
        is_served
    }

    /// Ends the task that serves the key. Its compare-and-set counts as lost.
    fn end_task(&mut self, queue: &mut PacedQueue, now: Instant, wakers: &mut Wakers) {
        self.task = None;
        self.cas_answered(queue, Err(StoreError::Lost), now, wakers);
    }
}
