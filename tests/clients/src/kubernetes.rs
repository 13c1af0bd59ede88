//! kube: a buffer, which can be cloned, and the layer around it.

use kube_client::client::ClientBuilder;
use kube_client::{Client, Config, Error};
use tollgate::RateLimitLayer;
use tower::buffer::BufferLayer;

/// Builds a client behind the layer.
///
/// # Errors
///
/// If the configuration is not valid.
pub fn limited(limit: &RateLimitLayer, config: Config) -> Result<Client, Error> {
    let builder = ClientBuilder::try_from(config)?;
    Ok(builder
        .with_layer(&BufferLayer::new(1024))
        .with_layer(limit)
        .build())
}
