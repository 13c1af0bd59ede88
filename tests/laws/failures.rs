//! Real bugs of other limiters, each as a property of tollgate. Under a paused clock.
//!
//! Bugs of a single component are tested beside it; these tests need the whole limiter.

use crate::support::counted;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use counted::{Counted, largest_count};
use futures::FutureExt;
use futures::future::join_all;
use tokio::time::{Instant, advance, sleep, sleep_until};
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

const HOUR: Duration = Duration::from_secs(3600);

fn limiter(quota: Quota) -> Limiter {
    RateLimitLayer::builder(quota)
        .max_wait(HOUR * 10)
        .max_queue(100_000)
        .build()
        .unwrap()
        .limiter()
}

fn key() -> Key {
    Key::new("key")
}

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// Runs `tasks` tasks that acquire `each` permits each; returns the moments at which these were
/// granted.
async fn moments(limiter: &Limiter, tasks: usize, each: usize) -> Vec<Instant> {
    let moments = Arc::new(Mutex::new(Vec::new()));
    let tasks = (0..tasks).map(|_| {
        let (limiter, moments) = (limiter.clone(), moments.clone());
        tokio::spawn(async move {
            for _ in 0..each {
                drop(limiter.acquire(key()).await.unwrap());
                moments.lock().unwrap().push(Instant::now());
            }
        })
    });
    join_all(tasks)
        .await
        .into_iter()
        .for_each(|ended| ended.unwrap());
    let moments = moments.lock().unwrap();
    moments.clone()
}

/// See bucket4j#501: requests for one key in one batch are counted one by one.
#[tokio::test(start_paused = true)]
async fn a_batch_takes_no_more_than_the_capacity() {
    let quota = Quota::bucket(4).refill(1, HOUR);
    let limiter = RateLimitLayer::builder(quota)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap()
        .limiter();
    let granted = join_all((0..20).map(|_| limiter.acquire(key())))
        .await
        .into_iter()
        .filter(Result::is_ok)
        .count();
    assert_eq!(
        granted,
        4 - 1,
        "all but what the margin may cost of a bucket"
    );
}

/// See redisson#2072, celery#4954: the first calls after the start are counted like all others.
#[tokio::test(start_paused = true)]
async fn the_first_acquires_of_a_new_limiter_are_counted() {
    let moments = moments(&limiter(Quota::per_second(3)), 30, 1).await;
    assert_eq!(largest_count(&moments, Duration::from_secs(1)), 3);
}

/// See cadence#6030: cancelling the last reservation brings no waiter closer to the one before.
#[tokio::test(start_paused = true)]
async fn cancelled_last_waiter_keeps_the_interval_for_the_next() {
    let limiter = limiter(Quota::every(Duration::from_secs(1)));
    drop(limiter.acquire(key()).await.unwrap());
    let mut pending = Box::pin(limiter.acquire(key()));
    let mut last = Box::pin(limiter.acquire(key()));
    assert!(pending.as_mut().now_or_never().is_none());
    assert!(last.as_mut().now_or_never().is_none());
    drop(last);
    let mut next = Box::pin(limiter.acquire(key()));
    assert!(next.as_mut().now_or_never().is_none());
    drop(pending.await.unwrap());
    let went = Instant::now();
    drop(next.await.unwrap());
    assert!(
        went.elapsed() >= Duration::from_secs(1),
        "{:?}",
        went.elapsed()
    );
    assert!(went.elapsed() <= millis(1035), "{:?}", went.elapsed());
}

/// See redisson#7329: a unit that was returned after it expired is not counted back twice.
#[tokio::test(start_paused = true)]
async fn returned_permits_never_raise_free_units_above_limit() {
    for quota in [
        Quota::per_second(5),
        Quota::bucket(5).refill(5, Duration::from_secs(1)),
    ] {
        let limiter = limiter(quota);
        let mut permits = Vec::new();
        for _ in 0..4 {
            permits.push(limiter.acquire(key()).await.unwrap());
        }
        advance(Duration::from_secs(10)).await; // the units they took have expired
        for _ in 0..5 {
            assert!(limiter.peek(key()).await.unwrap().free <= 5);
            if let Some(permit) = permits.pop() {
                permit.give_back();
            }
        }
        assert_eq!(limiter.peek(key()).await.unwrap().free, 5, "{quota}");
    }
}

/// See smithy-rs#4632: many requests compete for few permits. A refused request takes nothing, no
/// wait is long, and the full rate is available after the rush.
#[tokio::test(start_paused = true)]
async fn a_rush_of_refused_asks_costs_nothing() {
    let layer = RateLimitLayer::builder(Quota::per_second(2))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    for _ in 0..20 {
        let ended = join_all((0..60).map(|_| limiter.acquire(key()))).await;
        for refused in ended.iter().filter_map(|ended| ended.as_ref().err()) {
            // The window, its margin, and the wait of the request before.
            assert!(refused.retry_after().unwrap() <= millis(1060), "{refused}");
        }
        sleep(millis(100)).await;
    }
    sleep(millis(1060)).await;
    assert_eq!(limiter.peek(key()).await.unwrap().free, 2);
}

/// See redisson#3804: two hours of load lose nothing of the rate.
#[tokio::test(start_paused = true)]
async fn the_rate_does_not_drift_in_two_hours() {
    let limiter = limiter(Quota::per_second(3).burst(2));
    let start = Instant::now();
    let end = start + 2 * HOUR;
    // Seven callers in closed loops, one of which gives up now and then.
    let counted = Arc::new(Mutex::new((0u32, 0u32)));
    let tasks = (0..7u64).map(|caller| {
        let (limiter, counted) = (limiter.clone(), counted.clone());
        tokio::spawn(async move {
            for turn in 0.. {
                if Instant::now() >= end {
                    break;
                }
                let acquire = limiter.acquire(key());
                if caller == 0 && turn % 3 == 0 {
                    if tokio::time::timeout(millis(50), acquire).await.is_err() {
                        continue;
                    }
                } else {
                    drop(acquire.await.unwrap());
                }
                let mut counted = counted.lock().unwrap();
                counted.0 += 1;
                counted.1 += u32::from(Instant::now() >= end - HOUR);
            }
        })
    });
    join_all(tasks)
        .await
        .into_iter()
        .for_each(|ended| ended.unwrap());
    let (calls, in_last_hour) = *counted.lock().unwrap();
    let an_hour = 3.0 * 3600.0 / 1.02;
    assert!(
        f64::from(calls) >= 0.99 * 2.0 * an_hour,
        "{calls} of {}",
        2.0 * an_hour
    );
    assert!(
        f64::from(in_last_hour) >= 0.99 * an_hour,
        "{in_last_hour} of {an_hour} in the last hour"
    );
}

/// See limits#268: a daily limit of 70,000 costs as little as a small one.
#[tokio::test(start_paused = true)]
async fn large_daily_limit_costs_no_more_than_small_limit() {
    let limiter = limiter(Quota::per_day(70_000));
    let (mut allocated, mut bytes) = (0, 0);
    for _ in 0..70_000 {
        let spent = allocation_counter::measure(|| {
            drop(limiter.acquire(key()).now_or_never().unwrap().unwrap())
        });
        allocated += spent.count_total;
        bytes += spent.bytes_current;
        advance(millis(1)).await;
    }
    assert_eq!(limiter.peek(key()).await.unwrap().free, 0);
    assert!(
        bytes <= 8192 && allocated < 50,
        "{bytes} bytes kept in {allocated} allocations"
    );
}

/// See rolling-rate-limiter#15: many waiters for one moment do not wake all at once.
#[tokio::test(start_paused = true)]
async fn two_hundred_waiters_of_one_window_are_no_herd() {
    let limiter = limiter(Quota::per_second(20).burst(5));
    drop(limiter.acquire(key()).cost(5).await.unwrap());
    let moments = moments(&limiter, 200, 1).await;
    assert_eq!(
        largest_count(&moments, millis(40)),
        5,
        "the burst, and not more"
    );
    assert_eq!(largest_count(&moments, Duration::from_secs(1)), 20);
}

/// 100 per window as the upstream counts, whatever the phase of its windows and however late a
/// permit is used.
#[tokio::test(start_paused = true)]
async fn permits_used_late_put_no_window_over_limit() {
    let limiter = limiter(Quota::per_second(100));
    let moments = Arc::new(Mutex::new(Vec::new()));
    let tasks = (0..1000u64).map(|number| {
        let (limiter, moments) = (limiter.clone(), moments.clone());
        tokio::spawn(async move {
            let permit = limiter.acquire(key()).await.unwrap();
            // Some requests use their permit at once, some at its end, and transit takes up to 10
            // ms more.
            let late = if number % 2 == 0 {
                permit.deadline().map(Instant::from_std)
            } else {
                None
            };
            sleep_until(late.unwrap_or(Instant::now()) - millis(u64::from(number % 2 == 0))).await;
            sleep(millis(number * 7 % 9)).await;
            moments.lock().unwrap().push(Instant::now());
        })
    });
    join_all(tasks)
        .await
        .into_iter()
        .for_each(|ended| ended.unwrap());
    assert_eq!(
        largest_count(&moments.lock().unwrap(), Duration::from_secs(1)),
        100
    );
}

/// A peer made 495 wake-ups a grant at 1000 waiters: here one wake-up serves all of them, at any
/// rate.
#[tokio::test(start_paused = true)]
async fn a_line_at_a_high_rate_wakes_each_once() {
    let limiter = limiter(Quota::per_second(1000).burst(50));
    let (futures, polls): (Vec<_>, Vec<_>) = (0..5000)
        .map(|_| Counted::new(limiter.acquire(key())))
        .unzip();
    let tasks: Vec<_> = futures
        .into_iter()
        .map(|future| tokio::spawn(async { drop(future.await.unwrap()) }))
        .collect();
    join_all(tasks)
        .await
        .into_iter()
        .for_each(|ended| ended.unwrap());
    let most = polls
        .iter()
        .map(|polls| polls.load(Ordering::Relaxed))
        .max();
    assert_eq!(most, Some(2));
}
