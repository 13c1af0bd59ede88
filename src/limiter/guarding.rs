//! What a ban guard needs of limiters: one that counts bad answers, and one whose keys it stops.

use std::future::{Future, poll_fn};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::engine::Core;
use super::key_state::HoldSource;
use super::limiter::Limiter;
use super::part::{Entry, PartRef};
use super::reservation::CountedAs;
use super::{at_once, holds, wait};
use crate::admission::Admission;
use crate::clock;
use crate::error::Limited;
use crate::guarded::{Guarded, ends_with_stop, is_longer};
use crate::key::Key;
use crate::stats::Cause;
use crate::store::HoldState;

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
        let (core, entry) = (&self.0.first, Entry::new(key, 1));
        let now = clock::now_by_counter();
        if at_once::take_at_once(core, &entry, CountedAs::Request, now).is_some() {
            return CountedUnit::Now(Ok(()));
        }
        let part = PartRef::new(core, entry);
        match wait::slow(&[part], None, None, &|| self.label(key, None)) {
            Admission::Go(taken) => {
                drop(taken.sent());
                CountedUnit::Now(Ok(()))
            }
            Admission::No(limited) => CountedUnit::Now(Err(limited)),
            Admission::Wait(mut wait) => CountedUnit::Later(async move {
                let taken = poll_fn(|cx| wait.poll_left(cx)).await?;
                drop(taken.sent());
                Ok(())
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

    /// Returns the hold of `key`, by what this process knows.
    pub(crate) fn held(&self, key: Key) -> HoldState {
        let now = clock::now();
        self.0.first.states.read(key, |state| {
            let left = state.hold.left(now).unwrap_or_default();
            HoldState::new(left, state.hold.releases())
        })
    }

    /// Asks the store for the hold of `key`. Returns `None` if the store does not answer.
    pub(crate) async fn stored_hold(&self, key: Key) -> Option<HoldState> {
        let core = &self.0.first;
        let request = core.peek_request(key, &core.settings.spec);
        let usage = core.settings.store.peek(request).arrives().await;
        usage.ok().map(|usage| usage.hold)
    }

    /// Gives back the permits at hand.
    pub(crate) fn give_back(&self) {
        self.0.first.give_back_all();
    }

    /// Runs a task in the background of the store, or else in the current runtime.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.first.spawn(task);
    }

    /// Returns what a guard stops: each part of the quota, if it is divided.
    pub(crate) fn guarded(&self) -> impl Iterator<Item = Weak<dyn Guarded>> {
        let parts = self.0.first.all_parts(Key::ALL);
        parts.map(|(core, _)| Arc::downgrade(&core) as Weak<dyn Guarded>)
    }
}

impl Guarded for Core {
    fn hold(self: Arc<Self>, key: Key, span: Duration) {
        // It is cut, because nobody knows when the answers are good again: so one request is first.
        for (core, key) in self.all_parts(self.part_of(key)).rev() {
            drop(holds::begin(&core, key, span, true, Cause::Guard));
        }
    }

    fn own_key(&self, key: Key) -> Key {
        self.part_of(key)
    }

    fn hold_known(self: Arc<Self>, key: Key, span: Duration) -> bool {
        let now = clock::now();
        let begins = self.with_state(key, now, |state, ctx| {
            let begins = is_longer(span, state.hold.left(now));
            if begins {
                let held = HoldState {
                    remaining: span,
                    releases: state.hold.releases(),
                    cut: true,
                };
                state.adopt_hold(ctx, held, HoldSource::Seen);
                state.hold.note_cause(Cause::Guard, span, now);
            }
            begins
        });
        begins == Some(true)
    }

    fn release_known(self: Arc<Self>, key: Key, until: Instant) {
        let now = clock::now();
        self.with_state(key, now, |state, ctx| {
            let left = state.hold.left(now);
            if left.is_some_and(|left| ends_with_stop(left, until, now)) {
                // The next call tells the store.
                let releases = state.hold.releases().saturating_add(1);
                let released = HoldState::new(Duration::ZERO, releases);
                state.adopt_hold(ctx, released, HoldSource::Seen);
            }
        });
    }
}
