//! Layers around each other.
//!
//! A permit is valid for 10 to 50 ms. A request inside of a second layer has the outer permit and may then wait for
//! the inner one. The outer permit expires meanwhile, so more requests leave than the outer limit allows.
//! [`RateLimitLayer::and`](crate::RateLimitLayer::and) joins both layers: a request then waits once, and takes all
//! permits at one moment. So a request that another limiter's permit is around is refused
//! ([`Reason::Inside`]), and the error names `and`. Tried before: the inner request acquired the permits of the layers
//! around anew. That was right, took 700 lines on each way of a request, and counted a unit of the outer limit for
//! each call that a service between the layers made.
//!
//! An outer permit that has expired protects nothing any more. What the inner service does then is a request of its own: it
//! passes.
//!
//! A call inside of a call of the *same* limiter is another request, such as one that refreshes a token. If calls in
//! flight are limited, the outer call has a slot until the inner one ends. So the inner one takes a slot that is free,
//! or is refused at once ([`Reason::Nested`]).
//!
//! A program that acquires a permit by hand and then sends the request through a layer of the same limiter takes two
//! permits for it, and gets half of the rate. No mark shows that for certain: the program may have sent another request
//! with the permit. But if requests of the layer that find no permit at hand come right behind a permit by hand of their
//! key, on the same thread, [`MOST_PAIRS`] times without an exception, that is reported, once.
//!
//! A layer leaves a mark on its thread for as long as it calls or polls its inner service. Both are synchronous, so a
//! layer that finds the mark is inside. It does not see through a task between the layers, such as
//! `tower::buffer`. Only if a process has several limiters, has a throttle, or limits calls in flight, is the mark
//! looked at.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::{self, Core, CoreId};
use super::part::PartRef;
use crate::clock::{self, Moment};
use crate::error::Reason;
use crate::events;
use crate::key::{Key, Label};
use crate::tuning::LONGEST_LIFE;

/// What is around the code that runs on this thread.
#[derive(Clone, Copy)]
enum Surroundings {
    Nothing,
    /// The call of an inner service, by a layer that makes a future. The layer has nothing to drop, because of the
    /// fast path: the mark stays if the inner service panics.
    Call,
    /// The poll of an inner service, for a request of this limiter. Its permit was valid from this moment on, if it has
    /// one.
    Poll(CoreId, Option<Moment>),
}

thread_local! {
    static AROUND: Cell<Surroundings> = const { Cell::new(Surroundings::Nothing) };
}

/// A permit that was granted by hand.
#[derive(Clone, Copy)]
struct ByHand {
    core: CoreId,
    key: Key,
    at: Instant,
}

thread_local! {
    /// The last permit by hand that was not at hand.
    static BY_HAND: Cell<Option<ByHand>> = const { Cell::new(None) };
}

/// How soon after a permit by hand a request comes that the permit may have been for: as long as it takes to make a request.
const MAKES_REQUEST: Duration = Duration::from_millis(1);

/// So many pairs of a permit by hand and a request of the layer in a row are no chance.
const MOST_PAIRS: u32 = 20;

/// Notes a permit by hand, on the slow path: those at hand are not scarce.
pub(super) fn by_hand(core: CoreId, key: Key) {
    BY_HAND.set(Some(ByHand {
        core,
        key,
        at: clock::now(),
    }));
}

/// Notes a request of a layer that finds no permit at hand. Reports once that such requests take two permits each, if they do.
#[cold]
pub(crate) fn note_pair(first: &PartRef<'_>, label: &dyn Fn() -> Label) {
    let PartRef { core, entry } = first;
    let pair = BY_HAND.take().filter(|by_hand| {
        let is_same = by_hand.core == core.id && by_hand.key == entry.key;
        is_same && clock::now() < by_hand.at + MAKES_REQUEST
    });
    if core.settings.tally.count_pair(pair.is_some(), MOST_PAIRS) {
        events::counted_twice(&core.settings.tally, &label());
    }
}

/// Returns whether the caller may be inside of a layer.
#[inline]
pub(crate) fn is_any() -> bool {
    engine::are_marks_read() && !matches!(AROUND.get(), Surroundings::Nothing)
}

/// Returns whether the caller is inside of the call of a layer, or a service has panicked there. A request then enters
/// when its future is polled: a layer that is around leaves its mark there, too.
#[inline]
pub(crate) fn is_unsure() -> bool {
    matches!(AROUND.get(), Surroundings::Call)
}

/// Removes the mark that is left if a service has panicked. The caller is polled, so no call is around it, unless an inner
/// service polls inside of its `call`.
pub(crate) fn forget_panic() {
    if is_unsure() {
        AROUND.set(Surroundings::Nothing);
    }
}

/// Returns why a request is refused because of what is around it.
pub(super) fn refusal(parts: &[PartRef<'_>]) -> Option<Reason> {
    let around = valid_permit()?;
    (!are_of_limiter_of(parts, &around)).then_some(Reason::Inside)
}

/// The same for a request of a throttle.
pub(crate) fn refusal_of_throttle() -> Option<Reason> {
    valid_permit().map(|_| Reason::Inside)
}

/// Returns the core of the request that is around the caller, if its permit may expire.
fn valid_permit() -> Option<Arc<Core>> {
    let (core, since) = request()?;
    let is_valid = clock::now() < since?.instant() + LONGEST_LIFE;
    let core = core.find().filter(|_| is_valid)?;
    core.has_rates().then_some(core)
}

/// Returns whether a request is made inside of a call that has an in-flight slot of one of its limiters.
pub(super) fn is_nested(parts: &[PartRef<'_>]) -> bool {
    if parts.iter().all(|part| part.core.in_flight.is_none()) {
        return false;
    }
    let around = request().and_then(|(core, _)| core.find());
    around.is_some_and(|core| are_of_limiter_of(parts, &core))
}

/// Returns whether a request is one of the limiter of `around`. A call of several limiters has the mark of one of them.
fn are_of_limiter_of(parts: &[PartRef<'_>], around: &Core) -> bool {
    parts.iter().any(|part| part.core.is_of_limiter_of(around))
}

/// Returns the request that is around the caller, if that is polled: its limiter, and from when on its permit was valid.
fn request() -> Option<(CoreId, Option<Moment>)> {
    match AROUND.get() {
        Surroundings::Poll(core, since) if is_any() => Some((core, since)),
        _ => None,
    }
}

/// The mark of a layer on its thread, while it calls its inner service on the fast path.
#[derive(Clone, Copy)]
pub(crate) struct Mark(Surroundings);

impl Mark {
    #[inline]
    pub(crate) fn set() -> Self {
        Mark(AROUND.replace(Surroundings::Call))
    }

    #[inline]
    pub(crate) fn remove(self) {
        AROUND.set(self.0);
    }
}

/// A call or poll of the inner service of a layer. Dropping this removes the mark, also if the inner service panics.
pub(crate) struct InnerCall(Surroundings);

impl InnerCall {
    /// Marks the thread for a request of `core`, whose permit was valid from `since` on, if it has one. Returns `None`
    /// if no layer reads marks.
    #[inline]
    pub(super) fn begin(core: CoreId, since: Option<Moment>) -> Option<Self> {
        engine::are_marks_read().then(|| InnerCall(AROUND.replace(Surroundings::Poll(core, since))))
    }
}

impl Drop for InnerCall {
    #[inline]
    fn drop(&mut self) {
        AROUND.set(self.0);
    }
}
