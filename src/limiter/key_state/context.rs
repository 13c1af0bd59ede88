//! What the state of a key works with while its lock is held, and the work that it leaves for
//! afterwards.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::calls::SentCall;
use super::fleet_probe::FleetCall;
use super::stated_limits::StatedLimit;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::limiter::reservation::Reservation;
use crate::store::{Lease, SetQuota, Store};
use crate::wakers::Wakers;

/// The context of one visit to the state of a key.
///
/// The state never awaits, spawns or wakes anything itself. It adds that work to `work`, and `Core`
/// does it after the lock is released.
pub(in crate::limiter) struct KeyContext<'a> {
    pub(in crate::limiter) key: Key,
    pub(in crate::limiter) store: &'a Arc<dyn Store>,
    /// The limits of the key: the stated limits, or the configured ones.
    pub(in crate::limiter) spec: &'a Arc<LimitSpec>,
    /// When the visit began.
    pub(in crate::limiter) now: Instant,
    /// The most requests of the key that may wait in this process.
    pub(in crate::limiter) max_queue: usize,
    /// Whether a request that cannot be counted passes.
    pub(in crate::limiter) fails_open: bool,
    /// Whether requests give units back after they were sent. Then slots are booked shortly before
    /// they are due: see `near_booking`.
    pub(in crate::limiter) settles: bool,
    /// The longest hold that a response of the upstream can set.
    pub(in crate::limiter) max_hold: Duration,
    /// Whether the limiter is drained, so that no permit may be at hand.
    pub(in crate::limiter) is_draining: bool,
    /// What this visit leaves to do.
    pub(in crate::limiter) work: Work,
}

impl KeyContext<'_> {
    /// Returns whether waiters wake when a call to the store counts as lost. They do if the store
    /// has no thread of its own. Then a call runs in the runtime of a caller, and is lost if that
    /// runtime stops.
    pub(super) fn is_watched(&self) -> bool {
        self.store.background().is_none()
    }
}

/// What a visit to the state of a key leaves to do after the lock is released.
#[derive(Default)]
pub(in crate::limiter) struct Work {
    /// The tasks to wake.
    pub(in crate::limiter) wakers: Wakers,
    /// The effects to start, in their order. A visit seldom leaves two, because one call at a time
    /// is under way.
    pub(in crate::limiter) effects: SmallVec<[Effect; 1]>,
    /// The quota that was set for the key, or its end, if the visit has learned of it.
    pub(in crate::limiter) set_quota: Option<Box<SetQuota>>,
    /// The limits that the visit has learned from the upstream.
    pub(in crate::limiter) learned: Vec<StatedLimit>,
    /// Whether the delay before the next call has begun. The timer of the key ends it.
    pub(in crate::limiter) begins_delay: bool,
    /// Permits that other parts have lent and get back.
    pub(in crate::limiter) lent_back: Vec<Reservation>,
    /// Whether a task makes this visit as it is dropped with its runtime.
    pub(in crate::limiter) is_visit_lost: bool,
    /// When another task has to visit the key, if one has to.
    pub(in crate::limiter) visit_at: Option<Instant>,
}

impl Work {
    /// Returns whether the visit has sent a call for slots, or has begun the delay before the next one.
    pub(in crate::limiter) fn has_begun_call(&self) -> bool {
        let mut effects = self.effects.iter();
        self.begins_delay || effects.any(|effect| matches!(effect, Effect::Call(..)))
    }
}

/// A task to start for a key after the lock is released.
pub(in crate::limiter) enum Effect {
    /// Runs a call to the store to its end.
    Call(SentCall, LeaseFuture),
    /// Asks whether this process sends the next probe, or shares a ban with the others.
    ShareProbe(Box<FleetCall>),
    /// Limits the calls in flight of the key to this number, if they are limited.
    LimitInFlight(Option<u32>),
    /// States the limits of all parts.
    StateParts,
    /// Asks the other parts for slots.
    Borrow,
}

/// A reply of the store that is still to come.
pub(in crate::limiter) type LeaseFuture =
    Pin<Box<dyn Future<Output = Result<Lease, StoreError>> + Send>>;
