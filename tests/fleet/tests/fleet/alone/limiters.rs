//! Servers whose limiters others wrote: nginx and HAProxy. The example `real_limiters` has more of them, and the figures
//! of runs that take minutes.

use std::thread;

use anyhow::{anyhow, ensure};
use real_limiters::{Figures, Limit, Server, ServerKind, closed_loops};
use reqwest::{Client, Request, Response};
use tollgate::AdaptiveThrottleLayer;
use tower::{BoxError, Layer, Service};

use super::*;

/// 50 a second: nginx counts it as a rate, HAProxy in windows.
const LIMIT: Limit = Limit {
    count: 100,
    window: ms(2000),
};

const SPAN: Duration = ms(5000);

/// Lets 20 callers call a server for `SPAN` through what `gated` makes of a client.
fn figures<S>(kind: ServerKind, gated: impl Fn(Client) -> S) -> anyhow::Result<Figures>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let server = Server::start(kind, LIMIT)?;
    let service = gated(Client::builder().no_proxy().build()?);
    let url = server.url().parse()?;
    let calls = closed_loops(service, &url, 20, SPAN, ms(20));
    let calls = runtime.block_on(calls).map_err(|error| anyhow!(error))?;
    let figures = Figures::new(kind, LIMIT, SPAN, &server.stop()?, &calls);
    println!(
        "{kind}: {:.2} % refused, {:.1} % used, longest call {:.2?}",
        figures.refused, figures.used, figures.longest
    );
    Ok(figures)
}

/// Otherwise the other tests of this file would prove nothing.
#[test]
fn limiters_refuse_callers_without_a_layer() {
    let _turn = turn();
    let kinds = [
        ServerKind::NginxBurst,
        ServerKind::NginxStrict,
        ServerKind::Haproxy,
    ];
    at_the_same_time(kinds, |kind| {
        let figures = figures(kind, |client| client).unwrap();
        assert!(
            figures.refused > 50.0 && figures.used < 105.0,
            "{kind}: {figures:?}"
        );
    });
}

/// Calls `look` with each of `kinds` at the same time.
fn at_the_same_time<T: Send, const N: usize>(kinds: [T; N], look: impl Fn(T) + Sync) {
    let look = &look;
    thread::scope(|scope| {
        for kind in kinds {
            scope.spawn(move || look(kind));
        }
    });
}

/// On a calm machine, 85 % is used. A stall delays requests on the way and lets permits of 2 ms expire.
#[test]
fn nginx_with_20_ms_spacing_refuses_nothing() {
    let _turn = turn();
    let limit = RateLimitLayer::builder(Quota::every(LIMIT.window / LIMIT.count))
        .transit_slack(ms(1))
        .max_rate_loss(14)
        .max_wait(SPAN * 2);
    keeps(ServerKind::NginxStrict, &limit.build().unwrap(), 60.0);
}

/// HAProxy estimates the use of a window from the window before.
#[test]
fn nginx_with_a_burst_and_haproxy_refuse_nothing() {
    let _turn = turn();
    let bucket = Quota::bucket(ServerKind::BURST + 1).refill(LIMIT.count, LIMIT.window);
    let counter = Quota::sliding_counter(LIMIT.count, LIMIT.window);
    let quotas = [
        (ServerKind::NginxBurst, bucket),
        (ServerKind::Haproxy, counter),
    ];
    at_the_same_time(quotas, |(kind, quota)| {
        let limit = RateLimitLayer::builder(quota).max_wait(SPAN * 2);
        keeps(kind, &limit.build().unwrap(), 85.0);
    });
}

/// Checks that the server refuses nothing behind `limit`, and that at least `used` per cent of its limit are used.
fn keeps(kind: ServerKind, limit: &RateLimitLayer, used: f64) {
    once_in_three(|| {
        let figures = figures(kind, |client| limit.clone().layer(client))?;
        ensure!(
            figures.refused == 0.0,
            "{kind} refused {:.2} %",
            figures.refused
        );
        ensure!(
            figures.used >= used,
            "{:.1} % of {kind} is used",
            figures.used
        );
        Ok(())
    });
}

/// The floor is generous: neither server states anything, and five seconds are short.
#[test]
fn adaptive_layer_finds_a_speed_in_silence() {
    let _turn = turn();
    at_the_same_time([ServerKind::NginxBurst, ServerKind::Haproxy], |kind| {
        once_in_three(|| {
            let throttle = AdaptiveThrottleLayer::builder()
                .max_wait(SPAN * 2)
                .build()?;
            let throttle = throttle.retrying();
            let figures = figures(kind, |client| throttle.layer(client))?;
            ensure!(
                figures.refused <= 30.0,
                "{kind} refused {:.2} %",
                figures.refused
            );
            ensure!(
                figures.used >= 15.0,
                "{:.1} % of {kind} is used",
                figures.used
            );
            Ok(())
        });
    });
}
