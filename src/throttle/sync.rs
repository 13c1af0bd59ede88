//! Whether a sync task serves a key, and whether it makes progress.

use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::paced_queue::PacedQueue;
use crate::clock;
use crate::rng::dice;
use crate::wakers::Wakers;

/// A sync task that was called and has not run within this time belongs to a runtime that makes no progress.
const LONGEST_START: Duration = Duration::from_secs(1);

/// A store that has not answered within this time is unreachable.
const LONGEST_ANSWER: Duration = Duration::from_secs(10);

/// Whether a sync task serves the key.
#[derive(Debug)]
pub(super) enum SyncTaskState {
    Absent,
    Running {
        /// The task's number. A task with another number has been replaced, and ends.
        number: u64,
        /// When the task runs next, if nothing wakes it earlier.
        runs_at: Option<Instant>,
        waker: Option<Waker>,
        /// When the task was called, if it has not run since.
        called_at: Option<Instant>,
    },
}

impl SyncTaskState {
    /// Reports whether the task with this number serves the key.
    pub(super) fn is(&self, task: u64) -> bool {
        matches!(self, SyncTaskState::Running { number, .. } if *number == task)
    }

    /// Sees to it that a task runs at `due`: wakes the one that serves the key, or returns the number of one to start.
    pub(super) fn call(&mut self, due: Instant, now: Instant, wakers: &mut Wakers) -> Option<u64> {
        match self {
            SyncTaskState::Running { runs_at, waker, called_at, .. } => {
                if runs_at.is_none_or(|at| due < at) {
                    wakers.add(waker.take());
                }
                if due <= now {
                    called_at.get_or_insert(now);
                }
                None
            }
            SyncTaskState::Absent => {
                let number = dice();
                *self = SyncTaskState::Running { number, runs_at: None, waker: None, called_at: Some(now) };
                Some(number)
            }
        }
    }

    /// Notes that the task with this number has run, and when it runs next if it does not end.
    pub(super) fn ran(&mut self, number: u64, runs_at: Option<Instant>, cx: &Context<'_>) {
        let waker = runs_at.map(|_| cx.waker().clone());
        *self = SyncTaskState::Running { number, runs_at, waker, called_at: None };
    }

    /// Returns the moment at which the task, or its call of the store, is late.
    pub(super) fn late_at(&self, queue: &PacedQueue) -> Option<Instant> {
        let SyncTaskState::Running { called_at, .. } = self else { return None };
        match queue.cas_sent_at() {
            Some(sent) => Some(clock::after(sent, LONGEST_ANSWER)),
            None => called_at.or(queue.next_cas_at()).map(|due| clock::after(due, LONGEST_START)),
        }
    }

    /// Reports whether the task was called, or called the store, and is late.
    pub(super) fn is_late(&self, queue: &PacedQueue, now: Instant) -> bool {
        let is_called = matches!(self, SyncTaskState::Running { called_at: Some(_), .. });
        (is_called || queue.cas_sent_at().is_some()) && self.late_at(queue).is_some_and(|at| at <= now)
    }

    /// Returns the moment at which a call that is due at once is late, for a key without a task.
    pub(super) fn late_if_called(now: Instant) -> Instant {
        clock::after(now, LONGEST_START)
    }
}
