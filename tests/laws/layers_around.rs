//! Layers around each other: which requests are refused, and which pass. Under a paused clock, with an upstream that
//! logs.

use crate::support::channels;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use channels::Log;
use http::{Request, Response};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::stats::Event;
use tollgate::{
    AdaptiveThrottleLayer, Key, Limited, Limiter, Quota, RateLimitLayer, Reason, Throttle,
};
use tower::util::BoxCloneService;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

type Client = BoxCloneService<Request<String>, Response<&'static str>, BoxError>;

fn limit(quota: Quota) -> RateLimitLayer {
    let builder = RateLimitLayer::builder(quota);
    builder.max_wait(MINUTE).build().unwrap()
}

fn upstream(log: &Log) -> Client {
    let log = log.clone();
    BoxCloneService::new(service_fn(move |request: Request<String>| {
        log.add(request.uri().path());
        async { Ok::<_, BoxError>(Response::new("ok")) }
    }))
}

fn boxed<S>(service: S) -> Client
where
    S: Service<Request<String>, Response = Response<&'static str>, Error: Into<BoxError>>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    BoxCloneService::new(service.map_err(Into::into))
}

/// A service that calls `inner` only when its own future is polled, after `pause`.
fn later(pause: Duration, inner: Client) -> Client {
    BoxCloneService::new(service_fn(move |request: Request<String>| {
        let inner = inner.clone();
        async move {
            sleep(pause).await;
            inner.oneshot(request).await
        }
    }))
}

/// A service that acquires a permit of `limiter` by hand before it calls `inner`.
fn by_hand(limiter: Limiter, inner: Client) -> Client {
    BoxCloneService::new(service_fn(move |request: Request<String>| {
        let (limiter, inner) = (limiter.clone(), inner.clone());
        async move {
            let _sent = limiter.acquire(Key::ALL).await?.begin()?;
            inner.oneshot(request).await
        }
    }))
}

/// A service that acquires a permit of `throttle` by hand before it calls `inner`.
fn by_hand_at_throttle(throttle: Throttle, inner: Client) -> Client {
    BoxCloneService::new(service_fn(move |request: Request<String>| {
        let (throttle, inner) = (throttle.clone(), inner.clone());
        async move {
            let _permit = throttle.acquire(Key::ALL).await?;
            inner.oneshot(request).await
        }
    }))
}

fn request() -> Request<String> {
    Request::get("http://h/").body(String::new()).unwrap()
}

fn reason<T>(result: Result<T, BoxError>) -> Option<Reason> {
    Limited::find(&*result.err()?)?.reason()
}

#[tokio::test(start_paused = true)]
async fn layers_inside_another_are_refused_by_name() {
    let log = Log::default();
    let (outer, inner) = (limit(Quota::per_second(10)), limit(Quota::per_second(5)));
    let inside = || boxed(inner.layer(upstream(&log)));
    let joint = inner.clone().and(limit(Quota::per_hour(100)));
    let stacks = [
        ("layer", inside()),
        ("service between", later(Duration::ZERO, inside())),
        ("joined layers", boxed(joint.layer(upstream(&log)))),
        ("by hand", by_hand(inner.limiter(), upstream(&log))),
        (
            "throttle by hand",
            by_hand_at_throttle(AdaptiveThrottleLayer::new().throttle(), upstream(&log)),
        ),
        (
            "throttle",
            boxed(AdaptiveThrottleLayer::new().layer(upstream(&log))),
        ),
        (
            "retries",
            boxed(
                AdaptiveThrottleLayer::new()
                    .retrying()
                    .layer(upstream(&log)),
            ),
        ),
    ];
    for (name, stack) in stacks {
        let error = boxed(outer.layer(stack))
            .oneshot(request())
            .await
            .unwrap_err();
        assert!(
            error.to_string().contains("join both layers with .and(..)"),
            "{name}: {error}"
        );
        assert_eq!(reason::<()>(Err(error)), Some(Reason::Inside), "{name}");
    }
    // The layer around may have several limits, too, or get its permit after a wait.
    let around = outer.clone().and(limit(Quota::per_minute(60)));
    let result = boxed(around.layer(inside())).oneshot(request()).await;
    assert_eq!(reason(result), Some(Reason::Inside));
    let around = limit(Quota::in_flight(8)).and(outer.clone());
    let result = boxed(around.layer(inside())).oneshot(request()).await;
    assert_eq!(reason(result), Some(Reason::Inside));
    outer.limiter().hold_for(Key::ALL, SECOND).await.unwrap();
    let result = boxed(outer.layer(inside())).oneshot(request()).await;
    assert_eq!(reason(result), Some(Reason::Inside));
    let stack = inside();
    let sent = outer
        .limiter()
        .acquire(Key::ALL)
        .send(|| stack.oneshot(request()));
    let error = sent.await.map(|_: Response<&str>| ()).unwrap_err();
    assert_eq!(reason::<()>(Err(error.into())), Some(Reason::Inside));
    assert_eq!(log.len(), 0);
    let peeked = inner.limiter().peek(Key::ALL).await.unwrap();
    assert_eq!(peeked.limits[0].used, 0);
}

/// The permits of a throttle and of a limit of calls in flight do not expire.
#[tokio::test(start_paused = true)]
async fn layers_inside_of_permits_that_do_not_expire_wait() {
    let log = Log::default();
    let inner = limit(Quota::per_second(1));
    let in_flight = limit(Quota::in_flight(2));
    let services = [
        boxed(AdaptiveThrottleLayer::new().layer(inner.layer(upstream(&log)))),
        boxed(in_flight.layer(inner.layer(upstream(&log)))),
        boxed(in_flight.layer(AdaptiveThrottleLayer::new().layer(upstream(&log)))),
    ];
    for service in services {
        for _ in 0..3 {
            service.clone().oneshot(request()).await.unwrap();
        }
    }
    assert_eq!(log.len(), 9);
    assert!(log.most(SECOND, None) <= 4);
}

/// What a service does after the permit of the layer around has expired is a request of its own.
#[tokio::test(start_paused = true)]
async fn calls_long_after_the_outer_permit_pass() {
    let log = Log::default();
    let (outer, inner) = (limit(Quota::per_second(10)), limit(Quota::per_second(1)));
    let stack = later(SECOND / 10, boxed(inner.layer(upstream(&log))));
    let service = boxed(outer.layer(stack));
    for _ in 0..3 {
        service.clone().oneshot(request()).await.unwrap();
    }
    assert_eq!(log.len(), 3);
    assert_eq!(log.most(SECOND, None), 1);
}

/// Calls that refresh their token through the layer that they came through.
async fn refreshed(calls: usize, limit: RateLimitLayer) -> (Vec<Result<(), BoxError>>, Duration) {
    let log = Log::default();
    let refresh = boxed(limit.layer(upstream(&log)));
    let service = boxed(limit.layer(later(SECOND, later(Duration::ZERO, refresh))));
    let start = tokio::time::Instant::now();
    let calls = (0..calls).map(|_| service.clone().oneshot(request()));
    let done = JoinSet::from_iter(calls).join_all().await;
    let done = done.into_iter().map(|result| result.map(|_| ()));
    (done.collect(), start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn nested_calls_never_wait_for_an_outer_slot() {
    let calls = || limit(Quota::in_flight(4));
    let rate = || limit(Quota::per_second(100));
    for layer in [
        calls(),
        limit(Quota::in_flight(4).and(Quota::per_second(100))),
        calls().and(rate()),
        rate().and(calls()),
    ] {
        let (done, took) = refreshed(1, layer.clone()).await;
        assert!(done[0].is_ok(), "{done:?}");
        assert!(took < 2 * SECOND, "{took:?}");
        let (done, took) = refreshed(4, layer).await;
        assert!(took < 2 * SECOND, "{took:?}");
        let refused: Vec<_> = done.into_iter().filter_map(Result::err).collect();
        // A call that is refused ends, and so another one finds a slot.
        assert!((1..4).contains(&refused.len()), "{refused:?}");
        for error in refused {
            let text = error.to_string();
            assert!(
                text.contains("inside of a call of the same limiter"),
                "{text}"
            );
            assert_eq!(reason::<()>(Err(error)), Some(Reason::Nested));
        }
    }
    // A nested call of a limiter of rates waits, as any other.
    let (done, took) = refreshed(2, limit(Quota::per_second(1))).await;
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    assert!(took >= 3 * SECOND, "{took:?}");
}

/// The cap around a common limit that `guide::classes` shows: the common layer is joined, not inside.
#[tokio::test(start_paused = true)]
async fn cap_joined_with_a_common_layer_is_used_up() {
    let (log, common) = (Log::default(), limit(Quota::per_second(20)));
    let web = common.layer(upstream(&log));
    let batch = limit(Quota::per_second(15)).and(common);
    let batch = boxed(batch.layer(upstream(&log)));
    let end = tokio::time::Instant::now() + MINUTE;
    let mut jobs = JoinSet::new();
    for _ in 0..300 {
        let batch = batch.clone();
        jobs.spawn(async move {
            let mut sent = 0;
            while tokio::time::Instant::now() < end {
                batch.clone().oneshot(request()).await.unwrap();
                sent += usize::from(tokio::time::Instant::now() < end);
            }
            sent
        });
    }
    for _ in 0..4 * 60 {
        sleep(SECOND / 4).await;
        web.clone().oneshot(request()).await.unwrap();
    }
    let sent: usize = jobs.join_all().await.into_iter().sum();
    assert!(log.most(SECOND, None) <= 20);
    assert!(sent >= 15 * 60 * 95 / 100, "{sent}");
}

/// A service that panics in its `call`, behind a layer with a permit at hand, leaves the mark of that layer on the
/// thread.
#[tokio::test(start_paused = true)]
async fn panics_of_inner_services_refuse_no_later_request() {
    let log = Log::default();
    let panics = service_fn(
        |_: Request<String>| -> std::future::Ready<Result<Response<&str>, BoxError>> {
            panic!("the call fails")
        },
    );
    let outer = limit(Quota::per_second(10));
    let mut service = outer.layer(panics);
    drop(boxed(outer.layer(upstream(&log))).oneshot(request()).await);
    let call = std::panic::AssertUnwindSafe(|| drop(service.call(request())));
    std::panic::catch_unwind(call).unwrap_err();
    for layer in [limit(Quota::per_second(10)), outer] {
        let service = boxed(ServiceBuilder::new().layer(layer).service(upstream(&log)));
        for _ in 0..3 {
            service.clone().oneshot(request()).await.unwrap();
        }
    }
    let throttled = boxed(AdaptiveThrottleLayer::new().layer(upstream(&log)));
    throttled.oneshot(request()).await.unwrap();
    assert_eq!(log.len(), 8);
}

#[cfg(feature = "reqwest-middleware")]
#[tokio::test(start_paused = true)]
async fn middlewares_inside_another_are_refused_by_name() {
    let send = async |layers: Vec<RateLimitLayer>| {
        let builder = reqwest_middleware::ClientBuilder::new(reqwest::Client::new());
        let builder = layers
            .into_iter()
            .fold(builder, |builder, layer| builder.with(layer));
        let result = builder.build().get("http://127.0.0.1:9/").send().await;
        let error = result.unwrap_err();
        Limited::find(&error).and_then(Limited::reason)
    };
    let (outer, inner) = (limit(Quota::per_second(10)), limit(Quota::per_second(5)));
    let both = vec![outer.clone(), inner.clone()];
    assert_eq!(send(both).await, Some(Reason::Inside));
    // Nothing listens there.
    assert_eq!(send(vec![outer.and(inner)]).await, None);
}

/// See ig-client#92: a program that acquires by hand and then sends through a layer of the same limiter gets half of the
/// rate.
#[tokio::test(start_paused = true)]
async fn two_permits_for_a_request_are_reported_once() {
    for acquires_each in [true, false] {
        let events = Arc::new(Mutex::new(Vec::new()));
        let told = events.clone();
        let layer = RateLimitLayer::builder(Quota::per_second(10)).on_event(move |event| {
            if let Event::CountedTwice { .. } = event {
                told.lock().unwrap().push(event.to_string());
            }
        });
        let layer = layer.build().unwrap();
        let limiter = layer.limiter();
        let mut client = layer.layer(upstream(&Log::default()));
        for round in 0..100 {
            // Without a permit for each, those by hand may be for other requests.
            if acquires_each || round % 10 > 0 {
                drop(limiter.acquire(Key::ALL).await.unwrap());
            }
            client.call(request()).await.unwrap();
        }
        let events = events.lock().unwrap();
        let text = "each request of key all takes two permits: one by hand, and one in the layer";
        let expected: &[&str] = if acquires_each { &[text] } else { &[] };
        assert_eq!(*events, expected);
    }
}

/// A program that sends requests of its own with the permits by hand is right to do so.
#[tokio::test(start_paused = true)]
async fn permits_by_hand_for_other_requests_are_not_reported() {
    let is_told = Arc::new(Mutex::new(false));
    let told = is_told.clone();
    let layer = RateLimitLayer::builder(Quota::per_second(10)).on_event(move |event| {
        if let Event::CountedTwice { .. } = event {
            *told.lock().unwrap() = true;
        }
    });
    let layer = layer.build().unwrap();
    let limiter = layer.limiter();
    let mut client = layer.layer(upstream(&Log::default()));
    for _ in 0..100 {
        let sent = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
        sleep(Duration::from_millis(5)).await;
        drop(sent);
        client.call(request()).await.unwrap();
    }
    assert!(!*is_told.lock().unwrap());
}
