//! What a ban guard needs of limiters: one that counts bad answers, and one whose keys it stops.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::engine::Core;
use super::entry::Entry;
use super::holds;
use super::key_state::HoldSource;
use super::limiter::Limiter;
use crate::admission::Admission;
use crate::clock;
use crate::error::Limited;
use crate::guarded::{Guarded, SAME_CAUSE, report_stopped};
use crate::key::Key;
use crate::stats::Cause;
use crate::store::{HoldState, spawn};

/// Whether a limiter has counted a unit, now or later.
pub(crate) enum CountedUnit<F> {
    Now(Result<(), Limited>),
    Later(F),
}

/// The limiter that counts bad answers.
impl Limiter {
    /// Counts a unit of `key`, if the quota allows it. Nothing waits for a permit, only for the store.
    pub(crate) fn count(
        &self,
        key: Key,
    ) -> CountedUnit<impl Future<Output = Result<(), Limited>> + Send + use<>> {
        let entry = Entry::new(key, 1);
        if self.take_at_once(&entry).is_some() {
            return CountedUnit::Now(Ok(()));
        }
        match self.start_slow(entry, &|| self.label(key, None)) {
            Admission::Go(taken) => {
                drop(taken.sent());
                CountedUnit::Now(Ok(()))
            }
            Admission::No(limited) => CountedUnit::Now(Err(limited)),
            Admission::Wait(mut wait) => CountedUnit::Later(async move {
                loop {
                    let taken = (&mut wait).await?;
                    if let Some(taken) = wait.leave(taken)? {
                        drop(taken.sent());
                        return Ok(());
                    }
                }
            }),
        }
    }

    /// Counts a unit of `key`, even beyond the limit.
    pub(crate) fn charge(&self, key: Key) {
        self.0.first.charge(key, 1, None);
    }

    /// Puts `key` on hold for `span`. The answer of the store is not waited for.
    pub(crate) fn hold(&self, key: Key, span: Duration) {
        drop(holds::begin(&self.0.first, key, span, false, Cause::Guard));
    }

    /// Returns for how long `key` is on hold, by what this process knows.
    pub(crate) fn held(&self, key: Key) -> Option<Duration> {
        self.0.first.held(key, clock::now())
    }

    /// Gives back the permits at hand.
    pub(crate) fn give_back(&self) {
        self.0.first.give_back_all();
    }

    /// Runs a task in the background of the store, or else in the current runtime.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&*self.0.first.settings.store, task);
    }

    /// Returns what a guard stops.
    pub(crate) fn guarded(&self) -> Weak<dyn Guarded> {
        let core: Weak<Core> = Arc::downgrade(&self.0.first);
        core
    }
}

impl Guarded for Core {
    fn hold(self: Arc<Self>, key: Key, span: Duration) {
        // It is cut, because nobody knows when the answers are good again: so one request is first.
        for (core, key) in self.all_parts(self.part_of(key)).rev() {
            drop(holds::begin(&core, key, span, true, Cause::Guard));
        }
    }

    fn hold_all(self: Arc<Self>, keys: &[Key], span: Duration) {
        for (core, _) in self.all_parts(Key::ALL) {
            core.hold_stopped(keys, span);
        }
    }

    fn release_all(self: Arc<Self>, keys: &[Key], until: Instant) {
        for (core, _) in self.all_parts(Key::ALL) {
            core.release_stopped(keys, until);
        }
    }
}

impl Core {
    /// Holds the keys that a guard stops.
    fn hold_stopped(self: &Arc<Self>, keys: &[Key], span: Duration) {
        let now = clock::now();
        let keys = keys.iter().map(|key| self.part_of(*key));
        let begun = keys.filter(|key| {
            let is_new = self.with_state(*key, now, |state, ctx| {
                let before = state.hold.left(now);
                let held = HoldState {
                    remaining: span,
                    releases: state.hold.releases(),
                    cut: true,
                };
                state.adopt_hold(ctx, held, HoldSource::Seen);
                state.hold.note_cause(Cause::Guard, span, now);
                before.is_none()
            });
            is_new == Some(true)
        });
        report_stopped(&**self, begun, span);
    }

    /// Releases the keys that a guard has stopped until then.
    fn release_stopped(self: &Arc<Self>, keys: &[Key], until: Instant) {
        let now = clock::now();
        for key in keys.iter().map(|key| self.part_of(*key)) {
            self.with_state(key, now, |state, ctx| {
                let is_of_stop = |left| clock::after(now, left) <= clock::after(until, SAME_CAUSE);
                if state.hold.left(now).is_some_and(is_of_stop) {
                    // The next call tells the store.
                    let releases = state.hold.releases().saturating_add(1);
                    let released = HoldState::new(Duration::ZERO, releases);
                    state.adopt_hold(ctx, released, HoldSource::Seen);
                }
            });
        }
    }
}
