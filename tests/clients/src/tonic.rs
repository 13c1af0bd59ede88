//! tonic: the layer around a channel.

// [recipe]
use std::future::Future;

use tollgate::{RateLimitLayer, Signal, grpc::GrpcRateLimit};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};
use tower::ServiceBuilder;

/// Returns what a generated client takes: `OrdersClient::new(channel(limit, server))`. It connects
/// with the first call.
pub fn channel(limit: RateLimitLayer, server: &Endpoint) -> GrpcRateLimit<Channel> {
    ServiceBuilder::new()
        .layer(limit.grpc())
        .service(server.connect_lazy())
}

/// Makes a call again if the server or the limit refuses it, up to `attempts` times: for example
/// `retry(3, || client.clone().create(order.clone()))`.
pub async fn retry<T, F>(attempts: u32, mut call: impl FnMut() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut attempt = 1;
    loop {
        let status = match call().await {
            Ok(response) => return Ok(response),
            Err(status) => status,
        };
        let signal = Signal::read_grpc(status.clone().into_http::<()>().headers());
        if signal.refusal().is_none() || attempt == attempts {
            return Err(status);
        }
        // Without a time, the layer holds the next attempt.
        tokio::time::sleep(signal.retry_after().unwrap_or_default()).await;
        attempt += 1;
    }
}
// [end]
