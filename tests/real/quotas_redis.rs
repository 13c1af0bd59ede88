//! Quotas that are set while a fleet runs, over Redis.

#![cfg(feature = "redis")]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::limiter::QuotaSource;
use tollgate::store::RedisStore;
use tollgate::{HeaderTrust, Key, Limiter, Quota, RateLimitLayer};
use tower::{Layer, ServiceExt, service_fn};

/// A process of its own, as far as Redis knows.
async fn process(server: &RedisServer) -> Limiter {
    let store = RedisStore::builder(&server.url())
        .store_timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    store.connect().await.unwrap();
    RateLimitLayer::builder(Quota::per_second(100))
        .max_wait(Duration::from_secs(5))
        .store(Arc::new(store))
        .build()
        .unwrap()
        .limiter()
}

#[tokio::test(flavor = "multi_thread")]
async fn new_processes_use_all_of_a_quota_that_was_set_before() {
    let server = RedisServer::start().unwrap();
    let operator = process(&server).await;
    operator
        .set_quota(Key::ALL, Quota::per_second(20))
        .await
        .unwrap();
    let start = Instant::now();
    let used = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..2 {
        let limiter = process(&server).await;
        for _ in 0..60 {
            let (limiter, used) = (limiter.clone(), used.clone());
            tokio::spawn(async move {
                loop {
                    match limiter.acquire(Key::ALL).await {
                        Ok(permit) => {
                            drop(permit);
                            used.lock().unwrap().push(start.elapsed());
                        }
                        Err(limited) => {
                            let wait = limited.retry_after().unwrap_or_default();
                            sleep(wait.max(Duration::from_millis(1))).await;
                        }
                    }
                }
            });
        }
    }
    // In some three seconds; a machine that stalls uses less at first, because permits expire.
    loop {
        sleep(Duration::from_millis(100)).await;
        let used = used.lock().unwrap();
        let since = start.elapsed().saturating_sub(Duration::from_secs(3));
        let lately = used.iter().filter(|at| **at >= since).count();
        if lately >= 50 {
            break;
        }
        assert!(since < Duration::from_secs(10), "{used:?}");
    }
}

/// The first response that states a limit applies it to all processes, and to those that start later.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_one_process_learns_applies_to_all() {
    let server = RedisServer::start().unwrap();
    let (first, second) = (learner(&server).await, learner(&server).await);
    assert!(second.limiter().acquire(Key::ALL).await.is_ok());
    learn(&first).await;

    let third = learner(&server).await;
    let start = Instant::now();
    for layer in [&first, &second, &third] {
        let limits = loop {
            let status = layer.limiter().peek(Key::ALL).await.unwrap();
            if matches!(status.quota_source, QuotaSource::Upstream { .. }) {
                break status.limits;
            }
            // The reply to the process that learns it arrives meanwhile.
            assert!(start.elapsed() < Duration::from_secs(10), "{status:?}");
        };
        assert_eq!(limits.len(), 2, "{limits:?}");
        assert_eq!((limits[1].limit.count(), limits[1].used), (30, 2));
    }
    let (mut granted, mut asked) = (0, 0);
    while asked < 90 {
        for layer in [&first, &second, &third] {
            granted += usize::from(layer.limiter().acquire(Key::ALL).await.is_ok());
            asked += 1;
        }
    }
    assert_eq!(granted, 28);
}

/// Another process has learned 30 per 600 s. A process that trusts no headers has the configured 1000 per second.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_ignores_headers_is_not_limited_by_what_others_learned() {
    let server = RedisServer::start().unwrap();
    let first = learner(&server).await;
    let before = process_with(&server, HeaderTrust::Ignore).await;
    assert!(before.limiter().acquire(Key::ALL).await.is_ok());
    learn(&first).await;
    let start = Instant::now();
    let is_learned = |source| matches!(source, QuotaSource::Upstream { .. });
    while !is_learned(first.limiter().peek(Key::ALL).await.unwrap().quota_source) {
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    let later = process_with(&server, HeaderTrust::Ignore).await;
    let status = later.limiter().peek(Key::ALL).await.unwrap();
    assert_eq!(status.quota_source, QuotaSource::Builder);
    let counts: Vec<_> = status
        .limits
        .iter()
        .map(|usage| usage.limit.count())
        .collect();
    assert_eq!(counts, [1000], "its own limit");
    assert!(status.free > 900, "{status:?}");
    let source = first.limiter().peek(Key::ALL).await.unwrap().quota_source;
    assert!(is_learned(source), "a question ends nothing: {source:?}");
    for layer in [before, later] {
        for request in 0..60 {
            let permit = layer.limiter().acquire(Key::ALL).await;
            assert!(permit.is_ok(), "{request}: {permit:?}");
        }
    }
}

/// Sends a request whose response states a limit.
async fn learn(layer: &RateLimitLayer) {
    let response = || {
        let response = Response::builder().header("RateLimit-Policy", r#""default";q=30;w=600"#);
        Ok::<_, Infallible>(response.body(String::new()).unwrap())
    };
    let upstream = service_fn(move |_: Request<String>| std::future::ready(response()));
    let request = Request::get("http://127.0.0.1/").body(String::new());
    let call = layer.layer(upstream).oneshot(request.unwrap());
    call.await.unwrap();
}

/// A process of its own that takes over stricter limits.
async fn learner(server: &RedisServer) -> RateLimitLayer {
    process_with(server, HeaderTrust::Stricter).await
}

async fn process_with(server: &RedisServer, trust: HeaderTrust) -> RateLimitLayer {
    let store = RedisStore::builder(&server.url())
        .store_timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    store.connect().await.unwrap();
    RateLimitLayer::builder(Quota::per_second(1000))
        .trust_headers(trust)
        .max_wait(Duration::ZERO)
        .store(Arc::new(store))
        .build()
        .unwrap()
}
