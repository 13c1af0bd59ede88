//! The adaptive layer that sends refused requests again, and its Tower service.

use http::Extensions;

use super::service::edge;
use super::throttle::AdaptiveThrottleLayer;
#[cfg(doc)]
use crate::error::Limited;
use crate::key::RequestInfo;

/// An [`AdaptiveThrottleLayer`] that sends refused requests again, each in its old place in the
/// queue, until [`max_wait`](crate::AdaptiveThrottleBuilder::max_wait) after its arrival.
/// [`retrying`](AdaptiveThrottleLayer::retrying) returns it.
///
/// After its second refusal a request goes behind the others. If the server accepts these and refuses this
/// [kind](crate::guide::refusals#one-kind-of-requests) of requests alone, the refusal passes as a response.
///
/// If a refusal states a longer wait, it passes as a response. Otherwise the response is dropped
/// before the wait. So it keeps neither its connection nor, with
/// [`in_flight_until_body_end`](crate::RateLimitLayer::in_flight_until_body_end), its in-flight
/// slot. If the request then cannot be sent in time, it fails with [`Limited::Upstream`] and the
/// status of the last refusal.
///
/// The request type must be [`CloneRequest`]. A request that cannot be cloned, such as one with a
/// streaming body, is sent once. The layer does not check the HTTP method. As a rule, a server has
/// not acted on a request that it refuses. If a request must not be processed twice, give it an
/// idempotency key, or use a layer without retries.
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
/// let throttle = AdaptiveThrottleLayer::new().retrying();
/// let mut service = ServiceBuilder::new().layer(throttle).service(client);
///
/// let request = Request::get("https://api.example.com/users").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryingThrottleLayer {
    pub(super) layer: AdaptiveThrottleLayer,
}

edge! {
    RetryingThrottleLayer {
        gate: |retrying| &retrying.layer => AdaptiveThrottleLayer,
        request: RequestInfo & CloneRequest,
        clone: Some(R::clone_request)
    }
}

/// A request that can be sent twice.
///
/// Implemented for `http::Request<B>` if the body is `Clone`, and, with the feature `reqwest`, for
/// `reqwest::Request`.
pub trait CloneRequest: Sized {
    /// Returns a copy of the request, or `None` if it cannot be copied.
    fn clone_request(&self) -> Option<Self>;

    /// Returns the extensions of the request, to be changed. Default: `None`, and nothing counts how often the request is
    /// sent.
    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        None
    }
}

impl<B: Clone> CloneRequest for http::Request<B> {
    fn clone_request(&self) -> Option<Self> {
        Some(self.clone())
    }

    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        Some(http::Request::extensions_mut(self))
    }
}

#[cfg(feature = "reqwest")]
impl CloneRequest for reqwest::Request {
    fn clone_request(&self) -> Option<Self> {
        self.try_clone()
    }
}
