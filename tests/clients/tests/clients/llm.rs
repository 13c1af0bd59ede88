//! The layer for language models behind real clients: async-openai, reqwest as a Tower service, and reqwest-middleware.

use std::time::Duration;

use async_openai::config::OpenAIConfig;
use async_openai::types::chat::{
    ChatCompletionRequestUserMessage, CreateChatCompletionRequestArgs,
};
use clients::openai;
use tollgate::body::BodyLayer;
use tollgate::{Key, Limiter, Llm, RateLimitLayer, RetryLimited};
use tower::{Layer, ServiceExt};
use upstream::Upstream;

/// An answer that states 18 tokens.
const ANSWER: &str = r#"{"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [],
    "usage": {"prompt_tokens": 13, "completion_tokens": 5, "total_tokens": 18}}"#;

/// The same as a stream.
const STREAM: &str = "data: {\"choices\":[]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":13,\"completion_tokens\":5,\"total_tokens\":18}}\n\ndata: [DONE]\n\n";

const PROMPT: &str =
    r#"{"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "hello"}]}"#;

fn limit() -> BodyLayer {
    RateLimitLayer::builder("500/min, 2000 tokens/min".parse().unwrap())
        .build_llm(Llm::reserving().gives_back())
        .unwrap()
}

/// Returns how many tokens are used.
async fn used(limiter: &Limiter) -> u64 {
    limiter.peek(Key::ALL).await.unwrap().limits[1].used
}

#[tokio::test]
async fn async_openai_is_charged_what_answers_state() {
    let upstream = Upstream::open().body(ANSWER);
    let config = OpenAIConfig::new()
        .with_api_base(upstream.url().trim_end_matches('/'))
        .with_api_key("key");
    let (limit, retry) = (limit(), RetryLimited::new());
    let limiter = limit.limiter();
    let client = openai::client(limit, retry, Duration::from_secs(60), config).unwrap();
    for sent in 1..=5 {
        let request = CreateChatCompletionRequestArgs::default()
            .model("m")
            .max_completion_tokens(1500_u32)
            .messages([ChatCompletionRequestUserMessage::from("hello").into()])
            .build()
            .unwrap();
        client.chat().create(request).await.unwrap();
        assert_eq!(used(&limiter).await, 18 * sent);
    }
}

#[tokio::test]
async fn reqwest_as_a_service_is_charged_what_streams_state() {
    let upstream = Upstream::open().body(STREAM);
    let limit = limit();
    let limiter = limit.limiter();
    let client = limit.layer(reqwest::Client::new());
    let request = reqwest::Client::new().post(upstream.url()).body(PROMPT);
    let response = client.oneshot(request.build().unwrap()).await.unwrap();
    assert_eq!(response.text().await.unwrap(), STREAM);
    assert_eq!(used(&limiter).await, 18);
}

#[tokio::test]
async fn reqwest_middleware_is_charged_what_streams_state() {
    let upstream = Upstream::open().body(STREAM);
    let limit = limit();
    let limiter = limit.limiter();
    let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new())
        .with(limit)
        .build();
    let request = client.post(upstream.url()).body(PROMPT);
    let mut response = request.send().await.unwrap();
    let mut text = Vec::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        text.extend_from_slice(&chunk);
    }
    assert_eq!(text, STREAM.as_bytes());
    assert_eq!(used(&limiter).await, 18);
}
