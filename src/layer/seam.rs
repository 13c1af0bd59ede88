//! The seam between gates and edges.
//!
//! A gate decides when a request may be sent: a [`RateLimitLayer`](super::RateLimitLayer) by a
//! quota, an [`AdaptiveThrottleLayer`](super::AdaptiveThrottleLayer) by the pace it has learned. An
//! edge is the place where requests arrive: the Tower service in `service.rs`, the middleware in
//! `reqwest.rs`. Each gate implements [`Gate`] once, and each edge is written once over it.
//!
//! ```text
//!               ┌──────── the permit has expired ─────────┐
//!               v                                         │
//! enter ─┬─> Wait ── poll_permit ─┬─> Permit ── send ─────┴─> Call ── leave ─┬─> Departure::Pass
//!        │      ^                 └─> Limited                  ^  │          ├─> Departure::Refuse
//!        ├─> Go ┼──────────────────────────────────────────────┘  │          │
//!        └─> No │                                    poll_lost <──┘          │
//!               └────────────────────────────────────────────────────────────┴── Departure::Retry
//! ```
//!
//! `enter` is two functions: [`Gate::enter_fast`], and [`Gate::enter_slow`] for what the first does
//! not admit. `send` may also refuse a request: its deadline may pass while the inner service gets ready.
//!
//! The futures of the edges do not keep the gate, but for one of a request that waits: its cost may be estimated anew. Each
//! value above holds what it needs of the gate.

use std::task::{Context, Poll};

use super::response_policy::ResponsePolicy;
use crate::admission::Admission;
use crate::error::Limited;
use crate::key::RequestInfo;
use crate::limiter::{InFlightSlot, InnerCall, Waited};
use crate::signal::ResponseInfo;

/// Decides when a request may be sent, and learns from its response.
pub(super) trait Gate: Clone + Send + Sync {
    /// A request that waits for its permit. Dropping it gives up its place in the queue.
    type Wait: Send;

    /// The right to send one request. If it is dropped, nothing was sent, and it is given back.
    type Permit: Send;

    /// A request that was sent and has no response yet. Dropping it ends the call.
    type Call: Send + Sync;

    /// A request that the gate has admitted at once, and that the edge sends now.
    ///
    /// It is `Copy`, so that an edge has nothing to drop if the inner service panics: see
    /// `RateLimit::call_now`.
    type Admitted: Copy;

    /// What the gate has read from a request that it did not admit at once.
    type Entry;

    /// Admits `request` if that needs no more than a permit at hand, and if the gate's
    /// [`policy`](Gate::policy) is the default. The edge sends an admitted request at once.
    ///
    /// # Errors
    ///
    /// What [`enter_slow`](Gate::enter_slow) needs, if the request has to take the slow path.
    fn enter_fast(&self, request: &impl RequestInfo) -> Result<Self::Admitted, Self::Entry>;

    /// Makes the call of a request that was admitted at once.
    fn sent(&self, admitted: Self::Admitted) -> Self::Call;

    /// Admits `request`, makes it wait, or refuses it. The edge sends an admitted request at once.
    fn enter_slow(
        &self,
        entry: Self::Entry,
        request: &impl RequestInfo,
    ) -> Admission<Self::Call, Self::Wait>;

    /// Notes that `request` is sent now, after it has waited. If it need not wait, the gate notes it when it admits it.
    fn sends(&self, _request: &impl RequestInfo) {}

    /// Begins a call or poll of the inner service, which ends when the value is dropped. A gate inside may refuse its
    /// request then. A throttle marks nothing, because its permits do not expire.
    fn begin_inner(_call: &Self::Call) -> Option<InnerCall> {
        None
    }

    /// Runs `inner`, which calls or polls the inner service.
    fn around<R>(call: &Self::Call, inner: impl FnOnce() -> R) -> R {
        let _inner = Self::begin_inner(call);
        inner()
    }

    /// Returns what the gate does with responses.
    fn policy(&self) -> ResponsePolicy;

    /// Polls for the permit of a waiting request.
    fn poll_permit(
        wait: &mut Self::Wait,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Self::Permit, Limited>>;

    /// Polls for the permit of `request`, and takes in what it is now estimated to cost.
    fn poll_estimated(
        &self,
        wait: &mut Self::Wait,
        _request: &impl RequestInfo,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Self::Permit, Limited>> {
        Self::poll_permit(wait, cx)
    }

    /// Uses `permit` for a request that the edge sends now.
    ///
    /// If the permit has expired, returns `None`: the request waits again, in its old place.
    ///
    /// # Errors
    ///
    /// If the request may not be sent any more. Then its wait has ended.
    fn send(permit: Self::Permit, wait: &mut Self::Wait) -> Result<Option<Self::Call>, Limited>;

    /// Polls for the loss of the call's in-flight slot. After it, the edge has to cancel the call.
    fn poll_lost(call: &Self::Call, cx: &mut Context<'_>) -> Poll<Limited>;

    /// Settles a call whose response has begun and that ends later: see [`ResponsePolicy::settle`]. The response shows how
    /// the request waited.
    #[cfg(feature = "grpc")]
    fn settle(_call: &Self::Call, _response: &mut impl ResponseInfo, _policy: &ResponsePolicy) {}

    /// Ends `call` with its response, and leaves `None` there. The response may get a
    /// [`Settlement`](crate::Settlement). The call is in the place where the edge
    /// has kept it, so that it need not be copied.
    ///
    /// `repeat` holds what the edge needs to send the request again. If it is `None`, the call is
    /// not retried.
    fn leave<T>(
        call: &mut Option<Self::Call>,
        response: &mut impl ResponseInfo,
        policy: &ResponsePolicy,
        repeat: Option<T>,
    ) -> Departure<Self::Wait, T>;
}

/// Puts into the extensions of a response how its request waited.
#[cold]
pub(super) fn show_wait(waited: &Waited, response: &mut impl ResponseInfo) {
    if let Some(extensions) = response.extensions_mut() {
        // A layer inside may have waited for longer.
        let inside = extensions.get::<Waited>();
        if inside.is_none_or(|inside| inside.duration() < waited.duration()) {
            extensions.insert(waited.clone());
        }
    }
}

/// Takes out the call that [`Gate::leave`] ends.
pub(super) fn take_call<C>(call: &mut Option<C>) -> C {
    call.take()
        .expect("a future is not polled after it was ready")
}

/// The gate's decision about a response.
pub(super) enum Departure<W, T, P = Option<InFlightSlot>> {
    /// The caller gets the response. The call is in flight until its slot is dropped.
    Pass(P),
    /// The upstream refused the request, which waits to be sent again. The edge drops the response.
    Retry(W, T),
    /// The upstream refused the request, and the caller gets an error.
    Refuse(Limited),
}
