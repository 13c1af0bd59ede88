//! The wait until the register has a hold or a release, so that all processes can know of it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::engine::ThrottleCore;
use super::event_log::LogMark;
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::key::Key;

/// Waits until the register of `key` has everything that happened before `mark`.
pub(super) struct WrittenWait<'a> {
    core: &'a Arc<ThrottleCore>,
    key: Key,
    mark: LogMark,
    timer: Option<Timer>,
}

impl<'a> WrittenWait<'a> {
    pub(super) fn new(core: &'a Arc<ThrottleCore>, key: Key, mark: LogMark) -> Self {
        WrittenWait {
            core,
            key,
            mark,
            timer: None,
        }
    }
}

impl Future for WrittenWait<'_> {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let mark = self.mark;
        let polled = self.core.at(self.key, |waiters, _| {
            waiters.sync.poll_written(&waiters.queue, mark, now, cx)
        });
        let at = match polled {
            Some(Ok(done)) => return Poll::Ready(done),
            Some(Err(at)) => at,
            // The key was evicted to make room for others.
            None => return Poll::Ready(Err(StoreError::Lost)),
        };
        let timer = self.timer.get_or_insert_with(|| Timer::at(at));
        timer.set(at);
        timer.wake(cx);
        Poll::Pending
    }
}
