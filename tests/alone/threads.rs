//! Threads that share a limit in memory, under the real clock: no more than the limit passes.
//!
//! The other tests of the limiter run in one thread. These run in several, so that the threads meet
//! in the fast path, the store calls and the returns. No assertion depends on the speed of the
//! machine.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use http::{Request, Response};
use tollgate::store::MemoryStore;
use tollgate::{Key, Limiter, Permit, Quota, RateLimitBuilder, RateLimitLayer, Reason, by_host};
use tower::{Layer, Service};

const THREADS: usize = 4;

/// Polls `future` once. With a `max_wait` of zero no request waits.
fn poll_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("a request waits"),
    }
}

fn builder(quota: Quota) -> RateLimitBuilder {
    RateLimitLayer::builder(quota).max_wait(Duration::ZERO)
}

fn acquire(limiter: &Limiter, cost: u32) -> Option<Permit> {
    poll_once(limiter.acquire(Key::ALL).cost(cost)).ok()
}

/// An inner service that counts its calls.
#[derive(Clone, Default)]
struct Upstream(Arc<AtomicU32>);

impl Service<Request<()>> for Upstream {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _request: Request<()>) -> Self::Future {
        self.0.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::new(())))
    }
}

/// Sends requests to `host` from several threads until each thread has been refused. Returns how
/// many requests the upstream got.
fn send_until_refused(layer: &RateLimitLayer, host: &str) -> u32 {
    let upstream = Upstream::default();
    let uri = format!("http://{host}/");
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut service = layer.layer(upstream.clone());
                let request = || Request::get(&uri).body(()).unwrap();
                while poll_once(service.call(request())).is_ok() {}
            });
        }
    });
    upstream.0.load(Ordering::Relaxed)
}

#[test]
fn services_on_threads_send_exactly_the_limit() {
    const LIMIT: u32 = 20_000;
    for round in 0..5 {
        let all = builder(Quota::per_hour(LIMIT)).build().unwrap();
        assert_eq!(send_until_refused(&all, "a.example"), LIMIT, "{round}");
        let by_host = builder(Quota::per_hour(LIMIT))
            .key(by_host)
            .build()
            .unwrap();
        for host in ["a.example", "b.example"] {
            assert_eq!(send_until_refused(&by_host, host), LIMIT, "{host}, {round}");
        }
    }
}

#[test]
fn returned_permits_and_costs_keep_the_limit_exact() {
    const LIMIT: u32 = 20_000;
    for round in 0..5 {
        let limiter = builder(Quota::per_hour(LIMIT)).build().unwrap().limiter();
        let used = AtomicU32::new(0);
        thread::scope(|scope| {
            for thread in 0..THREADS as u32 {
                let (limiter, used) = (&limiter, &used);
                scope.spawn(move || {
                    let mut number = thread;
                    while let Some(permit) = acquire(limiter, 1 + number % 2 * 2) {
                        if number % 5 == 0 {
                            permit.give_back();
                        } else {
                            used.fetch_add(1 + number % 2 * 2, Ordering::Relaxed);
                        }
                        number += 1;
                    }
                });
            }
        });
        // A thread may have left because another one was about to give a permit back.
        let mut used = used.into_inner();
        while acquire(&limiter, 1).is_some() {
            used += 1;
        }
        assert_eq!(used, LIMIT, "{round}");
    }
}

#[test]
fn no_window_has_more_than_the_limit() {
    const LIMIT: u32 = 200;
    const WINDOW: Duration = Duration::from_millis(100);
    let limiter = builder(Quota::new(LIMIT, WINDOW))
        .build()
        .unwrap()
        .limiter();
    let used = AtomicU32::new(0);
    let start = Instant::now();
    let mut uses: Vec<(Duration, Duration)> = thread::scope(|scope| {
        let hammer = || {
            let mut uses = Vec::new();
            while used.load(Ordering::Relaxed) < 6 * LIMIT {
                // The permit is used at some moment between the two.
                let before = start.elapsed();
                if acquire(&limiter, 1).is_some() {
                    uses.push((before, start.elapsed()));
                    used.fetch_add(1, Ordering::Relaxed);
                }
            }
            uses
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(hammer)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    uses.sort_unstable();
    for (index, (from, _)) in uses.iter().enumerate() {
        let inside = uses[index..]
            .iter()
            .take_while(|(before, _)| *before < *from + WINDOW)
            .filter(|(_, after)| *after < *from + WINDOW)
            .count();
        assert!(
            inside <= LIMIT as usize,
            "{inside} uses within {WINDOW:?} of {from:?}"
        );
    }
}

/// Counts the units that the threads of [`the_limit_holds_through_holds_queues_and_evictions`] use, once a request was refused
/// for a hold and another one has waited.
#[derive(Default)]
struct Tally {
    used: AtomicU32,
    held: AtomicU32,
    waited: AtomicU32,
    is_over: AtomicBool,
}

impl Tally {
    /// Asks for permits of `key` in several runtimes one after the other. Each runtime is dropped
    /// with requests that wait. Returns when the quota is used up.
    fn ask(&self, limiter: &Limiter, mut number: u32) {
        while !self.is_over.load(Ordering::Relaxed) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .unwrap();
            runtime.block_on(async {
                for _ in 0..500 {
                    number += 1;
                    // A request of another key, so that states are evicted.
                    let other = Key::new((number % 40).to_string());
                    drop(limiter.acquire(other).await);
                    self.ask_once(limiter, 1 + number % 2 * 2, number.is_multiple_of(5))
                        .await;
                }
                for _ in 0..3 {
                    let limiter = limiter.clone();
                    // If the permit arrives, it is given back. Else it is dropped with the runtime.
                    tokio::spawn(async move {
                        if let Ok(permit) = limiter.acquire(Key::ALL).await {
                            permit.give_back();
                        }
                    });
                }
                tokio::task::yield_now().await;
            });
        }
    }

    fn has_seen_both(&self) -> bool {
        [&self.held, &self.waited]
            .iter()
            .all(|count| count.load(Ordering::Relaxed) > 0)
    }

    async fn ask_once(&self, limiter: &Limiter, cost: u32, is_unused: bool) {
        match limiter.acquire(Key::ALL).cost(cost).await {
            Ok(permit) => {
                let waited = u32::from(!permit.waited().is_zero());
                self.waited.fetch_add(waited, Ordering::Relaxed);
                // A quick machine would use up the quota before a hold has begun.
                if is_unused || !self.has_seen_both() {
                    permit.give_back();
                } else {
                    self.used.fetch_add(cost, Ordering::Relaxed);
                }
            }
            Err(refused) if refused.reason() == Some(Reason::Held) => {
                self.held.fetch_add(1, Ordering::Relaxed);
            }
            Err(refused) => {
                let wait = refused.retry_after().unwrap_or_default();
                if wait > Duration::from_secs(60) {
                    self.is_over.store(true, Ordering::Relaxed);
                }
            }
        }
    }
}

#[test]
fn the_limit_holds_through_holds_queues_and_evictions() {
    const LIMIT: u32 = 60_000;
    let layer = RateLimitLayer::builder(Quota::per_hour(LIMIT))
        .store(Arc::new(MemoryStore::new(1000)))
        .max_wait(Duration::from_millis(4))
        .max_keys(8)
        .build()
        .unwrap();
    let limiter = layer.limiter();
    let tally = Tally::default();
    thread::scope(|scope| {
        for thread in 0..THREADS as u32 {
            let (limiter, tally) = (&limiter, &tally);
            scope.spawn(move || tally.ask(limiter, thread * 1_000_000));
        }
        // Holds of 2 ms, for which requests wait, and of a second, for which they are refused. Each is released after 10 ms.
        let runtime = tokio::runtime::Runtime::new().unwrap();
        for round in 0_u64.. {
            if tally.is_over.load(Ordering::Relaxed) {
                break;
            }
            let span = Duration::from_millis(if round % 4 == 0 { 1000 } else { 2 });
            runtime.block_on(async {
                limiter.hold_for(Key::ALL, span).await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
                limiter.release(Key::ALL).await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            });
        }
    });
    // A thread may have left because another one was about to give a permit back.
    let mut used = tally.used.into_inner();
    while acquire(&limiter, 1).is_some() {
        used += 1;
    }
    assert_eq!(used, LIMIT);
}
