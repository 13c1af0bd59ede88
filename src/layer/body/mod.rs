//! Layers that look into the bodies of responses: for calls that are in flight until the body ends, for refusals of which
//! only the body says more, and for true costs that stand at the end of a body.
//!
//! ```text
//!            ┌─ it may be a refusal ── up to 64 kB are read ─┐
//! response ──┤                                               ├──> Gate::leave ──> WatchedBody ── end ──> the call ends,
//!            └─ any other ───────────────────────────────────┘                                           the cost is stated
//! ```
//!
//! [`BodyOpener`] is put between the gate and the service inside, so that the gate gets an [`Opened`] response with the
//! signal of its body. When the gate has let it pass, it becomes a response for the caller again.

mod opened;
mod watched;

#[cfg(feature = "reqwest-middleware")]
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_layer::Layer;
use tower_service::Service;

use super::seam::Gate;
use super::service::{CloneService, Edge, RateLimit, edge};
use super::{AdaptiveThrottleLayer, RateLimitLayer};
use crate::key::{RequestInfo, RequestRef};
use crate::limiter::{Limiter, Settlement};
use crate::signal::Spent;

pub use opened::{Opened, Opening, TrackBody};
pub use watched::WatchedBody;

/// A [`RateLimitLayer`] or an [`AdaptiveThrottleLayer`] that looks into the bodies of responses.
///
/// [`read_bodies`](RateLimitLayer::read_bodies) and
/// [`in_flight_until_body_end`](RateLimitLayer::in_flight_until_body_end) return it, and can be joined. It is a
/// `tower_layer::Layer` and a `reqwest_middleware::Middleware`, as the layer is.
///
/// Around a service of `http::Request`, the response becomes an `http::Response<`[`WatchedBody<B>`]`>`. Around a
/// `reqwest::Client` and in reqwest-middleware, the type of the response stays the same. The caller gets each frame of a
/// body unchanged.
#[derive(Clone, Debug)]
pub struct BodyLayer<L = RateLimitLayer> {
    pub(super) layer: L,
    pub(super) plan: BodyPlan,
}

/// What a [`BodyLayer`] does with bodies.
#[derive(Clone, Default)]
pub(crate) struct BodyPlan {
    looks: Looks,
    on_request: Option<OnRequest>,
}

/// What is done with each body.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::layer) struct Looks {
    /// Whether the bodies of refusals are read.
    reads: bool,
    /// Whether calls are in flight until the body ends.
    holds_call: bool,
}

/// Called with each request when it is sent. Returns what is done at the end of its body.
pub(super) type OnRequest = Arc<dyn Fn(&RequestRef<'_>) -> AtEnd + Send + Sync>;

/// Called when a body has ended, with what it states. Not called if the body breaks or is dropped before.
pub(super) type AtEnd = Box<dyn FnOnce(Spent, Option<Settlement>) + Send + Sync>;

impl BodyPlan {
    /// Returns what is done at the end of the body of `request`, which is sent now.
    pub(super) fn on_request(&self, request: &RequestRef<'_>) -> Option<AtEnd> {
        let on_request = self.on_request.as_ref()?;
        Some(on_request(request))
    }

    /// Takes the body of `response` in hand.
    #[cfg(feature = "reqwest-middleware")]
    pub(super) async fn open<T: TrackBody>(&self, response: T, at_end: Option<AtEnd>) -> Opened<T> {
        let response = std::future::ready(Ok::<_, Infallible>(response));
        let Ok(opened) = Opening::new(response, self.looks, at_end).await;
        opened
    }
}

impl fmt::Debug for BodyPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyPlan")
            .field("looks", &self.looks)
            .finish_non_exhaustive()
    }
}

impl<L> BodyLayer<L> {
    pub(super) fn new(layer: L) -> Self {
        let plan = BodyPlan::default();
        BodyLayer { layer, plan }
    }

    /// Also reads the bodies of refusals: see [`RateLimitLayer::read_bodies`].
    #[must_use]
    pub fn read_bodies(mut self) -> Self {
        self.plan.looks.reads = true;
        self
    }

    /// Does what `on_request` returns at the end of each body.
    #[cfg(feature = "llm")]
    pub(super) fn at_end_of_bodies(mut self, on_request: OnRequest) -> Self {
        self.plan.on_request = Some(on_request);
        self
    }
}

impl BodyLayer {
    /// Also keeps calls in flight until the body ends: see [`RateLimitLayer::in_flight_until_body_end`].
    #[must_use]
    pub fn in_flight_until_body_end(mut self) -> Self {
        self.plan.looks.holds_call = true;
        self
    }

    /// Returns the limiter of the layer: see [`RateLimitLayer::limiter`].
    pub fn limiter(&self) -> Limiter {
        self.layer.limiter()
    }

    /// Returns the limiter of one limit of the layer: see [`RateLimitLayer::limiter_of`].
    pub fn limiter_of(&self, name: &str) -> Option<Limiter> {
        self.layer.limiter_of(name)
    }
}

impl RateLimitLayer {
    /// Returns this layer with calls that are [in flight](crate::Quota::in_flight) until the body
    /// of their response ends or is dropped. Without it, a call ends with the head of its response.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::{BodyExt, Full};
    /// use tollgate::{Key, Quota, RateLimitLayer};
    /// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new(Full::new(Bytes::from("hello")))) });
    /// let limit = RateLimitLayer::new(Quota::in_flight(1))?;
    /// let limiter = limit.limiter();
    /// let limit = limit.in_flight_until_body_end();
    /// let mut service = ServiceBuilder::new().layer(limit).service(client);
    ///
    /// let request = Request::get("http://example.com/").body(String::new())?;
    /// let response = service.ready().await?.call(request).await?;
    /// assert_eq!(limiter.peek(Key::ALL).await?.free, 0);
    ///
    /// let body = response.into_body().collect().await?;
    /// assert_eq!(limiter.peek(Key::ALL).await?.free, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn in_flight_until_body_end(self) -> BodyLayer {
        BodyLayer::new(self).in_flight_until_body_end()
    }

    /// Returns this layer with [signals](crate::Signal::read_with_body) that are also read from bodies, for servers that
    /// say only there that a limit was hit, or when to retry. Without it, signals are read from status and headers.
    ///
    /// - Of a response with a status from 400 on, up to 64 kB of the body are read before the response is passed on. If
    ///   the body is longer, or takes longer than a second, status and headers decide.
    /// - A success is read if it states that it is JSON of up to 64 kB, because some servers put refusals into a 200.
    /// - All others, such as streams, are passed on at once.
    ///
    /// The caller gets the whole body in any case. See [`BodyLayer`] for the type of the response.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::{BodyExt, Full};
    /// use tollgate::{Key, Quota, RateLimitLayer};
    /// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// let client = service_fn(|_: Request<String>| async {
    ///     let body = Full::new(Bytes::from(r#"{"error": "rate limited, try again in 30 seconds"}"#));
    ///     Ok::<_, BoxError>(Response::builder().status(429).body(body)?)
    /// });
    /// let limit = RateLimitLayer::builder(Quota::per_second(50)).key(|_| Key::new("account")).build()?;
    /// let limiter = limit.limiter();
    /// let client = ServiceBuilder::new().layer(limit.read_bodies()).service(client);
    ///
    /// let response = client.oneshot(Request::get("http://example.com/").body(String::new())?).await?;
    /// let held = limiter.peek(Key::new("account")).await?.held;
    /// assert!(held > Some(Duration::from_secs(29)));
    /// assert_eq!(response.into_body().collect().await?.to_bytes().len(), 50);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If a response future is dropped while the body is read, nothing is learned from the response.
    pub fn read_bodies(self) -> BodyLayer {
        BodyLayer::new(self).read_bodies()
    }
}

impl AdaptiveThrottleLayer {
    /// Returns this layer with signals that are also read from bodies: see [`RateLimitLayer::read_bodies`].
    pub fn read_bodies(self) -> BodyLayer<Self> {
        BodyLayer::new(self).read_bodies()
    }
}

impl<G: Gate> Edge for BodyLayer<G> {
    type Gate = G;
}

impl<S: CloneService, G: Gate> Layer<S> for BodyLayer<G> {
    type Service = RateLimit<BodyOpener<S>, Self>;

    fn layer(&self, inner: S) -> Self::Service {
        let plan = self.plan.clone();
        RateLimit::new(self.layer.clone(), BodyOpener { inner, plan })
    }
}

edge! {
    impl[G: Gate] BodyLayer<G> {
        inner: BodyOpener<S>,
        where: [R: RequestInfo, S: Service<R, Response: TrackBody>],
        response: <S::Response as TrackBody>::Tracked,
        clone: None,
        poll: |future, cx| future.poll_leaving(cx, G::leave, Opened::close),
    }
}

/// The service inside of a [`BodyLayer`]. It reads bodies before the layer sees the response.
#[derive(Clone, Debug)]
pub struct BodyOpener<S> {
    inner: S,
    plan: BodyPlan,
}

impl<S, R> Service<R> for BodyOpener<S>
where
    R: RequestInfo,
    S: Service<R>,
    S::Response: TrackBody,
{
    type Response = Opened<S::Response>;
    type Error = S::Error;
    type Future = Opening<S::Future, S::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let at_end = self.plan.on_request(&RequestRef::new(&request));
        Opening::new(self.inner.call(request), self.plan.looks, at_end)
    }
}
