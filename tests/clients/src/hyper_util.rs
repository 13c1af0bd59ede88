//! hyper-util's client.

// [recipe]
use http_body_util::Empty;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tollgate::RateLimitLayer;
use tollgate::service::RateLimit;
use tower::Layer;

/// The body of a request.
pub type Body = Empty<bytes::Bytes>;

/// Returns a client behind the layer.
pub fn limited(limit: &RateLimitLayer) -> RateLimit<Client<HttpConnector, Body>> {
    limit.layer(Client::builder(TokioExecutor::new()).build_http())
}
// [recipe]
