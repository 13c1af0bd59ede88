//! A fleet at a server that refuses all requests for a while, and states no time. Under a paused clock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tollgate::store::{
    Background, Lease, LeaseRequest, MemoryStore, Register, RegisterRequest, Store, StoreError,
    StoreReply, Task,
};
use tollgate::{Error, Quota, RateLimitLayer};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const PROCESSES: usize = 20;
const CALLERS: usize = 5;

/// What one process has of a store that all share and that answers after a while.
struct Client {
    store: Arc<MemoryStore>,
    has_registers: bool,
}

impl Background for Client {
    fn spawn(&self, task: Task) {
        tokio::spawn(task);
    }
}

impl Store for Client {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&*self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let lease = self.store.lease(request);
        StoreReply::Pending(Box::pin(async move {
            sleep(2 * MS).await;
            lease.arrives().await
        }))
    }

    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        if !self.has_registers {
            return StoreReply::Ready(Err(StoreError::Unsupported("registers")));
        }
        let store = self.store.clone();
        StoreReply::Pending(Box::pin(async move {
            sleep(MS).await;
            let answer = store.compare_and_set(change).arrives().await;
            sleep(MS).await;
            answer
        }))
    }

    fn background(&self) -> Option<&dyn Background> {
        Some(self)
    }
}

/// What arrived at the server: when, and whether it was refused.
type Arrived = Arc<Mutex<Vec<(Duration, bool)>>>;

/// A server that takes as long for a request as `answers` says by the time and the path, or refuses it.
fn server(
    arrived: &Arrived,
    start: Instant,
    answers: impl Fn(Duration, &str) -> Option<Duration> + Clone + Send + 'static,
) -> impl Service<Request<()>, Response = Response<()>, Error = Error, Future: Send>
+ Clone
+ Send
+ 'static {
    let arrived = arrived.clone();
    service_fn(move |request: Request<()>| {
        let at = start.elapsed();
        let mut arrived = arrived.lock().unwrap();
        let takes = answers(at, request.uri().path());
        arrived.push((at, takes.is_none()));
        async move {
            sleep(takes.unwrap_or(20 * MS)).await;
            let status = if takes.is_some() { 200 } else { 429 };
            Ok(Response::builder().status(status).body(()).unwrap())
        }
    })
}

/// Each caller repeats its request until it is accepted. Runs until all are, or for so long. The path of a request is the
/// number of its process.
async fn run<S>(services: Vec<S>, span: Duration)
where
    S: Service<Request<()>, Response = Response<()>> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    S::Future: Send,
{
    let mut callers = JoinSet::new();
    for (number, service) in services.iter().enumerate() {
        for caller in 0..CALLERS {
            let service = service.clone();
            callers.spawn(async move {
                sleep(MS * (37 * caller + 11 * number) as u32).await;
                loop {
                    let request = Request::get(format!("/{number}")).body(()).unwrap();
                    let answer = service.clone().oneshot(request).await;
                    if answer.is_ok_and(|answer| answer.status() == 200) {
                        return;
                    }
                    sleep(10 * MS).await;
                }
            });
        }
    }
    let all = async { while callers.join_next().await.is_some() {} };
    _ = tokio::time::timeout(span, all).await;
}

/// Runs the fleet behind limiters of one store. Returns when requests arrived, in milliseconds: those that were refused, and
/// the others.
async fn arrivals(
    has_registers: bool,
    answers: impl Fn(Duration, &str) -> Option<Duration> + Clone + Send + 'static,
) -> [Vec<u128>; 2] {
    let arrived = Arrived::default();
    let server = server(&arrived, Instant::now(), answers);
    let store = Arc::new(MemoryStore::default());
    let service = |_| {
        let store = store.clone();
        let client = Arc::new(Client {
            store,
            has_registers,
        });
        let builder = RateLimitLayer::builder(Quota::per_second(1000)).store(client);
        let layer = builder.max_wait(120 * SECOND).build().unwrap();
        ServiceBuilder::new().layer(layer).service(server.clone())
    };
    run((0..PROCESSES).map(service).collect(), 200 * SECOND).await;
    let arrived = arrived.lock().unwrap();
    [true, false].map(|refused| {
        let these = arrived
            .iter()
            .filter(|(_, is_refused)| *is_refused == refused);
        these.map(|(at, _)| at.as_millis()).collect()
    })
}

/// After each hold one request of the whole fleet leaves, and the holds become longer, whichever process sends it. It was one of
/// each process, 103 in all.
#[tokio::test(start_paused = true)]
async fn one_request_of_the_fleet_follows_each_bare_hold() {
    let answers = |at, _: &str| (at >= 20 * SECOND).then_some(20 * MS);
    let [refused, passed] = arrivals(true, answers).await;
    // Three left before the first refusal.
    assert!(refused.len() <= 10, "{refused:?}");
    assert_eq!(passed.len(), PROCESSES * CALLERS);
}

/// The requests of the process that is always the first to ask for the turn are all refused. It lets the others ask first after
/// the first probe.
#[tokio::test(start_paused = true)]
async fn poison_is_not_each_probe_of_the_fleet() {
    let answers = |_, path: &str| (path != "/0").then_some(20 * MS);
    let [_, passed] = arrivals(true, answers).await;
    let innocents = (PROCESSES - 1) * CALLERS;
    assert_eq!(passed.len(), innocents);
    assert!(passed[innocents - 1] < 5000, "{passed:?}");
}

/// Without registers, each process probes for itself.
#[tokio::test(start_paused = true)]
async fn processes_probe_by_themselves_without_registers() {
    let answers = |at, _: &str| (at >= 20 * SECOND).then_some(20 * MS);
    let [refused, passed] = arrivals(false, answers).await;
    assert!(refused.len() <= 7 * PROCESSES, "{refused:?}");
    assert_eq!(passed.len(), PROCESSES * CALLERS);
}

/// The first request after the hold takes half a minute. No other process waits for it, either.
#[tokio::test(start_paused = true)]
async fn a_slow_probe_costs_the_fleet_two_seconds() {
    let is_probe = Arc::new(AtomicBool::new(true));
    let answers = move |at, _: &str| match at < 100 * MS {
        true => None,
        false if is_probe.swap(false, Ordering::Relaxed) => Some(30 * SECOND),
        false => Some(20 * MS),
    };
    let [_, passed] = arrivals(true, answers).await;
    assert_eq!(passed.len(), PROCESSES * CALLERS);
    let waited = passed.iter().max().unwrap() - passed[0];
    assert!((1000..2200).contains(&waited), "{waited} ms");
}

/// The first requests of all processes take half a minute. More and more follow, as none is refused.
#[tokio::test(start_paused = true)]
async fn more_and_more_of_each_process_follow_slow_probes() {
    let answers = |at, _: &str| (at >= 100 * MS).then_some(30 * SECOND);
    let [_, passed] = arrivals(true, answers).await;
    let groups: Vec<_> = passed
        .chunk_by(|one, next| next - one < 500)
        .map(<[_]>::len)
        .collect();
    // The first of the fleet, then one of each other process and two of its own, then twice as many.
    assert_eq!(groups[..3], [1, PROCESSES + 1, 2 * PROCESSES], "{passed:?}");
}
