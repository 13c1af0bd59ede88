//! The store in Redis, against a real server.

#![cfg(all(feature = "redis", feature = "contract"))]

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisServer;
use tollgate::store::{RedisStore, contract};
use tollgate::{Key, Quota, RateLimitLayer};

#[tokio::test]
async fn redis_keeps_the_contract() {
    let server = RedisServer::start().unwrap();
    contract::check(Arc::new(RedisStore::new(&server.url()).unwrap())).await;
}

#[tokio::test]
async fn two_limiters_share_one_limit() {
    let server = RedisServer::start().unwrap();
    let limiter = || {
        let store = Arc::new(RedisStore::new(&server.url()).unwrap());
        let layer = RateLimitLayer::builder(Quota::per_minute(10)).store(store).max_wait(Duration::ZERO);
        layer.build().unwrap().limiter()
    };
    let limiters = [limiter(), limiter(), limiter()];
    let mut granted = 0;
    for round in 0..30 {
        granted += usize::from(limiters[round % 3].acquire(Key::ALL).await.is_ok());
    }
    assert_eq!(granted, 10);
}
