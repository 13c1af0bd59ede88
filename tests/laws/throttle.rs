//! The layer that learns its pace, around an upstream without sockets, with a clock that moves when
//! the test waits.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::FutureExt;
use http::StatusCode;
use tollgate::__lab::{Dice, Pace, Pause, Reply, Traffic};
use tollgate::pace::NoPacing;
use tollgate::stats::Event;
use tollgate::store::{MemoryStore, StoreError};
use tollgate::{
    AdaptiveThrottleLayer, Deadline, Error, Key, Limited, Quota, RateLimitLayer, Reason, Signal,
    by_host,
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};

use support::{Upstream, get, limited, ms, now, ok, other_error, pass, settle, soon, who_said_no};

/// One request per this many milliseconds, whatever happens.
#[derive(Debug)]
struct Every(u64);

impl Pace for Every {
    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        Some(traffic.last_sent? + ms(self.0))
    }

    fn refused(&mut self, _: &mut Reply<'_>, _: &Traffic, _: &mut Dice) -> Pause {
        Pause::of_all(ms(self.0))
    }
}

fn every(millis: u64) -> AdaptiveThrottleLayer {
    AdaptiveThrottleLayer::builder()
        .pace(move || Every(millis))
        .max_wait(ms(60_000))
        .build()
        .unwrap()
}

fn reason(error: &Error) -> Option<Reason> {
    Limited::find(error)?.reason()
}

#[tokio::test(start_paused = true)]
async fn first_request_goes_alone_and_later_requests_without_wait() {
    let upstream = Upstream::taking(ms(100));
    let service = AdaptiveThrottleLayer::new().layer(upstream.clone());
    let calls: Vec<_> = (0..5)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    for call in calls {
        assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
    }
    let arrivals = upstream.arrivals();
    assert_eq!(arrivals[0], 0);
    assert!(
        arrivals[1..].iter().all(|at| (100..=102).contains(at)),
        "{arrivals:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn hanging_first_request_delays_others_for_a_second() {
    let upstream = Upstream::taking(ms(5000));
    let service = AdaptiveThrottleLayer::new().layer(upstream.clone());
    let calls: Vec<_> = (0..3)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    let arrivals = upstream.arrivals();
    assert!(
        (1000..=1002).contains(&arrivals[1]) && (2000..=2004).contains(&arrivals[2]),
        "{arrivals:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn refusal_passes_and_its_hint_holds_the_next() {
    let upstream = Upstream::answering([limited("2")]);
    let service = AdaptiveThrottleLayer::new().layer(upstream.clone());
    assert_eq!(
        service.clone().oneshot(get("/")).await.unwrap().status(),
        429
    );
    assert_eq!(
        soon(service.clone().oneshot(get("/")))
            .await
            .unwrap()
            .status(),
        200
    );
    assert!(upstream.arrivals()[1] >= 2000, "{:?}", upstream.arrivals());
}

#[tokio::test(start_paused = true)]
async fn stated_wait_is_exceeded_by_at_most_a_tenth() {
    for _ in 0..20 {
        let upstream = Upstream::answering([ok(), limited("5"), limited("5")]);
        let service = AdaptiveThrottleLayer::new()
            .retrying()
            .layer(upstream.clone());
        for _ in 0..2 {
            let response = soon(service.clone().oneshot(get("/"))).await.unwrap();
            assert_eq!(response.status(), 200);
        }
        let arrivals = upstream.arrivals();
        for pair in arrivals[1..].windows(2) {
            let wait = pair[1] - pair[0];
            assert!((5000..=5502).contains(&wait), "{arrivals:?}");
        }
    }
}

/// The quota of a day is used up, and the server states its reset instead of a wait.
#[tokio::test(start_paused = true)]
async fn max_hold_cuts_the_reset_of_a_used_up_quota() {
    const DAY: u64 = 72_000;
    let states = |status: u16, remaining: u64, past: u64| {
        let response = http::Response::builder().status(status);
        let response = response.header("X-RateLimit-Limit", "100");
        let response = response.header("X-RateLimit-Remaining", remaining);
        let response = response.header("X-RateLimit-Reset", DAY - past);
        Ok(response.body(String::new()).unwrap())
    };
    let answers = (0..6).map(|number| states(200, 60 - 10 * number, 5 * number));
    let upstream = Upstream::answering(answers.chain([states(429, 0, 30)]));
    let layer = AdaptiveThrottleLayer::builder().max_hold(ms(60_000));
    let layer = layer.max_wait(ms(1_000_000)).build().unwrap();
    let service = layer.layer(upstream.clone());
    for _ in 0..6 {
        service.clone().oneshot(get("/")).await.unwrap();
        pass(ms(5000)).await;
    }
    let refused = service.clone().oneshot(get("/")).await.unwrap();
    assert_eq!(refused.status(), 429);
    let start = now();
    service.oneshot(get("/")).await.unwrap();
    let waited = now() - start;
    // By chance the pace takes up to 922 s for that. The reset is in 72,000 s.
    assert!(waited >= ms(60_000) && waited < ms(1_000_000), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_request_after_its_deadline_is_not_sent() {
    let upstream = Upstream::new();
    let service = every(100).layer(upstream.clone());
    let mut late = get("/");
    let deadline = now() - ms(1);
    late.extensions_mut().insert(Deadline::at(deadline));
    let error = service.oneshot(late).await.unwrap_err();
    assert_eq!(reason(&error), Some(Reason::Deadline));
    assert_eq!(upstream.count(), 0);
}

/// A task that is not polled: no other waiter depends on it.
#[tokio::test(start_paused = true)]
async fn waiter_never_polled_again_delays_no_other_waiter() {
    let upstream = Upstream::new();
    let service = every(1000).layer(upstream.clone());
    for idle in [1, 2, 3, 10] {
        let call = || Box::pin(service.clone().oneshot(get("/")));
        call().await.unwrap();
        let mut stuck: Vec<_> = (0..idle).map(|_| call()).collect();
        let is_stuck = stuck.iter_mut().map(|call| call.now_or_never().is_none());
        assert!(is_stuck.fold(true, |all, one| all & one));
        let start = now();
        call().await.unwrap();
        // As many turns pass until it looks. Then those before it have theirs.
        let turns = ms(1000 * (2 * idle + 1) + 300);
        assert!(now() - start <= turns, "{idle}: {:?}", now() - start);
        drop(stuck);
        pass(ms(60_000)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_request_goes_first_and_then_behind_others() {
    let upstream = Upstream::answering([ok(), limited("1"), limited("1")]);
    let service = every(100).retrying().layer(upstream.clone());
    service.clone().oneshot(get("/first")).await.unwrap();
    let calls: Vec<_> = ["/second", "/third"]
        .into_iter()
        .map(|path| tokio::spawn(service.clone().oneshot(get(path))))
        .collect();
    for call in calls {
        assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(
        upstream.paths(),
        ["/first", "/second", "/second", "/third", "/second"]
    );
    let arrivals = upstream.arrivals();
    assert!(
        arrivals[2] >= arrivals[1] + 1000 && arrivals[3] >= arrivals[2] + 1000,
        "{arrivals:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn request_unable_to_await_retry_returns_the_refusal() {
    let upstream = Upstream::answering([limited("30"), ok()]);
    let layer = AdaptiveThrottleLayer::new();
    let service = layer.clone().retrying().layer(upstream.clone());
    let response = soon(service.clone().oneshot(get("/"))).await.unwrap();
    assert_eq!(
        (response.status(), upstream.count()),
        (StatusCode::TOO_MANY_REQUESTS, 1)
    );
    assert_eq!(
        (
            layer.throttle().in_flight(Key::ALL),
            layer.throttle().waiting(Key::ALL)
        ),
        (0, 0)
    );

    // The next request cannot wait either, and is refused at once with the time to retry.
    let start = now();
    let error = service.clone().oneshot(get("/")).await.unwrap_err();
    assert_eq!((reason(&error), now() - start), (Some(Reason::Held), ms(0)));
    let retry_after = Limited::find(&error).unwrap().retry_after().unwrap();
    assert!(retry_after >= Duration::from_secs(30), "{retry_after:?}");
    assert_eq!(upstream.count(), 1);
}

/// A body that is counted until it is dropped.
#[derive(Debug)]
struct Body(Arc<AtomicUsize>);

impl Drop for Body {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Refuses the first calls, each for the seconds in the script; `bodies` counts the responses that
/// are not dropped.
fn refusing(script: &'static [u64], bodies: &Arc<AtomicUsize>) -> BodyService {
    let (bodies, calls) = (Arc::clone(bodies), AtomicUsize::new(0));
    let calls = Arc::new(calls);
    tower::util::BoxCloneService::new(tower::service_fn(move |_: http::Request<String>| {
        let open = bodies.fetch_add(1, Ordering::SeqCst);
        assert_eq!(open, 0, "the response before is still there");
        let mut response = http::Response::new(Body(Arc::clone(&bodies)));
        if let Some(seconds) = script.get(calls.fetch_add(1, Ordering::SeqCst)) {
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            response
                .headers_mut()
                .insert("retry-after", (*seconds).into());
        }
        async move { Ok(response) }
    }))
}

type BodyService =
    tower::util::BoxCloneService<http::Request<String>, http::Response<Body>, tower::BoxError>;

#[tokio::test(start_paused = true)]
async fn refusals_are_dropped_before_the_retry_wait() {
    let bodies = Arc::default();
    let service = AdaptiveThrottleLayer::new()
        .retrying()
        .layer(refusing(&[2, 2], &bodies));
    let call = tokio::spawn(service.oneshot(get("/")));
    for _ in 0..2 {
        settle().await;
        assert_eq!(
            bodies.load(Ordering::SeqCst),
            0,
            "it waits without the refusal"
        );
        pass(ms(1500)).await;
    }
    let response = soon(call).await.unwrap().unwrap();
    assert_eq!(
        (response.status(), bodies.load(Ordering::SeqCst)),
        (StatusCode::OK, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn retry_wait_in_vain_reports_the_refusal() {
    let upstream = Upstream::answering([limited("2"), ok()]);
    let layer = AdaptiveThrottleLayer::new();
    let throttle = layer.throttle();
    let call = tokio::spawn(layer.retrying().layer(upstream.clone()).oneshot(get("/")));
    pass(ms(1000)).await;
    throttle.hold_for(Key::ALL, ms(30_000)).await.unwrap();
    let error = soon(call).await.unwrap().unwrap_err();
    let Some(Limited::Upstream { status, report, .. }) = Limited::find(&error) else {
        panic!("{error}")
    };
    assert_eq!(
        (status.as_u16(), report.retry_after()),
        (429, Some(ms(30_000)))
    );
    assert_eq!(
        (
            upstream.count(),
            throttle.waiting(Key::ALL),
            throttle.in_flight(Key::ALL)
        ),
        (1, 0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn waiters_are_refused_when_hold_exceeds_their_wait() {
    let mut script: Vec<_> = vec![ok()];
    script.push(limited("50"));
    let upstream = Upstream::answering(script);
    let layer = AdaptiveThrottleLayer::builder()
        .pace(|| Every(5000))
        .max_wait(ms(20_000))
        .build()
        .unwrap();
    let service = layer.layer(upstream.clone());
    service.clone().oneshot(get("/")).await.unwrap();
    let start = now();
    let calls: Vec<_> = (0..3)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    let mut ended = Vec::new();
    for call in calls {
        ended.push(
            soon(call)
                .await
                .unwrap()
                .map(|response| response.status().as_u16())
                .map_err(|e| reason(&e)),
        );
    }
    assert_eq!(
        ended,
        [Ok(429), Err(Some(Reason::Held)), Err(Some(Reason::Held))]
    );
    assert!(now() - start < ms(5100), "{:?}", now() - start);
}

#[tokio::test(start_paused = true)]
async fn local_refusals_name_their_reason() {
    let upstream = Upstream::taking(ms(100));
    let build = |max_wait, max_queue| {
        let builder = AdaptiveThrottleLayer::builder()
            .pace(|| Every(10_000))
            .key(by_host);
        builder
            .max_wait(ms(max_wait))
            .max_queue(max_queue)
            .max_keys(1)
            .build()
            .unwrap()
    };
    let url = "http://api.example.com/";
    let service = build(0, 1).layer(upstream.clone());
    service.clone().oneshot(get(url)).await.unwrap();
    let error = service.clone().oneshot(get(url)).await.unwrap_err();
    assert_eq!(reason(&error), Some(Reason::MaxWait(ms(0))));
    let limited = Limited::find(&error).unwrap();
    assert_eq!(limited.report().key(), "api.example.com");
    assert!(limited.retry_after().unwrap() > ms(9000), "{limited}");

    let service = build(5000, 1).layer(upstream.clone());
    service.clone().oneshot(get(url)).await.unwrap();
    let waits = tokio::spawn(service.clone().oneshot(get(url)));
    settle().await;
    let full = service.clone().oneshot(get(url)).await.unwrap_err();
    assert_eq!(reason(&full), Some(Reason::QueueFull(1)));
    let other = service
        .clone()
        .oneshot(get("http://other.example.com/"))
        .await
        .unwrap_err();
    assert_eq!(reason(&other), Some(Reason::TooManyKeys(1)));
    assert_eq!(
        reason(&service.clone().oneshot(get("/")).await.unwrap_err()),
        Some(Reason::NoKey)
    );
    let start = now();
    let late = soon(waits).await.unwrap().unwrap_err();
    assert_eq!(reason(&late), Some(Reason::MaxWait(ms(5000))));
    assert_eq!((now() - start).as_secs(), 5);

    let mut request = get(url);
    request
        .extensions_mut()
        .insert(Deadline::at(now() + ms(1000)));
    let late = soon(service.clone().oneshot(request)).await.unwrap_err();
    assert_eq!(
        (reason(&late), who_said_no(&late)),
        (Some(Reason::Deadline), "local")
    );
}

#[tokio::test(start_paused = true)]
async fn each_key_has_a_pace_of_its_own() {
    let upstream = Upstream::new();
    let layer = AdaptiveThrottleLayer::builder()
        .pace(|| Every(1000))
        .key(by_host)
        .build()
        .unwrap();
    let service = layer.layer(upstream.clone());
    for url in [
        "http://a.example.com/",
        "http://b.example.com/",
        "http://a.example.com/",
    ] {
        soon(service.clone().oneshot(get(url))).await.unwrap();
    }
    let arrivals = upstream.arrivals();
    assert_eq!(arrivals[1], 0);
    assert!(arrivals[2] >= 1000, "{arrivals:?}");
}

#[tokio::test(start_paused = true)]
async fn waiter_that_gives_up_leaves_its_turn() {
    let (upstream, layer) = (Upstream::new(), every(1000));
    let service = layer.layer(upstream.clone());
    service.clone().oneshot(get("/0")).await.unwrap();
    let calls: Vec<_> = (1..=3)
        .map(|index| tokio::spawn(service.clone().oneshot(get(&format!("/{index}")))))
        .collect();
    settle().await;
    assert_eq!(layer.throttle().waiting(Key::ALL), 3);
    calls[0].abort();
    pass(ms(3000)).await;
    assert_eq!(upstream.paths(), ["/0", "/2", "/3"]);
    let arrivals = upstream.arrivals();
    assert!(
        arrivals[1] <= 1002 && arrivals[2] <= 2004,
        "no slot is lost: {arrivals:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn unused_turn_goes_to_the_next_waiter() {
    let throttle = every(1000).throttle();
    throttle
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&Signal::default());
    // Two requests wait; the first gets its turn through the answer of another, and is dropped
    // before it is polled again.
    let mut first = Box::pin(throttle.acquire(Key::ALL));
    let mut second = Box::pin(throttle.acquire(Key::ALL));
    assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
    pass(ms(1000)).await;
    let held = throttle.acquire(Key::new("other")).await.unwrap();
    held.give_back();
    drop(first);
    let permit = soon(second).await.unwrap();
    assert_eq!(throttle.in_flight(Key::ALL), 1);
    permit.give_back();
    assert_eq!(throttle.in_flight(Key::ALL), 0);
    // A returned turn is available at once.
    let start = now();
    drop(throttle.acquire(Key::ALL).await.unwrap());
    assert_eq!((now() - start, throttle.in_flight(Key::ALL)), (ms(0), 0));
}

/// A call is dropped at every moment of its life: in the queue, in flight, in the queue again, in
/// flight again.
#[tokio::test(start_paused = true)]
async fn a_call_may_be_dropped_at_any_time() {
    for end in (0..3500).step_by(50) {
        let refusals = [ok(), limited("1")].into_iter().cycle().take(2);
        let (upstream, layer) = (Upstream::answering(refusals), every(500));
        let service = layer.clone().retrying().layer(
            ServiceBuilder::new()
                .layer(slow(300))
                .service(upstream.clone()),
        );
        service.clone().oneshot(get("/first")).await.unwrap();
        let call = tokio::spawn(service.clone().oneshot(get("/dropped")));
        let other = tokio::spawn(service.clone().oneshot(get("/other")));
        pass(ms(end)).await;
        call.abort();
        assert_eq!(
            soon(other).await.unwrap().unwrap().status(),
            200,
            "dropped after {end} ms"
        );
        let _ = call.await;
        let throttle = layer.throttle();
        assert_eq!(
            (throttle.waiting(Key::ALL), throttle.in_flight(Key::ALL)),
            (0, 0),
            "after {end} ms"
        );
    }
}

/// Makes each call take `millis` longer.
fn slow(
    millis: u64,
) -> impl Layer<
    Upstream,
    Service = tower::util::BoxCloneService<
        http::Request<String>,
        http::Response<String>,
        tower::BoxError,
    >,
> {
    tower::layer::layer_fn(move |upstream: Upstream| {
        tower::util::BoxCloneService::new(upstream.and_then(move |response| async move {
            pass(ms(millis)).await;
            Ok(response)
        }))
    })
}

#[tokio::test(start_paused = true)]
async fn failed_call_is_no_answer_and_leaves_in_flight() {
    let layer = AdaptiveThrottleLayer::new();
    let service = layer.layer(Upstream::answering([other_error()]));
    let error = service.clone().oneshot(get("/")).await.unwrap_err();
    assert!(matches!(error, Error::Inner(_)));
    assert_eq!(layer.throttle().in_flight(Key::ALL), 0);
    service.clone().oneshot(get("/")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn refusal_errors_and_dialects_are_opt_in() {
    let quiet = || {
        let mut response = http::Response::new(String::new());
        response
            .headers_mut()
            .insert("x-pause", "3".parse().unwrap());
        Ok(response)
    };
    let pause = |_, headers: &http::HeaderMap, signal: Signal| match headers.contains_key("x-pause")
    {
        true => signal
            .with_refusal(StatusCode::TOO_MANY_REQUESTS)
            .with_retry_after(ms(3000)),
        false => signal,
    };
    let builder = AdaptiveThrottleLayer::builder()
        .key(by_host)
        .dialect(pause)
        .error_on_upstream_limit();
    let layer = builder.max_wait(ms(60_000)).build().unwrap();
    let upstream = Upstream::answering([quiet(), quiet(), quiet()]);
    let url = "http://api.example.com/";
    let error = layer
        .layer(upstream.clone())
        .oneshot(get(url))
        .await
        .unwrap_err();
    let Some(Limited::Upstream { status, report, .. }) = Limited::find(&error) else {
        panic!("{error}")
    };
    assert_eq!(
        (status.as_u16(), report.key(), report.retry_after()),
        (429, "api.example.com", Some(ms(3000)))
    );

    let retrying = layer.retrying().layer(upstream.clone());
    assert_eq!(
        soon(retrying.oneshot(get(url))).await.unwrap().status(),
        200
    );
    assert_eq!(upstream.count(), 4);
}

#[tokio::test(start_paused = true)]
async fn throttle_combines_with_limiter_and_errors_stay_flat() {
    let upstream = Upstream::answering([ok(), limited("5")]);
    let known = RateLimitLayer::builder(Quota::per_second(1))
        .max_hold(ms(0))
        .build()
        .unwrap();
    let learned = AdaptiveThrottleLayer::builder()
        .max_wait(ms(3000))
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .layer(learned)
        .layer(known)
        .service(upstream.clone());
    soon(service.clone().oneshot(get("/"))).await.unwrap();
    assert_eq!(
        soon(service.clone().oneshot(get("/")))
            .await
            .unwrap()
            .status(),
        429
    );
    assert!(upstream.arrivals()[1] >= 1000);
    let error = soon(service.clone().oneshot(get("/"))).await.unwrap_err();
    assert!(matches!(&error, Error::Limited(_)), "{error:?}");
    assert_eq!(reason(&error), Some(Reason::Held));
}

#[tokio::test(start_paused = true)]
async fn one_wake_up_for_each_turn() {
    const CALLS: usize = 200;
    let throttle = every(10).throttle();
    throttle
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&Signal::default());
    let polls = Arc::new(AtomicUsize::new(0));
    let calls: Vec<_> = (0..CALLS)
        .map(|_| {
            let (throttle, polls) = (throttle.clone(), Arc::clone(&polls));
            tokio::spawn(async move {
                let mut wait = Box::pin(throttle.acquire(Key::ALL));
                let counted = std::future::poll_fn(|cx| {
                    polls.fetch_add(1, Ordering::Relaxed);
                    wait.as_mut().poll(cx)
                });
                counted.await.unwrap().answered(&Signal::default());
            })
        })
        .collect();
    for call in calls {
        soon(call).await.unwrap();
    }
    let polls = polls.load(Ordering::Relaxed);
    // One clone when the request joins, one when its turn has come.
    assert!(polls <= 2 * CALLS + 2, "{polls} polls for {CALLS} turns");
}

#[tokio::test(start_paused = true)]
async fn release_ends_an_upstream_hold_for_waiters() {
    let upstream = Upstream::answering([limited("3600")]);
    let layer = AdaptiveThrottleLayer::builder()
        .max_wait(ms(7_200_000))
        .build()
        .unwrap();
    let (service, throttle) = (layer.layer(upstream.clone()), layer.throttle());
    assert_eq!(
        service.clone().oneshot(get("/")).await.unwrap().status(),
        429
    );
    let start = now();
    let calls: Vec<_> = (0..3)
        .map(|_| tokio::spawn(service.clone().oneshot(get("/"))))
        .collect();
    pass(ms(1000)).await;
    assert_eq!((throttle.waiting(Key::ALL), upstream.count()), (3, 1));
    throttle.release(Key::ALL).await.unwrap();
    for call in calls {
        assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
    }
    assert!(now() - start < ms(60_000), "{:?}", now() - start);
    // A later hold applies.
    let held = now();
    throttle.hold_for(Key::ALL, ms(30_000)).await.unwrap();
    soon(service.clone().oneshot(get("/"))).await.unwrap();
    assert!(now() - held >= ms(30_000), "{:?}", now() - held);
}

#[tokio::test(start_paused = true)]
async fn manual_holds_beyond_max_keys_are_errors() {
    let layer = AdaptiveThrottleLayer::builder()
        .max_keys(1)
        .build()
        .unwrap();
    let throttle = layer.throttle();
    let _used = throttle.acquire(Key::new("a")).await.unwrap();
    let error = throttle
        .hold_for(Key::new("b"), ms(1000))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Full { max_keys: 1 }), "{error}");
    assert_eq!(throttle.stats().holds().total(), 0, "nothing is on hold");
    throttle.release(Key::new("b")).await.unwrap();
}

/// Other processes may hold the key, and there is no room to tell them.
#[tokio::test(start_paused = true)]
async fn releases_beyond_max_keys_are_not_reported() {
    let released = Arc::new(AtomicUsize::new(0));
    let count = released.clone();
    let builder = AdaptiveThrottleLayer::builder().max_keys(1);
    let builder = builder.store(Arc::new(MemoryStore::default()));
    let layer = builder.on_event(move |event| {
        let is_release = matches!(event, Event::Released { .. });
        count.fetch_add(usize::from(is_release), Ordering::Relaxed);
    });
    let throttle = layer.build().unwrap().throttle();
    let _used = throttle.acquire(Key::new("a")).await.unwrap();
    let error = throttle.release(Key::new("b")).await.unwrap_err();
    assert!(matches!(error, StoreError::Full { max_keys: 1 }), "{error}");
    assert_eq!(released.load(Ordering::Relaxed), 0, "nothing was released");
    throttle.release(Key::new("a")).await.unwrap();
    assert_eq!(released.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn manual_hold_applies_to_throttle_without_a_pace() {
    let layer = AdaptiveThrottleLayer::builder()
        .pace(|| NoPacing)
        .build()
        .unwrap();
    let throttle = layer.throttle();
    throttle.hold_for(Key::ALL, ms(2000)).await.unwrap();
    throttle.hold_for(Key::ALL, ms(1000)).await.unwrap();
    let start = now();
    throttle
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&Signal::default());
    assert!((2000..=2002).contains(&(now() - start).as_millis()));
}

/// A service that counts its clones.
struct Cloned(Upstream, Arc<AtomicUsize>);

impl Clone for Cloned {
    fn clone(&self) -> Self {
        self.1.fetch_add(1, Ordering::Relaxed);
        Cloned(self.0.clone(), self.1.clone())
    }
}

impl Service<http::Request<String>> for Cloned {
    type Response = <Upstream as Service<http::Request<String>>>::Response;
    type Error = <Upstream as Service<http::Request<String>>>::Error;
    type Future = <Upstream as Service<http::Request<String>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<http::Request<String>>::poll_ready(&mut self.0, cx)
    }

    fn call(&mut self, request: http::Request<String>) -> Self::Future {
        self.0.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn the_service_is_cloned_only_for_retries() {
    let clones = Arc::new(AtomicUsize::new(0));
    let inner = || Cloned(Upstream::new(), clones.clone());
    let layer = AdaptiveThrottleLayer::builder()
        .pace(|| NoPacing)
        .build()
        .unwrap();
    let mut service = layer.layer(inner());
    for _ in 0..3 {
        service.ready().await.unwrap().call(get("/")).await.unwrap();
    }
    assert_eq!(clones.load(Ordering::Relaxed), 0);
    let mut service = layer.retrying().layer(inner());
    service.ready().await.unwrap().call(get("/")).await.unwrap();
    assert_eq!(clones.load(Ordering::Relaxed), 1, "for the next attempt");
}

/// A service that gets ready at a moment.
#[derive(Clone)]
struct ReadyAt(Upstream, Instant);

impl Service<http::Request<String>> for ReadyAt {
    type Response = <Upstream as Service<http::Request<String>>>::Response;
    type Error = <Upstream as Service<http::Request<String>>>::Error;
    type Future = <Upstream as Service<http::Request<String>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        let left = self.1.saturating_duration_since(now());
        if left.is_zero() {
            return Poll::Ready(Ok(()));
        }
        let waker = cx.waker().clone();
        tokio::spawn(async move {
            tokio::time::sleep(left).await;
            waker.wake();
        });
        Poll::Pending
    }

    fn call(&mut self, request: http::Request<String>) -> Self::Future {
        self.0.call(request)
    }
}

/// Sends a request that waits until 100 ms for its turn, through a service that gets ready at 500 ms.
fn late_request(
    layer: &AdaptiveThrottleLayer,
    upstream: &Upstream,
    request: http::Request<String>,
) -> tokio::task::JoinHandle<Result<http::Response<String>, Error>> {
    let mut service = layer.layer(ReadyAt(upstream.clone(), now() + ms(500)));
    let call = service.call(request);
    tokio::spawn(call)
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_obeyed_while_the_inner_service_gets_ready() {
    let upstream = Upstream::new();
    let layer = every(100);
    let throttle = layer.throttle();
    let hold = |until| throttle.hold_for(Key::ALL, ms(until));
    hold(100).await.unwrap();
    let first = late_request(&layer, &upstream, get("/first"));
    let second = late_request(&layer, &upstream, get("/second"));
    tokio::time::sleep(ms(300)).await;
    hold(700).await.unwrap();
    for call in [first, second] {
        assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(upstream.arrivals(), [1000, 1100]);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_is_kept_while_the_inner_service_gets_ready() {
    let upstream = Upstream::new();
    let layer = every(100);
    let throttle = layer.throttle();
    throttle.hold_for(Key::ALL, ms(100)).await.unwrap();
    let mut request = get("/");
    request
        .extensions_mut()
        .insert(Deadline::at(now() + ms(300)));
    let call = late_request(&layer, &upstream, request);
    let error = soon(call).await.unwrap().unwrap_err();
    assert_eq!(reason(&error), Some(Reason::Deadline));
    assert!(upstream.arrivals().is_empty());
    let next = throttle.acquire(Key::ALL).await.unwrap();
    assert_eq!(throttle.stats().waiting(), 0);
    next.give_back();
}

#[tokio::test(start_paused = true)]
async fn turns_that_come_during_a_drain_leave() {
    let upstream = Upstream::new();
    let layer = every(100);
    let throttle = layer.throttle();
    throttle.hold_for(Key::ALL, ms(100)).await.unwrap();
    // The inner service is ready at 500 ms.
    let call = late_request(&layer, &upstream, get("/"));
    settle().await;
    let drained = throttle.drain(ms(1000)).await.unwrap();
    assert_eq!((drained.left, drained.refused), (1, 0));
    assert_eq!(soon(call).await.unwrap().unwrap().status(), 200);
    assert_eq!(upstream.arrivals(), [500]);
    assert_eq!(throttle.stats().requests().waited, 1);
}

#[tokio::test(start_paused = true)]
async fn requests_ready_after_the_drain_are_refused() {
    let upstream = Upstream::new();
    let layer = every(100);
    let throttle = layer.throttle();
    throttle.hold_for(Key::ALL, ms(100)).await.unwrap();
    let call = late_request(&layer, &upstream, get("/"));
    settle().await;
    throttle.drain(ms(300)).await.unwrap();
    let error = soon(call).await.unwrap().unwrap_err();
    assert_eq!(reason(&error), Some(Reason::Draining));
    assert!(upstream.arrivals().is_empty());
    let requests = throttle.stats().requests();
    assert_eq!((requests.waited, requests.refused), (0, 1));
}
