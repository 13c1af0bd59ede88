//! Refusals of one kind of requests: a server always refuses them, and accepts all others. Under a paused clock.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tollgate::Key;
use tollgate::stats::{Cause, Event};
use tollgate::store::{
    Background, HoldState, Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Store,
    StoreListener, StoreReply, Task, UnusedPermits, UpstreamRemaining, Usage,
};
use tollgate::{
    AdaptiveThrottleLayer, Error, Limited, Quota, RateLimitBuilder, RateLimitLayer, Reason,
};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

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
    others: usize,
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

/// Refuses what `is_refused` says, without a header, and answers all else in 20 ms.
fn server(
    is_refused: impl Fn(&Request<()>) -> bool + Clone + Send + 'static,
) -> impl Service<Request<()>, Response = Response<()>, Error = Error, Future: Send>
+ Clone
+ Send
+ 'static {
    service_fn(move |request: Request<()>| {
        let status = match is_refused(&request) {
            true => StatusCode::TOO_MANY_REQUESTS,
            false => StatusCode::OK,
        };
        async move {
            sleep(20 * MS).await;
            Ok(Response::builder().status(status).body(()).unwrap())
        }
    })
}

/// Five callers of 5 requests a second, and `poisons` of one a second, for three minutes.
async fn run<S>(service: S, poisons: &[(&'static str, &'static str)]) -> Seen
where
    S: Service<Request<()>, Response = Response<()>> + Clone + Send + 'static,
    S::Error: Into<tower::BoxError> + Send,
    S::Future: Send,
{
    let seen = Arc::new(Mutex::new(Seen::default()));
    let start = Instant::now();
    let mut calls = JoinSet::new();
    for number in 0..900 {
        let (service, seen) = (service.clone(), seen.clone());
        calls.spawn(async move {
            let at = start + number * 200 * MS + MS * (number % 5);
            sleep_until(at).await;
            let answer = service.oneshot(request("GET", "/v1/good")).await;
            let mut seen = seen.lock().unwrap();
            seen.waits.push(at.elapsed());
            seen.failed += usize::from(!answer.is_ok_and(|answer| answer.status() == 200));
        });
    }
    for (number, (method, path)) in (0..180).flat_map(|n| poisons.iter().map(move |p| (n, *p))) {
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
                    _ => seen.others += 1,
                },
                Ok(_) => seen.others += 1,
            }
        });
    }
    while let Some(call) = calls.join_next().await {
        call.unwrap();
    }
    drop(calls);
    let mut seen = seen.lock().unwrap();
    std::mem::take(&mut *seen)
}

fn builder() -> (RateLimitBuilder, Arc<Mutex<Vec<(Cause, Duration)>>>) {
    let holds = Arc::new(Mutex::new(Vec::new()));
    let noted = holds.clone();
    let builder = RateLimitLayer::builder(Quota::per_second(50)).on_event(move |event| {
        if let Event::Held { cause, left, .. } = event {
            noted.lock().unwrap().push((*cause, *left));
        }
    });
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
        let seen = run(service, poisons).await;
        let holds = holds.lock().unwrap();
        let of_key = holds.iter().filter(|(cause, _)| *cause == Cause::Upstream);
        let held: Duration = of_key.map(|(_, left)| *left).sum();
        println!(
            "{poisons:?}: p50 {:?} p99 {:?} failed {} key held {held:?}, poison {} {} {}; holds {}",
            seen.p(50),
            seen.p(99),
            seen.failed,
            seen.refused,
            seen.kept_back,
            seen.others,
            holds.len()
        );
        assert_eq!((seen.failed, seen.others), (0, 0));
        assert!(seen.refused > 3 && seen.kept_back > 0);
        assert!(held < 9 * SECOND, "{held:?}");
        assert!(seen.p(97) <= 22 * MS);
    }
}

fn throttle() -> (AdaptiveThrottleLayer, Arc<Mutex<Vec<(Cause, Duration)>>>) {
    let holds = Arc::new(Mutex::new(Vec::new()));
    let noted = holds.clone();
    let builder = AdaptiveThrottleLayer::builder().on_event(move |event| {
        if let Event::Held { cause, left, .. } = event {
            noted.lock().unwrap().push((*cause, *left));
        }
    });
    (builder.build().unwrap(), holds)
}

#[tokio::test(start_paused = true)]
async fn poison_stops_only_its_kind_at_a_throttle() {
    for is_retrying in [false, true] {
        let (layer, holds) = throttle();
        let server = server(|request| request.uri().path() == "/v1/bad");
        let poisons = &[("POST", "/v1/bad")];
        let seen = match is_retrying {
            false => run(ServiceBuilder::new().layer(layer).service(server), poisons).await,
            true => {
                let layer = layer.retrying();
                run(ServiceBuilder::new().layer(layer).service(server), poisons).await
            }
        };
        let holds = holds.lock().unwrap();
        let of_key = holds.iter().filter(|(cause, _)| *cause == Cause::Upstream);
        let held: Duration = of_key.map(|(_, left)| *left).sum();
        println!(
            "{is_retrying} p50 {:?} p97 {:?} p99 {:?} failed {} key held {held:?}, poison {} {} {}; holds {}",
            seen.p(50),
            seen.p(97),
            seen.p(99),
            seen.failed,
            seen.refused,
            seen.kept_back,
            seen.others,
            holds.len()
        );
        assert_eq!((seen.failed, seen.others), (0, 0));
        assert!(held < 9 * SECOND, "{held:?}");
        assert!(seen.p(97) <= 22 * MS);
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
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let StoreReply::Ready(lease) = self.0.lease(request) else {
            unreachable!("memory answers at once")
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(5 * MS).await;
            lease
        }))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.0.give_back(key, spec, unused);
    }

    fn hold(
        &self,
        key: Key,
        spec: &Arc<LimitSpec>,
        hold: HoldState,
        remaining: Option<UpstreamRemaining>,
    ) -> StoreReply<HoldState> {
        self.0.hold(key, spec, hold, remaining)
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        self.0.listen(listener);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.0.peek(request)
    }

    fn background(&self) -> Option<&dyn Background> {
        Some(self)
    }
}

#[tokio::test(start_paused = true)]
async fn poison_of_one_process_stops_no_other() {
    let store: Arc<dyn Store> = Arc::new(Shared(MemoryStore::default()));
    let services: Vec<_> = (0..3)
        .map(|_| {
            let layer = builder().0.store(store.clone()).build().unwrap();
            let layer = ServiceBuilder::new().layer(layer);
            layer.service(server(|request| request.uri().path() == "/v1/bad"))
        })
        .collect();
    let others = services[1..]
        .iter()
        .map(|service| run(service.clone(), &[]));
    let (first, others) = tokio::join!(
        run(services[0].clone(), &[("POST", "/v1/bad")]),
        futures::future::join_all(others)
    );
    for seen in others.iter().chain([&first]) {
        println!(
            "p50 {:?} p97 {:?} p99 {:?} failed {}, poison {} {} {}",
            seen.p(50),
            seen.p(97),
            seen.p(99),
            seen.failed,
            seen.refused,
            seen.kept_back,
            seen.others
        );
        assert_eq!((seen.failed, seen.others), (0, 0));
        assert!(seen.p(97) <= 30 * MS);
    }
}
