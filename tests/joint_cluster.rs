//! Joint requests over a real Redis cluster, with each key on another server.

#![cfg(feature = "redis-cluster")]

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisCluster;
use tokio::time::{Instant, sleep};
use tollgate::limiter::Acquire;
use tollgate::store::RedisStore;
use tollgate::{Key, Limited, Limiter, Quota, RateLimitLayer};

const NAMES: [&str; 3] = ["first", "second", "third"];
const COUNT: u32 = 3;

/// How long permits may take to get back to a server.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns a limiter for each of the names. Their requests do not wait.
fn limiters(cluster: &RedisCluster) -> [Limiter; 3] {
    let store = RedisStore::cluster(cluster.urls()).build().unwrap();
    // What is not given back stays counted.
    let quota = Quota::per_hour(COUNT);
    let layer = RateLimitLayer::builder(quota)
        .name(NAMES[0])
        .and_per(NAMES[1], quota, |_| Key::ALL)
        .and_per(NAMES[2], quota, |_| Key::ALL)
        .store(Arc::new(store))
        .max_wait(Duration::ZERO)
        .build()
        .unwrap();
    NAMES.map(|name| layer.limiter_of(name).unwrap())
}

/// Returns a key of `limiter` that is on server `number`.
async fn key_on(cluster: &RedisCluster, number: usize, limiter: &Limiter) -> Key {
    for candidate in 0..1000 {
        let key = Key::new(format!("key {number} {candidate}"));
        let before = cluster.key_count(number);
        limiter.acquire(key).await.unwrap().give_back();
        if cluster.key_count(number) > before {
            return key;
        }
    }
    panic!("no key is on server {number}");
}

/// Returns a joint request of the keys of `which` of the limiters.
fn joint(limiters: &[Limiter; 3], keys: &[Key; 3], which: &[usize]) -> Acquire {
    let parts = which.iter().map(|&part| limiters[part].acquire(keys[part]));
    parts.reduce(Acquire::with).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_refusals_name_the_limit_of_a_killed_server() {
    const KILLED: usize = 1;
    let mut cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap())
        .await
        .unwrap();
    // No replica replaces it.
    cluster.configure("cluster-node-timeout", "60000");
    let limiters = limiters(&cluster);
    let mut keys = [Key::ALL; 3];
    for (number, key) in keys.iter_mut().enumerate() {
        *key = key_on(&cluster, number, &limiters[number]).await;
    }
    joint(&limiters, &keys, &[0, 1, 2])
        .await
        .unwrap()
        .give_back();

    cluster.node(KILLED).kill();
    for number in 0..5 {
        for part in [0, 2] {
            until_unused(&limiters[part], keys[part]).await;
        }
        let refused = joint(&limiters, &keys, &[0, 1, 2]).await.unwrap_err();
        let is_of_store = matches!(refused, Limited::Store { .. });
        assert!(is_of_store, "{number}: {refused}");
        assert_eq!(refused.report().name(), Some(NAMES[KILLED]), "{refused}");
        let alone = limiters[KILLED].acquire(keys[KILLED]).await.unwrap_err();
        assert_eq!(refused.report().key(), alone.report().key(), "{refused}");
    }
    for part in [0, 2] {
        until_unused(&limiters[part], keys[part]).await;
    }
    for _ in 0..COUNT {
        drop(joint(&limiters, &keys, &[0, 2]).await.unwrap());
    }
    let refused = joint(&limiters, &keys, &[0, 2]).await.unwrap_err();
    assert!(matches!(refused, Limited::Local { .. }), "{refused}");
}

/// Waits until nothing of a key is used.
async fn until_unused(limiter: &Limiter, key: Key) {
    let start = Instant::now();
    while limiter.peek(key).await.unwrap().limits[0].used > 0 {
        assert!(start.elapsed() < PATIENCE, "permits were not given back");
        sleep(Duration::from_millis(2)).await;
    }
}
