//! Histories that an adversary has found: hostile servers, rollouts, handlers. Under a paused clock.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tollgate::store::{MemoryStore, Store};
use tollgate::{Key, Quota, RateLimitLayer};

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// A release without shares runs beside one with a share. Some requests of the latter have two keys.
#[tokio::test(start_paused = true)]
async fn shares_are_rolled_out_beside_several_limits() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let builder = |quota| RateLimitLayer::builder(quota).store(store.clone());
    let key = Key::new("api");
    let old = builder(Quota::per_second(50)).build().unwrap().limiter();
    for _ in 0..30 {
        let old = old.clone();
        tokio::spawn(async move {
            loop {
                let _ = old.acquire(key).await;
            }
        });
    }
    sleep(millis(500)).await;
    let new = builder(Quota::per_second(50)).share("web", 50);
    let new = new.build().unwrap().limiter();
    let channels = builder(Quota::per_second(10)).build().unwrap().limiter();
    let mut requests = Vec::new();
    for request in 0..200 {
        let mut acquire = new.acquire(key);
        if request % 4 >= 2 {
            acquire = acquire.class("web");
        }
        if request % 2 == 1 {
            acquire = acquire.with(channels.acquire(Key::new("7")));
        }
        requests.push(tokio::spawn(acquire));
        sleep(millis(20)).await;
    }
    let mut sent = 0;
    for request in requests {
        sent += u32::from(request.await.unwrap().is_ok());
    }
    assert!(sent >= 190, "{sent} of 200 sent");
}
