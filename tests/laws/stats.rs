//! What limiters and throttles count: every request once, and the units that the store counts.

use crate::support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use http::{Request, StatusCode};
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestCaseResult};
use support::{Distant, Failing, Upstream, count_of, get, ms, peek, value};
use tokio::time::{sleep, timeout};
use tollgate::limiter::Acquire;
use tollgate::stats::{self, Cause, Event, Requests, Stats};
use tollgate::store::{Label, Store};
use tollgate::{
    AdaptiveThrottleLayer, Cost, Key, Limited, Limiter, OnStoreError, Quota, RateLimitLayer,
    Reason, Signal, by_header,
};
use tower::{Service, ServiceBuilder, ServiceExt};

/// Held by tests that read the stats of all layers, and by those that count exactly: units of a permit
/// that is given back later are counted if the stats are read before.
static READS_ALL: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[tokio::test(start_paused = true)]
async fn units_given_back_do_not_count_by_key() {
    for key in [Key::new("a"), Key::ALL] {
        let quota = Quota::per_second(100).and(Quota::per_minute(1000));
        let limiter = RateLimitLayer::new(quota).unwrap().limiter();
        for _ in 0..5 {
            let permit = limiter.acquire(key).await.unwrap();
            permit.give_back();
        }
        let _sent = limiter.acquire(key).await.unwrap();
        let of_key = limiter.busiest(1)[0].units();
        assert_eq!((limiter.stats().units(), of_key), (1, 1), "{key:?}");
    }

    let key = Key::new("a");
    let throttle = AdaptiveThrottleLayer::new().throttle().clone();
    throttle.acquire(key).await.unwrap().give_back();
    let of_key = throttle.busiest(1)[0].units();
    assert_eq!((throttle.stats().units(), of_key), (0, 0));
}

/// A request of a history.
#[derive(Clone, Debug)]
struct Call {
    /// Comes this long after the one before, in milliseconds.
    after: u64,
    kind: CallKind,
    /// The number of its key. Number 0 is `Key::ALL`.
    key: usize,
    cost: u32,
    /// How long the caller waits before it gives up, in milliseconds.
    patience: Option<u64>,
    gives_back: bool,
}

#[derive(Clone, Copy, Debug)]
enum CallKind {
    Single,
    /// Also takes a permit of the second limiter.
    Joint,
    /// Passes a Tower service.
    Layer,
}

fn call() -> impl Strategy<Value = Call> {
    let kind = prop_oneof![
        3 => Just(CallKind::Single),
        2 => Just(CallKind::Joint),
        2 => Just(CallKind::Layer),
    ];
    (
        prop_oneof![4 => Just(0u64), 2 => 1u64..30, 1 => 200u64..2000],
        kind,
        0usize..4,
        prop_oneof![1 => Just(0u32), 6 => Just(1u32), 2 => 2u32..8],
        prop_oneof![3 => Just(None), 1 => (0u64..1500).prop_map(Some)],
        any::<bool>(),
    )
        .prop_map(|(after, kind, key, cost, patience, gives_back)| Call {
            after,
            kind,
            key,
            cost,
            patience,
            gives_back,
        })
}

/// How the calls of a history ended, as their callers saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    passed: u64,
    waited: u64,
    refused: u64,
    cancelled: u64,
    /// The units of both limiters.
    units: [u64; 2],
}

#[derive(Clone)]
struct World {
    first: Limiter,
    second: Limiter,
    service: tollgate::service::RateLimit<Upstream>,
    seen: Arc<Mutex<Seen>>,
}

fn key(number: usize) -> Key {
    match number {
        0 => Key::ALL,
        number => Key::new(number.to_string()),
    }
}

impl World {
    fn new(max_keys: usize, quota: Quota) -> Self {
        let layer = |quota| {
            let builder = RateLimitLayer::builder(quota).name("history");
            builder
                .max_keys(max_keys)
                .max_wait(ms(1000))
                .build()
                .unwrap()
        };
        let first = layer(quota);
        World {
            first: first.limiter(),
            second: layer(Quota::per_second(9).and(Quota::per_day(100_000))).limiter(),
            service: ServiceBuilder::new().layer(first).service(Upstream::new()),
            seen: Arc::default(),
        }
    }

    async fn run(mut self, call: Call) {
        let Call { kind, cost, .. } = call;
        match kind {
            CallKind::Single => {
                let acquire = self.first.acquire(key(call.key)).cost(cost);
                self.acquire(call, acquire, [cost, 0]).await;
            }
            CallKind::Joint => {
                let other = self.second.acquire(key(call.key));
                let first = self.first.acquire(key(call.key)).cost(cost);
                self.acquire(call, first.and(other), [cost, 1]).await;
            }
            CallKind::Layer => {
                let mut request = Request::get("http://a/").body(String::new()).unwrap();
                request.extensions_mut().insert(key(call.key));
                request.extensions_mut().insert(Cost::new(cost));
                let ready = self.service.ready().await.unwrap();
                let response = Box::pin(ready.call(request));
                let sent = self.outcome(&call, response).await;
                if sent.is_some() {
                    self.seen.lock().unwrap().units[0] += u64::from(cost);
                }
            }
        }
    }

    async fn acquire(&self, call: Call, acquire: Acquire, units: [u32; 2]) {
        let Some(permit) = self.outcome(&call, Box::pin(acquire)).await else {
            return;
        };
        if call.gives_back {
            permit.give_back();
            return;
        }
        drop(permit);
        let mut seen = self.seen.lock().unwrap();
        for (seen, units) in seen.units.iter_mut().zip(units) {
            *seen += u64::from(units);
        }
    }

    /// Waits for the outcome of a call, and notes it.
    async fn outcome<T, E: std::error::Error + 'static>(
        &self,
        call: &Call,
        mut future: impl Future<Output = Result<T, E>> + Unpin,
    ) -> Option<T> {
        let at_once = (&mut future).now_or_never();
        let is_at_once = at_once.is_some();
        let result = match (at_once, call.patience) {
            (Some(result), _) => Some(result),
            (None, None) => Some(future.await),
            (None, Some(patience)) => timeout(ms(patience), future).await.ok(),
        };
        let mut seen = self.seen.lock().unwrap();
        let count = match &result {
            Some(Ok(_)) if is_at_once => &mut seen.passed,
            Some(Ok(_)) => &mut seen.waited,
            Some(Err(error)) => {
                assert!(matches!(Limited::find(error), Some(Limited::Local { .. })));
                &mut seen.refused
            }
            None => &mut seen.cancelled,
        };
        *count += 1;
        result?.ok()
    }
}

fn seen_of(requests: Requests) -> [u64; 4] {
    assert_eq!((requests.uncounted, requests.store), (0, 0));
    let Requests {
        passed,
        waited,
        refused,
        cancelled,
        ..
    } = requests;
    [passed, waited, refused, cancelled]
}

/// Panics if a count has fallen.
fn assert_grown(before: &Stats, now: &Stats) {
    let pairs = before
        .requests()
        .by_outcome()
        .zip(now.requests().by_outcome());
    for ((name, before), (_, now)) in pairs {
        assert!(before <= now, "{name} fell from {before} to {now}");
    }
    assert!(before.units() <= now.units());
}

async fn history(calls: Vec<Call>, max_keys: usize, quota: Quota) -> TestCaseResult {
    let world = World::new(max_keys, quota);
    let mut tasks = Vec::new();
    let mut last = world.first.stats();
    let count = calls.len() as u64;
    for call in calls {
        sleep(ms(call.after)).await;
        tasks.push(tokio::spawn(world.clone().run(call)));
        let stats = world.first.stats();
        assert_grown(&last, &stats);
        last = stats;
    }
    for task in tasks {
        task.await.unwrap();
    }
    let (first, second) = (world.first.stats(), world.second.stats());
    let seen = *world.seen.lock().unwrap();
    let expected = [seen.passed, seen.waited, seen.refused, seen.cancelled];
    prop_assert_eq!(seen_of(first.requests()), expected);
    prop_assert_eq!(first.requests().total(), count);
    prop_assert_eq!(first.refusals().total(), seen.refused);
    prop_assert_eq!(first.waits().count(), seen.waited);
    prop_assert_eq!([first.units(), second.units()], seen.units);
    prop_assert_eq!(second.requests(), Requests::default());
    prop_assert_eq!(
        (first.waiting(), value(&first, "oldest_wait_seconds")),
        (0, Some(0.0))
    );
    // Booked slots of cancelled requests have gone back by then, and the permits at hand go back.
    sleep(Duration::from_secs(3)).await;
    world.first.shutdown().await.unwrap();
    let mut used = 0;
    for number in 0..4 {
        let status = world.first.peek(key(number)).await.unwrap();
        used += status.limits[1].used;
    }
    prop_assert_eq!(used, first.units());
    Ok(())
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/stats.txt",
        ))),
        ..histories::config(60)
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_request_has_one_outcome(
        calls in prop::collection::vec(call(), 1..60),
        max_keys in prop_oneof![Just(1usize), Just(2usize), Just(100usize)],
        rate in prop_oneof![Just(7u32), Just(40u32), Just(5000u32)],
    ) {
        let _alone = READS_ALL.blocking_lock();
        let quota = Quota::per_second(rate).and(Quota::per_day(100_000));
        support::paused_runtime().block_on(history(calls, max_keys, quota))?;
    }
}

/// What a random history has found: a permit of six units comes back while a joint request waits for its slot. The next
/// joint request finds a slot at once. The first one leaves with it, and has waited.
#[test]
fn joint_request_whose_slot_lay_ahead_counts_as_waited() {
    let call = |after, kind, key, cost| Call {
        after,
        kind,
        key,
        cost,
        patience: None,
        gives_back: false,
    };
    let back = Call {
        gives_back: true,
        ..call(7, CallKind::Single, 1, 6)
    };
    let calls = vec![
        call(0, CallKind::Single, 1, 1),
        call(732, CallKind::Single, 0, 0),
        call(0, CallKind::Single, 1, 1),
        call(13, CallKind::Single, 0, 0),
        back,
        call(0, CallKind::Joint, 1, 1),
        call(251, CallKind::Single, 0, 0),
        call(17, CallKind::Joint, 1, 1),
    ];
    let _alone = READS_ALL.blocking_lock();
    let quota = Quota::per_second(7).and(Quota::per_day(100_000));
    support::paused_runtime()
        .block_on(history(calls, 1, quota))
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn permits_at_hand_are_counted() {
    for key in [Key::ALL, Key::new("key")] {
        let limit = RateLimitLayer::new(Quota::per_second(100_000)).unwrap();
        let limiter = limit.limiter();
        for cost in [1, 3].repeat(500) {
            drop(limiter.acquire(key).cost(cost).await.unwrap());
        }
        assert!(
            count_of(&limiter.stats(), "permits_at_hand") > 0,
            "some were at hand"
        );
        let stats = limiter.stats();
        assert_eq!((stats.requests().passed, stats.units()), (1000, 2000));
        assert_eq!(limiter.busiest(1)[0].requests().passed, 1000);
        assert_eq!(limiter.busiest(1)[0].units(), 2000);
        assert_eq!(
            peek(&limit, key).await.limits[0].used,
            2000 + count_of(&stats, "permits_at_hand")
        );
    }
}

#[test]
fn threads_that_share_a_key_count_every_request() {
    let limiter = RateLimitLayer::new(Quota::per_second(1_000_000))
        .unwrap()
        .limiter();
    std::thread::scope(|scope| {
        for cost in 1..4 {
            let limiter = &limiter;
            scope.spawn(move || {
                for _ in 0..2000 {
                    let acquired = limiter.acquire(Key::ALL).cost(cost).now_or_never();
                    drop(acquired.expect("plenty is left").unwrap());
                }
            });
        }
        let mut last = limiter.stats();
        for _ in 0..100 {
            let stats = limiter.stats();
            assert_grown(&last, &stats);
            last = stats;
        }
    });
    let stats = limiter.stats();
    // A thread may stall for longer than a permit is valid. Then its request takes another one, and counts as one
    // that has waited.
    let requests = stats.requests();
    let left = requests.passed + requests.waited;
    assert_eq!((left, stats.units()), (6000, 12_000));
}

#[tokio::test(start_paused = true)]
async fn counts_survive_the_state_of_their_key() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_keys(1)
        .max_wait(Duration::ZERO);
    let limiter = limit.build().unwrap().limiter();
    for number in 0..20 {
        let key = Key::new(number.to_string());
        drop(limiter.acquire(key).await.unwrap());
        limiter.acquire(key).await.unwrap_err();
        sleep(Duration::from_secs(3)).await;
    }
    let stats = limiter.stats();
    assert_eq!(
        (stats.requests().passed, stats.requests().refused),
        (20, 20)
    );
    assert_eq!(
        (
            stats.units(),
            count_of(&stats, "keys"),
            count_of(&stats, "keys_limit")
        ),
        (20, 1, 1)
    );
}

/// The counts of a key begin anew with its state, also those of `Key::ALL`, whose permits at hand are taken without
/// its lock.
#[tokio::test(start_paused = true)]
async fn counts_of_a_key_begin_anew_with_its_state() {
    let limit = RateLimitLayer::builder(Quota::per_second(10_000)).max_keys(1);
    let limiter = limit.build().unwrap().limiter();
    for _ in 0..3 {
        for _ in 0..100 {
            drop(limiter.acquire(Key::ALL).await.unwrap());
        }
        let of_all = &limiter.busiest(1)[0];
        assert_eq!((of_all.requests().passed, of_all.units()), (100, 100));
        sleep(Duration::from_secs(3)).await;
        drop(limiter.acquire(Key::new("another")).await.unwrap());
        sleep(Duration::from_secs(3)).await;
    }
    let stats = limiter.stats();
    assert_eq!((stats.requests().passed, stats.units()), (303, 303));
}

#[tokio::test(start_paused = true)]
async fn stats_show_reasons_waits_and_holds() {
    let limit = RateLimitLayer::builder(Quota::per_second(1))
        .max_wait(ms(2500))
        .build()
        .unwrap();
    let limiter = limit.limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    let mut waits: Vec<_> = (0..2)
        .map(|_| Box::pin(limiter.acquire(Key::ALL)))
        .collect();
    for wait in &mut waits {
        assert!(wait.now_or_never().is_none());
    }
    sleep(ms(100)).await;
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    let stats = limiter.stats();
    assert_eq!(
        (stats.waiting(), value(&stats, "oldest_wait_seconds")),
        (2, Some(0.1))
    );
    assert_eq!(stats.refusals().of(refused.reason().unwrap()), 1);
    let named = stats.refusals().iter().find(|(_, count)| *count > 0);
    assert_eq!(named, Some(("max_wait", 1)));
    for wait in waits {
        drop(wait.await.unwrap());
    }
    limiter.acquire(Key::ALL).cost(2).await.unwrap_err();
    limiter
        .hold_for(Key::ALL, Duration::from_secs(60))
        .await
        .unwrap();
    limiter.acquire(Key::ALL).await.unwrap_err();
    let stats = limiter.stats();
    assert_eq!(stats.refusals().of(Reason::Held), 1);
    assert_eq!(stats.refusals().total(), stats.requests().refused);
    assert_eq!((stats.requests().waited, stats.waits().count()), (2, 2));
    assert_eq!(stats.waits().quantile(1.0), Some(ms(2500)));
    assert_eq!(
        (
            stats.holds().of(Cause::Operator),
            count_of(&stats, "keys_held")
        ),
        (1, 1)
    );
    assert_eq!(count_of(&stats, "hold_seconds"), 60);
    assert_eq!(stats.limits().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn failures_of_the_store_are_counted() {
    for (on_store_error, later) in [
        (OnStoreError::FailOpen, false),
        (OnStoreError::FailOpen, true),
        (OnStoreError::FailClosed, false),
        (OnStoreError::FailClosed, true),
    ] {
        let limit = RateLimitLayer::builder(Quota::per_second(1))
            .store(Arc::new(Failing::away(later)))
            .on_store_error(on_store_error)
            .build()
            .unwrap();
        let limiter = limit.limiter();
        for _ in 0..3 {
            _ = limiter.acquire(Key::ALL).await;
            _ = limiter
                .acquire(Key::ALL)
                .and(limiter.acquire(Key::new("b")))
                .await;
        }
        let stats = limiter.stats();
        let expected = match on_store_error {
            OnStoreError::FailOpen => (6, 0),
            _ => (0, 6),
        };
        assert_eq!(
            (stats.requests().uncounted, stats.requests().store),
            expected
        );
        assert_eq!((stats.requests().total(), stats.units()), (6, 0));
    }
}

/// A tenant that chooses its name can neither forge a line of a log nor turn its text around.
#[tokio::test(start_paused = true)]
async fn key_names_have_no_controls() {
    let limit = RateLimitLayer::builder(Quota::per_second(50))
        .key(|request| Some(Key::new(request.path())))
        .key_name(|request| {
            let names = [
                "a\nb\r\u{1b}[31m\u{7f}\u{85}",
                "a\u{2028}b\u{2029}",
                "\u{202e}a\u{202d}b\u{202a}\u{202b}\u{202c}",
                "\u{2066}a\u{2067}b\u{2068}\u{2069}",
                "a\u{200e}b\u{200f}\u{61c}",
                "a\u{feff}b\u{200b}",
            ];
            names.into_iter().nth(request.path()[1..].parse().unwrap())
        })
        .build()
        .unwrap();
    let limiter = limit.limiter();
    let service = ServiceBuilder::new().layer(limit).service(Upstream::new());
    for path in 0..6 {
        service
            .clone()
            .oneshot(get(&format!("/{path}")))
            .await
            .unwrap();
    }
    let busiest = limiter.busiest(10);
    let mut names: Vec<_> = busiest.iter().map(|key| key.name()).collect();
    names.sort_unstable();
    let expected = ["?a?b??", "?a?b???", "a?b?", "a?b?", "a?b??", "a?b??[31m??"];
    assert_eq!(names, expected);
}

/// A store may make the labels of keys from any text.
#[test]
fn labels_are_short_and_have_no_controls() {
    let label = Label::from("a\nb\u{1b}\u{202e}c d=\"ä\"");
    assert_eq!(&*label, "a_b__c d=\"ä\"");
    for (text, length) in [("x", 253), ("ä", 252), ("\u{202e}", 84), ("😀", 252)] {
        let label = Label::from(&*text.repeat(1000));
        assert_eq!(label.len(), length, "{text:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn layers_name_their_keys_and_limits() {
    let _alone = READS_ALL.lock().await;
    let names = || {
        let all = stats::all().into_iter();
        all.map(|stats| stats.name().to_string())
            .filter(|name| name.starts_with("named"))
    };
    let limit = RateLimitLayer::builder(Quota::per_second(50))
        .name("named")
        .key(|request| request.header("x-tenant").map(Key::new))
        .key_name(|request| {
            request
                .header("x-tenant")
                .map(|tenant| format!("tenant {}", String::from_utf8_lossy(tenant)))
        })
        .and_per("channel", Quota::per_second(1), |request| {
            Some(Key::new(request.path()))
        })
        .build()
        .unwrap();
    let throttle = AdaptiveThrottleLayer::builder()
        .name("named pace")
        .build()
        .unwrap();
    assert_eq!(
        names().collect::<Vec<_>>(),
        ["named", "named channel", "named pace"]
    );
    let limiter = limit.limiter();
    let mut service = ServiceBuilder::new().layer(limit).service(Upstream::new());
    for tenant in ["7", "8", "7"] {
        let request = Request::get(format!("http://a/{tenant}")).header("x-tenant", tenant);
        let request = request.body(String::new()).unwrap();
        service.ready().await.unwrap().call(request).await.unwrap();
    }
    let busiest = limiter.busiest(10);
    let keys: Vec<_> = busiest
        .iter()
        .map(|key| (key.name(), key.units()))
        .collect();
    assert_eq!(keys, [("tenant 7", 2), ("tenant 8", 1)]);
    let own = stats::all()
        .into_iter()
        .find(|stats| stats.name() == "named channel");
    let own = own.unwrap();
    assert_eq!(
        (own.requests().total(), own.units()),
        (0, 3),
        "requests count once"
    );
    assert_eq!(
        (
            limiter.stats().requests().passed,
            limiter.stats().requests().waited
        ),
        (2, 1)
    );
    drop((service, limiter, throttle));
    assert_eq!(names().count(), 0, "dropped gates are gone");
    for name in ["", "tab\t", &"x".repeat(65)] {
        let name: &'static str = name.to_owned().leak();
        let error = RateLimitLayer::builder(Quota::per_second(1))
            .name(name)
            .build()
            .unwrap_err();
        assert!(error.to_string().contains("1 to 64"), "{error}");
        AdaptiveThrottleLayer::builder()
            .name(name)
            .build()
            .unwrap_err();
    }
}

#[tokio::test(start_paused = true)]
async fn throttles_count_requests_and_attempts() {
    let layer = AdaptiveThrottleLayer::builder()
        .name("pace")
        .max_wait(ms(5000))
        .build()
        .unwrap();
    let throttle = layer.throttle();
    let permit = throttle.acquire(Key::ALL).await.unwrap();
    let waits = [0, 1].map(|_| throttle.clone());
    let mut waits = waits
        .each_ref()
        .map(|throttle| Box::pin(throttle.acquire(Key::ALL)));
    for wait in &mut waits {
        assert!(wait.now_or_never().is_none());
    }
    assert_eq!(throttle.stats().waiting(), 2);
    let [first, cancelled] = waits;
    drop(cancelled);
    permit.answered(&Signal::default());
    first
        .await
        .unwrap()
        .answered(&Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS));
    throttle
        .hold_for(Key::ALL, Duration::from_secs(60))
        .await
        .unwrap();
    throttle.acquire(Key::ALL).await.unwrap_err();
    let stats = throttle.stats();
    assert_eq!(stats.name(), "pace");
    let Requests {
        passed,
        waited,
        refused,
        cancelled,
        ..
    } = stats.requests();
    assert_eq!((passed, waited, refused, cancelled), (1, 1, 1, 1));
    assert_eq!(
        (stats.requests().total(), stats.units(), stats.waiting()),
        (4, 2, 0)
    );
    assert_eq!(
        stats.upstream_refusals().of(StatusCode::TOO_MANY_REQUESTS),
        1
    );
    assert_eq!(stats.holds().of(Cause::Operator), 1);
    assert_eq!(throttle.busiest(5)[0].requests(), stats.requests());
}

#[tokio::test(start_paused = true)]
async fn retries_of_a_request_count_once() {
    let layer = AdaptiveThrottleLayer::builder()
        .max_wait(Duration::from_secs(60))
        .build()
        .unwrap();
    let throttle = layer.throttle();
    let upstream = Upstream::answering([support::limited("1"), support::ok(), support::ok()]);
    let mut service = ServiceBuilder::new()
        .layer(layer.retrying())
        .service(upstream);
    for _ in 0..2 {
        let response = service
            .ready()
            .await
            .unwrap()
            .call(support::get("http://a/"))
            .await;
        assert_eq!(response.unwrap().status(), 200);
    }
    let stats = throttle.stats();
    assert_eq!((stats.requests().total(), stats.units()), (2, 3));
}

/// Collects the events of a gate as text.
fn events() -> (Arc<Mutex<Vec<String>>>, impl Fn(&Event<'_>) + Send + Sync) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let events = log.clone();
    (log, move |event: &Event<'_>| {
        events.lock().unwrap().push(event.to_string())
    })
}

/// Returns how many requests passed, how many waited, and how many waits were counted.
fn passed_and_waited(limiter: &Limiter) -> (u64, u64, u64) {
    let stats = limiter.stats();
    let Requests { passed, waited, .. } = stats.requests();
    (passed, waited, stats.waits().count())
}

#[tokio::test(start_paused = true)]
async fn round_trips_to_the_store_are_no_waits() {
    let distant: Arc<dyn Store> = Arc::new(Distant::new(ms(5)));
    let builder = || RateLimitLayer::builder(Quota::per_second(10)).store(distant.clone());
    let limiter = builder().build().unwrap().limiter();
    let acquire = async |key: &str| drop(limiter.acquire(Key::new(key)).await.unwrap());
    for _ in 0..5 {
        acquire("one after the other").await;
        sleep(ms(300)).await;
    }
    // Ten requests of one moment, the last of which arrive while a call is under way.
    let together = (0..10).map(|_| acquire("together"));
    futures::future::join_all(together).await;
    assert_eq!(passed_and_waited(&limiter), (15, 0, 0));
    // The eleventh has its slot a second later.
    acquire("together").await;
    assert_eq!(passed_and_waited(&limiter), (15, 1, 1));

    // The joint request takes its units of "together", too.
    let channels = builder().name("channels").build().unwrap().limiter();
    sleep(ms(5000)).await;
    let joint = || {
        channels
            .acquire(Key::new("a"))
            .and(limiter.acquire(Key::new("together")))
    };
    for _ in 0..10 {
        drop(joint().await.unwrap());
    }
    assert_eq!(passed_and_waited(&channels), (10, 0, 0));
    drop(joint().await.unwrap());
    assert_eq!(passed_and_waited(&channels), (10, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_divided_quota_pass_at_rest() {
    let builder = RateLimitLayer::builder(Quota::per_second(10)).share("web", 50);
    let limiter = builder.build().unwrap().limiter();
    for _ in 0..5 {
        drop(limiter.acquire(Key::ALL).await.unwrap());
        sleep(ms(300)).await;
    }
    assert_eq!(passed_and_waited(&limiter), (5, 0, 0));
}

/// A request whose slot is free when its turn comes has waited all the same.
#[tokio::test(start_paused = true)]
async fn holds_and_lines_are_waits() {
    let builder = || RateLimitLayer::builder(Quota::per_minute(2)).max_wait(ms(90_000));
    let acquire = async |limiter: &Limiter| drop(limiter.acquire(Key::ALL).await.unwrap());
    let held = builder().build().unwrap().limiter();
    held.hold_for(Key::ALL, ms(2000)).await.unwrap();
    acquire(&held).await;
    assert_eq!(passed_and_waited(&held), (0, 1, 1));
    // A limiter that settles asks for slots that are near, again and again.
    let line = builder()
        .store(Arc::new(Distant::new(ms(5))))
        .settle(|_| None::<u32>);
    let line = line.build().unwrap().limiter();
    futures::future::join_all((0..4).map(|_| acquire(&line))).await;
    assert_eq!(passed_and_waited(&line), (2, 2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_refusals_is_one_event_a_second() {
    let (log, handler) = events();
    let limit = RateLimitLayer::builder(Quota::per_day(1)).max_wait(Duration::ZERO);
    let limiter = limit.on_event(handler).build().unwrap().limiter();
    drop(limiter.acquire(Key::ALL).await.unwrap());
    for _ in 0..100 {
        limiter.acquire(Key::ALL).await.unwrap_err();
        sleep(ms(25)).await;
    }
    let log = log.lock().unwrap();
    assert_eq!(log.len(), 3, "{log:?}");
    let unreported = log
        .iter()
        .map(|line| line.contains("39 more since the last report"));
    assert_eq!(
        unreported.collect::<Vec<_>>(),
        [false, true, true],
        "{log:?}"
    );
    assert_eq!(limiter.stats().requests().refused, 100);
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_upstream_refusals_is_one_event_a_second() {
    let (log, handler) = events();
    let limit = RateLimitLayer::builder(Quota::per_second(1000)).max_hold(Duration::ZERO);
    let limiter = limit.on_event(handler).build().unwrap().limiter();
    let refused = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    for _ in 0..100 {
        let permit = limiter.acquire(Key::ALL).await.unwrap();
        permit.begin().unwrap().answered(&refused);
        sleep(ms(25)).await;
    }
    let log = log.lock().unwrap();
    assert_eq!(log.len(), 3, "{log:?}");
    let is_upstream = |line: &String| line.contains("refused by the upstream: 429");
    assert!(log.iter().all(is_upstream), "{log:?}");
    let unreported = log
        .iter()
        .map(|line| line.ends_with("; 39 more since the last report"));
    assert_eq!(
        unreported.collect::<Vec<_>>(),
        [false, true, true],
        "{log:?}"
    );
    let stats = limiter.stats();
    assert_eq!(
        stats.upstream_refusals().of(StatusCode::TOO_MANY_REQUESTS),
        100
    );
}

#[tokio::test(start_paused = true)]
async fn stats_and_events_show_no_key() {
    const SECRET: &str = "s3cr3t-token";
    let (log, handler) = events();
    let limit = RateLimitLayer::builder(Quota::per_day(1))
        .key(by_header(http::header::AUTHORIZATION))
        .and_per("path", Quota::per_day(1), |request| {
            Some(Key::new(request.path()))
        })
        .on_event(handler)
        .build()
        .unwrap();
    let limiters = [limit.limiter(), limit.limiter_of("path").unwrap()];
    let mut service = ServiceBuilder::new().layer(limit).service(Upstream::new());
    for _ in 0..3 {
        let request = Request::get(format!("http://a/{SECRET}")).header("authorization", SECRET);
        let request = request.body(String::new()).unwrap();
        _ = service.ready().await.unwrap().call(request).await;
    }
    for limiter in limiters {
        limiter.hold_for(Key::new(SECRET), ms(1000)).await.unwrap();
        limiter.release(Key::new(SECRET)).await.unwrap();
        let shown = format!("{:?} {:?}", limiter.stats(), limiter.busiest(10));
        assert!(!shown.contains(SECRET), "{shown}");
    }
    let log = log.lock().unwrap();
    assert!(
        log.len() >= 5 && log.iter().all(|line| !line.contains(SECRET)),
        "{log:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn handlers_are_told_of_holds_and_refusals() {
    let (log, handler) = events();
    let limit = RateLimitLayer::builder(Quota::per_second(50))
        .on_event(handler)
        .build()
        .unwrap();
    let limiter = limit.limiter();
    let permit = limiter.acquire(Key::ALL).await.unwrap();
    let signal = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    permit
        .begin()
        .unwrap()
        .answered(&signal.with_retry_after(Duration::from_secs(30)));
    limiter.acquire(Key::ALL).await.unwrap_err();
    limiter.release(Key::ALL).await.unwrap();
    let log = log.lock().unwrap();
    let starts = [
        "key all on hold for 30",
        "request of key all refused by the upstream: 429",
        "refused locally (all)",
        "hold of key all ended",
    ];
    assert_eq!(log.len(), starts.len(), "{log:?}");
    for (line, start) in log.iter().zip(starts) {
        assert!(line.starts_with(start), "{line}");
    }
    assert_eq!(limiter.stats().holds().of(Cause::Upstream), 1);
}
