//! The work of the program: orders and searches, in waves.

use std::time::Duration;

use reqwest::{Request, Response};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tollgate::error::BoxError;
use tollgate::{AdaptiveThrottleLayer, RateLimitLayer};
use tower::{Service, ServiceBuilder, ServiceExt};
use upstream::{Upstream, WHO_HEADER, refusal};

use crate::common;

/// The time between two rounds of requests.
const ROUND: Duration = Duration::from_millis(100);

/// A wave: how many orders are made in each round. The first parts are more than the limit allows.
const WAVE: [u32; 8] = [5, 5, 4, 2, 1, 1, 1, 2];

/// The rounds of each part of a wave.
const ROUNDS: usize = 25;

/// Starts an API that refuses one call of 400, whatever its caller does.
pub(crate) fn api() -> Upstream {
    let api = Upstream::open().latency(Duration::from_millis(30));
    api.script(|call| (call % 400 == 40).then(|| refusal(1)))
}

/// Calls the API until `stopped`, and then waits for the calls that have begun.
pub(crate) async fn run(
    api: String,
    orders: RateLimitLayer,
    search: AdaptiveThrottleLayer,
    mut stopped: watch::Receiver<bool>,
) {
    let Ok(client) = common::client() else { return };
    let orders = ServiceBuilder::new().layer(orders).service(client.clone());
    let search = ServiceBuilder::new().layer(search).service(client);
    let (mut rounds, mut calls) = (interval(ROUND), JoinSet::new());
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for round in 0.. {
        tokio::select! {
            _ = rounds.tick() => {}
            _ = stopped.changed() => break,
        }
        for _ in 0..WAVE[round / ROUNDS % WAVE.len()] {
            calls.spawn(call(orders.clone(), api.clone(), "orders"));
        }
        calls.spawn(call(search.clone(), api.clone(), "search"));
        while calls.try_join_next().is_some() {}
    }
    calls.join_all().await;
}

/// Makes one call. Its outcome is in the metrics.
async fn call<S>(mut service: S, api: String, who: &'static str) -> Result<(), BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    let mut request = Request::new(reqwest::Method::GET, api.parse()?);
    request.headers_mut().insert(WHO_HEADER, who.parse()?);
    let service = service.ready().await.map_err(Into::into)?;
    let response = service.call(request).await.map_err(Into::into)?;
    response.bytes().await?; // so that the connection can be used again
    Ok(())
}
