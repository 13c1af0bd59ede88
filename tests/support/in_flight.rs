//! Shared by the tests of calls in flight over Redis: processes, and an upstream that counts its
//! calls in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::{Key, Limiter, Quota, RateLimitBuilder, RateLimitLayer};

pub(crate) fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

pub(crate) fn builder(server: &RedisServer, quota: Quota) -> RateLimitBuilder {
    RateLimitLayer::builder(quota).store(super::patient::store(&server.url()))
}

/// A process: a limiter with its own store.
pub(crate) fn process(server: &RedisServer, quota: Quota) -> Limiter {
    builder(server, quota).build().unwrap().limiter()
}

/// How many calls are in flight, and the most there ever were.
#[derive(Default)]
pub(crate) struct Upstream {
    now: AtomicUsize,
    most: AtomicUsize,
    calls: AtomicUsize,
}

impl Upstream {
    pub(crate) async fn call(&self, takes: Duration) {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        let _end = End(&self.now);
        self.most.fetch_max(now, Ordering::Relaxed);
        sleep(takes).await;
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> usize {
        self.now.load(Ordering::Relaxed)
    }

    /// Returns how many calls have begun.
    pub(crate) fn begun(&self) -> usize {
        self.now() + self.calls()
    }

    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

struct End<'a>(&'a AtomicUsize);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(crate) async fn free(limiter: &Limiter) -> u64 {
    limiter.peek(Key::ALL).await.unwrap().free
}

/// Waits until this many slots are free. A distant store needs a moment.
pub(crate) async fn until_free(limiter: &Limiter, wanted: u64) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while limiter.peek(Key::ALL).await.map(|peek| peek.free).ok() != Some(wanted) {
        assert!(
            Instant::now() < give_up,
            "not {wanted} free: {:?}",
            limiter.peek(Key::ALL).await
        );
        sleep(millis(5)).await;
    }
}

pub(crate) fn scripts_run(server: &RedisServer) -> u64 {
    let stats: String = server.command(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha:"));
    line.and_then(|line| line.split("calls=").nth(1)?.split(',').next()?.parse().ok())
        .unwrap_or(0)
}
