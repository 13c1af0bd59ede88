//! async-openai: the layer around its reqwest client.

// [recipe]
use std::time::Duration;

use async_openai::middleware::HttpRequestFactory;
use async_openai::{Client, config::OpenAIConfig, error::OpenAIError};
use tollgate::{RetryLimited, body::BodyLayer};
use tower::{ServiceBuilder, ServiceExt, service_fn};

/// Returns a client of the API of `config`. An attempt may take `timeout`, its wait for a permit
/// not included.
pub fn client(
    limit: BodyLayer,
    retry: RetryLimited,
    timeout: Duration,
    config: OpenAIConfig,
) -> Result<Client<OpenAIConfig>, reqwest::Error> {
    let http = reqwest::Client::builder()
        .retry(reqwest::retry::never())
        .timeout(timeout)
        .build()?;
    let http = ServiceBuilder::new()
        .retry(retry)
        .layer(limit)
        .service(http);
    // It replaces the service of async-openai, which would retry by itself.
    let service = service_fn(move |factory: HttpRequestFactory| {
        let http = http.clone();
        async move {
            let request = factory.build().await?;
            let response = http.oneshot(request).await;
            response.map_err(|error| OpenAIError::Boxed(error.into()))
        }
    });
    Ok(Client::with_config(config).with_http_service(service))
}
// [end]
