//! Holds over stores that answer late, notify late, or never notify. Under a paused clock.

use crate::support::counted;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use counted::largest_count;
use futures::FutureExt;
use futures::future::join_all;
use http::Response;
use proptest::prelude::*;
use tokio::time::{Instant, advance, sleep, timeout};
use tollgate::store::{
    Change, InForce, Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Store, StoreError,
    StoreEvent, StoreListener, StoreReply, UnusedPermits, Usage,
};
use tollgate::{Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer, Reason, Signal};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// What all processes share.
struct Server {
    store: MemoryStore,
    listeners: Mutex<Vec<(Duration, Weak<dyn StoreListener>)>>,
    /// Whether subscribers receive no notifications.
    mute: AtomicBool,
}

impl Server {
    fn new() -> Arc<Self> {
        let (store, listeners) = (MemoryStore::default(), Mutex::default());
        Arc::new(Server {
            store,
            listeners,
            mute: AtomicBool::new(false),
        })
    }

    /// Changes the hold of a key. It has no set quotas.
    fn change(
        &self,
        key: Key,
        spec: &Arc<LimitSpec>,
        change: Change,
    ) -> Result<InForce, StoreError> {
        if matches!(change, Change::Quota { .. }) {
            return Err(StoreError::Unsupported("set quotas"));
        }
        let in_force = now(self.store.change(key, spec, change))?;
        let held = in_force.hold;
        for (trip, listener) in &*self.listeners.lock().unwrap() {
            let (trip, listener) = (*trip, listener.clone());
            if !self.mute.load(Ordering::Relaxed) {
                tokio::spawn(async move {
                    sleep(trip).await;
                    if let Some(listener) = listener.upgrade() {
                        listener.on_event(key, 0, StoreEvent::Hold(held));
                    }
                });
            }
        }
        Ok(in_force)
    }
}

/// The store of one process: the server decides at once, and its answers take the given trips in
/// turn.
struct Wire {
    server: Arc<Server>,
    trips: Vec<Duration>,
    calls: AtomicUsize,
}

impl Wire {
    fn new(server: &Arc<Server>, trips: &[Duration]) -> Arc<Self> {
        Arc::new(Wire {
            server: server.clone(),
            trips: trips.into(),
            calls: AtomicUsize::new(0),
        })
    }

    fn later<T: Send + 'static>(&self, answer: Result<T, StoreError>) -> StoreReply<T> {
        let trip = self.trips[self.calls.fetch_add(1, Ordering::Relaxed) % self.trips.len()];
        StoreReply::Pending(Box::pin(async move {
            sleep(trip).await;
            answer
        }))
    }
}

fn now<T>(answer: StoreReply<T>) -> Result<T, StoreError> {
    match answer {
        StoreReply::Ready(answer) => answer,
        _ => unreachable!("memory answers now"),
    }
}

impl Store for Wire {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.later(now(self.server.store.lease(request)))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.server.store.give_back(key, spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.server.store.peek(request)
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        self.later(self.server.change(key, spec, change))
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        self.server
            .listeners
            .lock()
            .unwrap()
            .push((self.trips[0], listener));
    }
}

fn process(store: Arc<dyn Store>, quota: Quota, max_wait: Duration) -> Limiter {
    RateLimitLayer::builder(quota)
        .store(store)
        .max_wait(max_wait)
        .build()
        .unwrap()
        .limiter()
}

fn key() -> Key {
    Key::new("key")
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn is_held(refused: &Limited) -> bool {
    matches!(
        refused,
        Limited::Local {
            reason: Reason::Held,
            ..
        }
    )
}

#[tokio::test(start_paused = true)]
async fn permits_returned_during_hold_stay_unused_until_its_end() {
    for later in [false, true] {
        let server = Server::new();
        let store: Arc<dyn Store> = if later {
            Wire::new(&server, &[ms(1)])
        } else {
            Arc::new(MemoryStore::default())
        };
        let limiter = process(store, Quota::new(10_000, HOUR), 10 * SECOND);
        // In heavy use, so that some permits are prefetched; permits of this quota are valid for
        // minutes.
        let mut permits = Vec::new();
        for _ in 0..100 {
            permits.push(limiter.acquire(key()).await.unwrap());
        }
        limiter.hold_for(key(), 3 * SECOND).await.unwrap();
        let start = Instant::now();
        let mut waits = Box::pin(limiter.acquire(key()));
        assert!(waits.as_mut().now_or_never().is_none());
        permits.drain(50..).for_each(tollgate::Permit::give_back);
        let mut late = Box::pin(limiter.acquire(key()));
        assert!(
            late.as_mut().now_or_never().is_none(),
            "later: {later}: returned permits are at hand"
        );
        drop(waits.await.unwrap());
        assert!(
            start.elapsed() >= 3 * SECOND - ms(2),
            "later: {later}: {:?}",
            start.elapsed()
        );
        drop(late.await.unwrap());

        limiter.hold_for(key(), 3 * SECOND).await.unwrap();
        let start = Instant::now();
        // No request waits.
        permits.into_iter().for_each(tollgate::Permit::give_back);
        drop(limiter.acquire(key()).await.unwrap());
        assert!(
            start.elapsed() >= 3 * SECOND - ms(2),
            "later: {later}: {:?}",
            start.elapsed()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn in_flight_limit_hold_reaches_processes_without_calls() {
    let store = Arc::new(MemoryStore::default());
    let [ours, theirs] = [(); 2].map(|()| process(store.clone(), Quota::in_flight(5), SECOND));
    ours.hold_for(key(), 3 * SECOND).await.unwrap();
    assert!(is_held(&theirs.acquire(key()).await.unwrap_err()));
}

#[tokio::test(start_paused = true)]
async fn in_flight_limit_hold_reaches_later_processes() {
    let store = Arc::new(MemoryStore::default());
    let ours = process(store.clone(), Quota::in_flight(5), SECOND);
    ours.hold_for(key(), 3 * SECOND).await.unwrap();
    let late = process(store, Quota::in_flight(5), SECOND);
    assert!(is_held(&late.acquire(key()).await.unwrap_err()));
}

#[tokio::test(start_paused = true)]
async fn in_flight_limit_waiters_receive_hold_changes() {
    let limiter = process(
        Arc::new(MemoryStore::default()),
        Quota::in_flight(5),
        10 * SECOND,
    );
    let start = Instant::now();
    let waits = async || {
        let limiter = limiter.clone();
        let task = tokio::spawn(async move { limiter.acquire(key()).await.map(drop) });
        sleep(SECOND).await;
        [task]
    };
    limiter.hold_for(key(), 3 * SECOND).await.unwrap();
    let [waiter] = waits().await;
    limiter.hold_for(key(), 5 * SECOND).await.unwrap();
    waiter.await.unwrap().expect("its max_wait is long enough");
    assert_eq!(start.elapsed(), 6 * SECOND);

    limiter.hold_for(key(), 8 * SECOND).await.unwrap();
    let [waiter] = waits().await;
    limiter.release(key()).await.unwrap();
    waiter.await.unwrap().unwrap();
    assert_eq!(
        start.elapsed(),
        7 * SECOND,
        "it goes when the hold is released"
    );

    limiter.hold_for(key(), 8 * SECOND).await.unwrap();
    let [waiter] = waits().await;
    limiter.hold_for(key(), 60 * SECOND).await.unwrap();
    assert!(is_held(&waiter.await.unwrap().unwrap_err()));
    assert_eq!(start.elapsed(), 8 * SECOND, "it is told at once");
}

#[tokio::test(start_paused = true)]
async fn hold_is_set_by_processes_that_missed_a_release() {
    for later in [false, true] {
        let (server, memory) = (Server::new(), Arc::new(MemoryStore::default()));
        let store = || -> Arc<dyn Store> {
            if later {
                Wire::new(&server, &[ms(1)])
            } else {
                memory.clone()
            }
        };
        let [ours, theirs, cold] = [(); 3].map(|()| process(store(), Quota::per_hour(100), SECOND));
        ours.hold_for(key(), 60 * SECOND).await.unwrap();
        theirs.release(key()).await.unwrap();
        sleep(ms(10)).await;
        drop(ours.acquire(key()).await.unwrap());
        // This process has never used the key.
        cold.hold_for(key(), 60 * SECOND).await.unwrap();
        sleep(ms(10)).await;
        for (name, limiter) in [("ours", &ours), ("theirs", &theirs), ("cold", &cold)] {
            let refused = limiter.acquire(key()).await.expect_err(name);
            assert!(is_held(&refused), "{name}, later: {later}: {refused}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn hold_end_stays_however_often_it_is_requested() {
    let server = Server::new();
    // Answers whose trips vary, as on a busy machine.
    let trips: Vec<_> = [40, 2, 30, 1, 60, 3].map(ms).into();
    let processes: Vec<_> = (0..8)
        .map(|number| {
            let mut trips = trips.clone();
            trips.rotate_left(number % 6);
            process(
                Wire::new(&server, &trips),
                Quota::per_second(200),
                60 * SECOND,
            )
        })
        .collect();
    for limiter in &processes {
        drop(limiter.acquire(key()).await.unwrap());
    }
    let start = Instant::now();
    processes[0].hold_for(key(), 4 * SECOND).await.unwrap();
    let mut tasks = Vec::new();
    while start.elapsed() < 3 * SECOND {
        sleep(ms(20)).await;
        tasks.extend(
            processes
                .iter()
                .map(|limiter| tokio::spawn(limiter.acquire(key()).map(|got| got.map(drop)))),
        );
    }
    let peek = processes[0].peek(key()).await.unwrap();
    println!(
        "after {:?} of 4 s it is held for {:?} more",
        start.elapsed(),
        peek.held
    );
    let left = peek.held.unwrap();
    assert!(
        start.elapsed() + left <= 4 * SECOND + ms(120),
        "{:?} left after {:?}",
        left,
        start.elapsed()
    );
    join_all(tasks)
        .await
        .into_iter()
        .for_each(|ended| ended.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn missed_release_is_learned_when_other_processes_call() {
    let server = Server::new();
    let [ours, theirs] =
        [(); 2].map(|()| process(Wire::new(&server, &[ms(2)]), Quota::per_second(50), SECOND));
    for limiter in [&ours, &theirs] {
        drop(limiter.acquire(key()).await.unwrap());
    }
    ours.hold_for(key(), HOUR).await.unwrap();
    sleep(ms(10)).await;
    assert!(is_held(&theirs.acquire(key()).await.unwrap_err()));
    server.mute.store(true, Ordering::Relaxed);
    ours.release(key()).await.unwrap();
    let start = Instant::now();
    while theirs.acquire(key()).await.is_err() {
        assert!(
            start.elapsed() < 5 * SECOND,
            "it makes no store call, and gets no notification"
        );
        sleep(ms(100)).await;
    }
}

// ── random histories ─────────────────────────────────────────────────────────────────────────────

#[derive(Clone, Debug)]
enum Act {
    /// A request calls, and waits up to this long.
    Call { patience: Option<u64>, uses: bool },
    /// A process holds the key.
    Hold(u64),
}

#[derive(Clone, Debug)]
struct Step {
    after: u64,
    process: usize,
    act: Act,
}

fn step() -> impl Strategy<Value = Step> {
    let call = (
        prop_oneof![3 => Just(None), 1 => (0u64..4000).prop_map(Some)],
        prop::bool::weighted(0.85),
    );
    let act = prop_oneof![
        20 => call.prop_map(|(patience, uses)| Act::Call { patience, uses }),
        1 => (1u64..2500).prop_map(Act::Hold),
    ];
    let after = prop_oneof![6 => Just(0u64), 2 => 1u64..50, 1 => 100u64..1500];
    (after, 0usize..3, act).prop_map(|(after, process, act)| Step {
        after,
        process,
        act,
    })
}

/// One call: when it asked, whether its wait is unbounded, and when it left.
#[derive(Clone, Copy, Debug)]
struct Call {
    process: usize,
    asked: Instant,
    patient: bool,
    left: Option<Instant>,
}

#[derive(Default)]
struct Past {
    calls: Vec<Call>,
    uses: Vec<Instant>,
    /// By which process, from when to when.
    holds: Vec<(usize, Instant, Instant)>,
}

async fn replay(quota: Quota, trips: &[Vec<u64>], steps: &[Step]) -> (Past, Duration) {
    let (server, past) = (Server::new(), Arc::new(Mutex::new(Past::default())));
    let start = Instant::now();
    let wire =
        |trips: &Vec<u64>| Wire::new(&server, &trips.iter().copied().map(ms).collect::<Vec<_>>());
    let processes: Vec<_> = trips
        .iter()
        .map(|trips| process(wire(trips), quota, 80_000 * SECOND))
        .collect();
    let mut tasks = Vec::new();
    for Step {
        after,
        process,
        act,
    } in steps.iter().cloned()
    {
        sleep(ms(after)).await;
        // No two things happen at the same moment.
        advance(Duration::from_nanos(100)).await;
        let (limiter, past) = (processes[process].clone(), past.clone());
        match act {
            Act::Hold(span) => {
                let asked = Instant::now();
                past.lock()
                    .unwrap()
                    .holds
                    .push((process, asked, asked + ms(span)));
                tasks.push(tokio::spawn(async move {
                    limiter.hold_for(key(), ms(span)).await.unwrap()
                }));
            }
            Act::Call { patience, uses } => tasks.push(tokio::spawn(async move {
                let asked = Instant::now();
                let mut acquire = limiter.acquire(key());
                if let Some(patience) = patience {
                    acquire = acquire.deadline((asked + ms(patience)).into_std());
                }
                let got = timeout(HOUR, acquire).await.expect("no wait is endless");
                if let (Err(error), None) = (&got, patience) {
                    panic!("a request without a limit on its wait is served: {error}");
                }
                let mut past = past.lock().unwrap();
                let (patient, left) = (patience.is_none(), got.is_ok().then(Instant::now));
                past.calls.push(Call {
                    process,
                    asked,
                    patient,
                    left,
                });
                match got {
                    Ok(permit) if uses => {
                        past.uses.push(Instant::now());
                        drop(permit);
                    }
                    Ok(permit) => permit.give_back(),
                    Err(_) => {}
                }
            })),
        }
    }
    for ended in join_all(tasks).await {
        ended.expect("as above");
    }
    let took = start.elapsed();
    for limiter in &processes {
        assert_eq!(limiter.peek(key()).await.unwrap().waiting, 0);
    }
    (std::mem::take(&mut *past.lock().unwrap()), took)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 300, ..histories::config(25) })]

    #[test]
    fn waits_end_in_order_and_never_during_hold(
        count in 3u32..40,
        trips in prop::collection::vec(prop::collection::vec(0u64..40, 1..6), 3),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let quota = Quota::per_second(count);
        let runtime = crate::support::paused_runtime();
        let (past, took) = runtime.block_on(replay(quota, &trips, &steps));
        let Past { calls, uses, holds } = past;
        prop_assert!(largest_count(&uses, SECOND) <= count as usize);
        for call in &calls {
            let Some(left) = call.left else { continue };
            for &(process, from, until) in &holds {
                // Other processes are notified after a trip, and answers under way arrive after
                // another.
                let known = if process == call.process { from } else { from + ms(trips[call.process][0] + 2) };
                prop_assert!(
                    left <= known || left >= until,
                    "{call:?} left in the hold of {process} from {from:?} to {until:?}"
                );
            }
        }
        for (number, first) in calls.iter().enumerate().filter(|(_, call)| call.patient) {
            for second in calls[..number].iter().filter(|call| call.process == first.process) {
                let overtook = second.asked > first.asked && second.left.is_some_and(|left| Some(left) < first.left);
                prop_assert!(!overtook, "{second:?} left before {first:?}");
            }
        }
        // The limiter is never idle for long: the sum of holds, calls at the pace of the limit,
        // trips and expired permits.
        let holds: u64 = holds.iter().map(|(_, from, until)| (*until - *from).as_millis() as u64).sum();
        let arrived: u64 = steps.iter().map(|step| step.after).sum();
        let windows = calls.len() as u64 / u64::from(count) + 2;
        let longest = ms(holds + arrived + windows * 1100 + 3000);
        prop_assert!(took <= longest, "{took:?} instead of {longest:?}");
    }
}

/// Slots booked before the hold, or under way when it began, are free again when it ends.
#[tokio::test(start_paused = true)]
async fn full_limit_is_available_from_hold_end() {
    for trips in [[ms(1), ms(2)], [ms(0), ms(7)]] {
        let server = Server::new();
        let processes = [(); 4].map(|()| {
            process(
                Wire::new(&server, &trips),
                Quota::per_second(100),
                15 * SECOND,
            )
        });
        let (start, sent) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
        for process in &processes {
            for _ in 0..50 {
                let (process, sent) = (process.clone(), sent.clone());
                tokio::spawn(async move {
                    loop {
                        drop(process.acquire(key()).await.unwrap());
                        sent.lock().unwrap().push(start.elapsed());
                        sleep(ms(5)).await;
                    }
                });
            }
        }
        // In the middle of a burst.
        sleep(ms(2042)).await;
        let hold = processes[0].hold_for(key(), 2 * SECOND);
        let _ = timeout(ms(1), hold).await;
        sleep(10 * SECOND).await;
        let end = ms(4042);
        let after: Vec<_> = sent
            .lock()
            .unwrap()
            .iter()
            .copied()
            .filter(|at| *at >= end - ms(5))
            .collect();
        let first = after.iter().filter(|at| **at < end + ms(100)).count();
        // One permit may have been prefetched.
        assert!((99..=100).contains(&first), "trips {trips:?}: {first}");
    }
}

/// The answer of an upstream that states a limit of 40.
fn answers(status: u16, remaining: u32, retry_after: Option<u32>) -> Signal {
    let response = Response::builder()
        .status(status)
        .header("X-RateLimit-Limit", 40);
    let response = response.header("X-RateLimit-Remaining", remaining);
    let response = match retry_after {
        Some(wait) => response.header("Retry-After", wait),
        None => response.header("X-RateLimit-Reset", 50),
    };
    Signal::read(&response.body(()).unwrap())
}

/// No wait is endless because a notification to the store is due later.
#[tokio::test(start_paused = true)]
async fn request_arriving_during_a_store_call_is_sent_next() {
    let (server, quota) = (Server::new(), Quota::new(40, 60 * SECOND));
    let ours = process(Wire::new(&server, &[ms(50)]), quota, 30 * SECOND);
    let theirs = process(Wire::new(&server, &[ms(1)]), quota, 30 * SECOND);
    let [one, other] = [
        ours.acquire(key()).await.unwrap().begin().unwrap(),
        ours.acquire(key()).await.unwrap().begin().unwrap(),
    ];
    one.answered(&answers(200, 38, None));
    theirs
        .acquire(key())
        .await
        .unwrap()
        .begin()
        .unwrap()
        .answered(&answers(429, 0, Some(0)));
    sleep(ms(10)).await;
    let start = Instant::now();
    let mut waits: Vec<_> = (0..2).map(|_| Box::pin(ours.acquire(key()))).collect();
    assert!(waits[0].as_mut().now_or_never().is_none());
    sleep(ms(20)).await;
    other.answered(&answers(200, 37, None));
    assert!(waits[1].as_mut().now_or_never().is_none());
    for waits in waits {
        drop(waits.await.unwrap());
    }
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
}

/// How long each of these requests waits for its permit, and whether it gets it; `others` come
/// `after` the first.
async fn line_up(
    limiter: &Limiter,
    first: usize,
    after: Duration,
    others: usize,
) -> Vec<(Duration, bool)> {
    let wait = |limiter: Limiter| async move {
        let start = Instant::now();
        let granted = limiter.acquire(key()).await.is_ok();
        (start.elapsed(), granted)
    };
    let first: Vec<_> = (0..first)
        .map(|_| tokio::spawn(wait(limiter.clone())))
        .collect();
    sleep(after).await;
    let others: Vec<_> = (0..others)
        .map(|_| tokio::spawn(wait(limiter.clone())))
        .collect();
    join_all(first.into_iter().chain(others))
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect()
}

#[tokio::test(start_paused = true)]
async fn hold_time_counts_as_wait() {
    for later in [false, true] {
        let store: Arc<dyn Store> = if later {
            Wire::new(&Server::new(), &[ms(2)])
        } else {
            Arc::new(MemoryStore::default())
        };
        let limiter = process(store, Quota::per_second(1), 10 * SECOND);
        limiter.hold_for(key(), 8 * SECOND).await.unwrap();
        let waits = line_up(&limiter, 10, 7 * SECOND, 10).await;
        let longest = waits.iter().map(|(waited, _)| *waited).max();
        assert!(longest <= Some(10 * SECOND), "later: {later}: {waits:?}");
        // Slots too late for the first requests go to later ones.
        let granted: Vec<_> = waits.iter().map(|(_, granted)| *granted).collect();
        let expected = [vec![true; 2], vec![false; 8], vec![true; 7], vec![false; 3]].concat();
        assert_eq!(granted, expected, "later: {later}: {waits:?}");
        assert!(
            waits
                .iter()
                .all(|(waited, granted)| *granted || *waited < 8 * SECOND + ms(20)),
            "{waits:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn request_is_refused_early_when_a_hold_is_released() {
    for later in [false, true] {
        let store: Arc<dyn Store> = if later {
            Wire::new(&Server::new(), &[ms(2)])
        } else {
            Arc::new(MemoryStore::default())
        };
        let limiter = process(store, Quota::new(1, 100 * SECOND), 20 * SECOND);
        drop(limiter.acquire(key()).await.unwrap());
        limiter.hold_for(key(), 3 * SECOND).await.unwrap();
        let by_hand = async {
            sleep(ms(10)).await;
            limiter.hold_for(key(), 15 * SECOND).await.unwrap();
            sleep(SECOND).await;
            limiter.release(key()).await.unwrap();
        };
        let (waits, ()) = tokio::join!(line_up(&limiter, 1, Duration::ZERO, 0), by_hand);
        let [(waited, false)] = waits[..] else {
            panic!("the limit is used up: {waits:?}")
        };
        assert!(
            waited < SECOND + ms(50),
            "later: {later}: refused after {waited:?}"
        );
    }
}

/// One waiter is in a runtime that is no longer driven, another in a driven one. In real time.
async fn beside_an_idle_runtime(
    store: Arc<dyn Store>,
    max_wait: Duration,
) -> (Result<(), Limited>, Duration) {
    let limiter = process(store, Quota::per_second(50), max_wait);
    limiter.acquire(key()).await.unwrap().give_back();
    limiter.hold_for(key(), ms(200)).await.unwrap();
    let start = std::time::Instant::now();
    let (first, idle) = tokio::task::spawn_blocking({
        let mut first = Box::pin(limiter.acquire(key()));
        move || {
            let idle = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .unwrap();
            idle.block_on(async { assert!(first.as_mut().now_or_never().is_none()) });
            (first, idle)
        }
    })
    .await
    .unwrap();
    let granted = limiter.acquire(key()).await.map(drop);
    tokio::task::spawn_blocking(move || drop((first, idle)))
        .await
        .unwrap();
    (granted, start.elapsed())
}

#[tokio::test]
async fn request_after_hold_is_not_held_by_its_answer() {
    let (granted, _) = beside_an_idle_runtime(Arc::new(MemoryStore::default()), ms(300)).await;
    assert!(!granted.as_ref().is_err_and(is_held), "{granted:?}");
}

#[tokio::test]
async fn hold_end_is_noticed_despite_an_idle_runtime() {
    for later in [false, true] {
        let store: Arc<dyn Store> = if later {
            Wire::new(&Server::new(), &[ms(2)])
        } else {
            Arc::new(MemoryStore::default())
        };
        let (granted, waited) = beside_an_idle_runtime(store, 10 * SECOND).await;
        assert!(
            granted.is_ok() && waited < 5 * SECOND,
            "later: {later}: {waited:?}, {granted:?}"
        );
    }
}

/// A reply that the store sent before a release refuses no request after it, and books no slot for
/// the end of the hold.
#[tokio::test(start_paused = true)]
async fn release_overtakes_replies_sent_before_it() {
    for max_wait in [SECOND, 300 * SECOND] {
        let server = Server::new();
        let quota = Quota::per_hour(20);
        let ours = process(Wire::new(&server, &[ms(1)]), quota, max_wait);
        let theirs = process(Wire::new(&server, &[ms(1), ms(100)]), quota, max_wait);
        drop(theirs.acquire(key()).await.unwrap());
        server.mute.store(true, Ordering::Relaxed);
        ours.hold_for(key(), 60 * SECOND).await.unwrap();
        let start = Instant::now();
        let waits = tokio::spawn(theirs.acquire(key()));
        sleep(ms(10)).await;
        server.mute.store(false, Ordering::Relaxed);
        ours.release(key()).await.unwrap();
        drop(
            waits
                .await
                .unwrap()
                .expect("the release came before the reply"),
        );
        drop(
            theirs
                .acquire(key())
                .await
                .expect("the release came before the reply"),
        );
        assert!(
            start.elapsed() < SECOND,
            "{max_wait:?}: {:?}",
            start.elapsed()
        );
    }
}

/// A store whose calls for permits fail after a trip. Holds reach the server.
struct WithoutLeases(Arc<Wire>);

impl Store for WithoutLeases {
    fn lease(&self, _: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.0.later(Err(StoreError::Unsupported("leases")))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.0.give_back(key, spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.0.peek(request)
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        self.0.change(key, spec, change)
    }
}

/// A limiter whose requests wait for 10 s, and pass uncounted, because the store fails all their calls.
fn uncounted() -> Limiter {
    let store = Arc::new(WithoutLeases(Wire::new(&Server::new(), &[ms(5)])));
    let layer = RateLimitLayer::builder(Quota::per_second(10))
        .store(store)
        .max_wait(10 * SECOND);
    let layer = layer.on_store_error(OnStoreError::FailOpen).build();
    layer.unwrap().limiter()
}

/// The store fails the call of two waiters, and the key is put on hold before their tasks run. One
/// of them can wait until the end of the hold.
#[tokio::test(start_paused = true)]
async fn waiters_that_may_pass_uncounted_obey_holds() {
    let (limiter, start) = (uncounted(), Instant::now());
    let mut patient = Box::pin(limiter.acquire(key()));
    let mut hurried = Box::pin(
        limiter
            .acquire(key())
            .deadline((start + 2 * SECOND).into_std()),
    );
    assert!(patient.as_mut().now_or_never().is_none() && hurried.as_mut().now_or_never().is_none());
    sleep(ms(50)).await;
    limiter.hold_for(key(), 3 * SECOND).await.unwrap();
    assert!(is_held(&hurried.await.unwrap_err()));
    drop(patient.await.expect("it passes uncounted after the hold"));
    assert!(start.elapsed() >= 3 * SECOND, "{:?}", start.elapsed());
    assert!(start.elapsed() < 4 * SECOND, "{:?}", start.elapsed());
}

/// The same for requests of several keys.
#[tokio::test(start_paused = true)]
async fn joint_requests_that_may_pass_uncounted_obey_holds() {
    let (limiter, start) = (uncounted(), Instant::now());
    let joint = limiter
        .acquire(key())
        .and(limiter.acquire(Key::new("other")));
    let mut joint = Box::pin(joint);
    assert!(joint.as_mut().now_or_never().is_none());
    limiter.hold_for(key(), 3 * SECOND).await.unwrap();
    drop(joint.await.expect("it passes uncounted after the hold"));
    assert!(start.elapsed() >= 3 * SECOND, "{:?}", start.elapsed());
    assert!(start.elapsed() < 4 * SECOND, "{:?}", start.elapsed());
}

/// The message of a release is lost. The reply to the inquiry of a request that cannot wait lets all others go on.
#[tokio::test(start_paused = true)]
async fn release_learned_by_an_inquiry_ends_all_waits() {
    let server = Server::new();
    let [holder, other] = [(); 2].map(|()| {
        let store = Wire::new(&server, &[ms(1)]);
        process(store, Quota::new(100, SECOND), HOUR)
    });
    holder.hold_for(key(), 600 * SECOND).await.unwrap();
    sleep(2 * SECOND).await;
    let waits: Vec<_> = (0..3)
        .map(|_| {
            let other = other.clone();
            tokio::spawn(async move { other.acquire(key()).await.map(drop) })
        })
        .collect();
    sleep(ms(10)).await;
    server.mute.store(true, Ordering::Relaxed);
    holder.release(key()).await.unwrap();
    sleep(2 * SECOND).await;
    let start = Instant::now();
    let soon = (start + SECOND).into_std();
    let _ = other.acquire(key()).deadline(soon).await;
    for wait in waits {
        wait.await.unwrap().unwrap();
    }
    assert!(start.elapsed() < 2 * SECOND, "{:?}", start.elapsed());
}
