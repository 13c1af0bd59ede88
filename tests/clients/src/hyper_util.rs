//! hyper-util: the layer around the legacy client.

// [recipe]
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tollgate::{RateLimitLayer, RetryLimited, service::RateLimit};
use tower::{ServiceBuilder, retry::Retry, timeout::Timeout};

/// The service of [`client`]: each of its layers is a type.
pub type Limited = Retry<RetryLimited, RateLimit<Timeout<Client<HttpConnector, Full<Bytes>>>>>;

/// Returns a client that keeps `limit`. An attempt may take `timeout`, its wait for a permit not
/// included.
pub fn client(limit: RateLimitLayer, retry: RetryLimited, timeout: Duration) -> Limited {
    ServiceBuilder::new()
        .retry(retry)
        .layer(limit)
        .timeout(timeout)
        .service(Client::builder(TokioExecutor::new()).build_http())
}
// [end]
