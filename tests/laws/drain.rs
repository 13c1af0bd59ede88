//! The end of a process: what waits may leave until a deadline, and all else goes back.

use crate::support::{self, remote};

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use proptest::prelude::*;
use remote::Remote;
use support::{Failing, Upstream, count_of, get, ms, peek};
use tokio::time::{Instant, sleep, timeout};
use tollgate::key::RequestRef;
use tollgate::limiter::Acquire;
use tollgate::stats::Event;
use tollgate::store::MemoryStore;
use tollgate::{
    AdaptiveThrottleLayer, Cost, Key, Limited, Limiter, Quota, RateLimitBuilder, RateLimitLayer,
    Reason, Routes, Signal, ThrottlePermit,
};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};

const SECOND: Duration = Duration::from_secs(1);

fn builder(quota: Quota) -> RateLimitBuilder {
    RateLimitLayer::builder(quota).max_wait(SECOND * 600)
}

fn limiter(quota: Quota) -> Limiter {
    builder(quota).build().unwrap().limiter()
}

/// Begins requests that wait. Returns when each ends, counted from now, and how.
fn waiters(
    count: usize,
    acquire: impl Fn() -> Acquire,
) -> Vec<tokio::task::JoinHandle<(Duration, Result<(), Limited>)>> {
    let start = Instant::now();
    let begin = |_| {
        let mut acquire = Box::pin(acquire());
        assert!((&mut acquire).now_or_never().is_none(), "it waits");
        tokio::spawn(async move {
            let result = acquire.await;
            (start.elapsed(), result.map(drop))
        })
    };
    (0..count).map(begin).collect()
}

fn assert_draining(limited: &Limited) {
    assert_eq!(limited.reason(), Some(Reason::Draining), "{limited}");
    assert_eq!(limited.retry_after(), None);
}

/// Drains while 100 requests wait for slots that are an eighth of a second apart.
async fn drain_hundred(limiter: &Limiter, acquire: impl Fn() -> Acquire) {
    drop(acquire().await.unwrap());
    let waits = waiters(100, &acquire);
    let refused = limiter.clone();
    let late = tokio::spawn(async move {
        sleep(ms(10)).await;
        refused.acquire(Key::new("late")).await
    });
    let start = Instant::now();
    let drained = limiter.drain(SECOND * 5).await.unwrap();
    assert!(start.elapsed() <= SECOND * 5, "{:?}", start.elapsed());
    assert_draining(&late.await.unwrap().unwrap_err());
    let mut left = 0;
    for wait in waits {
        let (at, result) = wait.await.unwrap();
        match result {
            Ok(_) => {
                left += 1;
                assert!(at <= SECOND * 5, "left after {at:?}");
            }
            Err(limited) => {
                assert_draining(&limited);
                assert!(at < ms(20), "refused only after {at:?}");
            }
        }
    }
    assert!((30..=50).contains(&left), "{left} left");
    assert_eq!((drained.left, drained.refused), (left, 100 - left));
    let stats = limiter.stats();
    assert_eq!(count_of(&stats, "draining"), 1);
    assert_eq!((stats.requests().waited, stats.waiting()), (left, 0));
    assert_eq!(stats.refusals().of(Reason::Draining), 100 - left + 1);
}

#[tokio::test(start_paused = true)]
async fn waiters_leave_at_their_slots_or_are_refused_at_once() {
    for key in [Key::ALL, Key::new("key")] {
        let limiter = limiter(Quota::every(ms(125)));
        drain_hundred(&limiter, || limiter.acquire(key)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn drain_refuses_joint_requests_without_a_slot_in_time() {
    let limiter = limiter(Quota::every(ms(125)));
    let other = builder(Quota::per_second(1000)).build().unwrap().limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let acquire = || limiter.acquire(Key::ALL).and(other.acquire(Key::ALL));
    let waits = waiters(100, acquire);
    let start = Instant::now();
    let drained = limiter.drain(SECOND * 5).await.unwrap();
    assert!(start.elapsed() <= SECOND * 5);
    assert_eq!(drained.left + drained.refused, 100);
    assert!((30..=50).contains(&drained.left), "{drained}");
    for wait in waits {
        let (at, result) = wait.await.unwrap();
        assert!(at <= SECOND * 5);
        if let Err(limited) = result {
            assert_draining(&limited);
        }
    }
    assert_draining(&acquire().await.unwrap_err());
}

/// A request waits for its first limit. The drain of the second one waits for it until the deadline, and refuses it then.
#[tokio::test(start_paused = true)]
async fn drains_of_any_limiter_end_the_waits_of_joint_requests() {
    let first = limiter(Quota::every(SECOND * 60));
    let second = limiter(Quota::per_second(1000));
    drop(first.acquire(Key::ALL).await.unwrap());
    let waits = waiters(1, || first.acquire(Key::ALL).and(second.acquire(Key::ALL)));
    let start = Instant::now();
    second.drain(SECOND).await.unwrap();
    assert_eq!(start.elapsed(), SECOND);
    for wait in waits {
        let (at, result) = wait.await.unwrap();
        assert_eq!(at, SECOND);
        assert_draining(&result.unwrap_err());
    }
}

/// A waker that drops the request that it wakes, as another thread may do at that moment.
#[derive(Default)]
struct DropsWhatItWakes(std::sync::Mutex<Option<std::pin::Pin<Box<Acquire>>>>);

impl std::task::Wake for DropsWhatItWakes {
    fn wake(self: Arc<Self>) {
        let acquire = self.0.lock().unwrap().take();
        drop(acquire);
    }
}

#[test]
fn joint_request_that_ends_during_a_drain_blocks_nobody() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().build().unwrap().block_on(async {
            let [one, other] = [(); 2].map(|()| limiter(Quota::per_minute(1)));
            let acquire = || one.acquire(Key::ALL).and(other.acquire(Key::ALL));
            drop(acquire().await.unwrap());
            let waker = Arc::new(DropsWhatItWakes::default());
            let mut waits = Box::pin(acquire());
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(waits.as_mut().poll(&mut cx).is_pending());
            let task = std::task::Waker::from(waker.clone());
            let mut cx = std::task::Context::from_waker(&task);
            assert!(waits.as_mut().poll(&mut cx).is_pending());
            *waker.0.lock().unwrap() = Some(waits);
            one.drain(Duration::ZERO).await.unwrap();
            assert!(waker.0.lock().unwrap().is_none(), "it was woken");
        });
        done.send(()).unwrap();
    });
    let ended = ended.recv_timeout(SECOND * 60);
    ended.expect("the drain ends");
}

#[tokio::test(start_paused = true)]
async fn drain_of_zero_refuses_all_waiters_at_once() {
    let limiter = limiter(Quota::per_second(1));
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let waits = waiters(10, || limiter.acquire(Key::ALL));
    let start = Instant::now();
    let drained = limiter.drain(Duration::ZERO).await.unwrap();
    assert_eq!((drained.left, drained.refused), (0, 10));
    for wait in waits {
        assert_draining(&wait.await.unwrap().1.unwrap_err());
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    for cost in [0, 1] {
        assert_draining(&limiter.acquire(Key::ALL).cost(cost).await.unwrap_err());
    }
}

#[tokio::test(start_paused = true)]
async fn permits_at_hand_go_back_for_good() {
    for key in [Key::ALL, Key::new("key")] {
        let limit = builder(Quota::per_second(100_000)).build().unwrap();
        let limiter = limit.limiter();
        for _ in 0..1000 {
            drop(limiter.acquire(key).await.unwrap());
        }
        let late = limiter.acquire(key).await.unwrap();
        let at_hand = count_of(&limiter.stats(), "permits_at_hand");
        assert!(at_hand > 0);
        let drained = limiter.drain(SECOND).await.unwrap();
        assert_eq!(drained.given_back, at_hand);
        assert_eq!(peek(&limit, key).await.limits[0].used, 1001);
        late.give_back();
        assert_eq!(count_of(&limiter.stats(), "permits_at_hand"), 0);
        assert_eq!(peek(&limit, key).await.limits[0].used, 1000);
        assert_draining(&limiter.acquire(key).await.unwrap_err());
        let line = drained.to_string();
        let expected = format!("0 left in time, 0 refused, {at_hand} permits given back in 0.0s");
        assert_eq!(line, expected);
    }
}

/// The keys had permits at hand before.
#[tokio::test(start_paused = true)]
async fn drained_layers_refuse_requests_that_cost_nothing() {
    let by_path = |request: &RequestRef<'_>| Some(Key::new(request.path()));
    for builder in [
        builder(Quota::per_second(100_000)),
        builder(Quota::per_second(100_000)).key(by_path),
    ] {
        let limit = builder.build().unwrap();
        let upstream = Upstream::answering([]);
        let mut service = limit.layer(upstream.clone());
        for _ in 0..1000 {
            service.call(get("http://a.example/b")).await.unwrap();
        }
        assert!(count_of(&limit.limiter().stats(), "permits_at_hand") > 0);
        limit.limiter().drain(SECOND).await.unwrap();
        let mut request = get("http://a.example/b");
        request.extensions_mut().insert(Cost::new(0));
        let error: BoxError = service.call(request).await.unwrap_err().into();
        assert_draining(Limited::find(&*error).unwrap());
        assert_eq!(upstream.count(), 1000);
    }
}

#[tokio::test(start_paused = true)]
async fn permits_of_a_set_quota_go_back_too() {
    let limit = builder(Quota::per_second(10)).build().unwrap();
    let (limiter, key) = (limit.limiter(), Key::new("key"));
    let set = limiter.set_quota(key, Quota::per_second(100_000));
    set.await.unwrap();
    for _ in 0..1000 {
        drop(limiter.acquire(key).await.unwrap());
    }
    let at_hand = count_of(&limiter.stats(), "permits_at_hand");
    assert!(at_hand > 0);
    let drained = limiter.drain(SECOND).await.unwrap();
    assert_eq!(drained.given_back, at_hand);
    let status = peek(&limit, key).await;
    assert_eq!((status.limits[0].used, status.free), (1000, 99_000));
}

#[tokio::test(start_paused = true)]
async fn drained_layers_refuse_requests_of_routes() {
    let routes = |path| Routes::new([(path, Quota::per_second(100_000))]).unwrap();
    let limit = builder(Quota::per_second(100_000))
        .routes(routes("/beside"))
        .routes(routes("/instead").instead())
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let service = ServiceBuilder::new()
        .layer(limit.clone())
        .service(upstream.clone());
    let paths = ["/beside", "/instead"];
    for path in paths {
        for _ in 0..1000 {
            service.clone().oneshot(get(path)).await.unwrap();
        }
    }
    let limiters = [limit.limiter(), limit.limiter_of("route").unwrap()];
    for limiter in &limiters {
        assert!(count_of(&limiter.stats(), "permits_at_hand") > 0);
        limiter.drain(SECOND).await.unwrap();
        assert_eq!(count_of(&limiter.stats(), "permits_at_hand"), 0);
    }
    for path in paths {
        let error = service.clone().oneshot(get(path)).await.unwrap_err();
        assert_draining(Limited::find(&error).unwrap());
    }
    assert_eq!(upstream.count(), 2000);
}

#[tokio::test(start_paused = true)]
async fn drain_waits_for_calls_in_flight() {
    let limiter = limiter(Quota::in_flight(2));
    let mut calls = Vec::new();
    for seconds in [1, 3] {
        let permit = limiter.acquire(Key::ALL).await.unwrap();
        calls.push(tokio::spawn(async move {
            sleep(SECOND * seconds).await;
            drop(permit);
        }));
    }
    let start = Instant::now();
    let waits = waiters(2, || limiter.acquire(Key::ALL));
    // The first waiter gets the slot of the first call, and its own call ends at once.
    let drained = limiter.drain(SECOND * 10).await.unwrap();
    assert_eq!((drained.left, start.elapsed()), (2, SECOND * 3));
    for wait in waits {
        wait.await.unwrap().1.unwrap();
    }

    let limiter = self::limiter(Quota::in_flight(1));
    let permit = limiter.acquire(Key::ALL).await.unwrap();
    let start = Instant::now();
    limiter.drain(SECOND).await.unwrap();
    assert!(
        start.elapsed() < ms(1010),
        "the call goes on, the drain does not"
    );
    drop(permit);
}

#[tokio::test(start_paused = true)]
async fn layers_send_nothing_after_the_end_of_a_drain() {
    let limit = builder(Quota::every(ms(125))).build().unwrap();
    let limiter = limit.limiter();
    let upstream = Upstream::new();
    let service = ServiceBuilder::new().layer(limit).service(upstream.clone());
    let calls: Vec<_> = (0..100)
        .map(|_| tokio::spawn(service.clone().oneshot(get("http://a/"))))
        .collect();
    tokio::task::yield_now().await;
    let drained = limiter.drain(SECOND * 2).await.unwrap();
    let sent = upstream.count() as u64;
    assert_eq!(drained.left + 1, sent, "one was sent before");
    sleep(SECOND * 20).await;
    assert_eq!(upstream.count() as u64, sent);
    let results = join_all(calls).await;
    let passed = results
        .iter()
        .filter(|result| result.as_ref().unwrap().is_ok());
    assert_eq!(passed.count() as u64, sent);
    let mut service = service;
    let refused = service
        .ready()
        .await
        .unwrap()
        .call(get("http://a/"))
        .await
        .unwrap_err();
    assert_draining(Limited::find(&refused).unwrap());
}

#[tokio::test(start_paused = true)]
async fn the_earlier_end_of_two_drains_counts() {
    let limiter = limiter(Quota::every(SECOND));
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let waits = waiters(10, || limiter.acquire(Key::ALL));
    let start = Instant::now();
    let first = limiter.drain(SECOND * 60);
    let second = async {
        sleep(ms(1500)).await;
        limiter.drain(SECOND).await
    };
    let (first, second) = tokio::join!(first, second);
    assert!(start.elapsed() <= ms(2510), "{:?}", start.elapsed());
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!((first.left, first.refused), (second.left, second.refused));
    assert_eq!(first.left + first.refused, 10);
    for wait in waits {
        assert!(wait.await.unwrap().0 <= ms(2510));
    }
}

#[tokio::test(start_paused = true)]
async fn limiters_stay_drained_when_the_drain_is_dropped() {
    let limiter = limiter(Quota::every(SECOND));
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let waits = waiters(5, || limiter.acquire(Key::ALL));
    let start = Instant::now();
    assert!(timeout(ms(500), limiter.drain(SECOND * 3)).await.is_err());
    assert_draining(&limiter.acquire(Key::ALL).await.unwrap_err());
    let mut left = 0;
    for wait in waits {
        left += u32::from(wait.await.unwrap().1.is_ok());
    }
    assert!(left >= 1 && start.elapsed() <= SECOND * 3, "{left} left");
    drop(limiter.drain(SECOND));
    let unpolled = self::limiter(Quota::every(SECOND));
    drop(unpolled.drain(SECOND));
    drop(unpolled.acquire(Key::ALL).await.unwrap());
}

/// A drain that is dropped after some polls goes on, and the other limiter of the store gets all that
/// this one has not used.
#[tokio::test(start_paused = true)]
async fn drains_dropped_at_any_await_lose_nothing() {
    const LIMIT: usize = 20;
    for most_polls in 1.. {
        let store = Arc::new(Remote::default());
        let quota = Quota::per_minute(LIMIT as u32);
        let [limiter, other] = [(); 2].map(|()| {
            let builder = builder(quota).store(store.clone());
            builder.build().unwrap().limiter()
        });
        for _ in 0..5 {
            drop(limiter.acquire(Key::ALL).await.unwrap());
        }
        let waits = waiters(25, || limiter.acquire(Key::ALL));
        let mut polls = 0;
        let mut drain = Box::pin(limiter.drain(SECOND * 3));
        let ended = poll_fn(|cx| {
            if polls == most_polls {
                return Poll::Ready(None);
            }
            polls += 1;
            drain.as_mut().poll(cx).map(Some)
        })
        .await;
        drop(drain);
        let mut used = 5;
        for wait in waits {
            let (at, result) = wait.await.unwrap();
            assert!(at <= SECOND * 3, "{most_polls} polls: ended after {at:?}");
            match result {
                Ok(()) => used += 1,
                Err(limited) => assert_draining(&limited),
            }
        }
        sleep(SECOND).await;
        let all = other.peek(Key::ALL).await.unwrap().limits[0].used;
        assert_eq!(all, used, "{most_polls} polls");
        let free = LIMIT - usize::try_from(used).unwrap();
        for _ in 0..free {
            let acquired = timeout(ms(50), other.acquire(Key::ALL)).await;
            assert!(
                acquired.is_ok_and(|acquired| acquired.is_ok()),
                "{most_polls} polls: one of {free} is lost"
            );
        }
        if let Some(drained) = ended {
            drained.unwrap();
            println!("the drain ends after {polls} polls");
            assert!(polls > 1, "it was never dropped before its end");
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn drain_reports_to_the_handler() {
    let log = Arc::new(std::sync::Mutex::new(Vec::new()));
    let events = log.clone();
    let limit = builder(Quota::per_second(1)).on_event(move |event| {
        if let Event::Drained { drained, .. } = event {
            events.lock().unwrap().push(**drained);
        }
    });
    let drained = limit
        .build()
        .unwrap()
        .limiter()
        .drain(SECOND)
        .await
        .unwrap();
    assert_eq!(*log.lock().unwrap(), [drained]);
}

#[tokio::test(start_paused = true)]
async fn requests_end_by_themselves_without_the_store() {
    let limit = builder(Quota::per_second(1)).store(Arc::new(Failing::away(true)));
    let limiter = limit.build().unwrap().limiter();
    let waits = waiters(3, || limiter.acquire(Key::ALL));
    limiter.drain(SECOND).await.unwrap();
    for wait in waits {
        wait.await.unwrap().1.unwrap_err();
    }
    assert_eq!(limiter.stats().requests().total(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_other_limiter_of_a_store_has_the_whole_limit() {
    let store = Arc::new(MemoryStore::default());
    let quota = Quota::per_second(50);
    let [going, staying] = [(); 2].map(|()| {
        let builder = builder(quota).store(store.clone());
        builder.build().unwrap().limiter()
    });
    let run = |limiter: Limiter, callers: usize| {
        let tasks = (0..callers).map(move |_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let mut sent = Vec::new();
                let end = Instant::now() + SECOND * 12;
                while Instant::now() < end {
                    match limiter.acquire(Key::ALL).await {
                        Ok(permit) => drop(permit),
                        Err(_) => break,
                    }
                    sent.push(Instant::now());
                }
                sent
            })
        });
        tasks.collect::<Vec<_>>()
    };
    let start = Instant::now();
    let (going_tasks, staying_tasks) = (run(going.clone(), 20), run(staying, 60));
    sleep(SECOND * 3).await;
    going.drain(ms(200)).await.unwrap();
    let drained_at = Instant::now();
    let mut all = Vec::new();
    for sent in join_all(going_tasks).await {
        let sent = sent.unwrap();
        assert!(sent.iter().all(|at| *at <= drained_at), "none leaves later");
        all.extend(sent);
    }
    let mut others = Vec::new();
    for sent in join_all(staying_tasks).await {
        others.extend(sent.unwrap());
    }
    all.extend(&others);
    all.sort_unstable();
    for window in all.windows(51) {
        assert!(window[50] - window[0] >= SECOND, "51 within a second");
    }
    let from = drained_at + ms(1500);
    let until = start + SECOND * 12;
    let sent = others
        .iter()
        .filter(|at| **at >= from && **at < until)
        .count() as f64;
    let rate = sent / (until - from).as_secs_f64();
    assert!(rate > 45.0, "{rate} a second of 50");
}

#[tokio::test(start_paused = true)]
async fn throttles_drain_what_waits() {
    let layer = AdaptiveThrottleLayer::builder()
        .max_wait(SECOND * 60)
        .build()
        .unwrap();
    let throttle = layer.throttle();
    let permit = throttle.acquire(Key::ALL).await.unwrap();
    throttle
        .hold_for(Key::new("held"), SECOND * 30)
        .await
        .unwrap();
    let wait = |key| {
        let throttle = throttle.clone();
        tokio::spawn(async move { throttle.acquire(key).await.map(|permit| permit.give_back()) })
    };
    let waits = [wait(Key::ALL), wait(Key::new("held"))];
    sleep(ms(10)).await;
    let answer = tokio::spawn(async move {
        sleep(ms(400)).await;
        permit.answered(&Signal::default());
    });
    let start = Instant::now();
    let drained = throttle.drain(SECOND * 5).await.unwrap();
    assert!(start.elapsed() < ms(1000), "the hold is known to be longer");
    assert_eq!((drained.left, drained.refused), (1, 1));
    answer.await.unwrap();
    let [left, held] = waits;
    left.await.unwrap().unwrap();
    assert_draining(&held.await.unwrap().unwrap_err());
    assert_draining(&throttle.acquire(Key::ALL).await.unwrap_err());
}

#[tokio::test(start_paused = true)]
async fn a_throttle_is_drained_when_its_last_call_ends() {
    let throttle = AdaptiveThrottleLayer::new().throttle();
    let ends: [fn(ThrottlePermit); 3] = [
        |permit| _ = permit.answered(&Signal::default()),
        ThrottlePermit::give_back,
        drop,
    ];
    let permits = ends.map(|end| (end, throttle.acquire(Key::new(format!("{end:p}")))));
    for (end, permit) in permits {
        let permit = permit.await.unwrap();
        tokio::spawn(async move {
            sleep(ms(50)).await;
            end(permit);
        });
    }
    let drained = throttle.drain(SECOND * 30).await.unwrap();
    assert!(drained.took < SECOND, "{drained:?}");
}

#[derive(Clone, Debug)]
struct History {
    every: u64,
    waiters: usize,
    drain_at: u64,
    within: u64,
    /// How long each caller waits before it gives up, in milliseconds.
    patience: Vec<u64>,
    is_joint: bool,
}

fn history() -> impl Strategy<Value = History> {
    (
        50u64..400,
        1usize..30,
        0u64..2000,
        prop_oneof![Just(0u64), 1u64..4000],
        prop::collection::vec(0u64..5000, 0..10),
        any::<bool>(),
    )
        .prop_map(
            |(every, waiters, drain_at, within, patience, is_joint)| History {
                every,
                waiters,
                drain_at,
                within,
                patience,
                is_joint,
            },
        )
}

async fn drain_history(history: History) -> Result<(), TestCaseError> {
    let quota = Quota::new(1, ms(history.every)).and(Quota::per_day(10_000));
    let limit = builder(quota).build().unwrap();
    let limiter = limit.limiter();
    let other = builder(Quota::per_second(500)).build().unwrap().limiter();
    let start = Instant::now();
    let calls: Vec<_> = (0..history.waiters)
        .map(|number| {
            let mut acquire = limiter.acquire(Key::ALL);
            if history.is_joint {
                acquire = acquire.and(other.acquire(Key::ALL));
            }
            let patience = history.patience.get(number).copied().unwrap_or(60_000);
            tokio::spawn(async move {
                let result = timeout(ms(patience), acquire).await;
                (start.elapsed(), result.ok())
            })
        })
        .collect();
    sleep(ms(history.drain_at)).await;
    limiter.drain(ms(history.within)).await.unwrap();
    let end = ms(history.drain_at + history.within);
    // A timer fires up to a millisecond late.
    prop_assert!(start.elapsed() <= end.max(ms(history.drain_at)) + ms(2));
    let mut sent = 0;
    for call in calls {
        let (at, result) = call.await.unwrap();
        prop_assert!(
            at <= end + ms(2),
            "ended after {:?}, the drain after {:?}",
            at,
            end
        );
        sent += u64::from(matches!(result, Some(Ok(_))));
    }
    let stats = limiter.stats();
    prop_assert_eq!(stats.requests().total(), history.waiters as u64);
    prop_assert_eq!(
        (
            stats.units(),
            count_of(&stats, "permits_at_hand"),
            stats.waiting()
        ),
        (sent, 0, 0)
    );
    // The store counts a booked slot that was given back until it would have been due.
    sleep(SECOND * 60).await;
    prop_assert_eq!(peek(&limit, Key::ALL).await.limits[1].used, sent);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(
            proptest::test_runner::FileFailurePersistence::Direct("proptest-regressions/drain.txt"),
        )),
        ..histories::config(25)
    })]

    #[test]
    fn drains_end_in_time_and_lose_no_unit(history in history()) {
        support::paused_runtime().block_on(drain_history(history))?;
    }
}
