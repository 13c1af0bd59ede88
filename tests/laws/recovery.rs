//! A server refuses some requests in a row and is healthy again. The pace then returns to the speed that callers
//! need.

use std::time::Duration;

use http::{Response, StatusCode};
use tollgate::AdaptiveThrottleLayer;
use tollgate::pace::Fair;
use tower::{Layer, ServiceExt};

use crate::support::{Upstream, get, ok, pass};

/// The clients together send one request per this time.
const EVERY: Duration = Duration::from_millis(40);
/// The requests of half a minute.
const COUNTED: u32 = 750;

/// Sends 25 requests per second from `clients` that share nothing. After `calm` requests the upstream refuses
/// `refusals` in a row, and none later. Returns the part of the requests of the second half of the minute after
/// that which pass within `max_wait`.
async fn recover(
    layer: impl Fn() -> AdaptiveThrottleLayer,
    clients: usize,
    calm: usize,
    refusals: usize,
) -> f64 {
    let refusal = || {
        let mut response = Response::new(String::new());
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        Ok(response)
    };
    let script = (0..calm)
        .map(|_| ok())
        .chain((0..refusals).map(|_| refusal()));
    let upstream = Upstream::answering(script);
    let services: Vec<_> = (0..clients)
        .map(|_| layer().retrying().layer(upstream.clone()))
        .collect();
    let mut calls = Vec::new();
    let mut counted_from = None;
    while counted_from.is_none_or(|from| calls.len() < from + COUNTED as usize) {
        if upstream.count() >= calm + refusals {
            counted_from.get_or_insert(calls.len() + COUNTED as usize);
        }
        let service = services[calls.len() % clients].clone();
        calls.push(tokio::spawn(service.oneshot(get("/"))));
        pass(EVERY).await;
    }
    let mut passed = 0.0;
    for call in calls.drain(counted_from.expect("the upstream refused")..) {
        let response = call.await.unwrap();
        passed += f64::from(u8::from(response.is_ok_and(|it| it.status() == 200)));
    }
    passed / f64::from(COUNTED)
}

#[tokio::test(start_paused = true)]
async fn half_of_the_rate_is_back_a_minute_after_refusals() {
    let sole = || {
        AdaptiveThrottleLayer::builder()
            .pace(|| Fair::new().sole_client())
            .build()
            .unwrap()
    };
    let paces: [(&str, &dyn Fn() -> AdaptiveThrottleLayer); 2] = [
        ("default", &AdaptiveThrottleLayer::new),
        ("sole client", &sole),
    ];
    let mut bad = Vec::new();
    for (name, layer) in paces {
        for clients in [1, 5] {
            for calm in [0, 500] {
                for refusals in [3, 4, 8, 20] {
                    let passed = recover(layer, clients, calm, refusals).await;
                    if passed < 0.5 {
                        bad.push(format!(
                            "{name}, {clients} clients, {refusals} after {calm}: {passed:.2}"
                        ));
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
