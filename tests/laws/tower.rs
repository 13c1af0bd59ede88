//! Combined with other crates' layers: in the documented order,
//! `timeout(total) -> retry -> tollgate -> timeout(attempt) -> client`, and in every other order
//! that compiles.

use crate::support;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tollgate::store::MemoryStore;
use tollgate::{Error, Key, Limited, Quota, RateLimitLayer, by_host};
use tower::retry::Policy;
use tower::timeout::error::Elapsed;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_http::trace::TraceLayer;

use support::{
    SECOND, Upstream, get, limited, ms, ok, other_error, pass, peek, settle, soon, used, waiting,
    who_said_no,
};

fn one_a_second() -> RateLimitLayer {
    RateLimitLayer::new(Quota::per_second(1)).unwrap()
}

fn one_a_second_by_host() -> RateLimitLayer {
    RateLimitLayer::builder(Quota::per_second(1))
        .key(by_host)
        .build()
        .unwrap()
}

/// Retries what the upstream limited, up to `left` times; first sleeps for `Retry-After`, if
/// `listens`.
#[derive(Clone)]
struct RetryLimited {
    left: usize,
    listens: bool,
}

impl<E> Policy<Request<String>, Response<String>, E> for RetryLimited {
    type Future = Pin<Box<dyn Future<Output = ()> + Send>>;

    fn retry(
        &mut self,
        _: &mut Request<String>,
        result: &mut Result<Response<String>, E>,
    ) -> Option<Self::Future> {
        let response = result
            .as_ref()
            .ok()
            .filter(|response| response.status() == 429)?;
        let seconds = response
            .headers()
            .get("retry-after")?
            .to_str()
            .ok()?
            .parse::<u64>()
            .ok()?;
        self.left = self.left.checked_sub(1)?;
        let wait = ms(if self.listens { seconds * 1000 } else { 0 });
        Some(Box::pin(async move {
            if !wait.is_zero() {
                pass(wait).await;
            }
        }))
    }

    fn clone_request(&mut self, request: &Request<String>) -> Option<Request<String>> {
        Some(request.clone())
    }
}

#[tokio::test(start_paused = true)]
async fn outer_timeout_in_the_queue_gives_up_the_place() {
    let (upstream, limit) = (Upstream::new(), one_a_second());
    let patient = ServiceBuilder::new()
        .layer(limit.clone())
        .service(upstream.clone());
    let hasty = ServiceBuilder::new()
        .timeout(ms(500))
        .layer(limit.clone())
        .service(upstream.clone());

    patient.clone().oneshot(get("/first")).await.unwrap();
    let hasty = tokio::spawn(hasty.oneshot(get("/hasty")));
    settle().await;
    let behind = tokio::spawn(patient.oneshot(get("/behind")));
    settle().await;
    assert_eq!(waiting(&limit).await, 2);

    let error = soon(hasty).await.unwrap().unwrap_err();
    assert!(
        error.is::<Elapsed>(),
        "the timeout fired first, so its error is all that is left: {error}"
    );
    assert_eq!(waiting(&limit).await, 1);
    soon(behind).await.unwrap().unwrap();
    assert_eq!(
        upstream.log(),
        [("/first".into(), 0), ("/behind".into(), SECOND)]
    );
}

#[tokio::test(start_paused = true)]
async fn inner_timeout_covers_each_attempt_but_no_wait() {
    let limit = one_a_second();
    let quick = ServiceBuilder::new()
        .layer(limit.clone())
        .timeout(ms(400))
        .service(Upstream::taking(ms(300)));
    let slow = ServiceBuilder::new()
        .layer(limit)
        .timeout(ms(400))
        .service(Upstream::taking(ms(500)));

    quick.clone().oneshot(get("/")).await.unwrap();
    soon(quick.oneshot(get("/"))).await.unwrap(); // waits for 720 ms, and is called for 300
    let error = soon(slow.oneshot(get("/"))).await.unwrap_err();
    let Error::Inner(inner) = &error else {
        panic!("{error}")
    };
    assert!(inner.is::<Elapsed>(), "{inner}");
    assert_eq!(who_said_no(&error), "inner");
}

#[tokio::test(start_paused = true)]
async fn an_outer_retry_pays_for_each_attempt() {
    let (upstream, limit) = (
        Upstream::answering([limited("0"), limited("0")]),
        one_a_second(),
    );
    let service = ServiceBuilder::new()
        .retry(RetryLimited {
            left: 5,
            listens: false,
        })
        .layer(limit.clone())
        .service(upstream.clone());

    let response = soon(service.oneshot(get("/"))).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(upstream.arrivals(), [0, SECOND, 2 * SECOND]);
    assert_eq!(used(&limit).await, 1, "the two before have left the window");
}

#[tokio::test(start_paused = true)]
async fn retry_after_sleep_still_needs_a_new_permit() {
    let upstream = Upstream::answering([limited("2")]);
    let limit = one_a_second();
    let plain = ServiceBuilder::new()
        .layer(limit.clone())
        .service(upstream.clone());
    let retrying = ServiceBuilder::new()
        .retry(RetryLimited {
            left: 1,
            listens: true,
        })
        .layer(limit)
        .service(upstream.clone());

    let retried = tokio::spawn(retrying.oneshot(get("/retried")));
    pass(ms(1999)).await;
    let others = [
        tokio::spawn(plain.clone().oneshot(get("/a"))),
        tokio::spawn(plain.oneshot(get("/b"))),
    ];
    soon(retried).await.unwrap().unwrap();
    soon(async { for_each(others).await }).await;
    assert_eq!(
        upstream.paths(),
        ["/retried", "/a", "/b", "/retried"],
        "it came back last, and was served last"
    );
    upstream.was_never_over(1, ms(1000));
}

async fn for_each<T: Send + 'static>(tasks: impl IntoIterator<Item = tokio::task::JoinHandle<T>>) {
    for task in tasks {
        task.await.expect("no task panics");
    }
}

#[tokio::test(start_paused = true)]
async fn the_documented_order_of_all_layers_works_as_documented() {
    let upstream = Upstream::answering([limited("1"), limited("1"), ok(), other_error()]);
    let service = ServiceBuilder::new()
        .timeout(ms(10_000))
        .retry(RetryLimited {
            left: 5,
            listens: false,
        })
        .layer(one_a_second())
        .timeout(ms(500))
        .service(upstream.clone());

    let response = soon(service.clone().oneshot(get("/"))).await.unwrap();
    assert_eq!(response.status(), 200);
    let error = soon(service.oneshot(get("/"))).await.unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), who_said_no(&*error)),
        ("broken pipe", "inner")
    );
    assert_eq!(upstream.arrivals(), [0, SECOND, 2 * SECOND, 3 * SECOND]);
}

#[tokio::test(start_paused = true)]
async fn load_shed_sheds_by_inner_service_not_by_queue() {
    let limit = RateLimitLayer::builder(Quota::per_second(2))
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .load_shed()
        .layer(limit.clone())
        .concurrency_limit(1)
        .service(Upstream::taking(ms(100)));

    let running = tokio::spawn(service.clone().oneshot(get("/")));
    settle().await;
    let error = service.clone().oneshot(get("/")).await.unwrap_err();
    assert!(error.is::<tower::load_shed::error::Overloaded>(), "{error}");
    soon(running).await.unwrap().unwrap();
    assert_eq!(used(&limit).await, 1, "what was shed cost nothing");

    soon(service.clone().oneshot(get("/"))).await.unwrap();
    let waited = soon(service.oneshot(get("/"))).await;
    assert!(
        waited.is_ok(),
        "a request that waits in the queue is not shed"
    );
}

#[tokio::test(start_paused = true)]
async fn key_waiting_behind_buffer_delays_no_other_key() {
    let upstream = Upstream::new();
    let service = ServiceBuilder::new()
        .buffer(8)
        .layer(one_a_second_by_host())
        .service(upstream.clone());
    let call = |uri| tokio::spawn(service.clone().oneshot(get(uri)));
    let first = [call("http://a/1"), call("http://a/2"), call("http://b/3")];
    soon(for_each(first)).await;
    assert_eq!(
        upstream.log(),
        [("/1".into(), 0), ("/3".into(), 0), ("/2".into(), SECOND)]
    );
}

#[tokio::test(start_paused = true)]
async fn error_kind_survives_buffer_load_shed_and_timeout() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(0))
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .buffer::<Request<String>>(8)
        .load_shed()
        .timeout(ms(100))
        .layer(limit)
        .service(Upstream::new());
    service.clone().oneshot(get("/")).await.unwrap();
    let error: BoxError = service.oneshot(get("/")).await.unwrap_err();
    assert_eq!(who_said_no(&*error), "local");
    assert!(Limited::find(&*error).unwrap().retry_after().is_some());
}

#[tokio::test(start_paused = true)]
async fn boxed_service_is_clone_send_sync_and_still_waits() {
    fn shared<T: Clone + Send + Sync + 'static>(service: T) -> T {
        service
    }
    let upstream = Upstream::new();
    let service = shared(
        ServiceBuilder::new()
            .boxed_clone_sync()
            .layer(one_a_second())
            .service(upstream.clone()),
    );
    let call = || tokio::spawn(service.clone().oneshot(get("/")));
    soon(for_each([call(), call(), call()])).await;
    assert_eq!(upstream.arrivals(), [0, SECOND, 2 * SECOND]);
}

#[tokio::test(start_paused = true)]
async fn a_trace_layer_fits_outside_and_inside() {
    let upstream = Upstream::new();
    let service = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(one_a_second())
        .layer(TraceLayer::new_for_http())
        .service(upstream.clone());
    for _ in 0..2 {
        assert_eq!(
            soon(service.clone().oneshot(get("/")))
                .await
                .unwrap()
                .status(),
            200
        );
    }
    assert_eq!(upstream.arrivals(), [0, SECOND]);
}

#[tokio::test(start_paused = true)]
async fn joined_layers_keep_both_quotas_and_flat_errors() {
    let builder = || RateLimitLayer::builder(Quota::per_second(1)).key(by_host);
    let each_host = builder().max_wait(ms(0)).build().unwrap();
    let all = RateLimitLayer::builder(Quota::new(2, ms(60_000)))
        .max_wait(ms(0))
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let service = ServiceBuilder::new()
        .layer(each_host.clone().and(all.clone()))
        .service(upstream.clone());
    let mut refused = Vec::new();
    for uri in ["http://a/", "http://a/", "http://b/", "http://c/"] {
        if let Err(error) = service.clone().oneshot(get(uri)).await {
            let Error::Limited(Limited::Local { report, .. }) = error else {
                panic!("not flat: {error:?}")
            };
            refused.push((
                report.key().to_owned(),
                report.limit().unwrap().window().as_secs(),
            ));
        }
    }
    assert_eq!(
        refused,
        [("a".into(), 1), ("all".into(), 60)],
        "the first refused one, the second another"
    );
    assert_eq!(upstream.count(), 2);
    assert_eq!(used(&all).await, 2);
    assert_eq!(peek(&each_host, Key::new("b")).await.limits[0].used, 1);
}

#[tokio::test(start_paused = true)]
async fn layer_services_and_limiter_clones_share_one_count() {
    let limit = RateLimitLayer::builder(Quota::per_second(3))
        .max_wait(ms(0))
        .build()
        .unwrap();
    let one = ServiceBuilder::new()
        .layer(limit.clone())
        .service(Upstream::new());
    let other = ServiceBuilder::new()
        .layer(limit.clone())
        .service(service_fn(|_: Request<String>| async {
            Ok::<_, BoxError>(Response::new(()))
        }));
    one.clone().oneshot(get("/")).await.unwrap();
    other.clone().oneshot(get("/")).await.unwrap();
    drop(limit.limiter().acquire(Key::ALL).await.unwrap());
    assert_eq!(used(&limit).await, 3);
    for refused in [
        who_said_no(&one.oneshot(get("/")).await.unwrap_err()),
        who_said_no(&other.oneshot(get("/")).await.unwrap_err()),
        who_said_no(&limit.limiter().acquire(Key::ALL).await.unwrap_err()),
    ] {
        assert_eq!(refused, "local");
    }
    let stranger = RateLimitLayer::new(Quota::per_second(3)).unwrap();
    assert_eq!(used(&stranger).await, 0);
}

#[tokio::test(start_paused = true)]
async fn layers_sharing_a_store_share_counts_of_equal_keys() {
    let store = Arc::new(MemoryStore::new(10));
    let layer = || {
        let builder = RateLimitLayer::builder(Quota::per_second(1))
            .key(by_host)
            .store(store.clone());
        builder.max_wait(ms(0)).build().unwrap()
    };
    let (one, other) = (
        layer().layer(Upstream::new()),
        layer().layer(Upstream::new()),
    );
    one.oneshot(get("http://a/")).await.unwrap();
    assert!(other.clone().oneshot(get("http://a/")).await.is_err());
    assert!(other.oneshot(get("http://b/")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn service_failure_passes_unchanged_as_inner_error() {
    let service = ServiceBuilder::new()
        .layer(one_a_second())
        .service(Upstream::answering([other_error()]));
    let error = service.oneshot(get("/")).await.unwrap_err();
    assert!(
        matches!(&error, Error::Inner(inner) if inner.to_string() == "broken pipe"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_layer_gives_its_service_back() {
    let mut service = ServiceBuilder::new()
        .layer(one_a_second())
        .service(Upstream::new());
    service.ready().await.unwrap().call(get("/")).await.unwrap();
    assert_eq!(service.get_ref().count(), 1);
    assert_eq!(service.get_ref().count(), 1);
    assert_eq!(service.into_inner().count(), 1);
}

/// The upstream states a wait of an hour. After `max_hold` one call probes whether that still
/// applies.
#[tokio::test(start_paused = true)]
async fn holds_that_were_cut_end_with_one_call() {
    let upstream = Upstream::answering((0..100_000).map(|_| limited("3600")));
    let limit = RateLimitLayer::builder(Quota::per_hour(5000))
        .max_wait(Duration::from_secs(300))
        .build()
        .unwrap();
    let service = limit.layer(upstream.clone());
    let calls = (0..400).map(|_| {
        let service = service.clone();
        tokio::spawn(async move {
            for _ in 0..3 {
                let _ = service.clone().oneshot(get("/")).await;
            }
        })
    });
    futures::future::join_all(calls).await;
    let arrivals = upstream.arrivals();
    let within = |from: u64, to: u64| arrivals.iter().filter(|at| (from..to).contains(at)).count();
    let seconds: Vec<_> = (59..63)
        .map(|second| within(second * 1000, second * 1000 + 1000))
        .collect();
    assert!(
        within(59_000, 70_000) <= 2,
        "in each second from 59 to 63: {seconds:?}"
    );
}
