//! Joint requests over Redis: one script decides about all of their keys.

#![cfg(feature = "redis")]

use crate::support::{in_flight, over, patient};

use std::future::{Future, Ready, ready};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::join_all;
use http::{Request, Response};
use in_flight::{millis, scripts_run};
use over::over;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use redis_server::RedisServer;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tollgate::store::{RedisStore, Store};
use tollgate::{Key, Limited, Limiter, OnStoreError, Permit, Quota, RateLimitLayer};
use tower::{BoxError, Layer, Service, ServiceExt};

const HOUR: Duration = Duration::from_secs(3600);
const LONG: Duration = Duration::from_secs(20);

/// Returns the limiters of a process, one for each quota, over one store.
fn limiters(
    store: &Arc<RedisStore>,
    quotas: &[Quota],
    max_wait: Duration,
    on_error: OnStoreError,
) -> Vec<Limiter> {
    let limiter = |quota: &Quota| {
        let mut layer = RateLimitLayer::builder(*quota)
            .store(store.clone() as Arc<dyn Store>)
            .max_wait(max_wait)
            .on_store_error(on_error);
        if on_error == OnStoreError::FallbackShare {
            layer = layer.fallback_share(0.5);
        }
        layer.build().unwrap().limiter()
    };
    quotas.iter().map(limiter).collect()
}

fn process(server: &RedisServer, quotas: &[Quota]) -> Vec<Limiter> {
    let store = patient::store(&server.url());
    limiters(&store, quotas, LONG, OnStoreError::FailClosed)
}

/// Takes a permit of key `keys[i]` of each limiter `i`, for `costs[i]` units.
async fn acquire_for(limiters: &[Limiter], keys: &[Key], costs: &[u32]) -> Result<Permit, Limited> {
    let parts = limiters.iter().zip(keys).zip(costs);
    let mut parts = parts.map(|((limiter, key), cost)| limiter.acquire(*key).cost(*cost));
    let first = parts.next().unwrap();
    parts.fold(first, |all, part| all.and(part)).await
}

async fn acquire(limiters: &[Limiter], keys: &[Key]) -> Result<Permit, Limited> {
    acquire_for(limiters, keys, &vec![1; keys.len()]).await
}

/// Returns the units that are used, after all permits that were given back have arrived.
async fn used(limiter: &Limiter, key: Key) -> u64 {
    limiter.shutdown().await.unwrap();
    limiter.peek(key).await.unwrap().limits[0].used
}

/// Makes rounds until the requests of a round take one call each. The first call loads the script.
/// On a busy machine some slots expire before their request leaves, and need another call.
async fn until_one_call_each<F: Future<Output = u64>>(
    server: &RedisServer,
    mut round: impl FnMut() -> F,
) {
    let mut calls = Vec::new();
    let give_up = Instant::now() + LONG;
    while Instant::now() < give_up {
        let before = scripts_run(server);
        let requests = round().await;
        calls.push(scripts_run(server) - before);
        if calls.last() == Some(&requests) {
            return;
        }
    }
    panic!("calls of the rounds: {calls:?}");
}

#[tokio::test]
async fn joint_requests_take_one_call_each() {
    let server = RedisServer::start().unwrap();
    // They are too small for permits at hand.
    let quotas = [40, 30, 45].map(|count| Quota::new(count, HOUR));
    let limiters = process(&server, &quotas);
    let mut number = 0u8;
    until_one_call_each(&server, || {
        number += 1;
        let keys = ["bot", "channel", "route"].map(|key| Key::new(key).and([number]));
        let limiters = &limiters;
        async move {
            for _ in 0..20 {
                drop(acquire(limiters, &keys).await.unwrap());
            }
            20
        }
    })
    .await;
}

#[tokio::test]
async fn refused_joint_requests_leave_no_trace() {
    let server = RedisServer::start().unwrap();
    let quotas = [
        Quota::new(40, HOUR),
        Quota::new(2, HOUR),
        Quota::new(5, HOUR),
    ];
    let limiters = process(&server, &quotas);
    let keys = ["bot", "channel", "route"].map(Key::new);
    // A permit that expires on a busy machine comes back, but the request may be refused meanwhile.
    while used(&limiters[1], keys[1]).await < 2 {
        drop(acquire(&limiters, &keys).await);
    }
    for _ in 0..3 {
        let refused = acquire(&limiters, &keys).await.unwrap_err();
        let report = refused.report();
        assert_eq!(report.limit(), Some(quotas[1].limits()[0]), "{refused}");
    }
    for (limiter, key) in limiters.iter().zip(keys) {
        assert_eq!(used(limiter, key).await, 2);
    }
}

/// A request that waits for one key has a slot of each other key for the same moment. It is found
/// in the same call.
#[tokio::test]
async fn joint_requests_that_wait_take_one_call_each() {
    let server = RedisServer::start().unwrap();
    let quotas = [
        Quota::new(40, HOUR),
        Quota::new(1, millis(150)),
        Quota::new(2, millis(350)),
    ];
    let limiters = process(&server, &quotas);
    let mut number = 0u8;
    until_one_call_each(&server, || {
        number += 1;
        let keys = ["bot", "channel", "route"].map(|key| Key::new(key).and([number]));
        let limiters = &limiters;
        async move {
            let requests = (0..5).map(|_| acquire(limiters, &keys));
            let permits = join_all(requests).await;
            permits.iter().filter(|permit| permit.is_ok()).count() as u64
        }
    })
    .await;
}

/// When each permit of a key was used, and its units.
type Uses = Arc<Mutex<Vec<Vec<(Instant, u32)>>>>;

/// Makes random joint requests of a process until they end.
async fn make_requests(process: Vec<Limiter>, keys: Vec<Key>, plan: Vec<Vec<u32>>, uses: Uses) {
    let mut requests = JoinSet::new();
    for (number, costs) in plan.into_iter().enumerate() {
        let (process, keys, uses) = (process.clone(), keys.clone(), uses.clone());
        requests.spawn(async move {
            let wanted = acquire_for(&process, &keys, &costs);
            // Some give up.
            let permit = match number % 5 {
                4 => tokio::time::timeout(millis(40), wanted).await.ok(),
                _ => Some(wanted.await),
            };
            let permit = match permit {
                Some(Ok(permit)) => permit,
                // It gave up, or the machine is so busy that permits expire on their way.
                None | Some(Err(_)) => return,
            };
            if number % 7 == 3 {
                return permit.give_back();
            }
            let mut uses = uses.lock().unwrap();
            let now = Instant::now();
            if permit.is_valid() {
                for (uses, cost) in uses.iter_mut().zip(costs) {
                    uses.push((now, cost));
                }
            }
        });
        sleep(millis(number as u64 % 4)).await;
    }
    requests.join_all().await;
}

/// Two processes ask for all keys in one call. Another one asks for one key after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_and_single_calls_are_never_over() {
    let server = RedisServer::start().unwrap();
    let quota = || {
        prop_oneof![
            (4u32..9, 100u64..400).prop_map(|(count, window)| Quota::new(count, millis(window))),
            (4u32..9, 4u32..9, 100u64..400).prop_map(|(capacity, count, window)| {
                Quota::bucket(capacity).refill(count, millis(window))
            }),
            (4u32..9, 500u64..900).prop_map(|(count, window)| Quota::fixed(count, millis(window))),
        ]
    };
    let cost = prop_oneof![1 => Just(0u32), 5 => Just(1u32), 2 => 2u32..4];
    let plan = prop::collection::vec(prop::collection::vec(cost, 4), 20);
    let round = (
        prop::collection::vec(quota(), 2..=4),
        prop::collection::vec(plan, 3),
    );
    let mut runner = TestRunner::default();
    let mut full_rounds = 0;
    for number in 0..8 {
        let (quotas, plans) = round.new_tree(&mut runner).unwrap().current();
        let keys: Vec<Key> = (0..quotas.len())
            .map(|key| Key::new([number, key as u8]))
            .collect();
        let uses: Uses = Arc::new(Mutex::new(vec![Vec::new(); quotas.len()]));
        let mut processes = JoinSet::new();
        for (number, plan) in plans.into_iter().enumerate() {
            let process = match number {
                0 => {
                    // Each key has a store of its own.
                    let one = |quota| process(&server, std::slice::from_ref(quota)).remove(0);
                    quotas.iter().map(one).collect()
                }
                _ => process(&server, &quotas),
            };
            processes.spawn(make_requests(process, keys.clone(), plan, uses.clone()));
        }
        processes.join_all().await;
        let uses = uses.lock().unwrap();
        for (quota, uses) in quotas.iter().zip(&*uses) {
            let over = over(quota, uses);
            assert!(
                over.is_none(),
                "{over:?} of {quota} in {quotas:?}: {uses:?}"
            );
        }
        // On a busy machine most permits expire on their way, and there is little to judge.
        full_rounds += u32::from(uses.iter().all(|uses| uses.len() > 10));
        if full_rounds == 2 {
            return;
        }
    }
    panic!("{full_rounds} rounds with more than ten uses of each key");
}

#[tokio::test]
async fn joint_scripts_are_loaded_again() {
    let server = RedisServer::start().unwrap();
    let limiters = process(&server, &[Quota::new(40, HOUR), Quota::new(30, HOUR)]);
    let keys = ["bot", "channel"].map(Key::new);
    for _ in 0..3 {
        drop(acquire(&limiters, &keys).await.unwrap());
        let () = server.command(&["SCRIPT", "FLUSH"]);
    }
    assert_eq!(used(&limiters[1], keys[1]).await, 3);
}

/// The clock of the server is set forward: no key forgets what was used.
#[tokio::test]
async fn joint_calls_are_repeated_when_the_clock_was_set() {
    let mut server = RedisServer::with_stepping_clock().unwrap();
    let quotas = [Quota::new(40, HOUR), Quota::new(30, HOUR)];
    let limiters = process(&server, &quotas);
    let keys = ["bot", "channel"].map(Key::new);
    for _ in 0..2 {
        drop(acquire(&limiters, &keys).await.unwrap());
    }
    server.step_clock(60).unwrap();
    drop(acquire(&limiters, &keys).await.unwrap());
    assert_eq!(used(&limiters[0], keys[0]).await, 3);
    assert_eq!(used(&limiters[1], keys[1]).await, 3);
}

/// One key has a state of an unknown format. The error is about that key alone.
#[tokio::test]
async fn errors_of_one_key_do_not_concern_the_others() {
    let server = RedisServer::start().unwrap();
    let store = patient::store(&server.url());
    let quotas = [Quota::new(40, HOUR), Quota::new(30, HOUR)];
    let keys = ["bot", "channel"].map(Key::new);
    let open = limiters(&store, &quotas, LONG, OnStoreError::FailOpen);
    drop(open[1].acquire(keys[1]).await.unwrap());
    let names: Vec<String> = server.command(&["KEYS", "tollgate:*"]);
    let () = server.command(&["SET", &names[0], &"\u{7f}".repeat(200)]);
    drop(acquire(&open, &keys).await.unwrap());
    assert_eq!(used(&open[0], keys[0]).await, 1, "this key is counted");
    let stats = store.stats();
    let (_, joint) = stats.by_call().find(|(kind, _)| *kind == "joint").unwrap();
    let failed = joint.by_result().find(|(result, _)| *result == "failed");
    assert_eq!(failed, Some(("failed", 1)), "{stats:?}");

    let closed = limiters(&store, &quotas, LONG, OnStoreError::FailClosed);
    let refused = acquire(&closed, &keys).await.unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("TOLLGATE the state of this key has format 127"),
        "{refused}"
    );
    assert_eq!(used(&open[0], keys[0]).await, 1, "nothing is left booked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_requests_go_on_without_the_server() {
    let mut server = RedisServer::start().unwrap();
    let quotas = [Quota::new(40, HOUR), Quota::new(30, HOUR)];
    let keys = ["bot", "channel"].map(Key::new);
    let store = patient::store(&server.url());
    let [closed, open, share] = [
        OnStoreError::FailClosed,
        OnStoreError::FailOpen,
        OnStoreError::FallbackShare,
    ]
    .map(|on_error| limiters(&store, &quotas, LONG, on_error));
    for limiters in [&closed, &open] {
        drop(acquire(limiters, &keys).await.unwrap());
    }
    server.kill();
    let refused = acquire(&closed, &keys).await.unwrap_err();
    assert!(matches!(refused, Limited::Store { .. }), "{refused}");
    drop(acquire(&open, &keys).await.unwrap());
    let mut alone = 0;
    let refused = loop {
        match acquire(&share, &keys).await {
            Ok(_) => alone += 1,
            Err(refused) => break refused,
        }
    };
    assert_eq!(alone, 15, "half of the smaller limit: {refused}");
}

/// A restart without data: nothing is granted until the permits of the lost state are old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_requests_wait_for_states_that_recover() {
    let mut server = RedisServer::start().unwrap();
    // Permits of windows like these may wait for a stalled machine for 50 ms.
    let quotas = [Quota::new(2, millis(1500)), Quota::new(3, millis(1000))];
    let limiters = process(&server, &quotas);
    let keys = ["bot", "channel"].map(Key::new);
    let give_up = Instant::now() + LONG;
    let mut sent = 0;
    while sent < 3 {
        match acquire(&limiters, &keys).await {
            Ok(_) => sent += 1,
            // The machine stalled for longer than a permit is valid.
            Err(limited) => assert!(Instant::now() < give_up, "{limited}"),
        }
    }
    server.restart().unwrap();
    let permit = loop {
        match acquire(&limiters, &keys).await {
            Ok(permit) => break permit,
            // The connection is made anew.
            Err(limited) => assert!(Instant::now() < give_up, "{limited}"),
        }
        sleep(millis(20)).await;
    };
    assert!(permit.is_valid());
}

/// In a cluster, each key may be on another server.
#[tokio::test]
async fn clusters_are_asked_for_one_key_at_a_time() {
    let server = RedisServer::start_cluster_of_one().unwrap();
    let quotas = [Quota::new(40, HOUR), Quota::new(30, HOUR)];
    let keys = ["bot", "channel"].map(Key::new);
    let known = patient::of(RedisStore::cluster([server.url()]));
    // The store does not know that it is a cluster: the server refuses the first joint call.
    let unknown = patient::store(&server.url());
    for (number, store) in [known, unknown].into_iter().enumerate() {
        let limiters = limiters(&store, &quotas, LONG, OnStoreError::FailClosed);
        for _ in 0..3 {
            drop(acquire(&limiters, &keys).await.unwrap());
        }
        for (limiter, key) in limiters.iter().zip(keys) {
            assert_eq!(used(limiter, key).await, 3 * (number as u64 + 1));
        }
    }
}

/// The units of a slot that expired are free again for the request that it was for, although
/// nothing else is left of the limits.
#[tokio::test]
async fn joint_requests_replace_their_expired_slots() {
    let server = RedisServer::start().unwrap();
    let limiters = process(&server, &[Quota::new(1, HOUR), Quota::new(1, HOUR)]);
    let mut late_rounds = 0;
    for round in 0..10 {
        let keys = [
            Key::new(format!("one {round}")),
            Key::new(format!("other {round}")),
        ];
        let mut late = Box::pin(acquire(&limiters, &keys));
        // The store's thread books. This thread sleeps for longer than the slots are valid. If it
        // stalled before, the request already has its permit.
        if futures::poll!(&mut late).is_ready() {
            continue;
        }
        late_rounds += 1;
        std::thread::sleep(millis(150));
        drop(late.await.unwrap());
    }
    assert!(late_rounds > 0);
}

/// A service that is ready while its flag is set.
#[derive(Clone)]
struct Door(Arc<AtomicBool>);

impl Service<Request<()>> for Door {
    type Response = Response<()>;
    type Error = BoxError;
    type Future = Ready<Result<Response<()>, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.0.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(())))
    }
}

/// The same for a request whose permit expired before the inner service was ready.
#[tokio::test]
async fn joint_requests_replace_their_expired_permits() {
    let server = RedisServer::start().unwrap();
    let layer = RateLimitLayer::builder(Quota::new(1, HOUR))
        .and_per("other", Quota::new(1, HOUR), |_| Key::new("other"))
        .store(patient::store(&server.url()))
        .max_wait(LONG)
        .build()
        .unwrap();
    let is_open = Arc::new(AtomicBool::new(true));
    let mut service = layer.layer(Door(is_open.clone()));
    let call = service.ready().await.unwrap().call(Request::new(()));
    is_open.store(false, Ordering::Relaxed);
    let call = tokio::spawn(call);
    sleep(millis(150)).await;
    is_open.store(true, Ordering::Relaxed);
    call.await.unwrap().unwrap();
}

/// A cap joined with a common layer, each with a key of its own in Redis.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cap_joined_with_a_common_layer_is_used_up() {
    let server = RedisServer::start().unwrap();
    let store = Arc::new(RedisStore::new(&server.url()).unwrap());
    let layer = |name, per_second| {
        let builder = RateLimitLayer::builder(Quota::per_second(per_second));
        let builder = builder.key(move |_| Some(Key::new(name))).max_wait(LONG);
        builder.store(store.clone()).build().unwrap()
    };
    let sent = Arc::new(Mutex::new(0));
    let upstream = tower::service_fn({
        let sent = sent.clone();
        move |_: Request<()>| {
            *sent.lock().unwrap() += 1;
            ready(Ok::<_, BoxError>(Response::new(())))
        }
    });
    let batch = layer("cap", 15).and(layer("common", 20)).layer(upstream);
    let mut jobs = JoinSet::new();
    for _ in 0..100 {
        let batch = tower::util::BoxCloneService::new(batch.clone());
        jobs.spawn(async move { while batch.clone().oneshot(Request::new(())).await.is_ok() {} });
    }
    // 75 in five seconds; later if the machine stalls, because permits expire then.
    let start = Instant::now();
    while *sent.lock().unwrap() < 75 {
        assert!(start.elapsed() < LONG, "{} sent", sent.lock().unwrap());
        sleep(millis(50)).await;
    }
}

/// A request that waits for the rate of its channel keeps no in-flight slot of all channels, and one that waits for an
/// in-flight slot no unit: requests of another process use them.
#[tokio::test]
async fn requests_of_another_process_use_what_waiters_need_not() {
    let server = RedisServer::start().unwrap();
    let quotas = [Quota::in_flight(1), Quota::new(1, LONG / 4)];
    let [one, other] = [(); 2].map(|()| process(&server, &quotas));
    let keys = |channel: &'static str| [Key::ALL, Key::new(channel)];
    drop(acquire_for(&one, &keys("busy"), &[1, 1]).await.unwrap());
    let busy = tokio::spawn(async move { acquire_for(&one, &keys("busy"), &[1, 1]).await });
    sleep(millis(200)).await;
    for channel in ["a", "b", "c"] {
        drop(acquire_for(&other, &keys(channel), &[1, 1]).await.unwrap());
    }
    assert!(!busy.is_finished(), "it waits for its rate");
    drop(busy.await.unwrap().unwrap());

    let quotas = [Quota::new(2, LONG * 10), Quota::in_flight(1)];
    let [one, other] = [(); 2].map(|()| process(&server, &quotas));
    let first = acquire_for(&one, &keys("x"), &[1, 1]).await.unwrap();
    let waits = tokio::spawn(async move { acquire_for(&one, &keys("x"), &[1, 1]).await });
    sleep(millis(200)).await;
    drop(acquire_for(&other, &keys("y"), &[1, 1]).await.unwrap());
    assert!(!waits.is_finished(), "it waits for the call in flight");
    drop(first);
    let refused = waits.await.unwrap().unwrap_err();
    assert_eq!(refused.report().limit().unwrap().count(), 2, "{refused}");
}
