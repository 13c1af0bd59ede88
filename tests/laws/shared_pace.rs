//! One pace and one queue for many processes: each a layer of its own over the same store, with a
//! clock that moves when the test waits.

use crate::support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{HeaderMap, Request, StatusCode};
use tollgate::pace::{Fair, NoPacing};
use tollgate::signal::{ObservedQuota, ResponseInfo};
use tollgate::stats::Event;
use tollgate::store::{
    Lease, LeaseRequest, MemoryStore, Register, RegisterRequest, Store, StoreError, StoreReply,
};
use tollgate::{AdaptiveThrottleBuilder, AdaptiveThrottleLayer, Deadline, Key, Reason, Signal};
use tower::{BoxError, Layer, ServiceExt, service_fn};

use support::{count_of, ms, now, pass, soon};

/// A store with a delay for each exchange, which can be made unreachable.
#[derive(Default)]
struct Remote {
    store: MemoryStore,
    trip: Duration,
    away: AtomicBool,
    /// The store never answers.
    mute: AtomicBool,
    calls: AtomicU64,
}

impl Remote {
    fn new(trip: Duration) -> Arc<Self> {
        Arc::new(Remote {
            trip,
            ..Remote::default()
        })
    }
}

/// One process's handle of the store.
struct Client(Arc<Remote>);

impl Store for Client {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.0.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.0.store.lease(request)
    }

    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        let remote = self.0.clone();
        remote.calls.fetch_add(1, Ordering::Relaxed);
        StoreReply::Pending(Box::pin(async move {
            if remote.mute.load(Ordering::Relaxed) {
                return std::future::pending().await;
            }
            pass(remote.trip / 2).await;
            if remote.away.load(Ordering::Relaxed) {
                return Err(StoreError::Lost);
            }
            let StoreReply::Ready(answer) = remote.store.compare_and_set(change) else {
                unreachable!()
            };
            pass(remote.trip / 2).await;
            answer
        }))
    }
}

/// An upstream with a bucket, which states what remains.
struct Bucket {
    tokens: f64,
    refill: f64,
    capacity: f64,
    last: Instant,
    refused: u64,
    accepted: Vec<Instant>,
}

impl Bucket {
    fn new(capacity: f64, refill: f64, tokens: f64) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Bucket {
            tokens,
            refill,
            capacity,
            last: now(),
            refused: 0,
            accepted: Vec::new(),
        }))
    }

    fn judge(&mut self) -> Signal {
        let since = now().saturating_duration_since(self.last).as_secs_f64();
        self.tokens = (self.tokens + since * self.refill).min(self.capacity);
        self.last = now();
        let is_refused = self.tokens < 1.0;
        if is_refused {
            self.refused += 1;
        } else {
            self.tokens -= 1.0;
            self.accepted.push(now());
        }
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit-remaining", (self.tokens.floor() as u64).into());
        let status = if is_refused {
            StatusCode::TOO_MANY_REQUESTS
        } else {
            StatusCode::OK
        };
        Signal::read(&Response { status, headers })
    }
}

struct Response {
    status: StatusCode,
    headers: HeaderMap,
}

impl ResponseInfo for Response {
    fn status(&self) -> Option<StatusCode> {
        Some(self.status)
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(&self.headers)
    }
}

fn layer(remote: &Arc<Remote>) -> AdaptiveThrottleLayer {
    AdaptiveThrottleLayer::builder()
        .pace(|| Fair::new().limit(4500, Duration::from_secs(3600)))
        .store(Arc::new(Client(remote.clone())))
        .max_wait(Duration::from_secs(3600))
        .build()
        .unwrap()
}

/// A builder of a throttle of one request a second.
fn one_a_second(remote: Arc<Remote>) -> AdaptiveThrottleBuilder {
    AdaptiveThrottleLayer::builder()
        .pace(|| Fair::new().limit(60, Duration::from_secs(60)))
        .store(Arc::new(Client(remote)))
}

/// A response that states that nothing is left.
fn used_up() -> Signal {
    Signal::default().with_quota(ObservedQuota::new().with_remaining(0))
}

/// Calls repeatedly until `end`; returns how long each call waited.
async fn call_until(
    end: Instant,
    layer: AdaptiveThrottleLayer,
    bucket: Arc<Mutex<Bucket>>,
) -> Vec<Duration> {
    let mut waits = Vec::new();
    while now() < end {
        let start = now();
        let permit = layer.throttle().acquire(Key::ALL).await.unwrap();
        waits.push(now() - start);
        pass(ms(80)).await;
        let signal = bucket.lock().unwrap().judge();
        pass(ms(80)).await;
        permit.answered(&signal);
    }
    waits
}

/// The outcome of a fleet that calls a bucket which fills as fast as it is emptied.
struct Outcome {
    accepted: usize,
    refused: u64,
    /// The longest wait of a call, and the fewest and most calls of one process.
    longest: Duration,
    calls: (usize, usize),
    exchanges: u64,
}

async fn run(
    processes: usize,
    seconds: u64,
    remote: Arc<Remote>,
    bucket: Arc<Mutex<Bucket>>,
) -> Outcome {
    let end = now() + Duration::from_secs(seconds);
    let calling: Vec<_> = (0..processes)
        .map(|_| tokio::spawn(call_until(end, layer(&remote), bucket.clone())))
        .collect();
    let mut waits = Vec::new();
    for process in calling {
        waits.push(soon(process).await.unwrap());
    }
    let counts = waits.iter().map(Vec::len);
    let bucket = bucket.lock().unwrap();
    Outcome {
        accepted: bucket.accepted.len(),
        refused: bucket.refused,
        longest: waits.iter().flatten().max().copied().unwrap_or_default(),
        calls: (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0)),
        exchanges: remote.calls.load(Ordering::Relaxed),
    }
}

#[tokio::test(start_paused = true)]
async fn fifty_processes_at_an_empty_bucket_are_refused_once() {
    let Outcome {
        accepted,
        refused,
        longest,
        calls: (fewest, most),
        exchanges,
    } = run(50, 600, Remote::new(ms(1)), Bucket::new(4500.0, 1.25, 0.0)).await;
    assert_eq!(refused, 1, "the probe");
    assert!(accepted >= 740, "{accepted} of 750");
    // A fair round robin takes 40 s.
    assert!(longest < Duration::from_secs(50), "{longest:?}");
    assert!(most - fewest <= 1, "{fewest} to {most}");
    assert!(
        exchanges < 3 * accepted as u64,
        "{exchanges} for {accepted}"
    );
}

#[tokio::test(start_paused = true)]
async fn requests_skip_the_store_while_units_are_plentiful() {
    let remote = Remote::new(ms(40));
    let bucket = Bucket::new(1e6, 1000.0, 1e6);
    let Outcome {
        accepted,
        refused,
        exchanges,
        longest,
        ..
    } = run(10, 180, remote, bucket).await;
    assert_eq!(refused, 0);
    // The first request of each process asks at the same time. A process that reports late must not
    // wait for the next exchange.
    assert!(longest < Duration::from_secs(2), "{longest:?}");
    assert!(
        accepted >= 11_100,
        "{accepted} of 11,250: some request waits"
    );
    assert!(exchanges < accepted as u64 * 2, "{exchanges}");
}

#[tokio::test(start_paused = true)]
async fn processes_keep_their_pace_share_without_the_store() {
    let remote = Remote::new(ms(1));
    let bucket = Bucket::new(4500.0, 1.25, 0.0);
    let away = {
        let (remote, bucket) = (remote.clone(), bucket.clone());
        async move {
            pass(Duration::from_secs(300)).await;
            let before = bucket.lock().unwrap().refused;
            remote.away.store(true, Ordering::Relaxed);
            pass(Duration::from_secs(300)).await;
            let accepted = {
                let bucket = bucket.lock().unwrap();
                assert!(
                    bucket.refused <= before + 10,
                    "{} refusals",
                    bucket.refused - before
                );
                let start = now() - Duration::from_secs(300);
                bucket.accepted.iter().filter(|at| **at > start).count()
            };
            assert!(accepted >= 350, "{accepted} of 375");
            remote.away.store(false, Ordering::Relaxed);
        }
    };
    let (outcome, ()) = tokio::join!(run(20, 900, remote, bucket), away);
    assert!(outcome.accepted >= 1100, "{} of 1125", outcome.accepted);
    assert!(
        outcome.longest < Duration::from_secs(80),
        "{:?}",
        outcome.longest
    );
}

#[tokio::test(start_paused = true)]
async fn refusal_of_one_process_holds_all() {
    let remote = Remote::new(ms(1));
    let (one, other) = (layer(&remote), layer(&remote));
    // Both know that the bucket holds plenty, and send without asking.
    let plenty =
        Signal::default().with_quota(tollgate::signal::ObservedQuota::new().with_remaining(4000));
    for layer in [&one, &other, &one, &other] {
        layer
            .throttle()
            .acquire(Key::ALL)
            .await
            .unwrap()
            .answered(&plenty);
        pass(ms(150)).await;
    }
    let refusal = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    let refusal = refusal.with_retry_after(Duration::from_secs(30));
    let (permit, start) = (one.throttle().acquire(Key::ALL).await.unwrap(), now());
    permit.answered(&refusal);
    pass(ms(20)).await;
    let permit = soon(other.throttle().acquire(Key::ALL)).await.unwrap();
    assert!(
        now() - start >= Duration::from_secs(30),
        "{:?}",
        now() - start
    );
    permit.answered(&plenty);
}

fn refusal_for(seconds: u64) -> Signal {
    let refusal = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    refusal.with_retry_after(Duration::from_secs(seconds))
}

#[tokio::test(start_paused = true)]
async fn release_in_new_process_ends_every_process_s_hold() {
    let remote = Remote::new(ms(20));
    let (one, other) = (layer(&remote).throttle(), layer(&remote).throttle());
    one.acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&refusal_for(3000));
    let start = now();
    let calls = [&one, &other].map(|throttle| {
        let throttle = throttle.clone();
        tokio::spawn(async move {
            throttle
                .acquire(Key::ALL)
                .await
                .map(|permit| permit.answered(&Signal::default()))
        })
    });
    pass(ms(5000)).await;
    assert!(
        calls.iter().all(|call| !call.is_finished()),
        "they are held"
    );
    // This process was started after the refusal, to release the hold.
    layer(&remote).throttle().release(Key::ALL).await.unwrap();
    for call in calls {
        soon(call).await.unwrap().unwrap();
    }
    assert!(
        now() - start < Duration::from_secs(60),
        "{:?}",
        now() - start
    );
    // Later processes do not see the hold either.
    soon(layer(&remote).throttle().acquire(Key::ALL))
        .await
        .unwrap()
        .give_back();
    assert!(
        now() - start < Duration::from_secs(60),
        "{:?}",
        now() - start
    );
}

#[tokio::test(start_paused = true)]
async fn manual_hold_is_shared_when_the_call_returns() {
    let remote = Remote::new(ms(20));
    let (one, other) = (layer(&remote).throttle(), layer(&remote).throttle());
    let start = now();
    one.hold_for(Key::ALL, Duration::from_secs(30))
        .await
        .unwrap();
    soon(other.acquire(Key::ALL)).await.unwrap().give_back();
    assert!(
        now() - start >= Duration::from_secs(30),
        "{:?}",
        now() - start
    );
}

#[tokio::test(start_paused = true)]
async fn release_without_store_is_shared_when_store_returns() {
    let remote = Remote::new(ms(20));
    let (one, other) = (layer(&remote).throttle(), layer(&remote).throttle());
    one.acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&refusal_for(3000));
    let start = now();
    pass(ms(1000)).await;
    remote.away.store(true, Ordering::Relaxed);
    assert!(matches!(one.release(Key::ALL).await, Err(StoreError::Lost)));
    soon(one.acquire(Key::ALL))
        .await
        .unwrap()
        .answered(&Signal::default());
    pass(ms(5000)).await;
    remote.away.store(false, Ordering::Relaxed);
    pass(ms(30_000)).await;
    soon(other.acquire(Key::ALL))
        .await
        .unwrap()
        .answered(&Signal::default());
    assert!(
        now() - start < Duration::from_secs(120),
        "{:?}",
        now() - start
    );
}

#[tokio::test(start_paused = true)]
async fn a_released_key_keeps_its_place_until_the_store_returns() {
    let remote = Remote::new(ms(20));
    let builder = one_a_second(remote.clone()).max_keys(1);
    let one = builder.build().unwrap().throttle();
    let other = layer(&remote).throttle();
    let hold = one.hold_for(Key::ALL, Duration::from_secs(3600));
    hold.await.unwrap();
    remote.away.store(true, Ordering::Relaxed);
    assert!(one.release(Key::ALL).await.is_err());
    let full = one.acquire(Key::new("another")).await.unwrap_err();
    assert_eq!(full.reason(), Some(Reason::TooManyKeys(1)));
    remote.away.store(false, Ordering::Relaxed);
    pass(ms(10_000)).await;
    let start = now();
    soon(other.acquire(Key::ALL)).await.unwrap().give_back();
    assert!(now() - start < Duration::from_secs(60));
    one.acquire(Key::new("another")).await.unwrap().give_back();
}

#[tokio::test(start_paused = true)]
async fn release_that_the_store_never_answers_is_an_error() {
    let remote = Remote::new(ms(1));
    remote.mute.store(true, Ordering::Relaxed);
    let throttle = layer(&remote).throttle();
    assert!(soon(throttle.release(Key::ALL)).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn dropped_waiter_blocks_no_other_request() {
    let remote = Remote::new(ms(1));
    let bucket = Bucket::new(4500.0, 1.25, 0.0);
    let layers: Vec<_> = (0..5).map(|_| layer(&remote)).collect();
    let end = now() + Duration::from_secs(300);
    let calling = tokio::spawn(call_until(end, layers[0].clone(), bucket.clone()));
    for round in 0..100_u64 {
        let waits = layers[1 + round as usize % 4].throttle();
        let _ = tokio::time::timeout(ms(37 * (round % 90)), waits.acquire(Key::ALL))
            .await
            .map(|permit| permit.unwrap().give_back());
        pass(ms(1000)).await;
    }
    soon(calling).await.unwrap();
    let accepted = bucket.lock().unwrap().accepted.len();
    assert!(accepted >= 330, "{accepted} of 375");
    for layer in layers {
        assert_eq!(
            (
                layer.throttle().waiting(Key::ALL),
                layer.throttle().in_flight(Key::ALL)
            ),
            (0, 0)
        );
    }
}

/// The store has granted the turn to a request that is not sent.
#[tokio::test(start_paused = true)]
async fn granted_turn_given_back_goes_to_the_next_request() {
    let layer = one_a_second(Remote::new(ms(20))).build().unwrap();
    let throttle = layer.throttle().clone();
    let first = throttle.acquire(Key::ALL).await.unwrap();
    first.answered(&used_up());
    let waits = || {
        let throttle = throttle.clone();
        tokio::spawn(async move { throttle.acquire(Key::ALL).await })
    };
    let (second, third) = (waits(), waits());
    soon(second).await.unwrap().unwrap().give_back();
    let start = now();
    let permit = soon(third).await.unwrap().unwrap();
    assert!(now() - start < ms(100), "{:?}", now() - start);
    permit.answered(&used_up());
}

/// Two requests that cannot wait for their turns wait for the store, and do not wake each other meanwhile.
#[tokio::test(start_paused = true)]
async fn impatient_requests_sleep_until_the_store_answers() {
    let throttle = AdaptiveThrottleLayer::builder()
        .store(Arc::new(Client(Remote::new(ms(20)))))
        .max_wait(Duration::ZERO)
        .build();
    let throttle = throttle.unwrap().throttle().clone();
    let polls = Arc::new(AtomicU64::new(0));
    let calls = [(); 2].map(|()| {
        let (mut call, polls) = (Box::pin(throttle.acquire(Key::ALL)), polls.clone());
        std::future::poll_fn(move |cx| {
            polls.fetch_add(1, Ordering::Relaxed);
            call.as_mut().poll(cx)
        })
    });
    let ended = soon(futures::future::join_all(calls)).await;
    assert!(ended.iter().any(Result::is_ok));
    let polls = polls.load(Ordering::Relaxed);
    assert!(polls <= 12, "{polls}");
}

#[tokio::test(start_paused = true)]
async fn impatient_request_goes_when_its_turn_is_due() {
    let impatient = one_a_second(Remote::new(ms(20))).max_wait(Duration::ZERO);
    let (layer, empty) = (impatient.build().unwrap(), used_up());
    layer
        .throttle()
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&empty);
    let refused = layer.throttle().acquire(Key::ALL).await.unwrap_err();
    assert!(
        refused
            .report()
            .retry_after()
            .is_some_and(|wait| wait > ms(500)),
        "{refused}"
    );
    pass(Duration::from_secs(20)).await;
    layer
        .throttle()
        .acquire(Key::ALL)
        .await
        .unwrap()
        .answered(&empty);
}

/// A request that cannot wait for its turn waits for the answer of the store, but not beyond its deadline.
#[tokio::test(start_paused = true)]
async fn no_request_waits_for_the_register_beyond_its_deadline() {
    let layer = AdaptiveThrottleLayer::builder()
        .store(Arc::new(Client(Remote::new(ms(200)))))
        .max_wait(Duration::ZERO)
        .build();
    let upstream = service_fn(async |_| Ok::<_, BoxError>(http::Response::new(())));
    let service = layer.unwrap().layer(upstream);
    let start = now();
    let mut request = Request::new(());
    request
        .extensions_mut()
        .insert(Deadline::at(start + ms(50)));
    assert!(service.oneshot(request).await.is_err());
    assert_eq!(now() - start, ms(50));
}

#[tokio::test(start_paused = true)]
async fn silent_store_counts_as_unreachable() {
    let remote = Remote::new(ms(1));
    remote.mute.store(true, Ordering::Relaxed);
    let (layer, start) = (layer(&remote), now());
    let plenty =
        Signal::default().with_quota(tollgate::signal::ObservedQuota::new().with_remaining(4000));
    for _ in 0..10 {
        layer
            .throttle()
            .acquire(Key::ALL)
            .await
            .unwrap()
            .answered(&plenty);
    }
    assert!(
        now() - start < Duration::from_secs(30),
        "{:?}",
        now() - start
    );
}

/// A store whose first exchange panics.
#[derive(Default)]
struct PanicsOnce {
    store: MemoryStore,
    has_panicked: AtomicBool,
}

impl Store for PanicsOnce {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.store.lease(request)
    }

    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        assert!(self.has_panicked.swap(true, Ordering::Relaxed), "once");
        self.store.compare_and_set(change)
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_once_is_asked_again() {
    let store = Arc::new(PanicsOnce::default());
    let layer = AdaptiveThrottleLayer::builder().store(store.clone());
    let throttle = layer.build().unwrap().throttle();
    throttle.acquire(Key::ALL).await.unwrap().give_back();
    assert!(store.has_panicked.load(Ordering::Relaxed));
    throttle.hold_for(Key::ALL, ms(1000)).await.unwrap_err();
    pass(ms(10_000)).await;
    throttle.acquire(Key::ALL).await.unwrap().give_back();
    throttle.hold_for(Key::ALL, ms(1000)).await.unwrap();
}

#[test]
fn stalled_runtime_delays_no_request_in_another_runtime() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let layer = layer(&Remote::new(ms(1)));
    let plenty =
        Signal::default().with_quota(tollgate::signal::ObservedQuota::new().with_remaining(4000));
    let call = |after: Duration| {
        let (throttle, plenty) = (layer.throttle(), plenty.clone());
        async move {
            pass(after).await;
            let start = now();
            throttle.acquire(Key::ALL).await.unwrap().answered(&plenty);
            now() - start
        }
    };
    // The notification for the others is left there, and is due later.
    first.block_on(call(Duration::ZERO));
    for round in 0..3 {
        let waited = second.block_on(call(Duration::from_secs(10)));
        assert!(waited < Duration::from_secs(3), "{round}: {waited:?}");
    }
}

#[test]
fn pace_that_cannot_be_shared_is_refused_with_remedy() {
    let builder = AdaptiveThrottleLayer::builder()
        .pace(|| NoPacing)
        .store(Arc::new(MemoryStore::default()));
    let error = builder.build().unwrap_err();
    assert!(error.to_string().contains("pace::Fair"), "{error}");
}

/// A store that never replies is given up by a later request, and not by its task.
#[tokio::test(start_paused = true)]
async fn outages_of_a_silent_store_are_reported() {
    let remote = Remote::new(ms(20));
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = told.clone();
    let builder = one_a_second(remote.clone()).on_event(move |event| match event {
        Event::Alone { .. } => events.lock().unwrap().push("alone"),
        Event::Together { .. } => events.lock().unwrap().push("together"),
        _ => {}
    });
    let throttle = builder.build().unwrap().throttle();
    for is_mute in [false, true, false] {
        remote.mute.store(is_mute, Ordering::Relaxed);
        for _ in 0..30 {
            let permit = soon(throttle.acquire(Key::ALL)).await.unwrap();
            drop(permit.answered(&Signal::default()));
            pass(ms(1000)).await;
        }
    }
    assert_eq!(*told.lock().unwrap(), ["alone", "together"]);
}

/// A key in use counts as alone for as long as the store cannot be reached, whether it refuses calls or never
/// replies. A key at rest does not count.
#[tokio::test(start_paused = true)]
async fn keys_are_alone_while_the_store_is_away() {
    for is_mute in [false, true] {
        let remote = Remote::new(ms(20));
        let throttle = layer(&remote).throttle();
        let alone = || count_of(&throttle.stats(), "keys_alone");
        let (rests, used) = (Key::new("rests"), Key::new("used"));
        throttle
            .acquire(rests)
            .await
            .unwrap()
            .answered(&Signal::default());
        throttle
            .acquire(used)
            .await
            .unwrap()
            .answered(&Signal::default());
        pass(ms(1000)).await;
        assert_eq!(alone(), 0, "{is_mute}");
        let fault = if is_mute { &remote.mute } else { &remote.away };
        fault.store(true, Ordering::Relaxed);
        let mut sent = Vec::new();
        for _ in 0..20 {
            sent.push(soon(throttle.acquire(used)).await.unwrap());
            pass(ms(1000)).await;
        }
        assert_eq!(alone(), 1, "{is_mute}");
        sent.drain(..19)
            .for_each(|permit| drop(permit.answered(&Signal::default())));
        assert_eq!(alone(), 1, "{is_mute}: one is in flight");
        fault.store(false, Ordering::Relaxed);
        // A call that never gets a reply is given up by a later request.
        for _ in 0..30 {
            let permit = soon(throttle.acquire(used)).await.unwrap();
            drop(permit.answered(&Signal::default()));
            pass(ms(1000)).await;
        }
        assert_eq!(alone(), 0, "{is_mute}: the store is back");
        fault.store(true, Ordering::Relaxed);
        sent.push(soon(throttle.acquire(used)).await.unwrap());
        pass(Duration::from_secs(60)).await;
        sent.drain(..)
            .for_each(|permit| drop(permit.answered(&Signal::default())));
        pass(ms(5000)).await;
        assert_eq!(alone(), 0, "{is_mute}: no key is in use");
    }
}
