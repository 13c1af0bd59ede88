//! The ban guard: it stops requests before the server has seen too many of them fail.

use crate::support;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use http::{Request, Response, StatusCode};
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestCaseResult};
use support::{Failing, count_of, get, ms};
use tokio::time::{Instant, sleep};
use tollgate::service::RateLimit;
use tollgate::stats::{Cause, Event};
use tollgate::store::{
    Lease, LeaseRequest, MemoryStore, Store, StoreError, StoreEvent, StoreListener, StoreReply,
};
use tollgate::{
    AdaptiveThrottleLayer, Guard, Key, Limited, OnStoreError, Quota, RateLimitBuilder,
    RateLimitLayer, Reason, Signal,
};
use tower::{BoxError, Layer, Service, ServiceExt};

const HOUR: Duration = Duration::from_secs(3600);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A server that answers each request with the status that it has now.
#[derive(Clone)]
struct Server {
    status: Arc<AtomicUsize>,
    headers: Arc<Mutex<Vec<(&'static str, &'static str)>>>,
    takes: Arc<AtomicU64>,
    /// When each answer was given, and whether it was bad.
    answers: Arc<Mutex<Vec<(Instant, bool)>>>,
    in_flight: Arc<AtomicUsize>,
}

impl Server {
    fn answering(status: u16) -> Self {
        let server = Server {
            status: Arc::default(),
            headers: Arc::default(),
            takes: Arc::default(),
            answers: Arc::default(),
            in_flight: Arc::default(),
        };
        server.answers(status);
        server
    }

    fn answers(&self, status: u16) {
        self.status.store(usize::from(status), Ordering::SeqCst);
    }

    fn takes(&self, millis: u64) {
        self.takes.store(millis, Ordering::SeqCst);
    }

    fn count(&self) -> usize {
        self.answers.lock().unwrap().len()
    }
}

impl Service<Request<String>> for Server {
    type Response = Response<String>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<String>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<String>) -> Self::Future {
        let server = self.clone();
        server.in_flight.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move {
            let takes = ms(server.takes.load(Ordering::SeqCst));
            if !takes.is_zero() {
                sleep(takes).await;
            }
            let status = server.status.load(Ordering::SeqCst) as u16;
            server.in_flight.fetch_sub(1, Ordering::SeqCst);
            let mut answers = server.answers.lock().unwrap();
            answers.push((Instant::now(), status >= 400));
            let mut response = Response::builder().status(status);
            for (name, value) in server.headers.lock().unwrap().iter() {
                response = response.header(*name, *value);
            }
            Ok(response.body(String::new())?)
        })
    }
}

type Gated = RateLimit<Server>;

async fn call(service: &mut Gated, uri: &str) -> Result<StatusCode, Limited> {
    let answer = service.ready().await.unwrap().call(get(uri)).await;
    match answer {
        Ok(response) => Ok(response.status()),
        Err(error) => Err(Limited::find(&error).expect("only limits fail").clone()),
    }
}

/// Asserts that requests are stopped. Returns for how long.
async fn stopped(service: &mut Gated, uri: &str) -> Duration {
    let limited = call(service, uri).await.unwrap_err();
    assert_eq!(limited.reason(), Some(Reason::Held), "{limited}");
    limited.retry_after().unwrap()
}

/// A layer that never waits and has room for all requests of a test.
fn builder(guard: Guard) -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_second(100_000))
        .max_wait(Duration::ZERO)
        .guard(guard)
}

/// A guard whose budget stays used up for the whole test.
fn guard(bad: u32) -> Guard {
    Guard::new(Quota::new(bad, HOUR * 10))
}

async fn fails(service: &mut Gated, times: u32) {
    for _ in 0..times {
        assert_eq!(call(service, "http://a/").await.unwrap(), 401);
    }
}

fn near(left: Duration, expected: u64) -> bool {
    left <= secs(expected) && left + secs(1) > secs(expected)
}

#[tokio::test(start_paused = true)]
async fn stops_double_for_the_fleet_until_an_hour_is_over() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let server = Server::answering(401);
    let process = || builder(guard(10)).store(store.clone()).build().unwrap();
    let (first, second) = (process(), process());
    let mut processes = [first.layer(server.clone()), second.layer(server.clone())];
    for _ in 0..5 {
        fails(&mut processes[0], 1).await;
        fails(&mut processes[1], 1).await;
    }
    // Each stop is caused by the other process.
    for (trip, stop) in [60, 120, 240].into_iter().enumerate() {
        let before = server.count();
        fails(&mut processes[trip % 2], 1).await;
        for process in &mut processes {
            let left = stopped(process, "http://a/").await;
            assert!(near(left, stop), "stop {trip}: {left:?}");
        }
        assert_eq!(server.count(), before + 1);
        sleep(secs(stop) + ms(1)).await;
    }
    sleep(HOUR).await;
    fails(&mut processes[1], 1).await;
    let left = stopped(&mut processes[0], "http://a/").await;
    assert!(near(left, 60), "{left:?}");

    let trips = |layer: &RateLimitLayer| count_of(&layer.limiter().stats(), "guard_trips");
    assert_eq!((trips(&first), trips(&second)), (2, 2));
    for layer in [&first, &second] {
        assert_eq!(layer.limiter().stats().holds().of(Cause::Guard), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn answers_with_shared_scope_never_count() {
    let discord = Guard::new(Quota::new(5, HOUR)).counts(|status, signal| {
        matches!(status.as_u16(), 401 | 403 | 429) && signal.scope() != Some("shared")
    });
    let server = Server::answering(429);
    let scope = |scope| *server.headers.lock().unwrap() = vec![("x-ratelimit-scope", scope)];
    let layer = builder(discord).max_hold(Duration::ZERO).build().unwrap();
    let mut service = layer.layer(server.clone());
    scope("shared");
    for _ in 0..50 {
        assert_eq!(call(&mut service, "http://a/").await.unwrap(), 429);
    }
    assert_eq!(count_of(&layer.limiter().stats(), "bad_answers"), 0);
    scope("user");
    for _ in 0..6 {
        assert_eq!(call(&mut service, "http://a/").await.unwrap(), 429);
    }
    assert!(near(stopped(&mut service, "http://a/").await, 60));
}

#[tokio::test(start_paused = true)]
async fn good_answers_and_other_errors_do_not_count() {
    let server = Server::answering(200);
    let layer = builder(guard(1)).build().unwrap();
    let mut service = layer.layer(server.clone());
    for status in [200, 304, 400, 404, 500, 502] {
        server.answers(status);
        for _ in 0..5 {
            assert_eq!(call(&mut service, "http://a/").await.unwrap(), status);
        }
    }
    assert_eq!(count_of(&layer.limiter().stats(), "bad_answers"), 0);
}

#[tokio::test(start_paused = true)]
async fn hosts_without_key_function_have_stops_of_their_own() {
    let server = Server::answering(401);
    let mut service = builder(guard(3)).build().unwrap().layer(server.clone());
    fails(&mut service, 4).await;
    stopped(&mut service, "http://a/").await;
    server.answers(200);
    assert_eq!(call(&mut service, "http://b/").await.unwrap(), 200);
}

#[tokio::test(start_paused = true)]
async fn one_request_is_first_after_a_stop() {
    let server = Server::answering(401);
    let layer = builder(guard(3)).max_wait(secs(600)).build().unwrap();
    let mut service = layer.layer(server.clone());
    fails(&mut service, 4).await;
    server.takes(100);
    let requests = |count: usize| {
        let service = service.clone();
        futures::future::join_all((0..count).map(move |_| {
            let mut service = service.clone();
            async move { call(&mut service, "http://a/").await }
        }))
    };
    // The stop of 60 s, then a probe, then a stop of 120 s: the others are still waiting.
    let waiting = tokio::spawn(requests(20));
    sleep(secs(90)).await;
    assert_eq!(server.count(), 5);
    assert_eq!(count_of(&layer.limiter().stats(), "guard_trips"), 2);
    // The next probe is answered well, and lets the others leave.
    server.answers(200);
    let answers = waiting.await.unwrap();
    let good = answers
        .iter()
        .filter(|answer| matches!(answer, Ok(status) if *status == 200));
    assert_eq!(good.count(), 19);
    assert_eq!(server.count(), 24);
}

#[tokio::test(start_paused = true)]
async fn keys_that_count_under_one_are_stopped_together() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let server = Server::answering(401);
    let process = || {
        let guard = guard(4).key(|_| Key::new("our address"));
        let builder = builder(guard).store(store.clone());
        let layer = builder.key(|request| Key::new(request.path())).build();
        layer.unwrap()
    };
    let (first, second) = (process(), process());
    let mut one = first.layer(server.clone());
    let mut other = second.layer(server.clone());
    for path in ["http://a/1", "http://a/2", "http://a/3"] {
        assert_eq!(call(&mut one, path).await.unwrap(), 401);
        server.answers(200);
        assert_eq!(call(&mut other, path).await.unwrap(), 200);
        server.answers(401);
    }
    assert_eq!(call(&mut other, "http://a/3").await.unwrap(), 401);
    assert_eq!(call(&mut one, "http://a/3").await.unwrap(), 401);
    // Paths 1 and 2 are stopped, and path 4, which comes later, in both processes.
    for service in [&mut one, &mut other] {
        for path in ["http://a/1", "http://a/2", "http://a/3", "http://a/4"] {
            assert!(near(stopped(service, path).await, 60), "{path}");
        }
    }
    for layer in [&first, &second] {
        assert_eq!(layer.limiter().stats().holds().of(Cause::Guard), 4);
    }
    // A release of one key ends the stop of all, in both.
    server.answers(200);
    second.limiter().release(Key::new("/1")).await.unwrap();
    for service in [&mut one, &mut other] {
        for path in [
            "http://a/1",
            "http://a/2",
            "http://a/3",
            "http://a/4",
            "http://a/5",
        ] {
            assert_eq!(call(service, path).await.unwrap(), 200, "{path}");
        }
    }
}

/// The upstream has refused a request of one of them before, which holds that key for 20 seconds.
#[tokio::test(start_paused = true)]
async fn a_stop_counts_for_keys_that_are_on_hold_for_less() {
    let limit = Quota::per_second(100_000);
    let one_key = || guard(2).key(|_| Key::new("our address"));
    let limiter = RateLimitLayer::builder(limit).guard(one_key());
    let limiter = limiter.build().unwrap().limiter();
    let throttle = AdaptiveThrottleLayer::builder().guard(one_key());
    let throttle = throttle.build().unwrap().throttle();
    let (held, other) = (Key::new("held"), Key::new("other"));
    let limited = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    let refused = limited.clone().with_retry_after(secs(20));
    let sent = limiter.acquire(held).await.unwrap().begin().unwrap();
    sent.answered(&refused);
    throttle.acquire(held).await.unwrap().answered(&refused);
    for _ in 0..2 {
        let sent = limiter.acquire(other).await.unwrap().begin().unwrap();
        sent.answered(&limited);
        throttle.acquire(other).await.unwrap().answered(&limited);
    }
    for stats in [limiter.stats(), throttle.stats()] {
        assert_eq!(stats.holds().of(Cause::Guard), 2, "{:?}", stats.holds());
    }
}

/// Bad answers count by host, whatever class their requests have, and a stop stops all classes.
#[tokio::test(start_paused = true)]
async fn classes_count_together_and_are_stopped_together() {
    let server = Server::answering(401);
    let layer = RateLimitLayer::builder(Quota::per_second(1000)).share("web", 50);
    let layer = layer.guard(guard(3)).max_wait(secs(5)).build().unwrap();
    let service = layer.layer(server.clone());
    let answer = async |class: &'static str| {
        let mut request = get("http://a/");
        request.extensions_mut().insert(tollgate::Class::new(class));
        service.clone().oneshot(request).await
    };
    for class in ["web", "jobs", "web", "jobs"] {
        assert_eq!(answer(class).await.unwrap().status(), 401);
    }
    for class in ["web", "jobs"] {
        let error = answer(class).await.unwrap_err();
        let limited = Limited::find(&error).unwrap();
        assert_eq!(limited.reason(), Some(Reason::Held), "{class}");
    }
    // A release of the host lets both go on.
    server.answers(200);
    let host = Key::host_hold("a");
    layer.limiter().release(host).await.unwrap();
    for class in ["web", "jobs"] {
        assert_eq!(answer(class).await.unwrap().status(), 200);
    }
}

/// The function that says under which key answers count may use the limiter.
#[tokio::test(start_paused = true)]
async fn the_key_of_a_guard_may_read_the_stats() {
    let limiter = Arc::new(std::sync::OnceLock::<tollgate::Limiter>::new());
    let guard = guard(3).key({
        let limiter = limiter.clone();
        move |key| {
            limiter.get().map(|limiter| limiter.stats());
            key
        }
    });
    let layer = builder(guard).key(|request| Key::new(request.path()));
    let layer = layer.build().unwrap();
    limiter.set(layer.limiter()).unwrap();
    let mut service = layer.layer(Server::answering(401));
    for path in ["http://a/1", "http://a/2", "http://a/1"] {
        assert_eq!(call(&mut service, path).await.unwrap(), 401);
    }
}

#[tokio::test(start_paused = true)]
async fn release_ends_a_stop_and_next_is_the_first_again() {
    let server = Server::answering(401);
    let layer = builder(guard(3)).key(|_| Key::new("k")).build().unwrap();
    let mut service = layer.layer(server.clone());
    fails(&mut service, 4).await;
    stopped(&mut service, "http://a/").await;
    layer.limiter().release(Key::new("k")).await.unwrap();
    fails(&mut service, 1).await;
    assert!(near(stopped(&mut service, "http://a/").await, 60));
}

/// A store in memory whose messages get lost while it is deaf.
#[derive(Default)]
struct Deaf {
    store: Arc<MemoryStore>,
    is_deaf: Arc<AtomicBool>,
    listeners: Mutex<Vec<Arc<Hears>>>,
}

/// Passes on what a store hears.
struct Hears {
    listener: Weak<dyn StoreListener>,
    is_deaf: Arc<AtomicBool>,
}

impl StoreListener for Hears {
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent) {
        if let Some(listener) = self.listener.upgrade()
            && !self.is_deaf.load(Ordering::SeqCst)
        {
            listener.on_event(key, holder, event);
        }
    }
}

impl Deaf {
    /// Hears again, and says that it may have missed something.
    fn recovers(&self) {
        self.is_deaf.store(false, Ordering::SeqCst);
        let listeners = self.listeners.lock().unwrap();
        for hears in listeners.iter().cloned() {
            hears.on_event(Key::ALL, 0, StoreEvent::EventsMissed);
        }
    }
}

impl Store for Deaf {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.store.lease(request)
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        let is_deaf = self.is_deaf.clone();
        let hears = Arc::new(Hears { listener, is_deaf });
        let heard: Weak<dyn StoreListener> = Arc::downgrade(&hears) as _;
        self.store.listen(heard);
        self.listeners.lock().unwrap().push(hears);
    }
}

/// Otherwise the requests would go on, and the guard would count none of their answers.
#[tokio::test(start_paused = true)]
async fn a_release_whose_message_was_lost_ends_the_stop() {
    let deaf = Arc::new(Deaf::default());
    let key = Key::new("k");
    let process = |store: Arc<dyn Store>| {
        let builder = builder(guard(3)).key(move |_| key).store(store);
        builder.build().unwrap()
    };
    let (one, other) = (process(deaf.store.clone()), process(deaf.clone()));
    let mut service = other.layer(Server::answering(401));
    assert_eq!(call(&mut service, "http://a/").await.unwrap(), 401);
    fails(&mut one.layer(Server::answering(401)), 3).await;
    assert!(near(stopped(&mut service, "http://a/").await, 60));
    deaf.is_deaf.store(true, Ordering::SeqCst);
    one.limiter().release(key).await.unwrap();
    deaf.recovers();
    sleep(secs(2)).await;
    // The budget is used up, so the first bad answer trips the guard again.
    fails(&mut service, 1).await;
    assert!(near(stopped(&mut service, "http://a/").await, 60));
    // A stop whose message is lost goes on.
    deaf.recovers();
    sleep(secs(2)).await;
    assert!(near(stopped(&mut service, "http://a/").await, 58));
}

#[tokio::test(start_paused = true)]
async fn answers_that_were_on_their_way_trip_once() {
    let server = Server::answering(401);
    server.takes(100);
    let layer = builder(guard(3)).build().unwrap();
    let service = layer.layer(server.clone());
    let calls = (0..20).map(|_| {
        let mut service = service.clone();
        async move { call(&mut service, "http://a/").await.is_ok() }
    });
    assert!(
        futures::future::join_all(calls)
            .await
            .into_iter()
            .all(|sent| sent)
    );
    let stats = layer.limiter().stats();
    assert_eq!(
        ["bad_answers", "guard_trips"].map(|name| count_of(&stats, name)),
        [20, 1]
    );
    assert!(near(stopped(&mut service.clone(), "http://a/").await, 60));
}

#[tokio::test(start_paused = true)]
async fn stated_wait_beyond_max_hold_is_obeyed() {
    let server = Server::answering(429);
    *server.headers.lock().unwrap() = vec![("retry-after", "1200")];
    let mut guarded = builder(guard(100)).build().unwrap().layer(server.clone());
    assert_eq!(call(&mut guarded, "http://a/").await.unwrap(), 429);
    assert!(near(stopped(&mut guarded, "http://a/").await, 1200));
    // It stops for less, and the caller is told what the server stated.
    let bounded = guard(100).stop(secs(60), secs(300));
    let mut guarded = builder(bounded).build().unwrap().layer(server.clone());
    assert_eq!(call(&mut guarded, "http://a/").await.unwrap(), 429);
    assert!(near(stopped(&mut guarded, "http://a/").await, 1200));
    let unguarded = RateLimitLayer::builder(Quota::per_second(100)).max_wait(Duration::ZERO);
    let mut unguarded = unguarded.build().unwrap().layer(server.clone());
    assert_eq!(call(&mut unguarded, "http://a/").await.unwrap(), 429);
    assert!(near(stopped(&mut unguarded, "http://a/").await, 1200));
}

#[tokio::test(start_paused = true)]
async fn guard_counts_alone_while_the_store_is_away() {
    for later in [false, true] {
        let store = Arc::new(Failing::away(later));
        let server = Server::answering(401);
        let builder = builder(guard(5)).store(store);
        let layer = builder.on_store_error(OnStoreError::FailOpen);
        let layer = layer.max_wait(secs(5)).build().unwrap();
        let mut service = layer.layer(server.clone());
        for _ in 0..6 {
            fails(&mut service, 1).await;
            // A store that fails later is waited for by a task.
            sleep(ms(1)).await;
        }
        let left = stopped(&mut service, "http://a/").await;
        assert!(near(left, 60), "{left:?}");
    }
}

/// The guard hears the holds of all keys of its store, also of those that it does not count.
#[tokio::test(start_paused = true)]
async fn holds_of_other_keys_cost_no_look_at_all_keys() {
    let store = Arc::new(MemoryStore::default());
    let looks = Arc::new(AtomicUsize::new(0));
    let count = looks.clone();
    let guard = guard(5).key(move |key| {
        count.fetch_add(1, Ordering::SeqCst);
        key
    });
    let layer = builder(guard).store(store.clone());
    let guarded = layer.build().unwrap().limiter();
    for tenant in 0..200_u32 {
        let key = Key::new(tenant.to_be_bytes());
        drop(guarded.acquire(key).await.unwrap());
    }
    let layer = RateLimitLayer::builder(Quota::per_second(1)).store(store);
    let other = layer.build().unwrap().limiter();
    let before = looks.load(Ordering::SeqCst);
    for key in 0..100 {
        let key = Key::new(format!("other {key}"));
        other.hold_for(key, secs(30)).await.unwrap();
    }
    let looks = looks.load(Ordering::SeqCst) - before;
    assert!(looks <= 100, "{looks} for 100 holds");
}

/// A store in memory that can be away.
#[derive(Default)]
struct Switched {
    store: MemoryStore,
    is_away: AtomicBool,
}

impl Store for Switched {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        if self.is_away.load(Ordering::SeqCst) {
            let away = std::io::Error::other("no route");
            return StoreReply::Ready(Err(StoreError::Away(Arc::new(away))));
        }
        self.store.lease(request)
    }
}

/// An outage does not begin with a whole quota.
#[tokio::test(start_paused = true)]
async fn answers_before_an_outage_count_in_it() {
    let store = Arc::new(Switched::default());
    let layer = builder(guard(20)).store(store.clone());
    let layer = layer.on_store_error(OnStoreError::FailOpen).build();
    let mut service = layer.unwrap().layer(Server::answering(401));
    fails(&mut service, 8).await;
    store.is_away.store(true, Ordering::SeqCst);
    let mut more = 0;
    while call(&mut service, "http://a/").await.is_ok() {
        more += 1;
        assert!(more <= 13, "{more} bad answers after 8 of 20");
    }
}

#[tokio::test(start_paused = true)]
async fn guard_counts_while_its_layer_is_drained() {
    let server = Server::answering(401);
    server.takes(1000);
    let layer = builder(guard(3)).build().unwrap();
    let service = layer.layer(server.clone());
    let calls = (0..5).map(|_| {
        let mut service = service.clone();
        tokio::spawn(async move { call(&mut service, "http://a/").await })
    });
    let calls: Vec<_> = calls.collect();
    sleep(ms(10)).await;
    layer.limiter().drain(secs(5)).await.unwrap();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), 401);
    }
    let stats = layer.limiter().stats();
    assert_eq!(
        ["bad_answers", "guard_trips"].map(|name| count_of(&stats, name)),
        [5, 1]
    );
    let refused = call(&mut service.clone(), "http://a/").await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::Draining));
}

#[tokio::test(start_paused = true)]
async fn throttle_has_a_guard_too() {
    let server = Server::answering(401);
    let layer = AdaptiveThrottleLayer::builder()
        .key(|request| Key::new(request.path()))
        .max_wait(secs(5))
        .guard(guard(5).key(|_| Key::new("our address")))
        .build()
        .unwrap();
    let mut service = layer.layer(server.clone());
    let mut bad = 0;
    let limited = loop {
        match service.ready().await.unwrap().call(get("http://a/1")).await {
            Ok(response) => assert_eq!(response.status(), 401),
            Err(error) => break Limited::find(&error).unwrap().clone(),
        }
        bad += 1;
    };
    assert_eq!((bad, limited.reason()), (6, Some(Reason::Held)));
    assert!(near(limited.retry_after().unwrap(), 60));
    let told = layer.throttle().explain(Key::new("/1")).to_string();
    assert!(
        told.contains("the ban guard has put its key on hold"),
        "{told}"
    );
    // A key that comes later is stopped as well, until a release.
    let error = service.ready().await.unwrap().call(get("http://a/2")).await;
    assert!(error.is_err());
    let stats = layer.throttle().stats();
    assert_eq!(
        ["bad_answers", "guard_trips"].map(|name| count_of(&stats, name)),
        [6, 1]
    );
    assert_eq!(stats.holds().of(Cause::Guard), 2);
    let told = layer.throttle().explain(Key::new("/2")).to_string();
    assert!(
        told.contains("the ban guard has put its key on hold"),
        "{told}"
    );
    server.answers(200);
    layer.throttle().release(Key::new("/2")).await.unwrap();
    for path in ["http://a/1", "http://a/2"] {
        assert!(service.ready().await.unwrap().call(get(path)).await.is_ok());
    }
    let by_hand = layer.throttle().acquire(Key::new("/1")).await.unwrap();
    let refused = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    by_hand.answered(&refused);
    assert_eq!(count_of(&layer.throttle().stats(), "guard_trips"), 2);
}

/// Its caller may end with a timeout while the register is written.
#[tokio::test(start_paused = true)]
async fn a_dropped_release_of_a_throttle_ends_the_stop_of_the_fleet() {
    let store = Arc::new(MemoryStore::default());
    let process = || {
        let guard = guard(1).key(|_| Key::new("our address"));
        let builder = AdaptiveThrottleLayer::builder().guard(guard);
        let layer = builder.store(store.clone()).build().unwrap();
        layer.throttle()
    };
    let (one, other) = (process(), process());
    let forbidden = Signal::default().with_refusal(StatusCode::FORBIDDEN);
    for _ in 0..2 {
        let permit = one.acquire(Key::ALL).await.unwrap();
        permit.answered(&forbidden);
    }
    sleep(secs(2)).await;
    assert!(other.acquire(Key::ALL).await.is_err());
    assert!(one.release(Key::ALL).now_or_never().is_none());
    sleep(secs(2)).await;
    // A key that gets its state now would begin on hold.
    for throttle in [one, other] {
        let permit = throttle.acquire(Key::new("later")).await.unwrap();
        permit.give_back();
    }
}

#[test]
fn a_guard_counts_a_rate() {
    for quota in [
        Quota::in_flight(3),
        Quota::per_minute(100).and(Quota::in_flight(3)),
        Quota::per_minute(100).of("tokens"),
    ] {
        let builder = RateLimitLayer::builder(Quota::per_second(50)).guard(Guard::new(quota));
        assert!(builder.build().is_err(), "{quota}");
    }
}

#[tokio::test(start_paused = true)]
async fn permits_by_hand_count_refusals() {
    let layer = builder(guard(2)).max_hold(Duration::ZERO).build().unwrap();
    let limiter = layer.limiter();
    for _ in 0..3 {
        let permit = limiter.acquire(Key::ALL).await.unwrap();
        let refused = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
        permit.begin().unwrap().answered(&refused);
    }
    let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::Held));
}

/// A server may refuse in the body of a response whose status is 200.
#[tokio::test(start_paused = true)]
async fn refusals_with_a_status_of_success_count() {
    let refused = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    let dialect = move |_: Key, _: &_, _| refused.clone();
    let server = Server::answering(200);
    let limit = builder(guard(2)).max_hold(Duration::ZERO);
    let limit = limit.dialect(dialect.clone()).build().unwrap();
    let throttle = AdaptiveThrottleLayer::builder()
        .pace(|| tollgate::pace::NoPacing)
        .guard(guard(2))
        .dialect(dialect)
        .build()
        .unwrap();
    for _ in 0..3 {
        let request = || get("http://a/");
        limit
            .layer(server.clone())
            .oneshot(request())
            .await
            .unwrap();
        throttle
            .layer(server.clone())
            .oneshot(request())
            .await
            .unwrap();
    }
    let stats = [limit.limiter().stats(), throttle.throttle().stats()];
    let bad = stats.map(|stats| count_of(&stats, "bad_answers"));
    assert_eq!(bad, [3, 3]);
}

#[tokio::test(start_paused = true)]
async fn events_and_stats_say_what_happened_without_the_key() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let handler = told.clone();
    let builder = builder(guard(2))
        .name("github")
        .key(|_| Key::new("secret token"));
    let layer = builder.on_event(move |event| {
        let is_trip = matches!(event, Event::GuardTripped { trip: 1, .. });
        handler.lock().unwrap().push((is_trip, event.to_string()));
    });
    let layer = layer.build().unwrap();
    let mut service = layer.layer(Server::answering(403));
    for _ in 0..3 {
        assert_eq!(call(&mut service, "http://a/").await.unwrap(), 403);
    }
    let told = std::mem::take(&mut *told.lock().unwrap());
    assert_eq!(
        told.iter().filter(|(is_trip, _)| *is_trip).count(),
        1,
        "{told:?}"
    );
    assert!(
        told.iter()
            .any(|(_, text)| text.contains("stopped for 60s (stop 1)")),
        "{told:?}"
    );
    assert!(
        !told.iter().any(|(_, text)| text.contains("secret")),
        "{told:?}"
    );
    let counted = tollgate::stats::all();
    let counted = counted
        .iter()
        .filter(|stats| stats.name() == "github guard");
    let passed: Vec<_> = counted.map(|stats| stats.requests().passed).collect();
    assert_eq!(passed, [2]);
}

#[tokio::test(start_paused = true)]
async fn a_key_is_stopped_although_the_handler_of_its_trip_panics() {
    let layer = builder(guard(1)).on_event(|event| {
        assert!(!matches!(event, Event::GuardTripped { .. }), "once");
    });
    let mut service = layer.build().unwrap().layer(Server::answering(401));
    fails(&mut service, 1).await;
    let tripped = AssertUnwindSafe(call(&mut service, "http://a/"));
    _ = tripped.catch_unwind().await;
    assert!(near(stopped(&mut service, "http://a/").await, 60));
}

#[test]
fn settings_out_of_range_are_errors() {
    let invalid = [
        Guard::new(Quota::in_flight(5)),
        Guard::new(Quota::per_minute(5).of("tokens")),
        guard(5).stop(Duration::ZERO, HOUR),
        guard(5).stop(secs(61), secs(60)),
        guard(5).stop(secs(60), HOUR * 25),
    ];
    for guard in invalid {
        let throttle = AdaptiveThrottleLayer::builder()
            .guard(guard.clone())
            .build();
        for error in [builder(guard).build().map(drop), throttle.map(drop)] {
            let error = error.unwrap_err();
            assert!(error.to_string().starts_with("guard is "), "{error}");
        }
    }
    let zero = builder(guard(0)).build().unwrap_err();
    assert!(zero.to_string().contains("a count of 0"), "{zero}");
}

/// A call of a history.
#[derive(Clone, Debug)]
struct Call {
    /// In milliseconds after the one before.
    after: u64,
    takes: u64,
    is_bad: bool,
    process: usize,
}

fn history() -> impl Strategy<Value = Vec<Call>> {
    let call = (
        prop_oneof![6 => 0u64..300, 1 => 1000u64..40_000],
        0u64..2000,
        prop::bool::weighted(0.9),
        0usize..2,
    );
    let call = call.prop_map(|(after, takes, is_bad, process)| Call {
        after,
        takes,
        is_bad,
        process,
    });
    prop::collection::vec(call, 1..300)
}

/// In any window, the bad answers are at most the budget, and at each trip those that were in flight.
async fn is_never_over(calls: Vec<Call>, budget: u32) -> TestCaseResult {
    let window = secs(60);
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let server = Server::answering(200);
    let trips = Arc::new(Mutex::new(Vec::new()));
    let process = || {
        let (log, trips) = (server.clone(), trips.clone());
        let guard = Guard::new(Quota::new(budget, window)).stop(secs(5), secs(40));
        let builder = builder(guard).store(store.clone()).max_wait(secs(20));
        let builder = builder.on_event(move |event| {
            if let Event::GuardTripped { .. } = event {
                let in_flight = log.in_flight.load(Ordering::SeqCst);
                trips.lock().unwrap().push((Instant::now(), in_flight + 1));
            }
        });
        builder.build().unwrap().layer(server.clone())
    };
    let processes = [process(), process()];
    let mut tasks = Vec::new();
    for Call {
        after,
        takes,
        is_bad,
        process,
    } in calls
    {
        sleep(ms(after)).await;
        server.takes(takes);
        server.answers(if is_bad { 401 } else { 200 });
        let mut service = processes[process].clone();
        tasks.push(tokio::spawn(async move {
            drop(call(&mut service, "http://a/").await);
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let answers = server.answers.lock().unwrap().clone();
    let bad: Vec<Instant> = answers
        .iter()
        .filter(|answer| answer.1)
        .map(|answer| answer.0)
        .collect();
    let trips = trips.lock().unwrap().clone();
    for (index, start) in bad.iter().enumerate() {
        let within = |at: &Instant| *at >= *start && *at < *start + window;
        let count = bad[index..].iter().filter(|at| within(at)).count();
        // Calls in flight at a trip shortly before the window may be answered in it.
        let near = |at: &Instant| *at + secs(2) >= *start && *at < *start + window;
        let beyond: usize = trips
            .iter()
            .filter(|(at, _)| near(at))
            .map(|trip| trip.1)
            .sum();
        prop_assert!(
            count <= budget as usize + beyond,
            "{} bad answers from {:?}: {:?}",
            count,
            start,
            trips
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..histories::config(16)
    })]

    #[test]
    fn bad_answers_never_exceed_the_budget(calls in history(), budget in 1u32..30) {
        let runtime = crate::support::paused_runtime();
        runtime.block_on(is_never_over(calls, budget))?;
    }
}

/// The store knows of a release of the key from before the stop, and of no hold since.
#[tokio::test(start_paused = true)]
async fn a_key_without_state_is_stopped_after_a_release() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let process = || {
        let builder = builder(guard(2).key(|_| Key::new("all"))).store(store.clone());
        let by_host = builder.key(|request| Key::new(request.host().unwrap()));
        by_host.build().unwrap()
    };
    let (first, second) = (process(), process());
    let server = Server::answering(401);
    let limiter = first.limiter();
    limiter.hold_for(Key::new("b"), HOUR).await.unwrap();
    limiter.release(Key::new("b")).await.unwrap();
    fails(&mut first.layer(server.clone()), 3).await;
    // The second process has had no request of this key. After a second, a request asks the store.
    let mut second = second.layer(server);
    stopped(&mut second, "http://b/").await;
    sleep(secs(2)).await;
    stopped(&mut second, "http://b/").await;
}
