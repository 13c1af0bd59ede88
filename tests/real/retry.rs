//! Retries of what the upstream limited: they wait in the limiter, and nowhere else. With a real
//! server.

#![cfg(all(feature = "retry", feature = "reqwest-retry"))]

use crate::support;

use std::time::{Duration, Instant};

use http::Request;
use reqwest::Client;
use reqwest_middleware::ClientBuilder;
use reqwest_retry::RetryTransientMiddleware;
use support::{limited, ms, ok, used, who_said_no};
use tollgate::{Key, Limited, Quota, RateLimitBuilder, RateLimitLayer, RetryLimited};
use tower::{ServiceBuilder, ServiceExt};
use upstream::Upstream;

fn limit() -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_hour(40))
}

fn client() -> Client {
    Client::builder().no_proxy().build().unwrap()
}

/// A server that refuses the first `refusals` calls, for a second each.
fn server(refusals: usize) -> Upstream {
    Upstream::open().script(move |call| (call < refusals).then(|| upstream::refusal(1)))
}

#[tokio::test]
async fn reqwest_retry_waits_for_the_upstream_s_retry_after() {
    let server = server(2);
    let limit = limit().build().unwrap();
    let retry = RetryLimited::new();
    let client = ClientBuilder::new(client())
        .with(RetryTransientMiddleware::new_with_policy_and_strategy(
            retry.clone(),
            retry,
        ))
        .with(limit.clone())
        .build();
    let start = Instant::now();
    assert_eq!(client.get(server.url()).send().await.unwrap().status(), 200);
    println!(
        "three attempts after {:?}; the upstream asked for 2 s",
        start.elapsed()
    );
    assert!(
        start.elapsed() >= Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
    assert_eq!((server.tally().all(), used(&limit).await), (3, 3));
}

#[tokio::test]
async fn tower_retry_waits_for_the_upstream_s_retry_after() {
    let server = server(2);
    let limit = limit().build().unwrap();
    let service = ServiceBuilder::new()
        .timeout(Duration::from_secs(60))
        .retry(RetryLimited::new())
        .layer(limit.clone())
        .service(client());
    let start = Instant::now();
    let request = client().get(server.url()).build().unwrap();
    assert_eq!(service.oneshot(request).await.unwrap().status(), 200);
    println!(
        "three attempts after {:?}; the upstream asked for 2 s",
        start.elapsed()
    );
    assert!(
        start.elapsed() >= Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
    assert_eq!((server.tally().all(), used(&limit).await), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn tower_retry_occupies_no_in_flight_slot_while_waiting() {
    let upstream = support::Upstream::answering([limited("2")]);
    let limit = RateLimitLayer::new(Quota::in_flight(1)).unwrap();
    let held = limit.clone().in_flight_until_body_end();
    let service = ServiceBuilder::new()
        .retry(RetryLimited::new())
        .layer(held)
        .service(upstream.clone());
    assert_eq!(
        service
            .oneshot(support::get("/"))
            .await
            .unwrap()
            .status()
            .as_u16(),
        200
    );
    assert_eq!(
        (upstream.count(), support::peek(&limit, Key::ALL).await.free),
        (2, 1)
    );
}

#[tokio::test]
async fn reqwest_retry_occupies_no_in_flight_slot_while_waiting() {
    let server = server(1);
    let limit = RateLimitLayer::new(Quota::in_flight(1)).unwrap();
    let retry = RetryLimited::new();
    let client = ClientBuilder::new(client())
        .with(RetryTransientMiddleware::new_with_policy_and_strategy(
            retry.clone(),
            retry,
        ))
        .with(limit.in_flight_until_body_end())
        .build();
    assert_eq!(client.get(server.url()).send().await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn attempts_end_and_last_answer_passes_unchanged() {
    let upstream = support::Upstream::answering([limited("1"), limited("1"), limited("1"), ok()]);
    let service = ServiceBuilder::new()
        .retry(RetryLimited::new())
        .layer(limit().build().unwrap());
    let response = service
        .service(upstream.clone())
        .oneshot(support::get("/"))
        .await
        .unwrap();
    assert_eq!((response.status().as_u16(), upstream.count()), (429, 3));
}

#[tokio::test(start_paused = true)]
async fn upstream_limit_error_is_retried_too() {
    let upstream = support::Upstream::answering([limited("1"), ok()]);
    let limit = limit().error_on_upstream_limit().build().unwrap();
    let service = ServiceBuilder::new()
        .retry(RetryLimited::new())
        .layer(limit)
        .service(upstream.clone());
    assert_eq!(
        service.oneshot(support::get("/")).await.unwrap().status(),
        200
    );
    assert_eq!(upstream.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn local_refusals_are_retried_only_on_request() {
    // The upstream asks for a longer wait than `max_wait`.
    for (retry, sent) in [
        (RetryLimited::new(), 1),
        (RetryLimited::new().local_refusals(), 1),
    ] {
        let upstream = support::Upstream::answering([limited("50"), ok()]);
        let limit = limit().max_wait(ms(0)).build().unwrap();
        let service = ServiceBuilder::new()
            .retry(retry)
            .layer(limit)
            .service(upstream.clone());
        let error = service.oneshot(support::get("/")).await.unwrap_err();
        assert_eq!((who_said_no(&error), upstream.count()), ("local", sent));
        assert!(Limited::find(&error).unwrap().retry_after() > Some(Duration::from_secs(45)));
    }
}

#[tokio::test(start_paused = true)]
async fn other_responses_and_errors_are_not_retried() {
    let failing = http::Response::builder()
        .status(500)
        .body(String::new())
        .unwrap();
    let upstream = support::Upstream::answering([Ok(failing), support::other_error()]);
    let service = ServiceBuilder::new()
        .retry(RetryLimited::new())
        .layer(limit().build().unwrap());
    let service = service.service(upstream.clone());
    let request = || Request::get("/").body(String::new()).unwrap();
    assert_eq!(
        service.clone().oneshot(request()).await.unwrap().status(),
        500
    );
    assert!(service.oneshot(request()).await.is_err());
    assert_eq!(upstream.count(), 2);
}
