//! The words a user says about a limit that is not known.

use std::sync::Arc;

use super::extractors::Extractors;
use super::throttle_builder::AdaptiveThrottleBuilder;
use crate::error::Limited;
use crate::key::{Key, RequestInfo};
#[cfg(doc)]
use crate::pace::Fair;
use crate::signal::{AsResponseInfo, Signal};
pub(crate) use crate::throttle::Begun;
use crate::throttle::{Throttle, ThrottlePermit};

/// Finds the pace that a server allows, where its limit is unknown or moves, and is fair to every other client without
/// talking to them. Clones share what they learn.
///
/// It learns from what answers say: refusals, what is left, when to come back. How it does so is its
/// [pace](crate::pace): by default [`Fair`], with next to no refusals and even shares for all. Where the limit is known,
/// [`RateLimitLayer`](super::RateLimitLayer) is exact. If you want both, put the throttle outside.
///
/// It is a `tower_layer::Layer` over the same services as [`RateLimitLayer`](super::RateLimitLayer), and a
/// `reqwest_middleware::Middleware` (feature `reqwest-middleware`). Without HTTP, take its
/// [`throttle`](AdaptiveThrottleLayer::throttle).
///
/// ```
/// use http::{Request, Response};
/// use tollgate::{AdaptiveThrottleLayer, by_host};
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let throttle = AdaptiveThrottleLayer::builder().key(by_host).build()?;
/// let mut service = ServiceBuilder::new().layer(throttle).service(client);
///
/// let request = Request::get("https://api.example.com/users").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// # assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
///
/// # What happens to a request
///
/// It joins the line of its key, first come, first served. Before the first answer one request is out alone, for at most a
/// second; after that, the pace says when the next may leave. A refusal holds the line for as long as the server said, up to
/// [`max_hold`](AdaptiveThrottleBuilder::max_hold), or for as long as the pace finds right.
///
/// A refusal passes as a response. With [`retrying`](AdaptiveThrottleLayer::retrying) the call takes its old place in the
/// line instead, before all others, and is sent again.
///
/// # What it does not do
///
/// It counts nothing: a server's limit may be hit once in a while, and is found again. Each process learns for itself, and
/// nothing is lost when it ends; a fleet of many shares what it learns through a [store](AdaptiveThrottleBuilder::store).
#[derive(Clone, Debug)]
pub struct AdaptiveThrottleLayer {
    pub(super) throttle: Throttle,
    pub(super) extractors: Arc<Extractors>,
}

impl AdaptiveThrottleLayer {
    /// A layer that learns one pace for everything that passes it, and knows nothing yet. Waits up to 15 s.
    #[expect(clippy::new_without_default, reason = "a layer is made on purpose: each counts for itself")]
    pub fn new() -> Self {
        AdaptiveThrottleLayer::builder().build().expect("the defaults make sense")
    }

    /// A builder, to change the defaults.
    pub fn builder() -> AdaptiveThrottleBuilder {
        AdaptiveThrottleBuilder::new()
    }

    /// The gate behind this layer, for what is not HTTP. It shares what the layer learns.
    pub fn throttle(&self) -> Throttle {
        self.throttle.clone()
    }

    /// The same layer, which sends refused requests again.
    pub fn retrying(self) -> RetryingThrottleLayer {
        RetryingThrottleLayer { layer: self }
    }

    /// A request enters the gate.
    pub(crate) fn enter(&self, request: &RequestInfo<'_>) -> Begun {
        let Some(entry) = self.extractors.entry(request) else {
            return Begun::Limited(self.throttle.no_key());
        };
        let label = || self.throttle.label(entry.key, Some(request));
        match self.throttle.begin(entry.key, entry.deadline, label) {
            Begun::Leaves(permit) if self.error_on_limit() => Begun::Leaves(permit.named(label())),
            begun => begun,
        }
    }

    /// What `response` says to a request to `host` under `key`.
    pub(crate) fn signal(&self, key: Key, host: Option<Key>, response: &impl AsResponseInfo) -> Signal {
        self.extractors.policy.signal(key, host, response)
    }

    /// Whether a refusal by the upstream is an error.
    pub(crate) fn error_on_limit(&self) -> bool {
        self.extractors.policy.error_on_limit()
    }

    /// The response to a request leaves the gate: an error where it is a refusal, and refusals are errors.
    pub(crate) fn leave(&self, permit: ThrottlePermit, signal: &Signal) -> Result<(), Limited> {
        match permit.answered(signal) {
            Some(limited) if self.error_on_limit() => Err(limited),
            _ => Ok(()),
        }
    }
}

/// An [`AdaptiveThrottleLayer`] that sends refused requests again, each in its old place in the line, for as long as
/// `max_wait` from its arrival. Made by [`retrying`](AdaptiveThrottleLayer::retrying).
///
/// A refusal that says that the request would have to wait for longer passes as a response. Any other is dropped before
/// the wait, so that it holds neither its connection nor, with
/// [`hold_until_body_end`](crate::RateLimitLayer::hold_until_body_end), its place in flight. If the request then gets no
/// turn in time, it ends with [`Limited::Upstream`], which has the status of the last refusal.
///
/// A request has to be one that can be sent twice ([`CloneRequest`](crate::CloneRequest)); one that cannot be cloned, such as
/// one with a streaming body, is sent once. So mind requests that do something each time they arrive: a server that refuses a
/// request has, as a rule, not acted on it.
///
/// ```
/// use http::{Request, Response};
/// use tollgate::AdaptiveThrottleLayer;
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), BoxError> {
/// # let mut refusals = 2;
/// let client = service_fn(move |_: Request<String>| {
///     let status = if refusals > 0 { 429 } else { 200 };
///     refusals -= 1;
///     async move { Response::builder().status(status).header("retry-after", 1).body("hello") }
/// });
/// # let client = { let client = std::sync::Arc::new(std::sync::Mutex::new(client)); service_fn(move |request: Request<String>| client.lock().unwrap().call(request)) };
/// let mut service = ServiceBuilder::new().layer(AdaptiveThrottleLayer::new().retrying()).service(client);
///
/// let request = Request::get("https://api.example.com/users").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryingThrottleLayer {
    pub(crate) layer: AdaptiveThrottleLayer,
}
