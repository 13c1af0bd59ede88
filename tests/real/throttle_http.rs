//! Real HTTP: layers that do not know of each other share a bucket that is configured in none of
//! them.
#![cfg(feature = "reqwest-middleware")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest_middleware::ClientBuilder;
use tollgate::AdaptiveThrottleLayer;
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::{Bucket, Upstream};

/// Retrying callers of both ecosystems, each behind its own layer, all succeed, and share the
/// bucket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_share_a_bucket() {
    const CALLS: usize = 40;
    let upstream = Upstream::open().bucket(Bucket {
        size: 20.0,
        refill: 50.0,
        start: 20.0,
    });
    let url = reqwest::Url::parse(&upstream.url()).unwrap();
    let layer = || {
        let builder = AdaptiveThrottleLayer::builder().max_wait(Duration::from_secs(60));
        builder.build().unwrap().retrying()
    };
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let refused = Arc::new(Mutex::new(0));
    let mut callers = Vec::new();
    for _ in 0..2 {
        let mut service = ServiceBuilder::new().layer(layer()).service(client.clone());
        let (url, refused) = (url.clone(), Arc::clone(&refused));
        callers.push(tokio::spawn(async move {
            for _ in 0..CALLS {
                let request = reqwest::Request::new(reqwest::Method::GET, url.clone());
                let response = service.ready().await.unwrap().call(request).await.unwrap();
                *refused.lock().unwrap() += usize::from(response.status() != 200);
            }
        }));
    }
    for _ in 0..2 {
        let client = ClientBuilder::new(client.clone()).with(layer()).build();
        let (url, refused) = (url.clone(), Arc::clone(&refused));
        callers.push(tokio::spawn(async move {
            for _ in 0..CALLS {
                let response = client.get(url.clone()).send().await.unwrap();
                *refused.lock().unwrap() += usize::from(response.status() != 200);
            }
        }));
    }
    for caller in callers {
        caller.await.unwrap();
    }
    let log = upstream.log();
    let sent = log.len();
    println!("{} requests for {} calls", sent, 4 * CALLS);
    assert_eq!(*refused.lock().unwrap(), 0, "each waited for its success");
    assert!(
        sent < 6 * CALLS,
        "half as many again would be no pace at all: {sent}"
    );
}
