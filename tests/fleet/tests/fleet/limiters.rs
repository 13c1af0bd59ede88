//! Servers whose limiters others wrote: nginx and HAProxy. The example `real_limiters` has more of them, and the figures
//! of runs that take minutes.

use std::thread;

use anyhow::anyhow;
use real_limiters::{Figures, Limit, Server, ServerKind, closed_loops};
use reqwest::{Client, Request, Response};
use tower::{BoxError, Service};

use super::*;

/// 50 a second: nginx counts it as a rate, HAProxy in windows.
pub(crate) const LIMIT: Limit = Limit {
    count: 100,
    window: ms(2000),
};

pub(crate) const SPAN: Duration = ms(5000);

/// Lets 20 callers call a server for `SPAN` through what `gated` makes of a client.
pub(crate) fn figures<S>(kind: ServerKind, gated: impl Fn(Client) -> S) -> anyhow::Result<Figures>
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

/// Calls `look` with each of `kinds` at the same time.
pub(crate) fn at_the_same_time<T: Send, const N: usize>(kinds: [T; N], look: impl Fn(T) + Sync) {
    let look = &look;
    thread::scope(|scope| {
        for kind in kinds {
            scope.spawn(move || look(kind));
        }
    });
}

/// Otherwise the tests behind a layer would prove nothing: see `alone::limiters`.
#[test]
fn limiters_refuse_callers_without_a_layer() {
    let _turn = busy_turn();
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
