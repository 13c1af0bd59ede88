//! octocrab: the layer on its builder.

use http::{Request, Response};
use octocrab::{AuthState, OctoBody, Octocrab, OctocrabBuilder};
use tollgate::RateLimitLayer;
use tower::{BoxError, Service};

/// Puts the layer around the HTTP client of an [`Octocrab`].
pub fn limited<S>(limit: &RateLimitLayer, client: S) -> Octocrab
where
    S: Service<Request<OctoBody>, Response = Response<OctoBody>, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Error: Into<BoxError> + Send,
{
    OctocrabBuilder::new_empty()
        .with_service(client)
        .with_layer(limit)
        .with_auth(AuthState::None)
        .build()
        .unwrap_or_else(|never| match never {})
}
