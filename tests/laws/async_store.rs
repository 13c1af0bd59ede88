//! The limiter over a store that answers asynchronously: one call at a time books slots for all
//! waiters.

use crate::support::counted;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use counted::{Counted, largest_count};
use futures::FutureExt;
use futures::future::join_all;
use tokio::time::{Instant, sleep};
use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreError, StoreReply};
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer};

/// A memory store behind a network: each call takes `trip` there and back.
struct Remote {
    store: Arc<MemoryStore>,
    trip: Duration,
    away: AtomicBool,
    calls: AtomicUsize,
    under_way: Arc<AtomicUsize>,
    most_under_way: AtomicUsize,
}

impl Remote {
    fn new(trip: Duration) -> Arc<Self> {
        Arc::new(Remote {
            store: Arc::new(MemoryStore::default()),
            trip,
            away: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            under_way: Arc::new(AtomicUsize::new(0)),
            most_under_way: AtomicUsize::new(0),
        })
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Store for Remote {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let count = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_under_way.fetch_max(count, Ordering::Relaxed);
        // The store decides at the moment of sending: the worst case for the validity of its
        // permits.
        let answer = match self.store.lease(request) {
            _ if self.away.load(Ordering::Relaxed) => Err(StoreError::Away(Arc::new(
                std::io::Error::other("no route"),
            ))),
            StoreReply::Ready(answer) => answer,
            _ => unreachable!("memory answers now"),
        };
        let (trip, under_way) = (self.trip, self.under_way.clone());
        StoreReply::Pending(Box::pin(async move {
            sleep(trip).await;
            under_way.fetch_sub(1, Ordering::Relaxed);
            answer
        }))
    }
}

/// A store that may lose its state, and has not: permits granted earlier are confirmed before they
/// are used.
struct Lossy(Arc<Remote>);

impl Store for Lossy {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.0)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        match self.0.lease(request) {
            StoreReply::Pending(answer) => StoreReply::Pending(Box::pin(async move {
                let mut lease = answer.await?;
                lease.incarnation = 1;
                Ok(lease)
            })),
            answer => answer,
        }
    }
}

/// It may wait for the answer of a slow store, but not beyond its deadline, also if that is later than `max_wait`.
#[tokio::test(start_paused = true)]
async fn no_request_waits_for_an_answer_beyond_its_deadline() {
    for max_wait in [0, 30, 1000] {
        let builder = RateLimitLayer::builder(Quota::per_second(10));
        let builder = builder
            .store(Remote::new(millis(200)))
            .max_wait(millis(max_wait));
        let limiter = builder.build().unwrap().limiter();
        let start = Instant::now();
        let deadline = (start + millis(50)).into_std();
        let refused = limiter.acquire(key()).deadline(deadline).await;
        assert!(refused.is_err());
        assert_eq!(start.elapsed(), millis(50), "max_wait {max_wait}");
        let joint = limiter
            .acquire(key())
            .and(limiter.acquire(Key::new("other")))
            .deadline((Instant::now() + millis(50)).into_std());
        let start = Instant::now();
        assert!(joint.await.is_err());
        assert_eq!(start.elapsed(), millis(50), "max_wait {max_wait}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_confirmed_before_it_is_due() {
    // A permit lives for 50 ms, which is shorter than the trip.
    let store = Arc::new(Lossy(Remote::new(millis(100))));
    let quota = Quota::new(1, Duration::from_secs(5));
    let layer = RateLimitLayer::builder(quota)
        .store(store.clone())
        .max_wait(Duration::from_secs(60));
    let limiter = layer.build().unwrap().limiter();
    let start = Instant::now();
    let waits = (0..3).map(|_| {
        limiter
            .acquire(key())
            .map(|permit| (permit.unwrap().is_valid(), start.elapsed()))
    });
    let left = join_all(waits).await;
    let at_most = |slots: u32| slots * millis(5300) + millis(200);
    assert!(
        (0..)
            .zip(&left)
            .all(|(slots, (alive, left))| *alive && *left <= at_most(slots)),
        "{left:?}"
    );
    // One call books all slots, and one call precedes each slot that lies ahead.
    assert!(store.0.calls() <= 4, "{}", store.0.calls());
}

/// A request that costs much waits, and others behind it. When it is dropped, they leave as if it had never come, even
/// if the call that books for them anew fails once.
#[tokio::test(start_paused = true)]
async fn dropped_dear_waiter_lets_the_others_leave() {
    let pair = Quota::bucket(2).refill(1, millis(10_000));
    for (quota, used, dear, left) in [(pair, 1, 2, 1), (Quota::per_minute(10), 5, 10, 5)] {
        for fails in [false, true] {
            let store = Remote::new(millis(5));
            let layer = RateLimitLayer::builder(quota)
                .store(store.clone())
                .max_wait(Duration::from_secs(600));
            let limiter = layer.build().unwrap().limiter();
            drop(limiter.acquire(key()).cost(used).await.unwrap());
            let wait = |cost| {
                let request = limiter.acquire(key()).cost(cost);
                tokio::spawn(async move { drop(request.await.unwrap()) })
            };
            let first = wait(dear);
            sleep(millis(100)).await;
            let others: Vec<_> = (0..left).map(|_| wait(1)).collect();
            sleep(millis(100)).await;
            let calls = store.calls();
            store.away.store(fails, Ordering::Relaxed);
            first.abort();
            let start = Instant::now();
            while store.calls() == calls {
                sleep(millis(1)).await;
            }
            store.away.store(false, Ordering::Relaxed);
            for waiter in others {
                waiter.await.unwrap();
            }
            let waited = start.elapsed();
            // The store has executed the call that failed. What it booked is used up.
            let within = if fails { 70_000 } else { 100 };
            assert!(waited <= millis(within), "{quota}, {fails}: {waited:?}");
        }
    }
}

/// A store that replies until it is silent.
struct Silent {
    store: Lossy,
    is_silent: AtomicBool,
}

impl Store for Silent {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        match self.is_silent.load(Ordering::Relaxed) {
            true => StoreReply::Pending(Box::pin(std::future::pending())),
            false => self.store.lease(request),
        }
    }
}

/// The slots of both are due, and wait for the store to confirm them.
#[tokio::test(start_paused = true)]
async fn waiters_of_two_costs_let_each_other_sleep() {
    let store = Arc::new(Silent {
        store: Lossy(Remote::new(millis(5))),
        is_silent: AtomicBool::new(false),
    });
    let builder = RateLimitLayer::builder(Quota::new(3, Duration::from_secs(10)));
    let builder = builder
        .store(store.clone())
        .max_wait(Duration::from_secs(20));
    let limiter = builder.build().unwrap().limiter();
    drop(limiter.acquire(key()).cost(3).await.unwrap());
    let waits = [1, 2].map(|cost| {
        let mut wait = Box::pin(limiter.acquire(key()).cost(cost).into_future());
        let mut polls = 0;
        std::future::poll_fn(move |cx| {
            polls += 1;
            assert!(polls < 200, "it wakes without end");
            wait.poll_unpin(cx).map(drop)
        })
    });
    let silence = async {
        sleep(millis(1000)).await;
        store.is_silent.store(true, Ordering::Relaxed);
    };
    tokio::join!(join_all(waits), silence);
}

fn limiter(quota: Quota, store: &Arc<Remote>) -> Limiter {
    let builder = RateLimitLayer::builder(quota)
        .store(store.clone())
        .max_wait(Duration::from_secs(60));
    builder.build().unwrap().limiter()
}

fn key() -> Key {
    Key::new("key")
}

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

#[tokio::test(start_paused = true)]
async fn waiters_share_one_store_call_and_go_in_order() {
    let store = Remote::new(millis(4));
    let limiter = limiter(Quota::per_second(20), &store);
    let start = Instant::now();
    let done = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..100)
        .map(|number| {
            let (acquire, done) = (limiter.acquire(key()), done.clone());
            tokio::spawn(async move {
                drop(acquire.await.unwrap());
                done.lock().unwrap().push((number, start.elapsed()));
            })
        })
        .collect();
    join_all(tasks)
        .await
        .into_iter()
        .for_each(|ended| ended.unwrap());
    let done = done.lock().unwrap();
    assert!(
        done.iter().map(|(number, _)| *number).eq(0..100),
        "{done:?}"
    );
    assert_eq!(
        store.most_under_way.load(Ordering::Relaxed),
        1,
        "one call at a time"
    );
    assert!(
        store.calls() <= 2,
        "the first asks for itself, the second for all others: {}",
        store.calls()
    );
    assert!(
        start.elapsed() <= millis(4 * 1020 + 20),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn store_call_serves_waiters_after_its_starter_leaves() {
    let store = Remote::new(millis(4));
    let limiter = limiter(Quota::per_second(2), &store);
    let mut first = Box::pin(limiter.acquire(key()));
    assert!(first.as_mut().now_or_never().is_none());
    let others: Vec<_> = (0..4)
        .map(|_| tokio::spawn(limiter.acquire(key())))
        .collect();
    tokio::task::yield_now().await;
    drop(first);
    let start = Instant::now();
    for other in others {
        drop(other.await.unwrap().unwrap());
    }
    assert!(
        start.elapsed() <= millis(1020 + 20),
        "its slot went to the next: {:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn unreachable_store_fails_each_request_and_recovers_without_restart() {
    let store = Remote::new(millis(4));
    let limiter = limiter(Quota::per_second(20), &store);
    store.away.store(true, Ordering::Relaxed);
    for ended in join_all((0..10).map(|_| limiter.acquire(key()))).await {
        let error = ended.unwrap_err();
        assert!(
            matches!(
                error,
                Limited::Store {
                    source: StoreError::Away(_),
                    ..
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("no route"), "{error}");
    }
    store.away.store(false, Ordering::Relaxed);
    drop(limiter.acquire(key()).await.unwrap());
}

/// Validity counts from the moment of sending, so a slow store's permits arrive expired until their
/// validity is extended.
#[tokio::test(start_paused = true)]
async fn slow_store_gets_permits_with_longer_validity() {
    let store = Remote::new(millis(15));
    let limiter = limiter(Quota::per_second(20), &store);
    for _ in 0..50 {
        let permit = limiter.acquire(key()).await.unwrap();
        assert!(permit.is_valid(), "nothing is sent under a dead permit");
    }
    assert!(store.calls() <= 55, "{} calls", store.calls());
}

#[tokio::test(start_paused = true)]
async fn store_slower_than_any_permit_is_a_named_error() {
    let store = Remote::new(millis(80));
    let limiter = limiter(Quota::per_second(20), &store);
    let error = limiter.acquire(key()).await.unwrap_err();
    assert!(
        matches!(
            error,
            Limited::Store {
                source: StoreError::TooSlow { .. },
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("80.0ms"), "{error}");
    assert!(store.calls() <= 3, "{} calls", store.calls());
}

/// Unused prefetched permits go back to the store when they expire, and an idle process makes no
/// more calls.
#[tokio::test(start_paused = true)]
async fn what_was_fetched_ahead_and_left_over_goes_back() {
    let store = Remote::new(Duration::from_micros(500));
    let limiter = limiter(Quota::per_second(1000), &store);
    let mut sent = 0;
    while store.calls() < 12 {
        drop(limiter.acquire(key()).await.unwrap());
        sent += 1;
    }
    let used = async || limiter.peek(key()).await.unwrap().limits[0].used;
    assert!(used().await > sent, "some permits are prefetched");
    sleep(millis(60)).await;
    assert_eq!(used().await, sent, "and went back");
    let calls = store.calls();
    sleep(millis(900)).await;
    assert_eq!(store.calls(), calls, "an idle limiter makes no store call");
}

/// Waiters whose slots are due at one tick leave at that tick, without another store call.
#[tokio::test(start_paused = true)]
async fn waiters_due_at_one_tick_go_without_asking_again() {
    let store = Remote::new(millis(2));
    let limiter = limiter(Quota::per_second(400), &store);
    let (futures, polls): (Vec<_>, Vec<_>) = (0..1200)
        .map(|_| Counted::new(limiter.acquire(key())))
        .unzip();
    let tasks = futures.into_iter().map(|future| {
        tokio::spawn(async {
            drop(future.await.unwrap());
            Instant::now()
        })
    });
    let moments: Vec<_> = join_all(tasks)
        .await
        .into_iter()
        .map(|ended| ended.unwrap())
        .collect();
    let mut ticks = moments.clone();
    ticks.dedup();
    // The first request asked for itself alone and has its own slot.
    assert!(
        ticks.len() <= 6,
        "400 leave at once, three times: {} ticks",
        ticks.len()
    );
    assert!(largest_count(&moments, Duration::from_secs(1)) <= 400);
    // One call asks for at most 500 permits.
    assert!(store.calls() <= 4, "{} calls", store.calls());
    let most = polls
        .iter()
        .map(|polls| polls.load(Ordering::Relaxed))
        .max();
    assert!(
        most <= Some(3),
        "entered, was assigned its slot, got it: {most:?} polls"
    );
}

/// An idle limiter has no task, so it has no timer and wakes no thread.
#[tokio::test(start_paused = true)]
async fn idle_limiter_calls_no_store_and_has_no_timer() {
    let store = Remote::new(Duration::from_micros(500));
    let limiter = limiter(Quota::per_second(1000), &store);
    for number in 0..20u32 {
        for _ in 0..50 {
            drop(
                limiter
                    .acquire(Key::new(number.to_le_bytes()))
                    .await
                    .unwrap(),
            );
        }
    }
    let here = tokio::runtime::Handle::current().metrics();
    assert!(
        here.num_alive_tasks() > 0,
        "some tasks look after prefetched permits"
    );
    sleep(Duration::from_secs(1)).await;
    assert_eq!(
        here.num_alive_tasks(),
        0,
        "there is nothing left to look after"
    );
    let (calls, parks) = (store.calls(), here.worker_park_count(0));
    sleep(Duration::from_secs(3600)).await;
    let woken = here.worker_park_count(0) - parks;
    // Tokio wakes occasionally for a timer as distant as the one of this test.
    assert!(woken < 10, "woken {woken} times in an hour");
    assert_eq!(store.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn prefetched_permit_costs_no_allocation_and_no_call() {
    let store = Remote::new(Duration::from_micros(500));
    let limiter = limiter(Quota::per_hour(1_000_000), &store);
    while store.calls() < 12 {
        drop(limiter.acquire(key()).await.unwrap());
    }
    let calls = store.calls();
    let spent = allocation_counter::measure(|| {
        for _ in 0..500 {
            drop(
                limiter
                    .acquire(key())
                    .now_or_never()
                    .expect("it is prefetched")
                    .unwrap(),
            );
        }
    });
    assert_eq!((spent.count_total, store.calls()), (0, calls), "{spent:?}");
}

/// The runtime that was about to make the call has ended: the next request makes it.
#[test]
fn queue_survives_runtime_that_ends_before_the_store_call() {
    let store = Remote::new(Duration::from_millis(1));
    let limiter = limiter(Quota::per_second(100), &store);
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    runtime().block_on(async { drop(limiter.acquire(key()).await.unwrap()) });
    let mut waiting = Box::pin(limiter.acquire(key()));
    // Polled once: the call would follow when the runtime runs again, which never happens.
    runtime().block_on(async { assert!(futures::poll!(&mut waiting).is_pending()) });
    runtime().block_on(async {
        let patience = tokio::time::timeout(Duration::from_secs(5), limiter.acquire(key()));
        assert!(patience.await.expect("a call is made").is_ok());
    });
}

/// The runtime that ran the call has ended.
#[test]
fn store_call_lost_with_its_runtime_is_an_error() {
    let store = Remote::new(millis(15));
    let limiter = limiter(Quota::per_second(20), &store);
    let (here, there) = (runtime(), runtime());
    there.block_on(async {
        let mut first = Box::pin(limiter.acquire(key()));
        assert!(first.as_mut().now_or_never().is_none());
        tokio::task::yield_now().await;
    });
    let mut waiting = Box::pin(limiter.acquire(key()));
    here.block_on(async { assert!(waiting.as_mut().now_or_never().is_none()) });
    drop(there);
    let error = here.block_on(waiting).unwrap_err();
    assert!(
        matches!(
            error,
            Limited::Store {
                source: StoreError::Lost,
                ..
            }
        ),
        "{error}"
    );
    drop(
        here.block_on(limiter.acquire(key()))
            .expect("the next call is a new one"),
    );
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap()
}

/// A store that answers at once, but cannot read the time for a while.
struct Stalling(MemoryStore);

impl Store for Stalling {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.0)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        std::thread::sleep(millis(15));
        self.0.lease(request)
    }
}

#[tokio::test]
async fn store_that_stalls_past_permit_validity_ends_the_wait() {
    let store = Arc::new(Stalling(MemoryStore::default()));
    let builder = RateLimitLayer::builder(Quota::new(1, millis(200))).store(store);
    let limiter = builder.max_wait(millis(500)).build().unwrap().limiter();
    drop(limiter.acquire(key()).await.unwrap());
    let ended = tokio::time::timeout(Duration::from_secs(60), limiter.acquire(key())).await;
    assert!(ended.is_ok(), "max_wait holds");
}

/// A store in memory whose leases take a trip. It answers all other calls at once.
#[derive(Default)]
struct LateLeases {
    store: MemoryStore,
    trip: Mutex<Duration>,
}

impl Store for LateLeases {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let trip = *self.trip.lock().unwrap();
        let StoreReply::Ready(answer) = self.store.lease(request) else {
            unreachable!("memory answers now")
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(trip).await;
            answer
        }))
    }
}

/// A request waits for the first answer of the store for a second, whatever its `max_wait` is. Once it has a slot, and loses
/// it to a hold, it waits for the next answer no longer than `max_wait`.
#[tokio::test(start_paused = true)]
async fn waiter_that_loses_its_slot_waits_no_longer_than_max_wait() {
    let store = Arc::new(LateLeases::default());
    let builder = RateLimitLayer::builder(Quota::new(1, millis(400))).store(store.clone());
    let limiter = builder.max_wait(millis(500)).build().unwrap().limiter();
    drop(limiter.acquire(key()).await.unwrap());
    *store.trip.lock().unwrap() = millis(20);
    let start = Instant::now();
    let waits = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire(key()).await.map(|_| ()) }
    });
    sleep(millis(100)).await;
    *store.trip.lock().unwrap() = millis(3000);
    limiter.hold_for(key(), millis(1)).await.unwrap();
    let ended = waits.await.unwrap();
    assert!(ended.is_err(), "the second answer comes too late");
    assert_eq!(start.elapsed(), millis(520), "the first answer took 20 ms");
}

/// A task of another runtime was to give back the permits at hand, and no thread drives that runtime.
#[test]
fn calls_beside_a_runtime_at_rest_are_sent_at_once() {
    let store = Remote::new(millis(1));
    let limiter = limiter(Quota::per_second(1000), &store);
    let (idle, here) = (runtime(), runtime());
    idle.block_on(async {
        // The last call has fetched permits in advance.
        while store.calls() < 8 {
            drop(limiter.acquire(key()).await.unwrap());
        }
    });
    here.block_on(async {
        sleep(millis(100)).await; // they have expired
        let waits = tokio::time::timeout(millis(500), limiter.acquire(key()));
        drop(waits.await.expect("the call is sent").unwrap());
    });
}

/// The runtime of the call exists, but no thread drives it: a program that calls `block_on` for
/// each request.
#[test]
fn calls_in_a_runtime_at_rest_stop_no_line() {
    let store = Remote::new(millis(15));
    let builder = RateLimitLayer::builder(Quota::per_second(20)).store(store.clone());
    let limiter = builder
        .max_wait(Duration::from_secs(3))
        .build()
        .unwrap()
        .limiter();
    let (idle, here) = (runtime(), runtime());
    idle.block_on(async {
        let mut first = Box::pin(limiter.acquire(key()));
        assert!(first.as_mut().now_or_never().is_none());
        tokio::task::yield_now().await; // the call is under way, as a task of `idle`
    }); // dropped, as by `timeout` or `select!`
    let mut ended = Vec::new();
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let permit = here.block_on(limiter.acquire(key()));
        ended.push((permit.is_ok(), start.elapsed()));
    }
    // The store's answer arrives in the end, and its permit is given back.
    idle.block_on(async { sleep(millis(30)).await });
    assert!(
        ended
            .iter()
            .all(|(granted, took)| *granted && *took < Duration::from_secs(2)),
        "{ended:?}"
    );
    let peek = here.block_on(limiter.peek(key())).unwrap();
    assert_eq!(peek.limits[0].used, 3, "{peek:?}");
}
