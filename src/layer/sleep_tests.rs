//! A machine that sleeps during a hold: the hold ends as it does for the upstream, which did not sleep.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::{Request, Response};
use tower::{ServiceExt, service_fn};
use tower_layer::Layer;

use crate::clock::{self, pretended};
use crate::{AdaptiveThrottleLayer, Key, Limiter, Quota, RateLimitLayer};

const KEY: Key = Key::ALL;

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn limiter(max_wait: Duration) -> Limiter {
    let layer = RateLimitLayer::builder(Quota::per_second(10)).max_wait(max_wait);
    layer.build().unwrap().limiter()
}

/// Lets the machine sleep for `slept`, a second after `waits` has begun to wait. Returns how long it waited by the clock of the
/// machine.
async fn waited(waits: impl Future<Output = ()> + Send + 'static, slept: Duration) -> Duration {
    let began = clock::now();
    // A task of its own is polled only if it is woken.
    let waits = tokio::spawn(waits);
    clock::sleep(seconds(1)).await;
    pretended::sleep(slept);
    waits.await.unwrap();
    clock::now() - began
}

#[tokio::test(start_paused = true)]
async fn waiter_goes_on_when_the_hold_has_ended_meanwhile() {
    let limiter = limiter(seconds(7200));
    limiter.hold_for(KEY, seconds(1000)).await.unwrap();
    let waits = async move { drop(limiter.acquire(KEY).await.unwrap()) };
    let waited = waited(waits, seconds(3600)).await;
    assert!(waited <= seconds(3), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn waiter_of_several_keys_goes_on() {
    let (one, other) = (limiter(seconds(7200)), limiter(seconds(7200)));
    other.hold_for(KEY, seconds(1000)).await.unwrap();
    let waits = async move { drop(one.acquire(KEY).and(other.acquire(KEY)).await.unwrap()) };
    let waited = waited(waits, seconds(3600)).await;
    assert!(waited <= seconds(3), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn waiter_of_a_host_on_hold_goes_on() {
    let layer = RateLimitLayer::builder(Quota::per_second(10)).max_wait(seconds(7200));
    let calls = Arc::new(AtomicU32::new(0));
    let upstream = service_fn(move |_: Request<()>| {
        let response = match calls.fetch_add(1, Ordering::Relaxed) {
            0 => Response::builder()
                .status(429)
                .header("retry-after", "1000"),
            _ => Response::builder(),
        };
        async { response.body(()) }
    });
    let service = layer.build().unwrap().layer(upstream);
    let call = || {
        service
            .clone()
            .oneshot(Request::get("http://api.example/").body(()).unwrap())
    };
    assert_eq!(call().await.unwrap().status(), 429);
    let call = call();
    let waits = async { assert_eq!(call.await.unwrap().status(), 200) };
    let waited = waited(waits, seconds(3600)).await;
    assert!(waited <= seconds(3), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn rest_of_a_hold_counts() {
    let limiter = limiter(seconds(7200));
    limiter.hold_for(KEY, seconds(3600)).await.unwrap();
    let waits = async move { drop(limiter.acquire(KEY).await.unwrap()) };
    let waited = waited(waits, seconds(3000)).await;
    assert!(
        waited >= seconds(600) && waited < seconds(601),
        "{waited:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn new_request_is_not_refused_for_a_hold_that_has_ended() {
    let limiter = limiter(Duration::ZERO);
    limiter.hold_for(KEY, seconds(1000)).await.unwrap();
    pretended::sleep(seconds(900));
    assert!(limiter.acquire(KEY).await.is_err());
    pretended::sleep(seconds(100));
    drop(limiter.acquire(KEY).await.unwrap());
    // A hold that begins after the sleep is whole.
    limiter.hold_for(KEY, seconds(10)).await.unwrap();
    clock::sleep(seconds(9)).await;
    assert!(limiter.acquire(KEY).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn throttled_waiter_goes_on() {
    let layer = AdaptiveThrottleLayer::builder().max_wait(seconds(7200));
    let throttle = layer.build().unwrap().throttle();
    throttle.hold_for(KEY, seconds(3600)).await.unwrap();
    let of = throttle.clone();
    let waits = async move { drop(of.acquire(KEY).await.unwrap()) };
    let slept = waited(waits, seconds(4000)).await;
    assert!(slept <= seconds(3), "{slept:?}");
    throttle.hold_for(KEY, seconds(3600)).await.unwrap();
    let of = throttle.clone();
    let waits = async move { drop(of.acquire(KEY).await.unwrap()) };
    let rest = waited(waits, seconds(3000)).await;
    assert!(rest >= seconds(600) && rest < seconds(605), "{rest:?}");
}

#[tokio::test(start_paused = true)]
async fn hold_that_begins_after_a_sleep_is_whole() {
    let limiter = limiter(Duration::ZERO);
    let throttle = AdaptiveThrottleLayer::builder().max_wait(seconds(7200));
    let throttle = throttle.build().unwrap().throttle();
    limiter.hold_for(KEY, seconds(100)).await.unwrap();
    throttle.hold_for(KEY, seconds(100)).await.unwrap();
    assert!(limiter.acquire(KEY).await.is_err());
    limiter.release(KEY).await.unwrap();
    throttle.release(KEY).await.unwrap();
    pretended::sleep(seconds(3600));
    limiter.hold_for(KEY, seconds(100)).await.unwrap();
    throttle.hold_for(KEY, seconds(100)).await.unwrap();
    assert!(limiter.acquire(KEY).await.is_err());
    let start = clock::now();
    drop(throttle.acquire(KEY).await.unwrap());
    let waited = clock::now() - start;
    assert!(waited >= seconds(100), "{waited:?}");
}

/// The upstream asks for two hours, and an hour is allowed. After that one request leaves first, also if the machine has slept
/// until then.
#[tokio::test(start_paused = true)]
async fn probe_leaves_first_after_a_sleep() {
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let upstream = service_fn(move |_: Request<()>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {
            // Others could leave meanwhile.
            clock::sleep(seconds(1)).await;
            let response = Response::builder().status(429);
            response.header("retry-after", "7200").body(())
        }
    });
    let layer = RateLimitLayer::builder(Quota::per_second(10))
        .max_hold(seconds(3600))
        .max_wait(seconds(7200));
    let service = layer.build().unwrap().layer(upstream);
    let request = || Request::get("http://api.example/").body(()).unwrap();
    service.clone().oneshot(request()).await.unwrap();
    for _ in 0..3 {
        tokio::spawn(service.clone().oneshot(request()));
    }
    clock::sleep(seconds(1)).await;
    pretended::sleep(seconds(3900));
    clock::sleep(seconds(10)).await;
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn hold_of_a_kind_goes_on() {
    let refusals = Arc::new(AtomicU32::new(0));
    let upstream = service_fn(move |request: Request<()>| {
        let wait = match refusals.load(Ordering::Relaxed) {
            0 => "1",
            _ => "1000",
        };
        let response = match request.uri().path() {
            "/bad" => {
                refusals.fetch_add(1, Ordering::Relaxed);
                Response::builder().status(429).header("retry-after", wait)
            }
            _ => Response::builder(),
        };
        async { response.body(()) }
    });
    let layer = AdaptiveThrottleLayer::builder().max_wait(seconds(60));
    let service = layer.build().unwrap().layer(upstream);
    let call = |path: &str| {
        let request = Request::get(path).body(()).unwrap();
        service.clone().oneshot(request)
    };
    assert_eq!(call("/bad").await.unwrap().status(), 429);
    for _ in 0..5 {
        clock::sleep(seconds(10)).await;
        assert_eq!(call("/good").await.unwrap().status(), 200);
    }
    assert_eq!(call("/bad").await.unwrap().status(), 429);
    pretended::sleep(seconds(900));
    assert!(call("/bad").await.is_err());
    assert_eq!(call("/good").await.unwrap().status(), 200);
    pretended::sleep(seconds(100));
    assert_eq!(call("/bad").await.unwrap().status(), 429);
}
