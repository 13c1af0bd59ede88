//! A caller that sends at exactly the rate of its limit: each request comes when the window of the last one ends, and
//! the margin is all that stops it. Under a paused clock.

use std::convert::Infallible;
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{Instant, sleep, sleep_until};
use tollgate::limiter::Verdict;
use tollgate::{Key, Limiter, Quota, RateLimitBuilder, RateLimitLayer, Reason};
use tower::{Layer, Service, service_fn};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const REQUESTS: u32 = 600;

fn builder(quota: Quota, max_wait: Duration) -> RateLimitBuilder {
    RateLimitLayer::builder(quota).max_wait(max_wait)
}

fn without_wait(quota: Quota) -> Limiter {
    let layer = builder(quota, Duration::ZERO).build().unwrap();
    layer.limiter()
}

/// Sends a request each second, with a timer that is late by up to `jitter`. Returns how many of a hundred left.
/// No two of them may arrive within a second at a server that sees each of them up to `slack` later.
async fn per_cent_sent(
    slack: Duration,
    jitter: Duration,
    mut send: impl AsyncFnMut() -> bool,
) -> f64 {
    let start = Instant::now();
    let mut last: Option<Instant> = None;
    let mut sent = 0;
    for number in 0..REQUESTS {
        // Evenly spread, in no order.
        let late = f64::from(number.wrapping_mul(0x9e37_79b9) >> 8) / f64::from(1 << 24);
        sleep_until(start + number * SECOND + jitter.mul_f64(late)).await;
        if send().await {
            let now = Instant::now();
            let since = last.replace(now).map(|last| now - last);
            assert!(
                since.is_none_or(|since| since >= SECOND + slack),
                "{since:?}"
            );
            sent += 1;
        }
    }
    f64::from(sent) * 100.0 / f64::from(REQUESTS)
}

/// See PyrateLimiter#125: 6 of 10 passed.
#[tokio::test(start_paused = true)]
async fn callers_at_exactly_the_rate_lose_what_max_wait_cannot_hold() {
    const SLACK: Duration = Duration::from_millis(10);
    for quota in [Quota::per_second(1), Quota::every(SECOND)] {
        for (max_wait, slack, least) in [
            (Duration::ZERO, SLACK, 66.6),
            (100 * MS, SLACK, 80.0),
            (400 * MS, SLACK, 93.0),
            (600 * MS, SLACK, 95.0),
            (15 * SECOND, SLACK, 99.8),
            (Duration::ZERO, Duration::ZERO, 66.6),
            (400 * MS, Duration::ZERO, 95.0),
        ] {
            for jitter in [Duration::ZERO, 2 * MS] {
                let layer = || {
                    builder(quota, max_wait)
                        .transit_slack(slack)
                        .build()
                        .unwrap()
                };
                let limiter = layer().limiter();
                let by_hand = async || limiter.acquire(Key::ALL).await.is_ok();
                let server =
                    service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(())) });
                let mut service = layer().layer(server);
                let by_layer = async || service.call(Request::new(())).await.is_ok();
                for sent in [
                    per_cent_sent(slack, jitter, by_hand).await,
                    per_cent_sent(slack, jitter, by_layer).await,
                ] {
                    assert!(
                        sent >= least,
                        "{quota}, max_wait {max_wait:?}, transit_slack {slack:?}, jitter {jitter:?}: {sent} %"
                    );
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_name_the_margin_and_are_immediate() {
    let limiter = without_wait(Quota::per_second(1));
    let start = Instant::now();
    for _ in 0..2 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
        sleep_until(start + SECOND).await;
    }
    sleep_until(start + 2 * SECOND).await;
    let explanation = limiter.explain(Key::ALL).await.unwrap();
    assert!(
        matches!(explanation.verdict, Verdict::Refused { .. }),
        "{explanation}"
    );
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    assert_eq!(Instant::now(), start + 2 * SECOND);
    // The margin is 30 ms, and the caller's timer may be 10 ms late.
    assert_eq!(
        refused.reason(),
        Some(Reason::MaxWait(40 * MS)),
        "{refused}"
    );
    assert_eq!(refused.retry_after(), Some(60 * MS), "{refused}");
    sleep(20 * MS).await;
    let explanation = limiter.explain(Key::ALL).await.unwrap();
    assert!(
        matches!(explanation.verdict, Verdict::Waits { .. }),
        "{explanation}"
    );
    let late = limiter
        .acquire(Key::ALL)
        .deadline(std::time::Instant::now());
    assert_eq!(late.await.unwrap_err().reason(), Some(Reason::Deadline));
}

/// A program that sends until it is refused is refused, after a margin at most.
#[tokio::test(start_paused = true)]
async fn loops_without_max_wait_end() {
    let window = Duration::from_millis;
    for (quota, longest) in [
        (Quota::per_second(1), 40 * MS),
        (Quota::per_second(20), 30 * MS),
        (Quota::per_second(20).and(Quota::per_minute(600)), 30 * MS),
        (Quota::every(window(100)), 30 * MS),
        (Quota::per_second(100), Duration::ZERO),
        (Quota::new(5, window(100)), Duration::ZERO),
        (Quota::every(window(20)), Duration::ZERO),
        (Quota::bucket(3).refill(1, window(25)), Duration::ZERO),
        (
            Quota::per_second(1).and(Quota::bucket(3).refill(1, window(25))),
            Duration::ZERO,
        ),
        (Quota::fixed(5, window(1000)), Duration::ZERO),
    ] {
        let layer = builder(quota, Duration::ZERO).max_rate_loss(50).build();
        let limiter = layer.unwrap().limiter();
        let limit = quota.limits()[0];
        for round in 0..200 {
            // Now and then, requests come at exactly the rate.
            sleep(if round % 5 == 0 {
                SECOND
            } else {
                limit.window() / limit.count()
            })
            .await;
            let start = Instant::now();
            let mut sent = 0;
            while limiter.acquire(Key::ALL).await.is_ok() {
                sent += 1;
                assert!(sent <= 101, "{quota}: {sent} in round {round}");
            }
            assert!(
                start.elapsed() <= longest,
                "{quota}: {:?} in round {round}",
                start.elapsed()
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn in_flight_slots_are_not_awaited_without_max_wait() {
    let limiter = without_wait(Quota::per_second(2).and(Quota::in_flight(1)));
    let first = limiter.acquire(Key::ALL).await.unwrap();
    let start = Instant::now();
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    assert_eq!(Instant::now(), start, "{refused}");
    drop(first);
}
