//! Refusals of one kind of requests: a server always refuses them, and accepts all others. Under a paused clock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tollgate::pace::NoPacing;
use tollgate::stats::{Cause, Event};
use tollgate::store::{Background, Lease, LeaseRequest, MemoryStore, Store, StoreReply, Task};
use tollgate::{
    AdaptiveThrottleLayer, Error, Key, Limited, Quota, RateLimitBuilder, RateLimitLayer, Reason,
    by_header,
};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
/// 25 a second.
const GAP: Duration = Duration::from_millis(40);

/// The holds of a limiter or throttle, and why.
type Holds = Arc<Mutex<Vec<(Cause, Duration)>>>;

/// What a fleet of callers saw.
#[derive(Debug, Default)]
struct Seen {
    /// How long the innocents waited for their responses.
    waits: Vec<Duration>,
    /// How many innocents got an error or a refusal.
    failed: usize,
    /// How often the poison was refused by the server, and here because of its kind.
    refused: usize,
    kept_back: usize,
    others: Vec<String>,
}

impl Seen {
    fn p(&self, percent: usize) -> Duration {
        let mut waits = self.waits.clone();
        waits.sort();
        waits[(waits.len() - 1) * percent / 100]
    }
}

fn request(method: &str, path: &str) -> Request<()> {
    let url = format!("http://example.com{path}");
    Request::builder().method(method).uri(url).body(()).unwrap()
}

/// Requests of innocent callers, one each `gap`, and of each of the `poisons` one a second, for so many seconds.
async fn run<S>(
    service: S,
    poisons: &[(&'static str, &'static str)],
    gap: Duration,
    seconds: u32,
) -> Seen
where
    S: Service<Request<()>, Response = Response<()>> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    S::Future: Send,
{
    let seen = Arc::new(Mutex::new(Seen::default()));
    let start = Instant::now();
    let mut calls = JoinSet::new();
    let innocents = (0..).map(|number| start + gap * number);
    for at in innocents.take_while(|at| *at < start + seconds * SECOND) {
        let (service, seen) = (service.clone(), seen.clone());
        calls.spawn(async move {
            sleep_until(at).await;
            let answer = service.oneshot(request("GET", "/v1/good")).await;
            let mut seen = seen.lock().unwrap();
            seen.waits.push(at.elapsed());
            seen.failed += usize::from(!answer.is_ok_and(|answer| answer.status() == 200));
        });
    }
    for (number, (method, path)) in (0..seconds).flat_map(|n| poisons.iter().map(move |p| (n, *p)))
    {
        let (service, seen) = (service.clone(), seen.clone());
        calls.spawn(async move {
            sleep_until(start + number * SECOND + 37 * MS).await;
            let answer = service.oneshot(request(method, path)).await;
            let mut seen = seen.lock().unwrap();
            match answer.map_err(Into::into) {
                Ok(answer) if answer.status() == 429 => seen.refused += 1,
                Err(error) => match Limited::find(&*error) {
                    Some(Limited::Local {
                        reason: Reason::HeldKind,
                        ..
                    }) => seen.kept_back += 1,
                    _ => seen.others.push(error.to_string()),
                },
                Ok(answer) => seen.others.push(answer.status().to_string()),
            }
        });
    }
    while let Some(call) = calls.join_next().await {
        call.unwrap();
    }
    std::mem::take(&mut *seen.lock().unwrap())
}

/// What a server states about its refusals.
#[derive(Clone, Copy, Debug)]
enum States {
    Nothing,
    RetryAfter,
    /// A wait of so many seconds.
    Wait(u32),
    /// And what is left, in each response.
    Headers,
}

/// Refuses what `is_refused` says, and answers all else in 20 ms.
fn server_that(
    states: States,
    is_refused: impl Fn(&Request<()>) -> bool + Clone + Send + 'static,
) -> impl Service<Request<()>, Response = Response<()>, Error = Error, Future: Send>
+ Clone
+ Send
+ 'static {
    service_fn(move |request: Request<()>| {
        let is_refused = is_refused(&request);
        let mut response = Response::builder().status(if is_refused { 429 } else { 200 });
        if matches!(states, States::Headers) {
            response = response
                .header("ratelimit-limit", 1000)
                .header("ratelimit-remaining", 900);
            response = response.header("ratelimit-reset", 1);
        }
        if is_refused && !matches!(states, States::Nothing) {
            let wait = if let States::Wait(seconds) = states {
                seconds
            } else {
                1
            };
            response = response.header("retry-after", wait);
        }
        async move {
            sleep(20 * MS).await;
            Ok(response.body(()).unwrap())
        }
    })
}

fn server(
    is_refused: impl Fn(&Request<()>) -> bool + Clone + Send + 'static,
) -> impl Service<Request<()>, Response = Response<()>, Error = Error, Future: Send>
+ Clone
+ Send
+ 'static {
    server_that(States::Nothing, is_refused)
}

/// Returns a listener that notes holds.
fn noting(holds: &Holds) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
    let holds = holds.clone();
    move |event| {
        if let Event::Held { cause, left, .. } = event {
            holds.lock().unwrap().push((*cause, *left));
        }
    }
}

/// Returns for how long refusals held the key itself.
fn held_of_key(holds: &Holds) -> Duration {
    let holds = holds.lock().unwrap();
    let of_key = holds.iter().filter(|(cause, _)| *cause == Cause::Upstream);
    of_key.map(|(_, left)| *left).sum()
}

fn builder() -> (RateLimitBuilder, Holds) {
    let holds = Holds::default();
    let builder = RateLimitLayer::builder(Quota::per_second(50)).on_event(noting(&holds));
    (builder, holds)
}

#[tokio::test(start_paused = true)]
async fn poison_stops_only_its_kind() {
    for poisons in [
        &[("POST", "/v1/bad")][..],
        &[("GET", "/v1/bad")],
        &[
            ("GET", "/v1/bad"),
            ("POST", "/v1/bad"),
            ("DELETE", "/v1/bad"),
        ],
    ] {
        let (builder, holds) = builder();
        let layer = ServiceBuilder::new().layer(builder.build().unwrap());
        let service = layer.service(server(|request| request.uri().path() == "/v1/bad"));
        let seen = run(service, poisons, GAP, 180).await;
        let held = held_of_key(&holds);
        let holds = holds.lock().unwrap();
        println!(
            "{poisons:?}: p50 {:?} p99 {:?} failed {} key held {held:?}, poison {} {} {}; holds {}",
            seen.p(50),
            seen.p(99),
            seen.failed,
            seen.refused,
            seen.kept_back,
            seen.others.len(),
            holds.len()
        );
        assert_eq!((seen.failed, &seen.others[..]), (0, &[][..]));
        assert!(seen.refused > 3 && seen.kept_back > 0);
        assert!(held < 9 * SECOND, "{held:?}");
        assert!(seen.p(97) <= 22 * MS);
    }
}

fn throttle() -> (AdaptiveThrottleLayer, Holds) {
    let holds = Holds::default();
    let builder = AdaptiveThrottleLayer::builder().on_event(noting(&holds));
    (builder.build().unwrap(), holds)
}

#[tokio::test(start_paused = true)]
async fn a_throttle_without_holds_keeps_no_kind_back() {
    let builder = AdaptiveThrottleLayer::builder;
    let without_holds = [
        builder().pace(|| NoPacing),
        builder().max_hold(Duration::ZERO),
    ];
    for builder in without_holds {
        let holds = Holds::default();
        let layer = builder.on_event(noting(&holds)).build().unwrap();
        let server = server(|request| request.uri().path() == "/v1/bad");
        let service = ServiceBuilder::new().layer(layer).service(server);
        let seen = run(service, &[("POST", "/v1/bad")], GAP, 30).await;
        assert_eq!((seen.refused, seen.kept_back), (30, 0), "{:?}", seen.others);
        let holds = holds.lock().unwrap();
        assert!(
            holds.iter().all(|(cause, _)| *cause != Cause::Kind),
            "{holds:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn poison_stops_only_its_kind_at_a_throttle() {
    for is_retrying in [false, true] {
        let (layer, holds) = throttle();
        let server = server(|request| request.uri().path() == "/v1/bad");
        let poisons = &[("POST", "/v1/bad")];
        let seen = match is_retrying {
            false => {
                run(
                    ServiceBuilder::new().layer(layer).service(server),
                    poisons,
                    GAP,
                    180,
                )
                .await
            }
            true => {
                let layer = layer.retrying();
                run(
                    ServiceBuilder::new().layer(layer).service(server),
                    poisons,
                    GAP,
                    180,
                )
                .await
            }
        };
        let held = held_of_key(&holds);
        let holds = holds.lock().unwrap();
        println!(
            "{is_retrying} p50 {:?} p97 {:?} p99 {:?} failed {} key held {held:?}, poison {} {} {}; holds {}",
            seen.p(50),
            seen.p(97),
            seen.p(99),
            seen.failed,
            seen.refused,
            seen.kept_back,
            seen.others.len(),
            holds.len()
        );
        assert_eq!((seen.failed, &seen.others[..]), (0, &[][..]));
        assert!(held < 9 * SECOND, "{held:?}");
        assert!(seen.p(95) <= 22 * MS);
    }
}

/// A store in memory that other processes share and that answers after 5 ms.
struct Shared(MemoryStore);

impl Background for Shared {
    fn spawn(&self, task: Task) {
        tokio::spawn(task);
    }
}

impl Store for Shared {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.0)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let StoreReply::Ready(lease) = self.0.lease(request) else {
            unreachable!("memory answers at once")
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(5 * MS).await;
            lease
        }))
    }

    fn background(&self) -> Option<&dyn Background> {
        Some(self)
    }
}

/// Requests of several keys wait in sets. Those of a kind on hold wait in one of their own.
#[tokio::test(start_paused = true)]
async fn poison_of_several_keys_stops_only_its_kind() {
    let store: Arc<dyn Store> = Arc::new(Shared(MemoryStore::default()));
    let (builder, holds) = builder();
    let of_path = RateLimitLayer::builder(Quota::per_second(60))
        .key(|_| Key::new("all paths"))
        .store(store.clone())
        .build()
        .unwrap();
    let layer = builder.store(store).build().unwrap().and(of_path);
    let service = ServiceBuilder::new()
        .layer(layer)
        .service(server_that(States::Wait(10), |request| {
            request.uri().path() == "/v1/bad"
        }));
    let seen = run(service, &[("POST", "/v1/bad")], GAP, 180).await;
    let held = held_of_key(&holds);
    println!(
        "p50 {:?} p80 {:?} p90 {:?} failed {} key held {held:?}, poison {} {} {:?}",
        seen.p(50),
        seen.p(80),
        seen.p(90),
        seen.failed,
        seen.refused,
        seen.kept_back,
        seen.others
    );
    assert_eq!((seen.failed, &seen.others[..]), (0, &[][..]));
    assert!(seen.refused > 3 && seen.kept_back > 0);
    // Until others were accepted nothing tells that a refusal was about a kind, so some hold the keys for seconds, as with one key.
    assert!(seen.p(80) <= 60 * MS, "{:?}", seen.p(80));
}

#[tokio::test(start_paused = true)]
async fn poison_of_one_process_stops_no_other() {
    const PROCESSES: usize = 20;
    for states in [States::Nothing, States::RetryAfter, States::Headers] {
        for poisons in [0, 1, 3] {
            let store: Arc<dyn Store> = Arc::new(Shared(MemoryStore::default()));
            let (mut services, mut of_key) = (Vec::new(), Vec::new());
            for _ in 0..PROCESSES {
                let (builder, holds) = builder();
                let layer =
                    ServiceBuilder::new().layer(builder.store(store.clone()).build().unwrap());
                services.push(layer.service(server_that(states, |request| {
                    request.uri().path() != "/v1/good"
                })));
                of_key.push(holds);
            }
            let all = [
                ("POST", "/v1/bad"),
                ("POST", "/v1/worse"),
                ("GET", "/v1/worst"),
            ];
            let others = services[1..]
                .iter()
                .map(|service| run(service.clone(), &[], SECOND, 120));
            let (first, others) = tokio::join!(
                run(services[0].clone(), &all[..poisons], SECOND, 120),
                futures::future::join_all(others)
            );
            let mut waits: Vec<_> = others
                .iter()
                .chain([&first])
                .flat_map(|seen| &seen.waits)
                .collect();
            waits.sort();
            let slow = waits.iter().filter(|wait| ***wait > 30 * MS).count();
            let failed: usize = others
                .iter()
                .chain([&first])
                .map(|seen| seen.failed + seen.others.len())
                .sum();
            let held = held_of_key(&of_key[0]);
            println!(
                "{states:?}, {poisons} poisons: p50 {:?} p99 {:?}, {slow} of {} slow; poison {} {}; key held {held:?}",
                waits[waits.len() / 2],
                waits[waits.len() * 99 / 100],
                waits.len(),
                first.refused,
                first.kept_back
            );
            assert_eq!(failed, 0);
            assert!(*waits[waits.len() / 2] <= 27 * MS);
            assert!(
                held <= 8 * SECOND && slow * 10 < waits.len(),
                "{held:?}, {slow}"
            );
        }
    }
}

/// A limit of all requests, of which the server says nothing: it is the key's.
#[tokio::test(start_paused = true)]
async fn a_limit_of_all_requests_is_the_key() {
    for kinds in [1, 5] {
        let (builder, holds) = builder();
        let lately = Arc::new(Mutex::new(Vec::<Instant>::new()));
        let is_refused = {
            let lately = lately.clone();
            move |_: &Request<()>| {
                let mut lately = lately.lock().unwrap();
                lately.retain(|at| at.elapsed() < SECOND);
                let is_full = lately.len() >= 20;
                if !is_full {
                    lately.push(Instant::now());
                }
                is_full
            }
        };
        let layer = builder.max_wait(5 * SECOND).build().unwrap();
        let service = ServiceBuilder::new()
            .layer(layer)
            .service(server(is_refused));
        let mut calls = JoinSet::new();
        let start = Instant::now();
        for number in 0..3000 {
            let service = service.clone();
            calls.spawn(async move {
                sleep_until(start + number * 33 * MS).await;
                let path = match kinds {
                    1 => format!("/users/{number}"),
                    _ => format!("/k{}/{number}", number % kinds),
                };
                let answer = service.oneshot(request("GET", &path)).await;
                answer.is_ok_and(|answer| answer.status() == 429)
            });
        }
        let mut refused = 0;
        while let Some(call) = calls.join_next().await {
            refused += usize::from(call.unwrap());
        }
        let holds = holds.lock().unwrap();
        let of_kinds = holds
            .iter()
            .filter(|(cause, _)| *cause == Cause::Kind)
            .count();
        println!(
            "{kinds} kinds: {refused} refused, {} holds, {of_kinds} of kinds",
            holds.len()
        );
        assert!(of_kinds * 4 <= holds.len(), "{of_kinds} of {}", holds.len());
        assert!(kinds > 1 || of_kinds == 0);
    }
}

/// A credential is retired: its refusals are not those of the new one, which has a key of its own.
#[tokio::test(start_paused = true)]
async fn refusals_of_a_retired_credential_hold_no_other() {
    let is_old = |request: &Request<()>| request.headers()["authorization"] == "old";
    let layer = RateLimitLayer::builder(Quota::per_second(50))
        .key(by_header(AUTHORIZATION))
        .build()
        .unwrap();
    let layer = ServiceBuilder::new().layer(layer);
    let service = layer.service(server_that(States::RetryAfter, is_old));
    let with = |token: &'static str| {
        let mut request = request("GET", "/");
        let token = HeaderValue::from_static(token);
        request.headers_mut().insert(AUTHORIZATION, token);
        service.clone().oneshot(request)
    };
    let late = tokio::spawn(with("old"));
    assert_eq!(with("old").await.unwrap().status(), 429);
    let start = Instant::now();
    for _ in 0..3 {
        assert_eq!(with("new").await.unwrap().status(), 200);
    }
    assert_eq!(late.await.unwrap().unwrap().status(), 429);
    assert_eq!(with("new").await.unwrap().status(), 200);
    assert!(start.elapsed() < SECOND / 5);
}

/// The server states long waits for the kind. The first holds the key, until its end or until a probe is accepted.
#[tokio::test(start_paused = true)]
async fn stated_waits_of_a_kind_hold_the_key_once() {
    for wait in [5, 59, 60, 61, 3600] {
        let server = server_that(States::Wait(wait), |request| request.method() == "POST");
        let poisons = &[("POST", "/v1/bad")];
        let (builder, holds) = builder();
        let layer = ServiceBuilder::new().layer(builder.max_wait(MS).build().unwrap());
        let seen = run(layer.service(server), poisons, SECOND / 10, 1500).await;
        let held: Vec<_> = std::mem::take(&mut *holds.lock().unwrap());
        let of_key = held
            .iter()
            .filter(|(cause, _)| *cause == Cause::Upstream)
            .count();
        println!(
            "{wait} s: {} of {} innocents failed, {of_key} holds of the key of {}",
            seen.failed,
            seen.waits.len(),
            held.len()
        );
        assert!(of_key <= 2, "{held:?}");
        assert!(seen.failed <= 650, "{}", seen.failed);
    }
}

/// An operator releases a key that is on hold for a moment more. In a store in memory, the message of that comes before the reply,
/// and looks as if a request had been accepted. No kind is held at its next refusal.
#[tokio::test(start_paused = true)]
async fn release_near_the_end_of_a_hold_accepts_no_kind() {
    let builder = builder().0.key(|_| Key::new("account"));
    let layer = builder.max_wait(60 * SECOND).build().unwrap();
    let limiter = layer.limiter();
    let bad = server_that(States::Wait(30), |request| request.method() == "POST");
    let service = ServiceBuilder::new().layer(layer).service(bad);
    let call = |method| service.clone().oneshot(request(method, "/v1/bad"));
    assert_eq!(call("POST").await.unwrap().status(), 429);
    assert_eq!(call("POST").await.unwrap().status(), 429);
    sleep(29 * SECOND + 500 * MS).await;
    limiter.release(Key::new("account")).await.unwrap();
    assert_eq!(call("POST").await.unwrap().status(), 429);
    // The key is on hold, and not its kind.
    let get = tokio::spawn(call("GET"));
    sleep(SECOND).await;
    assert!(!get.is_finished());
}

/// An operator releases the key, in a process that has never seen a request: no kind is held then, until it is refused again.
#[tokio::test(start_paused = true)]
async fn release_by_another_process_ends_holds_of_kinds() {
    let store: Arc<dyn Store> = Arc::new(Shared(MemoryStore::default()));
    let [layer, operator] = [(); 2].map(|()| {
        let builder = builder().0.key(|_| Key::new("account"));
        let builder = builder.max_wait(10 * MS).store(store.clone());
        builder.build().unwrap()
    });
    let bad = server_that(States::Wait(30), |request| request.method() == "POST");
    let service = ServiceBuilder::new().layer(layer).service(bad);
    let call = |method| service.clone().oneshot(request(method, "/v1/bad"));
    assert_eq!(call("POST").await.unwrap().status(), 429);
    sleep(31 * SECOND).await;
    for _ in 0..3 {
        assert_eq!(call("GET").await.unwrap().status(), 200);
    }
    assert_eq!(call("POST").await.unwrap().status(), 429);
    let held = call("POST").await.unwrap_err();
    let reason = Limited::find(&held).and_then(Limited::reason);
    assert_eq!(reason, Some(Reason::HeldKind));
    operator
        .limiter()
        .release(Key::new("account"))
        .await
        .unwrap();
    sleep(SECOND).await;
    assert_eq!(call("POST").await.unwrap().status(), 429, "it was sent");
}

/// The probe of the key is refused because of its kind. The next request leaves at once: that says nothing about the key.
#[tokio::test(start_paused = true)]
async fn another_probe_follows_one_of_a_refused_kind() {
    let layer = builder().0.max_wait(60 * SECOND).build().unwrap();
    let is_refused = |request: &Request<()>| request.uri().path() != "/good";
    let service = ServiceBuilder::new()
        .layer(layer)
        .service(server(is_refused));
    let call = |path| service.clone().oneshot(request("GET", path));
    for _ in 0..2 {
        assert_eq!(call("/bad").await.unwrap().status(), 429);
    }
    for _ in 0..4 {
        assert_eq!(call("/good").await.unwrap().status(), 200);
    }
    assert_eq!(call("/worse").await.unwrap().status(), 429);
    let (probe, next) = (call("/bad"), call("/good"));
    let timed = async |call| {
        let answer: Result<Response<()>, Error> = tokio::spawn(call).await.unwrap();
        (answer.unwrap().status(), Instant::now())
    };
    let ((refused, at), (accepted, then)) = tokio::join!(timed(probe), timed(next));
    assert_eq!((refused.as_u16(), accepted.as_u16()), (429, 200));
    assert!(then - at < SECOND / 10, "{:?}", then - at);
}
