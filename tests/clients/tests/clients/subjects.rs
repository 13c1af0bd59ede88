//! The clients, each built by its recipe, and one call of each.

use std::time::Duration;

use async_openai::config::OpenAIConfig;
use async_openai::types::chat::{
    ChatCompletionRequestUserMessage, CreateChatCompletionRequestArgs,
};
use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::{Credentials, Region};
use aws_smithy_runtime_api::client::http::SharedHttpClient;
use bytes::Bytes;
use clients::{
    aws, graphql, hyper_util, kubernetes, octocrab, openai, reqwest_blocking, reqwest_middleware,
    ureq,
};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use k8s_openapi::api::core::v1::Namespace;
use kube_client::Api;
use kube_client::api::ListParams;
use kube_client::client::retry::RetryPolicy;
use reqwest::{Method, Url};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tollgate::{Key, RateLimitBuilder, RetryLimited};
use tower::{BoxError, Service, ServiceExt};

use crate::harness::{Call, Setup, Subject, call};

fn retry(attempts: u32) -> RetryLimited {
    RetryLimited::new().attempts(attempts)
}

/// Fails unless `status` is a success.
fn success(status: StatusCode) -> Result<(), BoxError> {
    match status.is_success() {
        true => Ok(()),
        false => Err(format!("the server responds with {status}").into()),
    }
}

pub struct HyperUtil;

impl Subject for HyperUtil {
    const BODY: &str = "hello";
    const SENDS_BODY: bool = true;

    fn client(setup: Setup) -> Call {
        let client = hyper_util::client(setup.limit, retry(setup.attempts), setup.timeout);
        call(move || {
            let mut client = client.clone();
            let body = Full::new(Bytes::from_static(b"hello"));
            let request = Request::post(&setup.url).body(body).unwrap();
            async move {
                let response = client.ready().await?.call(request).await?;
                success(response.status())
            }
        })
    }
}

pub struct Octocrab;

impl Subject for Octocrab {
    const BODY: &str = r#"{"number": 1}"#;
    const SENDS_BODY: bool = true;

    fn client(setup: Setup) -> Call {
        let uri = setup.url.parse().unwrap();
        let client = octocrab::client(&setup.limit, retry(setup.attempts), setup.timeout, uri);
        call(move || {
            let client = client.clone();
            async move {
                let issue = json!({"title": "slow down"});
                let _: Value = client.post("/repos/o/r/issues", Some(&issue)).await?;
                Ok(())
            }
        })
    }
}

pub struct Kube;

impl Kube {
    /// The key of all calls. `by_host` finds no host, because kube adds it inside of the limit.
    fn cluster() -> Key {
        Key::new("cluster")
    }
}

impl Subject for Kube {
    const BODY: &str =
        r#"{"kind": "NamespaceList", "apiVersion": "v1", "metadata": {}, "items": []}"#;
    const SENDS_BODY: bool = false;

    fn client(setup: Setup) -> Call {
        let config = kube_client::Config::new(setup.url.parse().unwrap());
        let backoff = (Duration::from_millis(5), Duration::from_secs(1000));
        let retry = RetryPolicy::new(backoff.0, backoff.1, setup.attempts - 1, true).unwrap();
        let client = kubernetes::client(&setup.limit, retry, setup.timeout, config).unwrap();
        call(move || {
            let namespaces = Api::<Namespace>::all(client.clone());
            async move {
                namespaces.list(&ListParams::default()).await?;
                Ok(())
            }
        })
    }

    fn keyed(builder: RateLimitBuilder) -> RateLimitBuilder {
        builder.key(|_| Self::cluster())
    }

    fn key_text() -> String {
        Self::cluster().to_string()
    }
}

pub struct OpenAi;

impl Subject for OpenAi {
    const BODY: &str =
        r#"{"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": []}"#;
    const SENDS_BODY: bool = true;

    fn client(setup: Setup) -> Call {
        let config = OpenAIConfig::new()
            .with_api_base(setup.url.trim_end_matches('/'))
            .with_api_key("key");
        let retry = retry(setup.attempts);
        let client =
            openai::client(setup.limit.read_bodies(), retry, setup.timeout, config).unwrap();
        call(move || {
            let client = client.clone();
            async move {
                let request = CreateChatCompletionRequestArgs::default()
                    .model("m")
                    .messages([ChatCompletionRequestUserMessage::from("hello").into()])
                    .build()?;
                client.chat().create(request).await?;
                Ok(())
            }
        })
    }

    fn refusal(retry_after: u64) -> Response<String> {
        let error = r#"{"error": {"message": "slow down", "type": "requests", "code": "rate_limit_exceeded"}}"#;
        upstream::refusal(retry_after).map(|_| error.to_owned())
    }
}

pub struct Aws;

impl Aws {
    /// Returns a configuration of the SDK without retries.
    pub fn config(url: &str, http: SharedHttpClient) -> aws_sdk_sqs::config::Builder {
        aws_sdk_sqs::Config::builder()
            .behavior_version_latest()
            .region(Region::new("us-east-1"))
            .credentials_provider(Credentials::new("id", "secret", None, None, "test"))
            .endpoint_url(url)
            .http_client(http)
            .stalled_stream_protection(aws::stalled_stream_protection())
            .retry_config(RetryConfig::disabled())
    }
}

impl Subject for Aws {
    const BODY: &str = "{}";
    const SENDS_BODY: bool = true;

    fn client(setup: Setup) -> Call {
        let http = aws::http_client(setup.limit, setup.timeout);
        let mut config = Aws::config(&setup.url, http);
        if setup.attempts > 1 {
            config = config.retry_config(RetryConfig::standard().with_max_attempts(setup.attempts));
        }
        let config = config.build();
        let client = aws_sdk_sqs::Client::from_conf(config);
        call(move || {
            let call = client.list_queues().send();
            async move {
                call.await?;
                Ok(())
            }
        })
    }

    fn refusal(retry_after: u64) -> Response<String> {
        let error = r#"{"__type": "ThrottlingException", "message": "slow down"}"#;
        upstream::refusal(retry_after).map(|_| error.to_owned())
    }
}

pub struct ReqwestMiddleware;

impl Subject for ReqwestMiddleware {
    const BODY: &str = "hello";
    const SENDS_BODY: bool = true;

    fn client(setup: Setup) -> Call {
        let retry = retry(setup.attempts);
        let client = reqwest_middleware::client(setup.limit, retry, setup.timeout).unwrap();
        call(move || {
            let request = client.post(&setup.url).body("hello");
            async move { success(request.send().await?.status()) }
        })
    }
}

pub struct GraphQl;

impl Subject for GraphQl {
    const BODY: &str = r#"{"data": {"issues": [{"title": "slow down"}]}}"#;
    const SENDS_BODY: bool = true;

    fn client(setup: Setup) -> Call {
        let retry = retry(setup.attempts);
        let client = reqwest_middleware::client(setup.limit, retry, setup.timeout).unwrap();
        call(move || {
            let (client, url) = (client.clone(), setup.url.clone());
            async move {
                let response = graphql::issues(&client, &url, "o/r").await?;
                let issues = response.data.ok_or("the response has no data")?.issues;
                assert_eq!(issues[0].title, "slow down");
                Ok(())
            }
        })
    }
}

/// The key of all calls of blocking code, which states it by hand.
fn blocking_key() -> Key {
    Key::host("127.0.0.1")
}

/// Converts a function that blocks: each call has a thread of its own, which has no runtime.
fn blocking_call(
    make: impl Fn() -> Result<StatusCode, BoxError> + Clone + Send + Sync + 'static,
) -> Call {
    call(move || {
        let make = make.clone();
        async move {
            let (result, received) = oneshot::channel();
            std::thread::spawn(move || result.send(make()));
            success(received.await??)
        }
    })
}

pub struct Ureq;

impl Subject for Ureq {
    const BODY: &str = "hello";
    const SENDS_BODY: bool = true;
    const REFUSAL_IS_LIMITED: bool = true;

    fn client(setup: Setup) -> Call {
        let (agent, limiter) = (ureq::agent(setup.timeout), setup.limit.limiter());
        blocking_call(move || {
            let request = Request::post(&setup.url).body("hello")?;
            let key = blocking_key();
            let response = ureq::send(&agent, &limiter, &key, setup.attempts, &request)?;
            Ok(response.status())
        })
    }

    fn key_text() -> String {
        blocking_key().to_string()
    }
}

pub struct ReqwestBlocking;

impl Subject for ReqwestBlocking {
    const BODY: &str = "hello";
    const SENDS_BODY: bool = true;
    const REFUSAL_IS_LIMITED: bool = true;

    fn client(setup: Setup) -> Call {
        // A client of its own for each call: it must not be made or dropped in a runtime.
        let limiter = setup.limit.limiter();
        blocking_call(move || {
            let client = reqwest_blocking::client(setup.timeout)?;
            let url = Url::parse(&setup.url)?;
            let mut request = reqwest::blocking::Request::new(Method::POST, url);
            *request.body_mut() = Some("hello".into());
            let key = blocking_key();
            let response =
                reqwest_blocking::send(&client, &limiter, &key, setup.attempts, &request)?;
            Ok(response.status())
        })
    }

    fn key_text() -> String {
        blocking_key().to_string()
    }
}
