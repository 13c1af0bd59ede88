//! The limiter without HTTP: order, wake-ups, cancellation, bounds. Under a paused clock.

use crate::support::counted;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use counted::{Counted, largest_count};
use futures::FutureExt;
use futures::future::join_all;
use tokio::time::{Instant, advance, sleep};
use tollgate::store::MemoryStore;
use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer, Reason};

const HOUR: Duration = Duration::from_secs(3600);

fn limiter(quota: Quota) -> Limiter {
    RateLimitLayer::builder(quota)
        .max_wait(HOUR)
        .build()
        .unwrap()
        .limiter()
}

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

trait Spend {
    fn spend(self);
}

impl Spend for Permit {
    /// A permit that is dropped counts as spent.
    fn spend(self) {}
}

fn key() -> Key {
    Key::new("key")
}

/// Joins the queue now: a task is polled when it is spawned, so the order of calls is the order in
/// the queue.
async fn enter(
    limiter: &Limiter,
    done: &Arc<Mutex<Vec<(usize, Instant)>>>,
    number: usize,
) -> tokio::task::JoinHandle<Permit> {
    let (acquire, done) = (limiter.acquire(key()), done.clone());
    let task = tokio::spawn(async move {
        let permit = acquire.await.unwrap();
        done.lock().unwrap().push((number, Instant::now()));
        permit
    });
    tokio::task::yield_now().await;
    task
}

#[tokio::test(start_paused = true)]
async fn thousand_waiters_go_in_order_with_one_wake_each() {
    let limiter = limiter(Quota::per_second(50));
    let start = Instant::now();
    let mut tasks = Vec::new();
    let mut counts = Vec::new();
    let order = Arc::new(Mutex::new(Vec::new()));
    for number in 0..1050 {
        let (acquire, polls) = Counted::new(limiter.acquire(key()));
        let order = order.clone();
        tasks.push(tokio::spawn(async move {
            acquire.await.unwrap().spend();
            order.lock().unwrap().push((number, Instant::now()));
        }));
        counts.push(polls);
        tokio::task::yield_now().await;
    }
    join_all(tasks).await;

    let order = order.lock().unwrap();
    assert!(
        order.iter().map(|(number, _)| *number).eq(0..1050),
        "first come, first served"
    );
    let polls: Vec<usize> = counts
        .iter()
        .map(|polls| polls.load(Ordering::Relaxed))
        .collect();
    assert_eq!(
        polls[..50],
        [1; 50],
        "requests without a wait are polled once"
    );
    assert!(
        polls[50..].iter().all(|polls| *polls == 2),
        "one wake-up a waiter: {polls:?}"
    );

    let moments: Vec<Instant> = order.iter().map(|(_, at)| *at).collect();
    assert_eq!(largest_count(&moments, Duration::from_secs(1)), 50);
    let allowed = Duration::from_micros(20 * 1_020_000);
    assert!(
        start.elapsed() <= allowed + millis(10),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn one_per_second_sends_once_per_second_plus_margin() {
    let limiter = limiter(Quota::per_second(1));
    let done = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for number in 0..20 {
        tasks.push(enter(&limiter, &done, number).await);
    }
    join_all(tasks).await;
    for (number, at) in done.lock().unwrap().iter() {
        let expected = millis(1030) * *number as u32;
        let late = (*at - start) - expected;
        assert!(
            late <= millis(2) * (1 + *number as u32),
            "number {number} at {:?}",
            *at - start
        );
    }
}

/// One of six waiters is dropped: before its first poll, after one poll, or after its slot was
/// assigned but before it saw that. In each case the other waiters get every slot, in order.
#[tokio::test(start_paused = true)]
async fn waiter_cancelled_after_any_poll_frees_its_slot() {
    for victim in 0..6 {
        for polls in 0..3 {
            let limiter = limiter(Quota::per_second(2));
            let start = Instant::now();
            let done = Arc::new(Mutex::new(Vec::new()));
            let mut tasks = Vec::new();
            let mut cancelled = Box::pin(limiter.acquire(key()));
            let mut spent = false;
            for number in 0..6 {
                if number != victim {
                    tasks.push(enter(&limiter, &done, number).await);
                } else if polls > 0 {
                    spent = cancelled.as_mut().now_or_never().is_some();
                }
            }
            if polls == 2 {
                sleep(millis(1030 * (victim as u64 / 2) + 1)).await;
            }
            drop(cancelled);
            join_all(tasks).await;
            let done = done.lock().unwrap();
            assert_eq!(done.len(), 5);
            assert!(done.is_sorted_by_key(|(number, _)| *number), "{done:?}");
            assert!(
                start.elapsed() <= millis(2 * 1030 + 15),
                "victim {victim} after {polls} polls: {:?}",
                start.elapsed()
            );
            // Without the cancelled waiter the fifth goes with the fourth; with its slot lost it
            // would be a window later.
            if !spent && polls < 2 {
                assert!(done[4].1 - start <= millis(2 * 1030 + 10), "{done:?}");
                assert!(done[3].1 - start <= millis(1030 + 10), "{done:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn queue_loses_no_slot_when_a_tenth_cancels() {
    let limiter = limiter(Quota::per_second(10));
    let done = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for number in 0..200 {
        tasks.push(enter(&limiter, &done, number).await);
    }
    for task in tasks.iter().skip(15).step_by(10) {
        task.abort();
    }
    let finished = join_all(tasks)
        .await
        .into_iter()
        .filter(Result::is_ok)
        .count();
    assert_eq!(finished, 181);
    assert!(
        done.lock().unwrap().is_sorted_by_key(|(number, _)| *number),
        "the others keep their order"
    );
    assert!(
        start.elapsed() <= millis(18 * 1030 + 20),
        "{:?} for 181 at 10 per second",
        start.elapsed()
    );
}

/// Abandoned waiters leave nothing behind.
#[tokio::test(start_paused = true)]
async fn abandoned_waiters_cost_no_slot_and_leave_nothing() {
    let limiter = RateLimitLayer::builder(Quota::per_second(10))
        .max_wait(HOUR * 12)
        .max_queue(200_000)
        .build()
        .unwrap()
        .limiter();
    let mut futures: Vec<_> = (0..20_000)
        .map(|_| Box::pin(limiter.acquire(key())))
        .collect();
    for future in &mut futures {
        let _ = future.as_mut().now_or_never();
    }
    assert_eq!(limiter.peek(key()).await.unwrap().waiting, 19_990);
    drop(futures);
    let peek = limiter.peek(key()).await.unwrap();
    assert_eq!(peek.waiting, 0);
    let start = Instant::now();
    limiter.acquire(key()).await.unwrap().spend();
    assert!(start.elapsed() <= millis(1030), "{:?}", start.elapsed());
}

/// How long a request for the whole limit waits if it comes 12 s after the waiters of two processes were dropped. The
/// waiters had `costs`, and were dropped in the order of `rank`. Before them, the whole limit was used.
async fn wait_after_dropped(
    quota: Quota,
    costs: &[u32],
    rank: impl Fn(usize) -> usize,
) -> Duration {
    let store = Arc::new(MemoryStore::default());
    let limiters = [(); 2].map(|()| {
        let layer = RateLimitLayer::builder(quota).store(store.clone());
        layer.max_wait(HOUR).build().unwrap().limiter()
    });
    let first = limiters[0].acquire(key()).cost(quota.largest_cost());
    first.await.unwrap().spend();
    let mut waiters = Vec::new();
    for (number, &cost) in costs.iter().enumerate() {
        let mut waiter = Box::pin(limiters[number % 2].acquire(key()).cost(cost));
        assert!(waiter.as_mut().now_or_never().is_none());
        waiters.push((rank(number), waiter));
    }
    sleep(millis(1000)).await;
    waiters.sort_by_key(|(rank, _)| *rank);
    waiters.into_iter().for_each(drop);

    sleep(millis(12_000)).await;
    let start = Instant::now();
    let next = limiters[1].acquire(key()).cost(quota.largest_cost());
    next.await.unwrap().spend();
    start.elapsed()
}

/// Slots of waiters that were dropped are free again, as if nothing had been booked.
#[tokio::test(start_paused = true)]
async fn dropped_waiters_leave_no_wait_behind() {
    let window = millis(10_000);
    let slow = Quota::new(1, window);
    for (quota, largest, most) in [
        (slow, 1, 40),
        (Quota::new(3, window), 3, 40),
        // Its chunks have two units.
        (Quota::new(200, window), 150, 40),
        (Quota::bucket(3).refill(3, window), 3, 40),
        // Such a bucket takes back the last 32 waiters.
        (Quota::bucket(1).refill(1, window), 1, 6),
        (slow.and(Quota::bucket(2).refill(2, window)), 1, 6),
        (slow.and(Quota::per_minute(6)), 1, 6),
        (Quota::fixed(2, window), 2, 40),
    ] {
        for count in [2, 3, 6, 40].into_iter().filter(|count| *count <= most) {
            let costs: Vec<u32> = (0..count).map(|number| 1 + number * 7 % largest).collect();
            let forward = wait_after_dropped(quota, &costs, |number| number).await;
            let backward = wait_after_dropped(quota, &costs, |number| 40 - number).await;
            let mixed = wait_after_dropped(quota, &costs, |number| (1 + number) * 27 % 41).await;
            // A permit of a fixed window waits at a boundary.
            for wait in [forward, backward, mixed] {
                assert!(wait <= millis(500), "{quota}, {count} waiters: {wait:?}");
            }
        }
    }
}

/// A permit that arrives after it expired is given back, and its waiter keeps its place.
#[tokio::test(start_paused = true)]
async fn late_waking_waiter_keeps_place_and_sends_nothing_late() {
    let limiter = limiter(Quota::per_second(1));
    limiter.acquire(key()).await.unwrap().spend();
    let mut late = Box::pin(limiter.acquire(key()));
    let mut next = Box::pin(limiter.acquire(key()));
    assert!(late.as_mut().now_or_never().is_none());
    assert!(next.as_mut().now_or_never().is_none());

    advance(millis(1500)).await; // its slot was at 1030 ms, valid for 10 ms
    assert!(
        next.as_mut().now_or_never().is_none(),
        "the next may not pass"
    );
    let permit = late.await.unwrap();
    assert!(permit.is_valid());
    let first = Instant::now();
    next.await.unwrap().spend();
    assert!(first.elapsed() >= millis(1000), "{:?}", first.elapsed());
    assert!(
        first.elapsed() <= millis(1070),
        "and loses nothing but the longer life of its permit: {:?}",
        first.elapsed()
    );
}

/// A request that costs much waits, and others behind it. When it is dropped, they leave as if it had never come.
#[tokio::test(start_paused = true)]
async fn dropped_dear_waiter_lets_the_others_leave() {
    let pair = Quota::bucket(2).refill(1, millis(10_000));
    // The joint slots of a sliding window still stay late.
    for (quota, used, dear, left, ways) in [
        (pair, 1, 2, 1, &[false, true][..]),
        (Quota::per_minute(10), 5, 10, 5, &[false][..]),
    ] {
        for &has_two_keys in ways {
            let (limiter, other) = (limiter(quota), limiter(Quota::per_second(1000)));
            let acquire = |cost| {
                let one = limiter.acquire(key()).cost(cost);
                match has_two_keys {
                    true => Box::pin(one.and(other.acquire(key())).into_future()),
                    false => Box::pin(one.into_future()),
                }
            };
            acquire(used).await.unwrap().spend();
            let mut first = acquire(dear);
            assert!(first.as_mut().now_or_never().is_none());
            let mut others: Vec<_> = (0..left).map(|_| acquire(1)).collect();
            for waiter in &mut others {
                assert!(waiter.as_mut().now_or_never().is_none(), "{quota}");
            }
            sleep(millis(1000)).await;
            drop(first);
            let start = Instant::now();
            for waiter in others {
                waiter.await.unwrap().spend();
            }
            let waited = start.elapsed();
            assert!(waited <= millis(50), "{quota}, {has_two_keys}: {waited:?}");
        }
    }
}

/// Many slots are due at one moment, and the program needs longer for its tasks than their permits last. No window is
/// lost.
#[tokio::test(start_paused = true)]
async fn slow_program_uses_each_window() {
    let limiter = limiter(Quota::per_second(1000));
    limiter.acquire(key()).cost(1000).await.unwrap().spend();
    let start = Instant::now();
    let tasks: Vec<_> = (0..2000)
        .map(|_| {
            let request = limiter.acquire(key());
            tokio::spawn(async move {
                let is_sent = request.await.unwrap().begin().is_ok();
                // The time that it takes to run the task.
                advance(Duration::from_micros(50)).await;
                is_sent
            })
        })
        .collect();
    for task in tasks {
        assert!(task.await.unwrap());
    }
    // Two windows have to pass.
    let took = start.elapsed();
    assert!(took <= millis(2300), "{took:?}");
}

/// A task that is not polled: no other waiter depends on it.
#[tokio::test(start_paused = true)]
async fn waiter_never_polled_again_delays_no_other_waiter() {
    let limiter = limiter(Quota::per_second(1));
    limiter.acquire(key()).await.unwrap().spend();
    let mut stuck = Box::pin(limiter.acquire(key()));
    assert!(stuck.as_mut().now_or_never().is_none());
    let start = Instant::now();
    limiter.acquire(key()).await.unwrap().spend();
    // The first waiter was given one slot in vain besides its own; then it no longer delayed
    // others.
    assert!(
        start.elapsed() <= millis(3 * 1030 + 10),
        "{:?}",
        start.elapsed()
    );
    limiter
        .acquire(Key::new("other"))
        .now_or_never()
        .expect("other keys do not wait at all")
        .unwrap()
        .spend();
    drop(stuck);
}

#[tokio::test(start_paused = true)]
async fn refusal_is_immediate_and_names_the_possible_moment() {
    let limiter = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(millis(1500))
        .build()
        .unwrap()
        .limiter();
    let start = Instant::now();
    limiter.acquire(key()).await.unwrap().spend();
    let waiting = tokio::spawn(limiter.acquire(key()));
    tokio::task::yield_now().await;

    let refused = limiter.acquire(key()).await.unwrap_err();
    assert_eq!(start.elapsed(), Duration::ZERO, "at once");
    assert!(
        matches!(
            refused,
            Limited::Local {
                reason: Reason::MaxWait(_),
                ..
            }
        ),
        "{refused}"
    );
    assert_eq!(refused.retry_after(), Some(millis(2060)));
    assert_eq!(refused.report().turns(), 0);
    waiting.await.unwrap().unwrap().spend();

    let deadline = (Instant::now() + millis(500)).into_std();
    let refused = limiter.acquire(key()).deadline(deadline).await.unwrap_err();
    assert!(
        matches!(
            refused,
            Limited::Local {
                reason: Reason::Deadline,
                ..
            }
        ),
        "{refused}"
    );
    let retry_after = refused.retry_after().unwrap();
    sleep(retry_after).await;
    limiter
        .acquire(key())
        .deadline(Instant::now().into_std())
        .await
        .expect("it could have been now")
        .spend();
}

#[tokio::test(start_paused = true)]
async fn full_queue_refuses_with_its_own_reason() {
    let limiter = RateLimitLayer::builder(Quota::per_second(1))
        .max_queue(2)
        .build()
        .unwrap()
        .limiter();
    let mut futures: Vec<_> = (0..3).map(|_| Box::pin(limiter.acquire(key()))).collect();
    assert!(futures[0].as_mut().now_or_never().is_some());
    assert!(futures[1].as_mut().now_or_never().is_none());
    assert!(futures[2].as_mut().now_or_never().is_none());
    let refused = limiter.acquire(key()).await.unwrap_err();
    assert!(
        matches!(
            refused,
            Limited::Local {
                reason: Reason::QueueFull(2),
                ..
            }
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("max_queue"), "{refused}");
}

/// Keys are bounded, idle keys make room, and a limited key never gets a fresh allowance.
#[tokio::test(start_paused = true)]
async fn keys_are_bounded_and_limited_keys_never_forgotten() {
    let limiter = RateLimitLayer::builder(Quota::per_minute(2))
        .max_keys(100)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap()
        .limiter();
    let customer = |number: u32| Key::new(number.to_le_bytes());
    for number in 0..100 {
        limiter
            .acquire(customer(number))
            .cost(2)
            .await
            .unwrap()
            .spend();
    }
    for number in 100..1000 {
        let refused = limiter.acquire(customer(number)).await.unwrap_err();
        assert!(refused.to_string().contains("max_keys"), "{refused}");
    }
    for number in 0..100 {
        let refused = limiter.acquire(customer(number)).await.unwrap_err();
        assert!(refused.retry_after().is_some(), "{refused}");
    }
    advance(Duration::from_secs(61)).await;
    for number in 100..200 {
        limiter
            .acquire(customer(number))
            .await
            .expect("the old ones are idle now")
            .spend();
    }
}

#[tokio::test(start_paused = true)]
async fn costs_wait_in_one_queue_and_share_no_unit() {
    let limiter = limiter(Quota::per_second(10));
    let start = Instant::now();
    let moments = Arc::new(Mutex::new(Vec::new()));
    let costs = [8, 3, 2, 10, 1, 5, 5, 1];
    let tasks = costs.map(|cost| {
        let (limiter, moments) = (limiter.clone(), moments.clone());
        async move {
            limiter.acquire(key()).cost(cost).await.unwrap().spend();
            moments
                .lock()
                .unwrap()
                .extend((0..cost).map(|_| Instant::now()));
        }
    });
    join_all(tasks).await;
    let moments = moments.lock().unwrap();
    assert_eq!(moments.len(), 35);
    assert_eq!(largest_count(&moments, Duration::from_secs(1)), 10);
    assert!(
        start.elapsed() <= millis(4 * 1030 + 20),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn returned_permit_is_reused_and_dropped_permit_is_spent() {
    let limiter = RateLimitLayer::builder(Quota::per_minute(1))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap()
        .limiter();
    limiter.acquire(key()).await.unwrap().give_back();
    let permit = limiter.acquire(key()).await.expect("it was given back");
    drop(permit);
    assert!(limiter.acquire(key()).await.is_err());
    assert_eq!(limiter.peek(key()).await.unwrap().limits[0].used, 1);
}

#[tokio::test(start_paused = true)]
async fn returned_permit_goes_to_the_first_waiter() {
    let limiter = limiter(Quota::per_minute(1));
    let permit = limiter.acquire(key()).await.unwrap();
    let mut first = Box::pin(limiter.acquire(key()));
    let mut second = Box::pin(limiter.acquire(key()));
    assert!(first.as_mut().now_or_never().is_none());
    assert!(second.as_mut().now_or_never().is_none());
    permit.give_back();
    assert!(second.as_mut().now_or_never().is_none());
    first.now_or_never().expect("at once").unwrap().spend();
    let start = Instant::now();
    second.await.unwrap().spend();
    assert!(
        start.elapsed() <= Duration::from_secs(61),
        "one slot further up: {:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn peek_consumes_nothing() {
    let limiter = RateLimitLayer::builder(Quota::per_hour(5000))
        .build()
        .unwrap()
        .limiter();
    for _ in 0..3 {
        let peek = limiter.peek(key()).await.unwrap();
        assert_eq!((peek.free, peek.limits[0].used, peek.waiting), (5000, 0, 0));
    }
    limiter.acquire(key()).cost(4990).await.unwrap().spend();
    let peek = limiter.peek(key()).await.unwrap();
    assert_eq!(
        (peek.free, peek.limits[0].used, peek.next_slot),
        (10, 4990, Duration::ZERO)
    );
    limiter.acquire(key()).cost(10).await.unwrap().spend();
    let peek = limiter.peek(key()).await.unwrap();
    assert_eq!(peek.free, 0);
    // 720 ms between two slots: a permit is valid for a fiftieth of that, and the slack.
    assert_eq!(peek.next_slot, HOUR + Duration::from_micros(24_400));
}

/// A limiter outlives the runtime it was first used in.
#[test]
fn a_limiter_goes_on_in_another_runtime() {
    let limiter = limiter(Quota::new(1, millis(200)));
    for _ in 0..2 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut abandoned = Box::pin(limiter.acquire(key()));
            let _ = abandoned.as_mut().now_or_never();
            std::mem::drop(tokio::spawn(limiter.acquire(key())));
            limiter.acquire(key()).await.unwrap().spend();
        });
    }
    assert_eq!(
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(limiter.peek(key()))
            .unwrap()
            .waiting,
        0
    );
}

#[tokio::test(start_paused = true)]
async fn a_permit_at_hand_costs_no_allocation() {
    let limiter = limiter(Quota::per_second(100_000));
    for _ in 0..1000 {
        limiter.acquire(key()).await.unwrap().spend();
    }
    let spent = allocation_counter::measure(|| {
        for _ in 0..1000 {
            let permit = limiter.acquire(key()).now_or_never().unwrap().unwrap();
            permit.spend();
        }
    });
    assert_eq!(spent.count_total, 0, "{spent:?}");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_at_once_allocates_only_its_report() {
    let limit = RateLimitLayer::builder(Quota::per_day(1))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let limiter = limit.limiter();
    for key in [Key::ALL, key()] {
        limiter.acquire(key).await.unwrap().spend();
        let refused = || drop(limiter.acquire(key).now_or_never().unwrap().unwrap_err());
        refused();
        let spent = allocation_counter::measure(refused);
        assert_eq!(spent.count_total, 1, "{spent:?}");
    }
}

#[test]
fn invalid_settings_are_errors_that_name_the_remedy() {
    let builder = || RateLimitLayer::builder(Quota::per_second(1));
    for (built, part) in [
        (builder().max_queue(0).build(), "max_wait to zero"),
        (builder().max_keys(0).build(), "at least 1"),
        (builder().max_wait(Duration::MAX).build(), "at most a day"),
        (builder().transit_slack(HOUR).build(), "at most 60 s"),
        (
            RateLimitLayer::builder(Quota::fixed(5, HOUR))
                .boundary_guard(Duration::MAX)
                .build(),
            "lower boundary_guard",
        ),
        (RateLimitLayer::new(Quota::every(millis(50))), "burst of 2"),
    ] {
        let error = built.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
