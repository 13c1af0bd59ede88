//! Retries that multiply: how often one request is sent is counted, reported and bounded. Under a paused clock, with a
//! server that always refuses.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tollgate::service::Attempts;
use tollgate::stats::Event;
use tollgate::{Key, Limiter, Quota, RateLimitLayer, RetryLimited};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};

/// A layer, and the events of requests that it sent again.
fn limit() -> (RateLimitLayer, Arc<Mutex<Vec<String>>>) {
    limit_of(Quota::per_second(100))
}

fn limit_of(quota: Quota) -> (RateLimitLayer, Arc<Mutex<Vec<String>>>) {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = events.clone();
    let layer = RateLimitLayer::builder(quota)
        .max_wait(Duration::from_secs(3600))
        .on_event(move |event| {
            if let Event::SentAgain { .. } = event {
                told.lock().unwrap().push(event.to_string());
            }
        })
        .build();
    (layer.unwrap(), events)
}

/// A server that refuses all requests, and how many it got.
fn server() -> (
    impl Service<Request<()>, Response = Response<()>, Error = BoxError, Future: Send> + Clone,
    Arc<AtomicU32>,
) {
    let arrived = Arc::new(AtomicU32::new(0));
    let count = arrived.clone();
    let server = service_fn(move |_: Request<()>| {
        count.fetch_add(1, Ordering::Relaxed);
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        async { Ok::<_, BoxError>(response) }
    });
    (server, arrived)
}

/// How many requests were sent for one, as the stats show it.
fn attempts_of_one(limiter: &Limiter) -> u64 {
    1 + limiter.stats().sent_again()
}

#[tokio::test(start_paused = true)]
async fn the_event_names_the_key_of_the_request() {
    let (layer, events) = limit();
    let (server, _) = server();
    let mut service = ServiceBuilder::new()
        .retry(RetryLimited::new().attempts(5).budget(100, 20))
        .layer(layer)
        .service(server);
    let mut request = Request::new(());
    request.extensions_mut().insert(Key::new("tenant 17"));
    service.ready().await.unwrap().call(request).await.unwrap();
    let events = events.lock().unwrap();
    assert!(
        matches!(&events[..], [event] if !event.ends_with("key all")),
        "{events:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn nested_retries_count_all_attempts_of_a_request() {
    let (layer, events) = limit();
    let (server, arrived) = server();
    let retry = || RetryLimited::new().budget(100, 20);
    let mut service = ServiceBuilder::new()
        .retry(retry())
        .retry(retry())
        .layer(layer.clone())
        .service(server);
    let request = Request::new(());
    service.ready().await.unwrap().call(request).await.unwrap();
    assert_eq!(arrived.load(Ordering::Relaxed), 9);
    assert_eq!(attempts_of_one(&layer.limiter()), 9);
    assert_eq!(layer.limiter().stats().requests().total(), 9);
    assert_eq!(
        *events.lock().unwrap(),
        ["5 attempts for 1 request of key all"]
    );
}

/// See code_puppy#317: three layers of retries.
#[tokio::test(start_paused = true)]
async fn the_budget_bounds_retries_that_multiply() {
    let (layer, events) = limit();
    let (server, arrived) = server();
    let retry = RetryLimited::new().attempts(4);
    let mut service = ServiceBuilder::new()
        .retry(retry.clone())
        .retry(retry)
        .layer(layer.clone())
        .service(server);
    let attempts = Attempts::new();
    for _ in 0..3 {
        let mut request = Request::new(());
        request.extensions_mut().insert(attempts.clone());
        service.ready().await.unwrap().call(request).await.unwrap();
    }
    // The loop sends three, and the budget of all policies is ten.
    assert_eq!(arrived.load(Ordering::Relaxed), 13, "of 48");
    assert_eq!(attempts.count(), 13);
    assert_eq!(attempts_of_one(&layer.limiter()), 13);
    assert_eq!(events.lock().unwrap().len(), 2, "at 5 and at 10");
}

/// The outer layer limits calls in flight, and the inner one the rate.
#[tokio::test(start_paused = true)]
async fn layers_around_each_other_count_an_attempt_once() {
    let (outer, inner) = (limit_of(Quota::in_flight(5)), limit());
    let (server, arrived) = server();
    let mut service = ServiceBuilder::new()
        .layer(outer.0.clone())
        .retry(RetryLimited::new().budget(100, 20))
        .layer(inner.0.clone())
        .service(server);
    let attempts = Attempts::new();
    for _ in 0..2 {
        let mut request = Request::new(());
        request.extensions_mut().insert(attempts.clone());
        service.ready().await.unwrap().call(request).await.unwrap();
    }
    assert_eq!(arrived.load(Ordering::Relaxed), 6);
    assert_eq!(attempts.count(), 6);
    assert_eq!(attempts_of_one(&outer.0.limiter()), 2);
    assert_eq!(attempts_of_one(&inner.0.limiter()), 6);
    assert!(outer.1.lock().unwrap().is_empty());
    assert_eq!(inner.1.lock().unwrap().len(), 1, "at 5");
}

#[tokio::test(start_paused = true)]
async fn attempts_whose_refusal_is_an_error_count() {
    let (server, arrived) = server();
    let layer = RateLimitLayer::builder(Quota::per_second(100)).error_on_upstream_limit();
    let layer = layer.max_wait(Duration::from_secs(60)).build().unwrap();
    let retry = || RetryLimited::new().budget(100, 20);
    let mut service = ServiceBuilder::new()
        .retry(retry())
        .retry(retry())
        .layer(layer.clone())
        .service(server);
    let request = Request::new(());
    service
        .ready()
        .await
        .unwrap()
        .call(request)
        .await
        .unwrap_err();
    assert_eq!(arrived.load(Ordering::Relaxed), 9);
    assert_eq!(attempts_of_one(&layer.limiter()), 9);
}

#[tokio::test(start_paused = true)]
async fn requests_without_repeats_are_not_sent_again() {
    let (layer, events) = limit();
    let (server, _) = server();
    let mut service = ServiceBuilder::new()
        .retry(RetryLimited::new().attempts(1))
        .layer(layer.clone())
        .service(server);
    for _ in 0..10 {
        let request = Request::new(());
        service.ready().await.unwrap().call(request).await.unwrap();
    }
    assert_eq!(layer.limiter().stats().sent_again(), 0);
    assert!(events.lock().unwrap().is_empty());
}

#[cfg(feature = "reqwest-retry")]
mod middleware {
    use reqwest_middleware::{ClientBuilder, Middleware, Next};
    use reqwest_retry::RetryTransientMiddleware;

    use super::*;

    /// A server that refuses all requests.
    struct Server(Arc<AtomicU32>);

    #[async_trait::async_trait]
    impl Middleware for Server {
        async fn handle(
            &self,
            _: reqwest::Request,
            _: &mut http::Extensions,
            _: Next<'_>,
        ) -> reqwest_middleware::Result<reqwest::Response> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let response = Response::builder().status(429).body("").unwrap();
            Ok(response.into())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_reqwest_middleware_count_their_attempts() {
        let (layer, events) = limit();
        let arrived = Arc::new(AtomicU32::new(0));
        let retry = RetryLimited::new().attempts(6);
        let retry = RetryTransientMiddleware::new_with_policy_and_strategy(retry.clone(), retry);
        let client = ClientBuilder::new(reqwest::Client::new())
            .with(retry)
            .with(layer.clone())
            .with(Server(arrived.clone()))
            .build();
        client.get("http://h/").send().await.unwrap();
        assert_eq!(arrived.load(Ordering::Relaxed), 6);
        assert_eq!(attempts_of_one(&layer.limiter()), 6);
        assert_eq!(events.lock().unwrap().len(), 1);
    }
}
