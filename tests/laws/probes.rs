//! Probes: after a hold that was cut, or whose end nobody stated, one request leaves first. Under a paused clock.

use crate::support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures::FutureExt;
use http::{Response, StatusCode};
use support::{Upstream, get, limited, ms, ok};
use tokio::time::{Instant, sleep};
use tollgate::limiter::Verdict;
use tollgate::store::{
    Lease, LeaseRequest, MemoryStore, Register, RegisterRequest, Store, StoreError, StoreListener,
    StoreReply,
};
use tollgate::{Key, Limiter, OnStoreError, Permit, Quota, RateLimitLayer, Reason, Signal};
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

/// What a server does that states no time.
enum Answer {
    Refused,
    After(Duration),
}

/// Runs 50 callers, each of which waits and calls again when it is refused, for so long. Returns how many
/// calls were refused, and when each other one left, in milliseconds.
async fn callers(
    span: Duration,
    answer: impl Fn(Duration, usize) -> Answer + Send + Sync + 'static,
) -> (usize, Vec<u64>) {
    let builder = RateLimitLayer::builder(Quota::per_second(1000)).max_wait(60 * SECOND);
    let limiter = builder.build().unwrap().limiter();
    let (start, answer) = (Instant::now(), Arc::new(answer));
    let (calls, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let passed = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..50 {
        let (limiter, answer) = (limiter.clone(), answer.clone());
        let (calls, refused, passed) = (calls.clone(), refused.clone(), passed.clone());
        drop(tokio::spawn(async move {
            loop {
                let sent = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
                let at = start.elapsed();
                match answer(at, calls.fetch_add(1, Ordering::Relaxed)) {
                    Answer::Refused => {
                        sleep(ms(20)).await;
                        refused.fetch_add(1, Ordering::Relaxed);
                        sent.answered(
                            &Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS),
                        );
                    }
                    Answer::After(takes) => {
                        passed.lock().unwrap().push(at.as_millis() as u64);
                        sleep(takes).await;
                        sent.answered(&accepted());
                        return;
                    }
                }
            }
        }));
        // The first one is refused before the others come.
        sleep(ms(25)).await;
    }
    sleep(span).await;
    let passed = passed.lock().unwrap().clone();
    (left(&refused), passed)
}

/// A server refuses everybody, and states no time. After each hold one request leaves, not all that wait. It was 246.
#[tokio::test(start_paused = true)]
async fn few_requests_reach_a_server_that_refuses_all() {
    let answer = |at, _| match at < 20 * SECOND {
        true => Answer::Refused,
        false => Answer::After(ms(20)),
    };
    let (refused, passed) = callers(90 * SECOND, answer).await;
    assert!(refused <= 7, "{refused}");
    assert_eq!(passed.len(), 50);
}

/// The first request after a hold takes half a minute. The others do not wait for it.
#[tokio::test(start_paused = true)]
async fn a_slow_probe_costs_the_others_two_seconds() {
    let answer = |_, call| match call {
        0 => Answer::Refused,
        1 => Answer::After(30 * SECOND),
        _ => Answer::After(ms(20)),
    };
    let (refused, passed) = callers(20 * SECOND, answer).await;
    assert_eq!((refused, passed.len()), (1, 50));
    let waited = passed.iter().max().unwrap() - passed[0];
    assert!((1000..2200).contains(&waited), "{waited} ms");
}

/// Those that follow a slow probe are slow, too: more and more leave, as nobody is refused.
#[tokio::test(start_paused = true)]
async fn more_and_more_follow_slow_probes() {
    let answer = |_, call| match call {
        0 => Answer::Refused,
        _ => Answer::After(60 * SECOND),
    };
    let (_, passed) = callers(20 * SECOND, answer).await;
    let groups: Vec<_> = passed
        .chunk_by(|one, next| next - one < 500)
        .map(<[_]>::len)
        .collect();
    assert_eq!(groups[..5], [1, 2, 4, 8, 8], "{passed:?}");
}

/// A store in memory that can be away.
#[derive(Default)]
struct MayBeAway {
    memory: MemoryStore,
    is_away: Mutex<bool>,
}

impl Store for MayBeAway {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.memory)
    }

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

/// A store in memory whose messages do not arrive in time, and without registers: each process probes for itself.
struct Deaf(Arc<MemoryStore>);

impl Store for Deaf {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.0)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.0.lease(request)
    }

    fn listen(&self, _listener: Weak<dyn StoreListener>) {}

    fn compare_and_set(&self, _change: RegisterRequest) -> StoreReply<Register> {
        StoreReply::Ready(Err(StoreError::Unsupported("registers")))
    }
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

/// It waited for a second behind the probe, as for an answer of the store.
#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_probe_no_longer_than_it_can() {
    for max_wait in [Duration::ZERO, ms(200)] {
        let builder = RateLimitLayer::builder(Quota::per_second(1000)).max_hold(2 * SECOND);
        let limiter = builder.max_wait(max_wait).build().unwrap().limiter();
        let first = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();
        first.answered(&Signal::default().with_refusal(Some(StatusCode::TOO_MANY_REQUESTS)));
        sleep(2 * SECOND).await;
        let probe = limiter.acquire(Key::ALL).await.unwrap().begin().unwrap();

        let began = Instant::now();
        let explained = limiter.acquire(Key::ALL).explain().await.unwrap();
        let refused = limiter.acquire(Key::ALL).await.unwrap_err();
        assert_eq!(refused.reason(), Some(Reason::MaxWait(max_wait)));
        assert!((max_wait..=max_wait + ms(2)).contains(&began.elapsed()));
        let is_refused = matches!(explained.verdict, Verdict::Refused { .. });
        assert_eq!(is_refused, max_wait.is_zero(), "{explained}");

        // It waits as long as it can: the response may arrive at any time.
        let (limiter, waits) = (limiter.clone(), !max_wait.is_zero());
        let next = tokio::spawn(async move { limiter.acquire(Key::ALL).await });
        sleep(ms(100)).await;
        probe.answered(&accepted());
        assert_eq!(next.await.unwrap().is_ok(), waits);
    }
}
