//! The layers for gRPC, around services that answer as a server of gRPC does.

#![cfg(feature = "grpc")]

use crate::support;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, StreamBody};
use support::{Failing, ms};
use tokio::time::Instant;
use tollgate::error::BoxError;
use tollgate::grpc::{GrpcBody, LocalRefusal};
use tollgate::limiter::KeyStatus;
use tollgate::{
    AdaptiveThrottleLayer, Error, Key, Limited, Limiter, Quota, RateLimitLayer, Reason, Settlement,
    by_grpc_method, by_grpc_service,
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

type Frames = futures::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, BoxError>>>;

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let line = |(name, value): &(&'static str, &str)| {
        let value = HeaderValue::from_str(value).unwrap();
        (HeaderName::from_static(name), value)
    };
    lines.iter().map(line).collect()
}

/// A response with these headers and frames.
fn response(
    head: HeaderMap,
    frames: Vec<Result<Frame<Bytes>, BoxError>>,
) -> Response<StreamBody<Frames>> {
    let mut response = Response::new(StreamBody::new(futures::stream::iter(frames)));
    *response.headers_mut() = head;
    response
}

fn message() -> Result<Frame<Bytes>, BoxError> {
    Ok(Frame::data(Bytes::from_static(b"\0\0\0\0\0")))
}

/// What a server answers.
#[derive(Clone)]
enum Answer {
    /// Status and metadata, without a message.
    TrailersOnly(HeaderMap),
    /// Metadata, a message, and then status and metadata.
    Streamed(HeaderMap, HeaderMap),
    /// Metadata and a message, and then the connection breaks.
    Broken(HeaderMap),
    /// No gRPC: the answer of a proxy.
    Http(u16, HeaderMap),
}

fn trailers_only(lines: &[(&'static str, &str)]) -> Answer {
    Answer::TrailersOnly(headers(lines))
}

fn streamed(lines: &[(&'static str, &str)]) -> Answer {
    Answer::Streamed(HeaderMap::new(), headers(lines))
}

fn ok() -> Answer {
    streamed(&[("grpc-status", "0")])
}

/// A server that answers what it is told, and then that all is well. Clones are the same server.
#[derive(Clone, Default)]
struct Server {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    /// When it got requests.
    log: Arc<Mutex<Vec<Instant>>>,
}

impl Server {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let server = Server::default();
        server.answers.lock().unwrap().extend(answers);
        server
    }

    fn calls(&self) -> usize {
        self.log.lock().unwrap().len()
    }

    fn answer(&self) -> Response<StreamBody<Frames>> {
        self.log.lock().unwrap().push(Instant::now());
        match self.answers.lock().unwrap().pop_front().unwrap_or_else(ok) {
            Answer::TrailersOnly(head) => response(head, Vec::new()),
            Answer::Streamed(head, trailers) => {
                response(head, vec![message(), Ok(Frame::trailers(trailers))])
            }
            Answer::Broken(head) => response(head, vec![message(), Err("broken pipe".into())]),
            Answer::Http(status, head) => {
                let mut response = response(head, Vec::new());
                *response.status_mut() = http::StatusCode::from_u16(status).unwrap();
                response
            }
        }
    }
}

/// What the tests need of the services that the layers make.
macro_rules! service {
    ($body:ty) => {
        impl Service<Request<()>, Response = Response<$body>, Error = Error, Future: Send> + Clone
    };
}

fn around<L>(layer: L, server: &Server) -> L::Service
where
    L: Layer<tower::util::BoxCloneSyncService<Request<()>, Response<StreamBody<Frames>>, BoxError>>,
{
    let server = server.clone();
    let answer = move |_: Request<()>| {
        let server = server.clone();
        async move { Ok::<_, BoxError>(server.answer()) }
    };
    layer.layer(tower::util::BoxCloneSyncService::new(service_fn(answer)))
}

fn request() -> Request<()> {
    Request::post("http://upstream.test/shop.v1.Orders/Create")
        .body(())
        .unwrap()
}

type Grpc = Response<GrpcBody<StreamBody<Frames>>>;

async fn call(service: &service!(GrpcBody<StreamBody<Frames>>)) -> Grpc {
    service.clone().oneshot(request()).await.unwrap()
}

/// Makes a call and reads its response to the end. Returns its status.
async fn status(service: &service!(GrpcBody<StreamBody<Frames>>)) -> String {
    let response = call(service).await;
    let head = response.headers().get("grpc-status").cloned();
    let trailers = response.into_body().collect().await.unwrap();
    let trailers = trailers.trailers().and_then(|all| all.get("grpc-status"));
    let status = head.as_ref().or(trailers).unwrap();
    status.to_str().unwrap().to_owned()
}

async fn peek(limiter: &Limiter) -> KeyStatus {
    limiter.peek(Key::ALL).await.unwrap()
}

/// How long requests to the host are on hold.
async fn hold(limiter: &Limiter) -> Option<Duration> {
    let status = limiter.peek(Key::host_hold("upstream.test")).await;
    status.unwrap().held
}

fn layer(quota: Quota) -> RateLimitLayer {
    RateLimitLayer::new(quota).unwrap()
}

#[tokio::test(start_paused = true)]
async fn refusals_hold_the_key() {
    const SECOND: Duration = Duration::from_secs(1);
    for (answer, least, most) in [
        (
            trailers_only(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "3000")]),
            ms(3000),
            ms(3100),
        ),
        (
            streamed(&[("grpc-status", "14"), ("grpc-retry-pushback-ms", "3000")]),
            ms(3000),
            ms(3100),
        ),
        // Without a time, and with "do not retry": as a 429 without `Retry-After`.
        (trailers_only(&[("grpc-status", "8")]), SECOND / 2, SECOND),
        (
            streamed(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "-1")]),
            SECOND / 2,
            SECOND,
        ),
        // `max_hold` cuts it.
        (
            trailers_only(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "9000000")]),
            ms(59_000),
            ms(61_000),
        ),
        (
            Answer::Http(429, headers(&[("retry-after", "3")])),
            ms(3000),
            ms(3100),
        ),
        // The metadata before the message states the time, unless the trailers do.
        (
            Answer::Streamed(
                headers(&[("retry-after", "3")]),
                headers(&[("grpc-status", "8")]),
            ),
            ms(3000),
            ms(3100),
        ),
        (
            Answer::Streamed(
                headers(&[("retry-after", "9")]),
                headers(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "3000")]),
            ),
            ms(3000),
            ms(3100),
        ),
    ] {
        let limit = layer(Quota::per_second(50));
        let limiter = limit.limiter();
        let server = Server::new([answer]);
        let service = around(limit.grpc(), &server);
        drop(call(&service).await.into_body().collect().await.unwrap());
        let held = hold(&limiter).await.unwrap();
        assert!((least..=most).contains(&held), "{held:?}");
        assert_eq!(limiter.stats().upstream_refusals().total(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_the_pushback() {
    let refused = trailers_only(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "2000")]);
    let server = Server::new([refused]);
    let service = around(layer(Quota::per_second(50)).grpc(), &server);
    let start = Instant::now();
    assert_eq!(
        status(&service).await,
        "8",
        "the status of the server passes"
    );
    assert_eq!(status(&service).await, "0");
    assert!((ms(2000)..ms(2100)).contains(&start.elapsed()));
    assert_eq!(server.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn other_statuses_hold_no_key() {
    let pushback = ("grpc-retry-pushback-ms", "3000");
    for answer in [
        ok(),
        trailers_only(&[("grpc-status", "0")]),
        trailers_only(&[("grpc-status", "14")]),
        streamed(&[("grpc-status", "14"), ("grpc-retry-pushback-ms", "-1")]),
        streamed(&[("grpc-status", "5"), pushback]),
        streamed(&[]),
        Answer::Broken(headers(&[])),
        // Before its status, a call has not ended.
        Answer::Broken(headers(&[pushback])),
    ] {
        let limit = layer(Quota::per_second(50));
        let limiter = limit.limiter();
        let service = around(limit.grpc(), &Server::new([answer]));
        drop(call(&service).await.into_body().collect().await);
        assert_eq!(hold(&limiter).await, None);
        assert_eq!(limiter.stats().upstream_refusals().total(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_begins_with_the_trailers() {
    let limit = layer(Quota::per_second(50));
    let limiter = limit.limiter();
    let refused = streamed(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "3000")]);
    let service = around(limit.grpc(), &Server::new([refused]));
    let mut body = call(&service).await.into_body();
    assert!(body.frame().await.unwrap().unwrap().is_data());
    assert_eq!(hold(&limiter).await, None);
    let trailers = body.frame().await.unwrap().unwrap();
    assert_eq!(trailers.trailers_ref().unwrap()["grpc-status"], "8");
    assert!(hold(&limiter).await.is_some());
    assert!(body.frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn the_wait_in_the_metadata_counts_from_its_arrival() {
    let limit = layer(Quota::per_second(50));
    let limiter = limit.limiter();
    let head = headers(&[("retry-after", "3")]);
    for (passed, status, expected) in [
        (ms(1000), "8", Some(ms(1990)..ms(2100))),
        (ms(10_000), "8", Some(ms(400)..ms(1000))),
        (ms(1000), "0", None),
    ] {
        let answer = Answer::Streamed(head.clone(), headers(&[("grpc-status", status)]));
        let service = around(limit.clone().grpc(), &Server::new([answer]));
        let body = call(&service).await.into_body();
        tokio::time::sleep(passed).await;
        drop(body.collect().await.unwrap());
        let held = hold(&limiter).await;
        match expected {
            Some(expected) => assert!(
                held.is_some_and(|held| expected.contains(&held)),
                "{held:?}"
            ),
            None => assert_eq!(held, None),
        }
        tokio::time::sleep(ms(60_000)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn quotas_in_the_metadata_are_read() {
    let head = headers(&[
        ("x-ratelimit-limit", "100"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "30"),
    ]);
    let limit = layer(Quota::per_second(50));
    let limiter = limit.limiter();
    let answer = Answer::Streamed(head, headers(&[("grpc-status", "0")]));
    let service = around(limit.grpc(), &Server::new([answer]));
    assert_eq!(status(&service).await, "0");
    assert!(hold(&limiter).await >= Some(ms(20_000)));
}

/// Asserts that a response is a local refusal, and returns why.
fn local_refusal(response: &Grpc) -> &Limited {
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/grpc");
    assert!(response.body().is_end_stream());
    let local: &LocalRefusal = response.extensions().get().unwrap();
    local.limited()
}

#[tokio::test(start_paused = true)]
async fn a_local_refusal_is_a_response() {
    let limit = RateLimitLayer::builder(Quota::per_minute(1)).max_wait(ms(1500));
    let limit = limit.build().unwrap();
    let (limiter, server) = (limit.limiter(), Server::default());
    let service = around(limit.grpc(), &server);
    assert_eq!(status(&service).await, "0");
    let refused = call(&service).await;
    let limited = local_refusal(&refused);
    assert_eq!(limited.reason(), Some(Reason::MaxWait(ms(1500))));
    let head = refused.headers();
    assert_eq!(head["grpc-status"], "8");
    assert_eq!(head["tollgate-refused"], "max_wait");
    let message = head["grpc-message"].to_str().unwrap();
    assert!(message.starts_with("refused locally (all)"), "{message}");
    let pushback: u128 = head["grpc-retry-pushback-ms"]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    let wait = limited.retry_after().unwrap();
    assert_eq!(pushback, wait.as_nanos().div_ceil(1_000_000));
    assert!(wait > ms(50_000), "{wait:?}");
    assert_eq!(server.calls(), 1);
    assert_eq!(limiter.stats().refusals().total(), 1);
    assert_eq!(refused.into_body().collect().await.unwrap().to_bytes(), "");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_no_wait_helps_names_none() {
    let limit = RateLimitLayer::builder(Quota::per_minute(1)).key(by_grpc_service);
    let service = around(limit.build().unwrap().grpc(), &Server::default());
    let request = Request::post("http://upstream.test/").body(()).unwrap();
    let refused = service.oneshot(request).await.unwrap();
    assert_eq!(local_refusal(&refused).reason(), Some(Reason::NoKey));
    assert_eq!(refused.headers()["tollgate-refused"], "no_key");
    assert_eq!(refused.headers().get("grpc-retry-pushback-ms"), None);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_unavailable() {
    let limit = RateLimitLayer::builder(Quota::per_minute(1)).store(Arc::new(Failing::away(false)));
    let server = Server::default();
    let service = around(limit.build().unwrap().grpc(), &server);
    let failed = call(&service).await;
    assert!(matches!(local_refusal(&failed), Limited::Store { .. }));
    assert_eq!(failed.headers()["grpc-status"], "14");
    assert_eq!(failed.headers()["tollgate-refused"], "store");
    assert_eq!(server.calls(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_service_stays_an_error() {
    let broken = service_fn(|_: Request<()>| async {
        Err::<Response<StreamBody<Frames>>, BoxError>("broken pipe".into())
    });
    let service = layer(Quota::per_second(50)).grpc().layer(broken);
    let error = service.oneshot(request()).await.unwrap_err();
    assert!(matches!(error, Error::Inner(_)), "{error}");
}

/// No layer takes a local refusal of another one for the word of the server, also not one whose
/// dialect knows the status.
#[tokio::test(start_paused = true)]
async fn layers_around_do_not_learn_from_a_local_refusal() {
    let inner = || {
        let inner = RateLimitLayer::builder(Quota::per_hour(1)).max_wait(Duration::ZERO);
        inner.build().unwrap().grpc()
    };
    let outer = || {
        let outer = RateLimitLayer::builder(Quota::in_flight(50));
        let knows = |_: Key, head: &HeaderMap, signal: tollgate::Signal| {
            let is_refused = head.get("grpc-status").is_some_and(|status| status == "8");
            let refusal = is_refused.then_some(http::StatusCode::TOO_MANY_REQUESTS);
            signal.with_refusal(refusal)
        };
        outer.dialect(knows).build().unwrap()
    };
    let throttle = || {
        let throttle = AdaptiveThrottleLayer::builder();
        let knows = |_: Key, head: &HeaderMap, signal: tollgate::Signal| {
            let is_refused = head.get("grpc-status").is_some_and(|status| status == "8");
            let refusal = is_refused.then_some(http::StatusCode::TOO_MANY_REQUESTS);
            signal.with_refusal(refusal)
        };
        throttle.dialect(knows).build().unwrap()
    };
    let server = Server::default();

    // The same layers take the status for a refusal if it is that of a server.
    let refused = trailers_only(&[("grpc-status", "8")]);
    let plain = outer();
    let limiter = plain.limiter();
    let told = around(plain, &Server::new([refused.clone()]));
    drop(told.oneshot(request()).await.unwrap());
    assert_eq!(limiter.stats().upstream_refusals().total(), 1);

    let plain = outer();
    let limiter = plain.limiter();
    let service = around(
        ServiceBuilder::new()
            .layer(plain)
            .layer(inner())
            .into_inner(),
        &server,
    );
    for refused in [false, true] {
        let response = service.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            response.extensions().get::<LocalRefusal>().is_some(),
            refused
        );
        drop(response.into_body().collect().await);
    }
    assert_eq!(limiter.stats().upstream_refusals().total(), 0);

    let grpc = outer();
    let limiter = grpc.limiter();
    let grpc = ServiceBuilder::new().layer(grpc.grpc()).layer(inner());
    let service = around(grpc.into_inner(), &server);
    for refused in [false, true] {
        let response = service.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            response.extensions().get::<LocalRefusal>().is_some(),
            refused
        );
        drop(response.into_body().collect().await);
    }
    assert_eq!(limiter.stats().upstream_refusals().total(), 0);
    assert_eq!(hold(&limiter).await, None);

    let adaptive = throttle();
    let throttle = adaptive.throttle();
    let adaptive = ServiceBuilder::new().layer(adaptive).layer(inner());
    let service = around(adaptive.into_inner(), &server);
    for refused in [false, true] {
        let response = service.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            response.extensions().get::<LocalRefusal>().is_some(),
            refused
        );
        drop(response.into_body().collect().await);
    }
    assert_eq!(throttle.stats().upstream_refusals().total(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_layer_inside_is_a_local_refusal() {
    let inner = RateLimitLayer::builder(Quota::per_hour(1)).max_wait(Duration::ZERO);
    let layers = ServiceBuilder::new()
        .layer(layer(Quota::in_flight(50)).grpc())
        .layer(inner.build().unwrap());
    let service = around(layers.into_inner(), &Server::default());
    assert_eq!(status(&service).await, "0");
    let refused = call(&service).await;
    let reason = local_refusal(&refused).reason();
    assert!(matches!(reason, Some(Reason::MaxWait(_))), "{reason:?}");
}

#[tokio::test(start_paused = true)]
async fn a_call_is_in_flight_until_its_trailers() {
    let limit = layer(Quota::in_flight(1));
    let limiter = limit.limiter();
    let free = async || peek(&limiter).await.free;
    let service = around(limit.clone().grpc(), &Server::default());
    let mut body = call(&service).await.into_body();
    assert_eq!(free().await, 0);
    drop(body.frame().await);
    assert_eq!(free().await, 0);
    drop(body.frame().await);
    assert_eq!(free().await, 1, "the trailers have arrived");
    drop(call(&service).await);
    assert_eq!(free().await, 1, "the body was dropped");
    let broken = Answer::Broken(HeaderMap::new());
    let service = around(limit.grpc(), &Server::new([broken]));
    drop(call(&service).await.into_body().collect().await);
    assert_eq!(free().await, 1, "the body has failed");
}

#[tokio::test(start_paused = true)]
async fn the_throttle_learns_from_trailers() {
    let layer = AdaptiveThrottleLayer::new();
    let throttle = layer.throttle();
    let refused = streamed(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "3000")]);
    let service = around(layer.grpc(), &Server::new([refused]));
    let start = Instant::now();
    assert_eq!(status(&service).await, "8");
    assert_eq!(throttle.stats().upstream_refusals().total(), 1);
    assert_eq!(status(&service).await, "0");
    assert!(start.elapsed() >= ms(3000), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_throttle_refuses_with_a_response() {
    let layer = AdaptiveThrottleLayer::builder().max_wait(ms(100));
    let layer = layer.build().unwrap();
    let refused = trailers_only(&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "30000")]);
    let service = around(layer.grpc(), &Server::new([refused]));
    assert_eq!(status(&service).await, "8");
    let limited = call(&service).await;
    let limited = local_refusal(&limited);
    assert!(limited.retry_after() > Some(ms(20_000)), "{limited}");
}

#[tokio::test(start_paused = true)]
async fn streamed_responses_are_settled_by_their_metadata() {
    let builder = || RateLimitLayer::builder(Quota::per_minute(100)).cost(|_| 10);
    let used = async |limiter: &Limiter| peek(limiter).await.limits[0].used;
    let answer = || {
        let head = headers(&[("x-cost", "3")]);
        Server::new([Answer::Streamed(head, headers(&[("grpc-status", "0")]))])
    };
    let layer = builder().settle(|response| response.number("x-cost"));
    let layer = layer.build().unwrap();
    let limiter = layer.limiter();
    assert_eq!(status(&around(layer.grpc(), &answer())).await, "0");
    tokio::time::sleep(ms(200)).await;
    assert_eq!(used(&limiter).await, 3);

    let layer = builder().settle_by_hand().build().unwrap();
    let limiter = layer.limiter();
    let response = call(&around(layer.grpc(), &answer())).await;
    let settlement: Settlement = response.extensions().get().cloned().unwrap();
    drop(response.into_body().collect().await.unwrap());
    settlement.settle(4);
    tokio::time::sleep(ms(200)).await;
    assert_eq!(used(&limiter).await, 4);
}

#[tokio::test(start_paused = true)]
async fn keys_are_services_and_methods() {
    let service_of = async |layer: RateLimitLayer| {
        let service = around(layer.grpc(), &Server::default());
        let mut refused = Vec::new();
        for path in ["Orders/Create", "Orders/Create", "Orders/Get", "Users/Get"] {
            let request = Request::post(format!("http://h/shop.v1.{path}"));
            let request = request.body(()).unwrap();
            let response = service.clone().oneshot(request).await.unwrap();
            refused.push(response.extensions().get::<LocalRefusal>().is_some());
        }
        refused
    };
    let builder = || RateLimitLayer::builder(Quota::per_hour(1)).max_wait(Duration::ZERO);
    let by_service = builder().key(by_grpc_service).build().unwrap();
    assert_eq!(service_of(by_service).await, [false, true, true, false]);
    let by_method = builder().key(by_grpc_method).build().unwrap();
    assert_eq!(service_of(by_method).await, [false, true, false, false]);
}

/// A service without an error of its own fits as well, and the layers are `Clone`, `Send` and `Sync`.
#[tokio::test(start_paused = true)]
async fn the_types_fit_tonic() {
    fn is_shared<T: Send + Sync + Clone + 'static>(_: &T) {}
    let limit = layer(Quota::per_second(50)).grpc();
    is_shared(&limit);
    is_shared(&AdaptiveThrottleLayer::new().grpc());
    let never = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(response(headers(&[("grpc-status", "0")]), Vec::new()))
    });
    let service = limit.layer(never);
    is_shared(&service);
    let response = service.oneshot(request()).await.unwrap();
    fn is_sent<T: Send + 'static>(_: &T) {}
    is_sent(response.body());
}
