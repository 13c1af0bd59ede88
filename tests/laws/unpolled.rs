//! Futures that wait and are not polled delay the others by no more than the life of a permit. Under a paused clock.

use std::time::Duration;

use futures::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep, timeout};
use tollgate::limiter::Acquire;
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn limiter(quota: Quota, max_wait: Duration) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(max_wait);
    builder.build().unwrap().limiter()
}

/// Polls `count` requests once.
fn idle(count: usize, request: impl Fn() -> Acquire) -> Vec<Acquire> {
    let mut idle: Vec<_> = (0..count).map(|_| request()).collect();
    for request in &mut idle {
        assert!(request.now_or_never().is_none());
    }
    idle
}

/// Returns when the next request leaves behind `count` that are not polled.
async fn next_behind(count: usize, request: impl Fn() -> Acquire) -> Duration {
    drop(request().await.unwrap());
    let idle = idle(count, &request);
    let start = Instant::now();
    drop(request().await.unwrap());
    let took = start.elapsed();
    // They have kept their places.
    for idle in idle {
        drop(timeout(100 * SECOND, idle).await.unwrap().unwrap());
    }
    took
}

#[tokio::test(start_paused = true)]
async fn unpolled_waiters_lose_no_more_than_their_own_slots() {
    for (count, seconds) in [(1, 2.1), (3, 4.2), (10, 11.4)] {
        let one = limiter(Quota::per_second(1), 600 * SECOND);
        let took = next_behind(count, || one.acquire(Key::ALL)).await;
        assert!(took.as_secs_f64() < seconds, "{count}: {took:?}");
        let one = limiter(Quota::per_second(1), 600 * SECOND);
        let other = limiter(Quota::per_second(5), 600 * SECOND);
        let both = || one.acquire(Key::ALL).and(other.acquire(Key::ALL));
        let took = next_behind(count, both).await;
        assert!(took.as_secs_f64() < seconds, "{count}, two keys: {took:?}");
    }
}

/// Only the first waiters have timers for their slots. If none of them is polled, those behind them go on nevertheless.
#[tokio::test(start_paused = true)]
async fn waiters_behind_a_long_row_of_unpolled_ones_go_on() {
    for count in [63, 64, 70, 90] {
        let limiter = limiter(Quota::per_second(1), 600 * SECOND);
        let took = next_behind(count, || limiter.acquire(Key::ALL)).await;
        let slots = 1.04 * (count + 1) as f64;
        assert!(took.as_secs_f64() < slots, "{count}: {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn in_flight_slots_of_unpolled_waiters_go_on() {
    for count in [1, 10] {
        let limiter = limiter(Quota::in_flight(1), 60 * SECOND);
        let first = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
        let idle = idle(count, || limiter.acquire(Key::ALL));
        drop(first);
        let start = Instant::now();
        let next = limiter.acquire(Key::ALL).await.unwrap();
        let most = (100 * count as u32 + 10) * MS;
        assert!(start.elapsed() < most, "{count}: {:?}", start.elapsed());
        // The idle ones are before it again, once they are polled.
        let idle = idle
            .into_iter()
            .map(|idle| async { drop(idle.await.unwrap()) });
        let mut idle = futures::future::join_all(idle);
        assert!((&mut idle).now_or_never().is_none());
        drop(next);
        let last = tokio::spawn(limiter.acquire(Key::ALL));
        idle.await;
        drop(last.await.unwrap().unwrap());
    }
}

/// Meanwhile its slot goes to the next request, all calls of its key end, and another key takes the room.
#[tokio::test(start_paused = true)]
async fn unpolled_waiters_of_an_evicted_key_wait_on() {
    let builder = RateLimitLayer::builder(Quota::in_flight(1)).max_keys(1);
    let limiter = builder.max_wait(60 * SECOND).build().unwrap().limiter();
    let key = Key::new("one");
    let first = limiter.acquire(key).await.unwrap().begin().unwrap();
    let idle = idle(1, || limiter.acquire(key)).remove(0);
    let next = tokio::spawn(limiter.acquire(key));
    sleep(MS).await;
    drop(first);
    drop(next.await.unwrap().unwrap());
    drop(limiter.acquire(Key::new("other")).await.unwrap());
    drop(idle.await.unwrap());
}

/// The loop over a buffered stream makes a request for each item. Meanwhile it does not poll the stream.
#[tokio::test(start_paused = true)]
async fn loops_over_buffered_requests_make_requests_too() {
    let limiter = limiter(Quota::in_flight(2), 15 * SECOND);
    let one = async |number: u32| {
        let _sent = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
        sleep(50 * MS).await;
        number
    };
    let start = Instant::now();
    let mut stream = std::pin::pin!(futures::stream::iter(0..6).map(one).buffer_unordered(4));
    let mut items = 0;
    while stream.next().await.is_some() {
        items += 1;
        drop(limiter.acquire(Key::ALL).await.unwrap());
    }
    assert_eq!(items, 6);
    assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
}
