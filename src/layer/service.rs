//! The Tower service and its future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::error::{BoxError, Error, Limited};
use crate::key::{AsRequestInfo, RequestInfo};
use crate::layer::{Entered, RateLimitLayer, ResponsePolicy, leave};
use crate::limiter::{Permit, Seat, Sent, Waiter};
use crate::signal::AsResponseInfo;

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> RateLimit<S> {
        RateLimit { inner, layer: self.clone() }
    }
}

/// The service of a [`RateLimitLayer`].
///
/// `poll_ready` asks the service inside and nothing else; the permit is taken in `call`, because only there the request,
/// and with it the key, is known.
///
/// A response future may be dropped at any time: a place in the line is given up, a slot that was not used goes to the
/// next. Once the service inside was called, the permit counts as spent.
///
/// Poll a response future as soon as you have it: where it need not wait, the service inside has been called, but most
/// services send when they are first polled, and a request that is sent long after its permit may be one too many.
#[derive(Clone, Debug)]
pub struct RateLimit<S> {
    inner: S,
    layer: RateLimitLayer,
}

impl<S> RateLimit<S> {
    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside, to be changed.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Takes it out of the layer.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, R> Service<R> for RateLimit<S>
where
    R: AsRequestInfo,
    S: Service<R> + Clone,
    S::Response: AsResponseInfo,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = ResponseFuture<S, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx).map_err(Error::inner)
    }

    fn call(&mut self, request: R) -> ResponseFuture<S, R> {
        match self.layer.enter(&RequestInfo::new(&request)) {
            Entered::Sent(sent) => {
                let state = State::Calling { call: self.inner.call(request) };
                ResponseFuture { state, sent: Some(sent), policy: self.layer.policy() }
            }
            Entered::Waiting(waiter) => self.call_later(Ok(waiter), request),
            Entered::Limited(limited) => self.call_later(Err(limited), request),
        }
    }
}

impl<S: Clone> RateLimit<S> {
    /// The service that is ready now can neither wait with the request, where it would keep others from its resources,
    /// nor stay here, where it might keep the only one: a fresh clone takes its place.
    #[cold]
    fn call_later<R>(&mut self, waiter: Result<Box<Waiter>, Limited>, request: R) -> ResponseFuture<S, R>
    where
        S: Service<R>,
    {
        let fresh = self.inner.clone();
        let readied = std::mem::replace(&mut self.inner, fresh);
        drop(readied);
        let state = match waiter {
            Ok(waiter) => {
                let errand = Errand { waiter, permit: Unsent(None), inner: self.inner.clone(), request };
                State::Waiting { errand: Some(Box::new(errand)) }
            }
            Err(limited) => State::Refused { limited: Some(limited) },
        };
        ResponseFuture { state, sent: None, policy: self.layer.policy() }
    }
}

pin_project! {
    /// The future of a [`RateLimit`] service.
    pub struct ResponseFuture<S, R>
    where
        S: Service<R>,
    {
        #[pin]
        state: State<S, R>,
        sent: Option<Sent>,
        policy: ResponsePolicy,
    }
}

pin_project! {
    // Waiting => Calling | done(Limited) | done(Inner)     the service inside is asked only after the wait,
    // Calling => done                                      so it holds nothing while we queue
    // Refused => done(Limited)
    #[project = StateProj]
    enum State<S, R>
    where
        S: Service<R>,
    {
        Calling { #[pin] call: S::Future },
        Waiting { errand: Option<Box<Errand<S, R>>> },
        Refused { limited: Option<Limited> },
    }
}

/// What waits: first in line for a permit, then for the service inside. Boxed, so that the fast path stays small.
struct Errand<S, R> {
    waiter: Box<Waiter>,
    permit: Unsent,
    inner: S,
    request: R,
}

/// A permit under which nothing was sent yet.
struct Unsent(Option<Permit>);

impl Drop for Unsent {
    fn drop(&mut self) {
        if let Some(permit) = self.0.take() {
            permit.give_back();
        }
    }
}

impl<S, R> Errand<S, R>
where
    S: Service<R>,
    S::Error: Into<BoxError>,
{
    // in line => readying | Err(Limited)
    // readying => Ok | Err(Inner) | in line, in its old place, when the permit died while the service got ready
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Permit, Error>> {
        loop {
            if self.permit.0.is_none() {
                self.permit.0 = Some(ready!(Pin::new(&mut *self.waiter).poll(cx))?);
            }
            ready!(self.inner.poll_ready(cx)).map_err(Error::inner)?;
            match self.permit.0.take() {
                Some(permit) if permit.is_alive() => return Poll::Ready(Ok(permit)),
                Some(permit) => self.waiter.wait_again(permit),
                None => {}
            }
        }
    }
}

impl<S, R> ResponseFuture<S, R>
where
    R: AsRequestInfo,
    S: Service<R>,
    S::Response: AsResponseInfo,
    S::Error: Into<BoxError>,
{
    /// What `made` makes of the response, whose call is in flight until its seat, if it has one, is dropped.
    #[inline]
    pub(super) fn poll_answer<T>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        made: impl FnOnce(S::Response, Option<Seat>) -> T,
    ) -> Poll<Result<T, Error>> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProj::Calling { call } => match call.poll(cx) {
                    Poll::Ready(Ok(response)) => {
                        let sent = this.sent.take().expect("a future is not polled after it was ready");
                        let seat = leave(sent, &response, this.policy)?;
                        return Poll::Ready(Ok(made(response, seat)));
                    }
                    Poll::Ready(Err(error)) => {
                        *this.sent = None;
                        return Poll::Ready(Err(Error::inner(error)));
                    }
                    Poll::Pending => {
                        let lost = this.sent.as_ref().map_or(Poll::Pending, |sent| sent.poll_lost(cx));
                        return lost.map(|limited| Err(limited.into()));
                    }
                },
                StateProj::Waiting { errand } => {
                    let waiting = errand.as_mut().expect("a future is not polled after it was ready");
                    let permit = match ready!(waiting.poll(cx)) {
                        Ok(permit) => permit,
                        Err(error) => {
                            *errand = None;
                            return Poll::Ready(Err(error));
                        }
                    };
                    let Some(Errand { mut inner, request, .. }) = errand.take().map(|errand| *errand) else {
                        unreachable!("it was just polled");
                    };
                    let call = inner.call(request);
                    *this.sent = Some(permit.sent());
                    this.state.set(State::Calling { call });
                }
                StateProj::Refused { limited } => {
                    let limited = limited.take().expect("a future is not polled after it was ready");
                    return Poll::Ready(Err(limited.into()));
                }
            }
        }
    }
}

impl<S, R> Future for ResponseFuture<S, R>
where
    R: AsRequestInfo,
    S: Service<R>,
    S::Response: AsResponseInfo,
    S::Error: Into<BoxError>,
{
    type Output = Result<S::Response, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_answer(cx, |response, _| response)
    }
}

impl<S, R> fmt::Debug for ResponseFuture<S, R>
where
    S: Service<R>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
