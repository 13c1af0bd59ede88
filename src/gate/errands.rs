//! What a line leaves to be done without its lock: calls to run to their end, and permits at hand to be looked after.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::limiter::Limiter;
use super::line::Errand;
use super::queue::Wakers;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::store::Lease;

impl Limiter {
    /// Does what a line left to be done without its lock.
    pub(super) fn finish(&self, key: Key, now: Instant, errand: Option<Errand>, wakers: Wakers) {
        wakers.wake();
        let Some(errand) = errand else { return };
        let pending =
            |calls| Pending { limiter: self.clone(), key, since: now, calls, open: true, joined: false };
        let runtime = tokio::runtime::Handle::try_current();
        match errand {
            Errand::Call(call) => {
                let mut pending = pending(true);
                // Without a runtime there is nobody to run it: dropped, it ends as an outcome that is not known.
                let Ok(runtime) = runtime else { return };
                drop(runtime.spawn(async move {
                    let answer = call.await;
                    pending.answered(answer);
                }));
            }
            Errand::Gather(delay) => {
                let pending = pending(false);
                let Ok(runtime) = runtime else { return };
                drop(runtime.spawn(async move {
                    if delay.is_zero() {
                        tokio::task::yield_now().await;
                    } else {
                        clock::sleep_until(clock::after(now, delay)).await;
                    }
                    pending.joined();
                }));
            }
            Errand::PassOn(delay) => {
                // Lost with its runtime, somebody else does it.
                let Ok(runtime) = runtime else { return };
                let limiter = self.clone();
                drop(runtime.spawn(async move {
                    clock::sleep_until(clock::after(now, delay)).await;
                    let now = clock::now();
                    limiter.at_line(key, now, |line, desk, wakers| ((), line.pass_on_now(desk, wakers)));
                }));
            }
        }
    }

    /// Looks after permits that were fetched ahead, until none are left.
    fn sweep(&self, key: Key, at: Instant) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (limiter, mut next) = (self.clone(), Some(at));
        runtime.spawn(async move {
            while let Some(at) = next {
                clock::sleep_until(at).await;
                next = limiter.at_line(key, clock::now(), |line, desk, _| (line.sweep(desk), None)).flatten();
            }
        });
    }
}

/// What a line waits for: the answer to a call, or that others join the next one. It ends exactly once; dropped with its
/// runtime, a call ends as lost.
struct Pending {
    limiter: Limiter,
    key: Key,
    since: Instant,
    calls: bool,
    open: bool,
    /// Whether the others had the time to join.
    joined: bool,
}

impl Pending {
    fn joined(mut self) {
        self.joined = true;
    }

    fn answered(&mut self, answer: Result<Lease, StoreError>) {
        self.open = false;
        if let Ok(Lease { foreign: Some(limit), .. }) = &answer
            && !self.limiter.0.warned.swap(true, Ordering::Relaxed)
        {
            events::foreign_limit(self.key, *limit, self.limiter.0.settings.terms.quota());
        }
        let sweep_at = self.limiter.at_line(self.key, clock::now(), |line, desk, wakers| {
            let errand = line.call_answered(desk, answer, self.since, wakers);
            (line.start_sweep(desk.now), errand)
        });
        if let Some(at) = sweep_at.flatten() {
            self.limiter.sweep(self.key, at);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.open && self.calls {
            self.answered(Err(StoreError::Lost));
        } else if self.open {
            let (now, joined) = (clock::now(), self.joined);
            self.limiter
                .at_line(self.key, now, |line, desk, wakers| ((), line.gathered(desk, joined, wakers)));
        }
    }
}
