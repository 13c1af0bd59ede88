//! Requests of several keys that are limited in rate and in flight: nothing of one limit is kept for the sake of
//! another. Under a paused clock.

use crate::support::Failing;
use crate::support::remote::Remote;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tollgate::{Key, Limiter, OnStoreError, Quota, RateLimitLayer};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn limiter(quota: Quota) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(600 * SECOND);
    builder.build().unwrap().limiter()
}

/// A limiter over a store that answers later.
fn remote_limiter(quota: Quota) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(600 * SECOND);
    let store = Arc::new(Remote::default());
    builder.store(store).build().unwrap().limiter()
}

/// Makes a call of `channel` that takes `span`, as one of `all`.
async fn call(all: Limiter, channels: Limiter, channel: &'static str, span: Duration) {
    let request = all
        .acquire(Key::ALL)
        .and(channels.acquire(Key::new(channel)));
    let _sent = request.await.unwrap().begin().unwrap();
    sleep(span).await;
}

/// Makes a call of a quiet channel, which does not wait. Returns when it began.
async fn quiet_call_leaves_at_once(all: &Limiter, channels: &Limiter) -> Instant {
    let start = Instant::now();
    call(all.clone(), channels.clone(), "quiet", MS).await;
    assert!(start.elapsed() < 50 * MS, "{:?}", start.elapsed());
    start
}

/// Returns how many calls `callers` make in a minute, one after the other, after a warm-up of ten seconds.
async fn made(all: Limiter, channels: Limiter, callers: usize, span: Duration) -> usize {
    let (from, end) = (Instant::now() + 10 * SECOND, Instant::now() + 70 * SECOND);
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (all, channels) = (all.clone(), channels.clone());
        tasks.spawn(async move {
            let mut made = 0;
            while Instant::now() < end {
                call(all.clone(), channels.clone(), "one", span).await;
                made += usize::from((from..end).contains(&Instant::now()));
            }
            made
        });
    }
    tasks.join_all().await.into_iter().sum()
}

/// 20 requests wait for the rate of one channel. None of them keeps one of the 20 in-flight slots of all channels.
#[tokio::test(start_paused = true)]
async fn waiters_of_a_rate_keep_no_in_flight_slot() {
    let (all, channels) = (limiter(Quota::in_flight(20)), limiter(Quota::per_second(1)));
    let mut busy = JoinSet::new();
    for _ in 0..21 {
        busy.spawn(call(all.clone(), channels.clone(), "busy", MS));
    }
    sleep(SECOND / 2).await;
    let start = quiet_call_leaves_at_once(&all, &channels).await;
    busy.join_all().await;
    assert!(start.elapsed() < 21 * SECOND, "{:?}", start.elapsed());
}

/// The in-flight slots are all in use when the rate lets requests leave, so these wait for one. When they have it, the
/// rate may be far away: then they give it up.
#[tokio::test(start_paused = true)]
async fn far_rates_return_in_flight_slots() {
    far_rates_return_slots_of(limiter(Quota::per_second(1))).await;
}

/// The same if the answer that the rate is far away comes later.
#[tokio::test(start_paused = true)]
async fn far_rates_of_a_late_store_return_in_flight_slots() {
    far_rates_return_slots_of(remote_limiter(Quota::per_second(1))).await;
}

async fn far_rates_return_slots_of(channels: Limiter) {
    const SLOW: [&str; 5] = ["a", "b", "c", "d", "e"];
    let all = limiter(Quota::in_flight(5));
    let mut calls = JoinSet::new();
    for channel in SLOW {
        calls.spawn(call(all.clone(), channels.clone(), channel, 5 * SECOND));
    }
    sleep(MS).await;
    for _ in 0..30 {
        calls.spawn(call(all.clone(), channels.clone(), "busy", MS));
    }
    sleep(6 * SECOND).await;
    let start = quiet_call_leaves_at_once(&all, &channels).await;
    calls.join_all().await;
    assert!(start.elapsed() < 31 * SECOND, "{:?}", start.elapsed());
}

/// The same the other way round: requests that wait for an in-flight slot of their channel keep no unit of the rate of
/// all channels.
#[tokio::test(start_paused = true)]
async fn waiters_of_an_in_flight_slot_keep_no_unit() {
    let all = limiter(Quota::new(4, 60 * SECOND));
    let channels = limiter(Quota::in_flight(1));
    let mut busy = JoinSet::new();
    for _ in 0..10 {
        busy.spawn(call(all.clone(), channels.clone(), "busy", 20 * SECOND));
    }
    sleep(SECOND).await;
    assert_eq!(all.peek(Key::ALL).await.unwrap().limits[0].used, 1);
    let start = Instant::now();
    for channel in ["a", "b", "c"] {
        call(all.clone(), channels.clone(), channel, MS).await;
    }
    assert!(start.elapsed() < 50 * MS, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn both_limits_are_used_up_whichever_is_scarce() {
    both_limits_are_used_up(limiter).await;
}

#[tokio::test(start_paused = true)]
async fn both_limits_are_used_up_in_a_late_store() {
    both_limits_are_used_up(remote_limiter).await;
}

async fn both_limits_are_used_up(limiter: fn(Quota) -> Limiter) {
    let made_of = async |in_flight, rate, span| {
        let all = limiter(Quota::in_flight(in_flight));
        made(all, limiter(Quota::per_second(rate)), 20, span).await
    };
    // Four calls a second are allowed: two at a time, each of half a second.
    let made = made_of(2, 10, SECOND / 2).await;
    assert!((4 * 60 * 97 / 100..=4 * 60 + 4).contains(&made), "{made}");
    // One a second: the rate.
    let made = made_of(8, 1, 5 * SECOND).await;
    assert!((60 * 97 / 100..=62).contains(&made), "{made}");
}

/// While the store answers a claim, the request keeps the slots that are due. The next ones of a bucket are behind those
/// of all others.
#[tokio::test(start_paused = true)]
async fn slots_are_kept_while_a_late_store_claims() {
    let all = remote_limiter(Quota::in_flight(4));
    let channels = remote_limiter(Quota::every(SECOND / 4));
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..12 {
        calls.spawn(call(all.clone(), channels.clone(), "one", MS));
    }
    calls.join_all().await;
    assert!(start.elapsed() < 4 * SECOND, "{:?}", start.elapsed());
}

/// An in-flight slot goes to the request that came first, also if the later one had its rate first.
#[tokio::test(start_paused = true)]
async fn in_flight_slots_go_to_the_request_that_came_first() {
    let (all, channels) = (limiter(Quota::in_flight(1)), limiter(Quota::per_second(10)));
    let blocks = tokio::spawn(call(all.clone(), channels.clone(), "one", SECOND));
    sleep(MS).await;
    let mut order = JoinSet::new();
    for (number, channel) in ["two", "one", "three", "two"].into_iter().enumerate() {
        let called = call(all.clone(), channels.clone(), channel, MS);
        order.spawn(async move {
            called.await;
            number
        });
        sleep(MS).await;
    }
    blocks.await.unwrap();
    let mut left = Vec::new();
    while let Some(number) = order.join_next().await {
        left.push(number.unwrap());
    }
    assert_eq!(left, [0, 1, 2, 3]);
}

/// Eight requests wait for the end of the hold of one host. None of them keeps one of the eight in-flight slots of all
/// hosts.
#[tokio::test(start_paused = true)]
async fn waiters_of_a_held_host_stop_no_other_host() {
    use http::{Request, Response};
    use tower::{BoxError, Layer, ServiceExt, service_fn};

    let quota = Quota::per_second(100)
        .and(Quota::in_flight(8))
        .and(Quota::per_minute(1000).of("tokens"));
    let limit = RateLimitLayer::builder(quota)
        .charged_by_hand()
        .max_wait(600 * SECOND)
        .build();
    let service = limit
        .unwrap()
        .layer(service_fn(|request: Request<()>| async move {
            let refused = request.uri().path() == "/refused";
            let response = Response::builder().status(if refused { 429 } else { 200 });
            Ok::<_, BoxError>(response.header("retry-after", "30").body(())?)
        }));
    let send = |uri: &str| {
        let request = Request::get(uri).body(()).unwrap();
        service.clone().oneshot(request)
    };
    send("http://other/").await.unwrap();
    send("http://held/refused").await.unwrap();
    let mut waiters = JoinSet::new();
    for _ in 0..8 {
        waiters.spawn(send("http://held/"));
    }
    sleep(SECOND).await;
    let start = Instant::now();
    send("http://other/").await.unwrap();
    assert!(start.elapsed() < 50 * MS, "{:?}", start.elapsed());
    assert_eq!(waiters.len(), 8);
    for sent in waiters.join_all().await {
        assert_eq!(sent.unwrap().status(), 200);
    }
}

/// A store that is away lets a request pass uncounted under one limit. The other one has its calls in flight there, and
/// does not fail open.
#[tokio::test(start_paused = true)]
async fn limits_that_fail_closed_let_none_pass_uncounted() {
    let store = Arc::new(Failing::away(false));
    let limiter = |quota, on_error| {
        let builder = RateLimitLayer::builder(quota).on_store_error(on_error);
        let layer = builder.store(store.clone()).build().unwrap();
        layer.limiter()
    };
    let rates = limiter(Quota::per_second(10), OnStoreError::FailOpen);
    for (on_error, passes) in [
        (OnStoreError::FailClosed, false),
        (OnStoreError::FailOpen, true),
    ] {
        let calls = limiter(Quota::in_flight(2), on_error);
        let request = rates
            .acquire(Key::ALL)
            .and(calls.acquire(Key::new("calls")));
        assert_eq!(request.await.is_ok(), passes, "{on_error:?}");
    }
}
