//! Holds: one refusal by the upstream stops other requests before they are refused too. Under a
//! paused clock.

use crate::support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use http::StatusCode;
use support::{Failing, Upstream, get, limited, ms, ok, peek, waiting, who_said_no};
use tokio::time::{Instant, advance, sleep};
use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{
    Key, Limited, Limiter, OnStoreError, Quota, RateLimitBuilder, RateLimitLayer, Reason, Signal,
};
use tower::{ServiceBuilder, ServiceExt};

const SECOND: Duration = Duration::from_secs(1);

fn builder() -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_second(50)).max_wait(Duration::from_secs(10))
}

fn reason(error: &Limited) -> Option<Reason> {
    match error {
        Limited::Local { reason, .. } => Some(reason.clone()),
        _ => None,
    }
}

#[tokio::test(start_paused = true)]
async fn hold_after_429_lasts_as_the_upstream_said() {
    let layer = builder().build().unwrap();
    let upstream = Upstream::answering([ok(), limited("3")]);
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(upstream.clone());
    for _ in 0..2 {
        service.clone().oneshot(get("/")).await.unwrap();
    }
    assert_eq!(peek(&layer, Key::ALL).await.held, Some(3 * SECOND));
    let calls = (0..20).map(|_| service.clone().oneshot(get("/")));
    let answers = join_all(calls).await;
    assert!(answers.iter().all(|answer| {
        answer
            .as_ref()
            .is_ok_and(|answer| answer.status() == StatusCode::OK)
    }));
    let arrivals = upstream.arrivals();
    assert_eq!(arrivals[..2], [0, 0]);
    assert!(
        arrivals[2..].iter().all(|at| (3000..3100).contains(at)),
        "{arrivals:?}"
    );
    assert_eq!(peek(&layer, Key::ALL).await.held, None);
}

#[tokio::test(start_paused = true)]
async fn waiters_wait_out_a_hold_or_are_refused_immediately() {
    // Two a second: the queue reaches some seconds ahead.
    let layer = RateLimitLayer::builder(Quota::per_second(2))
        .max_wait(10 * SECOND)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let start = Instant::now();
    let _spent = (
        limiter.acquire(Key::ALL).await.unwrap(),
        limiter.acquire(Key::ALL).await.unwrap(),
    );
    let mut patient: Vec<_> = (0..4)
        .map(|_| Box::pin(limiter.acquire(Key::ALL)))
        .collect();
    let soon = (start + ms(3500)).into_std();
    let mut impatient = Box::pin(limiter.acquire(Key::ALL).deadline(soon));
    assert!(
        patient
            .iter_mut()
            .all(|waits| waits.as_mut().now_or_never().is_none())
    );
    assert!(impatient.as_mut().now_or_never().is_none());
    advance(ms(100)).await;

    limiter.hold_for(Key::ALL, 4 * SECOND).await.unwrap();
    let refused = impatient.await.unwrap_err();
    assert_eq!(start.elapsed(), ms(100), "it is refused at once");
    assert_eq!(reason(&refused), Some(Reason::Held));
    assert_eq!(refused.report().retry_after(), Some(4 * SECOND));
    let mut sent = Vec::new();
    for waits in patient {
        drop(waits.await.unwrap());
        sent.push(start.elapsed().as_millis());
    }
    assert_eq!(
        sent,
        [4100, 4100, 5120, 5120],
        "in their order, at the pace of the limit"
    );
}

#[tokio::test(start_paused = true)]
async fn held_key_refuses_impatient_request_with_retry_time() {
    let layer = builder().max_wait(SECOND).build().unwrap();
    let upstream = Upstream::answering([limited("30")]);
    let service = ServiceBuilder::new().layer(layer).service(upstream.clone());
    service.clone().oneshot(get("/")).await.unwrap();
    let error = service.clone().oneshot(get("/")).await.unwrap_err();
    let limited = Limited::find(&error).unwrap();
    assert_eq!(
        (reason(limited), limited.report().retry_after()),
        (Some(Reason::Held), Some(30 * SECOND))
    );
    assert_eq!(limited.report().limit(), None);
    assert!(limited.to_string().contains("on hold"), "{limited}");
    assert_eq!(upstream.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_hold_only_ever_ends_later() {
    let layer = builder().build().unwrap();
    let limiter = layer.limiter();
    let held = async || peek(&layer, Key::ALL).await.held;
    limiter.hold_for(Key::ALL, 5 * SECOND).await.unwrap();
    limiter.hold_for(Key::ALL, 2 * SECOND).await.unwrap();
    assert_eq!(held().await, Some(5 * SECOND));
    limiter.hold_for(Key::ALL, 7 * SECOND).await.unwrap();
    assert_eq!(held().await, Some(7 * SECOND));
    limiter.release(Key::ALL).await.unwrap();
    assert_eq!(held().await, None);
    limiter.hold_for(Key::ALL, Duration::MAX).await.unwrap();
    assert!(held().await > Some(300 * 86_400 * SECOND));
    assert_eq!(peek(&layer, Key::new("other")).await.held, None);
}

#[tokio::test(start_paused = true)]
async fn waiter_for_hold_end_goes_on_release() {
    let layer = builder().build().unwrap();
    let limiter = layer.limiter();
    limiter.hold_for(Key::ALL, 8 * SECOND).await.unwrap();
    let start = Instant::now();
    let waits = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire(Key::ALL).await.map(drop) }
    });
    sleep(SECOND).await;
    limiter.release(Key::ALL).await.unwrap();
    waits.await.unwrap().unwrap();
    assert_eq!(start.elapsed(), SECOND);
}

#[tokio::test(start_paused = true)]
async fn holds_without_hint_grow_until_a_success() {
    let layer = builder()
        .max_wait(Duration::from_secs(120))
        .max_hold(10 * SECOND)
        .build()
        .unwrap();
    let refusals = (0..6).map(|_| limited(""));
    let upstream = Upstream::answering(refusals.chain([ok(), limited("")]));
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(upstream.clone());
    let mut holds = Vec::new();
    for _ in 0..8 {
        service.clone().oneshot(get("/")).await.unwrap();
        holds.push(
            peek(&layer, Key::ALL)
                .await
                .held
                .unwrap_or_default()
                .as_secs_f64(),
        );
    }
    for (hold, longest) in holds.iter().zip([1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.0, 1.0]) {
        assert!((longest / 2.0..=longest).contains(hold), "{holds:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn earlier_calls_refusals_do_not_prolong_hintless_hold() {
    let layer = builder().build().unwrap();
    let limiter = layer.limiter();
    let signal = |hint: &str| tollgate::Signal::read(&limited(hint).unwrap());
    let permits = join_all((0..5).map(|_| limiter.acquire(Key::ALL))).await;
    let all_sent: Vec<_> = permits
        .into_iter()
        .map(|permit| permit.unwrap().begin().unwrap())
        .collect();
    for (number, sent) in all_sent.into_iter().enumerate() {
        sent.answered(&signal(""));
        advance(ms(50)).await;
        let held = peek(&layer, Key::ALL).await.held.unwrap();
        assert!(held <= SECOND - ms(50 * (number as u64 + 1)), "{held:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn hint_is_cut_to_max_hold_and_zero_disables() {
    for (max_hold, held) in [(5 * SECOND, Some(5 * SECOND)), (Duration::ZERO, None)] {
        let layer = builder().max_hold(max_hold).build().unwrap();
        let upstream = Upstream::answering([limited("99999999")]);
        let service = ServiceBuilder::new().layer(layer.clone()).service(upstream);
        service.oneshot(get("/")).await.unwrap();
        assert_eq!(peek(&layer, Key::ALL).await.held, held);
    }
    let layer = builder().build().unwrap();
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(Upstream::answering([limited("0")]));
    service.oneshot(get("/")).await.unwrap();
    assert_eq!(
        peek(&layer, Key::ALL).await.held,
        None,
        "it may be tried again at once"
    );
}

/// Another user of the same account has used it up: nothing remains, and the limiter does not know.
#[tokio::test(start_paused = true)]
async fn exhausted_upstream_quota_holds_requests_until_its_reset() {
    let left = |remaining: u32, reset: u32| {
        let response = http::Response::builder().header("ratelimit-limit", 100);
        let response = response
            .header("ratelimit-remaining", remaining)
            .header("ratelimit-reset", reset);
        Ok(response.body(String::new()).unwrap())
    };
    let layer = RateLimitLayer::builder(Quota::per_minute(100))
        .max_wait(Duration::from_secs(50))
        .build()
        .unwrap();
    let upstream = Upstream::answering([left(1, 31), left(0, 30), left(99, 60), left(0, 2), ok()]);
    let service = ServiceBuilder::new().layer(layer).service(upstream.clone());
    for _ in 0..5 {
        assert_eq!(
            service.clone().oneshot(get("/")).await.unwrap().status(),
            StatusCode::OK
        );
    }
    // Two seconds are no hold; but nothing remains until then.
    assert_eq!(upstream.arrivals(), [0, 0, 30_000, 30_000, 32_000]);
}

#[tokio::test(start_paused = true)]
async fn custom_dialect_holds_the_keys_it_names() {
    let theirs = Key::host("theirs.example");
    let pause = move |key: Key, headers: &http::HeaderMap, signal: tollgate::Signal| {
        if key == theirs && headers.contains_key("x-pause") {
            signal
                .with_refusal(StatusCode::TOO_MANY_REQUESTS)
                .with_retry_after(3 * SECOND)
        } else {
            signal
        }
    };
    let layer = builder()
        .key(tollgate::by_host)
        .dialect(pause)
        .build()
        .unwrap();
    let paused = || {
        Ok(http::Response::builder()
            .header("x-pause", "3")
            .body(String::new())
            .unwrap())
    };
    let upstream = Upstream::answering([paused(), paused()]);
    let service = ServiceBuilder::new().layer(layer.clone()).service(upstream);
    service
        .clone()
        .oneshot(get("http://theirs.example/"))
        .await
        .unwrap();
    service
        .clone()
        .oneshot(get("http://other.example/"))
        .await
        .unwrap();
    assert_eq!(peek(&layer, theirs).await.held, Some(3 * SECOND));
    assert_eq!(peek(&layer, Key::host("other.example")).await.held, None);
}

#[tokio::test(start_paused = true)]
async fn keys_are_held_apart() {
    let layer = builder().key(tollgate::by_host).build().unwrap();
    let upstream = Upstream::answering([limited("5")]);
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .service(upstream.clone());
    service
        .clone()
        .oneshot(get("http://one.example/"))
        .await
        .unwrap();
    service
        .clone()
        .oneshot(get("http://two.example/"))
        .await
        .unwrap();
    assert_eq!(upstream.arrivals(), [0, 0]);
    assert!(peek(&layer, Key::host("one.example")).await.held.is_some());
}

#[tokio::test(start_paused = true)]
async fn hold_covers_prefetched_permits_of_layers_sharing_a_store() {
    let store = Arc::new(MemoryStore::default());
    let quota = Quota::per_second(10_000);
    let build = || {
        let builder = RateLimitLayer::builder(quota).max_wait(Duration::from_secs(10));
        builder.store(store.clone()).build().unwrap().limiter()
    };
    let (ours, theirs): (Limiter, Limiter) = (build(), build());
    // In heavy use, permits are prefetched.
    for _ in 0..200 {
        drop(theirs.acquire(Key::ALL).await.unwrap());
    }
    ours.hold_for(Key::ALL, 2 * SECOND).await.unwrap();
    let start = Instant::now();
    let mut waits = Box::pin(theirs.acquire(Key::ALL));
    assert!(
        waits.as_mut().now_or_never().is_none(),
        "the prefetched permits are gone"
    );
    drop(waits.await.unwrap());
    assert_eq!(start.elapsed(), 2 * SECOND);
    assert_eq!(theirs.peek(Key::ALL).await.unwrap().held, None);
}

#[tokio::test(start_paused = true)]
async fn hold_applies_with_only_an_in_flight_limit() {
    let layer = RateLimitLayer::builder(Quota::in_flight(5))
        .max_wait(4 * SECOND)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    limiter.hold_for(Key::ALL, 3 * SECOND).await.unwrap();
    let start = Instant::now();
    let all = join_all((0..5).map(|_| limiter.acquire(Key::ALL))).await;
    assert!(all.iter().all(Result::is_ok));
    assert_eq!(start.elapsed(), 3 * SECOND);
    limiter.hold_for(Key::ALL, 5 * SECOND).await.unwrap();
    drop(all);
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    assert_eq!(reason(&refused), Some(Reason::Held));
}

#[tokio::test(start_paused = true)]
async fn hold_is_kept_while_the_store_is_unreachable() {
    for later in [false, true] {
        let store = Arc::new(Failing::away(later));
        let layer = builder()
            .store(store)
            .on_store_error(OnStoreError::FailOpen)
            .build()
            .unwrap();
        let upstream = Upstream::answering([limited("3")]);
        let service = ServiceBuilder::new()
            .layer(layer.clone())
            .service(upstream.clone());
        service.clone().oneshot(get("/")).await.unwrap();
        let next = service.clone().oneshot(get("/")).await;
        assert!(
            next.is_ok() && upstream.arrivals()[1] >= 3000,
            "{:?}",
            upstream.arrivals()
        );
        let by_hand = layer.limiter().hold_for(Key::ALL, SECOND).await;
        assert!(by_hand.is_err(), "others do not know");
    }
    let closed = builder()
        .store(Arc::new(Failing::away(true)))
        .build()
        .unwrap();
    let error = closed.limiter().acquire(Key::ALL).await.unwrap_err();
    assert_eq!(who_said_no(&error), "store");
    assert_eq!(waiting_of(&closed).await, 0);
}

async fn waiting_of(layer: &RateLimitLayer) -> usize {
    match layer.limiter().peek(Key::ALL).await {
        Ok(_) => waiting(layer).await,
        Err(_) => 0,
    }
}

/// Of two budgets, the one that is spent holds, whatever it counts.
#[tokio::test(start_paused = true)]
async fn spent_budget_of_all_calls_holds_the_key() {
    for (name, holds) in [
        ("x-ratelimit-remaining-tokens", true),
        ("x-ratelimit-remaining-search", false),
    ] {
        let layer = builder().build().unwrap();
        let mut spent = ok().unwrap();
        spent.headers_mut().insert(name, 0.into());
        let reset = name
            .replace("remaining", "reset")
            .parse::<http::HeaderName>()
            .unwrap();
        spent.headers_mut().insert(reset, 7.into());
        spent
            .headers_mut()
            .insert("x-ratelimit-remaining-requests", 80.into());
        let service = ServiceBuilder::new()
            .layer(layer.clone())
            .service(Upstream::answering([Ok(spent)]));
        service.oneshot(get("/")).await.unwrap();
        assert_eq!(
            peek(&layer, Key::ALL).await.held,
            holds.then_some(7 * SECOND),
            "{name}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_holds_the_key_of_its_scope() {
    let (account, store) = (Key::new("account"), Arc::new(MemoryStore::default()));
    for (scope, held) in [
        ("user", [true, false]),
        ("global", [false, true]),
        ("shared", [false, false]),
    ] {
        let route = Key::new(scope);
        let on_scope = move |key, scope: &str| match scope {
            "global" => Some(account),
            "shared" => None,
            _ => Some(key),
        };
        let routes = builder()
            .key(move |_| route)
            .on_scope(on_scope)
            .store(store.clone())
            .build()
            .unwrap();
        let whole = RateLimitLayer::builder(Quota::per_minute(900)).store(store.clone());
        let whole = whole.key(move |_| account).build().unwrap();
        let mut refusal = limited("9").unwrap();
        refusal
            .headers_mut()
            .insert("x-ratelimit-scope", scope.parse().unwrap());
        let upstream = Upstream::answering([Ok(refusal)]);
        let stack = ServiceBuilder::new()
            .layer(whole.clone().and(routes.clone()))
            .service(upstream);
        stack.oneshot(get("/")).await.unwrap();
        let holds = [
            peek(&routes, route).await.held,
            peek(&whole, account).await.held,
        ];
        assert_eq!(
            holds,
            held.map(|held| held.then_some(9 * SECOND)),
            "{scope}"
        );
        let limits = peek(&whole, account).await.limits;
        assert_eq!(
            limits.len(),
            1,
            "the limit of the routes is not asserted for the account: {limits:?}"
        );
        whole.limiter().release(account).await.unwrap();
    }
}

/// Requests of high and low cost that waited for the end of a hold leave in order of arrival.
#[tokio::test(start_paused = true)]
async fn calls_of_different_costs_leave_hold_in_order() {
    let layer = RateLimitLayer::builder(Quota::per_second(10))
        .max_wait(60 * SECOND)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    limiter.hold_for(Key::ALL, 2 * SECOND).await.unwrap();
    let start = Instant::now();
    let costs = [1, 2, 1, 1, 3, 1, 1, 5, 2, 1, 1, 1];
    let calls = costs.map(|cost| {
        let waits = limiter.acquire(Key::ALL).cost(cost);
        async move {
            drop(waits.await.unwrap());
            start.elapsed().as_millis()
        }
    });
    // Ten units in each window.
    assert_eq!(
        join_all(calls).await,
        [
            2000, 2000, 2000, 2000, 2000, 2000, 2000, 3020, 3020, 3020, 3020, 3020
        ]
    );
}

/// The refusal of a costly call does not refuse the cheap calls behind it.
#[tokio::test(start_paused = true)]
async fn refused_costly_call_leaves_cheaper_calls_waiting() {
    let layer = RateLimitLayer::builder(Quota::per_second(10))
        .max_wait(SECOND)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    limiter.hold_for(Key::ALL, ms(500)).await.unwrap();
    let start = Instant::now();
    let calls = [5, 10, 1, 9, 2].map(|cost| {
        let waits = limiter.acquire(Key::ALL).cost(cost);
        async move { (waits.await.is_ok(), start.elapsed().as_millis()) }
    });
    let ended = join_all(calls).await;
    assert_eq!(
        ended,
        [
            (true, 500),
            (false, 500),
            (true, 500),
            (false, 500),
            (true, 500)
        ]
    );
}

/// A program that makes a limiter for each tenant frees each of them during a long hold.
#[tokio::test(start_paused = true)]
async fn a_dropped_limiter_is_freed_before_its_hold_ends() {
    let store = Arc::new(MemoryStore::new(10));
    let limiter = builder()
        .store(store.clone())
        .max_wait(100 * SECOND)
        .build()
        .unwrap()
        .limiter();
    limiter.hold_for(Key::ALL, 50 * SECOND).await.unwrap();
    let mut waits = Box::pin(limiter.acquire(Key::ALL));
    assert!(waits.as_mut().now_or_never().is_none());
    let freed = Arc::downgrade(&store);
    drop((store, waits, limiter));
    sleep(ms(1)).await;
    assert!(
        freed.upgrade().is_none(),
        "the end of the hold is waited for"
    );
}

/// The runtime of a waiter ends while a request is the probe of the key. Its batching delay goes on in the runtime of
/// the next waiter.
#[test]
fn runtime_that_ends_behind_a_probe_leaves_other_waiters() {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let (ends, stays) = (runtime(), runtime());
    let layer = builder().max_hold(ms(50)).build().unwrap();
    let limiter = layer.limiter();
    let key = Key::new("key");
    let acquire = || Box::pin(limiter.acquire(key));
    let probe = stays.block_on(async {
        let refused = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
        let refused = refused.with_retry_after(Duration::from_secs(3600));
        acquire().await.unwrap().begin().unwrap().answered(&refused);
        acquire().await.unwrap()
    });
    ends.block_on(async {
        let mut waits = acquire();
        assert!((&mut waits).now_or_never().is_none());
        tokio::spawn(waits);
        tokio::task::yield_now().await;
    });
    stays.block_on(async move {
        let mut waits = acquire();
        assert!((&mut waits).now_or_never().is_none());
        tokio::task::spawn_blocking(|| drop(ends)).await.unwrap();
        probe.give_back();
        let next = tokio::time::timeout(Duration::from_secs(4), waits).await;
        drop(next.expect("it is the next probe").unwrap());
    });
}

/// Permits from before a hold that was cut come back after it. The next requests wait for the probe, as if no permit
/// had come back.
#[tokio::test(start_paused = true)]
async fn permits_returned_after_a_cut_hold_await_the_probe() {
    let limiter = RateLimitLayer::builder(Quota::per_hour(10_000))
        .max_hold(ms(1000))
        .build()
        .unwrap()
        .limiter();
    let key = Key::new("tenant");
    // Fast use brings permits at hand.
    for _ in 0..50 {
        drop(limiter.acquire(key).await.unwrap());
    }
    let mut permits = Vec::new();
    for _ in 0..6 {
        permits.push(limiter.acquire(key).await.unwrap());
    }
    let refused = limited("3600").unwrap();
    let first = permits.pop().unwrap();
    first
        .begin()
        .unwrap()
        .answered(&tollgate::Signal::read(&refused));
    sleep(ms(1500)).await;
    permits.into_iter().for_each(tollgate::Permit::give_back);
    let acquires = (0..5).map(|_| limiter.acquire(key).now_or_never());
    let left: Vec<_> = acquires.flatten().collect();
    assert_eq!(left.len(), 1, "only the probe leaves");
}

/// The probe of a key without a limit of rate has no slot. If it is given back, the next request is the probe at once.
#[tokio::test(start_paused = true)]
async fn a_probe_without_a_slot_comes_back() {
    let limit = RateLimitLayer::builder(Quota::in_flight(5)).max_hold(ms(1000));
    let limiter = limit.build().unwrap().limiter();
    let key = Key::new("tenant");
    let refused = tollgate::Signal::read(&limited("3600").unwrap());
    limiter
        .acquire(key)
        .await
        .unwrap()
        .begin()
        .unwrap()
        .answered(&refused);
    sleep(ms(1500)).await;
    let probe = limiter.acquire(key).await.unwrap();
    let mut next = Box::pin(limiter.acquire(key));
    assert!(next.as_mut().now_or_never().is_none());
    let start = Instant::now();
    probe.give_back();
    drop(next.await.unwrap());
    assert!(start.elapsed() < ms(100), "{:?}", start.elapsed());
}

/// A store in memory that calls `hook` once, before it answers the next call.
#[derive(Default)]
struct Hooked {
    store: MemoryStore,
    hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Store for Hooked {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let hook = self.hook.lock().unwrap().take();
        hook.into_iter().for_each(|hook| hook());
        self.store.lease(request)
    }
}

/// A request of three keys would be the probe of the first. Between its look at the holds and the moment at which it has
/// all slots, the second key is held. The request is refused, and another one is the probe at once.
#[tokio::test(start_paused = true)]
async fn joint_probe_stopped_by_a_new_hold_comes_back() {
    // Without a limit of rate, no slot comes back that brings the probe along.
    let builder = RateLimitLayer::builder(Quota::in_flight(5)).max_wait(10 * SECOND);
    let limiter = builder.max_hold(SECOND).build().unwrap().limiter();
    let [probed, held, last] = ["probed", "held", "last"].map(Key::new);
    let refused = Signal::read(&limited("3600").unwrap());
    limiter
        .acquire(probed)
        .await
        .unwrap()
        .begin()
        .unwrap()
        .answered(&refused);
    sleep(ms(1500)).await;

    let hooked = Arc::new(Hooked::default());
    let builder = RateLimitLayer::builder(Quota::per_hour(1000)).store(hooked.clone());
    let third = builder.build().unwrap().limiter();
    let holds = limiter.clone();
    *hooked.hook.lock().unwrap() = Some(Box::new(move || {
        let hold = holds.hold_for(held, 60 * SECOND).now_or_never();
        hold.expect("a store in memory answers at once").unwrap();
    }));
    let joint = limiter
        .acquire(probed)
        .and(limiter.acquire(held))
        .and(third.acquire(last));
    let stopped = joint.now_or_never().expect("it is refused at once");
    assert_eq!(reason(&stopped.unwrap_err()), Some(Reason::Held));
    let probe = limiter.acquire(probed).now_or_never();
    assert!(probe.is_some_and(|probe| probe.is_ok()), "it is the probe");
}
