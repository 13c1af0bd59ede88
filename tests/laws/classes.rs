//! A quota that is divided among classes of requests.

use crate::support::{self, count_of, over, remote};

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use http::{Request, Response};
use over::over;
use proptest::prelude::*;
use remote::Remote;
use tokio::time::{Instant, sleep};

use tollgate::limiter::{Because, Verdict};
use tollgate::stats::Event;
use tollgate::store::{Lease, LeaseRequest, Store, StoreReply};
use tollgate::{
    Class, ConfigError, Key, Limited, Limiter, Quota, RateLimitBuilder, RateLimitLayer, Reason,
    Signal,
};
use tower::{Layer, ServiceExt, service_fn};

const K: Key = Key::ALL;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The class that used a permit, when, and its units.
type Use = (&'static str, Instant, u32);

#[derive(Clone, Default)]
struct Uses(Arc<Mutex<Vec<Use>>>);

impl Uses {
    fn add(&self, class: &'static str, cost: u32) {
        self.0.lock().unwrap().push((class, Instant::now(), cost));
    }

    fn all(&self) -> Vec<(Instant, u32)> {
        let uses = self.0.lock().unwrap();
        uses.iter().map(|(_, at, cost)| (*at, *cost)).collect()
    }

    fn count(&self, class: &str, from: Instant, to: Instant) -> usize {
        let uses = self.0.lock().unwrap();
        let of_class = uses
            .iter()
            .filter(|(name, at, _)| *name == class && (from..to).contains(at));
        of_class.count()
    }
}

/// Starts `tasks` tasks that always ask for a permit of `class`.
fn ask_always(limiter: &Limiter, uses: &Uses, class: &'static str, tasks: usize) {
    for _ in 0..tasks {
        let (limiter, uses) = (limiter.clone(), uses.clone());
        tokio::spawn(async move {
            loop {
                match limiter.acquire(K).class(class).await {
                    Ok(permit) => {
                        uses.add(class, 1);
                        drop(permit);
                    }
                    Err(limited) => {
                        sleep(limited.retry_after().unwrap_or(ms(100)).min(ms(1000))).await;
                    }
                }
            }
        });
    }
}

fn fleet(quota: Quota, max_wait: Duration) -> Limiter {
    let layer = RateLimitLayer::builder(quota)
        .share("web", 50)
        .max_wait(max_wait);
    layer.build().unwrap().limiter()
}

#[test]
fn a_class_waits_for_nobody_else() {
    support::paused(class_beside_a_busy_one());
}

async fn class_beside_a_busy_one() {
    let quota = Quota::per_second(50);
    let limiter = fleet(quota, Duration::from_secs(60));
    let uses = Uses::default();
    ask_always(&limiter, &uses, "jobs", 1000);
    sleep(Duration::from_secs(5)).await;

    let from = Instant::now();
    let mut waits = Vec::new();
    for _ in 0..200 {
        sleep(ms(100)).await;
        let begin = Instant::now();
        let permit = limiter.acquire(K).class("web").await.unwrap();
        waits.push(begin.elapsed());
        uses.add("web", 1);
        drop(permit);
    }
    let to = Instant::now();
    waits.sort();
    let (jobs, web) = (uses.count("jobs", from, to), uses.count("web", from, to));
    let seconds = (to - from).as_secs_f64();
    let used = (jobs + web) as f64 / seconds / (50.0 / 1.02);
    println!(
        "jobs {jobs}, web {web} in {seconds:.1} s, {used:.3} used; waits of web {:?} {:?}",
        waits[100], waits[198]
    );
    assert!(waits[198] <= ms(300), "{:?}", waits[198]);
    assert!(used >= 0.96, "{used}");
    assert_eq!(over(&quota, &uses.all()), None);
}

#[tokio::test(start_paused = true)]
async fn what_a_class_leaves_is_lent() {
    let quota = Quota::per_second(50);
    for all in [quota, quota.and(Quota::in_flight(100))] {
        let limiter = fleet(all, Duration::from_secs(15));
        let uses = Uses::default();
        let from = Instant::now();
        ask_always(&limiter, &uses, "jobs", 100);
        sleep(Duration::from_secs(30)).await;
        let to = Instant::now();
        let used = uses.count("jobs", from + ms(2000), to) as f64 / 28.0 / (50.0 / 1.02);
        println!("{all}: {used:.3} used by jobs alone");
        assert!(used >= 0.94, "{used}");
        assert_eq!(over(&quota, &uses.all()), None);
    }
}

/// Collects the events of a limiter as text.
fn events() -> (
    Arc<Mutex<Vec<String>>>,
    impl Fn(&Event<'_>) + Send + Sync + Clone,
) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let events = log.clone();
    (log, move |event: &Event<'_>| {
        events.lock().unwrap().push(event.to_string())
    })
}

/// Sends requests, the nth of which has `class(n)` in its extensions, through `layer`.
async fn send(layer: &RateLimitLayer, count: usize, class: impl Fn(usize) -> Option<&'static str>) {
    let upstream =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(http::Response::new(())) });
    let service = layer.layer(upstream);
    for number in 0..count {
        let mut request = Request::new(());
        if let Some(class) = class(number) {
            request.extensions_mut().insert(Class::new(class));
        }
        service.clone().oneshot(request).await.unwrap();
    }
}

fn shares(handler: impl Fn(&Event<'_>) + Send + Sync + 'static) -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_second(10_000))
        .share("web", 50)
        .on_event(handler)
}

#[test]
fn a_class_function_without_shares_is_an_error() {
    let builder = RateLimitLayer::builder(Quota::per_second(50)).class(|_| Some("web"));
    let error = builder.build().unwrap_err().to_string();
    assert!(error.starts_with("class is set without shares"), "{error}");
    let builder = RateLimitLayer::builder(Quota::per_second(50)).class(|_| Some("web"));
    assert!(builder.share("web", 50).build().is_ok());
}

#[tokio::test(start_paused = true)]
async fn unknown_classes_are_reported_once() {
    let (log, handler) = events();
    let layer = shares(handler).class(|_| Some("wbe")).build().unwrap();
    send(&layer, 300, |number| (number % 2 == 0).then_some("jobs\n")).await;
    for _ in 0..3 {
        drop(layer.limiter().acquire(K).class("web").await.unwrap());
        drop(layer.limiter().acquire(K).class("Web").await.unwrap());
    }
    let text =
        |class| format!("class {class:?} has no share, so its requests count among all others");
    let expected = ["jobs?", "wbe", "Web"].map(text);
    assert_eq!(*log.lock().unwrap(), expected);
    assert_eq!(count_of(&layer.limiter().stats(), "unknown_classes"), 3);
}

/// Classes that clients choose neither fill the log nor the memory.
#[tokio::test(start_paused = true)]
async fn few_unknown_classes_are_reported() {
    let (log, handler) = events();
    let limiter = shares(handler).build().unwrap().limiter();
    for number in 0..1000 {
        let class = format!("{number}{}", "x".repeat(1000));
        drop(limiter.acquire(K).class(&class).await.unwrap());
    }
    let log = log.lock().unwrap();
    assert_eq!(
        (log.len(), count_of(&limiter.stats(), "unknown_classes")),
        (16, 16)
    );
    assert!(log.iter().all(|line| line.len() < 150), "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn classes_of_an_undivided_quota_are_unknown() {
    let (log, handler) = events();
    let builder = RateLimitLayer::builder(Quota::per_second(50)).on_event(handler);
    let layer = builder.build().unwrap();
    send(&layer, 3, |_| Some("web")).await;
    drop(layer.limiter().acquire(K).class("jobs").await.unwrap());
    assert_eq!(log.lock().unwrap().len(), 2);
    assert_eq!(count_of(&layer.limiter().stats(), "unknown_classes"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_layer_whose_requests_have_no_class_says_so() {
    let (log, handler) = events();
    let layer = shares(handler).build().unwrap();
    send(&layer, 99, |_| None).await;
    assert_eq!(*log.lock().unwrap(), Vec::<String>::new());
    send(&layer, 200, |_| None).await;
    let log = log.lock().unwrap();
    assert_eq!(log.len(), 1, "{log:?}");
    assert!(log[0].starts_with("classes have shares, but no request has a class"));
}

/// A divided limit need not be the first of its layer.
#[tokio::test(start_paused = true)]
async fn each_limit_whose_requests_have_no_class_says_so() {
    let (log, handler) = events();
    let plain = RateLimitLayer::builder(Quota::per_second(10_000));
    let layer = plain.build().unwrap().and(shares(handler).build().unwrap());
    send(&layer, 300, |_| None).await;
    assert_eq!(log.lock().unwrap().len(), 1);
}

/// A class function may return no class, and some requests of a layer without one have a class.
#[tokio::test(start_paused = true)]
async fn requests_without_a_class_are_legitimate() {
    let (log, handler) = events();
    let layer = shares(handler.clone()).class(|_| None).build().unwrap();
    send(&layer, 300, |_| None).await;
    let layer = shares(handler).build().unwrap();
    send(&layer, 300, |number| (number == 50).then_some("web")).await;
    assert_eq!(*log.lock().unwrap(), Vec::<String>::new());
}

/// Slots that are left over because others were lent are kept for the next requests, but only for those
/// that can wait for them.
#[tokio::test(start_paused = true)]
async fn requests_that_cannot_wait_take_no_kept_slot() {
    let limiter = fleet(Quota::per_second(10), Duration::from_secs(60));
    for _ in 0..200 {
        tokio::spawn(limiter.acquire(K).class("jobs").into_future());
    }
    for _ in 0..200 {
        sleep(ms(17)).await;
        let begin = Instant::now();
        let soon = limiter
            .acquire(K)
            .class("jobs")
            .deadline(begin.into_std() + ms(50));
        let refused = soon.await.is_err();
        assert!(!refused || begin.elapsed() < ms(2), "{:?}", begin.elapsed());
    }
}

fn built(shares: &[(&'static str, u8)], quota: Quota) -> Result<RateLimitLayer, ConfigError> {
    let builder = RateLimitLayer::builder(quota);
    let divided = shares.iter().fold(builder, |builder, (class, percent)| {
        builder.share(class, *percent)
    });
    divided.build()
}

#[test]
fn shares_that_cannot_be_are_errors() {
    let quota = Quota::per_second(50);
    let text = |shares: &[(&'static str, u8)], quota| built(shares, quota).unwrap_err().to_string();
    assert_eq!(
        text(&[("web", 0)], quota),
        "share is 0 % for \"web\", but must be from 1 to 100 per cent"
    );
    assert_eq!(
        text(&[("web", 60), ("jobs", 50)], quota),
        "share is 110 % in all, but must be at most 100 per cent in all"
    );
    assert!(text(&[("web", 10), ("web", 20)], quota).contains("has no share yet"));
    let every = text(&[("web", 50)], Quota::every(Duration::from_secs(2)));
    assert!(
        every.contains("the share of \"web\" is less than one unit"),
        "{every}"
    );
    assert!(built(&[("web", 100)], quota).is_ok());

    let lends = RateLimitLayer::builder(quota)
        .lends("web", 50)
        .build()
        .unwrap_err();
    assert!(lends.to_string().contains("call share first"), "{lends}");
    let lends = RateLimitLayer::builder(quota)
        .share("web", 50)
        .lends("web", 101);
    assert!(lends.build().is_err());
}

/// Takes permits of `class` until one is refused. Returns how many there were, and the error.
async fn take_all(limiter: &Limiter, class: &str) -> (u32, Limited) {
    let mut taken = 0;
    loop {
        match limiter.acquire(K).class(class).await {
            Ok(permit) => {
                taken += 1;
                drop(permit);
            }
            Err(limited) => return (taken, limited),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn parts_are_apart_and_errors_name_the_class() {
    let layer = RateLimitLayer::builder(Quota::per_second(50))
        .share("web", 50)
        .share("jobs", 30)
        .lends("web", 0)
        .lends("jobs", 0)
        .max_wait(Duration::ZERO);
    let limiter = layer.build().unwrap().limiter();
    let (jobs, limited) = take_all(&limiter, "jobs").await;
    // What the rest lends near is borrowed: 97 % of 10, at its pace.
    assert!((15..=18).contains(&jobs), "{jobs}");
    let info = limited.report();
    assert_eq!(info.class(), Some("jobs"));
    assert!(limited.to_string().contains("jobs"), "{limited}");
    let (web, limited) = take_all(&limiter, "web").await;
    assert!((25..=28).contains(&web), "{web}");
    assert_eq!(limited.report().class(), Some("web"));
    let (others, limited) = take_all(&limiter, "unknown").await;
    assert_eq!(limited.report().class(), None);
    assert_eq!(jobs + web + others, 50, "{jobs} {web} {others}");
}

#[tokio::test(start_paused = true)]
async fn layers_find_the_class_of_a_request() {
    let layer = RateLimitLayer::builder(Quota::per_second(10))
        .share("web", 50)
        .share("jobs", 50)
        .lends("web", 0)
        .lends("jobs", 0)
        .class(|request| request.path().starts_with("/jobs").then_some("jobs"))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let service = layer.layer(service_fn(|_: Request<()>| async {
        Ok::<_, std::convert::Infallible>(http::Response::new(()))
    }));
    let send = async |path: &str, class: Option<&'static str>| {
        let mut request = Request::get(path).body(()).unwrap();
        if let Some(class) = class {
            request.extensions_mut().insert(Class::new(class));
        }
        match service.clone().oneshot(request).await {
            Ok(_) => Ok(()),
            Err(error) => Err(Limited::find(&error).unwrap().report().class()),
        }
    };
    for _ in 0..5 {
        assert_eq!(send("http://a/jobs/1", None).await, Ok(()));
    }
    assert_eq!(send("http://a/jobs/1", None).await, Err(Some("jobs")));
    for _ in 0..4 {
        assert_eq!(send("http://a/jobs/1", Some("web")).await, Ok(()));
    }
    assert_eq!(send("http://a/jobs/1", Some("web")).await, Err(Some("web")));
    assert_eq!(send("http://a/", None).await, Ok(()));
    assert_eq!(send("http://a/", None).await, Err(None));
}

/// The layer that is joined second divides its quota, and counts a request in the part of its class.
#[tokio::test(start_paused = true)]
async fn a_joined_layer_finds_the_class_of_a_request() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = events.clone();
    let plain = RateLimitLayer::builder(Quota::per_second(100))
        .on_event(move |event| told.lock().unwrap().push(event.to_string()))
        .build()
        .unwrap();
    let divided = RateLimitLayer::builder(Quota::per_second(50))
        .key(|_| Key::new("divided"))
        .share("web", 80)
        .lends("web", 0)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    let service = plain.and(divided).layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(http::Response::new(()))
    }));
    let mut passed = 0;
    let limited = loop {
        let mut request = Request::get("http://a/").body(()).unwrap();
        request.extensions_mut().insert(Class::new("web"));
        match service.clone().oneshot(request).await {
            Ok(_) => passed += 1,
            Err(error) => break error,
        }
    };
    assert!((40..=50).contains(&passed), "{passed}");
    let class = Limited::find(&limited).unwrap().report().class();
    assert_eq!(class, Some("web"));
    let events = events.lock().unwrap();
    assert!(
        !events.iter().any(|event| event.contains("share")),
        "{events:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_holds_all_classes_of_a_key() {
    let limiter = fleet(Quota::per_second(50), Duration::ZERO);
    let permit = limiter.acquire(K).class("web").await.unwrap();
    let response = http::Response::builder()
        .status(429)
        .header("retry-after", "7");
    let sent = permit.begin().unwrap();
    sent.answered(&Signal::read(&response.body(()).unwrap()));
    for class in ["web", "others"] {
        let limited = limiter.acquire(K).class(class).await.unwrap_err();
        assert_eq!(limited.reason(), Some(Reason::Held), "{class}");
        assert!(
            limited.retry_after() > Some(Duration::from_secs(6)),
            "{class}"
        );
    }
    limiter.release(K).await.unwrap();
    for class in ["web", "others"] {
        drop(limiter.acquire(K).class(class).await.unwrap());
    }
    limiter.hold_for(K, Duration::from_secs(3)).await.unwrap();
    for class in ["web", "others"] {
        let limited = limiter.acquire(K).class(class).await.unwrap_err();
        assert_eq!(limited.reason(), Some(Reason::Held), "{class}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_quota_that_is_set_is_divided_too() {
    let limiter = RateLimitLayer::builder(Quota::per_second(10))
        .share("web", 50)
        .lends("web", 0)
        .max_wait(Duration::ZERO)
        .build()
        .unwrap()
        .limiter();
    limiter.set_quota(K, Quota::per_second(100)).await.unwrap();
    let (web, _) = take_all(&limiter, "web").await;
    let (others, _) = take_all(&limiter, "others").await;
    assert!((50..=56).contains(&web), "{web}");
    assert_eq!(web + others, 100);

    sleep(Duration::from_secs(2)).await;
    let own = Quota::per_second(20);
    limiter.unset_quota(K).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    let permit = limiter.acquire(K).quota(own).class("web").await.unwrap();
    drop(permit);
    sleep(Duration::from_secs(5)).await;
    let (web, _) = take_all(&limiter, "web").await;
    assert!((10..=12).contains(&web), "{web}");
}

/// What a request gives back of permits that another part has lent goes back to that part.
#[tokio::test(start_paused = true)]
async fn lent_units_go_back_to_their_part() {
    let limiter = RateLimitLayer::builder(Quota::per_minute(1000))
        .share("web", 50)
        .lends("web", 100)
        .max_wait(Duration::from_secs(30))
        .settle_by_hand()
        .build()
        .unwrap()
        .limiter();
    let used = async || {
        let limits = limiter.peek(K).await.unwrap().limits;
        limits.iter().map(|usage| usage.used).sum::<u64>()
    };
    let mut all_sent = Vec::new();
    for _ in 0..60 {
        let permit = limiter.acquire(K).class("jobs").cost(10).await.unwrap();
        all_sent.push(permit.begin().unwrap());
    }
    // The part of the others has room for 50 of them.
    assert_eq!(used().await, 600);
    for sent in &mut all_sent {
        sent.settle(4);
    }
    drop(all_sent);
    assert_eq!(used().await, 240);
}

/// Calls in flight of each class, and of those that wait.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    in_flight: BTreeMap<&'static str, usize>,
    waiting: BTreeMap<&'static str, usize>,
}

impl Calls {
    fn in_flight(&self, class: &'static str) -> usize {
        let counts = self.0.lock().unwrap();
        counts.in_flight.get(class).copied().unwrap_or(0)
    }

    /// Returns how many calls are in flight, and how many wait, of all classes.
    fn all(&self) -> (usize, usize) {
        let counts = self.0.lock().unwrap();
        let sum = |counts: &BTreeMap<_, usize>| counts.values().sum();
        (sum(&counts.in_flight), sum(&counts.waiting))
    }

    /// Makes a call of `class` that takes `time`. Returns how long it waited.
    async fn call(&self, limiter: &Limiter, class: &'static str, time: Duration) -> Duration {
        let begin = Instant::now();
        *self.0.lock().unwrap().waiting.entry(class).or_default() += 1;
        let permit = limiter.acquire(K).class(class).await.unwrap();
        {
            let mut counts = self.0.lock().unwrap();
            *counts.waiting.entry(class).or_default() -= 1;
            *counts.in_flight.entry(class).or_default() += 1;
        }
        let waited = begin.elapsed();
        sleep(time).await;
        *self.0.lock().unwrap().in_flight.entry(class).or_default() -= 1;
        drop(permit);
        waited
    }

    /// Starts tasks that make calls of `class` for ever, the first of them `apart`.
    fn loops(&self, limiter: &Limiter, class: &'static str, tasks: u32, apart: Duration) {
        for number in 0..tasks {
            let (limiter, calls) = (limiter.clone(), self.clone());
            tokio::spawn(async move {
                sleep(apart * number).await;
                loop {
                    calls.call(&limiter, class, ms(1000)).await;
                }
            });
        }
    }
}

#[tokio::test(start_paused = true)]
async fn free_in_flight_slots_go_to_a_class_below_its_share() {
    let limiter = fleet(Quota::in_flight(10), Duration::from_secs(60));
    let calls = Calls::default();
    calls.loops(&limiter, "jobs", 50, ms(100));
    sleep(Duration::from_secs(10)).await;
    assert_eq!(calls.in_flight("jobs"), 10, "the web is idle");

    // One job ends every 100 ms.
    let waited = calls.call(&limiter, "web", ms(10)).await;
    assert!(waited <= ms(101), "{waited:?}");
    assert_eq!(limiter.peek(K).await.unwrap().free, 0);
    let web = (0..8).map(|_| calls.call(&limiter, "web", ms(5000)));
    let mut waits = futures::future::join_all(web).await;
    waits.sort();
    assert!(waits[4] <= ms(505), "{waits:?}");
    assert!(
        waits[5] > ms(2000),
        "five have the share, the others queue up: {waits:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn each_class_keeps_its_share_of_the_in_flight_limit() {
    let layer = RateLimitLayer::builder(Quota::in_flight(10))
        .share("web", 50)
        .share("cron", 30)
        .max_wait(Duration::from_secs(600));
    let limiter = layer.build().unwrap().limiter();
    let calls = Calls::default();
    for class in ["jobs", "cron", "web"] {
        calls.loops(&limiter, class, 100, ms(7));
        sleep(Duration::from_secs(3)).await;
    }
    for _ in 0..100 {
        sleep(ms(97)).await;
        let counts = ["jobs", "cron", "web"].map(|class| calls.in_flight(class));
        assert_eq!(counts, [2, 3, 5]);
    }
}

#[tokio::test(start_paused = true)]
async fn calls_in_flight_have_one_limit_for_all_classes() {
    let quota = Quota::per_second(50).and(Quota::in_flight(2));
    let limiter = fleet(quota, Duration::ZERO);
    let web = limiter.acquire(K).class("web").await.unwrap();
    assert_eq!(limiter.peek(K).await.unwrap().free, 1);
    let others = limiter.acquire(K).await.unwrap();
    for class in ["web", "others"] {
        assert!(limiter.acquire(K).class(class).await.is_err(), "{class}");
        let explained = limiter.acquire(K).class(class).explain().await.unwrap();
        let Verdict::Refused { because, .. } = explained.verdict else {
            panic!("{explained}");
        };
        assert!(
            matches!(because, Some(Because::InFlight(_))),
            "{class}: {because:?}"
        );
    }
    let usage = limiter.peek(K).await.unwrap();
    assert_eq!((usage.limits[1].used, usage.free), (2, 0));
    drop(others);
    let again = limiter.acquire(K).class("web").await.unwrap();
    assert!(limiter.acquire(K).await.is_err());
    drop((web, again));
    drop(limiter.acquire(K).await.unwrap());
}

/// Random limits, shares and calls: never over, no slot is free while a request waits, and nobody waits
/// for good.
#[test]
fn no_mix_of_classes_exceeds_the_in_flight_limit() {
    let call = (0u64..300, 0usize..3, 1u64..2000);
    let case = (
        1u32..12,
        (1u8..60, 1u8..40),
        prop::collection::vec(call, 1..100),
    );
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(50)
    };
    proptest!(config, |((limit, (a, b), requests) in case)| {
        let layer = RateLimitLayer::builder(Quota::in_flight(limit))
            .share("a", a)
            .share("b", b)
            .max_wait(Duration::from_secs(600));
        let limiter = layer.build().unwrap().limiter();
        let runtime = crate::support::paused_runtime();
        let calls = Calls::default();
        runtime.block_on(async {
            for (wait, class, time) in requests {
                sleep(ms(wait)).await;
                let class = ["a", "b", "c"][class];
                let (limiter, its_calls) = (limiter.clone(), calls.clone());
                tokio::spawn(async move { its_calls.call(&limiter, class, ms(time)).await });
                // All tasks that can run do so before a timer fires.
                sleep(Duration::from_nanos(1)).await;
                let (in_flight, waiting) = calls.all();
                prop_assert_eq!(in_flight, (in_flight + waiting).min(limit as usize));
            }
            sleep(Duration::from_secs(300)).await;
            prop_assert_eq!(calls.all(), (0, 0));
            prop_assert_eq!(limiter.peek(K).await.unwrap().free, u64::from(limit));
            Ok(())
        })?;
    });
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().unwrap()
}

/// A remote store that counts the calls that ask for nothing.
#[derive(Default)]
struct Stated {
    remote: Remote,
    count: AtomicUsize,
}

impl Store for Stated {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.remote)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        if request.demands.is_empty() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        self.remote.lease(request)
    }
}

/// The runtime that states the limits of both parts ends, or no thread drives it any longer.
#[test]
fn statements_that_are_lost_are_made_again() {
    for ends in [true, false] {
        let store = Arc::new(Stated::default());
        let builder = RateLimitLayer::builder(Quota::per_minute(1000)).max_wait(ms(60_000));
        let builder = builder.share("web", 50).store(store.clone());
        let limiter = builder.build().unwrap().limiter();
        let acquire = || limiter.acquire(K).class("web");
        let mut lost = Some(runtime());
        if let Some(lost) = &lost {
            lost.block_on(async { assert!(acquire().now_or_never().is_none()) });
        }
        lost.take_if(|_| ends);
        assert_eq!(store.count.load(Ordering::Relaxed), 2);
        runtime().block_on(async {
            sleep(ms(1100)).await; // they count as lost
            let granted = tokio::time::timeout(ms(100), acquire()).await;
            drop(granted.expect("it waits for no lost task").unwrap());
        });
        assert_eq!(store.count.load(Ordering::Relaxed), 4);
    }
}

/// The runtime that asks the other parts is dropped when the first of them has lent, and the second has not answered.
#[test]
fn slots_that_were_lent_to_a_lost_task_go_back() {
    let builder = RateLimitLayer::builder(Quota::per_minute(1000)).max_wait(ms(120_000));
    let builder = builder.share("web", 30).share("jobs", 30);
    let builder = builder.store(Arc::new(Remote::default()));
    let limiter = builder.build().unwrap().limiter();
    let acquire = || limiter.acquire(K).class("jobs").cost(280);
    let used = async || limiter.peek(K).await.unwrap().limits[0].used;
    let lost = runtime();
    lost.block_on(async {
        // The own part has room for one.
        drop(acquire().await.unwrap());
        let mut both = join_all([acquire(), acquire()]);
        while used().await == 280 {
            assert!((&mut both).now_or_never().is_none());
            sleep(ms(1)).await;
        }
        sleep(ms(6)).await;
    });
    drop(lost);
    runtime().block_on(async {
        limiter.shutdown().await.unwrap();
        assert_eq!(used().await, 280);
    });
}

/// A settling limiter books only slots that are near. A part whose first slot is far waits for it nevertheless.
#[tokio::test(start_paused = true)]
async fn classes_that_settle_wait_for_their_slots() {
    let builder = RateLimitLayer::builder(Quota::per_minute(1000)).max_wait(ms(120_000));
    let layer = builder.share("web", 50).settle_by_hand().build().unwrap();
    let acquire = || layer.limiter().acquire(K).class("web").cost(490);
    let start = Instant::now();
    for _ in 0..2 {
        drop(acquire().await.unwrap());
    }
    assert!(start.elapsed() < ms(61_000), "{:?}", start.elapsed());
}

/// Each class counted all refusals, but of the accepted requests only its own. So the holds of a class that rests doubled.
#[tokio::test(start_paused = true)]
async fn holds_of_a_class_that_rests_do_not_double() {
    let builder = RateLimitLayer::builder(Quota::per_second(50));
    let builder = builder.share("web", 50).share("cron", 10);
    let limiter = builder
        .max_wait(Duration::from_secs(60))
        .build()
        .unwrap()
        .limiter();
    for _ in 0..6 {
        for status in [200, 200, 429] {
            sleep(Duration::from_secs(15)).await;
            let response = Response::builder().status(status).body(()).unwrap();
            let permit = limiter.acquire(K).class("web").await.unwrap();
            permit.begin().unwrap().answered(&Signal::read(&response));
        }
    }
    let start = Instant::now();
    drop(limiter.acquire(K).class("cron").await.unwrap());
    assert!(start.elapsed() < ms(1500), "{:?}", start.elapsed());
}
