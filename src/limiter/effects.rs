//! Access to the state of a key, and the work that is done after its lock is released.
//!
//! The state of a key never awaits, sends or wakes anything. It returns what is to be done: tasks to wake, and
//! an [`Effect`]. [`Core::with_state`] and its siblings lock the state, call a closure, release the lock and run
//! the rest. They are the only callers of [`Core::run`].

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::engine::Core;
use super::key_state::{Effect, KeyContext, KeyState};
use super::queue::CallNumber;
use super::reservation::Reservation;
use super::settings::Settings;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::key_map::Full;
use crate::store::{Lease, spawn};
use crate::wakers::Wakers;

/// How long a batching delay gives the tasks of the caller's runtime that are ready to run. If the runtime does
/// not run them in this time, the next call is sent without them.
const LONGEST_TURN: Duration = Duration::from_millis(5);

impl Core {
    /// Runs `act` on the state of `key`, then the effect it returns. Returns `None` if the key has no state.
    pub(super) fn with_state<R>(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut KeyState, &KeyContext<'_>, &mut Wakers) -> (R, Option<Effect>),
    ) -> Option<R> {
        let mut wakers = Wakers::default();
        let (done, effect) = self.states.find(key, |state| {
            self.hosts.touch(key);
            let learned = self.learned(state, now);
            act(state, &self.ctx(key, now, learned.as_ref()), &mut wakers)
        })?;
        self.run(key, now, effect, wakers);
        Some(done)
    }

    /// Runs `act` on the state of `key`, which is made if there is none, then the effect it returns.
    ///
    /// # Errors
    ///
    /// [`Full`] if the key has no state and there is no room for one.
    pub(super) fn with_new_state<R>(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut KeyState, &KeyContext<'_>, &mut Wakers) -> (R, Option<Effect>),
    ) -> Result<R, Full> {
        let mut wakers = Wakers::default();
        let new = || KeyState::new(self.settings.spec.life(), now);
        let forgotten = |key, mut state: KeyState| {
            let learned = self.learned(&mut state, now);
            state.forgotten(&self.ctx(key, now, learned.as_ref()));
        };
        let with = |state: &mut KeyState| {
            self.hosts.touch(key);
            let learned = self.learned(state, now);
            act(state, &self.ctx(key, now, learned.as_ref()), &mut wakers)
        };
        let (done, effect) = self.states.enter(key, now, new, forgotten, with)?;
        self.run(key, now, effect, wakers);
        Ok(done)
    }

    /// The same as [`with_state`](Core::with_state) for an `act` whose result is its effect. Returns whether the
    /// key has a state.
    pub(super) fn at_state(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut KeyState, &KeyContext<'_>, &mut Wakers) -> Option<Effect>,
    ) -> bool {
        self.with_state(key, now, |state, ctx, wakers| ((), act(state, ctx, wakers))).is_some()
    }

    /// The same as [`with_new_state`](Core::with_new_state) for an `act` whose result is its effect.
    pub(super) fn at_new_state(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut KeyState, &KeyContext<'_>, &mut Wakers) -> Option<Effect>,
    ) -> Result<(), Full> {
        self.with_new_state(key, now, |state, ctx, wakers| ((), act(state, ctx, wakers)))
    }

    /// Gives back permits that were not used: to the next waiter of `key`, else to the store.
    pub(super) fn give_back(self: &Arc<Self>, key: Key, slot: Reservation) {
        if !self.at_state(key, clock::now(), |state, ctx, wakers| state.give_back(ctx, slot, wakers)) {
            let Settings { store, spec, .. } = &self.settings;
            store.give_back(key, spec, &[slot.unused()]);
        }
    }

    /// Wakes the tasks and starts the effect that the state of `key` has left.
    ///
    /// An effect runs on the store's own thread if there is one, else in the current runtime. If that runtime
    /// is dropped, or there is none, a call ends as lost and a delay ends at once.
    fn run(self: &Arc<Self>, key: Key, now: Instant, effect: Option<Effect>, wakers: Wakers) {
        wakers.wake();
        match effect {
            Some(Effect::Call(number, call)) => {
                let mut pending = PendingCall { core: self.clone(), key, since: now, number, open: true };
                self.spawn(async move {
                    let answer = call.await;
                    pending.answered(answer);
                });
            }
            Some(Effect::Gather(delay)) => self.gather(key, now, delay),
            Some(Effect::PassOn(delay)) => {
                let core = Arc::downgrade(self);
                self.spawn(async move {
                    wait_for(now, delay).await;
                    if let Some(core) = core.upgrade() {
                        core.at_state(key, clock::now(), |state, ctx, wakers| state.pass_on_now(ctx, wakers));
                    }
                });
            }
            None => {}
        }
    }

    /// Starts the batching delay of the next call of `key`.
    fn gather(self: &Arc<Self>, key: Key, now: Instant, mut delay: Duration) {
        let batch = BatchDelay::new(self, key);
        // The tasks that are about to ask belong to the caller's runtime, and the store has a thread of its own. The
        // caller's runtime may not be driven any more: the task on the store's thread ends the delay in that case.
        if delay.is_zero()
            && self.settings.store.background().is_some()
            && let Ok(runtime) = Handle::try_current()
        {
            let batch = batch.clone();
            drop(runtime.spawn(async move {
                tokio::task::yield_now().await;
                batch.complete();
            }));
            delay = LONGEST_TURN;
        }
        self.spawn(async move {
            wait_for(now, delay).await;
            batch.complete();
        });
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&*self.settings.store, task);
    }

    /// Starts a task that gives back prefetched permits of `key` before they expire, until none are left. `at`
    /// is when it looks first.
    fn sweep(self: &Arc<Self>, key: Key, at: Instant) {
        let core = Arc::downgrade(self);
        self.spawn(async move {
            let mut next = Some(at);
            while let Some(at) = next {
                clock::sleep_until(at).await;
                let Some(core) = core.upgrade() else { return };
                next = core.with_state(key, clock::now(), |state, ctx, _| (state.sweep(ctx), None)).flatten();
            }
        });
    }
}

/// Waits until `delay` after `now`. If `delay` is zero, yields once to the other tasks that are ready to run.
async fn wait_for(now: Instant, delay: Duration) {
    if delay.is_zero() {
        tokio::task::yield_now().await;
    } else {
        clock::sleep_until(clock::after(now, delay)).await;
    }
}

/// A call to the store that waiters of a key wait for. It ends exactly once. If it is dropped before its
/// answer, it ends as [`StoreError::Lost`].
struct PendingCall {
    core: Arc<Core>,
    key: Key,
    /// When the call was sent.
    since: Instant,
    number: CallNumber,
    /// Whether the call has not ended.
    open: bool,
}

impl PendingCall {
    fn answered(&mut self, answer: Result<Lease, StoreError>) {
        self.open = false;
        if let Ok(Lease { foreign: Some(limit), .. }) = &answer
            && !self.core.warned.swap(true, Ordering::Relaxed)
        {
            let quota = self.core.settings.spec.quota();
            events::foreign_limit(&self.core.label(self.key, None), *limit, quota);
        }
        let mut answer = Some(answer);
        let sweep_at = self.core.with_state(self.key, clock::now(), |state, ctx, wakers| {
            let answer = answer.take().unwrap_or(Err(StoreError::Lost));
            let effect = state.call_answered(ctx, self.number, answer, self.since, wakers);
            (state.start_sweep(ctx.now), effect)
        });
        if let Some(at) = sweep_at.flatten() {
            self.core.sweep(self.key, at);
        }
        // The state of the key is gone: this process cannot use what was granted.
        if let Some(Ok(lease)) = answer {
            let Settings { store, spec, .. } = &self.core.settings;
            store.give_back(self.key, spec, &lease.unused());
        }
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if self.open {
            self.answered(Err(StoreError::Lost));
        }
    }
}

/// A batching delay: requests that arrive before its end join the next call of their key.
///
/// Up to two tasks share a delay, and the first that ends it counts. It does not keep the core alive, because a
/// store may ask for a long pause.
#[derive(Clone)]
struct BatchDelay {
    core: Weak<Core>,
    key: Key,
    /// Whether the delay has ended. Shared by its clones.
    over: Arc<AtomicBool>,
}

impl BatchDelay {
    fn new(core: &Arc<Core>, key: Key) -> Self {
        BatchDelay { core: Arc::downgrade(core), key, over: Arc::default() }
    }

    /// Ends the delay after its full time.
    fn complete(self) {
        self.end(true);
    }

    /// Ends the delay, if it has not ended. `joined` says whether other requests had the time to join.
    fn end(&self, joined: bool) {
        let Some(core) = self.core.upgrade() else { return };
        if !self.over.swap(true, Ordering::Relaxed) {
            core.at_state(self.key, clock::now(), |state, ctx, wakers| state.gathered(ctx, joined, wakers));
        }
    }
}

impl Drop for BatchDelay {
    /// Ends the delay early: its task was dropped with its runtime.
    fn drop(&mut self) {
        self.end(false);
    }
}
