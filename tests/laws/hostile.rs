//! What a response does to a limiter or throttle ends within a bound, whatever the response says: the table "How
//! long a response has effect" of `guide::guarantees`.
//!
//! Servers answer with random statuses and headers. When they have answered for the last time, and the bound has
//! passed, each key serves its requests again.
//!
//! A million responses:
//! `TOLLGATE_CASES=320 cargo test --release --all-features --test laws hostile::`.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{HeaderName, HeaderValue, Request, Response};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tokio::time::{Instant, sleep, timeout};
use tollgate::store::{MemoryStore, Store};
use tollgate::{
    AdaptiveThrottleLayer, Guard, HeaderTrust, Key, Quota, RateLimitBuilder, RateLimitLayer,
    RequestRef, by_host,
};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Layer, ServiceExt};

use super::signal::{Sent, sent};

const HOSTS: u8 = 3;
const PATHS: u8 = 3;
const PROCESSES: u8 = 2;

/// The longest hold, and the longest stop of the guard.
const MAX_HOLD: Duration = Duration::from_secs(60);
const LONGEST_STOP: Duration = Duration::from_secs(600);
/// Between two probes of a wait that the server has stated beyond `MAX_HOLD`.
const LONGEST_WITHOUT_PROBE: Duration = Duration::from_secs(3600);
/// A learned limit ends by then, and what follows a hold: a probation, or units reserved for other clients.
const LEARNED: Duration = Duration::from_secs(3600);
const AFTER_HOLD: Duration = Duration::from_secs(60);
/// One request leaves in this time, at the slowest pace.
const SLOWEST_PACE: Duration = Duration::from_secs(900);

/// A request, and the response to it.
#[derive(Clone, Debug)]
struct Step {
    gap: u64,
    process: u8,
    host: u8,
    path: u8,
    response: Sent,
}

#[derive(Clone, Copy, Debug)]
enum Keys {
    One,
    ByHost,
    ByPath,
    AllAndPath,
    AllAndHost,
    /// As `AllAndHost`, by functions that are not known to look at the host.
    AllAndCustomer,
    Units,
}

#[derive(Clone, Debug)]
struct History {
    keys: Keys,
    quota: Quota,
    trust: HeaderTrust,
    is_guarded: bool,
    steps: Vec<Step>,
}

/// Statements that have an effect, with numbers of any size.
fn telling() -> impl Strategy<Value = Sent> {
    let number = prop_oneof![
        Just(0_u64),
        1_u64..100,
        Just(3600),
        Just(86_400),
        Just(31_622_400),
        any::<u64>(),
    ];
    let line = (0..9, number.clone(), number).prop_map(|(kind, a, b)| match kind {
        0 => ("retry-after", a.to_string()),
        1 => ("x-ratelimit-scope", "global".to_owned()),
        2 => ("ratelimit-policy", format!("\"a\";q={a};w={b}")),
        3 => ("ratelimit", format!("\"a\";r={a};t={b}")),
        4 => ("x-ratelimit-limit", a.to_string()),
        5 => ("x-ratelimit-remaining", a.to_string()),
        6 => ("x-ratelimit-reset", a.to_string()),
        7 => ("x-app-rate-limit", format!("{a}:{b}")),
        _ => ("x-ratelimit-remaining-tokens", a.to_string()),
    });
    let status = proptest::sample::select(&[200_u16, 200, 403, 429, 429, 503][..]);
    (status, proptest::collection::vec(line, 0..5)).prop_map(|(status, lines)| Sent {
        status,
        lines: (lines.into_iter())
            .map(|(name, value)| (name.to_owned(), value.into_bytes()))
            .collect(),
        body: Vec::new(),
    })
}

fn step() -> impl Strategy<Value = Step> {
    let gap = prop_oneof![3 => 0_u64..50, 3 => 0_u64..3000, 1 => 0_u64..90_000];
    let response = prop_oneof![1 => sent(), 3 => telling()];
    (gap, 0..PROCESSES, 0..HOSTS, 0..PATHS, response).prop_map(
        |(gap, process, host, path, response)| Step {
            gap,
            process,
            host,
            path,
            response,
        },
    )
}

fn history() -> impl Strategy<Value = History> {
    let keys = proptest::sample::select(
        &[
            Keys::One,
            Keys::ByHost,
            Keys::ByPath,
            Keys::AllAndPath,
            Keys::AllAndHost,
            Keys::AllAndCustomer,
            Keys::Units,
        ][..],
    );
    let quotas = [
        Quota::per_minute(60),
        Quota::new(20, Duration::from_secs(5)),
        Quota::bucket(30).refill(1, Duration::from_secs(1)),
        Quota::per_second(20).and(Quota::per_hour(5000)),
    ];
    let trust = [
        HeaderTrust::Ignore,
        HeaderTrust::Usage,
        HeaderTrust::Stricter,
        HeaderTrust::Replace,
    ];
    let steps = proptest::collection::vec(step(), 1..40);
    let any_of = (
        keys,
        proptest::sample::select(quotas.to_vec()),
        proptest::sample::select(trust.to_vec()),
    );
    (any_of, any::<bool>(), steps).prop_map(|((keys, quota, trust), is_guarded, steps)| History {
        keys,
        quota,
        trust,
        is_guarded,
        steps,
    })
}

fn path(request: &RequestRef<'_>) -> Option<Key> {
    Some(Key::new(request.path()))
}

fn customer(request: &RequestRef<'_>) -> Option<Key> {
    Some(Key::new(request.host()?).and("customer"))
}

impl History {
    fn limit(&self, store: &Arc<dyn Store>) -> RateLimitLayer {
        let one = |quota| RateLimitLayer::builder(quota);
        let all = |builder: RateLimitBuilder| builder.name("global").key(|_| Key::new("all"));
        let quota = self.quota;
        let builder = match self.keys {
            Keys::One => one(quota),
            Keys::ByHost => one(quota).key(by_host),
            Keys::ByPath => one(quota).key(path),
            Keys::AllAndPath => all(one(quota)).and_per("path", quota, path),
            Keys::AllAndHost => all(one(quota)).and_per("host", quota, by_host),
            Keys::AllAndCustomer => all(one(quota)).and_per("customer", quota, customer),
            Keys::Units => one(quota.and(Quota::per_minute(6000).of("tokens"))).charged_by_hand(),
        };
        let builder = builder
            .store(store.clone())
            .trust_headers(self.trust)
            .max_hold(MAX_HOLD)
            .max_wait(Duration::from_millis(300));
        let builder = match self.is_guarded {
            true => builder.guard(guard()),
            false => builder,
        };
        builder.build().unwrap()
    }

    fn throttle(&self) -> AdaptiveThrottleLayer {
        let builder = AdaptiveThrottleLayer::builder();
        let builder = match self.keys {
            Keys::One | Keys::Units => builder,
            Keys::ByHost | Keys::AllAndHost | Keys::AllAndCustomer => builder.key(by_host),
            Keys::ByPath | Keys::AllAndPath => builder.key(path),
        };
        let builder = builder.max_hold(MAX_HOLD).max_wait(2 * SLOWEST_PACE);
        let builder = match self.is_guarded {
            true => builder.guard(guard()),
            false => builder,
        };
        builder.build().unwrap()
    }

    /// The bound of all that the responses do to a limit.
    fn bound(&self) -> Duration {
        let learned = match self.trust {
            HeaderTrust::Stricter | HeaderTrust::Replace => LEARNED,
            _ => Duration::ZERO,
        };
        let held = match self.is_guarded {
            true => LONGEST_STOP,
            false => MAX_HOLD,
        };
        // At most so long between two probes of a stated wait.
        let held = held.max(LONGEST_WITHOUT_PROBE);
        learned.max(held + AFTER_HOLD) + Duration::from_secs(10)
    }
}

fn guard() -> Guard {
    Guard::new(Quota::per_minute(5)).stop(MAX_HOLD, LONGEST_STOP)
}

type Client = BoxCloneSyncService<Request<()>, Response<()>, BoxError>;

/// A client of the servers, each of which gives the next response. Without one, the answer is 200.
#[derive(Clone, Default)]
struct Servers(Arc<Mutex<Option<Sent>>>);

impl Servers {
    fn answer(&self) -> Response<()> {
        let mut response = Response::new(());
        let Some(sent) = self.0.lock().unwrap().take() else {
            return response;
        };
        *response.status_mut() = sent.status.try_into().unwrap();
        for (name, value) in sent.lines {
            if let (Ok(name), Ok(value)) =
                (name.parse::<HeaderName>(), HeaderValue::from_bytes(&value))
            {
                response.headers_mut().append(name, value);
            }
        }
        response
    }

    fn behind<L>(&self, layer: &L) -> Client
    where
        L: Layer<tower::util::BoxCloneSyncService<Request<()>, Response<()>, BoxError>>,
        L::Service:
            tower::Service<Request<()>, Response = Response<()>> + Clone + Send + Sync + 'static,
        <L::Service as tower::Service<Request<()>>>::Future: Send + 'static,
        <L::Service as tower::Service<Request<()>>>::Error: Into<BoxError>,
    {
        let servers = self.clone();
        let answer = move |_: Request<()>| {
            let answer = servers.answer();
            async move { Ok::<_, BoxError>(answer) }
        };
        let service = layer.layer(BoxCloneSyncService::new(tower::service_fn(answer)));
        BoxCloneSyncService::new(service.map_err(Into::into))
    }
}

fn request(host: u8, path: u8) -> Request<()> {
    let uri = format!("http://h{host}.example/{path}");
    Request::get(uri).body(()).unwrap()
}

/// Sends the requests of a history. Each is given up if it waits. Returns how many were not sent.
async fn run(clients: &[Client], servers: &Servers, steps: &[Step]) -> usize {
    let mut stopped = 0;
    for step in steps {
        sleep(Duration::from_millis(step.gap)).await;
        *servers.0.lock().unwrap() = Some(step.response.clone());
        let client = clients[usize::from(step.process) % clients.len()].clone();
        let sent = client.oneshot(request(step.host, step.path));
        let _ = timeout(Duration::from_millis(500), sent).await;
        stopped += usize::from(servers.0.lock().unwrap().take().is_some());
    }
    stopped
}

/// Returns the first request that is not served, with its error.
async fn not_served(clients: &[Client], longest: Duration) -> Option<String> {
    for host in 0..HOSTS {
        for path in 0..PATHS {
            let client = &clients[usize::from(host + path) % clients.len()];
            let start = Instant::now();
            let answer = client.clone().oneshot(request(host, path)).await;
            let waited = start.elapsed();
            if answer.is_err() || waited > longest {
                return Some(format!(
                    "host {host}, path {path} after {waited:?}: {answer:?}"
                ));
            }
        }
    }
    None
}

/// Checks random histories. `judge` returns how many requests were not sent, and what was not served.
fn check(usual: u32, judge: impl Fn(&History) -> (usize, Option<String>)) {
    let (all, stopped) = (Cell::new(0), Cell::new(0));
    let judge = |history: &History| {
        let (not_sent, refused) = judge(history);
        all.set(all.get() + history.steps.len());
        stopped.set(stopped.get() + not_sent);
        refused
    };
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..histories::config(usual)
    });
    let result = runner.run(&history(), |history| match judge(&history) {
        None => Ok(()),
        Some(refused) => Err(TestCaseError::fail(refused)),
    });
    if let Err(error) = result {
        panic!("{error}\n{}", histories::again());
    }
    let (all, stopped) = (all.get(), stopped.get());
    eprintln!("{all} requests, {stopped} of them stopped by what responses did");
    assert!(
        stopped * 5 > all,
        "responses have little effect: {stopped} of {all}"
    );
}

#[test]
fn limits_serve_again_after_the_bound() {
    check(100, |history| {
        crate::support::paused_runtime().block_on(async {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
            let servers = Servers::default();
            let clients: Vec<Client> = (0..PROCESSES)
                .map(|_| servers.behind(&history.limit(&store)))
                .collect();
            let stopped = run(&clients, &servers, &history.steps).await;
            sleep(history.bound()).await;
            let refused = not_served(&clients, Duration::from_millis(300)).await;
            (stopped, refused)
        })
    });
}

#[test]
fn throttles_serve_again_after_the_bound() {
    check(60, |history| {
        crate::support::paused_runtime().block_on(async {
            let servers = Servers::default();
            let clients = [servers.behind(&history.throttle())];
            let stopped = run(&clients, &servers, &history.steps).await;
            let held = match history.is_guarded {
                true => LONGEST_STOP,
                false => MAX_HOLD,
            };
            sleep(held + AFTER_HOLD).await;
            (stopped, not_served(&clients, SLOWEST_PACE).await)
        })
    });
}
