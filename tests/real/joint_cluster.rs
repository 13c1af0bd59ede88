//! Joint requests over a real Redis cluster, with each key on another server.

#![cfg(feature = "redis")]

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisCluster;
use tokio::time::{Instant, sleep};
use tollgate::limiter::Acquire;
use tollgate::store::RedisStore;
use tollgate::{Cost, Key, Limited, Limiter, Quota, RateLimitLayer};

use crate::support::patient;

const NAMES: [&str; 3] = ["first", "second", "third"];
const COUNT: u32 = 3;

/// How long permits may take to get back to a server.
const PATIENCE: Duration = Duration::from_secs(30);

/// The server that is killed.
const KILLED: usize = 1;

/// Starts a cluster. No replica replaces a server that is killed.
async fn start() -> RedisCluster {
    let cluster = tokio::task::spawn_blocking(|| RedisCluster::start().unwrap())
        .await
        .unwrap();
    cluster.configure("cluster-node-timeout", "60000");
    cluster
}

/// Returns a limiter for each of the names. `killed` is the quota of the key of [`KILLED`].
fn limiters(cluster: &RedisCluster, killed: Quota, max_wait: Duration) -> [Limiter; 3] {
    let store = RedisStore::cluster(cluster.urls()).build().unwrap();
    // What is not given back stays counted.
    let quota = Quota::per_hour(COUNT);
    let layer = RateLimitLayer::builder(quota)
        .name(NAMES[0])
        .and_per(NAMES[KILLED], killed, |_| Key::ALL)
        .and_per(NAMES[2], quota, |_| Key::ALL)
        .store(Arc::new(store))
        .max_wait(max_wait)
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

/// Returns a key on each server.
async fn keys(cluster: &RedisCluster, limiters: &[Limiter; 3]) -> [Key; 3] {
    let mut keys = [Key::ALL; 3];
    for (number, key) in keys.iter_mut().enumerate() {
        *key = key_on(cluster, number, &limiters[number]).await;
    }
    keys
}

/// Returns a joint request of the keys of `which` of the limiters.
fn joint(limiters: &[Limiter; 3], keys: &[Key; 3], which: &[usize]) -> Acquire {
    let parts = which.iter().map(|&part| limiters[part].acquire(keys[part]));
    parts.reduce(Acquire::and).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_refusals_name_the_limit_of_a_killed_server() {
    let mut cluster = start().await;
    let limiters = limiters(&cluster, Quota::per_hour(COUNT), Duration::ZERO);
    let keys = keys(&cluster, &limiters).await;
    joint(&limiters, &keys, &[0, 1, 2])
        .await
        .unwrap()
        .give_back();

    cluster.node(KILLED).kill();
    for number in 0..5 {
        for part in [0, 2] {
            until_used(&limiters[part], keys[part], &[0]).await;
        }
        let refused = joint(&limiters, &keys, &[0, 1, 2]).await.unwrap_err();
        let is_of_store = matches!(refused, Limited::Store { .. });
        assert!(is_of_store, "{number}: {refused}");
        assert_eq!(refused.report().name(), Some(NAMES[KILLED]), "{refused}");
        let alone = limiters[KILLED].acquire(keys[KILLED]).await.unwrap_err();
        assert_eq!(refused.report().key(), alone.report().key(), "{refused}");
    }
    for part in [0, 2] {
        until_used(&limiters[part], keys[part], &[0]).await;
    }
    for _ in 0..COUNT {
        drop(joint(&limiters, &keys, &[0, 2]).await.unwrap());
    }
    let refused = joint(&limiters, &keys, &[0, 2]).await.unwrap_err();
    assert!(matches!(refused, Limited::Local { .. }), "{refused}");
}

/// Requests that wait for the key of a killed server have booked units of the other keys ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_waiters_return_bookings_when_a_server_is_killed() {
    let mut cluster = start().await;
    // The key of the killed server allows a request every two seconds.
    let scarce = Quota::new(1, Duration::from_secs(2));
    let limiters = limiters(&cluster, scarce, Duration::from_secs(20));
    let keys = keys(&cluster, &limiters).await;
    drop(joint(&limiters, &keys, &[0, 1, 2]).await.unwrap());
    let waiters: Vec<_> = (1..COUNT)
        .map(|_| tokio::spawn(joint(&limiters, &keys, &[0, 1, 2]).into_future()))
        .collect();
    for part in [0, 2] {
        until_used(&limiters[part], keys[part], &[u64::from(COUNT)]).await;
    }

    cluster.node(KILLED).kill();
    // On a machine that stalls, a slot may have come before the server was killed.
    let mut left = 1;
    for waiter in waiters {
        match waiter.await.unwrap() {
            Ok(_) => left += 1,
            Err(refused) => {
                let is_of_store = matches!(refused, Limited::Store { .. });
                assert!(is_of_store, "{refused}");
                assert_eq!(refused.report().name(), Some(NAMES[KILLED]), "{refused}");
            }
        }
    }
    for part in [0, 2] {
        until_used(&limiters[part], keys[part], &[left]).await;
    }
}

/// The units of a quota are keys of their own, mostly on different servers. Processes share them, a
/// refused request takes none, and a settlement gives some back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_are_shared_whole_in_a_cluster() {
    let cluster = start().await;
    let process = || {
        let store = patient::of(RedisStore::cluster(cluster.urls()));
        RateLimitLayer::builder("60/hour, 300 tokens/hour".parse().unwrap())
            .store(store)
            .max_wait(Duration::ZERO)
            .settle_by_hand()
            .build()
            .unwrap()
            .limiter()
    };
    let processes = [process(), process()];
    let cost = || Cost::new(1).and("tokens", 20);
    for number in 0..6 {
        let key = Key::new(format!("account {number}"));
        let acquire = |process: usize| processes[process].acquire(key).cost(cost());
        let mut all_sent = Vec::new();
        for number in 0..15 {
            all_sent.push(acquire(number % 2).await.unwrap().begin().unwrap());
        }
        for process in [0, 1] {
            let refused = acquire(process).await.unwrap_err();
            assert_eq!(refused.report().unit(), "tokens", "{refused}");
            until_used(&processes[process], key, &[15, 300]).await;
        }
        all_sent[0].settle(Cost::of("tokens", 0));
        until_used(&processes[1], key, &[15, 280]).await;
        drop(acquire(1).await.unwrap());
    }
}

/// Waits until so many units of each limit of a key are used.
async fn until_used(limiter: &Limiter, key: Key, used: &[u64]) {
    let start = Instant::now();
    loop {
        let status = limiter.peek(key).await.unwrap();
        let now: Vec<u64> = status.limits.iter().map(|limit| limit.used).collect();
        if now == used {
            return;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{now:?} units are used, not {used:?}"
        );
        sleep(Duration::from_millis(2)).await;
    }
}
