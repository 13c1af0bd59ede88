//! Limits that the upstream states: one response applies them to all processes.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use http::Response;
use support::{Upstream, count_of, get, pass};
use tollgate::limiter::QuotaSource;
use tollgate::quota::Limit;
use tollgate::store::{
    Change, ChangeKind, InForce, Lease, LeaseRequest, LimitSpec, MemoryStore, Store, StoreReply,
};
use tollgate::{HeaderTrust, Key, Quota, RateLimitLayer};
use tower::{Layer, ServiceExt};

fn sliding(count: u32, seconds: u64) -> Limit {
    Limit::sliding(count, Duration::from_secs(seconds))
}

fn stating(headers: &[(&str, &str)]) -> Response<String> {
    let response = headers
        .iter()
        .fold(Response::builder(), |response, (name, value)| {
            response.header(*name, *value)
        });
    response.body("hello".to_owned()).unwrap()
}

fn layer(quota: Quota, learn: HeaderTrust, store: &Arc<dyn Store>) -> RateLimitLayer {
    RateLimitLayer::builder(quota)
        .trust_headers(learn)
        .max_wait(Duration::ZERO)
        .store(store.clone())
        .build()
        .unwrap()
}

/// Two limiters on one store, the first of which received a response with these headers.
async fn taught(quota: Quota, learn: HeaderTrust, headers: &[(&str, &str)]) -> [RateLimitLayer; 2] {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layers = [(); 2].map(|()| layer(quota, learn, &store));
    let upstream = Upstream::answering([Ok(stating(headers))]);
    layers[0].layer(upstream).oneshot(get("/")).await.unwrap();
    layers
}

/// How many requests get a permit now.
async fn granted(layer: &RateLimitLayer) -> usize {
    let mut granted = 0;
    while layer.limiter().acquire(Key::ALL).await.is_ok() {
        granted += 1;
    }
    granted
}

async fn learned(layer: &RateLimitLayer) -> Vec<(Limit, Option<Box<str>>)> {
    let learned = layer.limiter().peek(Key::ALL).await.unwrap().learned;
    learned
        .into_iter()
        .map(|learned| (learned.limit, learned.name))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_stricter_policy_holds_for_the_fleet() {
    let policy = [("RateLimit-Policy", r#""default";q=30;w=10"#)];
    let [taught, other] = taught(Quota::per_minute(300), HeaderTrust::Stricter, &policy).await;
    assert_eq!(
        learned(&taught).await,
        [(sliding(30, 10), Some("default".into()))]
    );
    assert_eq!(granted(&taught).await, 29, "the first call counts");
    assert_eq!(
        granted(&other).await,
        0,
        "the other limiter saw no response, and still keeps the policy"
    );
    pass(Duration::from_secs(10) + Duration::from_millis(100)).await;
    assert_eq!(granted(&other).await, 30);
    // No response states it for ten of its windows, and then it fades.
    pass(Duration::from_secs(120)).await;
    assert_eq!(granted(&other).await, 300);
}

#[tokio::test(start_paused = true)]
async fn a_looser_policy_counts_where_that_is_asked_for() {
    let policy = [("RateLimit-Policy", r#""default";q=100;w=10"#)];
    for (learn, allowed) in [
        (HeaderTrust::Ignore, 9),
        (HeaderTrust::Usage, 9),
        (HeaderTrust::Stricter, 9),
        (HeaderTrust::Replace, 99),
    ] {
        let [_, other] = taught(Quota::new(10, Duration::from_secs(10)), learn, &policy).await;
        assert_eq!(granted(&other).await, allowed, "{learn:?}, at once");
    }
}

/// Sends a request of which the response states a policy.
async fn state(layer: &RateLimitLayer, count: u32, window: u32) {
    let policy = format!(r#""default";q={count};w={window}"#);
    let response = stating(&[("RateLimit-Policy", &policy)]);
    let upstream = Upstream::answering([Ok(response)]);
    layer.layer(upstream).oneshot(get("/")).await.unwrap();
}

async fn source(layer: &RateLimitLayer) -> QuotaSource {
    let status = layer.limiter().peek(Key::ALL).await.unwrap();
    status.quota_source
}

#[tokio::test(start_paused = true)]
async fn a_policy_outlives_the_process_that_received_it() {
    let policy = [("RateLimit-Policy", r#""default";q=30;w=600"#)];
    let [taught, other] = taught(Quota::per_minute(300), HeaderTrust::Stricter, &policy).await;
    drop(taught);
    let left = Duration::from_secs(3600);
    assert_eq!(source(&other).await, QuotaSource::Upstream { left });
    assert_eq!(learned(&other).await, [], "it has received no response");
    assert_eq!(granted(&other).await, 29);
    assert_eq!(count_of(&other.limiter().stats(), "keys_with_set_quota"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_policy_stays_for_as_long_as_responses_state_it() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layers = [(); 2].map(|()| layer(Quota::per_minute(300), HeaderTrust::Stricter, &store));
    for round in 0..200 {
        state(&layers[round % 2], 20, 60).await;
        let source = source(&layers[(round + 1) % 2]).await;
        let QuotaSource::Upstream { left } = source else {
            panic!("{source:?} in round {round}");
        };
        assert!(left >= Duration::from_secs(290), "{left:?}");
        pass(Duration::from_secs(20)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_the_quota_implies_ends_the_stricter_one() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(
        Quota::new(50, Duration::from_secs(10)),
        HeaderTrust::Stricter,
        &store,
    );
    state(&layer, 10, 10).await;
    assert_eq!(granted(&layer).await, 9);
    pass(Duration::from_secs(11)).await;
    state(&layer, 80, 10).await;
    assert_eq!(granted(&layer).await, 49);
    assert_eq!(learned(&layer).await, []);
}

#[tokio::test(start_paused = true)]
async fn what_an_operator_sets_goes_before_a_policy() {
    let policy = [("RateLimit-Policy", r#""default";q=30;w=60"#)];
    let [taught, other] = taught(Quota::per_minute(300), HeaderTrust::Stricter, &policy).await;
    let operator = other.limiter();
    operator
        .set_quota(Key::ALL, Quota::per_minute(100))
        .await
        .unwrap();
    state(&taught, 40, 60).await;
    assert!(matches!(source(&taught).await, QuotaSource::Set { .. }));
    assert_eq!(learned(&taught).await, [], "it does not apply");
    assert_eq!(granted(&taught).await, 98);
    pass(Duration::from_secs(61)).await;
    operator.unset_quota(Key::ALL).await.unwrap();
    state(&taught, 40, 60).await;
    assert!(matches!(source(&other).await, QuotaSource::Upstream { .. }));
    assert_eq!(granted(&other).await, 39);
}

#[tokio::test(start_paused = true)]
async fn a_policy_follows_the_quota_that_requests_state() {
    let policy = [("RateLimit-Policy", r#""default";q=30;w=10"#)];
    let [taught, other] = taught(Quota::per_minute(300), HeaderTrust::Stricter, &policy).await;
    let plan = Quota::per_minute(12);
    let acquired = taught.limiter().acquire(Key::ALL).quota(plan).await;
    drop(acquired.unwrap());
    let status = other.limiter().peek(Key::ALL).await.unwrap();
    let limits: Vec<Limit> = status.limits.iter().map(|usage| usage.limit).collect();
    assert_eq!(limits, [sliding(12, 60), sliding(30, 10)]);
}

/// An upstream that states another limit in each response changes the quota up to six times within the
/// memory of the store. The last statement takes effect later.
#[tokio::test(start_paused = true)]
async fn a_policy_that_changes_often_is_learned_later() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_second(1000), HeaderTrust::Stricter, &store);
    for count in 100..120 {
        state(&layer, count, 2).await;
    }
    let stated = |count| [(sliding(count, 2), Some("default".into()))];
    let status = layer.limiter().peek(Key::ALL).await.unwrap();
    assert_eq!(status.limits[1].limit, sliding(105, 2));
    pass(Duration::from_secs(7)).await;
    state(&layer, 119, 2).await;
    assert_eq!(learned(&layer).await, stated(119));
}

#[tokio::test(start_paused = true)]
async fn several_budgets_gate_together() {
    let budgets = [
        ("X-App-Rate-Limit", "20:1,50:120"),
        ("X-App-Rate-Limit-Count", "1:1,1:120"),
    ];
    let [taught, other] = taught(Quota::per_second(1000), HeaderTrust::Stricter, &budgets).await;
    assert_eq!(learned(&taught).await.len(), 2);
    assert_eq!(granted(&taught).await, 19, "20 a second");
    pass(Duration::from_millis(1100)).await;
    assert_eq!(granted(&taught).await, 20);
    pass(Duration::from_millis(1100)).await;
    assert_eq!(granted(&other).await, 10, "50 in two minutes");
}

#[tokio::test(start_paused = true)]
async fn policy_may_change_and_expires_when_no_longer_stated() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_minute(1000), HeaderTrust::Stricter, &store);
    let policy = |count: u32| {
        Ok(stating(&[(
            "RateLimit-Policy",
            &format!(r#""default";q={count};w=2"#),
        )]))
    };
    let upstream = Upstream::answering([policy(3), policy(5), Ok(stating(&[]))]);
    let service = layer.layer(upstream);
    service.clone().oneshot(get("/")).await.unwrap();
    assert_eq!(
        learned(&layer).await,
        [(sliding(3, 2), Some("default".into()))]
    );
    pass(Duration::from_secs(3)).await;
    service.clone().oneshot(get("/")).await.unwrap();
    assert_eq!(
        learned(&layer).await,
        [(sliding(5, 2), Some("default".into()))]
    );
    pass(Duration::from_secs(61)).await;
    let other = Upstream::answering([Ok(stating(&[("X-RateLimit-Remaining", "7")]))]);
    layer.layer(other).oneshot(get("/")).await.unwrap();
    assert_eq!(learned(&layer).await, []);
}

/// The key is in use all the time, by calls whose responses state no limit.
#[tokio::test(start_paused = true)]
async fn policy_expires_during_use_without_further_statements() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_minute(1000), HeaderTrust::Stricter, &store);
    let policy = Ok(stating(&[("RateLimit-Policy", r#""default";q=1;w=2"#)]));
    let upstream =
        Upstream::answering(std::iter::once(policy).chain((0..99).map(|_| Ok(stating(&[])))));
    let service = layer.layer(upstream);
    for _ in 0..24 {
        service.clone().oneshot(get("/")).await.unwrap();
        pass(Duration::from_secs(3)).await;
    }
    assert_eq!(learned(&layer).await, []);
    assert!(granted(&layer).await > 900);
}

#[tokio::test(start_paused = true)]
async fn bucket_larger_than_stated_implies_nothing() {
    let policy = [("RateLimit-Policy", r#""default";q=60;w=60"#)];
    for (capacity, allowed) in [(60, 0), (1000, 1)] {
        let quota = Quota::bucket(capacity).refill(60, Duration::from_secs(60));
        let [taught, _] = taught(quota, HeaderTrust::Stricter, &policy).await;
        assert_eq!(learned(&taught).await.len(), allowed, "{capacity}");
        assert!(granted(&taught).await < 60, "{capacity}");
    }
}

/// Remaining units stated for another limit are not reported to the store as those of the new
/// limit.
#[tokio::test(start_paused = true)]
async fn remaining_of_one_limit_is_not_applied_to_another() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_minute(60), HeaderTrust::Replace, &store);
    let refusal = [
        ("RateLimit-Policy", r#""hourly";q=1000;w=3600"#),
        ("X-RateLimit-Limit", "60"),
        ("X-RateLimit-Remaining", "0"),
        ("Retry-After", "0"),
    ];
    let (mut head, body) = stating(&refusal).into_parts();
    head.status = http::StatusCode::TOO_MANY_REQUESTS;
    let upstream = Upstream::answering([Ok(Response::from_parts(head, body))]);
    layer.layer(upstream).oneshot(get("/")).await.unwrap();
    assert_eq!(
        learned(&layer).await,
        [(sliding(1000, 3600), Some("hourly".into()))]
    );
    let limits = layer.limiter().peek(Key::ALL).await.unwrap().limits;
    assert!(limits.iter().all(|usage| usage.reserved == 0), "{limits:?}");
}

#[tokio::test(start_paused = true)]
async fn implausible_request_limits_are_ignored() {
    for headers in [
        ("RateLimit-Policy", r#""default";q=0;w=10"#),
        ("RateLimit-Policy", r#""default";q=10"#),
        ("RateLimit-Policy", r#""tokens";q=10;w=10;qu="tokens""#),
        ("RateLimit-Policy", r#""default";q=99999999999;w=10"#),
        (
            "X-App-Usage",
            r#"{"call_count": 28, "total_time": 25, "total_cputime": 25}"#,
        ),
        ("X-RateLimit-Limit", "10"),
    ] {
        let [taught, _] = taught(Quota::per_minute(300), HeaderTrust::Stricter, &[headers]).await;
        assert_eq!(learned(&taught).await, [], "{headers:?}");
        assert_eq!(granted(&taught).await, 299, "{headers:?}");
    }
}

/// A process that restarts does not know what it used before; its upstream does.
#[tokio::test(start_paused = true)]
async fn remaining_after_a_restart_is_all_that_is_used() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_hour(5000), HeaderTrust::Usage, &store);
    let says = |left: u32, reset: u32| {
        Ok(stating(&[
            ("X-RateLimit-Limit", "5000"),
            ("X-RateLimit-Remaining", &left.to_string()),
            ("X-RateLimit-Reset", &reset.to_string()),
        ]))
    };
    let upstream = Upstream::answering([says(12, 1200), says(11, 1195), says(10, 1194)]);
    let service = layer.layer(upstream);
    for pause in [0, 5, 1] {
        pass(Duration::from_secs(pause)).await;
        service.clone().oneshot(get("/")).await.unwrap();
    }
    assert_eq!(granted(&layer).await, 10);
    let peek = layer.limiter().peek(Key::ALL).await.unwrap();
    assert_eq!((peek.limits[0].used, peek.limits[0].free), (13, 0));
    assert_eq!(peek.limits[0].reserved, 4987);
    pass(Duration::from_secs(1195)).await;
    assert_eq!(granted(&layer).await, 4987, "it started again");
}

/// An operator overrides the upstream: a release in any process lets all use the units reserved for
/// others.
#[tokio::test(start_paused = true)]
async fn release_forgets_what_was_reserved_for_others() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layers = [(); 2].map(|()| layer(Quota::per_hour(5000), HeaderTrust::Usage, &store));
    let says = |left: u32, reset: u32| {
        Ok(stating(&[
            ("X-RateLimit-Limit", "5000"),
            ("X-RateLimit-Remaining", &left.to_string()),
            ("X-RateLimit-Reset", &reset.to_string()),
        ]))
    };
    for (releases, other) in [(0, 1), (1, 0)] {
        // Three responses of one process, then a request of another that asks the store.
        let upstream = Upstream::answering([says(12, 1200), says(11, 1195), says(10, 1194)]);
        for pause in [0, 5, 1] {
            pass(Duration::from_secs(pause)).await;
            layers[0]
                .layer(upstream.clone())
                .oneshot(get("/"))
                .await
                .unwrap();
        }
        drop(layers[other].limiter().acquire(Key::ALL).await.unwrap());
        let usage = layers[other].limiter().peek(Key::ALL).await.unwrap().limits[0];
        assert!(usage.reserved > 4900, "{usage:?}");
        layers[releases].limiter().release(Key::ALL).await.unwrap();
        for layer in &layers {
            let peek = layer.limiter().peek(Key::ALL).await.unwrap();
            assert!(
                peek.limits[0].reserved == 0 && peek.free >= 4990,
                "{peek:?}"
            );
        }
        assert!(
            granted(&layers[other]).await >= 4990,
            "all that is not used is free"
        );
        pass(Duration::from_secs(3 * 3600)).await;
    }
}

/// Of two quotas with the limit's window, the one that counts the same unit applies.
#[tokio::test(start_paused = true)]
async fn remaining_tokens_do_not_affect_a_request_limit() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_minute(1000), HeaderTrust::Usage, &store);
    let says = |requests: u32, tokens: u32, reset: u32| {
        let budgets = format!(r#""r";r={requests};t={reset}, "t";r={tokens};t={reset}"#);
        let policies = r#""r";q=1000;w=60, "t";q=60000;w=60;qu="tokens""#;
        Ok(stating(&[
            ("RateLimit-Policy", policies),
            ("RateLimit", &budgets),
        ]))
    };
    let service = layer.layer(Upstream::answering([
        says(999, 800, 50),
        says(998, 700, 46),
        says(997, 600, 45),
    ]));
    for pause in [0, 4, 1] {
        pass(Duration::from_secs(pause)).await;
        service.clone().oneshot(get("/")).await.unwrap();
    }
    drop(layer.limiter().acquire(Key::ALL).await.unwrap());
    assert_eq!(
        layer.limiter().peek(Key::ALL).await.unwrap().limits[0].reserved,
        0
    );
}

#[tokio::test(start_paused = true)]
async fn remaining_of_smaller_quota_does_not_reduce_the_limit() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let layer = layer(Quota::per_minute(1000), HeaderTrust::Usage, &store);
    let says = |all: u32, searches: u32, reset: u32| {
        let budgets = format!(r#""all";r={all};t={reset}, "search";r={searches};t={reset}"#);
        let policies = r#""all";q=1000;w=60, "search";q=10;w=60"#;
        Ok(stating(&[
            ("RateLimit-Policy", policies),
            ("RateLimit", &budgets),
        ]))
    };
    let service = layer.layer(Upstream::answering([
        says(999, 9, 50),
        says(998, 8, 46),
        says(997, 7, 45),
    ]));
    for pause in [0, 4, 1] {
        pass(Duration::from_secs(pause)).await;
        service.clone().oneshot(get("/")).await.unwrap();
    }
    drop(layer.limiter().acquire(Key::ALL).await.unwrap());
    assert_eq!(
        layer.limiter().peek(Key::ALL).await.unwrap().limits[0].reserved,
        0
    );
}

/// For a minute the upstream wrongly states that nothing remains. No response holds a key for
/// longer than `max_hold`.
#[tokio::test(start_paused = true)]
async fn wrong_responses_starve_no_key() {
    let quota = Quota::per_day(1000);
    let layer = RateLimitLayer::builder(quota)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap(); // max_hold: 60 s
    let wrong = |reset: &str| {
        let headers = [
            ("X-RateLimit-Limit", "1000"),
            ("X-RateLimit-Remaining", "0"),
            ("X-RateLimit-Reset", reset),
        ];
        Ok(stating(&headers))
    };
    let upstream = Upstream::answering([wrong("80000"), wrong("79930")]); // both are 200; then the upstream is correct again
    let service = layer.layer(upstream);
    service.clone().oneshot(get("/")).await.unwrap();
    pass(Duration::from_secs(70)).await;
    service.clone().oneshot(get("/")).await.unwrap();
    pass(Duration::from_secs(70)).await;
    layer.limiter().release(Key::ALL).await.unwrap(); // by an operator
    let mut hours = Vec::new();
    for _ in 0..60 {
        hours.push(granted(&layer).await);
        pass(Duration::from_secs(3600)).await;
    }
    assert!(
        hours[..3].iter().sum::<usize>() > 900,
        "granted in each hour after: {hours:?}"
    );
}

/// The same when other users exhaust a window and are absent from the next one.
#[tokio::test(start_paused = true)]
async fn windows_after_others_are_not_lost() {
    let layer = RateLimitLayer::builder(Quota::per_hour(1000))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    // After this hour the log covers the whole window.
    drop(layer.limiter().acquire(Key::ALL).await.unwrap());
    pass(Duration::from_secs(3600)).await;
    let left = |left: &str, reset: &str| {
        let headers = [
            ("X-RateLimit-Limit", "1000"),
            ("X-RateLimit-Remaining", left),
            ("X-RateLimit-Reset", reset),
        ];
        Ok(stating(&headers))
    };
    // Ten minutes before the end of its window another user has taken nearly all.
    let upstream = Upstream::answering([left("20", "600"), left("18", "590"), left("16", "580")]);
    let service = layer.layer(upstream);
    for _ in 0..3 {
        service.clone().oneshot(get("/")).await.unwrap();
        pass(Duration::from_secs(10)).await;
    }
    pass(Duration::from_secs(600)).await; // a new window of the upstream: 1000 are free
    let mut tens = Vec::new();
    for _ in 0..12 {
        tens.push(granted(&layer).await);
        pass(Duration::from_secs(600)).await;
    }
    let in_the_first_hour: usize = tens[..6].iter().sum();
    assert!(
        in_the_first_hour > 500,
        "granted in each ten minutes of the two windows after: {tens:?}"
    );
}

/// A store in which an operator sets a quota just before the end of a quota arrives.
struct SetsBeforeEnd {
    store: Arc<MemoryStore>,
    is_armed: AtomicBool,
}

impl Store for SetsBeforeEnd {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.store.lease(request)
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        let is_end = matches!(
            change,
            Change::Quota {
                kind: ChangeKind::End,
                ..
            }
        );
        if is_end && self.is_armed.swap(false, Ordering::Relaxed) {
            let store: Arc<dyn Store> = self.store.clone();
            let operator = layer(Quota::per_minute(300), HeaderTrust::Usage, &store).limiter();
            let set = operator
                .set_quota(key, Quota::per_minute(100))
                .now_or_never();
            set.expect("memory replies at once").unwrap();
        }
        self.store.change(key, spec, change)
    }
}

/// What ends a learned quota does not end a quota that an operator has set meanwhile.
#[tokio::test(start_paused = true)]
async fn ends_of_learned_quotas_spare_set_ones() {
    for way in ["release", "release elsewhere", "ignore"] {
        let inner = Arc::new(MemoryStore::default());
        let between = Arc::new(SetsBeforeEnd {
            store: inner.clone(),
            is_armed: AtomicBool::new(false),
        });
        let store: Arc<dyn Store> = between.clone();
        let quota = Quota::per_minute(300);
        let learns = layer(quota, HeaderTrust::Stricter, &store);
        state(&learns, 30, 60).await;
        let other = layer(quota, HeaderTrust::Stricter, &store);
        assert!(matches!(source(&other).await, QuotaSource::Upstream { .. }));
        between.is_armed.store(true, Ordering::Relaxed);
        match way {
            "release" => learns.limiter().release(Key::ALL).await.unwrap(),
            "release elsewhere" => other.limiter().release(Key::ALL).await.unwrap(),
            _ => {
                let ignores = layer(quota, HeaderTrust::Ignore, &store);
                drop(ignores.limiter().acquire(Key::ALL).await.unwrap());
            }
        }
        assert!(
            !between.is_armed.load(Ordering::Relaxed),
            "{way}: an end arrived"
        );
        for process in [&learns, &other] {
            let source = source(process).await;
            assert!(
                matches!(source, QuotaSource::Set { .. }),
                "{way}: {source:?}"
            );
            let status = process.limiter().peek(Key::ALL).await.unwrap();
            assert_eq!(status.limits[0].limit, sliding(100, 60), "{way}");
        }
        // An operator ends it, also one who knows of nothing but the learned quota.
        other.limiter().unset_quota(Key::ALL).await.unwrap();
        assert_eq!(source(&learns).await, QuotaSource::Builder, "{way}");
    }
}

/// An operator ends a quota that was set, and a learned one, whatever its process knows of.
#[tokio::test(start_paused = true)]
async fn operators_end_quotas_that_they_do_not_know() {
    let inner = Arc::new(MemoryStore::default());
    let between = Arc::new(SetsBeforeEnd {
        store: inner.clone(),
        is_armed: AtomicBool::new(true),
    });
    let store: Arc<dyn Store> = between;
    let learns = layer(Quota::per_minute(300), HeaderTrust::Stricter, &store);
    state(&learns, 30, 60).await;
    learns.limiter().unset_quota(Key::ALL).await.unwrap();
    assert_eq!(source(&learns).await, QuotaSource::Builder);
    let other: Arc<dyn Store> = inner;
    let other = layer(Quota::per_minute(300), HeaderTrust::Usage, &other);
    assert_eq!(source(&other).await, QuotaSource::Builder);
}

/// A subscriber of events that calls the limiter, as a log does that has a rate limit itself.
#[cfg(feature = "tracing")]
struct Calls(tollgate::Limiter);

#[cfg(feature = "tracing")]
impl tracing::Subscriber for Calls {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        let call = self.0.acquire(Key::ALL);
        drop(futures::FutureExt::now_or_never(call));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[cfg(feature = "tracing")]
#[test]
fn a_subscriber_may_call_the_limiter_that_has_learned() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = crate::support::paused_runtime();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let layer = layer(Quota::per_minute(100), HeaderTrust::Stricter, &store);
        let _guard = tracing::subscriber::set_default(Calls(layer.limiter()));
        let learned = runtime.block_on(async {
            let upstream = Upstream::answering([Ok(stating(&[
                ("ratelimit-policy", "\"a\";q=10;w=60"),
                ("ratelimit", "\"a\";r=9;t=60"),
            ]))]);
            layer.layer(upstream).oneshot(get("/")).await.unwrap();
            learned(&layer).await
        });
        done.send(learned).unwrap();
    });
    let learned = is_done.recv_timeout(Duration::from_secs(30));
    let learned = learned.expect("the event is reported without a lock");
    assert_eq!(learned, [(sliding(10, 60), Some("a".into()))]);
}
