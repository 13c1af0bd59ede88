//! What a line leaves to be done without its lock: calls to run to their end, and permits at hand to be looked after.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::engine::{Gate, Limiter};
use super::key_state::{CallNumber, Errand};
use super::settings::Settings;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::store::{Lease, spawn};
use crate::wakers::Wakers;

impl Limiter {
    /// Does what a line left to be done without its lock.
    ///
    /// It runs on the store's own thread if there is one, else in the current runtime. Dropped with that runtime, or without
    /// one, a call ends as lost, and the end of a delay comes at once.
    pub(super) fn finish(&self, key: Key, now: Instant, errand: Option<Errand>, wakers: Wakers) {
        wakers.wake();
        match errand {
            Some(Errand::Call(number, call)) => {
                let mut called = Called { limiter: self.clone(), key, since: now, number, open: true };
                self.spawn(async move {
                    let answer = call.await;
                    called.answered(answer);
                });
            }
            Some(Errand::Gather(delay)) => {
                let gathering = Gathering::new(&self.0, key);
                // Tasks that are about to ask are those of the caller's runtime. It may not be driven any more.
                let delay = match Handle::try_current() {
                    Ok(runtime) if delay.is_zero() && self.0.settings.store.background().is_some() => {
                        let gathering = gathering.clone();
                        drop(runtime.spawn(async move {
                            tokio::task::yield_now().await;
                            gathering.joined();
                        }));
                        LONGEST_TURN
                    }
                    _ => delay,
                };
                self.spawn(async move {
                    wait_for(now, delay).await;
                    gathering.joined();
                });
            }
            Some(Errand::PassOn(delay)) => {
                let gate = Arc::downgrade(&self.0);
                self.spawn(async move {
                    wait_for(now, delay).await;
                    let Some(limiter) = gate.upgrade().map(Limiter) else { return };
                    let now = clock::now();
                    limiter.at_line(key, now, |line, desk, wakers| ((), line.pass_on_now(desk, wakers)));
                });
            }
            None => {}
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&*self.0.settings.store, task);
    }

    /// Looks after permits that were fetched ahead, until none are left.
    fn sweep(&self, key: Key, at: Instant) {
        let (gate, mut next) = (Arc::downgrade(&self.0), Some(at));
        self.spawn(async move {
            while let Some(at) = next {
                clock::sleep_until(at).await;
                let Some(limiter) = gate.upgrade().map(Limiter) else { return };
                next = limiter.at_line(key, clock::now(), |line, desk, _| (line.sweep(desk), None)).flatten();
            }
        });
    }
}

/// Waits until `delay` after `now`. If that is no time, other tasks that are about to run go first.
async fn wait_for(now: Instant, delay: Duration) {
    if delay.is_zero() {
        tokio::task::yield_now().await;
    } else {
        clock::sleep_until(clock::after(now, delay)).await;
    }
}

/// A call that a line waits for. It ends exactly once; dropped, it ends as lost.
struct Called {
    limiter: Limiter,
    key: Key,
    since: Instant,
    number: CallNumber,
    open: bool,
}

impl Called {
    fn answered(&mut self, answer: Result<Lease, StoreError>) {
        self.open = false;
        if let Ok(Lease { foreign: Some(limit), .. }) = &answer
            && !self.limiter.0.warned.swap(true, Ordering::Relaxed)
        {
            events::foreign_limit(
                &self.limiter.label(self.key, None),
                *limit,
                self.limiter.0.settings.terms.quota(),
            );
        }
        let mut answer = Some(answer);
        let sweep_at = self.limiter.at_line(self.key, clock::now(), |line, desk, wakers| {
            let answer = answer.take().unwrap_or(Err(StoreError::Lost));
            let errand = line.call_answered(desk, self.number, answer, self.since, wakers);
            (line.start_sweep(desk.now), errand)
        });
        if let Some(at) = sweep_at.flatten() {
            self.limiter.sweep(self.key, at);
        }
        // The line is gone: nobody here can use what was granted.
        if let Some(Ok(lease)) = answer {
            let Settings { store, terms, .. } = &self.limiter.0.settings;
            store.give_back(self.key, terms, &lease.unused());
        }
    }
}

impl Drop for Called {
    fn drop(&mut self) {
        if self.open {
            self.answered(Err(StoreError::Lost));
        }
    }
}

/// How long the tasks of a runtime that are about to run take at most to have their turn; a runtime that takes longer is not
/// waited for.
const LONGEST_TURN: Duration = Duration::from_millis(5);

/// A delay in which others may join the next call of a line. It keeps no gate alive: a hold may last for long.
#[derive(Clone)]
struct Gathering {
    gate: Weak<Gate>,
    key: Key,
    /// Whether the others had the time to join.
    joined: bool,
    /// Whether it is over: it may end in two places.
    over: Arc<AtomicBool>,
}

impl Gathering {
    fn new(gate: &Arc<Gate>, key: Key) -> Self {
        Gathering { gate: Arc::downgrade(gate), key, joined: false, over: Arc::default() }
    }

    fn joined(mut self) {
        self.joined = true;
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        let Some(limiter) = self.gate.upgrade().map(Limiter) else { return };
        if self.over.swap(true, Ordering::Relaxed) {
            return;
        }
        let (now, joined) = (clock::now(), self.joined);
        limiter.at_line(self.key, now, |line, desk, wakers| ((), line.gathered(desk, joined, wakers)));
    }
}
