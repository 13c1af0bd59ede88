//! The seam between a gate and its [ban guard](crate::Guard).
//!
//! A gate tells its guard of bad answers ([`Watch`]), and the guard puts keys of the gate on hold
//! ([`Guarded`]). Neither imports the other.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::StatusCode;

use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::quota::Quota;
use crate::signal::Signal;
use crate::stats::{Cause, Engine, GuardStats, Tally};

/// What a gate tells its guard, and asks it.
pub(crate) trait Watch: Send + Sync {
    /// Returns whether a response counts as a bad answer.
    fn is_bad(&self, status: StatusCode, signal: &Signal) -> bool;

    /// Counts a bad answer to a request of `key` that was sent at `sent` through `gate`. Stops the key if
    /// there were too many.
    fn answered(self: Arc<Self>, gate: Arc<dyn Guarded>, key: Key, sent: Instant);

    /// Returns the key under which the bad answers to requests of `key` count. Calls a function of the user,
    /// so the caller has no lock.
    fn counted(&self, key: Key) -> Key;

    /// Notes that the gate has state of `key`, whose bad answers count under `counted`. A stop of `counted`
    /// then stops the key.
    fn note_key(&self, counted: Key, key: Key);

    /// Notes that the gate has forgotten its state of `key`. Calls a function of the user, so the caller has
    /// no lock.
    fn forget_key(&self, key: Key);

    /// Returns for how long requests whose bad answers count under `counted` are stopped, by what this
    /// process knows.
    fn stopped_for(&self, counted: Key, now: Instant) -> Option<Duration>;

    /// Returns the longest stop. A wait that the upstream states is obeyed up to this.
    fn longest(&self) -> Duration;

    /// Ends the stop of `key`, in all processes.
    fn release(
        self: Arc<Self>,
        key: Key,
    ) -> Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

    /// Gives the permits at hand of the guard back to the store.
    fn give_back(&self);

    fn stats(&self) -> GuardStats;
}

/// Two ends of holds closer than this have one cause, which processes learned at different moments. Two stops of a guard are
/// one, which several processes have published.
pub(crate) const SAME_CAUSE: Duration = Duration::from_millis(500);

/// Returns whether a stop of `span` holds a key for longer than the hold of which so much is `left`, if it has one.
pub(crate) fn is_longer(span: Duration, left: Option<Duration>) -> bool {
    left.is_none_or(|left| left.saturating_add(SAME_CAUSE) < span)
}

/// Returns whether the hold of which so much is `left` ends with the stop that ends at `until`. A later hold has another
/// cause.
pub(crate) fn ends_with_stop(left: Duration, until: Instant, now: Instant) -> bool {
    clock::after(now, left) <= clock::after(until, SAME_CAUSE)
}

/// What a guard does to its gate.
pub(crate) trait Guarded: Engine {
    /// Reports that the guard stops `key` for `span`, because there were more bad answers than `quota`
    /// allows. It is the stop number `trip` in a row.
    fn report(&self, key: Key, quota: &Quota, span: Duration, trip: u32) {
        events::guard_tripped(self.tally(), &self.label_of(key), quota, span, trip);
    }

    /// Puts `key` on hold for `span`, here and in all processes that share the store.
    fn hold(self: Arc<Self>, key: Key, span: Duration);

    /// Returns the key under which the gate has its state of `key`: that of its part, if its quota is divided.
    fn own_key(&self, key: Key) -> Key {
        key
    }

    /// Puts the own key `key` on hold for `span`, if it has state in this process, and that is
    /// [longer](is_longer) than its hold. Returns whether it did.
    fn hold_known(self: Arc<Self>, key: Key, span: Duration) -> bool;

    /// Ends the hold of the own key `key`, if it [ends with the stop](ends_with_stop) that ends at `until`.
    fn release_known(self: Arc<Self>, key: Key, until: Instant);
}

/// A key that may be about to get its state in a gate with a guard.
pub(crate) struct NewKey<'a> {
    guard: &'a Arc<dyn Watch>,
    key: Key,
    counted: Key,
}

impl<'a> NewKey<'a> {
    /// Calls a function of the user, so the caller has no lock.
    pub(crate) fn new(guard: &'a Arc<dyn Watch>, key: Key) -> Self {
        let counted = guard.counted(key);
        NewKey {
            guard,
            key,
            counted,
        }
    }

    /// Notes that the key gets its state. Returns for how long it is on hold from the beginning, because the guard has
    /// stopped it, and counts that. A stop that begins meanwhile finds the key, and waits for its state: so the caller
    /// has the lock.
    pub(crate) fn begins(&self, tally: &Tally, now: Instant) -> Option<Duration> {
        self.guard.note_key(self.counted, self.key);
        let left = self.guard.stopped_for(self.counted, now)?;
        tally.held(Cause::Guard);
        Some(left)
    }
}

/// Whether any gate of this process has a guard.
static IS_ANY: AtomicBool = AtomicBool::new(false);

pub(crate) fn note_any() {
    IS_ANY.store(true, Ordering::Relaxed);
}

/// Returns whether a response that states nothing about limits may be a bad answer. A status below 400 costs one
/// comparison.
#[inline]
pub(crate) fn may_be_bad(status: Option<StatusCode>) -> bool {
    status.is_some_and(|status| status.as_u16() >= 400) && IS_ANY.load(Ordering::Relaxed)
}

/// Returns the status of a response that may be a bad answer. One with a status below 400 may refuse in its body.
#[inline]
pub(crate) fn bad_status(status: Option<StatusCode>, signal: &Signal) -> Option<StatusCode> {
    if may_be_bad(status) {
        return status;
    }
    let refusal = signal.refusal();
    refusal.filter(|_| IS_ANY.load(Ordering::Relaxed))
}
