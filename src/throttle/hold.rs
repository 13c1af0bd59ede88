//! Holds by hand, and the wait until all processes that share the line can know of them.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::engine::Throttle;
use super::pace_state::LONGEST_HOLD;
use super::peer_view::Mark;
use super::waiters::Waiters;
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::key::Key;
use crate::wakers::Wakers;

impl Throttle {
    /// Holds `key` for `span`: no request leaves, whatever the pace says, in any process that shares the line. At most a day.
    ///
    /// A refusal by the upstream does the same by itself. A hold only ever moves to a later moment, unless it is
    /// [released](Throttle::release).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{AdaptiveThrottleLayer, Key};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let throttle = AdaptiveThrottleLayer::new().throttle();
    /// throttle.hold_for(Key::ALL, Duration::from_secs(60)).await?;
    /// assert!(throttle.acquire(Key::ALL).await.is_err());
    ///
    /// throttle.release(Key::ALL).await?;
    /// assert!(throttle.acquire(Key::ALL).await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of it; in this one it holds. [`StoreError::Full`] if `max_keys` keys
    /// are in use and this is another: then it holds nowhere.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it holds, and the other processes are told of it.
    ///
    /// # Panics
    ///
    /// If the line is shared through a store, outside of a Tokio runtime with timers.
    pub async fn hold_for(&self, key: Key, span: Duration) -> Result<(), StoreError> {
        let now = clock::now();
        let until = clock::after(now, span.min(LONGEST_HOLD));
        self.change(key, now, |waiters, wakers| waiters.hold_until(until, now, wakers)).await
    }

    /// Holds `key` until a moment, as [`hold_for`](Throttle::hold_for) does. One that has passed holds nothing.
    ///
    /// # Errors
    ///
    /// As for [`hold_for`](Throttle::hold_for).
    pub async fn hold_until(&self, key: Key, until: Instant) -> Result<(), StoreError> {
        match until.checked_duration_since(clock::now()) {
            Some(span) if !span.is_zero() => self.hold_for(key, span).await,
            _ => Ok(()),
        }
    }

    /// Ends the hold of `key`, in all processes that share the line, whether it came from the upstream or by hand. What the
    /// pace has learned stays.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may still hold it. They are told when the store is back.
    /// [`StoreError::Full`] if `max_keys` keys are in use and this is another.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it is released, and the other processes are told of it.
    ///
    /// # Panics
    ///
    /// If the line is shared through a store, outside of a Tokio runtime with timers.
    pub async fn release(&self, key: Key) -> Result<(), StoreError> {
        let now = clock::now();
        if self.0.shared.is_none() {
            self.at(key, |waiters, wakers| waiters.release(now, wakers));
            return Ok(());
        }
        self.change(key, now, |waiters, wakers| waiters.release(now, wakers)).await
    }

    /// Changes the station of `key`, and waits until the register says so, if the line is shared.
    async fn change(
        &self,
        key: Key,
        now: Instant,
        change: impl FnOnce(&mut Waiters, &mut Wakers),
    ) -> Result<(), StoreError> {
        let opened = self.open(key, now, |waiters, wakers| {
            change(waiters, wakers);
            waiters.mark()
        });
        match opened {
            Ok(None) => Ok(()),
            Ok(Some(mark)) => WrittenWait { throttle: self, key, mark, timer: None }.await,
            Err(_) => Err(StoreError::Full { max_keys: self.max_keys() }),
        }
    }
}

/// Waits until the register of `key` has what happened before `mark`.
struct WrittenWait<'a> {
    throttle: &'a Throttle,
    key: Key,
    mark: Mark,
    timer: Option<Timer>,
}

impl Future for WrittenWait<'_> {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (now, mark) = (clock::now(), self.mark);
        let polled = self.throttle.at(self.key, |waiters, _| waiters.poll_written(mark, now, cx));
        let at = match polled {
            Some(Ok(done)) => return Poll::Ready(done),
            Some(Err(at)) => at,
            // Room was needed for other keys.
            None => return Poll::Ready(Err(StoreError::Lost)),
        };
        let timer = self.timer.get_or_insert_with(|| Timer::at(at));
        timer.set(at);
        if timer.poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
