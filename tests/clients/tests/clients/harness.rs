//! The tests that every client passes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use tokio::task::JoinSet;
use tollgate::{Limited, Quota, RateLimitBuilder, RateLimitLayer, Reason, by_host};
use tower::BoxError;
use upstream::{Rule, Upstream};

/// Longer than any test waits. What has not happened by then never does.
const NEVER: Duration = Duration::from_secs(60);

const HOUR: Duration = Duration::from_secs(3600);

/// What a client is built of.
pub struct Setup {
    pub limit: RateLimitLayer,
    /// The most attempts of a call, including the first.
    pub attempts: u32,
    /// The timeout of an attempt.
    pub timeout: Duration,
    /// The URL of the server, with a slash at the end.
    pub url: String,
}

/// Makes a call. It fails unless the response is a success.
pub type Call = Arc<dyn Fn() -> CallFuture + Send + Sync>;
pub type CallFuture = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

/// Converts a function that makes a call.
pub fn call<F>(make: impl Fn() -> F + Send + Sync + 'static) -> Call
where
    F: Future<Output = Result<(), BoxError>> + Send + 'static,
{
    Arc::new(move || Box::pin(make()))
}

/// A client under test.
pub trait Subject {
    /// The body of a response that the client accepts.
    const BODY: &str;
    /// Whether its call has a body.
    const SENDS_BODY: bool;
    /// Whether a refusal by the server is found in the error of a call in any case, and not only with
    /// `error_on_upstream_limit`.
    const REFUSAL_IS_LIMITED: bool = false;

    /// Builds the client.
    fn client(setup: Setup) -> Call;

    /// Sets the key.
    fn keyed(builder: RateLimitBuilder) -> RateLimitBuilder {
        builder.key(by_host)
    }

    /// Returns the text of the key in errors.
    fn key_text() -> String {
        "127.0.0.1".to_owned()
    }

    /// Returns a refusal by the server, with `Retry-After`.
    fn refusal(retry_after: u64) -> Response<String> {
        upstream::refusal(retry_after)
    }
}

/// A server, a limit in front of it, and the client.
struct Stage {
    upstream: Upstream,
    limit: RateLimitLayer,
    call: Call,
}

impl Stage {
    fn new<S: Subject>(upstream: Upstream, limit: RateLimitBuilder) -> Self {
        Stage::with::<S>(upstream, limit, 1, NEVER)
    }

    fn with<S: Subject>(
        upstream: Upstream,
        limit: RateLimitBuilder,
        attempts: u32,
        timeout: Duration,
    ) -> Self {
        let upstream = upstream.body(S::BODY);
        let limit = S::keyed(limit).build().unwrap();
        let call = S::client(Setup {
            limit: limit.clone(),
            attempts,
            timeout,
            url: upstream.url(),
        });
        Stage {
            upstream,
            limit,
            call,
        }
    }

    async fn call(&self) -> Result<(), BoxError> {
        (self.call)().await
    }

    /// Makes `calls` calls at once, and returns their results.
    async fn calls(&self, calls: usize) -> Vec<Result<(), BoxError>> {
        let tasks: JoinSet<_> = (0..calls).map(|_| (self.call)()).collect();
        tasks.join_all().await
    }

    fn arrived(&self) -> usize {
        self.upstream.log().len()
    }

    fn waiting(&self) -> usize {
        self.limit.limiter().stats().waiting()
    }

    fn cancelled(&self) -> u64 {
        self.limit.limiter().stats().requests().cancelled
    }
}

/// Waits until `condition` is true.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    if tokio::time::timeout(NEVER, poll).await.is_err() {
        panic!("it never happened: {what}");
    }
}

fn is_limited(error: &BoxError) -> bool {
    Limited::find(&**error).is_some()
}

pub async fn never_over<S: Subject>() {
    let rule = Rule::new(10, Duration::from_secs(1));
    // The transit slack is as long as this machine may pause between the sending of a call and its
    // arrival.
    let limit = RateLimitLayer::builder(Quota::new(rule.count, rule.window))
        .transit_slack(Duration::from_millis(500));
    let stage = Stage::new::<S>(Upstream::start(rule), limit);
    for result in stage.calls(25).await {
        result.unwrap();
    }
    assert_eq!(stage.arrived(), 25);
    assert_eq!(stage.upstream.tally().refused, 0);
    assert_eq!(stage.upstream.log().over(rule, Duration::ZERO), None);
}

pub async fn a_refusal_is_found_in_the_error<S: Subject>() {
    let limit = RateLimitLayer::builder(Quota::per_minute(1)).max_wait(Duration::ZERO);
    let stage = Stage::new::<S>(Upstream::open(), limit);
    stage.call().await.unwrap();
    let error = stage.call().await.unwrap_err();
    let limited = Limited::find(&*error).unwrap_or_else(|| panic!("no limit: {error:?}"));
    // A request without `max_wait` waits for the margin of its quota.
    let margin = Duration::from_millis(70);
    assert!(
        matches!(limited, Limited::Local { reason: Reason::MaxWait(wait), .. } if *wait == margin),
        "{limited:?}"
    );
    let wait = limited.retry_after().unwrap();
    assert!(
        wait > Duration::ZERO && wait < Duration::from_secs(62),
        "{wait:?}"
    );
    // A host has its name once a layer of this process, perhaps of another test, has seen it.
    let key = limited.report().key();
    assert!(
        ["127.0.0.1", S::key_text().as_str()].contains(&key),
        "{key}"
    );
    assert_eq!(stage.arrived(), 1);
}

pub async fn a_refusal_by_the_server_is_found_in_the_error<S: Subject>() {
    let limit = RateLimitLayer::builder(Quota::per_minute(100)).error_on_upstream_limit();
    let upstream = Upstream::open().script(|_| Some(S::refusal(7)));
    let stage = Stage::new::<S>(upstream, limit);
    let error = stage.call().await.unwrap_err();
    let limited = Limited::find(&*error).unwrap_or_else(|| panic!("no limit: {error:?}"));
    let Limited::Upstream { status, .. } = limited else {
        panic!("{limited:?}");
    };
    assert_eq!(*status, StatusCode::TOO_MANY_REQUESTS);
    let wait = limited.retry_after().unwrap();
    assert!(wait <= Duration::from_secs(7), "{wait:?}");
    assert_eq!(stage.arrived(), 1);
}

pub async fn a_429_holds_the_next_calls<S: Subject>() {
    let upstream = Upstream::open().script(|call| (call == 0).then(|| S::refusal(1)));
    let stage = Stage::new::<S>(upstream, RateLimitLayer::builder(Quota::per_minute(100)));
    let error = stage.call().await.unwrap_err();
    assert_eq!(is_limited(&error), S::REFUSAL_IS_LIMITED, "{error:?}");
    for result in stage.calls(5).await {
        result.unwrap();
    }
    let log = stage.upstream.log();
    assert_eq!(log.len(), 6);
    for call in &log[1..] {
        assert!(call.at - log[0].at >= Duration::from_secs(1));
    }
}

pub async fn a_retry_waits_for_the_hold<S: Subject>() {
    let upstream = Upstream::open().script(|call| (call < 2).then(|| S::refusal(1)));
    let limit = RateLimitLayer::builder(Quota::per_minute(100));
    let stage = Stage::with::<S>(upstream, limit, 3, NEVER);
    stage.call().await.unwrap();
    let log = stage.upstream.log();
    assert_eq!(log.len(), 3);
    for pair in log.windows(2) {
        assert!(pair[1].at - pair[0].at >= Duration::from_secs(1));
    }
    assert_eq!(log[0].body > 0, S::SENDS_BODY);
    for call in &log[1..] {
        assert_eq!(call.body, log[0].body, "each attempt sends the body");
    }
    assert_eq!(stage.limit.limiter().stats().requests().total(), 3);
}

pub async fn the_timeout_of_an_attempt_begins_after_the_wait<S: Subject>() {
    let limit = RateLimitLayer::builder(Quota::per_second(1));
    let stage = Stage::with::<S>(
        Upstream::open().latency(HOUR),
        limit,
        1,
        Duration::from_millis(300),
    );
    for result in stage.calls(2).await {
        let error = result.unwrap_err();
        assert!(!is_limited(&error), "{error:?}");
    }
    assert_eq!(stage.arrived(), 2, "the second has waited for a second");
}

pub async fn a_total_timeout_ends_the_wait<S: Subject>() {
    let limit = RateLimitLayer::builder(Quota::per_minute(1)).max_wait(2 * NEVER);
    let stage = Stage::new::<S>(Upstream::open(), limit);
    stage.call().await.unwrap();
    let total = tokio::time::timeout(Duration::from_millis(300), stage.call());
    assert!(total.await.is_err());
    until("the request leaves the queue", || stage.waiting() == 0).await;
    assert_eq!(stage.arrived(), 1);
}

pub async fn a_dropped_wait_takes_no_permit<S: Subject>() {
    // A request behind one in the queue would have to wait for 4 s, and would be refused.
    let limit = RateLimitLayer::builder(Quota::new(1, Duration::from_secs(2)))
        .max_wait(Duration::from_secs(3));
    let stage = Stage::new::<S>(Upstream::open(), limit);
    stage.call().await.unwrap();
    let waiting = tokio::spawn((stage.call)());
    until("a request waits", || stage.waiting() == 1).await;
    assert!(
        is_limited(&stage.call().await.unwrap_err()),
        "it is behind another one"
    );
    waiting.abort();
    until("its request is cancelled", || stage.cancelled() == 1).await;
    stage.call().await.unwrap();
    assert_eq!(stage.arrived(), 2);
}

pub async fn a_dropped_call_frees_its_in_flight_slot<S: Subject>() {
    let limit = RateLimitLayer::builder(Quota::in_flight(1)).max_wait(NEVER);
    let stage = Stage::new::<S>(Upstream::open().latency(HOUR), limit);
    let first = tokio::spawn((stage.call)());
    until("the first call arrives", || stage.arrived() == 1).await;
    let second = tokio::spawn((stage.call)());
    until("the second call waits", || stage.waiting() == 1).await;
    assert_eq!(stage.arrived(), 1);
    first.abort();
    until("the second call arrives", || stage.arrived() == 2).await;
    second.abort();
    assert!(second.await.unwrap_err().is_cancelled());
}

pub async fn a_lost_connection_is_no_refusal<S: Subject>() {
    let limit = RateLimitLayer::builder(Quota::per_minute(100));
    let stage = Stage::new::<S>(Upstream::open().latency(HOUR), limit);
    let call = tokio::spawn((stage.call)());
    until("the call arrives", || stage.arrived() == 1).await;
    drop(stage.upstream);
    for error in [call.await.unwrap(), (stage.call)().await] {
        let error = error.unwrap_err();
        assert!(!is_limited(&error), "{error:?}");
    }
}

/// Defines the tests of a [`Subject`], in a module of its own. The call of a client that is `blocking`
/// cannot be dropped.
macro_rules! proofs {
    ($name:ident, $subject:ty) => {
        $crate::harness::proofs! {
            $name, $subject;
            never_over
            a_refusal_is_found_in_the_error
            a_refusal_by_the_server_is_found_in_the_error
            a_429_holds_the_next_calls
            a_retry_waits_for_the_hold
            the_timeout_of_an_attempt_begins_after_the_wait
            a_total_timeout_ends_the_wait
            a_dropped_wait_takes_no_permit
            a_dropped_call_frees_its_in_flight_slot
            a_lost_connection_is_no_refusal
        }
    };
    ($name:ident, $subject:ty, blocking) => {
        $crate::harness::proofs! {
            $name, $subject;
            never_over
            a_refusal_is_found_in_the_error
            a_refusal_by_the_server_is_found_in_the_error
            a_429_holds_the_next_calls
            a_retry_waits_for_the_hold
            the_timeout_of_an_attempt_begins_after_the_wait
            a_lost_connection_is_no_refusal
        }
    };
    ($name:ident, $subject:ty; $($test:ident)+) => {
        mod $name {
            use super::*;

            $(
                #[tokio::test]
                async fn $test() {
                    $crate::harness::$test::<$subject>().await;
                }
            )+
        }
    };
}

pub(crate) use proofs;
