//! The key, cost and deadline of a request.

use crate::support;

use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::AUTHORIZATION;
use http::{Extensions, HeaderMap, HeaderValue, Method, Request, StatusCode};
use tollgate::key::RequestInfo;
use tollgate::signal::ResponseInfo;
use tollgate::{
    Cost, Deadline, Error, Key, Limited, Quota, RateLimitBuilder, RateLimitLayer, Reason,
    by_header, by_host,
};
use tower::{BoxError, Layer, Service, ServiceExt};

use support::{Distant, SECOND, Upstream, get, long_ago, ms, now, pass, peek, soon, used};

/// One a second for each key, and no waiting.
fn one_each() -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_second(1)).max_wait(ms(0))
}

/// Sends `requests` in a row, and returns which of them were sent.
async fn sent(
    limit: &RateLimitLayer,
    requests: impl IntoIterator<Item = Request<String>>,
) -> Vec<bool> {
    let service = limit.layer(Upstream::new());
    let mut sent = Vec::new();
    for request in requests {
        sent.push(service.clone().oneshot(request).await.is_ok());
    }
    sent
}

fn with_header(name: &'static str, value: &str) -> Request<String> {
    let mut request = get("http://a/");
    request
        .headers_mut()
        .insert(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    request
}

fn with<T: Clone + Send + Sync + 'static>(uri: &str, extension: T) -> Request<String> {
    let mut request = get(uri);
    request.extensions_mut().insert(extension);
    request
}

fn reason(error: &Error) -> Option<Reason> {
    match error {
        Error::Limited(Limited::Local { reason, .. }) => Some(reason.clone()),
        _ => None,
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_key_function_everything_shares_one_count() {
    let limit = one_each().build().unwrap();
    let requests = [get("http://a/"), get("http://b/"), get("/relative")];
    assert_eq!(sent(&limit, requests).await, [true, false, false]);
}

#[tokio::test(start_paused = true)]
async fn by_host_ignores_case_port_path_and_scheme() {
    let limit = one_each().key(by_host).build().unwrap();
    let same = [
        "http://api.a/",
        "https://API.A:8080/other?x=1",
        "http://user:word@api.a./",
    ]
    .map(get);
    assert_eq!(sent(&limit, same).await, [true, false, false]);
    assert_eq!(sent(&limit, [get("http://api.b/")]).await, [true]);
    let mut relative = with_header("host", "api.a:443");
    *relative.uri_mut() = "/relative".parse().unwrap();
    assert_eq!(
        sent(&limit, [relative]).await,
        [false],
        "the Host header names it too"
    );
}

#[tokio::test(start_paused = true)]
async fn by_header_counts_values_and_refuses_requests_without_it() {
    let limit = one_each().key(by_header(AUTHORIZATION)).build().unwrap();
    let token = |token| with_header("authorization", token);
    assert_eq!(
        sent(&limit, [token("one"), token("two"), token("one")]).await,
        [true, true, false]
    );
    let error = limit
        .layer(Upstream::new())
        .oneshot(get("http://a/"))
        .await
        .unwrap_err();
    assert_eq!(reason(&error), Some(Reason::NoKey));
}

#[tokio::test(start_paused = true)]
async fn a_closure_makes_keys_of_anything_in_the_request() {
    let limit = one_each()
        .key(|request| {
            Some(
                by_host(request)?
                    .and(request.method().as_str())
                    .and(request.path()),
            )
        })
        .build()
        .unwrap();
    let post = Request::post("http://a/1").body(String::new()).unwrap();
    let requests = [
        get("http://a/1"),
        post,
        get("http://a/2"),
        get("http://b/1"),
        get("http://a/1"),
    ];
    assert_eq!(
        sent(&limit, requests).await,
        [true, true, true, true, false]
    );

    let never_none = one_each()
        .key(|request| Key::new(request.path()))
        .build()
        .unwrap();
    assert_eq!(
        sent(&never_none, [get("/1"), get("/2"), get("/1")]).await,
        [true, true, false]
    );
}

#[tokio::test(start_paused = true)]
async fn request_without_host_is_refused_without_waiting() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .key(by_host)
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let error = limit
        .layer(upstream.clone())
        .oneshot(get("/relative"))
        .await
        .unwrap_err();
    assert_eq!(reason(&error), Some(Reason::NoKey));
    let Error::Limited(limited) = &error else {
        panic!("{error}")
    };
    assert_eq!(
        (limited.retry_after(), limited.report().waited()),
        (None, ms(0)),
        "no wait helps"
    );
    assert!(
        error.to_string().contains("absolute URL"),
        "it names the remedy: {error}"
    );
    assert_eq!(upstream.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn key_in_extensions_overrides_the_key_function() {
    let limit = one_each().key(by_host).build().unwrap();
    let requests = [
        get("http://a/"),
        with("http://a/", Key::new("batch")),
        with("/no-host-needed", Key::new("batch")),
        with("/no-host-needed", Key::new("other")),
    ];
    assert_eq!(sent(&limit, requests).await, [true, true, false, true]);
}

#[tokio::test(start_paused = true)]
async fn cost_in_extensions_overrides_the_cost_function() {
    let limit = RateLimitLayer::builder(Quota::per_second(10))
        .cost(|request| if request.path() == "/export" { 5 } else { 1 })
        .build()
        .unwrap();
    for (request, expected) in [
        (get("/export"), 5),
        (get("/"), 6),
        (with("/export", Cost::new(2)), 8),
        (with("/", Cost::new(0)), 8),
        (with("/", Cost::new(2)), 10),
    ] {
        assert_eq!(sent(&limit, [request]).await, [true]);
        assert_eq!(used(&limit).await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn cost_above_limit_is_refused_and_consumes_nothing() {
    let upstream = Upstream::new();
    for (quota, largest) in [
        (Quota::per_second(10), 10),
        (Quota::per_second(100).burst(20), 20),
        (Quota::bucket(7).refill(1, ms(1000)), 7),
        (Quota::fixed(9, ms(10_000)), 9),
        (Quota::per_second(10).and(Quota::per_minute(5)), 5),
    ] {
        let limit = RateLimitLayer::new(quota).unwrap();
        let service = limit.layer(upstream.clone());
        for cost in [largest + 1, u32::MAX] {
            let error = service
                .clone()
                .oneshot(with("/", Cost::new(cost)))
                .await
                .unwrap_err();
            assert_eq!(
                reason(&error),
                Some(Reason::CostAboveLimit {
                    cost,
                    largest,
                    unit: Cost::REQUESTS
                }),
                "{quota}"
            );
            assert_eq!(
                Limited::find(&error).unwrap().retry_after(),
                None,
                "no wait helps"
            );
        }
        assert_eq!(used(&limit).await, 0);
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn zero_cost_passes_without_free_units_after_deadline() {
    let limit = one_each().build().unwrap();
    assert_eq!(sent(&limit, [get("/")]).await, [true]);
    let mut free = with("/", Cost::new(0));
    free.extensions_mut().insert(Deadline::at(long_ago()));
    assert_eq!(sent(&limit, [free, get("/")]).await, [true, false]);
}

#[tokio::test(start_paused = true)]
async fn costly_request_is_not_overtaken_nor_over_limit() {
    let (upstream, limit) = (
        Upstream::new(),
        RateLimitLayer::new(Quota::per_second(4)).unwrap(),
    );
    let service = limit.layer(upstream.clone());
    let call =
        |path: &str, cost| tokio::spawn(service.clone().oneshot(with(path, Cost::new(cost))));
    let calls = [
        call("/a", 3),
        call("/dear", 4),
        call("/b", 1),
        call("/c", 1),
    ];
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    let log = upstream.log();
    assert_eq!(log[0], ("/a".into(), 0));
    let at = |path: &str| log.iter().find(|(other, _)| other == path).unwrap().1;
    // A permit of four a second is valid for 10 ms.
    assert_eq!(at("/dear"), 1020);
    assert!(
        at("/b") == 0 || at("/b") >= 2040,
        "one unit was free, else it comes after: {log:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn deadline_refuses_only_requests_that_would_be_late() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .deadline(|request| (request.path() == "/urgent").then(|| now() + ms(500)))
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let service = limit.layer(upstream.clone());
    service.clone().oneshot(get("/urgent")).await.unwrap();
    for request in [
        get("/urgent"),
        with("/", Deadline::at(now() + ms(SECOND - 1))),
        with("/", Deadline::at(long_ago())),
    ] {
        let error = service.clone().oneshot(request).await.unwrap_err();
        assert_eq!(reason(&error), Some(Reason::Deadline));
        assert_eq!(Limited::find(&error).unwrap().report().waited(), ms(0));
    }
    assert_eq!(used(&limit).await, 1, "the refusals left no trace");

    let in_time = with("/urgent", Deadline::at(now() + ms(SECOND)));
    soon(service.oneshot(in_time)).await.unwrap();
    assert_eq!(
        upstream.arrivals(),
        [0, SECOND],
        "the extension went before the function"
    );
}

#[tokio::test(start_paused = true)]
async fn deadline_passing_during_a_store_call_is_kept() {
    let store = Arc::new(Distant::new(ms(8)));
    let limit = RateLimitLayer::builder(Quota::per_second(5))
        .store(store)
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let service = limit.layer(upstream.clone());
    let error = soon(
        service
            .clone()
            .oneshot(with("/", Deadline::at(now() + ms(4)))),
    )
    .await
    .unwrap_err();
    assert_eq!(reason(&error), Some(Reason::Deadline));
    assert!(Limited::find(&error).unwrap().report().waited() <= ms(5));
    soon(service.oneshot(with("/", Deadline::at(now() + ms(20)))))
        .await
        .unwrap();
    assert_eq!(upstream.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn max_wait_holds_besides_a_later_deadline() {
    let limit = one_each().max_wait(ms(100)).build().unwrap();
    let service = limit.layer(Upstream::new());
    service.clone().oneshot(get("/")).await.unwrap();
    let error = service
        .oneshot(with("/", Deadline::at(now() + ms(60_000))))
        .await
        .unwrap_err();
    assert_eq!(reason(&error), Some(Reason::MaxWait(ms(100))));
}

#[tokio::test(start_paused = true)]
async fn keys_do_not_wait_for_one_another() {
    let upstream = Upstream::new();
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .key(by_host)
        .max_queue(3)
        .build()
        .unwrap();
    let service = limit.layer(upstream.clone());
    let line: Vec<_> = (0..4)
        .map(|_| tokio::spawn(service.clone().oneshot(get("http://busy/"))))
        .collect();
    support::settle().await;
    assert_eq!(peek(&limit, Key::new("busy")).await.waiting, 3);
    for host in 0..100 {
        service
            .clone()
            .oneshot(get(&format!("http://host-{host}/other")))
            .await
            .unwrap();
    }
    pass(ms(1)).await;
    assert_eq!(upstream.count(), 101);
    for call in line {
        soon(call).await.unwrap().unwrap();
    }
}

/// A request and a response that are not HTTP.
#[derive(Clone)]
struct Job {
    customer: Option<&'static str>,
    headers: HeaderMap,
    extensions: Extensions,
}

struct Done(StatusCode, HeaderMap);

impl RequestInfo for Job {
    fn host(&self) -> Option<&str> {
        self.customer
    }

    fn path(&self) -> &str {
        "/job"
    }

    fn method(&self) -> &Method {
        &Method::PUT
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(&self.headers)
    }

    fn extensions(&self) -> Option<&Extensions> {
        Some(&self.extensions)
    }
}

impl ResponseInfo for Done {
    fn status(&self) -> Option<StatusCode> {
        Some(self.0)
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(&self.1)
    }
}

#[derive(Clone)]
struct Worker(StatusCode);

impl Service<Job> for Worker {
    type Response = Done;
    type Error = BoxError;
    type Future = Ready<Result<Done, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Job) -> Self::Future {
        let retry_after = (http::header::RETRY_AFTER, HeaderValue::from_static("7"));
        ready(Ok(Done(self.0, HeaderMap::from_iter([retry_after]))))
    }
}

#[tokio::test(start_paused = true)]
async fn custom_requests_and_responses_are_read_like_http() {
    let limit = one_each()
        .key(|request| {
            assert_eq!((request.method(), request.path()), (&Method::PUT, "/job"));
            assert_eq!(request.header("x-tenant"), Some(&b"acme"[..]));
            by_host(request)
        })
        .error_on_upstream_limit()
        .build()
        .unwrap();
    let headers = HeaderMap::from_iter([(
        http::HeaderName::from_static("x-tenant"),
        HeaderValue::from_static("acme"),
    )]);
    let job = |customer| Job {
        customer,
        headers: headers.clone(),
        extensions: Extensions::new(),
    };

    let works = limit.layer(Worker(StatusCode::OK));
    assert!(works.clone().oneshot(job(Some("one"))).await.is_ok());
    let refused = works
        .clone()
        .oneshot(job(Some("one")))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(Limited::find(&refused).unwrap().report().key(), "one");
    let no_key = works.oneshot(job(None)).await.map(|_| ()).unwrap_err();
    assert_eq!(reason(&no_key), Some(Reason::NoKey));

    let mut keyed = job(Some("two"));
    keyed.extensions.insert(Cost::new(2));
    let worker = limit.layer(Worker(StatusCode::TOO_MANY_REQUESTS));
    let too_dear = worker.clone().oneshot(keyed).await.map(|_| ()).unwrap_err();
    assert_eq!(
        reason(&too_dear),
        Some(Reason::CostAboveLimit {
            cost: 2,
            largest: 1,
            unit: Cost::REQUESTS
        })
    );
    let limited = worker
        .oneshot(job(Some("two")))
        .await
        .map(|_| ())
        .unwrap_err();
    assert_eq!(
        Limited::find(&limited).unwrap().retry_after(),
        Some(ms(7000))
    );
}
