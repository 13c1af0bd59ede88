//! A quota for each key: what requests state, and what happens when they state another one.

use crate::support;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Request;
use proptest::prelude::*;
use support::{Upstream, count_of, pass, paused};
use tollgate::limiter::{QuotaError, QuotaSource, Verdict};
use tollgate::quota::Limit;
use tollgate::stats::Event;
use tollgate::store::{MemoryStore, Store};
use tollgate::{
    ConfigError, Cost, Error, Key, Limited, Limiter, Quota, RateLimitLayer, Reason, Sent,
};
use tower::{Layer, ServiceExt};

const SECOND: Duration = Duration::from_secs(1);

fn tenant() -> Key {
    Key::new("tenant 17")
}

fn limiter(quota: Quota) -> Limiter {
    limiter_on(quota, &(Arc::new(MemoryStore::default()) as _))
}

fn limiter_on(quota: Quota, store: &Arc<dyn Store>) -> Limiter {
    let layer = RateLimitLayer::builder(quota)
        .charged_by_hand()
        .max_wait(Duration::ZERO)
        .store(store.clone())
        .build();
    layer.unwrap().limiter()
}

/// How many requests of the tenant get a permit now if they state `quota`.
async fn granted(limiter: &Limiter, quota: Quota) -> usize {
    let mut granted = 0;
    while limiter.acquire(tenant()).quota(quota).await.is_ok() {
        granted += 1;
    }
    granted
}

fn limits(limits: &[tollgate::store::LimitUsage]) -> Vec<Limit> {
    limits.iter().map(|usage| usage.limit).collect()
}

fn reason(limited: &Limited) -> &ConfigError {
    match limited {
        Limited::Local {
            reason: Reason::InvalidQuota(error),
            ..
        } => error,
        other => panic!("refused for another reason: {other}"),
    }
}

#[tokio::test(start_paused = true)]
async fn each_key_has_the_quota_that_its_requests_state() {
    let limit = RateLimitLayer::builder(Quota::per_minute(5))
        .key(|request| request.header("x-tenant").map(Key::new))
        .quota(|request| match request.header("x-plan") {
            Some(b"gold") => Some(Quota::per_minute(50)),
            _ => None,
        })
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let service = limit.layer(upstream.clone());
    let request = |tenant: &str, plan: &str| {
        let request = Request::get("http://api.example.com/").header("x-tenant", tenant);
        request.header("x-plan", plan).body(String::new()).unwrap()
    };
    for _ in 0..100 {
        let _ = service.clone().oneshot(request("a", "gold")).await;
        let _ = service.clone().oneshot(request("b", "free")).await;
    }
    assert_eq!(upstream.count(), 55);

    let mut own = request("b", "free");
    own.extensions_mut().insert(Quota::per_minute(7));
    let old = limit.limiter().peek(Key::new("b")).await.unwrap();
    assert_eq!(limits(&old.limits), Quota::per_minute(5).limits());
    let refused = service.clone().oneshot(own).await.unwrap_err();
    assert!(
        matches!(refused, Error::Limited(_)),
        "5 a minute apply, too"
    );
    pass(Duration::from_secs(180)).await;
    let mut left = 0;
    loop {
        let mut own = request("b", "free");
        own.extensions_mut().insert(Quota::per_minute(7));
        match service.clone().oneshot(own).await {
            Ok(_) => left += 1,
            Err(_) => break,
        }
    }
    assert_eq!(left, 7, "a quota in the extensions goes first");
}

#[tokio::test(start_paused = true)]
async fn a_stricter_quota_applies_at_once_and_a_looser_one_after_two_windows() {
    let limiter = limiter(Quota::per_minute(10));
    assert_eq!(granted(&limiter, Quota::per_minute(6)).await, 6);
    assert_eq!(
        granted(&limiter, Quota::per_minute(60)).await,
        0,
        "the old limit applies for two windows"
    );
    pass(Duration::from_secs(61)).await;
    assert_eq!(granted(&limiter, Quota::per_minute(60)).await, 6);
    pass(Duration::from_secs(151)).await;
    assert_eq!(granted(&limiter, Quota::per_minute(60)).await, 60);
    pass(Duration::from_secs(30)).await;
    assert_eq!(
        granted(&limiter, Quota::per_minute(20)).await,
        0,
        "used units stay used"
    );
    pass(Duration::from_secs(31)).await;
    assert_eq!(granted(&limiter, Quota::per_minute(20)).await, 20);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_quota_leaves_that_of_the_key() {
    let limiter = limiter(Quota::per_minute(10));
    assert!(
        limiter
            .acquire(tenant())
            .quota(Quota::per_minute(3))
            .await
            .is_ok()
    );
    let mut left = 0;
    while limiter.acquire(tenant()).await.is_ok() {
        left += 1;
    }
    assert_eq!(left, 2);
    let other = Key::new("tenant 18");
    assert!(limiter.acquire(other).await.is_ok());
    assert_eq!(limiter.peek(other).await.unwrap().free, 9);
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_get_slots_under_the_new_quota() {
    let layer = RateLimitLayer::builder(Quota::per_second(100))
        .max_wait(Duration::from_secs(600))
        .build();
    let limiter = layer.unwrap().limiter();
    let slow = Quota::new(1, Duration::from_secs(10));
    let start = tokio::time::Instant::now();
    let waiting: Vec<_> = (0..5)
        .map(|_| tokio::spawn(limiter.acquire(tenant()).quota(slow)))
        .collect();
    pass(Duration::from_millis(100)).await;
    assert!(limiter.acquire(Key::new("another")).await.is_ok());
    // The slots that are booked 10 s apart are given up. The old limit goes on to apply.
    let faster = limiter.acquire(tenant()).quota(Quota::per_second(2));
    drop(faster.await.unwrap());
    for waiting in waiting {
        assert!(waiting.await.unwrap().is_ok());
    }
    assert!(
        start.elapsed() <= Duration::from_secs(61),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn an_invalid_quota_refuses_the_request_and_says_why() {
    let limiter = limiter(Quota::per_minute(10));
    let zero = limiter.acquire(tenant()).quota(Quota::per_minute(0)).await;
    let zero = zero.unwrap_err();
    assert!(reason(&zero).to_string().contains("a count of 0"));
    let text = zero.to_string();
    assert!(text.contains("the quota of its key is invalid"), "{text}");

    let tokens = Quota::per_minute(10).of("tokens");
    let tokens = limiter.acquire(tenant()).quota(tokens).await.unwrap_err();
    let text = reason(&tokens).to_string();
    assert!(text.contains("10 tokens"), "{text}");

    let calls = Quota::per_minute(10).and(Quota::in_flight(2));
    let calls = limiter.acquire(tenant()).quota(calls).await.unwrap_err();
    assert!(reason(&calls).to_string().contains("must be"));

    let joint = limiter
        .acquire(Key::new("other"))
        .and(limiter.acquire(tenant()).quota(Quota::per_minute(0)));
    let joint = joint.await.unwrap_err();
    assert!(reason(&joint).to_string().contains("a count of 0"));
    assert_eq!(limiter.peek(tenant()).await.unwrap().free, 10);
    assert_eq!(limiter.stats().requests().refused, 4);

    let explained = limiter.acquire(tenant()).quota(Quota::per_minute(0));
    let explained = explained.explain().await.unwrap();
    assert!(matches!(
        explained.verdict,
        Verdict::Refused {
            reason: Reason::InvalidQuota(_),
            ..
        }
    ));
}

#[tokio::test(start_paused = true)]
async fn a_layer_refuses_a_request_with_an_invalid_quota() {
    let limit = RateLimitLayer::builder(Quota::per_minute(5))
        .quota(|_| Some(Quota::per_minute(0)))
        .build()
        .unwrap();
    let upstream = Upstream::new();
    let service = limit.layer(upstream.clone());
    let request = Request::get("http://api.example.com/").body(String::new());
    let error = service.oneshot(request.unwrap()).await.unwrap_err();
    let limited = Limited::find(&error).unwrap();
    assert!(reason(limited).to_string().contains("a count of 0"));
    assert_eq!(upstream.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn keys_have_up_to_10_000_quotas() {
    let limiter = limiter(Quota::per_minute(1));
    for count in 2..10_002_u32 {
        let acquire = limiter.acquire(Key::new(count.to_be_bytes()));
        assert!(acquire.quota(Quota::per_minute(count)).await.is_ok());
    }
    let more = limiter
        .acquire(tenant())
        .quota(Quota::per_minute(20_000))
        .await;
    let text = reason(&more.unwrap_err()).to_string();
    assert!(text.contains("more than 10000 different quotas"), "{text}");
    let known = limiter.acquire(tenant()).quota(Quota::per_minute(77)).await;
    assert!(known.is_ok());
}

#[tokio::test(start_paused = true)]
async fn units_have_quotas_for_each_key_too() {
    let quota =
        |requests, tokens| Quota::per_minute(requests).and(Quota::per_minute(tokens).of("tokens"));
    let limiter = limiter(quota(10, 1000));
    let large = quota(20, 5000);
    let request = |tokens| {
        let request = limiter.acquire(tenant()).cost(Cost::of("tokens", tokens));
        request.quota(large)
    };
    assert!(request(5000).await.is_ok());
    let refused = request(1).await.unwrap_err();
    assert_eq!(refused.report().unit(), "tokens");
    assert!(request(6000).await.is_err());
    let other = limiter
        .acquire(Key::new("small"))
        .cost(Cost::of("tokens", 1001));
    assert!(matches!(
        other.await.unwrap_err().reason(),
        Some(Reason::CostAboveLimit { largest: 1000, .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_have_quotas_for_each_key_too() {
    let limiter = limiter(Quota::in_flight(2));
    let request = |count| limiter.acquire(tenant()).quota(Quota::in_flight(count));
    let held = [request(3).await, request(3).await, request(3).await];
    assert!(held.iter().all(Result::is_ok));
    let refused = request(3).await.unwrap_err();
    assert_eq!(refused.report().limit().unwrap().count(), 3);
    assert!(request(4).await.is_ok(), "four at the same time");
    drop(held);
    let one = request(1).await.unwrap();
    assert!(request(1).await.is_err(), "one at the same time");
    drop(one);
    let other = Key::new("tenant 18");
    let held = [limiter.acquire(other).await, limiter.acquire(other).await];
    assert!(held.iter().all(Result::is_ok));
    assert!(limiter.acquire(other).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn the_keys_of_a_joint_request_have_quotas_of_their_own() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let [one, other] = [(); 2].map(|()| limiter_on(Quota::per_minute(10), &store));
    let both = |small| {
        let of_one = one.acquire(Key::new("one")).quota(Quota::per_minute(small));
        of_one.and(other.acquire(Key::new("other")).quota(Quota::per_minute(4)))
    };
    assert!(both(2).await.is_ok());
    assert!(both(2).await.is_ok());
    assert!(both(2).await.is_err());
    assert_eq!(other.peek(Key::new("other")).await.unwrap().free, 2);

    let limit = RateLimitLayer::builder(Quota::per_minute(10))
        .quota(|_| Some(Quota::per_minute(3)))
        .and_per("all", Quota::per_minute(10), |_| Key::ALL)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let upstream = Upstream::new();
    for _ in 0..10 {
        let request = Request::get("http://api.example.com/").body(String::new());
        let _ = limit
            .layer(upstream.clone())
            .oneshot(request.unwrap())
            .await;
    }
    assert_eq!(upstream.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn explain_follows_the_quota_that_a_request_states() {
    let limiter = limiter(Quota::per_minute(2));
    let request = || {
        limiter
            .acquire(tenant())
            .quota(Quota::per_minute(5))
            .cost(4)
    };
    let explained = request().explain().await.unwrap();
    assert_eq!(explained.verdict, Verdict::Goes);
    let text = explained.to_string();
    assert!(text.contains("\n  5/60s "), "{text}");
    assert!(request().await.is_ok());
    assert!(matches!(
        request().explain().await.unwrap().verdict,
        Verdict::Refused { .. }
    ));
    let before = limiter.acquire(tenant()).explain().await.unwrap();
    assert_eq!(before.verdict, Verdict::Goes, "the fifth of five");
}

/// What happens at one moment of a history.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// Which of two limiters on one store.
    limiter: usize,
    /// Which quota the requests state.
    quota: usize,
    requests: usize,
    pause: Duration,
}

const COUNTS: [u32; 4] = [2, 5, 9, 30];

fn steps(window: Duration) -> impl Strategy<Value = Vec<Step>> {
    let pauses = prop_oneof![
        4 => 0..window.as_millis() as u64 / 4,
        1 => 0..window.as_millis() as u64 * 4,
    ];
    let step = (0..2usize, 0..COUNTS.len(), 1..12usize, pauses);
    let step = step.prop_map(|(limiter, quota, requests, pause)| Step {
        limiter,
        quota,
        requests,
        pause: Duration::from_millis(pause),
    });
    prop::collection::vec(step, 1..40)
}

/// Follows the law: a permit keeps the quota that its request states, over all that was used, under
/// whatever quota. At the end, all of the last quota can be used after two and a half windows.
async fn follow(window: Duration, steps: Vec<Step>) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let limiters = [(); 2].map(|()| limiter_on(Quota::new(3, window), &store));
    let mut used: Vec<Instant> = Vec::new();
    let used_within = |used: &[Instant], now: Instant| {
        let first = used.partition_point(|at| now - *at >= window);
        used.len() - first
    };
    for step in &steps {
        let count = COUNTS[step.quota];
        for _ in 0..step.requests {
            let quota = Quota::new(count, window);
            let permit = limiters[step.limiter].acquire(tenant()).quota(quota).await;
            if permit.is_ok() {
                let now = tokio::time::Instant::now().into_std();
                used.push(now);
                let within = used_within(&used, now);
                assert!(within <= count as usize, "{within} of {count} at {step:?}");
            }
        }
        pass(step.pause).await;
    }
    pass(window * 5 / 2 + Duration::from_millis(1100)).await;
    let last = Quota::new(COUNTS[3], window);
    assert!(limiters[0].acquire(tenant()).quota(last).await.is_ok());
    pass(window * 5 / 2 + Duration::from_millis(1100)).await;
    assert_eq!(granted(&limiters[0], last).await, COUNTS[3] as usize);
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn a_permit_keeps_the_quota_of_its_request(steps in steps(Duration::from_secs(1))) {
        paused(follow(SECOND, steps));
    }

    #[test]
    fn a_permit_keeps_a_quota_of_an_hour(steps in steps(Duration::from_secs(3600))) {
        paused(follow(Duration::from_secs(3600), steps));
    }
}

/// Two limiters on one store, as two processes.
fn fleet(quota: Quota) -> [Limiter; 2] {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    [(); 2].map(|()| limiter_on(quota, &store))
}

async fn granted_as_is(limiter: &Limiter) -> usize {
    let mut granted = 0;
    while limiter.acquire(tenant()).await.is_ok() {
        granted += 1;
    }
    granted
}

/// Permits at hand are of the quota before. They go back when another one is set.
#[tokio::test(start_paused = true)]
async fn a_lower_set_quota_takes_back_permits_at_hand() {
    let [limiter, _] = fleet(Quota::per_minute(100_000));
    for _ in 0..1000 {
        drop(limiter.acquire(tenant()).await.unwrap());
    }
    assert!(count_of(&limiter.stats(), "permits_at_hand") > 3);
    let lower = Quota::per_minute(1003);
    limiter.set_quota(tenant(), lower).await.unwrap();
    assert_eq!(granted_as_is(&limiter).await, 3);
}

#[tokio::test(start_paused = true)]
async fn a_set_quota_applies_at_once_in_the_whole_fleet() {
    let [one, other] = fleet(Quota::per_minute(10));
    assert_eq!(granted_as_is(&one).await, 10);
    other
        .set_quota(tenant(), Quota::per_minute(30))
        .await
        .unwrap();
    assert_eq!(granted_as_is(&one).await, 20, "used units stay used");
    let status = one.peek(tenant()).await.unwrap();
    assert_eq!(limits(&status.limits), Quota::per_minute(30).limits());
    assert!(matches!(status.quota_source, QuotaSource::Set { .. }));
    pass(Duration::from_secs(61)).await;
    assert_eq!(granted_as_is(&other).await, 30);
    one.set_quota(tenant(), Quota::per_minute(5)).await.unwrap();
    pass(Duration::from_secs(61)).await;
    assert_eq!(granted_as_is(&other).await, 5, "stricter at once");
    one.unset_quota(tenant()).await.unwrap();
    assert_eq!(
        granted_as_is(&one).await,
        0,
        "the set limit applies for two windows"
    );
    pass(Duration::from_secs(155)).await;
    assert_eq!(granted_as_is(&other).await, 10);
    assert_eq!(
        other.peek(tenant()).await.unwrap().quota_source,
        QuotaSource::Builder
    );
    assert!(one.acquire(Key::new("tenant 18")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_limit_is_refused_as_such_during_a_hold() {
    let [one, other] = fleet(Quota::per_minute(10));
    other
        .hold_for(tenant(), Duration::from_secs(60))
        .await
        .unwrap();
    let limited = one.acquire(tenant()).cost(20).await.unwrap_err();
    assert!(
        matches!(limited.reason(), Some(Reason::CostAboveLimit { .. })),
        "{limited}"
    );
    assert_eq!(limited.retry_after(), None);
}

#[tokio::test(start_paused = true)]
async fn a_set_quota_goes_before_that_of_a_request() {
    let [one, other] = fleet(Quota::per_minute(10));
    one.set_quota(tenant(), Quota::per_minute(3)).await.unwrap();
    assert_eq!(granted(&other, Quota::per_minute(100)).await, 3);
    let explained = other.acquire(tenant()).explain().await.unwrap();
    assert!(matches!(explained.verdict, Verdict::Refused { .. }));
    let text = explained.to_string();
    assert!(text.contains("set by an operator, kept for 720h"), "{text}");
    assert_eq!(count_of(&other.stats(), "keys_with_set_quota"), 1);
    one.unset_quota(tenant()).await.unwrap();
    pass(Duration::from_secs(155)).await;
    assert_eq!(granted(&other, Quota::per_minute(100)).await, 100);
    let status = other.peek(tenant()).await.unwrap();
    assert_eq!(status.quota_source, QuotaSource::Request);
}

/// The process has missed the message, and learns of the quota with the reply to its first call.
#[tokio::test(start_paused = true)]
async fn a_process_that_starts_later_knows_a_set_quota() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let operator = limiter_on(Quota::per_minute(10), &store);
    let set = operator.set_quota(tenant(), Quota::per_minute(100));
    set.await.unwrap();
    let events = Arc::new(Mutex::new(0));
    let count = events.clone();
    let layer = RateLimitLayer::builder(Quota::per_minute(10))
        .on_event(move |event| {
            *count.lock().unwrap() += u32::from(matches!(event, Event::QuotaSet { .. }));
        })
        .store(store)
        .build();
    let limiter = layer.unwrap().limiter();
    assert!(limiter.acquire(tenant()).await.is_ok());
    assert!(limiter.acquire(tenant()).cost(50).await.is_ok());
    assert_eq!(count_of(&limiter.stats(), "keys_with_set_quota"), 1);
    assert_eq!(*events.lock().unwrap(), 1);
}

/// The process of an operator need not know what requests state.
#[tokio::test(start_paused = true)]
async fn unset_leaves_a_key_to_the_quota_of_its_requests() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let caller = limiter_on(Quota::per_minute(10), &store);
    let operator = limiter_on(Quota::per_minute(1), &store);
    let set = operator.set_quota(tenant(), Quota::per_minute(100));
    set.await.unwrap();
    operator.unset_quota(tenant()).await.unwrap();
    assert_eq!(granted(&caller, Quota::per_minute(50)).await, 50);
}

#[tokio::test(start_paused = true)]
async fn processes_report_that_a_quota_was_set() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let events = Arc::new(Mutex::new(Vec::new()));
    let limiter = {
        let events = events.clone();
        RateLimitLayer::builder(Quota::per_minute(10))
            .on_event(move |event| events.lock().unwrap().push(event.to_string()))
            .store(store.clone())
            .build()
            .unwrap()
            .limiter()
    };
    assert!(limiter.acquire(tenant()).await.is_ok());
    let operator = limiter_on(Quota::per_minute(10), &store);
    let set = operator.set_quota(tenant(), Quota::per_minute(3));
    set.await.unwrap();
    operator.unset_quota(tenant()).await.unwrap();
    let events = events.lock().unwrap();
    let [set, ended] = &events[..] else {
        panic!("{events:?}")
    };
    assert!(
        set.starts_with("quota of key ") && set.ends_with(" set to 3/60s"),
        "{set}"
    );
    assert!(
        ended.starts_with("set quota of key ") && ended.ends_with(" ended"),
        "{ended}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_set_quota_ends_when_it_was_not_used_for_its_life() {
    let [one, other] = fleet(Quota::per_minute(10));
    let life = Duration::from_secs(600);
    one.set_quota_for(tenant(), Quota::per_minute(20), life)
        .await
        .unwrap();
    for _ in 0..5 {
        pass(Duration::from_secs(400)).await;
        assert_eq!(granted_as_is(&other).await, 20);
    }
    pass(Duration::from_secs(601)).await;
    assert_eq!(granted_as_is(&other).await, 10);
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_get_slots_under_a_set_quota() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let waiting = RateLimitLayer::builder(Quota::new(1, Duration::from_secs(600)))
        .max_wait(Duration::from_secs(6000))
        .store(store.clone())
        .build()
        .unwrap()
        .limiter();
    let operator = limiter_on(Quota::per_minute(1), &store);
    let start = tokio::time::Instant::now();
    let tasks: Vec<_> = (0..10)
        .map(|_| tokio::spawn(waiting.acquire(tenant())))
        .collect();
    pass(Duration::from_secs(1)).await;
    operator
        .set_quota(tenant(), Quota::per_minute(60))
        .await
        .unwrap();
    for task in tasks {
        assert!(task.await.unwrap().is_ok());
    }
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_quota_that_cannot_be_set_says_why() {
    let [one, _] = fleet(Quota::per_minute(10));
    let zero = one.set_quota(tenant(), Quota::per_minute(0)).await;
    let Err(QuotaError::Config(zero)) = zero else {
        panic!("{zero:?}")
    };
    assert!(zero.to_string().contains("a count of 0"), "{zero}");
    let tokens = one
        .set_quota(tenant(), Quota::per_minute(9).of("tokens"))
        .await;
    assert!(matches!(tokens.unwrap_err(), QuotaError::Config(_)));
    assert_eq!(one.peek(tenant()).await.unwrap().free, 10);
}

#[tokio::test(start_paused = true)]
async fn a_set_quota_has_units_and_calls_in_flight() {
    let quota = |requests, tokens, calls| {
        let rates = Quota::per_minute(requests).and(Quota::per_minute(tokens).of("tokens"));
        rates.and(Quota::in_flight(calls))
    };
    let [one, other] = fleet(quota(10, 1000, 1));
    let request = || other.acquire(tenant()).cost(Cost::of("tokens", 3000));
    assert!(matches!(
        request().await.unwrap_err().reason(),
        Some(Reason::CostAboveLimit { .. })
    ));
    one.set_quota(tenant(), quota(20, 12_000, 3)).await.unwrap();
    let permits = [request().await, request().await, request().await];
    assert!(permits.iter().all(Result::is_ok), "{permits:?}");
    let refused = request().await.unwrap_err();
    assert_eq!(refused.report().limit().unwrap().count(), 3, "{refused}");
    drop(permits);
    let _fourth = request().await.unwrap();
    assert_eq!(request().await.unwrap_err().report().unit(), "tokens");
}

#[tokio::test(start_paused = true)]
async fn a_joint_request_follows_the_set_quota_of_each_key() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let [one, other] = [(); 2].map(|()| limiter_on(Quota::per_minute(4), &store));
    let (a, b) = (Key::new("a"), Key::new("b"));
    let both = || one.acquire(a).and(other.acquire(b));
    let all = async || {
        let mut granted = 0;
        while both().await.is_ok() {
            granted += 1;
        }
        granted
    };
    assert_eq!(all().await, 4);
    other.set_quota(a, Quota::per_minute(9)).await.unwrap();
    assert_eq!(all().await, 0);
    other.set_quota(b, Quota::per_minute(7)).await.unwrap();
    assert_eq!(all().await, 3);
    one.unset_quota(a).await.unwrap();
    one.unset_quota(b).await.unwrap();
    pass(Duration::from_secs(155)).await;
    assert_eq!(all().await, 4);
}

#[tokio::test(start_paused = true)]
async fn joint_requests_that_wait_follow_a_lower_quota() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let waiting = RateLimitLayer::builder(Quota::new(10, SECOND))
        .max_wait(Duration::from_secs(60))
        .store(store.clone())
        .build()
        .unwrap()
        .limiter();
    let both = |cost| {
        let other = waiting.acquire(Key::new("b"));
        waiting.acquire(tenant()).cost(cost).and(other)
    };
    drop(both(10).await.unwrap());
    let start = tokio::time::Instant::now();
    let small = [(); 3].map(|()| tokio::spawn(both(1).into_future()));
    let large = tokio::spawn(both(7).into_future());
    pass(Duration::from_millis(500)).await;
    let operator = limiter_on(Quota::new(10, SECOND), &store);
    operator
        .set_quota(tenant(), Quota::new(1, SECOND))
        .await
        .unwrap();
    for (task, seconds) in small.into_iter().zip([1, 2, 3]) {
        drop(task.await.unwrap().unwrap());
        assert!(start.elapsed() >= SECOND * seconds, "{:?}", start.elapsed());
    }
    let refused = large.await.unwrap().unwrap_err();
    assert!(
        matches!(refused.reason(), Some(Reason::CostAboveLimit { .. })),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_fleet_with_long_queues_uses_all_of_a_stricter_quota() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let fleet = [(); 4].map(|()| {
        let layer = RateLimitLayer::builder(Quota::per_second(100))
            .max_wait(Duration::from_secs(5))
            .store(store.clone())
            .build();
        layer.unwrap().limiter()
    });
    let start = tokio::time::Instant::now();
    let used = Arc::new(Mutex::new(Vec::new()));
    for limiter in &fleet {
        for _ in 0..60 {
            let (limiter, used) = (limiter.clone(), used.clone());
            tokio::spawn(async move {
                while start.elapsed() < Duration::from_secs(12) {
                    match limiter.acquire(tenant()).await {
                        Ok(permit) => {
                            drop(permit);
                            used.lock().unwrap().push(start.elapsed());
                        }
                        Err(limited) => {
                            let wait = limited.retry_after().unwrap_or_default();
                            tokio::time::sleep(wait.max(Duration::from_millis(1))).await;
                        }
                    }
                }
            });
        }
    }
    tokio::time::sleep(Duration::from_millis(3300)).await;
    fleet[0]
        .set_quota(tenant(), Quota::per_second(20))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(8700)).await;
    let mut per_second = vec![0; 13];
    for at in used.lock().unwrap().iter() {
        per_second[at.as_secs() as usize] += 1;
    }
    assert!(
        per_second[5..11].iter().all(|used| *used >= 18),
        "{per_second:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_charge_counts_under_a_quota_that_was_set_meanwhile() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let limiter = RateLimitLayer::builder(Quota::per_minute(100))
        .settle_by_hand()
        .max_wait(Duration::ZERO)
        .store(store.clone())
        .build()
        .unwrap()
        .limiter();
    let acquire = |cost| limiter.acquire(tenant()).cost(cost);
    let mut small = acquire(10).await.unwrap().begin().unwrap();
    let mut large = acquire(50).await.unwrap().begin().unwrap();
    let operator = limiter_on(Quota::per_minute(1), &store);
    operator
        .set_quota(tenant(), Quota::per_minute(40))
        .await
        .unwrap();
    assert!(
        limiter.acquire(tenant()).await.is_err(),
        "60 of 40 are used"
    );
    small.settle(30);
    large.settle(5);
    drop((small, large));
    let status = limiter.peek(tenant()).await.unwrap();
    assert_eq!((status.limits[0].used, status.free), (35, 5));
    assert!(limiter.acquire(tenant()).cost(5).await.is_ok());
    assert!(limiter.acquire(tenant()).await.is_err());
    pass(Duration::from_secs(61)).await;
    assert!(limiter.acquire(tenant()).cost(40).await.is_ok());
}

/// What happens at one moment of a history with set quotas.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Requests that state one of the quotas, or none.
    Requests(usize, Option<usize>, usize),
    Set(usize, usize),
    Unset(usize),
    Pass(Duration),
}

fn changes(window: Duration) -> impl Strategy<Value = Vec<Change>> {
    let window = window.as_millis() as u64;
    let pause = prop_oneof![4 => 0..window / 4, 1 => 0..window * 3];
    let quota = prop::option::of(0..COUNTS.len());
    let change = prop_oneof![
        5 => (0..2usize, quota, 1..12usize).prop_map(|(who, quota, count)| Change::Requests(who, quota, count)),
        2 => (0..2usize, 0..COUNTS.len()).prop_map(|(who, quota)| Change::Set(who, quota)),
        1 => (0..2usize).prop_map(Change::Unset),
        4 => pause.prop_map(|pause| Change::Pass(Duration::from_millis(pause))),
    ];
    prop::collection::vec(change, 1..60)
}

/// Follows the law: while a quota is set, each permit keeps it, over all that was used. Else a permit
/// keeps what its request states. At the end, all of the set quota can be used.
async fn follow_changes(window: Duration, changes: Vec<Change>) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let limiters = [(); 2].map(|()| limiter_on(Quota::new(3, window), &store));
    let mut used: Vec<Instant> = Vec::new();
    let mut set = None;
    for change in &changes {
        match *change {
            Change::Pass(pause) => pass(pause).await,
            Change::Set(who, quota) => {
                let quota = Quota::new(COUNTS[quota], window);
                limiters[who].set_quota(tenant(), quota).await.unwrap();
                set = Some(quota);
            }
            Change::Unset(who) => {
                limiters[who].unset_quota(tenant()).await.unwrap();
                set = None;
            }
            Change::Requests(who, quota, count) => {
                let quota = quota.map(|quota| Quota::new(COUNTS[quota], window));
                for _ in 0..count {
                    let request = limiters[who].acquire(tenant());
                    let request = match quota {
                        Some(quota) => request.quota(quota),
                        None => request,
                    };
                    if request.await.is_err() {
                        continue;
                    }
                    let now = tokio::time::Instant::now().into_std();
                    used.push(now);
                    let within = used.iter().filter(|at| now - **at < window).count();
                    if let Some(most) = set.or(quota).map(|quota| quota.largest_cost()) {
                        assert!(within <= most as usize, "{within} of {most} at {change:?}");
                    }
                }
            }
        }
    }
    let last = Quota::new(COUNTS[3], window);
    limiters[1].set_quota(tenant(), last).await.unwrap();
    pass(window + Duration::from_millis(100)).await;
    assert_eq!(granted_as_is(&limiters[0]).await, COUNTS[3] as usize);
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn a_permit_keeps_the_quota_that_is_set(changes in changes(Duration::from_secs(1))) {
        paused(follow_changes(SECOND, changes));
    }

    #[test]
    fn a_permit_keeps_a_quota_of_an_hour_that_is_set(changes in changes(Duration::from_secs(3600))) {
        paused(follow_changes(Duration::from_secs(3600), changes));
    }
}

/// What the requests of a history have besides a quota that is set.
#[derive(Clone, Copy, Debug, PartialEq)]
enum With {
    /// Two keys: a request takes a permit of one of them, or of both.
    Keys,
    /// Tokens: three times as many as requests.
    Tokens,
    /// Costs that are settled later. The quotas are larger, because a charge above the limit counts as
    /// the limit.
    Settlement,
}

/// What happens at one moment of such a history.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Requests {
        who: usize,
        keys: [bool; 2],
        cost: u32,
        actual: u32,
        count: usize,
    },
    /// The oldest requests end.
    End(usize),
    Set {
        who: usize,
        key: usize,
        quota: usize,
    },
    Unset {
        who: usize,
        key: usize,
    },
    Pass(Duration),
}

fn moments(window: Duration) -> impl Strategy<Value = Vec<Moment>> {
    let window = window.as_millis() as u64;
    let pause = prop_oneof![4 => 0..window / 4, 1 => 0..window * 3];
    let keys = prop::sample::select(vec![[true, false], [false, true], [true, true]]);
    let requests = (0..2usize, keys, 1..7u32, 0..9u32, 1..9usize);
    let moment = prop_oneof![
        5 => requests.prop_map(|(who, keys, cost, actual, count)| Moment::Requests {
            who, keys, cost, actual, count,
        }),
        3 => (1..9usize).prop_map(Moment::End),
        2 => (0..2usize, 0..2usize, 0..COUNTS.len())
            .prop_map(|(who, key, quota)| Moment::Set { who, key, quota }),
        1 => (0..2usize, 0..2usize).prop_map(|(who, key)| Moment::Unset { who, key }),
        4 => pause.prop_map(|pause| Moment::Pass(Duration::from_millis(pause))),
    ];
    prop::collection::vec(moment, 1..60)
}

/// The units of a request: what it counts for its keys.
struct Used {
    at: Instant,
    keys: [bool; 2],
    requests: u32,
    tokens: u32,
}

/// Follows the law: while a quota is set for a key, each permit of the key keeps all its limits, over
/// all units that are known when it is granted. At the end, all of the set quotas can be used.
async fn follow_moments(with: With, window: Duration, moments: Vec<Moment>) {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let quota = |count: u32| match with {
        With::Tokens => Quota::new(count, window).and(Quota::new(count * 3, window).of("tokens")),
        With::Keys => Quota::new(count, window),
        With::Settlement => Quota::new(count * 4, window),
    };
    let limiters = [(); 2].map(|()| {
        let builder = RateLimitLayer::builder(quota(3))
            .charged_by_hand()
            .max_wait(Duration::ZERO)
            .store(store.clone());
        let builder = match with {
            With::Settlement => builder.settle_by_hand(),
            With::Keys | With::Tokens => builder,
        };
        builder.build().unwrap().limiter()
    });
    let names = [Key::new("one"), Key::new("other")];
    let mut used: Vec<Used> = Vec::new();
    let mut open = VecDeque::new();
    let mut set = [None; 2];
    for moment in &moments {
        match *moment {
            Moment::Pass(pause) => pass(pause).await,
            Moment::Set {
                who,
                key,
                quota: at,
            } => {
                let set_quota = limiters[who].set_quota(names[key], quota(COUNTS[at]));
                set_quota.await.unwrap();
                set[key] = Some(COUNTS[at]);
            }
            Moment::Unset { who, key } => {
                limiters[who].unset_quota(names[key]).await.unwrap();
                set[key] = None;
            }
            Moment::End(count) => {
                for _ in 0..count.min(open.len()) {
                    let (mut sent, number, actual): (Sent, usize, u32) = open.pop_front().unwrap();
                    if with == With::Settlement {
                        sent.settle(actual);
                        used[number].requests = actual;
                    }
                }
            }
            Moment::Requests {
                who,
                keys,
                cost,
                actual,
                count,
            } => {
                // A request of one limiter joins one of the other, as two limits of a layer.
                let request = |key: usize| {
                    let request = limiters[(who + key) % 2].acquire(names[key]);
                    match with {
                        With::Keys => request.cost(cost),
                        With::Tokens => request.cost(Cost::of("tokens", cost)),
                        With::Settlement => request.cost(cost),
                    }
                };
                let keys = if with == With::Keys {
                    keys
                } else {
                    [true, false]
                };
                for _ in 0..count {
                    let permit = match keys {
                        [true, true] => request(0).and(request(1)).await,
                        [true, false] => request(0).await,
                        _ => request(1).await,
                    };
                    let Ok(permit) = permit else { continue };
                    let now = tokio::time::Instant::now().into_std();
                    let (requests, tokens) = match with {
                        With::Tokens => (1, cost),
                        With::Keys | With::Settlement => (cost, 0),
                    };
                    open.push_back((permit.begin().unwrap(), used.len(), actual));
                    used.push(Used {
                        at: now,
                        keys,
                        requests,
                        tokens,
                    });
                    for key in (0..2).filter(|key| keys[*key]) {
                        let within = used
                            .iter()
                            .filter(|used| used.keys[key] && now - used.at < window);
                        let (requests, tokens) = within.fold((0, 0), |(requests, tokens), used| {
                            (requests + used.requests, tokens + used.tokens)
                        });
                        let Some(set) = set[key] else { continue };
                        let most = quota(set).largest_cost();
                        assert!(
                            requests <= most && tokens <= set * 3,
                            "{requests} requests and {tokens} tokens of {set} at {moment:?}"
                        );
                    }
                }
            }
        }
    }
    drop(open);
    for key in names {
        limiters[1].set_quota(key, quota(30)).await.unwrap();
    }
    pass(window + Duration::from_millis(100)).await;
    let mut granted = 0;
    let both = || {
        limiters[0]
            .acquire(names[0])
            .and(limiters[1].acquire(names[1]))
    };
    while both().await.is_ok() {
        granted += 1;
    }
    assert_eq!(granted, quota(30).largest_cost());
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn joint_permits_keep_the_quotas_that_are_set(moments in moments(SECOND)) {
        paused(follow_moments(With::Keys, SECOND, moments));
    }

    #[test]
    fn permits_keep_the_quotas_of_units_that_are_set(moments in moments(SECOND)) {
        paused(follow_moments(With::Tokens, SECOND, moments));
    }

    #[test]
    fn settled_permits_keep_the_quota_that_is_set(moments in moments(SECOND)) {
        paused(follow_moments(With::Settlement, SECOND, moments));
    }
}
