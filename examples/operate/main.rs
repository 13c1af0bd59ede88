//! A service that calls an API within its limits, and can be operated: metrics for Prometheus, a page of
//! its limits, and an end that loses no request.
//!
//!     cargo run --example operate
//!
//! It calls an API of its own on loopback, so it has data at once. Beside this file are the
//! configuration of a Prometheus that reads its metrics, a dashboard for Grafana, and alerts.

#[path = "../common/mod.rs"]
mod common;
mod load;
mod pages;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::ctrl_c;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use tollgate::{AdaptiveThrottleLayer, Quota, RateLimitLayer, by_host};
use upstream::Upstream;

use common::Options;

const HELP: &str = "\
A service that calls an API within its limits, with metrics, a page of its limits, and a drain.

Usage: cargo run --example operate -- [options]

  --listen <address>  where to serve /metrics and /limits        [127.0.0.1:9898]
  --api <url>         whom to call                               [spawn: a service of its own]
  --redis <url>       count there, for many processes            [count in this process]
  --drain <s>         how long waiting requests may still leave  [5]
  --linger <s>        how long the pages are served after that   [2]
  --help              this text
";

#[tokio::main]
async fn main() -> ExitCode {
    common::main("operate", HELP, run).await
}

async fn run(mut options: Options) -> Result<(), BoxError> {
    let listen = options.text("--listen", "127.0.0.1:9898");
    let (api, redis) = (options.find("--api"), options.find("--redis"));
    let drain = options.seconds("--drain", 5.0)?;
    let linger = options.seconds("--linger", 2.0)?;
    options.finish()?;
    let own_api = api.is_none().then(load::api);
    let api = api.unwrap_or_else(|| own_api.as_ref().map(Upstream::url).unwrap_or_default());

    let mut terminate = signal(SignalKind::terminate())?;
    // First the recorder, and then the first publish: it sees every wait.
    let metrics = pages::install_recorder()?;
    tollgate::metrics::publish();

    let (orders, search) = layers(redis.as_deref())?;
    let (stop, stopped) = watch::channel(false);
    let load = tokio::spawn(load::run(api, orders, search, stopped));

    let listener = TcpListener::bind(&listen).await?;
    println!("limits:  http://{}/limits", listener.local_addr()?);
    println!("metrics: http://{}/metrics", listener.local_addr()?);
    let server = tokio::spawn(async move { axum::serve(listener, pages::router(metrics)).await });

    asked_to_end(&mut terminate).await;
    // First no new calls, as a server stops to accept requests; then those that wait get their time.
    let _ = stop.send(true);
    println!("drained: {}", tollgate::drain_all(drain).await?);
    load.await?;
    // Prometheus reads the last counts. A second signal ends the wait.
    let _ = timeout(linger, asked_to_end(&mut terminate)).await;
    server.abort();
    Ok(())
}

/// Waits for SIGTERM or Ctrl-C.
async fn asked_to_end(terminate: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = ctrl_c() => {}
    }
}

/// Builds the limits of the two APIs. Their names are the label `limiter` of all metrics.
fn layers(redis: Option<&str>) -> Result<(RateLimitLayer, AdaptiveThrottleLayer), BoxError> {
    let quota = Quota::per_second(20).and(Quota::in_flight(16));
    let mut orders = RateLimitLayer::builder(quota)
        .name("orders")
        .key(by_host)
        .max_wait(Duration::from_secs(1))
        .on_event(|event| eprintln!("orders: {event}"));
    if let Some(url) = redis {
        let store = RedisStore::builder(url).prefix("operate").build()?;
        orders = orders.store(Arc::new(store));
    }
    let search = AdaptiveThrottleLayer::builder().name("search");
    Ok((orders.build()?, search.build()?))
}
