//! The metrics of the crate `metrics`: what a recorder is given, against the stats.
//!
//! All tests share the recorder of this process, and each has names of its own.

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use http::StatusCode;
use http::header::AUTHORIZATION;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Metadata, Recorder, SharedString,
    Unit,
};
use tokio::time::timeout;
use tollgate::metrics::publish;
use tollgate::stats::Stats;
use tollgate::store::{Label, Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{
    AdaptiveThrottleLayer, Guard, Key, Limiter, Quota, RateLimitLayer, RequestRef, Routes, Signal,
    by_header,
};
use tower::{Layer, ServiceExt};

use support::{Upstream, get, limited, ms};

/// The values of a series, as its name and labels.
#[derive(Default)]
struct Strict(Mutex<BTreeMap<String, Value>>);

#[derive(Clone, Debug, Default, PartialEq)]
struct Value {
    count: u64,
    gauge: Option<f64>,
    /// How often the gauge was set to 0.
    zeros: u64,
    waits: Vec<f64>,
}

impl Strict {
    fn change(&self, series: &str, change: impl FnOnce(&mut Value)) {
        change(self.0.lock().unwrap().entry(series.into()).or_default());
    }
}

static RECORDER: LazyLock<Arc<Strict>> = LazyLock::new(|| {
    let recorder = Arc::new(Strict::default());
    metrics::set_global_recorder(recorder.clone()).ok().unwrap();
    recorder
});

/// One series of the recorder. It takes only what all recorders can do.
struct Handle(Arc<Strict>, String);

/// Adapts a recorder whose handles refer to it.
impl Recorder for Strict {
    fn describe_counter(&self, _: metrics::KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: metrics::KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: metrics::KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &metrics::Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(handle(key)))
    }
    fn register_gauge(&self, key: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(handle(key)))
    }
    fn register_histogram(&self, key: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(handle(key)))
    }
}

/// Registers a series. From then on it is known, also if it has no value.
fn handle(key: &metrics::Key) -> Handle {
    let labels: Vec<_> = key
        .labels()
        .map(|l| format!("{}={}", l.key(), l.value()))
        .collect();
    let series = format!("{}{{{}}}", key.name(), labels.join(","));
    RECORDER.change(&series, |_| {});
    Handle(RECORDER.clone(), series)
}

impl CounterFn for Handle {
    fn increment(&self, more: u64) {
        assert!(more > 0, "{} is incremented by nothing", self.1);
        self.0.change(&self.1, |value| value.count += more);
    }
    fn absolute(&self, _: u64) {
        panic!("{} is set", self.1);
    }
}

impl GaugeFn for Handle {
    fn increment(&self, _: f64) {
        panic!("{} is incremented", self.1);
    }
    fn decrement(&self, _: f64) {
        panic!("{} is decremented", self.1);
    }
    fn set(&self, gauge: f64) {
        self.0.change(&self.1, |value| {
            value.gauge = Some(gauge);
            value.zeros += u64::from(gauge == 0.0);
        });
    }
}

impl HistogramFn for Handle {
    fn record(&self, wait: f64) {
        self.0.change(&self.1, |value| value.waits.push(wait));
    }
    fn record_many(&self, _: f64, _: usize) {
        panic!("{} is recorded many times", self.1);
    }
}

/// Publishes for the first time, as a program does at its start. The tests run one after the other,
/// because each has a paused clock of its own, and all publish all limiters.
async fn start() -> tokio::sync::MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let alone = ONE_AT_A_TIME.lock().await;
    LazyLock::force(&RECORDER);
    publish();
    alone
}

/// Returns the value of a series. `labels` begin with the name of the limiter.
fn value(name: &str, labels: &str) -> Value {
    let series = format!("{name}{{limiter={labels}}}");
    RECORDER
        .0
        .lock()
        .unwrap()
        .get(&series)
        .cloned()
        .unwrap_or_default()
}

/// Returns the series of a limiter.
fn series_of(limiter: &str) -> BTreeMap<String, Value> {
    let all = RECORDER.0.lock().unwrap();
    let is_its = |series: &str| {
        let (_, labels) = series.split_once("{limiter=").unwrap_or_default();
        labels.split([',', '}']).next() == Some(limiter)
    };
    let its = all.iter().filter(|(series, _)| is_its(series));
    its.map(|(series, value)| (series.clone(), value.clone()))
        .collect()
}

/// Returns how many requests are in the series of a limiter. On a busy machine, a request may wait for a second permit.
fn requests_in(series: &BTreeMap<String, Value>) -> u64 {
    let requests = series.iter();
    let requests = requests.filter(|(name, _)| name.starts_with("tollgate_requests_total{"));
    requests.map(|(_, value)| value.count).sum()
}

/// Checks that the counters of a limiter are its stats, and returns how many requests there were.
#[track_caller]
fn assert_counters_are(stats: &Stats) -> u64 {
    let name = stats.name();
    let mut series = series_of(name);
    series.retain(|series, _| series.contains("_total{"));
    let mut expected = BTreeMap::new();
    let mut add = |metric, label, value: &str, count| {
        let series = format!("tollgate_{metric}_total{{limiter={name},{label}={value}}}");
        if count > 0 || label == "outcome" {
            expected.insert(series, count);
        }
    };
    for (outcome, count) in stats.requests().by_outcome() {
        add("requests", "outcome", outcome, count);
    }
    for (reason, count) in stats.refusals().iter() {
        add("refusals", "reason", reason, count);
    }
    for (status, count) in stats.upstream_refusals().iter() {
        add("upstream_refusals", "status", status, count);
    }
    for (cause, count) in stats.holds().iter() {
        add("holds", "cause", cause, count);
    }
    add("units", "unit", stats.unit(), stats.units());
    for metric in ["bad_answers", "guard_trips"] {
        if let Some(count) = support::value(stats, metric) {
            let count = count as u64;
            expected.insert(format!("tollgate_{metric}_total{{limiter={name}}}"), count);
        }
    }
    let counted: BTreeMap<_, _> = series
        .into_iter()
        .map(|(s, value)| (s, value.count))
        .collect();
    assert_eq!(counted, expected);
    let waits = value("tollgate_wait_seconds", name).waits;
    assert_eq!(
        waits.len() as u64,
        stats.waits().count(),
        "each wait is recorded"
    );
    let (sum, exact) = (waits.iter().sum::<f64>(), stats.waits().sum().as_secs_f64());
    assert!((sum - exact).abs() < 1e-3, "{sum} {exact}");
    stats.requests().total()
}

fn limiter(name: &'static str, per_second: u32) -> Limiter {
    let builder = RateLimitLayer::builder(Quota::per_second(per_second)).name(name);
    builder.max_wait(ms(1500)).build().unwrap().limiter()
}

#[tokio::test(start_paused = true)]
async fn counters_equal_stats_at_each_publish() {
    let _alone = start().await;
    let name = "each publish";
    let responses = [limited("1"), support::ok(), limited("1")];
    let layer = RateLimitLayer::builder(Quota::per_second(3))
        .name(name)
        .max_wait(ms(1500));
    let layer = layer
        .key(by_header(http::HeaderName::from_static("x-key")))
        .max_keys(2)
        .build()
        .unwrap();
    let service = layer.layer(Upstream::answering(responses));
    let mut total = 0;
    for round in 0..8u32 {
        let mut calls = tokio::task::JoinSet::new();
        for call in 0..round * 2 {
            let mut request = get("/");
            let key = (call % 3).to_string().parse().unwrap();
            request.headers_mut().insert("x-key", key);
            let call = timeout(
                ms(400 + u64::from(call) * 200),
                service.clone().oneshot(request),
            );
            calls.spawn(async { drop(call.await) });
        }
        calls.join_all().await;
        publish();
        total = assert_counters_are(&layer.limiter().stats());
        tokio::time::sleep(ms(100)).await;
    }
    assert_eq!(total, 56);
    let seen = layer.limiter().stats();
    let requests = seen.requests();
    let outcomes = [
        requests.passed,
        requests.waited,
        requests.refused,
        requests.cancelled,
    ];
    assert!(outcomes.iter().all(|count| *count > 0), "{requests:?}");
    assert_eq!(seen.upstream_refusals().total(), 2);
}

#[tokio::test(start_paused = true)]
async fn throttles_are_published_as_limiters_are() {
    let _alone = start().await;
    let layer = AdaptiveThrottleLayer::builder()
        .name("a throttle")
        .build()
        .unwrap();
    let service = layer.layer(Upstream::answering([limited("1")]));
    let call = || service.clone().oneshot(get("/"));
    assert!(call().await.is_ok());
    publish();
    let held = value("tollgate_hold_seconds", "a throttle").gauge.unwrap();
    assert!((1.0..1.5).contains(&held), "{held}");
    assert_eq!(value("tollgate_keys_held", "a throttle").gauge, Some(1.0));
    assert!(call().await.is_ok());
    publish();
    let stats = layer.throttle().stats();
    assert_eq!(assert_counters_are(&stats), 2);
    assert_eq!(stats.holds().total(), 1);
    assert_eq!(
        value("tollgate_hold_seconds", "a throttle").gauge,
        Some(0.0)
    );
    drop((layer, service));
    publish();
    assert_counters_are(&stats);
}

#[tokio::test(start_paused = true)]
async fn dropped_limiters_keep_counts_and_zero_gauges_once() {
    let _alone = start().await;
    let first = limiter("dropped", 1);
    drop(first.acquire(Key::ALL).await.unwrap());
    publish();
    assert_eq!(value("tollgate_keys", "dropped").gauge, Some(1.0));
    // These are counted after the last publish of the first limiter.
    drop(first.acquire(Key::ALL).await.unwrap());
    drop(first.acquire(Key::new("another")).await.unwrap());
    let stats = first.stats();
    drop(first);
    publish();
    assert_eq!(assert_counters_are(&stats), 3);
    publish();
    for gauge in ["keys", "keys_limit"] {
        let value = value(&format!("tollgate_{gauge}"), "dropped");
        assert_eq!((value.gauge, value.zeros), (Some(0.0), 1), "{gauge}");
    }
    let limit = value("tollgate_limit_units", "dropped,limit=1/1s,unit=requests");
    assert_eq!((limit.gauge, limit.zeros), (Some(0.0), 1));
    // The next limiter of the name goes on where the first one was.
    let second = limiter("dropped", 1);
    drop(second.acquire(Key::ALL).await.unwrap());
    publish();
    assert_eq!(
        value("tollgate_requests_total", "dropped,outcome=passed").count,
        3
    );
    assert_eq!(
        value("tollgate_requests_total", "dropped,outcome=waited").count,
        1
    );
    drop(second);
    publish();
    assert_eq!(
        value("tollgate_units_total", "dropped,unit=requests").count,
        4
    );
}

/// A store in memory that does something before it makes a label, once that `begins`.
struct Labels<F> {
    memory: MemoryStore,
    begins: AtomicBool,
    before: F,
}

impl<F: Fn() + Send + Sync + 'static> Labels<F> {
    fn new(before: F) -> Arc<Self> {
        Arc::new(Labels {
            memory: MemoryStore::default(),
            begins: AtomicBool::new(false),
            before,
        })
    }

    /// Makes a limiter of this store that shows its keys, and that has admitted one request.
    async fn limiter(self: &Arc<Self>, name: &'static str) -> Limiter {
        let builder = RateLimitLayer::builder(Quota::per_second(5)).store(self.clone());
        let layer = builder.name(name).metrics_keys(1).build();
        let limiter = layer.unwrap().limiter();
        drop(limiter.acquire(Key::new("tenant")).await.unwrap());
        limiter
    }
}

impl<F: Fn() + Send + Sync + 'static> Store for Labels<F> {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.memory)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.memory.lease(request)
    }

    fn label(&self, key: Key) -> Label {
        if self.begins.load(Ordering::Relaxed) {
            (self.before)();
        }
        self.memory.label(key)
    }
}

/// No page is without its last counts: it is being dropped, and no longer found as a limiter that lives.
#[tokio::test]
async fn a_limiter_is_on_the_page_while_it_is_dropped() {
    let _alone = start().await;
    let ((asked, is_asked), (go, goes_on)) = (mpsc::channel(), mpsc::channel::<()>());
    let (asked, goes_on) = (Mutex::new(asked), Mutex::new(goes_on));
    let store = Labels::new(move || {
        asked.lock().unwrap().send(()).unwrap();
        // An error, because the sender is dropped.
        let _ = goes_on.lock().unwrap().recv();
    });
    let limiter = store.limiter("being dropped").await;
    store.begins.store(true, Ordering::Relaxed);
    let dropping = thread::spawn(move || drop(limiter));
    is_asked.recv().unwrap();
    let publishing = thread::spawn(publish);
    thread::sleep(ms(50));
    drop(go);
    publishing.join().unwrap();
    let series = series_of("being dropped");
    dropping.join().unwrap();
    assert_eq!(requests_in(&series), 1, "{series:?}");
}

/// The thread that drops the limiter would wait for itself.
#[tokio::test]
async fn a_limiter_that_is_being_dropped_may_publish() {
    let _alone = start().await;
    let store = Labels::new(publish);
    let limiter = store.limiter("publishes").await;
    store.begins.store(true, Ordering::Relaxed);
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        drop(limiter);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(ms(20_000)).unwrap();
    publish();
    let series = series_of("publishes");
    assert_eq!(requests_in(&series), 1, "{series:?}");
}

#[tokio::test(start_paused = true)]
async fn limiters_of_one_name_are_one_series() {
    let _alone = start().await;
    let both = [limiter("both", 5), limiter("both", 5)];
    for limiter in &both {
        for _ in 0..3 {
            drop(limiter.acquire(Key::ALL).await.unwrap());
        }
        drop(limiter.acquire(Key::new("another")).await.unwrap());
    }
    publish();
    let passed = value("tollgate_requests_total", "both,outcome=passed");
    assert_eq!(passed.count, 8);
    assert_eq!(value("tollgate_keys", "both").gauge, Some(4.0));
    let limit = "both,limit=5/1s,unit=requests";
    assert_eq!(value("tollgate_limit_units", limit).gauge, Some(5.0));
    assert_eq!(
        value("tollgate_limit_window_seconds", limit).gauge,
        Some(1.0)
    );
}

#[tokio::test(start_paused = true)]
async fn units_and_in_flight_have_series_of_their_own() {
    let _alone = start().await;
    let tokens = Quota::per_minute(1000).of("tokens");
    let quota = Quota::per_second(2).and(tokens).and(Quota::in_flight(1));
    let layer = RateLimitLayer::builder(quota)
        .charged_by_hand()
        .name("llm")
        .build()
        .unwrap();
    let cost = tollgate::Cost::new(1).and("tokens", 300);
    let first = layer.limiter().acquire(Key::ALL).cost(cost).await.unwrap();
    publish();
    assert_eq!(value("tollgate_units_total", "llm,unit=requests").count, 1);
    assert_eq!(
        value("tollgate_units_total", "llm tokens,unit=tokens").count,
        300
    );
    let limit = "llm tokens,limit=1000/60s,unit=tokens";
    assert_eq!(value("tollgate_limit_units", limit).gauge, Some(1000.0));
    assert_eq!(value("tollgate_in_flight", "llm").gauge, Some(1.0));
    drop(first);
    publish();
    assert_eq!(value("tollgate_in_flight", "llm").gauge, Some(0.0));
}

#[tokio::test(start_paused = true)]
async fn only_outcomes_have_series_that_are_zero() {
    let _alone = start().await;
    let idle = limiter("idle", 1);
    publish();
    let series = series_of("idle").into_iter();
    let (outcomes, others): (Vec<_>, Vec<_>) =
        series.partition(|(series, _)| series.contains("outcome="));
    let outcomes: Vec<_> = outcomes.iter().map(|(_, value)| value.count).collect();
    assert_eq!(outcomes, [0; 6]);
    let names: Vec<_> = others.into_iter().map(|(name, _)| name).collect();
    let expected = [
        "tollgate_keys_limit{limiter=idle}",
        "tollgate_limit_units{limiter=idle,limit=1/1s,unit=requests}",
        "tollgate_limit_window_seconds{limiter=idle,limit=1/1s,unit=requests}",
    ];
    assert_eq!(names, expected);
    drop(idle);
}

#[tokio::test(start_paused = true)]
async fn servers_cannot_add_status_series() {
    let _alone = start().await;
    let seen = std::sync::atomic::AtomicU16::new(500);
    let refuses = move |_, _: &_, signal: Signal| {
        let status = seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        signal.with_refusal(StatusCode::from_u16(status).unwrap())
    };
    let layer = RateLimitLayer::builder(Quota::per_second(1000)).name("statuses");
    let layer = layer
        .dialect(refuses)
        .max_wait(Duration::from_secs(3600))
        .build()
        .unwrap();
    let service = layer.layer(Upstream::new());
    for _ in 0..30 {
        drop(service.clone().oneshot(get("/")).await);
    }
    publish();
    let mut series = series_of("statuses");
    series.retain(|series, _| series.contains("upstream_refusals"));
    let counts: Vec<_> = series
        .iter()
        .map(|(series, value)| (&**series, value.count))
        .collect();
    let name =
        |status| format!("tollgate_upstream_refusals_total{{limiter=statuses,status={status}}}");
    let expected = [
        (name("503"), 1),
        (name("509"), 1),
        (name("529"), 1),
        (name("other"), 27),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|(name, count)| (&**name, *count))
        .collect();
    assert_eq!(counts, expected);
}

#[tokio::test(start_paused = true)]
async fn no_label_has_text_of_a_key() {
    let _alone = start().await;
    const SECRET: &str = "s3cr3t-token";
    let layer = RateLimitLayer::builder(Quota::per_second(1)).name("secretive");
    let layer = layer
        .key(by_header(AUTHORIZATION))
        .max_wait(ms(100))
        .build()
        .unwrap();
    let service = layer.layer(Upstream::answering([support::ok(), limited(SECRET)]));
    for _ in 0..3 {
        let mut request = get(&format!(
            "http://{SECRET}:{SECRET}@{SECRET}.example.com/{SECRET}"
        ));
        request
            .headers_mut()
            .insert(AUTHORIZATION, SECRET.parse().unwrap());
        drop(service.clone().oneshot(request).await);
        tokio::time::sleep(ms(1100)).await;
    }
    publish();
    assert_eq!(layer.limiter().stats().requests().total(), 3);
    assert!(!series_of("secretive").is_empty());
    let all = RECORDER.0.lock().unwrap();
    assert_eq!(all.keys().find(|series| series.contains(SECRET)), None);
}

#[tokio::test(start_paused = true)]
async fn trips_of_a_guard_are_counted() {
    let _alone = start().await;
    let guard = Guard::new(Quota::per_minute(2));
    let layer = RateLimitLayer::builder(Quota::per_second(50)).name("guarded");
    let layer = layer.guard(guard).max_wait(ms(0)).build().unwrap();
    let revoked = || {
        let mut response = support::ok().unwrap();
        *response.status_mut() = StatusCode::UNAUTHORIZED;
        Ok(response)
    };
    let service = layer.layer(Upstream::answering([(); 5].map(|()| revoked())));
    publish();
    assert_eq!(value("tollgate_guard_trips_total", "guarded").count, 0);
    for _ in 0..5 {
        // After the trip, requests are refused here.
        let _ = service.clone().oneshot(get("/")).await;
    }
    publish();
    let stats = layer.limiter().stats();
    assert_counters_are(&stats);
    assert_eq!(
        support::value(&stats, "bad_answers").zip(support::value(&stats, "guard_trips")),
        Some((3.0, 1.0))
    );
}

#[tokio::test(start_paused = true)]
async fn routes_and_set_quotas_have_series() {
    let _alone = start().await;
    let routes = ["/search", "/users"].map(|path| (path, Quota::per_second(2)));
    let layer = RateLimitLayer::builder(Quota::per_second(50))
        .name("shop")
        .routes(Routes::new(routes).unwrap())
        .metrics_keys(9)
        .max_wait(ms(0))
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let set = limiter.set_quota(Key::ALL, Quota::per_second(9));
    set.await.unwrap();
    for (path, times) in [("/search", 3), ("/users", 1), ("/", 1)] {
        for _ in 0..times {
            let _ = layer
                .layer(Upstream::answering([]))
                .oneshot(get(path))
                .await;
        }
    }
    publish();
    let gauge = value("tollgate_keys_with_set_quota", "shop").gauge;
    assert_eq!(gauge, Some(1.0));
    let series = series_of("shop route");
    let units = |route: &str| {
        let ends = format!(" {route},unit=requests}}");
        let is_its =
            |series: &str| series.starts_with("tollgate_units_total") && series.ends_with(&ends);
        let mut its = series.iter().filter(|(series, _)| is_its(series));
        its.next().map(|(_, value)| value.count)
    };
    assert_eq!([units("/search"), units("/users")], [Some(2), Some(1)]);
}

#[tokio::test(start_paused = true)]
async fn some_keys_have_series_of_their_own() {
    let _alone = start().await;
    let tenants = http::HeaderName::from_static("x-tenant");
    let build = |name, max_keys| {
        let builder = RateLimitLayer::builder(Quota::per_second(50)).name(name);
        let builder = builder.key(by_header(tenants.clone())).max_keys(max_keys);
        let named = |request: &RequestRef<'_>| {
            let tenant = request.header("x-tenant")?;
            Some(String::from_utf8_lossy(tenant).into_owned())
        };
        let builder = builder.key_name(named).metrics_keys(2);
        builder.max_wait(ms(0)).build().unwrap()
    };
    let call = async |layer: &RateLimitLayer, tenant: &str, times: usize| {
        let service = layer.layer(Upstream::answering([]));
        for _ in 0..times {
            let mut request = get("/");
            request
                .headers_mut()
                .insert("x-tenant", tenant.parse().unwrap());
            let _ = service.clone().oneshot(request).await;
        }
    };
    let count = |limiter: &str, key: &str| {
        let outcomes = ["passed", "refused"].map(|outcome| {
            let labels = format!("{limiter},key={key},outcome={outcome}");
            value("tollgate_requests_total", &labels).count
        });
        let units = value(
            "tollgate_units_total",
            &format!("{limiter},key={key},unit=requests"),
        );
        assert_eq!(units.count, outcomes[0], "{key}");
        outcomes
    };

    let layer = build("tenants", 100);
    call(&layer, "one", 60).await;
    call(&layer, "two", 5).await;
    call(&layer, "three", 3).await;
    publish();
    assert_eq!(count("tenants", "one"), [50, 10]);
    assert_eq!(count("tenants", "two"), [5, 0]);
    assert_eq!(count("tenants", "other"), [3, 0]);
    tokio::time::sleep(Duration::from_secs(3000)).await;
    call(&layer, "one", 2).await;
    call(&layer, "three", 2).await;
    publish();
    // Key two is idle for an hour, and key three gets its place.
    tokio::time::sleep(Duration::from_secs(700)).await;
    publish();
    call(&layer, "three", 4).await;
    publish();
    assert_eq!(count("tenants", "one"), [52, 10]);
    assert_eq!(count("tenants", "three"), [4, 0]);
    assert_eq!(count("tenants", "other"), [5, 0]);
    // A key that comes back goes on where it was.
    tokio::time::sleep(Duration::from_secs(4000)).await;
    publish();
    call(&layer, "two", 1).await;
    publish();
    call(&layer, "two", 1).await;
    publish();
    assert_eq!(count("tenants", "two"), [6, 0]);
    assert_eq!(count("tenants", "other"), [6, 0]);
    let total = series_of("tenants").into_iter();
    let total = total.filter(|(series, _)| series.starts_with("tollgate_requests_total"));
    let total: u64 = total.map(|(_, value)| value.count).sum();
    assert_eq!(total, layer.limiter().stats().requests().total());

    // The state of a key is forgotten, and what it counted stays.
    let layer = build("forgotten", 1);
    for round in 1..=5 {
        call(&layer, "one", 1).await;
        publish();
        tokio::time::sleep(Duration::from_secs(5)).await;
        call(&layer, "two", 1).await;
        publish();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let all = ["one", "two", "other"].map(|key| count("forgotten", key)[0]);
        assert_eq!(all.iter().sum::<u64>(), 2 * round, "{all:?}");
    }
    drop(layer);
    publish();
    let all = ["one", "two", "other"].map(|key| count("forgotten", key)[0]);
    assert_eq!(all.iter().sum::<u64>(), 10, "{all:?}");
    assert!(
        RateLimitLayer::builder(Quota::per_second(1))
            .metrics_keys(1001)
            .build()
            .is_err()
    );
}
