//! The task that keeps the register of one key up to date.
//!
//! A key has one sync task for as long as there is something to write or to wait for. The task
//! makes one compare-and-set after the other, and sleeps until the next is due.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::{SharedPace, ThrottleCore};
use super::sync::NextSync;
use super::sync_state::{CasRequest, StoreChange};
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::stats::Gate;
use crate::store::{Register, RegisterRequest, StoreReply, spawn};
use crate::wakers::Wakers;

/// How long the store keeps a register after its last change.
const REGISTER_TTL: Duration = Duration::from_secs(3600);

pub(super) struct SyncTask {
    core: Arc<ThrottleCore>,
    shared: SharedPace,
    key: Key,
    /// The number that the key's waiters gave this task. Once they have given another task a
    /// number, this task ends.
    number: u64,
    /// The compare-and-set under way, and when the task sent it.
    cas: Option<(CasReply, Instant)>,
    timer: Timer,
    done: bool,
}

type CasReply = Pin<Box<dyn Future<Output = Result<Register, StoreError>> + Send>>;

impl SyncTask {
    /// Starts the task with this number.
    ///
    /// If there is no runtime in which it could run, it is dropped at once, and the next change of the key starts another.
    pub(super) fn start(core: &Arc<ThrottleCore>, key: Key, number: u64) {
        let Some(shared) = core.shared.clone() else {
            return;
        };
        let (core, store) = (core.clone(), shared.store.clone());
        let sync_task = SyncTask {
            core,
            shared,
            key,
            number,
            cas: None,
            timer: Timer::at(clock::now()),
            done: false,
        };
        spawn(&*store, sync_task);
    }

    fn send(&self, request: CasRequest) -> StoreReply<Register> {
        let CasRequest { seen, value, tell } = request;
        let kind = self.shared.kind;
        self.shared.store.compare_and_set(RegisterRequest {
            key: self.key,
            kind,
            version: seen,
            value,
            ttl: REGISTER_TTL,
            notify: tell,
        })
    }

    fn cas_answered(&self, answer: Result<Register, StoreError>, sent: Instant) {
        let now = clock::now();
        let change = self.core.at(self.key, |waiters, wakers| {
            waiters.cas_answered(self.number, answer, sent, now, wakers)
        });
        match change.flatten() {
            Some(StoreChange::Away(error)) => {
                events::pace_alone(self.core.tally(), &self.core.label(self.key, None), &error)
            }
            Some(StoreChange::Back) => {
                events::pace_shared(self.core.tally(), &self.core.label(self.key, None))
            }
            None => {}
        }
    }
}

impl Future for SyncTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some((reply, sent)) = &mut self.cas {
                let Poll::Ready(answer) = reply.as_mut().poll(cx) else {
                    return Poll::Pending;
                };
                let sent = *sent;
                self.cas = None;
                self.cas_answered(answer, sent);
            }
            let now = clock::now();
            let next = self.core.find(self.key, |waiters| {
                waiters.sync.next(self.number, &mut waiters.queue, now, cx)
            });
            match next {
                Some(NextSync::Send(request)) => match self.send(request) {
                    StoreReply::Ready(answer) => self.cas_answered(answer, now),
                    StoreReply::Pending(reply) => self.cas = Some((reply, now)),
                },
                Some(NextSync::SleepUntil(at)) => {
                    self.timer.set(at);
                    if self.timer.poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
                Some(NextSync::End) | None => {
                    self.done = true;
                    return Poll::Ready(());
                }
            }
        }
    }
}

impl Drop for SyncTask {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // The runtime may be shutting down, so this starts no other task.
        let now = clock::now();
        let sent = self.cas.as_ref().map(|(_, sent)| *sent);
        let mut wakers = Wakers::default();
        self.core.find(self.key, |waiters| {
            waiters.sync_task_lost(self.number, sent, now, &mut wakers)
        });
        wakers.wake();
    }
}
