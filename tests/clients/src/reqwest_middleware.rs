//! reqwest-middleware, with reqwest-retry and reqwest-tracing.

// [recipe]
use std::time::Duration;

use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_tracing::TracingMiddleware;
use tollgate::{RateLimitLayer, RetryLimited};

/// Returns a client that keeps `limit`. An attempt may take `timeout`, its wait for a permit not
/// included.
pub fn client(
    limit: RateLimitLayer,
    retry: RetryLimited,
    timeout: Duration,
) -> Result<ClientWithMiddleware, reqwest::Error> {
    let http = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .timeout(timeout)
        .build()?;
    let retry = RetryTransientMiddleware::new_with_policy_and_strategy(retry.clone(), retry);
    Ok(ClientBuilder::new(http)
        .with(retry)
        .with(limit)
        .with(TracingMiddleware::default()) // inside: a span for each attempt, without its wait
        .build())
}
// [end]
