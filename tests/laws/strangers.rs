//! A stranger uses the same credential: the fleet leaves the stranger's calls room, and uses the
//! rest.
//!
//! Virtual time: for minutes, three limiters on one store behind an upstream that states what
//! remains.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tollgate::store::{MemoryStore, Store};
use tollgate::{Key, Quota, RateLimitLayer};
use tower::{BoxError, Layer, Service, ServiceExt};

const LIMIT: u32 = 60;
const WINDOW: Duration = Duration::from_secs(10);
/// How long a call takes, there and back.
const LATENCY: Duration = Duration::from_millis(20);
const WARM_UP: Duration = Duration::from_secs(30);
const SPAN: Duration = Duration::from_secs(330);

// ── the upstream ─────────────────────────────────────────────────────────────────────────────────

#[derive(Clone, Copy, Debug)]
enum Counting {
    /// In consecutive windows, from some moment on.
    Fixed,
    /// In consecutive windows from the epoch on.
    Aligned,
    /// In any window; the oldest call leaves next.
    Sliding,
    /// As tokens that refill evenly; the upstream states when the bucket will be full.
    Bucket,
}

struct Upstream {
    counting: Counting,
    latency: Duration,
    start: Instant,
    accepted: VecDeque<Instant>,
    tokens: f64,
    filled: Instant,
    opened: Instant,
    tally: Tally,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    ours: u32,
    refused: u32,
    theirs: u32,
}

impl Upstream {
    fn new(counting: Counting, latency: Duration) -> Self {
        let now = Instant::now();
        let start = match counting {
            Counting::Fixed => now - Duration::from_millis(3700), // in step with no clock here
            Counting::Aligned => {
                let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                now - Duration::from_nanos(
                    (since_epoch.as_nanos() % WINDOW.as_nanos())
                        .try_into()
                        .unwrap(),
                )
            }
            Counting::Sliding | Counting::Bucket => now,
        };
        Upstream {
            counting,
            latency,
            start,
            accepted: VecDeque::new(),
            tokens: f64::from(LIMIT),
            filled: start,
            opened: now,
            tally: Tally::default(),
        }
    }

    /// The remaining units, and until when the upstream states them.
    fn left(&mut self, now: Instant) -> (u32, Duration) {
        match self.counting {
            Counting::Bucket => {
                let rate = f64::from(LIMIT) / WINDOW.as_secs_f64();
                self.tokens =
                    (self.tokens + (now - self.filled).as_secs_f64() * rate).min(f64::from(LIMIT));
                self.filled = now;
                (
                    self.tokens as u32,
                    Duration::from_secs_f64((f64::from(LIMIT) - self.tokens) / rate),
                )
            }
            Counting::Fixed | Counting::Aligned => {
                let into = Duration::from_nanos(
                    ((now - self.start).as_nanos() % WINDOW.as_nanos())
                        .try_into()
                        .unwrap(),
                );
                self.accepted.retain(|at| *at >= now - into);
                (LIMIT - self.accepted.len() as u32, WINDOW - into)
            }
            Counting::Sliding => {
                self.accepted.retain(|at| *at + WINDOW > now);
                let oldest = self.accepted.front().copied().unwrap_or(now);
                (LIMIT - self.accepted.len() as u32, oldest + WINDOW - now)
            }
        }
    }

    fn take(&mut self, now: Instant) -> bool {
        let accepted = self.left(now).0 > 0;
        if accepted {
            self.accepted.push_back(now);
            self.tokens -= 1.0;
        }
        accepted
    }

    fn answer(&mut self) -> Response<()> {
        let now = Instant::now();
        let accepted = self.take(now);
        if now.duration_since(self.opened) > WARM_UP {
            *(if accepted {
                &mut self.tally.ours
            } else {
                &mut self.tally.refused
            }) += 1;
        }
        let (left, reset) = self.left(now);
        let mut response = Response::builder()
            .header("X-RateLimit-Limit", LIMIT)
            .header("X-RateLimit-Remaining", left)
            .header("X-RateLimit-Reset", whole(reset));
        if !accepted {
            let wait = if let Counting::Bucket = self.counting {
                1
            } else {
                whole(reset)
            };
            response = response
                .status(StatusCode::TOO_MANY_REQUESTS)
                .header("Retry-After", wait);
        }
        response.body(()).unwrap()
    }
}

/// In the most common header format.
fn whole(span: Duration) -> u64 {
    span.as_secs_f64().ceil() as u64
}

#[derive(Clone)]
struct Server(Arc<Mutex<Upstream>>);

impl Server {
    fn desk(&self) -> MutexGuard<'_, Upstream> {
        self.0.lock().unwrap()
    }
}

impl Service<Request<()>> for Server {
    type Response = Response<()>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<()>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        let server = self.clone();
        Box::pin(async move {
            let latency = server.desk().latency;
            tokio::time::sleep(latency / 2).await;
            let response = server.desk().answer();
            tokio::time::sleep(latency / 2).await;
            Ok(response)
        })
    }
}

// ── the stranger, and the fleet ──────────────────────────────────────────────────────────────────

#[derive(Clone, Copy, Debug)]
enum Stranger {
    Nobody,
    /// Half of the limit, evenly.
    Evenly,
    /// Half of the limit at once, once in a window.
    AtOnce,
}

async fn be(stranger: Stranger, server: Server) {
    let (pause, calls) = match stranger {
        Stranger::Nobody => return,
        Stranger::Evenly => (WINDOW * 2 / LIMIT, 1),
        Stranger::AtOnce => (WINDOW, LIMIT / 2),
    };
    loop {
        for _ in 0..calls {
            let now = Instant::now();
            let mut desk = server.desk();
            let accepted = desk.take(now);
            if accepted && now.duration_since(desk.opened) > WARM_UP {
                desk.tally.theirs += 1;
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Shares of the limit in per cent: our accepted calls, our refused calls, and the stranger's
/// calls.
fn percent(
    quota: Quota,
    counting: Counting,
    stranger: Stranger,
    latency: Duration,
) -> (f64, f64, f64) {
    let runtime = crate::support::paused_runtime();
    let tally = runtime.block_on(async {
        let server = Server(Arc::new(Mutex::new(Upstream::new(counting, latency))));
        tokio::spawn(be(stranger, server.clone()));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        for _ in 0..3 {
            let layer = RateLimitLayer::builder(quota)
                .key(|_| Key::new("theirs and ours"))
                .store(store.clone())
                .max_wait(Duration::from_secs(60))
                .build()
                .unwrap();
            for _ in 0..20 {
                let service = layer.layer(server.clone());
                tokio::spawn(async move {
                    loop {
                        if service.clone().oneshot(Request::new(())).await.is_err() {
                            tokio::time::sleep(Duration::from_secs(1)).await;
                        }
                    }
                });
            }
        }
        tokio::time::sleep(WARM_UP + SPAN).await;
        server.desk().tally
    });
    let allowed = f64::from(LIMIT) * SPAN.as_secs_f64() / WINDOW.as_secs_f64();
    let of = |calls: u32| 100.0 * f64::from(calls) / allowed;
    let (ours, refused, theirs) = (of(tally.ours), of(tally.refused), of(tally.theirs));
    println!(
        "{quota}, {counting:?}, {stranger:?}: ours {ours:.1} %, refused {refused:.1} %, theirs {theirs:.1} %"
    );
    (ours, refused, theirs)
}

/// The fleet uses what a stranger leaves, with hardly any refusal.
fn check(quota: Quota, counting: Counting, strangers: &[Stranger]) {
    for &stranger in strangers {
        let (ours, refused, theirs) = percent(quota, counting, stranger, LATENCY);
        assert!(
            ours + theirs >= 97.0,
            "{:.1} % of the limit is used",
            ours + theirs
        );
        assert!(refused <= 2.0, "{refused:.1} % refused");
    }
}

/// For each way in which the upstream counts.
fn check_all(quota: Quota) {
    for counting in [Counting::Fixed, Counting::Sliding, Counting::Bucket] {
        check(quota, counting, &[Stranger::Evenly, Stranger::AtOnce]);
    }
}

#[test]
fn beside_a_sliding_window() {
    check_all(Quota::new(LIMIT, WINDOW));
}

#[test]
fn beside_a_paced_sliding_window() {
    check_all(Quota::new(LIMIT, WINDOW).burst(5));
}

#[test]
fn beside_fixed_windows() {
    check(
        Quota::fixed(LIMIT, WINDOW),
        Counting::Aligned,
        &[Stranger::Evenly, Stranger::AtOnce],
    );
}

#[test]
fn beside_a_bucket() {
    check(
        Quota::bucket(LIMIT).refill(LIMIT, WINDOW),
        Counting::Bucket,
        &[Stranger::Evenly, Stranger::AtOnce],
    );
}

/// Without a stranger, no unit is reserved.
#[test]
fn alone_all_of_the_limit_is_used() {
    for quota in [
        Quota::new(LIMIT, WINDOW),
        Quota::new(LIMIT, WINDOW).burst(5),
        Quota::fixed(LIMIT, WINDOW),
    ] {
        for counting in [Counting::Fixed, Counting::Sliding, Counting::Bucket] {
            let (ours, refused, _) = percent(quota, counting, Stranger::Nobody, LATENCY);
            assert!(
                ours >= 99.0 && refused <= 0.1,
                "{ours:.1} % used, {refused:.1} % refused"
            );
        }
    }
}

/// For any response time. With slow calls many are under way: up to one for each caller goes in a
/// window.
#[test]
fn alone_behind_a_slow_upstream_nothing_is_reserved() {
    let slow = Duration::from_millis(2500);
    let sliding = Quota::new(LIMIT, WINDOW);
    let bucket = Quota::bucket(LIMIT).refill(LIMIT, WINDOW);
    for (quota, counting) in [
        (sliding, Counting::Fixed),
        (sliding, Counting::Sliding),
        (bucket, Counting::Bucket),
    ] {
        let (ours, refused, _) = percent(quota, counting, Stranger::Nobody, slow);
        assert!(
            ours >= 98.0 && refused <= 0.1,
            "{ours:.1} % used, {refused:.1} % refused"
        );
    }
}
