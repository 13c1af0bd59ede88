//! Probes: after a hold that was cut, one request leaves first. Under a paused clock.

use crate::support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures::FutureExt;
use http::Response;
use support::{Upstream, get, limited, ms, ok};
use tokio::time::{Instant, sleep};
use tollgate::store::{
    Lease, LeaseRequest, MemoryStore, Store, StoreError, StoreListener, StoreReply,
};
use tollgate::{Key, Limiter, OnStoreError, Permit, Quota, RateLimitLayer, Signal};
use tower::{BoxError, Layer, ServiceExt};

const SECOND: Duration = Duration::from_secs(1);

/// Refuses for longer than `max_hold`, so that the hold is cut.
fn refused() -> Signal {
    Signal::read(&limited("3600").unwrap())
}

fn accepted() -> Signal {
    Signal::read(&ok().unwrap())
}

/// Starts requests that are refused four seconds after they have left. Returns how many have left.
fn start(count: usize, limiter: &Limiter, key: Key) -> Arc<AtomicUsize> {
    let left = Arc::new(AtomicUsize::new(0));
    for _ in 0..count {
        let (acquire, left) = (limiter.acquire(key), left.clone());
        drop(tokio::spawn(async move {
            if let Ok(permit) = acquire.await {
                let sent = permit.begin().unwrap();
                left.fetch_add(1, Ordering::Relaxed);
                sleep(4 * SECOND).await;
                sent.answered(&refused());
            }
        }));
    }
    left
}

fn left(requests: &AtomicUsize) -> usize {
    requests.load(Ordering::Relaxed)
}

/// Requests that were about to be sent before the hold find that their connection is broken, and give back what they have
/// while a probe is on its way. It was 20 of 1.
#[tokio::test(start_paused = true)]
async fn permits_given_back_let_no_second_probe_leave() {
    let builder = RateLimitLayer::builder(Quota::per_second(1000)).max_hold(2 * SECOND);
    let limiter = builder.max_wait(60 * SECOND).build().unwrap().limiter();
    let mut early = Vec::new();
    for _ in 0..20 {
        early.push(limiter.acquire(Key::ALL).await.unwrap());
    }
    early.pop().unwrap().begin().unwrap().answered(&refused());
    let requests = start(100, &limiter, Key::ALL);
    sleep(ms(2200)).await;
    assert_eq!(left(&requests), 1);
    for permit in early {
        permit.give_back();
        sleep(ms(20)).await;
    }
    assert_eq!(left(&requests), 1, "before any answer");
}

/// A store in memory that can be away.
#[derive(Default)]
struct MayBeAway {
    memory: MemoryStore,
    is_away: Mutex<bool>,
}

impl Store for MayBeAway {
    tollgate::delegate_store!(self => self.memory; implements lease);

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        if *self.is_away.lock().unwrap() {
            let away = std::io::Error::from(std::io::ErrorKind::TimedOut);
            return StoreReply::Ready(Err(StoreError::Away(Arc::new(away))));
        }
        self.memory.lease(request)
    }
}

/// While the store is away, requests pass uncounted. Behind a hold that was cut, one does: the probe. It was 200 of 1.
#[tokio::test(start_paused = true)]
async fn uncounted_requests_wait_for_the_probe() {
    for key in [Key::ALL, Key::new("tenant")] {
        let store = Arc::new(MayBeAway::default());
        let builder = RateLimitLayer::builder(Quota::per_second(1000)).store(store.clone());
        let builder = builder.on_store_error(OnStoreError::FailOpen);
        let builder = builder.max_hold(2 * SECOND).max_wait(20 * SECOND);
        let limiter = builder.build().unwrap().limiter();
        limiter
            .acquire(key)
            .await
            .unwrap()
            .begin()
            .unwrap()
            .answered(&refused());
        *store.is_away.lock().unwrap() = true;
        let requests = start(200, &limiter, key);
        sleep(ms(1500)).await;
        assert_eq!(left(&requests), 0, "the key is on hold");
        sleep(ms(1000)).await;
        let later = start(50, &limiter, key);
        sleep(ms(1000)).await;
        assert_eq!(left(&requests), 1, "before any answer");
        assert_eq!(left(&later), 0);
    }
}

/// A store in memory whose messages do not arrive in time.
struct Deaf(Arc<MemoryStore>);

impl Store for Deaf {
    tollgate::delegate_store!(self => *self.0; implements listen);

    fn listen(&self, _listener: Weak<dyn StoreListener>) {}
}

/// The probe of one process is refused, and then that of another one is accepted, which left before it knew.
#[tokio::test(start_paused = true)]
async fn an_accepted_probe_ends_no_hold_that_another_one_caused() {
    let store = Arc::new(MemoryStore::default());
    let [one, other] = [(); 2].map(|()| {
        let deaf = Arc::new(Deaf(store.clone()));
        let builder = RateLimitLayer::builder(Quota::per_second(50)).store(deaf);
        builder.max_hold(SECOND).build().unwrap().limiter()
    });
    let key = Key::new("tenant");
    let first = one.acquire(key).await.unwrap().begin().unwrap();
    drop(other.acquire(key).await.unwrap());
    first.answered(&refused());
    // It learns of the hold.
    assert!(other.acquire(key).now_or_never().is_none());
    sleep(ms(1100)).await;
    let [probe, others] = [&one, &other].map(|limiter| limiter.acquire(key).now_or_never());
    let [probe, others] =
        [probe, others].map(|probe| probe.expect("it is a probe").unwrap().begin().unwrap());
    others.answered(&refused());
    let held = other.peek(key).await.unwrap().held;
    assert!(held.is_some_and(|held| held > ms(900)), "{held:?}");
    probe.answered(&accepted());
    for limiter in [&one, &other] {
        let held = limiter.peek(key).await.unwrap().held;
        assert!(held.is_some_and(|held| held > ms(900)), "{held:?}");
        assert!(
            limiter
                .acquire(key)
                .now_or_never()
                .is_none_or(|next| next.is_err())
        );
    }
    // The next one that is accepted ends the probation for both.
    sleep(ms(1100)).await;
    one.acquire(key)
        .await
        .unwrap()
        .begin()
        .unwrap()
        .answered(&accepted());
    for limiter in [&one, &other] {
        let all: Vec<Permit> = (0..10)
            .filter_map(|_| limiter.acquire(key).now_or_never()?.ok())
            .collect();
        assert_eq!(all.len(), 10);
    }
}

/// The call of a probe that is dropped has no response: the next request is the probe at once.
#[tokio::test(start_paused = true)]
async fn a_probe_that_is_cancelled_comes_back() {
    let builder = RateLimitLayer::builder(Quota::per_second(50)).max_hold(SECOND);
    let layer = builder.build().unwrap();
    let service = layer.layer(Upstream::answering([limited("3600")]));
    service.oneshot(get("/")).await.unwrap();
    sleep(ms(1100)).await;
    let hangs = layer.layer(tower::service_fn(|_: http::Request<String>| async {
        std::future::pending::<()>().await;
        Ok::<_, BoxError>(Response::new(()))
    }));
    let mut probe = Box::pin(hangs.oneshot(get("/")));
    assert!(probe.as_mut().now_or_never().is_none());
    let start = Instant::now();
    let next = layer.layer(Upstream::answering([ok()]));
    let mut next = Box::pin(next.oneshot(get("/")));
    sleep(ms(300)).await;
    assert!(
        next.as_mut().now_or_never().is_none(),
        "a probe is on its way"
    );
    drop(probe);
    next.await.unwrap();
    assert_eq!(start.elapsed(), ms(300));
}
