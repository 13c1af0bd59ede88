//! The Tower service of every gate, and its future.
//!
//! Both are written once, generic over the layer and its [`Gate`]. [`edge!`] implements the traits
//! `Service` and `Future` for each layer.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::response_policy::ResponsePolicy;
use super::seam::{Departure, Gate};
use super::{AdaptiveThrottleLayer, RateLimitLayer};
use crate::admission::Admission;
use crate::error::{BoxError, Error, Limited};
use crate::key::RequestInfo;
use crate::limiter::{Mark, forget_panic, is_unsure};
use crate::signal::ResponseInfo;

/// A service that a layer of this crate can be put around, because it is `Clone`. Implemented for each
/// type that is.
///
/// A request that waits takes a clone of the service inside, which makes the call when the permit is
/// there. If a service is not `Clone`, put a `tower::buffer::Buffer` around it: its handle is. The layers ask
/// for it, too, so that the compiler says so where the layer is put around the service.
///
/// ```compile_fail,E0277
/// use http::{Request, Response};
/// use tollgate::RateLimitLayer;
/// use tower::util::BoxService;
/// use tower::{BoxError, ServiceBuilder};
///
/// fn limited(client: BoxService<Request<String>, Response<String>, BoxError>, limit: RateLimitLayer) {
///     ServiceBuilder::new().layer(limit).service(client); // the compiler says what to write
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "a layer of tollgate cannot be put around `{Self}`, because it is not `Clone`",
    label = "this service is not `Clone`",
    note = "put a buffer inside, whose handle is: `.layer(limit).layer(BufferLayer::new(1024))` with `tower::buffer::BufferLayer`",
    note = "on a builder that begins inside, as that of kube: `.with_layer(&BufferLayer::new(1024)).with_layer(&limit)`",
    note = "or use `tower::util::BoxCloneService` in place of `BoxService`"
)]
pub trait CloneService: Clone {}

#[diagnostic::do_not_recommend]
impl<S: Clone> CloneService for S {}

/// Copies a request, so that it can be sent again. Returns `None` for a request that can be sent
/// only once.
pub(super) type CloneFn<R> = fn(&R) -> Option<R>;

/// A layer of this crate: what services and their futures are generic over.
///
/// Each layer has its own implementations of `Service` and `Future`, so that the compiler names what a
/// service lacks and not this trait.
pub trait Edge {
    /// The gate behind the layer.
    #[expect(private_bounds, reason = "no other crate implements the trait")]
    type Gate: Gate;
}

/// The Tower service of a [`RateLimitLayer`], and of each other layer `L` of this crate.
///
/// `poll_ready` polls the inner service and nothing else. The permit is acquired in `call`, because the
/// key is known only when the request is there.
///
/// Poll the response future as soon as you have it. If the request need not wait, `call` has called
/// the inner service, but most services send a request when their future is first polled. If a request
/// is sent long after its permit was granted, the upstream may see more requests than its limit allows.
///
/// # Cancel safety
///
/// A response future may be dropped at any time. A request that waits gives up its place in the queue,
/// and an unused slot goes to the next request. Once the inner service was called, the permit counts as
/// used. To an adaptive layer, the request is then one without a response.
pub struct RateLimit<S, L: Edge = RateLimitLayer> {
    gate: L::Gate,
    pub(super) inner: S,
}

/// The Tower service of an [`AdaptiveThrottleLayer`].
pub type AdaptiveThrottle<S> = RateLimit<S, AdaptiveThrottleLayer>;

impl<S, L: Edge> RateLimit<S, L> {
    pub(super) fn new(gate: L::Gate, inner: S) -> Self {
        RateLimit { gate, inner }
    }

    /// Returns the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns the inner service without the layer.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: Clone, L: Edge> Clone for RateLimit<S, L> {
    fn clone(&self) -> Self {
        RateLimit::new(self.gate.clone(), self.inner.clone())
    }
}

impl<S: fmt::Debug, L: Edge> fmt::Debug for RateLimit<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

#[expect(private_bounds, reason = "all of it is private")]
impl<S: Clone, L: Edge<Gate = G>, G: Gate> RateLimit<S, L> {
    /// Brings `request` to the gate. If `clone` is given, the future sends a refused request again.
    // Not inlined: `Service::call` would build the future on its stack and copy it, which cost 10 ns
    // a call.
    #[inline(never)]
    pub(super) fn begin<R>(
        &mut self,
        request: R,
        clone: Option<CloneFn<R>>,
    ) -> ResponseFuture<S, R, L>
    where
        R: RequestInfo,
        S: Service<R>,
    {
        let admitted = match self.gate.enter_fast(&request) {
            Ok(admitted) => admitted,
            Err(entry) => return self.call_slow(entry, request, clone),
        };
        if clone.is_some() {
            return self.call_granted(self.gate.sent(admitted), request, clone);
        }
        self.call_now(admitted, request)
    }

    /// Makes the future of a request that was admitted at once.
    // The inner service writes its future to its place in the result. The compiler allows that if
    // nothing is to be dropped when the inner service panics, and if no other function gets the
    // place of the result. So nothing is made before the inner service is called, and this function
    // is not inlined. Otherwise the future is copied, which cost 7 ns for a future of 112 bytes.
    #[inline(never)]
    fn call_now<R>(&mut self, admitted: G::Admitted, request: R) -> ResponseFuture<S, R, L>
    where
        S: Service<R>,
    {
        let mark = Mark::set();
        let response = self.inner.call(request);
        // Without a branch or a call that may panic, because the future would be copied after it.
        mark.remove();
        ResponseFuture {
            state: GatedState::Calling {
                response,
                call: Some(self.gate.sent(admitted)),
                repeat: None,
            },
            policy: ResponsePolicy::default(),
        }
    }

    /// Makes the future of a request that was admitted on the slow path, or that may be sent again.
    // Not inlined: `clone` may keep the address of the request. In `call`, the compiler would then
    // copy the request once more, which cost 5 ns.
    #[inline(never)]
    fn call_granted<R>(
        &mut self,
        call: G::Call,
        request: R,
        clone: Option<CloneFn<R>>,
    ) -> ResponseFuture<S, R, L>
    where
        S: Service<R>,
    {
        ResponseFuture {
            state: GatedState::calling(call, &mut self.inner, request, clone),
            policy: self.gate.policy(),
        }
    }

    /// Brings a request to the gate for which no permit was at hand, and makes its future.
    #[cold]
    #[inline(never)]
    fn call_slow<R>(
        &mut self,
        entry: G::Entry,
        request: R,
        clone: Option<CloneFn<R>>,
    ) -> ResponseFuture<S, R, L>
    where
        R: RequestInfo,
        S: Service<R>,
    {
        let state = if is_unsure() {
            // Only when the future is polled is it known whether another layer is around: see `limiter::around`. So
            // the request comes to the gate then, and keeps the service that is ready.
            let fresh = self.inner.clone();
            let unsent = Unsent {
                inner: mem::replace(&mut self.inner, fresh),
                request,
                clone,
            };
            GatedState::Comes {
                comes: Some(Box::new((self.gate.clone(), unsent))),
            }
        } else {
            let wait = match self.gate.enter_slow(entry, &request) {
                Admission::Go(call) => return self.call_granted(call, request, clone),
                Admission::Wait(wait) => Ok(wait),
                Admission::No(limited) => Err(limited),
            };
            // The inner service is ready, and that may reserve a resource in it, such as its only connection. A
            // request that waits must not keep that reservation, nor may it stay in `self`. So a fresh clone
            // replaces the ready service.
            self.inner = self.inner.clone();
            match wait {
                Ok(wait) => {
                    let inner = self.inner.clone();
                    let unsent = Unsent {
                        inner,
                        request,
                        clone,
                    };
                    GatedState::waiting(Some(self.gate.clone()), wait, unsent)
                }
                Err(limited) => GatedState::Refused {
                    limited: Some(limited),
                },
            }
        };
        ResponseFuture {
            state,
            policy: self.gate.policy(),
        }
    }
}

pin_project! {
    /// The response future of a [`RateLimit`] service, also of one of another layer `L`.
    pub struct ResponseFuture<S, R, L = RateLimitLayer>
    where
        S: Service<R>,
        L: Edge,
    {
        #[pin]
        state: GatedState<L::Gate, S, R>,
        policy: ResponsePolicy,
    }
}

impl<S, R, L> fmt::Debug for ResponseFuture<S, R, L>
where
    S: Service<R>,
    L: Edge,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

pin_project! {
    // - Waiting => Calling: the permit was granted, and after it the inner service got ready
    // - Waiting => done(Limited) | done(Inner)
    // - Calling => done(Response) | done(Limited) | done(Inner)
    // - Calling => Waiting: the upstream refused the request, and it is sent again
    // - Refused => done(Limited)
    // - Comes => Calling | Waiting | Refused
    #[project = StateProj]
    enum GatedState<G, S, R>
    where
        G: Gate,
        S: Service<R>,
    {
        Calling {
            #[pin]
            response: S::Future,
            call: Option<G::Call>,
            repeat: Option<Box<Unsent<S, R>>>,
        },
        Waiting { pending: Option<Box<WaitingRequest<G, S, R>>> },
        Refused { limited: Option<Limited> },
        Comes { comes: Option<Box<(G, Unsent<S, R>)>> },
    }
}

/// A request that is sent later or again, and the service that sends it.
pub(super) struct Unsent<S, R> {
    inner: S,
    request: R,
    /// Given if the request is sent again when it is refused.
    clone: Option<CloneFn<R>>,
}

impl<G: Gate, S: Service<R>, R> GatedState<G, S, R> {
    /// Sends `request` to `inner`, and keeps a copy if it may be sent again.
    #[inline(always)]
    fn calling(call: G::Call, inner: &mut S, request: R, clone: Option<CloneFn<R>>) -> Self
    where
        S: Clone,
    {
        let copy = clone.and_then(|clone| clone(&request));
        let repeat = copy.map(|request| {
            Box::new(Unsent {
                inner: inner.clone(),
                request,
                clone,
            })
        });
        GatedState::Calling {
            response: G::around(&call, || inner.call(request)),
            call: Some(call),
            repeat,
        }
    }

    fn waiting(gate: Option<G>, wait: G::Wait, unsent: Unsent<S, R>) -> Self {
        GatedState::Waiting {
            pending: Some(Box::new(WaitingRequest {
                gate,
                wait,
                permit: None,
                is_ready: false,
                unsent,
            })),
        }
    }
}

/// A request that waits: first for a permit, then for the inner service.
///
/// It is boxed, so that the future of a request that need not wait stays small.
struct WaitingRequest<G: Gate, S, R> {
    /// `None` if the request is sent again: then its cost does not change.
    gate: Option<G>,
    wait: G::Wait,
    permit: Option<G::Permit>,
    /// Whether the inner service was ready for it. That may reserve a resource there.
    is_ready: bool,
    unsent: Unsent<S, R>,
}

impl<G, S, R> WaitingRequest<G, S, R>
where
    G: Gate,
    R: RequestInfo,
    S: Service<R> + Clone,
    S::Error: Into<BoxError>,
{
    /// Polls until the request may be sent and the inner service is ready for it.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<G::Call, Error>> {
        loop {
            if self.permit.is_none() {
                let polled = match &self.gate {
                    Some(gate) => gate.poll_estimated(&mut self.wait, &self.unsent.request, cx),
                    None => G::poll_permit(&mut self.wait, cx),
                };
                // Not at each miss: its next slot is often due, and another request would take its place in the inner service.
                if polled.is_pending() && mem::take(&mut self.is_ready) {
                    self.unsent.inner = self.unsent.inner.clone();
                }
                self.permit = Some(ready!(polled)?);
            }
            ready!(self.unsent.inner.poll_ready(cx)).map_err(Error::inner)?;
            self.is_ready = true;
            // The permit may have expired while the inner service got ready. Then the request waits
            // again.
            if let Some(permit) = self.permit.take()
                && let Some(call) = G::send(permit, &mut self.wait)?
            {
                return Poll::Ready(Ok(call));
            }
        }
    }
}

#[expect(private_bounds, reason = "all of it is private")]
impl<S, R, L, G> ResponseFuture<S, R, L>
where
    R: RequestInfo,
    S: Service<R> + Clone,
    S::Error: Into<BoxError>,
    L: Edge<Gate = G>,
    G: Gate,
{
    /// Polls until the request was sent. Ready with an error if it is refused.
    // Not inlined, so that polling the inner service needs little room on the stack.
    #[cold]
    #[inline(never)]
    fn poll_admission(
        mut state: Pin<&mut GatedState<G, S, R>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Error>> {
        match state.as_mut().project() {
            StateProj::Calling { .. } => Poll::Ready(Ok(())),
            StateProj::Waiting { pending } => {
                let waiting = pending
                    .as_mut()
                    .expect("a future is not polled after it was ready");
                let result = ready!(waiting.poll(cx));
                let waited = pending.take().expect("it was just polled");
                let call = result?;
                if let Some(gate) = &waited.gate {
                    gate.sends(&waited.unsent.request);
                }
                let unsent = waited.unsent;
                let mut inner = unsent.inner;
                state.set(GatedState::calling(
                    call,
                    &mut inner,
                    unsent.request,
                    unsent.clone,
                ));
                Poll::Ready(Ok(()))
            }
            StateProj::Refused { limited } => {
                let limited = limited
                    .take()
                    .expect("a future is not polled after it was ready");
                Poll::Ready(Err(limited.into()))
            }
            StateProj::Comes { comes } => {
                let comes = comes
                    .take()
                    .expect("it leaves this state when it is polled");
                let (gate, unsent) = *comes;
                forget_panic();
                let mut service = RateLimit::<S, L>::new(gate, unsent.inner);
                state.set(service.begin(unsent.request, unsent.clone).state);
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Polls for the response. The call ends with its head.
    #[inline]
    pub(super) fn poll_head(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<S::Response, Error>>
    where
        S::Response: ResponseInfo,
    {
        // The call ends before the response is moved, because the response would be copied once more
        // otherwise.
        self.poll_leaving(
            cx,
            |call, response, policy, repeat| match G::leave(call, response, policy, repeat) {
                Departure::Pass(call) => {
                    drop(call);
                    Departure::Pass(())
                }
                Departure::Retry(wait, repeat) => Departure::Retry(wait, repeat),
                Departure::Refuse(limited) => Departure::Refuse(limited),
            },
            |response, ()| response,
        )
    }

    /// Polls for the response. `leave` does what [`Gate::leave`] does, and `finish` makes the response for the caller with
    /// what it leaves of the call.
    #[inline]
    pub(super) fn poll_leaving<P, T>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        leave: impl Fn(
            &mut Option<G::Call>,
            &mut S::Response,
            &ResponsePolicy,
            Option<Box<Unsent<S, R>>>,
        ) -> Departure<G::Wait, Box<Unsent<S, R>>, P>,
        finish: impl FnOnce(S::Response, P) -> T,
    ) -> Poll<Result<T, Error>> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProj::Calling {
                    response,
                    call,
                    repeat,
                } => {
                    let begun = call.as_ref().and_then(G::begin_inner);
                    // The arms use the response where the inner service has left it. If it came out
                    // of this `match`, it would be copied once more, which cost 10 ns.
                    match response.poll(cx) {
                        Poll::Ready(Ok(mut response)) => {
                            drop(begun);
                            match leave(call, &mut response, this.policy, repeat.take()) {
                                Departure::Pass(call) => {
                                    return Poll::Ready(Ok(finish(response, call)));
                                }
                                Departure::Refuse(limited) => {
                                    return Poll::Ready(Err(limited.into()));
                                }
                                Departure::Retry(wait, repeat) => {
                                    // The body may hold a connection and an in-flight slot that the
                                    // next attempt needs.
                                    drop(response);
                                    this.state.set(GatedState::waiting(None, wait, *repeat));
                                }
                            }
                        }
                        Poll::Ready(Err(error)) => {
                            drop(begun);
                            drop(call.take());
                            return Poll::Ready(Err(Error::inner(error)));
                        }
                        Poll::Pending => {
                            let Some(call) = call else {
                                return Poll::Pending;
                            };
                            drop(begun);
                            let limited = ready!(G::poll_lost(call, cx));
                            // Dropping the inner future cancels the call.
                            this.state.set(GatedState::Refused { limited: None });
                            return Poll::Ready(Err(limited.into()));
                        }
                    }
                }
                StateProj::Waiting { .. } | StateProj::Refused { .. } | StateProj::Comes { .. } => {
                    ready!(Self::poll_admission(this.state.as_mut(), cx))?;
                }
            }
        }
    }
}

/// Implements the Tower service of a layer, and its future.
///
/// `clone` copies a request, if the service sends refused requests again. `poll` polls the future. The short form also
/// implements [`Edge`] and `Layer`. There the calls end with the head of their response, which passes unchanged.
macro_rules! edge {
    ($layer:ty { gate: |$this:ident| $gate:expr => $of_type:ty, request: $($bound:ident)&+, clone: $clone:expr }) => {
        impl $crate::layer::service::Edge for $layer {
            type Gate = $of_type;
        }

        impl $layer {
            pub(super) fn gate(&self) -> &$of_type {
                let $this = self;
                $gate
            }
        }

        impl<S: $crate::layer::service::CloneService> tower_layer::Layer<S> for $layer {
            type Service = $crate::layer::service::RateLimit<S, Self>;

            fn layer(&self, inner: S) -> Self::Service {
                $crate::layer::service::RateLimit::new(self.gate().clone(), inner)
            }
        }

        $crate::layer::service::edge! {
            impl[] $layer {
                inner: S,
                where: [R: $($bound +)+, S: tower_service::Service<R, Response: $crate::signal::ResponseInfo>],
                response: S::Response,
                clone: $clone,
                poll: |future, cx| future.poll_head(cx),
            }
        }
    };
    (impl[$($generics:tt)*] $layer:ty {
        inner: $inner:ty,
        where: [$($bounds:tt)*],
        response: $response:ty,
        clone: $clone:expr,
        poll: |$future:ident, $cx:ident| $poll:expr $(,)?
    }) => {
        impl<S, R, $($generics)*> tower_service::Service<R> for $crate::layer::service::RateLimit<$inner, $layer>
        where
            $($bounds)*,
            S: $crate::layer::service::CloneService,
            S::Error: Into<$crate::error::BoxError>,
        {
            type Response = $response;
            type Error = $crate::Error;
            type Future = $crate::layer::service::ResponseFuture<$inner, R, $layer>;

            fn poll_ready(
                &mut self,
                cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Result<(), $crate::Error>> {
                self.inner.poll_ready(cx).map_err($crate::Error::inner)
            }

            #[inline]
            fn call(&mut self, request: R) -> Self::Future {
                self.begin(request, $clone)
            }
        }

        impl<S, R, $($generics)*> std::future::Future for $crate::layer::service::ResponseFuture<$inner, R, $layer>
        where
            $($bounds)*,
            S: $crate::layer::service::CloneService,
            S::Error: Into<$crate::error::BoxError>,
        {
            type Output = Result<$response, $crate::Error>;

            fn poll(
                self: std::pin::Pin<&mut Self>,
                $cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Self::Output> {
                let $future = self;
                $poll
            }
        }
    };
}

pub(super) use edge;
