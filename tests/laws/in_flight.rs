//! In-flight limits: the limiter and the layers, alone and with rates. Under a paused clock.

use crate::support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::join_all;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use support::{Failing, Upstream, get, ms, waiting, who_said_no};
use tokio::time::{Instant, sleep};
use tollgate::quota::Limit;
use tollgate::store::MemoryStore;
use tollgate::{Key, Limited, OnStoreError, Quota, RateLimitLayer, Reason};
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};

fn layer(quota: Quota) -> RateLimitLayer {
    RateLimitLayer::new(quota).unwrap()
}

async fn free(layer: &RateLimitLayer) -> u64 {
    support::peek(layer, Key::ALL).await.free
}

#[tokio::test(start_paused = true)]
async fn in_flight_limit_is_fully_used_and_never_exceeded() {
    let limiter = layer(Quota::in_flight(8)).limiter();
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let start = Instant::now();
    join_all((0..400).map(|_| async {
        let permit = limiter.acquire(Key::ALL).await.unwrap();
        most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        sleep(ms(50)).await;
        now.fetch_sub(1, Ordering::Relaxed);
        drop(permit);
    }))
    .await;
    assert_eq!(most.load(Ordering::Relaxed), 8);
    // Fifty rounds of 50 ms, each with the millisecond to which timers are rounded.
    assert!(start.elapsed() <= ms(50 * 51 + 1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_fall_to_a_lowered_limit_although_requests_wait() {
    let store = Arc::new(MemoryStore::new(10));
    let quota = |calls| Quota::in_flight(calls).and(Quota::per_second(1000));
    // Two processes: each has a call in flight whenever it may, and requests wait in both.
    let limiter = || {
        let builder = RateLimitLayer::builder(quota(6)).store(store.clone());
        builder.build().unwrap().limiter()
    };
    let limiters = [limiter(), limiter()];
    let now = Arc::new(AtomicUsize::new(0));
    for number in 0..200 {
        let (limiter, now) = (limiters[number % 2].clone(), now.clone());
        tokio::spawn(async move {
            let permit = limiter.acquire(Key::ALL).await.unwrap();
            now.fetch_add(1, Ordering::Relaxed);
            sleep(ms(50 + number as u64 % 7)).await;
            now.fetch_sub(1, Ordering::Relaxed);
            drop(permit);
        });
    }
    sleep(ms(200)).await;
    assert_eq!(now.load(Ordering::Relaxed), 6);
    limiters[0].set_quota(Key::ALL, quota(2)).await.unwrap();
    // All calls that were in flight end meanwhile.
    sleep(ms(60)).await;
    let mut most = 0;
    for _ in 0..300 {
        sleep(ms(1)).await;
        most = most.max(now.load(Ordering::Relaxed));
    }
    assert_eq!(most, 2);
}

#[tokio::test(start_paused = true)]
async fn waiters_are_served_in_order_with_one_more_poll() {
    let layer = layer(Quota::in_flight(3));
    let limiter = layer.limiter();
    let (order, polls) = (
        Arc::new(Mutex::new(Vec::new())),
        Arc::new(AtomicUsize::new(0)),
    );
    let mut tasks = Vec::new();
    for number in 0..60 {
        let (limiter, order, polls) = (limiter.clone(), order.clone(), polls.clone());
        tasks.push(tokio::spawn(async move {
            let mut acquire = std::pin::pin!(limiter.acquire(Key::ALL));
            let permit = std::future::poll_fn(|cx| {
                polls.fetch_add(1, Ordering::Relaxed);
                acquire.as_mut().poll_unpin(cx)
            });
            let permit = permit.await.unwrap();
            order.lock().unwrap().push(number);
            sleep(ms(10)).await;
            drop(permit);
        }));
        tokio::task::yield_now().await;
    }
    assert_eq!(waiting(&layer).await, 57);
    join_all(tasks).await;
    assert_eq!(*order.lock().unwrap(), (0..60).collect::<Vec<_>>());
    assert_eq!(polls.load(Ordering::Relaxed), 3 + 2 * 57);
}

#[tokio::test(start_paused = true)]
async fn dropped_at_any_await_nothing_is_lost() {
    let layer = layer(Quota::in_flight(2));
    let limiter = layer.limiter();
    for polls in 0..4 {
        let held = limiter.acquire(Key::ALL).await.unwrap();
        let other = limiter.acquire(Key::ALL).await.unwrap();
        let mut waits = Box::pin(limiter.acquire(Key::ALL));
        for poll in 0..polls {
            assert!(waits.as_mut().now_or_never().is_none(), "poll {poll}");
        }
        if polls == 3 {
            // It has its in-flight slot, and is dropped before it is notified.
            drop(other);
        }
        drop(waits);
        drop(held);
        assert_eq!(waiting(&layer).await, 0);
    }
    assert_eq!(free(&layer).await, 2);
}

#[tokio::test(start_paused = true)]
async fn impatient_request_is_refused_at_once_naming_the_limit() {
    let layer = RateLimitLayer::builder(Quota::in_flight(3))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let held: Vec<_> = join_all((0..3).map(|_| limiter.acquire(Key::ALL))).await;
    assert!(held.iter().all(Result::is_ok), "{held:?}");
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    let Limited::Local {
        reason: Reason::MaxWait(Duration::ZERO),
        report,
        ..
    } = &refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!(report.limit(), Some(Limit::in_flight(3)));
    assert_eq!(report.retry_after(), None);
    assert!(refused.to_string().contains("3 in flight"), "{refused}");
    drop(held);
    assert!(limiter.acquire(Key::ALL).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn wait_ends_after_max_wait_or_at_deadline() {
    let layer = RateLimitLayer::builder(Quota::in_flight(1))
        .max_wait(ms(500))
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let _held = limiter.acquire(Key::ALL).await.unwrap();
    let start = Instant::now();
    let late = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(
        matches!(
            late,
            Limited::Local {
                reason: Reason::MaxWait(_),
                ..
            }
        ),
        "{late:?}"
    );
    assert_eq!(start.elapsed(), ms(500));
    let deadline = (Instant::now() + ms(100)).into_std();
    let late = limiter
        .acquire(Key::ALL)
        .deadline(deadline)
        .await
        .unwrap_err();
    assert!(
        matches!(
            late,
            Limited::Local {
                reason: Reason::Deadline,
                ..
            }
        ),
        "{late:?}"
    );
    assert_eq!(start.elapsed(), ms(600));
    assert_eq!(waiting(&layer).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_line_that_is_full_refuses_the_next() {
    let layer = RateLimitLayer::builder(Quota::in_flight(1))
        .max_queue(1)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let held = limiter.acquire(Key::ALL).await.unwrap();
    let mut waits = Box::pin(limiter.acquire(Key::ALL));
    assert!(waits.as_mut().now_or_never().is_none());
    let full = limiter.acquire(Key::ALL).await.unwrap_err();
    assert!(
        matches!(
            full,
            Limited::Local {
                reason: Reason::QueueFull(1),
                ..
            }
        ),
        "{full:?}"
    );
    drop(held);
    assert!(waits.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn rate_slot_is_not_spent_waiting_for_in_flight() {
    // Ten a second would allow more, but each call takes a second and two may be in flight.
    let layer = layer(Quota::per_second(10).and(Quota::in_flight(2)));
    let upstream = Upstream::taking(ms(1000));
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(upstream.clone());
    join_all((0..6).map(|_| service.clone().oneshot(get("/")))).await;
    assert_eq!(upstream.arrivals(), [0, 0, 1000, 1000, 2000, 2000]);

    // Two a second, and each call takes no time: the rate is what holds back.
    let slow = RateLimitLayer::new(Quota::per_second(2).and(Quota::in_flight(2))).unwrap();
    let upstream = Upstream::new();
    let service = ServiceBuilder::new().layer(slow).service(upstream.clone());
    join_all((0..6).map(|_| service.clone().oneshot(get("/")))).await;
    upstream.was_never_over(2, ms(1000));
    assert_eq!(upstream.count(), 6);
}

#[tokio::test(start_paused = true)]
async fn call_ends_with_its_head_error_or_future() {
    let layer = layer(Quota::in_flight(1));
    let client = service_fn(|request: Request<String>| async move {
        match request.uri().path() {
            "/ok" => Ok(Response::new(String::new())),
            "/fails" => Err("no connection".into()),
            _ => std::future::pending::<Result<Response<String>, BoxError>>().await,
        }
    });
    let service = ServiceBuilder::new().layer(layer.clone()).service(client);
    let response = service.clone().oneshot(get("/ok")).await.unwrap();
    assert_eq!(free(&layer).await, 1, "the head is there");
    drop(response);
    assert!(service.clone().oneshot(get("/fails")).await.is_err());
    assert_eq!(free(&layer).await, 1);
    let mut hangs = Box::pin(service.clone().oneshot(get("/hangs")));
    assert!(hangs.as_mut().now_or_never().is_none());
    assert_eq!(free(&layer).await, 0);
    drop(hangs);
    assert_eq!(free(&layer).await, 1);
}

#[tokio::test(start_paused = true)]
async fn call_kept_until_body_end_stays_in_flight() {
    let layer = layer(Quota::in_flight(1));
    let client = service_fn(|request: Request<String>| async move {
        let parts = ["one ", "two"]
            .map(|part| Ok::<_, BoxError>(http_body::Frame::data(Bytes::from(part))));
        let body = match request.uri().path() {
            "/empty" => http_body_util::Either::Left(Full::new(Bytes::new())),
            _ => http_body_util::Either::Right(StreamBody::new(futures::stream::iter(parts))),
        };
        Ok::<_, BoxError>(Response::new(body))
    });
    let service = ServiceBuilder::new()
        .layer(layer.clone().in_flight_until_body_end())
        .service(client);
    let response = service.clone().oneshot(get("/")).await.unwrap();
    assert_eq!(free(&layer).await, 0);
    let mut body = response.into_body();
    let first = body.frame().await.unwrap().unwrap();
    assert_eq!(first.into_data().unwrap(), "one ");
    assert_eq!(free(&layer).await, 0, "more is to come");
    body.collect().await.unwrap();
    assert_eq!(free(&layer).await, 1);

    let dropped = service.clone().oneshot(get("/")).await.unwrap();
    assert_eq!(free(&layer).await, 0);
    drop(dropped);
    assert_eq!(free(&layer).await, 1);

    let empty = service.clone().oneshot(get("/empty")).await.unwrap();
    assert_eq!(free(&layer).await, 1, "there is nothing to read");
    drop(empty);
}

#[tokio::test(start_paused = true)]
async fn layers_sharing_a_store_queue_in_flight_calls_together() {
    let store = Arc::new(MemoryStore::default());
    let build = || {
        RateLimitLayer::builder(Quota::in_flight(2))
            .store(store.clone())
            .build()
            .unwrap()
            .limiter()
    };
    let (ours, theirs) = (build(), build());
    let one = ours.acquire(Key::ALL).await.unwrap();
    let two = ours.acquire(Key::ALL).await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (name, limiter) in [
        ("a", &ours),
        ("b", &theirs),
        ("c", &ours),
        ("d", &theirs),
        ("e", &ours),
    ] {
        let (limiter, order) = (limiter.clone(), order.clone());
        tasks.push(tokio::spawn(async move {
            let permit = limiter.acquire(Key::ALL).await.unwrap();
            order.lock().unwrap().push(name);
            sleep(ms(10)).await;
            drop(permit);
        }));
        tokio::task::yield_now().await;
    }
    drop((one, two));
    join_all(tasks).await;
    assert_eq!(*order.lock().unwrap(), ["a", "b", "c", "d", "e"]);
    assert_eq!(ours.peek(Key::ALL).await.unwrap().free, 2);
}

#[tokio::test(start_paused = true)]
async fn stricter_of_two_asserted_limits_applies() {
    let store = Arc::new(MemoryStore::default());
    let build = |most| {
        RateLimitLayer::builder(Quota::in_flight(most))
            .store(store.clone())
            .build()
            .unwrap()
            .limiter()
    };
    let (strict, loose) = (build(1), build(5));
    let held = strict.acquire(Key::ALL).await.unwrap();
    assert!(loose.acquire(Key::ALL).now_or_never().is_none());
    drop(held);
    let all = join_all((0..5).map(|_| loose.acquire(Key::ALL)))
        .now_or_never()
        .expect("all at once");
    assert!(all.iter().all(Result::is_ok));
}

#[tokio::test(start_paused = true)]
async fn store_without_in_flight_limits_errs_or_fails_open() {
    let build = |on_store_error| {
        let builder =
            RateLimitLayer::builder(Quota::in_flight(1)).store(Arc::new(Failing::away(false)));
        builder
            .on_store_error(on_store_error)
            .build()
            .unwrap()
            .limiter()
    };
    let error = build(OnStoreError::FailClosed)
        .acquire(Key::ALL)
        .await
        .unwrap_err();
    assert_eq!(who_said_no(&error), "store");
    assert!(error.to_string().contains("calls in flight"), "{error}");
    let open = build(OnStoreError::FailOpen);
    let (one, two) = (open.acquire(Key::ALL).await, open.acquire(Key::ALL).await);
    assert!(one.is_ok() && two.is_ok());
}

#[tokio::test(start_paused = true)]
async fn store_that_forgot_a_free_key_counts_anew() {
    let store = Arc::new(MemoryStore::new(1));
    let builder = RateLimitLayer::builder(Quota::in_flight(1))
        .store(store)
        .max_wait(ms(500));
    let limiter = builder.build().unwrap().limiter();
    for round in 0..10 {
        for key in [Key::ALL, Key::new("another")] {
            drop(
                limiter
                    .acquire(key)
                    .await
                    .unwrap_or_else(|error| panic!("round {round}: {error}")),
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn request_without_cost_needs_no_in_flight_slot() {
    let limiter = layer(Quota::in_flight(1)).limiter();
    let _held = limiter.acquire(Key::ALL).await.unwrap();
    assert!(limiter.acquire(Key::ALL).cost(0).await.is_ok());
}

#[test]
fn dropped_runtime_leaves_no_call_in_flight() {
    let layer = layer(Quota::in_flight(60));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        for _ in 0..50 {
            let permit = layer.limiter().acquire(Key::ALL).await.unwrap();
            tokio::spawn(async move {
                std::future::pending::<()>().await;
                drop(permit);
            });
        }
        tokio::task::yield_now().await;
        assert_eq!(free(&layer).await, 10);
    });
    drop(runtime);
    assert_eq!(free(&layer).now_or_never(), Some(60));
}

#[tokio::test(start_paused = true)]
async fn retried_refusal_occupies_no_in_flight_slot() {
    for slots in [1, 3] {
        let upstream = Upstream::answering((0..slots).map(|_| support::limited("1")));
        let limit = layer(Quota::in_flight(slots)).in_flight_until_body_end();
        let throttle = tollgate::AdaptiveThrottleLayer::builder()
            // As many calls are in flight as there are slots.
            .pace(|| tollgate::pace::NoPacing)
            .max_wait(Duration::from_secs(60))
            .build()
            .unwrap();
        let service = ServiceBuilder::new()
            .layer(throttle.retrying())
            .layer(limit)
            .service(upstream);
        let start = Instant::now();
        let answers = join_all((0..slots).map(|_| service.clone().oneshot(get("/")))).await;
        for answer in answers {
            assert_eq!(answer.unwrap().status(), http::StatusCode::OK);
        }
        assert!(
            start.elapsed() < Duration::from_secs(14),
            "{:?}",
            start.elapsed()
        );
    }
}
