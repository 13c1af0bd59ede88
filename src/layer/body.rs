//! Calls that are in flight until the body of their response ends.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::service::{CloneService, Edge, RateLimit, ResponseFuture};
use crate::error::{BoxError, Error};
use crate::key::RequestInfo;
use crate::layer::RateLimitLayer;
use crate::limiter::InFlightSlot;
use crate::signal::ResponseInfo;

/// A [`RateLimitLayer`] with calls that are in flight until the body of their response ends or is
/// dropped. [`RateLimitLayer::in_flight_until_body_end`] returns it.
///
/// It is a `tower_layer::Layer` and a `reqwest_middleware::Middleware`, as the [`RateLimitLayer`]
/// is.
#[derive(Clone, Debug)]
pub struct InFlightUntilBodyEnd {
    pub(super) layer: RateLimitLayer,
}

impl<S: CloneService> Layer<S> for InFlightUntilBodyEnd {
    type Service = RateLimit<S, Self>;

    fn layer(&self, inner: S) -> RateLimit<S, Self> {
        RateLimit::new(self.layer.clone(), inner)
    }
}

impl Edge for InFlightUntilBodyEnd {
    type Gate = RateLimitLayer;
}

impl<S, R> Service<R> for RateLimit<S, InFlightUntilBodyEnd>
where
    R: RequestInfo,
    S: Service<R> + CloneService,
    S::Response: ResponseInfo + TrackBody,
    S::Error: Into<BoxError>,
{
    type Response = <S::Response as TrackBody>::Tracked;
    type Error = Error;
    type Future = ResponseFuture<S, R, InFlightUntilBodyEnd>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.0.inner.poll_ready(cx).map_err(Error::inner)
    }

    fn call(&mut self, request: R) -> Self::Future {
        ResponseFuture {
            inner: self.0.call(request, None),
        }
    }
}

impl<S, R> Future for ResponseFuture<S, R, InFlightUntilBodyEnd>
where
    S: Service<R> + CloneService,
    S::Response: ResponseInfo + TrackBody,
    S::Error: Into<BoxError>,
{
    type Output = Result<<S::Response as TrackBody>::Tracked, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().inner.poll_with(cx, S::Response::track)
    }
}

/// A call in flight. Dropping the value ends the call.
#[must_use = "dropping it ends the call"]
#[derive(Debug)]
pub struct InFlight(pub(super) Option<InFlightSlot>);

impl InFlight {
    /// Polls for the error of a call that must be cancelled, because the store may have given its
    /// in-flight slot to another call; see [`Sent::revoked`](crate::Sent::revoked).
    pub fn poll_lost(&self, cx: &Context<'_>) -> Poll<Error> {
        match &self.0 {
            Some(in_flight_slot) => in_flight_slot.poll_limited(cx).map(Error::from),
            None => Poll::Pending,
        }
    }
}

/// A response that can keep its call in flight until its body ends.
///
/// Implemented for `http::Response<B>` and, with the feature `reqwest`, for `reqwest::Response`.
pub trait TrackBody {
    /// The response with the call in its body.
    type Tracked;

    /// Keeps `call` in flight until the body of this response ends or is dropped.
    fn track(self, call: InFlight) -> Self::Tracked;
}

impl<B: Body> TrackBody for http::Response<B> {
    type Tracked = http::Response<InFlightBody<B>>;

    fn track(self, call: InFlight) -> Self::Tracked {
        self.map(|body| InFlightBody::new(body, call))
    }
}

pin_project! {
    /// A response body that keeps its call in flight until it ends or is dropped.
    #[derive(Debug)]
    pub struct InFlightBody<B> {
        #[pin]
        body: B,
        // `None` once the body has ended.
        call: Option<InFlight>,
    }
}

impl<B: Body> InFlightBody<B> {
    /// Wraps `body`. If it is empty, the call ends now.
    pub(super) fn new(body: B, call: InFlight) -> Self {
        let call = (!body.is_end_stream()).then_some(call);
        InFlightBody { body, call }
    }
}

impl<B> Body for InFlightBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let mut this = self.project();
        if let Some(Poll::Ready(lost)) = this.call.as_ref().map(|call| call.poll_lost(cx)) {
            *this.call = None;
            return Poll::Ready(Some(Err(lost.into())));
        }
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) || this.body.is_end_stream() {
            *this.call = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
