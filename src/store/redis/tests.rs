//! Tests of the store's thread after a panic, and of the labels of keys.

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisServer;

use super::RedisStore;
use super::job::Job;
use crate::clock;
use crate::key::Key;
use crate::layer::RateLimitLayer;
use crate::quota::Quota;
use crate::store::Store;
use crate::{Limited, OnStoreError};

/// A claim is valid for its time to live only. If the thread forgot the claim, another process
/// would be granted its slot.
#[tokio::test]
async fn a_panic_in_the_thread_forgets_no_claims() {
    const LIFE: Duration = Duration::from_secs(1);
    let server = RedisServer::start().unwrap();
    // The machine may stall for longer than the default timeout.
    let patient = || RedisStore::builder(&server.url()).store_timeout(Duration::from_secs(5));
    let store = || Arc::new(patient().build().unwrap());
    let limiter = |store: Arc<RedisStore>| {
        let layer = RateLimitLayer::builder(Quota::in_flight(1))
            .store(store)
            .max_wait(Duration::ZERO);
        layer.in_flight_ttl(LIFE).build().unwrap().limiter()
    };
    let (panics, other) = (store(), store());
    let call = limiter(panics.clone()).acquire(Key::ALL).await.unwrap();
    panics.thread.send(Job::Panic).unwrap();
    let _ = panics.connect().await;
    panics.connect().await.unwrap();
    clock::sleep(LIFE * 2).await;
    let other = limiter(other);
    assert!(
        other.acquire(Key::ALL).await.is_err(),
        "the first call is still in flight"
    );
    drop(call);
    panics.connect().await.unwrap();
    clock::sleep(Duration::from_millis(100)).await;
    assert!(
        other.acquire(Key::ALL).await.is_ok(),
        "the first call has ended"
    );
}

#[tokio::test]
async fn labels_need_the_secret_and_stay_the_same() {
    let store = || {
        RedisStore::builder("redis://127.0.0.1:1/")
            .secret("only we know")
            .build()
            .unwrap()
    };
    let (key, name) = (
        Key::new("ada@example.com"),
        store().name(Key::new("ada@example.com")),
    );
    let label = store().label(key);
    assert_eq!(label.len(), 8);
    assert!(
        name.contains(&format!("{{{label}")),
        "{name} begins with {label}"
    );
    assert!(!key.hex().contains(&*label), "a digest without the secret");
    let open = RedisStore::new("redis://127.0.0.1:1/").unwrap();
    assert!(
        !key.hex().contains(&*open.label(key)),
        "without a secret of the store, that of the process"
    );

    let refused = async |on_error| {
        let layer = RateLimitLayer::builder(Quota::per_hour(1))
            .store(Arc::new(store()))
            .max_wait(Duration::ZERO);
        let limiter = layer.on_store_error(on_error).build().unwrap().limiter();
        let first: Result<_, Limited> = limiter.acquire(key).await;
        match first {
            Err(limited) => limited,
            Ok(_) => limiter.acquire(key).await.err().unwrap(),
        }
    };
    assert_eq!(
        refused(OnStoreError::FailClosed).await.report().key(),
        &*label
    );
    assert_eq!(
        refused(OnStoreError::FallbackShare).await.report().key(),
        &*label
    );
}
