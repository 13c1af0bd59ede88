//! The task that keeps the register of one key up to date.
//!
//! A key has one sync task for as long as there is something to write or to wait for. The task
//! makes one compare-and-set after the other, and sleeps until the next is due.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::engine::{SharedPace, ThrottleCore};
use super::sync::NextSync;
use super::sync_state::CasRequest;
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::key::Key;
use crate::store::{Register, RegisterRequest, spawn, unless_lost};
use crate::wakers::Wakers;

/// How long the store keeps a register after its last change.
const REGISTER_TTL: Duration = Duration::from_secs(3600);

#[derive(Clone)]
pub(super) struct SyncTask {
    core: Arc<ThrottleCore>,
    shared: SharedPace,
    key: Key,
    /// The number that the key's waiters gave this task. Once they have given another task a
    /// number, this task ends.
    number: u64,
}

impl SyncTask {
    /// Starts the task with this number.
    ///
    /// If there is no runtime in which it could run, it is dropped at once, and the next change of the key starts another.
    pub(super) fn start(core: &Arc<ThrottleCore>, key: Key, number: u64) {
        let Some(shared) = core.shared.clone() else {
            return;
        };
        let sync_task = SyncTask {
            core: core.clone(),
            shared,
            key,
            number,
        };
        let lost = sync_task.clone();
        let store = sync_task.shared.store.clone();
        let task = unless_lost(sync_task.run(), move || lost.let_go());
        spawn(&*store, Box::pin(task));
    }

    async fn run(self) {
        let mut timer = Timer::at(clock::now());
        while let Some(request) = poll_fn(|cx| self.poll_next(&mut timer, cx)).await {
            let CasRequest { seen, value, tell } = request;
            let reply = self.shared.store.compare_and_set(RegisterRequest {
                key: self.key,
                kind: self.shared.kind,
                version: seen,
                value,
                ttl: REGISTER_TTL,
                notify: tell,
            });
            self.answered(reply.arrives().await);
        }
    }

    /// Polls for the next compare-and-set. Ready with `None` if the task is to end.
    fn poll_next(&self, timer: &mut Timer, cx: &mut Context<'_>) -> Poll<Option<CasRequest>> {
        let now = clock::now();
        let next = self.core.find(self.key, |waiters| {
            waiters.sync.next(self.number, &mut waiters.queue, now, cx)
        });
        match next {
            Some(NextSync::Send(request)) => Poll::Ready(Some(request)),
            Some(NextSync::SleepUntil(at)) => {
                timer.set(at);
                timer.wake(cx);
                Poll::Pending
            }
            Some(NextSync::End) | None => Poll::Ready(None),
        }
    }

    fn answered(&self, answer: Result<Register, StoreError>) {
        let now = clock::now();
        self.core.at(self.key, |waiters, wakers| {
            waiters.cas_answered(self.number, answer, now, wakers)
        });
    }

    /// Lets go of the key. The runtime may be shutting down, so this starts no other task.
    fn let_go(&self) {
        let mut wakers = Wakers::default();
        self.core.find(self.key, |waiters| {
            waiters.sync_task_lost(self.number, clock::now(), &mut wakers)
        });
        wakers.wake();
    }
}
