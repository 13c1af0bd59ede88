//! reqwest: its client as a service under the layer, and the layer as a middleware of
//! reqwest-middleware.
#![cfg(all(feature = "reqwest", feature = "reqwest-middleware"))]

use crate::support;

use std::future::{Ready, ready};
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
use reqwest::{Client, Request, Response, StatusCode};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_retry::policies::ExponentialBackoff;
use tollgate::{
    AdaptiveThrottleLayer, Cost, Deadline, Error, Key, Limited, Quota, RateLimitBuilder,
    RateLimitLayer, Reason, by_host,
};
use tower::retry::Policy;
use tower::{Layer, ServiceBuilder, ServiceExt};
use upstream::Upstream as Server;

use support::{
    Failing, SECOND, Upstream, get, limited, ms, now, pass, settle, soon, used, waiting,
    who_said_no,
};

/// Few enough that no permit is prefetched, long enough that no unit leaves the window. Refusals by
/// the upstream hold no request: these tests look at each attempt.
fn plenty() -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_hour(40))
        .max_wait(ms(0))
        .max_hold(ms(0))
}

fn client() -> Client {
    Client::builder().no_proxy().build().unwrap()
}

fn with(layer: RateLimitLayer) -> ClientWithMiddleware {
    ClientBuilder::new(client()).with(layer).build()
}

/// A real server, which refuses the first `refusals` calls.
fn server(refusals: usize) -> Server {
    Server::open().script(move |call| (call < refusals).then(|| upstream::refusal(7)))
}

fn request(server: &Server) -> Request {
    client().get(server.url()).build().unwrap()
}

fn reason(error: &(dyn std::error::Error + 'static)) -> Option<Reason> {
    match Limited::find(error)? {
        Limited::Local { reason, .. } => Some(reason.clone()),
        _ => None,
    }
}

/// A short policy: at most two more attempts, without delay.
fn retry() -> RetryTransientMiddleware<ExponentialBackoff> {
    let bounds = Duration::from_millis(1);
    let policy = ExponentialBackoff::builder()
        .retry_bounds(bounds, bounds)
        .build_with_max_retries(2);
    RetryTransientMiddleware::new_with_policy(policy)
}

#[tokio::test]
async fn a_reqwest_client_is_a_service_under_the_layer() {
    let server = server(0);
    let limit = RateLimitLayer::builder(Quota::per_hour(1))
        .key(by_host)
        .max_wait(ms(0))
        .build()
        .unwrap();
    let service = ServiceBuilder::new().layer(limit.clone()).service(client());
    let response = service.clone().oneshot(request(&server)).await.unwrap();
    assert_eq!(
        (response.status(), response.text().await.unwrap().is_empty()),
        (StatusCode::OK, false)
    );

    let error = service.oneshot(request(&server)).await.unwrap_err();
    let Error::Limited(refused @ Limited::Local { .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(refused.report().key(), "127.0.0.1");
    assert_eq!(server.tally().all(), 1);
    let boxed = ServiceBuilder::new()
        .boxed_clone_sync()
        .layer(limit)
        .service(client());
    assert_eq!(
        who_said_no(&boxed.oneshot(request(&server)).await.unwrap_err()),
        "local"
    );
}

#[tokio::test]
async fn client_with_middleware_is_a_service_under_the_layer() {
    let server = server(0);
    let (outer, inner) = (
        RateLimitLayer::new(Quota::in_flight(40)).unwrap(),
        RateLimitLayer::builder(Quota::per_hour(1)),
    );
    let inner = inner.max_wait(ms(0)).build().unwrap();
    let service = outer.layer(with(inner));
    service.clone().oneshot(request(&server)).await.unwrap();
    let error = service.oneshot(request(&server)).await.unwrap_err();
    assert_eq!(
        who_said_no(&error),
        "local",
        "the inner layer's no is found through both"
    );
    assert_eq!(server.tally().all(), 1);
}

#[tokio::test]
async fn layer_value_fits_both_ecosystems_and_shares_one_count() {
    let server = server(0);
    let limit = plenty().build().unwrap();
    let middleware = with(limit.clone());
    let arc = ClientBuilder::new(client())
        .with_arc(Arc::new(limit.clone()))
        .build();
    let service = ServiceBuilder::new().layer(limit.clone()).service(client());
    middleware.get(server.url()).send().await.unwrap();
    arc.execute(request(&server)).await.unwrap();
    service.oneshot(request(&server)).await.unwrap();
    drop(limit.limiter().acquire(Key::ALL).await.unwrap());
    assert_eq!((used(&limit).await, server.tally().all()), (4, 3));
}

#[tokio::test]
async fn request_extensions_carry_key_cost_and_deadline() {
    let server = server(0);
    let limit = RateLimitLayer::builder(Quota::per_hour(5))
        .key(by_host)
        .max_wait(ms(0))
        .build()
        .unwrap();
    let client = with(limit.clone());
    let get = || client.get(server.url());
    let units = async |key| support::peek(&limit, key).await.limits[0].used;

    get()
        .with_extension(Key::new("batch"))
        .with_extension(Cost::new(3))
        .send()
        .await
        .unwrap();
    assert_eq!(
        (
            units(Key::new("batch")).await,
            units(Key::new("127.0.0.1")).await
        ),
        (3, 0)
    );
    get().with_extension(Cost::new(0)).send().await.unwrap();
    assert_eq!(units(Key::new("127.0.0.1")).await, 0);
    let too_dear = get().with_extension(Cost::new(6)).send().await.unwrap_err();
    assert_eq!(
        reason(&too_dear),
        Some(Reason::CostAboveLimit {
            cost: 6,
            largest: 5,
            unit: Cost::REQUESTS
        })
    );
    let too_late = get()
        .with_extension(Deadline::at(support::long_ago()))
        .send()
        .await
        .unwrap_err();
    assert_eq!(reason(&too_late), Some(Reason::Deadline));
    get()
        .with_extension(Deadline::at(now() + ms(60_000)))
        .send()
        .await
        .unwrap();
    assert_eq!(
        (units(Key::new("127.0.0.1")).await, server.tally().all()),
        (1, 3)
    );
}

#[tokio::test]
async fn a_retry_outside_takes_a_permit_for_each_attempt() {
    let server = server(2);
    let limit = plenty().build().unwrap();
    let client = ClientBuilder::new(client())
        .with(retry())
        .with(limit.clone())
        .build();
    assert_eq!(client.get(server.url()).send().await.unwrap().status(), 200);
    assert_eq!((server.tally().all(), used(&limit).await), (3, 3));
}

#[tokio::test]
async fn retry_without_a_permit_ends_with_our_refusal() {
    let server = server(3);
    let limit = RateLimitLayer::builder(Quota::per_hour(2))
        .max_wait(ms(0))
        .max_hold(ms(0))
        .build()
        .unwrap();
    let client = ClientBuilder::new(client())
        .with(retry())
        .with(limit)
        .build();
    let error = client.get(server.url()).send().await.unwrap_err();
    assert_eq!((who_said_no(&error), server.tally().all()), ("local", 2));
    assert!(Limited::find(&error).unwrap().retry_after().unwrap() > Duration::from_secs(3500));
}

/// Retries what the upstream limited, without delay.
#[derive(Clone)]
struct RetryLimited(u32);

impl<E> Policy<Request, Response, E> for RetryLimited {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Request, result: &mut Result<Response, E>) -> Option<Ready<()>> {
        result
            .as_ref()
            .ok()
            .filter(|response| response.status() == StatusCode::TOO_MANY_REQUESTS)?;
        self.0 = self.0.checked_sub(1)?;
        Some(ready(()))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        request.try_clone()
    }
}

#[tokio::test]
async fn tower_retry_around_reqwest_takes_a_permit_per_attempt() {
    let server = server(2);
    let limit = plenty().build().unwrap();
    let service = ServiceBuilder::new()
        .timeout(Duration::from_secs(60))
        .retry(RetryLimited(3))
        .layer(limit.clone())
        .timeout(Duration::from_secs(30))
        .service(client());
    assert_eq!(
        service.oneshot(request(&server)).await.unwrap().status(),
        200
    );
    assert_eq!((server.tally().all(), used(&limit).await), (3, 3));
}

#[tokio::test]
async fn upstream_429_is_a_response_unless_errors_are_requested() {
    let server = server(4);
    let passes = plenty().build().unwrap();
    let fails = plenty()
        .key(by_host)
        .error_on_upstream_limit()
        .build()
        .unwrap();

    assert_eq!(
        with(passes.clone())
            .get(server.url())
            .send()
            .await
            .unwrap()
            .status(),
        429
    );
    assert_eq!(
        passes
            .layer(client())
            .oneshot(request(&server))
            .await
            .unwrap()
            .status(),
        429
    );
    let one = with(fails.clone())
        .get(server.url())
        .send()
        .await
        .unwrap_err();
    let other = fails
        .layer(client())
        .oneshot(request(&server))
        .await
        .unwrap_err();
    for found in [Limited::find(&one).unwrap(), Limited::find(&other).unwrap()] {
        let Limited::Upstream { status, report, .. } = found else {
            panic!("{found}")
        };
        assert_eq!((status.as_u16(), report.key()), (429, "127.0.0.1"));
        assert_eq!(report.retry_after(), Some(Duration::from_secs(7)));
    }
    assert_eq!(server.tally().all(), 4);
}

#[tokio::test]
async fn one_function_classifies_refusals_in_both_ecosystems() {
    let full = plenty().key(|_| None::<Key>);
    let upstream = plenty().error_on_upstream_limit();
    let store = plenty().store(Arc::new(Failing::away(false)));
    let unreachable = "http://127.0.0.1:1/";
    for (builder, url, expected) in [
        (full, None, "local"),
        (upstream, None, "upstream"),
        (store, None, "store"),
        (plenty(), Some(unreachable), "inner"),
    ] {
        let limit = builder.build().unwrap();
        let server = server(3);
        let url = url.map_or_else(|| server.url(), str::to_owned);
        let service = limit.layer(client());
        let by_tower = service
            .oneshot(client().get(&url).build().unwrap())
            .await
            .unwrap_err();
        let by_middleware = with(limit.clone()).get(&url).send().await.unwrap_err();
        let by_retry = ClientBuilder::new(client())
            .with(retry())
            .with(limit)
            .build();
        let by_retry = by_retry.get(&url).send().await.unwrap_err();
        assert_eq!(who_said_no(&by_tower), expected);
        assert_eq!(who_said_no(&by_middleware), expected);
        assert_eq!(who_said_no(&by_retry), expected);
    }
}

#[tokio::test]
async fn errors_of_the_client_stay_what_they_were() {
    let limit = plenty().build().unwrap();
    let get = || client().get("http://127.0.0.1:1/");
    let error = limit
        .layer(client())
        .oneshot(get().build().unwrap())
        .await
        .unwrap_err();
    let Error::Inner(inner) = error else {
        panic!("{error}")
    };
    assert!(inner.downcast::<reqwest::Error>().unwrap().is_connect());
    let error = with(limit.clone())
        .execute(get().build().unwrap())
        .await
        .unwrap_err();
    assert!(matches!(error, reqwest_middleware::Error::Reqwest(error) if error.is_connect()));
    assert_eq!(
        used(&limit).await,
        2,
        "it is unknown which call arrived, so both count"
    );
}

/// Responds without a network, so that the clock can be paused.
struct Canned(Upstream);

#[async_trait::async_trait]
impl Middleware for Canned {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let answer = self.0.clone().oneshot(get(request.url().as_str())).await;
        answer
            .map(Response::from)
            .map_err(|error| reqwest_middleware::Error::middleware(std::io::Error::other(error)))
    }
}

fn canned(limit: &RateLimitLayer, upstream: &Upstream) -> ClientWithMiddleware {
    ClientBuilder::new(client())
        .with(limit.clone())
        .with(Canned(upstream.clone()))
        .build()
}

#[tokio::test(start_paused = true)]
async fn middleware_waits_in_queue_and_leaves_when_dropped() {
    let (upstream, limit) = (
        Upstream::new(),
        RateLimitLayer::new(Quota::per_second(1)).unwrap(),
    );
    let client = canned(&limit, &upstream);
    let call = |path: &str| tokio::spawn(client.get(format!("http://a{path}")).send());
    let calls = [call("/1"), call("/2"), call("/dropped"), call("/3")];
    settle().await;
    assert_eq!(waiting(&limit).await, 3);
    let [first, second, dropped, third] = calls;
    dropped.abort();
    for call in [first, second, third] {
        soon(call).await.unwrap().unwrap();
    }
    assert_eq!(
        upstream.log(),
        [
            ("/1".into(), 0),
            ("/2".into(), SECOND),
            ("/3".into(), 2 * SECOND)
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn dropped_or_failed_middleware_call_counts_as_sent() {
    let limit = RateLimitLayer::builder(Quota::per_second(2))
        .max_wait(ms(0))
        .build()
        .unwrap();
    let slow = canned(&limit, &Upstream::taking(ms(60_000)));
    let dropped = tokio::spawn(slow.get("http://a/").send());
    settle().await;
    dropped.abort();
    let fails = canned(&limit, &Upstream::answering([support::other_error()]));
    assert_eq!(
        who_said_no(&fails.get("http://a/").send().await.unwrap_err()),
        "inner"
    );
    assert_eq!(used(&limit).await, 2);
}

#[tokio::test(start_paused = true)]
async fn middleware_refusal_states_how_long_to_wait() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(0))
        .build()
        .unwrap();
    let client = canned(&limit, &Upstream::new());
    client.get("http://a/").send().await.unwrap();
    let error = client.get("http://a/").send().await.unwrap_err();
    let wait = Limited::find(&error).unwrap().retry_after().unwrap();
    pass(wait).await;
    client.get("http://a/").send().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn retry_around_the_middleware_needs_no_own_delay() {
    let upstream = Upstream::answering([limited("1"), limited("1")]);
    let limit = RateLimitLayer::new(Quota::per_second(1)).unwrap();
    let client = ClientBuilder::new(client())
        .with(retry())
        .with(limit)
        .with(Canned(upstream.clone()))
        .build();
    assert_eq!(
        soon(client.get("http://a/").send()).await.unwrap().status(),
        200
    );
    assert_eq!(upstream.arrivals(), [0, SECOND, 2 * SECOND]);
}

#[tokio::test(start_paused = true)]
async fn upstream_error_is_fatal_to_default_retry_strategy() {
    let upstream = Upstream::answering([limited("1"), limited("1")]);
    let limit = plenty().error_on_upstream_limit().build().unwrap();
    let client = ClientBuilder::new(client())
        .with(retry())
        .with(limit)
        .with(Canned(upstream.clone()))
        .build();
    let error = client.get("http://a/").send().await.unwrap_err();
    assert_eq!(
        (who_said_no(&error), upstream.count()),
        ("upstream", 1),
        "so that a 429 passes by default"
    );
}

/// The head or the body ends the call in flight; the caller sees the same response.
#[tokio::test]
async fn call_in_flight_ends_with_head_or_body() {
    let server = Server::open();
    let limit = RateLimitLayer::new(Quota::in_flight(1)).unwrap();
    let free = async || support::peek(&limit, Key::ALL).await.free;
    let held = limit.clone().in_flight_until_body_end();

    let service = ServiceBuilder::new().layer(limit.clone()).service(client());
    let plain = service.oneshot(request(&server)).await.unwrap();
    assert_eq!(free().await, 1, "the head is there");

    let service = ServiceBuilder::new().layer(held.clone()).service(client());
    let of_tower = service.oneshot(request(&server)).await.unwrap();
    assert_eq!(free().await, 0, "the body is still to be read");
    assert_eq!(
        (of_tower.url(), of_tower.status()),
        (plain.url(), plain.status())
    );
    assert_eq!(of_tower.content_length(), plain.content_length());
    assert_eq!(of_tower.remote_addr(), plain.remote_addr());
    let text = plain.text().await.unwrap();
    assert_eq!(of_tower.text().await.unwrap(), text);
    assert_eq!(free().await, 1);

    let middleware = ClientBuilder::new(client()).with(held).build();
    let of_middleware = middleware.execute(request(&server)).await.unwrap();
    assert_eq!(free().await, 0);
    assert_eq!(of_middleware.url().as_str(), server.url());
    drop(of_middleware);
    assert_eq!(free().await, 1, "the body will not be read");
}

#[tokio::test(start_paused = true)]
async fn a_middleware_that_sends_again_holds_no_place_meanwhile() {
    let upstream = Upstream::answering([limited("2"), limited("2")]);
    let limit = RateLimitLayer::builder(Quota::in_flight(1))
        .max_hold(ms(0))
        .build()
        .unwrap();
    let client = ClientBuilder::new(client())
        .with(AdaptiveThrottleLayer::new().retrying())
        .with(limit.clone().in_flight_until_body_end())
        .with(Canned(upstream.clone()))
        .build();
    let call = tokio::spawn(client.get("http://a/").send());
    settle().await;
    assert_eq!(
        (upstream.count(), support::peek(&limit, Key::ALL).await.free),
        (1, 1)
    );
    assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn middleware_retry_wait_in_vain_reports_the_refusal() {
    let upstream = Upstream::answering([limited("2")]);
    let layer = AdaptiveThrottleLayer::new();
    let throttle = layer.throttle();
    let client = ClientBuilder::new(client())
        .with(layer.retrying())
        .with(Canned(upstream.clone()))
        .build();
    let call = tokio::spawn(client.get("http://a/").send());
    pass(ms(1000)).await;
    throttle.hold_for(Key::ALL, ms(30_000)).await.unwrap();
    let error = soon(call).await.unwrap().unwrap_err();
    assert_eq!((who_said_no(&error), upstream.count()), ("upstream", 1));
}

/// Two hosts: each request to `http://api.test/` is redirected to `http://files.test/`, which
/// answers with `status` and states that its limit is used up for an hour.
struct Redirected {
    api: Server,
    files: Server,
}

impl Redirected {
    fn answering(status: u16) -> Self {
        let files = Server::open().script(move |_| {
            let response = http::Response::builder()
                .status(status)
                .header("retry-after", 3600);
            let response = response
                .header("ratelimit-limit", 40)
                .header("ratelimit-remaining", 0);
            Some(
                response
                    .header("ratelimit-reset", 3000)
                    .body(String::new())
                    .unwrap(),
            )
        });
        let location = format!("http://files.test:{}/", files.address().port());
        let api = Server::open().script(move |_| {
            let response = http::Response::builder()
                .status(302)
                .header("location", &location);
            Some(response.body(String::new()).unwrap())
        });
        Redirected { api, files }
    }

    fn client(&self) -> Client {
        let builder = Client::builder()
            .no_proxy()
            .resolve("api.test", self.api.address());
        builder
            .resolve("files.test", self.files.address())
            .build()
            .unwrap()
    }

    fn request(&self) -> Request {
        let url = format!("http://api.test:{}/", self.api.address().port());
        self.client()
            .get(url)
            .header("authorization", "of tenant 7")
            .build()
            .unwrap()
    }
}

#[tokio::test]
async fn redirected_host_signals_hold_nothing_and_teach_nothing() {
    use http::header::AUTHORIZATION;
    let keys = [
        ("api.test", Key::host("api.test")),
        ("token", Key::new("of tenant 7")),
    ];
    for (status, (by, key)) in [503, 429, 200]
        .into_iter()
        .flat_map(|status| keys.map(|key| (status, key)))
    {
        let hosts = Redirected::answering(status);
        let builder = RateLimitLayer::builder(Quota::per_hour(40))
            .max_wait(ms(0))
            .error_on_upstream_limit();
        let limit = match by {
            "token" => builder
                .key(tollgate::by_header(AUTHORIZATION))
                .build()
                .unwrap(),
            _ => builder.key(by_host).build().unwrap(),
        };
        let service = ServiceBuilder::new()
            .layer(limit.clone())
            .service(hosts.client());
        let of_middleware = ClientBuilder::new(hosts.client())
            .with(limit.clone())
            .build();
        for _ in 0..2 {
            assert_eq!(
                service
                    .clone()
                    .oneshot(hosts.request())
                    .await
                    .unwrap()
                    .status(),
                status
            );
            assert_eq!(
                of_middleware
                    .execute(hosts.request())
                    .await
                    .unwrap()
                    .status(),
                status
            );
        }
        let state = support::peek(&limit, key).await;
        assert_eq!(
            (state.held, state.limits[0].used),
            (None, 4),
            "{status} by {by}"
        );
        assert_eq!((hosts.api.tally().all(), hosts.files.tally().all()), (4, 4));
    }
}

#[tokio::test]
async fn redirected_host_signals_do_not_slow_a_throttle() {
    let hosts = Redirected::answering(429);
    let layer = AdaptiveThrottleLayer::builder()
        .key(by_host)
        .max_wait(ms(0))
        .build()
        .unwrap();
    let retrying = layer.clone().retrying();
    let service = ServiceBuilder::new()
        .layer(retrying.clone())
        .service(hosts.client());
    let of_middleware = ClientBuilder::new(hosts.client()).with(retrying).build();
    for _ in 0..2 {
        assert_eq!(
            service
                .clone()
                .oneshot(hosts.request())
                .await
                .unwrap()
                .status(),
            429
        );
        assert_eq!(
            of_middleware
                .execute(hosts.request())
                .await
                .unwrap()
                .status(),
            429
        );
    }
    assert_eq!(hosts.files.tally().all(), 4);
}

/// A request that waits behind a call in flight goes when that call ends, with reqwest-middleware
/// too.
#[tokio::test]
async fn middleware_waits_for_call_in_flight_to_end() {
    let server = Server::open().latency(ms(50));
    let limit = RateLimitLayer::new(Quota::in_flight(2)).unwrap();
    let client = with(limit);
    let calls = (0..6).map(|_| client.execute(request(&server)));
    let answers = futures::future::join_all(calls).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(server.log().len(), 6);
}
