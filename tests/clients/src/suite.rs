//! What each client has to show, whatever its calls and its errors look like.

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate::{Limited, Quota, RateLimitLayer};

use crate::server::{Answer, Server};

/// A client of a server, behind a layer.
pub trait Client: Clone + Send + Sync + 'static {
    /// What its calls return if they fail.
    type Error: Error + Send + Sync + 'static;

    /// The JSON that the server answers with.
    const BODY: &'static str;

    /// Makes a client of the server, behind the layer. It does not retry.
    fn new(limit: &RateLimitLayer, server: &Server) -> Self;

    /// Makes one call. A refusal of the server is an error.
    fn call(&self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Returns the refusal in an error of a call, if tollgate refused it.
    fn limited(error: &Self::Error) -> Option<&Limited> {
        Limited::find(error)
    }
}

const LONG: Duration = Duration::from_secs(20);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn layer(quota: Quota, max_wait: Duration) -> RateLimitLayer {
    let layer = RateLimitLayer::builder(quota).max_wait(max_wait).build();
    layer.expect("a good quota")
}

async fn server<C: Client>() -> Server {
    Server::start(C::BODY).await
}

async fn within<F: Future>(calls: F) -> F::Output {
    timeout(LONG, calls).await.expect("the calls end")
}

/// Runs all checks, one after the other.
pub async fn run<C: Client>() {
    never_over::<C>().await;
    refusals_are_found::<C>().await;
    a_429_holds_the_next_call::<C>().await;
    a_call_that_times_out_blocks_no_other::<C>().await;
    a_cancelled_call_is_not_sent::<C>().await;
}

/// Of a burst of calls, each leaves when the server allows it.
pub async fn never_over<C: Client>() {
    let server = server::<C>().await;
    server.limit(10, ms(500));
    let client = C::new(&layer(Quota::new(10, ms(500)), LONG), &server);
    let mut calls = JoinSet::new();
    for _ in 0..35 {
        let client = client.clone();
        calls.spawn(async move { client.call().await });
    }
    for call in within(calls.join_all()).await {
        call.expect("the server accepts each call");
    }
    let log = server.log();
    assert_eq!(log.len(), 35, "each call is sent once");
    assert!(log.iter().all(|arrival| arrival.answer == Answer::Accept));
}

/// A refusal by tollgate is found in the client's own error, with the wait.
pub async fn refusals_are_found<C: Client>() {
    let server = server::<C>().await;
    let client = C::new(&layer(Quota::per_hour(2), Duration::ZERO), &server);
    for _ in 0..2 {
        within(client.call()).await.expect("two calls are allowed");
    }
    let error = within(client.call()).await.expect_err("the third is not");
    let limited = C::limited(&error).unwrap_or_else(|| panic!("no refusal in {error:?}"));
    let wait = limited.retry_after().expect("the wait is known");
    assert!(wait > ms(3_000_000), "{wait:?}");
    assert_eq!(server.log().len(), 2, "a refused call is not sent");
}

/// After a 429 with a time, nothing is sent until then.
pub async fn a_429_holds_the_next_call<C: Client>() {
    let server = server::<C>().await;
    server.next([Answer::Refuse(1)]);
    let client = C::new(&layer(Quota::per_second(1000), LONG), &server);
    let refused = within(client.call()).await;
    let error = refused.expect_err("the server refuses the first call");
    assert!(C::limited(&error).is_none_or(|limited| !is_local(limited)));
    within(client.call()).await.expect("the hold ends");
    let log = server.log();
    assert_eq!(log.len(), 2, "{log:?}");
    let between = log[1].at - log[0].at;
    assert!(between >= ms(1000), "sent after {between:?}");
}

fn is_local(limited: &Limited) -> bool {
    matches!(limited, Limited::Local { .. })
}

/// A call without an answer ends by its timeout, and the next one is sent.
pub async fn a_call_that_times_out_blocks_no_other<C: Client>() {
    let server = server::<C>().await;
    server.next([Answer::Hang]);
    let client = C::new(&layer(Quota::per_second(1000), LONG), &server);
    let call = timeout(ms(200), client.call()).await;
    assert!(call.is_err(), "the server does not answer");
    within(client.call())
        .await
        .expect("it answers the next call");
}

/// A call that is cancelled while it waits is not sent, and takes no slot.
pub async fn a_cancelled_call_is_not_sent<C: Client>() {
    let server = server::<C>().await;
    let limit = layer(Quota::new(1, ms(700)), LONG);
    let client = C::new(&limit, &server);
    within(client.call()).await.expect("the first call leaves");
    let waiting = client.clone();
    let waiting = tokio::spawn(async move { waiting.call().await });
    sleep(ms(50)).await;
    waiting.abort();
    assert!(waiting.await.is_err_and(|error| error.is_cancelled()));
    within(client.call()).await.expect("the next slot is free");
    assert_eq!(server.log().len(), 2);
    assert_eq!(limit.limiter().stats().units, 2, "it has used no permit");
}
