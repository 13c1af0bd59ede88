//! Threads that share a limit in memory, under the real clock: no more than the limit passes.
//!
//! The other tests of the limiter run in one thread. These run in several, so that the threads meet
//! in the fast path, the store calls and the returns. No assertion depends on the speed of the
//! machine.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use http::{Request, Response};
use tollgate::{Key, Limiter, Permit, Quota, RateLimitBuilder, RateLimitLayer, by_host};
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
