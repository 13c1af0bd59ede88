//! tonic: the layer around a `Channel`.

use http::uri::PathAndQuery;
use tollgate::service::RateLimit;
use tollgate::{Limited, RateLimitLayer};
use tonic::client::Grpc;
use tonic::codec::Codec;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tower::ServiceBuilder;

/// Puts the layer around a channel. A generated client takes the result in its `new`, as [`Grpc`]
/// does.
pub fn limited(limit: RateLimitLayer, channel: Channel) -> RateLimit<Channel> {
    ServiceBuilder::new().layer(limit).service(channel)
}

/// Makes one call, as a generated client does.
///
/// # Errors
///
/// The status of the server, or a status whose source is the refusal.
pub async fn call<C, M1, M2>(
    channel: RateLimit<Channel>,
    message: M1,
    codec: C,
) -> Result<Response<M2>, Status>
where
    C: Codec<Encode = M1, Decode = M2>,
    M1: Send + Sync + 'static,
    M2: Send + Sync + 'static,
{
    let mut grpc = Grpc::new(channel);
    grpc.ready()
        .await
        .map_err(|error| Status::from_error(error.into()))?;
    grpc.unary(
        Request::new(message),
        PathAndQuery::from_static("/echo.Echo/Call"),
        codec,
    )
    .await
}

/// Returns the refusal in the status of a call.
pub fn refusal(status: &Status) -> Option<&Limited> {
    Limited::find(status)
}
