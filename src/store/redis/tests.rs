//! The store's thread when something in it fails.

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisServer;

use super::RedisStore;
use super::worker::Job;
use crate::clock;
use crate::key::Key;
use crate::layer::RateLimitLayer;
use crate::quota::Quota;

/// A claim is good for its life only: if the thread forgot it, another process would be given the place.
#[tokio::test]
async fn a_panic_in_the_thread_forgets_no_claims() {
    const LIFE: Duration = Duration::from_secs(1);
    let server = RedisServer::start().unwrap();
    let store = || Arc::new(RedisStore::new(&server.url()).unwrap());
    let limiter = |store: Arc<RedisStore>| {
        let layer = RateLimitLayer::builder(Quota::in_flight(1)).store(store).max_wait(Duration::ZERO);
        layer.in_flight_life(LIFE).build().unwrap().limiter()
    };
    let (panics, other) = (store(), store());
    let call = limiter(panics.clone()).acquire(Key::ALL).await.unwrap();
    panics.send(Job::Panic).unwrap();
    let _ = panics.connect().await;
    panics.connect().await.unwrap();
    clock::sleep(LIFE * 2).await;
    let other = limiter(other);
    assert!(other.acquire(Key::ALL).await.is_err(), "the first call is still in flight");
    drop(call);
    panics.connect().await.unwrap();
    clock::sleep(Duration::from_millis(100)).await;
    assert!(other.acquire(Key::ALL).await.is_ok(), "the first call has ended");
}
