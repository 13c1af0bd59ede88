//! Settlement: the true cost of a request, known after it was sent. Under a paused clock.

use crate::support::{patient, remote};

#[cfg(feature = "redis")]
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use http::{Request, Response};
use tokio::time::{Instant, sleep, timeout};
use tollgate::store::{MemoryStore, Store};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer, Sent, Settlement};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

use remote::Remote;

const DAY: Duration = Duration::from_secs(86_400);
const MINUTE: Duration = Duration::from_secs(60);

fn limiter(quota: Quota) -> Limiter {
    limiter_over(quota, Arc::new(MemoryStore::default()))
}

fn limiter_over(quota: Quota, store: Arc<dyn Store>) -> Limiter {
    RateLimitLayer::builder(quota)
        .max_wait(DAY)
        .store(store)
        .settle_by_hand()
        .build()
        .unwrap()
        .limiter()
}

/// Sends a request of this cost.
async fn begun(limiter: &Limiter, key: Key, cost: u32) -> Sent {
    let permit = limiter.acquire(key).cost(cost).await;
    permit.unwrap().begin().unwrap()
}

async fn used(limiter: &Limiter, key: Key) -> u64 {
    limiter.peek(key).await.unwrap().limits[0].used
}

#[tokio::test(start_paused = true)]
async fn a_settled_request_counts_with_its_true_cost() {
    let limiter = limiter(Quota::per_minute(100));
    let mut cheap = begun(&limiter, Key::ALL, 40).await;
    cheap.settle(10);
    assert_eq!(used(&limiter, Key::ALL).await, 10);
    let mut dear = begun(&limiter, Key::ALL, 40).await;
    dear.settle(70);
    assert_eq!(used(&limiter, Key::ALL).await, 80);
    // The last call counts.
    dear.settle(75);
    cheap.settle(5);
    assert_eq!(used(&limiter, Key::ALL).await, 80);
    // What was charged stays charged, and the units of the permit can go.
    dear.settle(60);
    assert_eq!(used(&limiter, Key::ALL).await, 65);
}

#[tokio::test(start_paused = true)]
async fn a_request_of_no_cost_can_be_charged() {
    let limiter = limiter(Quota::per_minute(100));
    let mut sent = begun(&limiter, Key::ALL, 0).await;
    sent.settle(7);
    assert_eq!(used(&limiter, Key::ALL).await, 7);
}

/// A charge beyond the limit makes the next request wait until the charge has left the window.
#[tokio::test(start_paused = true)]
async fn charges_delay_requests_for_one_window_at_most() {
    let limiter = limiter(Quota::per_minute(100));
    let mut sent = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
    sleep(Duration::from_secs(10)).await;
    sent.settle(100_000);
    let start = Instant::now();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let waited = start.elapsed();
    assert!(
        waited >= MINUTE && waited < MINUTE + Duration::from_millis(50),
        "{waited:?}"
    );
}

/// A request that waits gets what another one did not need.
#[tokio::test(start_paused = true)]
async fn refunded_units_serve_the_next_request() {
    let limiter = limiter(Quota::per_minute(100));
    let mut sent = begun(&limiter, Key::ALL, 100).await;
    sleep(Duration::from_secs(5)).await;
    sent.settle(40);
    let start = Instant::now();
    drop(limiter.acquire(Key::ALL).cost(60).await.unwrap());
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn joint_permits_are_settled_under_each_key() {
    let all = limiter(Quota::per_minute(100));
    let of_one = limiter(Quota::per_minute(50));
    let request = all.acquire(Key::ALL).cost(20);
    let request = request.and(of_one.acquire(Key::new("one")).cost(20));
    let mut sent = request.await.unwrap().begin().unwrap();
    sent.settle(5);
    assert_eq!(used(&all, Key::ALL).await, 5);
    assert_eq!(used(&of_one, Key::new("one")).await, 5);
    sent.settle(25);
    assert_eq!(used(&all, Key::ALL).await, 25);
    assert_eq!(used(&of_one, Key::new("one")).await, 25);
}

/// Sends one request through `layer` to a server that states a true cost of 3.
async fn send(layer: RateLimitLayer) -> Response<&'static str> {
    let server = service_fn(|_: Request<()>| async {
        let response = Response::builder().header("x-cost", "3").body("done");
        Ok::<_, Infallible>(response.unwrap())
    });
    let mut service = ServiceBuilder::new().layer(layer).service(server);
    let request = Request::get("http://example.com/a").body(()).unwrap();
    service.ready().await.unwrap().call(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn layers_settle_from_the_response() {
    let builder = || {
        RateLimitLayer::builder(Quota::per_minute(100))
            .max_wait(DAY)
            .cost(|_| 10)
            .settle(|response| response.number("x-cost"))
    };
    let layer = builder().build().unwrap();
    let limiter = layer.limiter();
    // The second one waits, and the third one finds a permit at hand.
    drop(limiter.acquire(Key::ALL).cost(95).await.unwrap());
    let second = tokio::spawn(send(layer.clone()));
    sleep(MINUTE * 2).await;
    assert!(second.is_finished());
    let before = used(&limiter, Key::ALL).await;
    assert_eq!(before, 3);
    sleep(MINUTE * 2).await;
    send(layer.clone()).await;
    assert_eq!(used(&limiter, Key::ALL).await, 3);
    send(layer).await;
    assert_eq!(used(&limiter, Key::ALL).await, 6);

    let joint = builder()
        .and_per("path", Quota::per_minute(50), |request| {
            Key::new(request.path())
        })
        .build()
        .unwrap();
    let (limiter, path) = (joint.limiter(), joint.limiter_of("path").unwrap());
    send(joint).await;
    assert_eq!(used(&limiter, Key::ALL).await, 3);
    assert_eq!(used(&path, Key::new("/a").and("path")).await, 3);
}

#[tokio::test(start_paused = true)]
async fn responses_without_a_cost_count_with_the_estimate() {
    let layer = RateLimitLayer::builder(Quota::per_minute(100))
        .cost(|_| 10)
        .settle(|response| response.number("x-other"))
        .build()
        .unwrap();
    let limiter = layer.limiter();
    send(layer).await;
    assert_eq!(used(&limiter, Key::ALL).await, 10);
}

#[tokio::test(start_paused = true)]
async fn callers_settle_by_hand() {
    let layer = RateLimitLayer::builder(Quota::per_minute(100))
        .cost(|_| 10)
        .settle_by_hand()
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let mut response = send(layer).await;
    let settlement = response.extensions_mut().remove::<Settlement>().unwrap();
    assert_eq!(used(&limiter, Key::ALL).await, 10);
    let again = settlement.clone();
    tokio::spawn(async move { settlement.settle(4) })
        .await
        .unwrap();
    assert_eq!(used(&limiter, Key::ALL).await, 4);
    again.settle(14);
    assert_eq!(used(&limiter, Key::ALL).await, 14);
}

#[tokio::test(start_paused = true)]
async fn late_stores_get_charges_within_a_moment() {
    let store = Arc::new(Remote::default());
    let (limiter, other) = (
        limiter_over(Quota::per_minute(100), store.clone()),
        limiter_over(Quota::per_minute(100), store.shared.clone()),
    );
    let mut sent = begun(&limiter, Key::ALL, 10).await;
    sent.settle(60);
    sleep(Duration::from_millis(150)).await;
    assert_eq!(used(&other, Key::ALL).await, 60);
}

#[tokio::test(start_paused = true)]
async fn charges_are_sent_again_after_the_store_failed() {
    let store = Arc::new(Remote::default());
    let quota = Quota::per_minute(100);
    let limiter = limiter_over(quota, store.clone());
    let mut sent = begun(&limiter, Key::ALL, 10).await;
    store.fails.store(true, Ordering::Relaxed);
    sent.settle(60);
    sleep(Duration::from_secs(10)).await;
    let other = limiter_over(quota, store.shared.clone());
    assert_eq!(used(&other, Key::ALL).await, 10);
    store.fails.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(used(&other, Key::ALL).await, 60);
}

/// A call of a joint request carries units when the task that would have sent them looks, and fails then.
#[tokio::test(start_paused = true)]
async fn charges_of_a_joint_call_that_fails_are_sent_again() {
    let store = Arc::new(Remote::default());
    let quota = Quota::per_minute(100);
    let limiter = limiter_over(quota, store.clone());
    let acquire = limiter.acquire(Key::ALL).cost(10);
    let mut sent = acquire.await.unwrap().begin().unwrap();
    sent.settle(60);
    sleep(Duration::from_millis(97)).await;
    store.fails.store(true, Ordering::Relaxed);
    let joint = limiter
        .acquire(Key::ALL)
        .and(limiter.acquire(Key::new("other")));
    assert!(joint.await.is_err());
    store.fails.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(5)).await;
    let other = limiter_over(quota, store.shared.clone());
    assert_eq!(used(&other, Key::ALL).await, 60);
}

/// What was settled just before a shutdown or a drain is not lost.
#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_charges() {
    for (late, drains) in [(0, false), (0, true), (30, false), (30, true)] {
        let store = Arc::new(Remote::default());
        let process = || {
            let builder = RateLimitLayer::builder(Quota::per_minute(100)).store(store.clone());
            let builder = builder.settle_by_hand();
            let builder = builder.counted_within(Duration::from_secs(late));
            builder.build().unwrap().limiter()
        };
        let (limiter, other) = (process(), process());
        let mut cheap = begun(&limiter, Key::ALL, 10).await;
        let mut dear = begun(&limiter, Key::new("dear"), 10).await;
        cheap.settle(3);
        dear.settle(30);
        match drains {
            true => drop(limiter.drain(Duration::from_secs(1)).await.unwrap()),
            false => limiter.shutdown().await.unwrap(),
        }
        // No task of the process runs any more.
        let used = (
            used(&other, Key::ALL).await,
            used(&other, Key::new("dear")).await,
        );
        assert_eq!(used, (3, 30), "{late} s late, drains {drains}");
    }
}

/// Streams that were sent before go on to settle.
#[tokio::test(start_paused = true)]
async fn shutdown_ends_while_requests_are_settled() {
    let store = Arc::new(Remote::default());
    let limiter = limiter_over(Quota::per_minute(100), store.clone());
    let mut sent = begun(&limiter, Key::ALL, 10).await;
    let settling = tokio::spawn(async move {
        for units in 11.. {
            sent.settle(units);
            sleep(Duration::from_millis(1)).await;
        }
    });
    sleep(Duration::from_millis(20)).await;
    let before = Instant::now();
    timeout(MINUTE, limiter.shutdown()).await.unwrap().unwrap();
    assert!(before.elapsed() < Duration::from_secs(2));
    settling.abort();
}

/// A process that goes on with its share counts charges itself, and charges the store later.
#[tokio::test(start_paused = true)]
async fn charges_reach_the_store_after_an_outage() {
    let store = Arc::new(Remote::default());
    let quota = Quota::per_minute(100);
    let limiter = RateLimitLayer::builder(quota)
        .store(store.clone())
        .on_store_error(OnStoreError::FallbackShare)
        .fallback_share(1.0)
        .settle_by_hand()
        .build()
        .unwrap()
        .limiter();
    let other = limiter_over(quota, store.shared.clone());
    let mut sent = begun(&limiter, Key::ALL, 10).await;
    store.fails.store(true, Ordering::Relaxed);
    sent.settle(30);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(used(&other, Key::ALL).await, 10);
    store.fails.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(used(&other, Key::ALL).await, 30);
}

/// A process with a share refuses a request that costs more. Units that the same call charges are then charged by a
/// later one.
#[tokio::test(start_paused = true)]
async fn charges_count_once_beside_requests_above_a_share() {
    let store = Arc::new(Remote::default());
    let quota = Quota::per_minute(100);
    let limiter = RateLimitLayer::builder(quota)
        .store(store.clone())
        .on_store_error(OnStoreError::FallbackShare)
        .fallback_share(0.2)
        .settle_by_hand()
        .build()
        .unwrap()
        .limiter();
    let other = limiter_over(quota, store.shared.clone());
    store.fails.store(true, Ordering::Relaxed);
    let mut sent = begun(&limiter, Key::ALL, 10).await;
    sent.settle(15);
    for _ in 0..5 {
        let above = limiter.acquire(Key::ALL).cost(30).await.unwrap_err();
        assert!(above.to_string().contains("allows 20 at once"), "{above}");
    }
    store.fails.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(used(&other, Key::ALL).await, 15);
}

/// Requests behind the first have no slot when their time is over: the limit refuses them, not the
/// store.
#[tokio::test(start_paused = true)]
async fn requests_that_wait_too_long_are_refused_locally() {
    let build = || {
        let builder = RateLimitLayer::builder(Quota::per_minute(100));
        let builder = builder.max_wait(Duration::from_secs(2)).settle_by_hand();
        builder.build().unwrap().limiter()
    };
    for is_joint in [false, true] {
        let (limiter, other) = (build(), build());
        let acquire = |cost| match is_joint {
            true => limiter
                .acquire(Key::ALL)
                .cost(cost)
                .and(other.acquire(Key::ALL).cost(cost)),
            false => limiter.acquire(Key::ALL).cost(cost),
        };
        drop(acquire(100).await.unwrap());
        let start = Instant::now();
        for outcome in join_all((0..3).map(|_| acquire(10))).await {
            let refused = outcome.unwrap_err();
            assert!(matches!(refused, Limited::Local { .. }), "{refused:?}");
        }
        assert!(
            start.elapsed() <= Duration::from_millis(2100),
            "{:?}",
            start.elapsed()
        );
    }
}

/// A hold that ends within `max_wait` delays requests, and refuses none.
#[tokio::test(start_paused = true)]
async fn short_holds_delay_requests_that_settle() {
    for is_joint in [false, true] {
        let store = Arc::new(Remote::default());
        let (limiter, other) = (
            limiter_over(Quota::per_minute(100), store.clone()),
            limiter_over(Quota::per_minute(100), store.clone()),
        );
        let acquire = || match is_joint {
            true => limiter
                .acquire(Key::new("one"))
                .and(other.acquire(Key::new("two"))),
            false => limiter.acquire(Key::new("one")),
        };
        drop(acquire().await.unwrap());
        // The store knows of no holds, so this one applies in this process only.
        let held = limiter.hold_for(Key::new("one"), Duration::from_secs(3));
        assert!(held.await.is_err());
        let start = Instant::now();
        for outcome in join_all((0..3).map(|_| acquire())).await {
            drop(outcome.unwrap());
        }
        let waited = start.elapsed();
        let soon = Duration::from_millis(2900)..Duration::from_millis(3600);
        assert!(soon.contains(&waited), "joint {is_joint}: {waited:?}");
    }
}

/// How callers learn the true cost in a run of [`use_of_limit`].
#[derive(Clone, Copy)]
struct Habit {
    estimate: u32,
    settles: bool,
    /// Whether a request also counts under another key.
    is_joint: bool,
    /// How late the upstream counts. If not zero, it counts each request when its response ends.
    late: Duration,
}

/// Returns the part of 80,000 units a minute that callers use whose requests cost 100 to 4000 units
/// and take 1 to 10 s, in per cent, and the most units of a minute.
async fn use_of_limit(habit: Habit) -> (f64, u64) {
    const LIMIT: u32 = 80_000;
    const MINUTES: u32 = 20;
    let limiter = || {
        let builder = RateLimitLayer::builder(Quota::per_minute(LIMIT)).max_wait(DAY);
        let builder = builder.settle_by_hand().counted_within(habit.late);
        builder.build().unwrap().limiter()
    };
    let (limiter, other) = (limiter(), limiter());
    let log = Arc::new(Mutex::new(Vec::new()));
    let start = Instant::now();
    let callers = (0..60_u64).map(|caller| {
        let (limiter, other, log) = (limiter.clone(), other.clone(), log.clone());
        async move {
            // Numbers without a pattern: a linear congruential generator.
            let mut state = caller;
            let mut below = |most: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % most
            };
            while start.elapsed() < MINUTE * MINUTES {
                let actual = 100 + u32::try_from(below(3901)).unwrap();
                let took = Duration::from_millis(1000 + below(9000));
                let acquire = match habit.is_joint {
                    true => limiter
                        .acquire(Key::ALL)
                        .cost(habit.estimate)
                        .and(other.acquire(Key::new("other")).cost(habit.estimate)),
                    false => limiter.acquire(Key::ALL).cost(habit.estimate),
                };
                let mut sent = acquire.await.unwrap().begin().unwrap();
                let begun = Instant::now();
                sleep(took).await;
                let at = match habit.late.is_zero() {
                    true => begun,
                    false => Instant::now(),
                };
                log.lock().unwrap().push((at, u64::from(actual)));
                if habit.settles {
                    sent.settle(actual);
                }
            }
        }
    });
    join_all(callers).await;
    let mut log = log.lock().unwrap();
    log.sort();
    // The first minute is full of estimates.
    let counted = log
        .iter()
        .filter(|(at, _)| (MINUTE..MINUTE * MINUTES).contains(&(*at - start)));
    let used: u64 = counted.map(|(_, units)| units).sum();
    let most = log.iter().enumerate().map(|(first, (from, _))| {
        let inside = log[first..]
            .iter()
            .take_while(|(at, _)| *at - *from < MINUTE);
        inside.map(|(_, units)| units).sum()
    });
    let percent = used as f64 / f64::from(LIMIT * (MINUTES - 1)) * 100.0;
    (percent, most.max().unwrap())
}

#[tokio::test(start_paused = true)]
async fn settlement_uses_most_of_the_limit() {
    let habit = Habit {
        estimate: 4000,
        settles: true,
        is_joint: false,
        late: Duration::ZERO,
    };
    let (plain, _) = use_of_limit(Habit {
        settles: false,
        ..habit
    })
    .await;
    let (settled, most) = use_of_limit(habit).await;
    let (joint, most_of_joint) = use_of_limit(Habit {
        is_joint: true,
        ..habit
    })
    .await;
    let (mean, most_of_mean) = use_of_limit(Habit {
        estimate: 2050,
        ..habit
    })
    .await;
    for (late, is_joint) in [(10, false), (30, false), (30, true)] {
        let late = Duration::from_secs(late);
        let (used, most) = use_of_limit(Habit {
            late,
            is_joint,
            ..habit
        })
        .await;
        println!("counted within {late:?}, joint {is_joint}: {used:.1} %, at most {most} a minute");
        assert!(used >= 75.0, "{late:?}: {used} %");
        assert!(most <= 80_000, "{late:?}: {most}");
    }
    println!("the largest cost as the estimate: {plain:.1} %");
    println!("settled: {settled:.1} %, at most {most} a minute");
    println!("settled, with two keys: {joint:.1} %, at most {most_of_joint} a minute");
    println!("the mean as the estimate, settled: {mean:.1} %, at most {most_of_mean} a minute");
    assert!(joint >= 85.0, "{joint} %");
    assert!(most_of_joint <= 80_000, "{most_of_joint}");
    assert!(plain < 60.0, "{plain} %");
    assert!(settled >= 85.0, "{settled} %");
    assert!(most <= 80_000, "{most}");
    assert!(mean >= 97.0, "{mean} %");
}

/// Waits until a key is used as much as this, for ten seconds at most.
#[cfg(feature = "redis")]
async fn until_used(limiter: &Limiter, units: u64) {
    let mut seen = 0;
    for _ in 0..200 {
        seen = used(limiter, Key::ALL).await;
        if seen == units {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("{seen} units, not {units}");
}

/// The true cost reaches other processes through Redis.
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_learn_of_settlements_through_redis() {
    let server = redis_server::RedisServer::start().unwrap();
    let process = || limiter_over(Quota::per_minute(100), patient::store(&server.url()));
    let (limiter, other) = (process(), process());
    let mut cheap = begun(&limiter, Key::ALL, 40).await;
    let mut dear = begun(&limiter, Key::ALL, 20).await;
    assert_eq!(used(&other, Key::ALL).await, 60);
    cheap.settle(10);
    until_used(&other, 30).await;
    dear.settle(55);
    until_used(&other, 65).await;
    // A request that waits gets what another process gives back.
    let mut all = begun(&limiter, Key::ALL, 35).await;
    let waits = tokio::spawn(async move { other.acquire(Key::ALL).cost(30).await });
    sleep(Duration::from_millis(200)).await;
    assert!(!waits.is_finished());
    all.settle(5);
    let start = Instant::now();
    drop(waits.await.unwrap().unwrap());
    assert!(start.elapsed() < Duration::from_secs(20));
}
