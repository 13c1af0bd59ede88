//! Many keys: bounded, each counted separately, at a cost that does not grow. Under a paused clock.

use crate::support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use tokio::time::{advance, sleep};
use tollgate::store::{ClientSession, Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer, Signal};

/// A store that answers asynchronously and may lose its state, as a server does. It records what it
/// receives.
#[derive(Default)]
struct Server {
    store: MemoryStore,
    calls: AtomicUsize,
    /// Some while a test records.
    told: Mutex<Option<Vec<ClientSession>>>,
}

impl Store for Server {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some(told) = &mut *self.told.lock().unwrap() {
            told.push(request.session);
        }
        let remember = request.spec.quota().limits()[0].window() + Duration::from_secs(1);
        let StoreReply::Ready(mut answer) = self.store.lease(request) else {
            unreachable!("memory answers now")
        };
        if let Ok(lease) = &mut answer {
            (lease.incarnation, lease.writes, lease.session_ttl) = (7, 1, remember);
        }
        StoreReply::Pending(Box::pin(async move {
            tokio::task::yield_now().await;
            answer
        }))
    }
}

fn limiter(quota: Quota, max_keys: usize) -> Limiter {
    let builder = RateLimitLayer::builder(quota)
        .max_keys(max_keys)
        .max_wait(Duration::ZERO);
    builder.build().unwrap().limiter()
}

fn limiter_over(server: &Arc<Server>, quota: Quota, max_keys: usize) -> Limiter {
    let builder = RateLimitLayer::builder(quota)
        .max_keys(max_keys)
        .store(server.clone());
    builder.build().unwrap().limiter()
}

fn host(number: u32) -> Key {
    Key::new(number.to_le_bytes())
}

/// The outcome of a call. `None` if it waits for a slot that is a margin away.
fn poll(limiter: &Limiter, host: Key) -> Option<Result<Permit, Limited>> {
    limiter.acquire(host).now_or_never()
}

/// The outcome of a call that must not wait.
fn call(limiter: &Limiter, host: Key) -> Result<Permit, Limited> {
    poll(limiter, host).expect("no request waits here")
}

const HOUR: Duration = Duration::from_secs(3600);

/// A million keys take some seconds in an optimised build: see the benches.
const CROWD: u32 = 30_000;

#[tokio::test(start_paused = true)]
async fn each_of_many_keys_gets_exactly_its_limit() {
    let limiter = limiter(Quota::per_hour(1), CROWD as usize);
    for number in 0..CROWD {
        drop(call(&limiter, host(number)).unwrap());
    }
    for number in 0..CROWD {
        let refused = call(&limiter, host(number)).unwrap_err();
        assert!(refused.retry_after().is_some(), "{refused}");
    }
    let refused = call(&limiter, host(CROWD)).unwrap_err();
    assert!(refused.to_string().contains("max_keys"), "{refused}");
}

/// New keys arrive continuously, and get in when an old key is no longer limited.
#[tokio::test(start_paused = true)]
async fn limited_keys_are_kept_however_many_keys_arrive() {
    const MOST: u32 = 2_000;
    let limiter = limiter(Quota::new(1, Duration::from_secs(10)), MOST as usize);
    let mut served = vec![None; 40_000];
    let mut here = 0;
    for (number, moment) in (0..40_000u32).zip(0..) {
        advance(Duration::from_millis(1)).await;
        // A new key, and a key that was here before.
        for other in [number, number.wrapping_mul(2_654_435_761) % (number + 1)] {
            if let Some(Ok(_)) = poll(&limiter, host(other)) {
                let before = served[other as usize].replace(moment);
                assert!(
                    before.is_none_or(|before| before + 10_000 < moment),
                    "{other} again at {moment}"
                );
                here += 1;
            }
        }
    }
    // 40 seconds are three windows and the first.
    assert!((3 * MOST..=4 * MOST).contains(&here), "{here} were served");
}

/// Prefetched permits of a long window serve each of many hosts for some of their turns.
#[tokio::test(start_paused = true)]
async fn hosts_that_take_turns_have_prefetched_permits() {
    let server = Arc::new(Server::default());
    let limiter = limiter_over(&server, Quota::per_hour(5000), 1000);
    let mut calls = Vec::new();
    for _ in 0..20 {
        let before = server.calls.load(Ordering::Relaxed);
        for number in 0..1000 {
            drop(limiter.acquire(host(number)).await.unwrap());
        }
        sleep(Duration::from_millis(100)).await;
        calls.push(server.calls.load(Ordering::Relaxed) - before);
    }
    let last: usize = calls[10..].iter().sum();
    assert!(
        last * 5 < 10_000,
        "calls of the store in each turn of a thousand hosts: {calls:?}"
    );
}

/// Grants within the window are reported with the next call, so that a store that lost them can
/// detect it. With more keys than `max_keys`, the keys with the latest grants are remembered.
#[tokio::test(start_paused = true)]
async fn grants_are_remembered_for_at_least_max_keys_keys() {
    const MOST: u32 = 1000;
    let server = Arc::new(Server::default());
    let limiter = limiter_over(&server, Quota::per_hour(20), MOST as usize);
    let granted = async |hosts: std::ops::Range<u32>| {
        *server.told.lock().unwrap() = Some(Vec::new());
        for number in hosts {
            drop(limiter.acquire(host(number)).await.unwrap());
            advance(Duration::from_millis(1)).await;
        }
        let told = server.told.lock().unwrap().take().unwrap();
        told.iter().filter(|memory| memory.granted > 0).count()
    };
    assert_eq!(granted(0..MOST).await, 0);
    sleep(HOUR / 2).await;
    assert_eq!(
        granted(0..MOST).await,
        MOST as usize,
        "no key was forgotten"
    );
    // New keys need room: idle keys are forgotten, approximately oldest first.
    assert_eq!(granted(MOST..MOST + MOST / 10).await, 0);
    let young = granted(MOST / 2..MOST).await;
    assert!(
        young * 10 >= MOST as usize / 2 * 9,
        "{young} of the younger half are remembered"
    );
}

/// A key that makes room for another keeps no permits.
#[tokio::test(start_paused = true)]
async fn prefetched_permits_go_back_when_their_key_is_forgotten() {
    let store = Arc::new(MemoryStore::default());
    let builder = RateLimitLayer::builder(Quota::per_hour(5000))
        .max_keys(1)
        .store(store);
    let limiter = builder.build().unwrap().limiter();
    for _ in 0..15 {
        drop(call(&limiter, host(1)).unwrap());
    }
    let used = async || limiter.peek(host(1)).await.unwrap().limits[0].used;
    assert!(used().await > 15, "some permits are prefetched");
    // The permits have expired, and the key makes room.
    sleep(Duration::from_secs(20)).await;
    drop(call(&limiter, host(2)).unwrap());
    assert_eq!(used().await, 15);
}

/// Four new keys appear each second; each calls for some seconds, sometimes too often, and then
/// never again.
async fn five_minutes(limiter: &Limiter, first: u32) {
    for number in first..first + 1200 {
        for age in [0, 1, 2, 10, 10, 20] {
            let acquire = limiter.acquire(host(number.saturating_sub(age)));
            tokio::spawn(async move { drop(acquire.await) });
        }
        sleep(Duration::from_millis(250)).await;
    }
    // Until no request waits.
    sleep(Duration::from_secs(20)).await;
}

/// Bytes still allocated after each five minutes of a quarter of an hour.
fn bytes_over_time(limiter: &Limiter) -> Vec<i64> {
    let (runtime, mut bytes) = (support::paused_runtime(), 0);
    let parts = (0..3).map(|part| {
        let used =
            allocation_counter::measure(|| runtime.block_on(five_minutes(limiter, part * 1200)));
        bytes += used.bytes_current;
        bytes
    });
    parts.collect()
}

#[test]
fn keys_used_for_long_leave_nothing() {
    let quota = Quota::new(3, Duration::from_secs(2));
    let alone = RateLimitLayer::new(quota).unwrap().limiter();
    let shared = limiter_over(&Arc::new(Server::default()), quota, 100_000);
    for (limiter, name) in [(alone, "memory"), (shared, "a store that answers later")] {
        let bytes = bytes_over_time(&limiter);
        println!("{name}: {bytes:?} bytes after each five minutes");
        let first = bytes[0];
        assert!(first < 300_000, "{name}: {bytes:?}");
        assert!(
            bytes.iter().all(|bytes| *bytes <= first + first / 4),
            "{name}: {bytes:?}"
        );
    }
}

/// Two requests are refused at once. The second refusal makes no longer hold, and the store is told of it.
#[tokio::test(start_paused = true)]
async fn keys_that_were_refused_twice_make_room() {
    let limiter = limiter(Quota::per_minute(10), 1);
    let sent = [(); 2].map(|()| call(&limiter, host(1)).unwrap().begin().unwrap());
    let response = http::Response::builder()
        .status(429)
        .header("RateLimit-Limit", 10)
        .header("RateLimit-Remaining", 0)
        .header("RateLimit-Reset", 30)
        .body(());
    let refused = Signal::read(&response.unwrap());
    for sent in sent {
        sent.answered(&refused);
    }
    tokio::time::advance(HOUR).await;
    assert!(call(&limiter, host(2)).is_ok());
}

/// A response states that less is left than this process has at hand. What it has used is reported all the same.
#[tokio::test(start_paused = true)]
async fn used_permits_stay_reported_when_others_go_back() {
    const USED: usize = 8;
    let server = Arc::new(Server::default());
    let limiter = limiter_over(&server, Quota::per_minute(1000), 10);
    let mut sent = Vec::new();
    for _ in 0..USED {
        sent.push(limiter.acquire(host(1)).await.unwrap().begin().unwrap());
    }
    let response = http::Response::builder()
        .header("RateLimit-Limit", 1000)
        .header("RateLimit-Remaining", 1)
        .header("RateLimit-Reset", 30)
        .body(());
    *server.told.lock().unwrap() = Some(Vec::new());
    let signal = Signal::read(&response.unwrap());
    sent.pop().unwrap().answered(&signal);
    sleep(Duration::from_secs(1)).await;
    let told = server.told.lock().unwrap().take().unwrap();
    let granted: Vec<_> = told.iter().map(|session| session.granted).collect();
    assert_eq!(granted, [USED as u64]);
}
