//! The AWS SDK: a connector over a Tower service.

// [recipe]
use std::fmt;
use std::time::Duration;

use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, SharedHttpClient, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_smithy_types::body::SdkBody;
use hyper_util::client::legacy::{Client, connect::HttpConnector as TcpConnector};
use hyper_util::rt::TokioExecutor;
use tollgate::{Error, RateLimitLayer, service::RateLimit};
use tower::timeout::{Timeout, error::Elapsed};
use tower::{ServiceBuilder, ServiceExt};

/// Returns the `http_client` of a configuration of the SDK. An attempt may take `timeout`, its wait
/// for a permit not included. For https, build `http` with the connector of hyper-rustls.
pub fn http_client(limit: RateLimitLayer, timeout: Duration) -> SharedHttpClient {
    let http = Client::builder(TokioExecutor::new()).build_http();
    let service = ServiceBuilder::new()
        .layer(limit)
        .timeout(timeout)
        .service(http);
    let connector = SharedHttpConnector::new(Connector(service));
    http_client_fn(move |_, _| connector.clone())
}

/// Returns the `stalled_stream_protection` of such a configuration. The SDK takes a request that waits
/// for a permit for an upload that has stalled, and would end it after 20 s.
pub fn stalled_stream_protection() -> StalledStreamProtectionConfig {
    StalledStreamProtectionConfig::enabled()
        .upload_enabled(false)
        .build()
}

struct Connector(RateLimit<Timeout<Client<TcpConnector, SdkBody>>>);

impl HttpConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let service = self.0.clone();
        HttpConnectorFuture::new(async move {
            let unusable = |error| ConnectorError::other(error, None);
            let request = request.try_into_http1x().map_err(|e| unusable(e.into()))?;
            let response = service.oneshot(request).await.map_err(failure)?;
            HttpResponse::try_from(response.map(SdkBody::from_body_1_x))
                .map_err(|e| unusable(e.into()))
        })
    }
}

/// Converts the error of an attempt: the SDK retries after `timeout` and `io`, and not after
/// `other`.
fn failure(error: Error) -> ConnectorError {
    match error {
        Error::Inner(inner) if inner.is::<Elapsed>() => ConnectorError::timeout(inner),
        Error::Inner(inner) => ConnectorError::io(inner),
        limited => ConnectorError::other(limited.into(), None),
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}
// [end]
