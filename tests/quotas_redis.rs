//! Quotas that are set while a fleet runs, over Redis.

#![cfg(feature = "redis")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis_server::RedisServer;
use tokio::time::{Instant, sleep};
use tollgate::store::RedisStore;
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

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
                while start.elapsed() < Duration::from_secs(5) {
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
    sleep(Duration::from_millis(4000)).await;
    let mut per_second = vec![0; 6];
    for at in used.lock().unwrap().iter() {
        per_second[at.as_secs() as usize] += 1;
    }
    assert!(
        per_second[..3].iter().sum::<usize>() >= 50,
        "{per_second:?}"
    );
}
