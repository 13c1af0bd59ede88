//! octocrab: the layer on its builder.

// [recipe]
use std::time::Duration;

use http::{Request, Uri};
use http_body::Body;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use octocrab::service::middleware::base_uri::BaseUriLayer;
use octocrab::{AuthState, OctoBody, Octocrab, OctocrabBuilder};
use tollgate::{RateLimitLayer, RetryLimited};
use tower::retry::{Policy, RetryLayer};
use tower::timeout::TimeoutLayer;

/// Returns a client of the API at `uri`, for example `https://api.github.com`. For https, build
/// `http` with the connector of hyper-rustls.
pub fn client(
    limit: &RateLimitLayer,
    retry: RetryLimited,
    timeout: Duration,
    uri: Uri,
) -> Octocrab {
    let http: Client<HttpConnector, OctoBody> = Client::builder(TokioExecutor::new()).build_http();
    OctocrabBuilder::new_empty()
        .with_service(http)
        .with_layer(&TimeoutLayer::new(timeout)) // of an attempt
        .with_layer(limit)
        .with_layer(&RetryLayer::new(RetryWithBody(retry)))
        .with_layer(&BaseUriLayer::new(uri)) // outside of the limit, so that `by_host` finds the host
        .with_auth(AuthState::None)
        .build()
        .unwrap_or_else(|never| match never {})
}

/// `RetryLimited`, with a copy of the body for each attempt: the `Clone` of an `OctoBody` shares
/// its bytes, and the first attempt consumes them.
#[derive(Clone)]
struct RetryWithBody(RetryLimited);

impl<T, E> Policy<Request<OctoBody>, T, E> for RetryWithBody
where
    RetryLimited: Policy<Request<OctoBody>, T, E>,
{
    type Future = <RetryLimited as Policy<Request<OctoBody>, T, E>>::Future;

    fn retry(
        &mut self,
        request: &mut Request<OctoBody>,
        result: &mut Result<T, E>,
    ) -> Option<Self::Future> {
        self.0.retry(request, result)
    }

    fn clone_request(&mut self, request: &Request<OctoBody>) -> Option<Request<OctoBody>> {
        let body = match request.body().try_clone() {
            Some(body) => body,
            None if request.body().is_end_stream() => OctoBody::empty(),
            None => return None, // a stream can be sent once
        };
        Some(request.clone().map(|_| body))
    }
}
// [end]
