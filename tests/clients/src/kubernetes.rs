//! kube: a buffer, which can be cloned, and the layer around it.

// [recipe]
use std::time::Duration;

use kube_client::client::{ClientBuilder, retry::RetryPolicy};
use kube_client::{Client, Config, Error};
use tollgate::RateLimitLayer;
use tower::buffer::BufferLayer;
use tower::util::MapErrLayer;
use tower::{BoxError, retry::RetryLayer};

/// Returns a client of the cluster of `config`. An attempt may take `timeout`, its wait for a
/// permit not included.
pub fn client(
    limit: &RateLimitLayer,
    retry: RetryPolicy,
    timeout: Duration,
    mut config: Config,
) -> Result<Client, Error> {
    config.default_retry = false; // it is inside of the limit, and its attempts would not be counted
    config.read_timeout = Some(timeout);
    let builder = ClientBuilder::try_from(config)?
        .with_layer(&BufferLayer::new(1024)) // the service of kube is not Clone
        .with_layer(limit)
        .with_layer(&MapErrLayer::new(BoxError::from))
        .with_layer(&RetryLayer::new(retry));
    Ok(builder.build())
}
// [end]
