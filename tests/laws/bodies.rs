//! Bodies at the layers: refusals that only a body explains, and bodies that pass unchanged.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures::channel::mpsc;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::Instant;
use tollgate::body::{BodyLayer, WatchedBody};
use tollgate::{AdaptiveThrottleLayer, Key, Quota, RateLimitLayer, Reason};
use tower::{Layer, ServiceExt, service_fn};

const KEY: &str = "account";

type Frames = mpsc::UnboundedReceiver<Result<Frame<Bytes>, Infallible>>;

fn layer() -> RateLimitLayer {
    let builder = RateLimitLayer::builder(Quota::per_second(50)).key(|_| Key::new(KEY));
    builder.build().unwrap()
}

/// Returns the response to a request that a server answers with `response`.
async fn answered<B: Body + Clone + Send + 'static>(
    layer: BodyLayer,
    response: Response<B>,
) -> Response<WatchedBody<B>> {
    let server = service_fn(|_: Request<()>| {
        let response = response.clone();
        async { Ok::<_, Infallible>(response) }
    });
    let request = Request::get("http://example.com/").body(()).unwrap();
    layer.layer(server).oneshot(request).await.unwrap()
}

fn whole(status: u16, content_type: &str, body: &str) -> Response<Full<Bytes>> {
    let response = Response::builder()
        .status(status)
        .header("content-type", content_type);
    response
        .body(Full::new(Bytes::from(body.to_owned())))
        .unwrap()
}

/// Returns for how long a response holds its key, in seconds.
async fn seconds_held(response: Response<Full<Bytes>>) -> u64 {
    let layer = layer();
    let limiter = layer.limiter();
    let expected = response.body().clone().collect().await.unwrap().to_bytes();
    let body = answered(layer.read_bodies(), response).await.into_body();
    assert_eq!(body.size_hint().exact(), u64::try_from(expected.len()).ok());
    assert_eq!(body.collect().await.unwrap().to_bytes(), expected);
    let held = limiter.peek(Key::new(KEY)).await.unwrap().held;
    held.unwrap_or_default().as_secs_f64().round() as u64
}

#[tokio::test(start_paused = true)]
async fn bodies_of_refusals_are_read_and_passed_on() {
    let wait = r#"{"error": "rate limited, try again in 30 seconds"}"#;
    assert_eq!(seconds_held(whole(429, "application/json", wait)).await, 30);
    assert_eq!(
        seconds_held(whole(
            403,
            "text/plain",
            "rate limit exceeded, retry after 20 s"
        ))
        .await,
        20
    );
    // An envelope.
    let envelope = r#"{"ok": false, "error": "ratelimited", "retry_after": 9}"#;
    assert_eq!(
        seconds_held(whole(200, "application/json; charset=utf-8", envelope)).await,
        9
    );
    assert_eq!(seconds_held(whole(200, "text/plain", envelope)).await, 0);
    assert_eq!(seconds_held(whole(404, "application/json", "{}")).await, 0);
    // Too long: the head decides, and the first hold without a time is about a second.
    let long = format!("{wait}{}", " ".repeat(64 * 1024));
    assert!(seconds_held(whole(429, "application/json", &long)).await <= 1);
}

type Feed = mpsc::UnboundedSender<Result<Frame<Bytes>, Infallible>>;

/// A response whose body does not end, and what it is fed by.
fn endless(status: u16) -> (Feed, Response<StreamBody<Frames>>) {
    let (sender, frames) = mpsc::unbounded();
    let response = Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .header("retry-after", "5");
    (sender, response.body(StreamBody::new(frames)).unwrap())
}

/// The server sends a head, and its body later or never.
/// A refusal without a time, but with a code that says that a budget or the quota of a day is used up.
#[tokio::test(start_paused = true)]
async fn codes_of_used_up_quotas_are_told_to_callers() {
    let codes = [
        (
            r#"{"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}"#,
            true,
        ),
        (
            r#"{"error": {"errors": [{"reason": "dailyLimitExceeded"}]}}"#,
            true,
        ),
        (r#"{"error": {"code": "rate_limit_exceeded"}}"#, false),
    ];
    for (body, is_used_up) in codes {
        let layer = RateLimitLayer::builder(Quota::per_second(50)).key(|_| Key::new(KEY));
        let layer = layer.max_wait(Duration::ZERO).build().unwrap();
        let limiter = layer.limiter();
        let response = answered(layer.read_bodies(), whole(429, "application/json", body)).await;
        drop(response.into_body().collect().await);
        let refused = limiter.acquire(Key::new(KEY)).await.unwrap_err();
        match refused.reason() {
            Some(Reason::UsedUp { quota, .. }) => {
                let quota = quota.expect("the code is its name");
                assert!(is_used_up && body.contains(&*quota), "{body}: {quota}");
            }
            reason => assert!(
                !is_used_up && reason == Some(Reason::Held),
                "{body}: {reason:?}"
            ),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn slow_bodies_hold_no_response_back() {
    for (status, longest) in [(200, Duration::ZERO), (429, Duration::from_secs(1))] {
        let (sender, response) = endless(status);
        let response = std::sync::Mutex::new(Some(response));
        let server = service_fn(|_: Request<()>| {
            let response = response.lock().unwrap().take().unwrap();
            async { Ok::<_, Infallible>(response) }
        });
        let layer = layer();
        let limiter = layer.limiter();
        sender
            .unbounded_send(Ok(Frame::data("one ".into())))
            .unwrap();
        let start = Instant::now();
        let request = Request::get("http://example.com/").body(()).unwrap();
        let response = layer
            .read_bodies()
            .layer(server)
            .oneshot(request)
            .await
            .unwrap();
        assert_eq!(start.elapsed(), longest, "{status}");
        let held = limiter.peek(Key::new(KEY)).await.unwrap().held;
        assert_eq!(held.is_some(), status == 429);
        sender
            .unbounded_send(Ok(Frame::data("two".into())))
            .unwrap();
        drop(sender);
        let text = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, "one two");
    }
}

#[tokio::test(start_paused = true)]
async fn throttles_and_calls_in_flight_read_bodies_too() {
    let envelope = r#"{"ok": false, "error": "ratelimited", "retry_after": 9}"#;
    let response = whole(200, "application/json", envelope);
    let limit = RateLimitLayer::new(Quota::in_flight(1)).unwrap();
    let limiter = limit.limiter();
    let both = limit.read_bodies().in_flight_until_body_end();
    let response = answered(both, response.clone()).await;
    assert_eq!(limiter.peek(Key::ALL).await.unwrap().free, 0);
    drop(response);
    assert_eq!(limiter.peek(Key::ALL).await.unwrap().free, 1);

    let throttle = AdaptiveThrottleLayer::new();
    let server = service_fn(move |_: Request<()>| async move {
        Ok::<_, Infallible>(whole(200, "application/json", envelope))
    });
    let service = throttle.clone().read_bodies().layer(server);
    let request = || Request::get("http://example.com/").body(()).unwrap();
    service.clone().oneshot(request()).await.unwrap();
    let start = Instant::now();
    service.oneshot(request()).await.unwrap();
    assert!(
        start.elapsed() >= Duration::from_secs(9),
        "{:?}",
        start.elapsed()
    );
}

/// The innermost middleware answers in place of a server.
#[cfg(feature = "reqwest-middleware")]
#[tokio::test(start_paused = true)]
async fn reqwest_middleware_reads_bodies() {
    struct Server;

    #[async_trait::async_trait]
    impl reqwest_middleware::Middleware for Server {
        async fn handle(
            &self,
            _: reqwest::Request,
            _: &mut http::Extensions,
            _: reqwest_middleware::Next<'_>,
        ) -> reqwest_middleware::Result<reqwest::Response> {
            let body = r#"{"error": "rate limited, try again in 30 seconds"}"#;
            Ok(Response::builder().status(429).body(body).unwrap().into())
        }
    }

    let layer = layer();
    let limiter = layer.limiter();
    let client = reqwest_middleware::ClientBuilder::new(reqwest::Client::new());
    let client = client.with(layer.read_bodies()).with(Server).build();
    let response = client.get("http://example.com/").send().await.unwrap();
    let held = limiter.peek(Key::new(KEY)).await.unwrap().held.unwrap();
    assert_eq!(held.as_secs_f64().round() as u64, 30);
    assert!(response.text().await.unwrap().ends_with("30 seconds\"}"));
}
