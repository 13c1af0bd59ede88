//! The Tower services of the layer that learns its pace, and their future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::error::{BoxError, Error, Limited};
use crate::key::{AsRequestInfo, Key, RequestInfo};
use crate::layer::{AdaptiveThrottleLayer, Begun, RetryingThrottleLayer};
use crate::signal::AsResponseInfo;
use crate::throttle::{Back, ThrottlePermit, Wait};

impl<S> Layer<S> for AdaptiveThrottleLayer {
    type Service = AdaptiveThrottle<S>;

    fn layer(&self, inner: S) -> AdaptiveThrottle<S> {
        AdaptiveThrottle { inner, layer: self.clone() }
    }
}

impl<S> Layer<S> for RetryingThrottleLayer {
    type Service = RetryingThrottle<S>;

    fn layer(&self, inner: S) -> RetryingThrottle<S> {
        RetryingThrottle { inner: self.layer.layer(inner) }
    }
}

/// Requests that can be sent twice.
///
/// Implemented for `http::Request<B>` where the body is `Clone`, and, with the feature `reqwest`, for `reqwest::Request`.
pub trait CloneRequest: Sized {
    /// The same request, if it can be had a second time.
    fn clone_request(&self) -> Option<Self>;
}

impl<B: Clone> CloneRequest for http::Request<B> {
    fn clone_request(&self) -> Option<Self> {
        Some(self.clone())
    }
}

#[cfg(feature = "reqwest")]
impl CloneRequest for reqwest::Request {
    fn clone_request(&self) -> Option<Self> {
        self.try_clone()
    }
}

/// The service of an [`AdaptiveThrottleLayer`].
///
/// `poll_ready` asks the service inside and nothing else; the permit is taken in `call`. A response future may be dropped
/// at any time: a place in the line is given up, and a request on its way counts as one without an answer.
#[derive(Clone, Debug)]
pub struct AdaptiveThrottle<S> {
    inner: S,
    layer: AdaptiveThrottleLayer,
}

/// The service of a [`RetryingThrottleLayer`]: as [`AdaptiveThrottle`], and it sends refused requests again.
#[derive(Clone, Debug)]
pub struct RetryingThrottle<S> {
    inner: AdaptiveThrottle<S>,
}

impl<S> AdaptiveThrottle<S> {
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

impl<S> RetryingThrottle<S> {
    /// The service inside.
    pub fn get_ref(&self) -> &S {
        self.inner.get_ref()
    }

    /// The service inside, to be changed.
    pub fn get_mut(&mut self) -> &mut S {
        self.inner.get_mut()
    }

    /// Takes it out of the layer.
    pub fn into_inner(self) -> S {
        self.inner.into_inner()
    }
}

impl<S, R> Service<R> for AdaptiveThrottle<S>
where
    R: AsRequestInfo,
    S: Service<R> + Clone,
    S::Response: AsResponseInfo,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = ThrottledFuture<S, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx).map_err(Error::inner)
    }

    fn call(&mut self, request: R) -> ThrottledFuture<S, R> {
        self.start(request, None)
    }
}

impl<S, R> Service<R> for RetryingThrottle<S>
where
    R: AsRequestInfo + CloneRequest,
    S: Service<R> + Clone,
    S::Response: AsResponseInfo,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = ThrottledFuture<S, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.inner.poll_ready(cx).map_err(Error::inner)
    }

    fn call(&mut self, request: R) -> ThrottledFuture<S, R> {
        self.inner.start(request, Some(R::clone_request))
    }
}

/// How a request can be had again.
type Clones<R> = Option<fn(&R) -> Option<R>>;

impl<S: Clone> AdaptiveThrottle<S> {
    fn start<R>(&mut self, request: R, clones: Clones<R>) -> ThrottledFuture<S, R>
    where
        R: AsRequestInfo,
        S: Service<R>,
    {
        let info = RequestInfo::new(&request);
        let (begun, host) = (self.layer.enter(&info), info.host_if_redirected());
        let (state, permit, again) = match begun {
            Begun::Leaves(permit) => {
                let again = clones.and_then(|clones| Again::of(&request, &self.inner, clones));
                (State::Calling { call: self.inner.call(request) }, Some(permit), again)
            }
            Begun::Waits(wait) => {
                // The service that is ready now can neither wait with the request nor stay behind.
                let fresh = self.inner.clone();
                drop(std::mem::replace(&mut self.inner, fresh));
                let (wait, inner) = (Box::new(wait), self.inner.clone());
                let errand = Errand { wait, permit: Unsent(None), inner, request, clones };
                (State::Waiting { errand: Some(Box::new(errand)) }, None, None)
            }
            Begun::Limited(limited) => {
                let fresh = self.inner.clone();
                drop(std::mem::replace(&mut self.inner, fresh));
                (State::Refused { limited: Some(limited) }, None, None)
            }
        };
        ThrottledFuture { state, permit, again, host, layer: self.layer.clone() }
    }
}

/// What is needed to send a request again.
struct Again<S, R> {
    inner: S,
    request: R,
    clones: fn(&R) -> Option<R>,
}

impl<S: Clone, R> Again<S, R> {
    /// Keeps a copy of `request` and of the service. Returns `None` if the request cannot be copied.
    fn of(request: &R, inner: &S, clones: fn(&R) -> Option<R>) -> Option<Box<Self>> {
        let request = clones(request)?;
        Some(Box::new(Again { inner: inner.clone(), request, clones }))
    }
}

pin_project! {
    /// The future of [`AdaptiveThrottle`] and [`RetryingThrottle`] services.
    pub struct ThrottledFuture<S, R>
    where
        S: Service<R>,
    {
        #[pin]
        state: State<S, R>,
        permit: Option<ThrottlePermit>,
        again: Option<Box<Again<S, R>>>,
        host: Option<Key>,
        layer: AdaptiveThrottleLayer,
    }
}

pin_project! {
    // Waiting => Calling | done(Limited) | done(Inner)
    // Calling => done | Waiting                 refused, and it may go again: the refusal is dropped
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
    wait: Box<Wait>,
    permit: Unsent,
    inner: S,
    request: R,
    clones: Clones<R>,
}

/// A permit under which nothing was sent yet.
struct Unsent(Option<ThrottlePermit>);

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
    // readying => Ok | Err(Inner)
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<ThrottlePermit, Error>> {
        if self.permit.0.is_none() {
            self.permit.0 = Some(ready!(Pin::new(&mut *self.wait).poll(cx))?);
        }
        ready!(self.inner.poll_ready(cx)).map_err(Error::inner)?;
        Poll::Ready(Ok(self.permit.0.take().expect("it was just there")))
    }
}

impl<S, R> Future for ThrottledFuture<S, R>
where
    S: Service<R> + Clone,
    S::Response: AsResponseInfo,
    S::Error: Into<BoxError>,
{
    type Output = Result<S::Response, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProj::Calling { call } => {
                    let answer = ready!(call.poll(cx));
                    let permit = this.permit.take().expect("a future is not polled after it was ready");
                    let response = answer.map_err(Error::inner)?;
                    let signal = this.layer.signal(permit.key(), *this.host, &response);
                    let refused = signal.limited().is_some();
                    let Some(again) = this.again.take().filter(|_| refused) else {
                        this.layer.leave(permit, &signal)?;
                        return Poll::Ready(Ok(response));
                    };
                    match permit.answered_or_back(&signal) {
                        Some(Back::Waits(wait)) => {
                            // Its body may hold a connection and a place in flight, which the next attempt needs.
                            drop(response);
                            let Again { inner, request, clones } = *again;
                            let errand =
                                Errand { wait, permit: Unsent(None), inner, request, clones: Some(clones) };
                            this.state.set(State::Waiting { errand: Some(Box::new(errand)) });
                        }
                        Some(Back::Ended(limited)) if this.layer.error_on_limit() => {
                            return Poll::Ready(Err(limited.into()));
                        }
                        _ => return Poll::Ready(Ok(response)),
                    }
                }
                StateProj::Waiting { errand } => {
                    let waiting = errand.as_mut().expect("a future is not polled after it was ready");
                    let done = ready!(waiting.poll(cx));
                    let waited = errand.take().expect("it was just polled");
                    let permit = match done {
                        Ok(permit) => permit,
                        Err(error) => return Poll::Ready(Err(error)),
                    };
                    let Errand { mut inner, request, clones, .. } = *waited;
                    *this.again = clones.and_then(|clones| Again::of(&request, &inner, clones));
                    let call = inner.call(request);
                    *this.permit = Some(permit);
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

impl<S, R> fmt::Debug for ThrottledFuture<S, R>
where
    S: Service<R>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottledFuture").finish_non_exhaustive()
    }
}
