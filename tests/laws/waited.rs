//! What a request that waited shows of it: in the extensions of its response, and as a span. Under a paused clock.

use crate::support::remote::Remote;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{Extensions, Request, Response, StatusCode};
use tokio::join;
use tokio::time::sleep;
use tollgate::limiter::Because;
use tollgate::{
    AdaptiveThrottleLayer, Key, OnStoreError, Quota, RateLimitBuilder, RateLimitLayer, RequestRef,
    Waited,
};
use tower::{Layer, Service, service_fn};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

type Answer = Response<&'static str>;

/// A server that takes `time` for a request.
fn server(
    time: Duration,
) -> impl Service<Request<()>, Response = Answer, Error = Infallible, Future: Send> + Clone {
    service_fn(move |_: Request<()>| async move {
        sleep(time).await;
        Ok(Response::new("ok"))
    })
}

fn waited(extensions: &Extensions) -> Option<(Duration, Because)> {
    let waited = extensions.get::<Waited>()?;
    Some((waited.duration(), waited.because()))
}

/// Sends `requests` at once through `layer`. Returns how each waited, in the order of the requests.
async fn waits<L>(layer: &L, time: Duration, requests: usize) -> Vec<Option<(Duration, Because)>>
where
    L: Layer<BoxedServer>,
    L::Service: Service<Request<()>, Response = Answer, Error: std::fmt::Debug>,
{
    let mut service = layer.layer(BoxedServer::new(server(time)));
    let calls = (0..requests).map(|_| service.call(Request::new(())));
    let answers = futures::future::join_all(calls).await.into_iter();
    answers
        .map(|answer| waited(answer.unwrap().extensions()))
        .collect()
}

type BoxedServer = tower::util::BoxCloneService<Request<()>, Answer, Infallible>;

#[tokio::test(start_paused = true)]
async fn responses_say_what_their_requests_waited_for() {
    let each = Duration::from_secs(10);
    let rate = Quota::new(1, each).limits()[0];
    let layer = RateLimitLayer::new(Quota::new(1, each)).unwrap();
    let margin = 60 * MS;
    assert_eq!(
        waits(&layer, MS, 2).await,
        [None, Some((each + margin, Because::Limit(rate)))]
    );
    sleep(2 * each).await;

    layer.limiter().hold_for(Key::ALL, SECOND).await.unwrap();
    assert_eq!(waits(&layer, MS, 1).await, [Some((SECOND, Because::Held))]);

    // A hold that begins during the wait.
    let limiter = layer.limiter();
    let hold = async {
        sleep(SECOND).await;
        limiter.hold_for(Key::ALL, each).await.unwrap();
    };
    let (seen, ()) = join!(waits(&layer, MS, 1), hold);
    assert_eq!(seen, [Some((each + SECOND, Because::Held))]);

    let layer = RateLimitLayer::new(Quota::in_flight(1)).unwrap();
    let status = layer.limiter().peek(Key::ALL).await.unwrap();
    let in_flight = status.limits[0].limit;
    assert_eq!(
        waits(&layer, SECOND, 2).await,
        [None, Some((SECOND, Because::InFlight(in_flight)))]
    );

    // The pace waits for the response to the first request.
    let layer = AdaptiveThrottleLayer::new();
    let seen = waits(&layer, 100 * MS, 2).await;
    assert_eq!(seen, [None, Some((100 * MS, Because::Pace))]);
}

/// It waited for the answer of the store, which failed. No limit was used up.
#[tokio::test(start_paused = true)]
async fn responses_to_uncounted_requests_name_no_limit() {
    let store = Arc::new(Remote::default());
    store.fails.store(true, Ordering::Relaxed);
    let builder = RateLimitLayer::builder(Quota::per_second(1)).store(store);
    let layer = builder.on_store_error(OnStoreError::FailOpen).build();
    assert_eq!(waits(&layer.unwrap(), MS, 2).await, [None, None]);
}

#[tokio::test(start_paused = true)]
async fn waited_names_the_limit_that_delayed_the_request() {
    let layer = RateLimitLayer::builder(Quota::per_second(50))
        .and_per(
            "search",
            Quota::new(1, 10 * SECOND),
            |_: &RequestRef<'_>| Key::new("all"),
        )
        .build()
        .unwrap();
    let mut service = layer.layer(server(MS));
    service.call(Request::new(())).await.unwrap();
    let answer = service.call(Request::new(())).await.unwrap();
    let waited = answer.extensions().get::<Waited>().unwrap();
    assert_eq!(waited.limit_name(), Some("search"));
    assert_eq!(waited.key(), "all");
}

/// A refusal by the server is a response, too.
#[tokio::test(start_paused = true)]
async fn refusals_by_the_server_show_the_wait_before() {
    let layer = RateLimitLayer::new(Quota::per_second(1)).unwrap();
    let mut service = layer.layer(service_fn(|_: Request<()>| async {
        let mut answer = Response::new("no");
        *answer.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        Ok::<_, Infallible>(answer)
    }));
    let first = service.call(Request::new(())).await.unwrap();
    assert_eq!(waited(first.extensions()), None);
    let second = service.call(Request::new(())).await.unwrap();
    assert!(waited(second.extensions()).is_some());
}

#[cfg(feature = "reqwest")]
#[tokio::test(start_paused = true)]
async fn responses_of_reqwest_say_it_too() {
    let layer = RateLimitLayer::new(Quota::per_second(1)).unwrap();
    let mut service = layer.layer(service_fn(|_: reqwest::Request| async {
        Ok::<_, Infallible>(reqwest::Response::from(Response::new("ok")))
    }));
    let request = || {
        let url = "http://h/".parse().unwrap();
        reqwest::Request::new(reqwest::Method::GET, url)
    };
    service.call(request()).await.unwrap();
    let answer = service.call(request()).await.unwrap();
    let waited = answer.extensions().get::<Waited>().unwrap();
    assert_eq!(waited.to_string(), "waited 1.03s: 1/1s is used up");
}

#[cfg(feature = "tracing")]
mod spans {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::fmt::Debug;
    use std::sync::Once;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// A span: its name and fields, and whether it has ended.
    #[derive(Clone, Default)]
    struct Span {
        name: &'static str,
        fields: BTreeMap<&'static str, String>,
        has_ended: bool,
    }

    impl Visit for Span {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.fields.insert(field.name(), format!("{value:?}"));
        }

        fn record_str(&mut self, field: &Field, value: &str) {
            self.fields.insert(field.name(), value.to_owned());
        }
    }

    thread_local! {
        /// The spans of a test, which is one thread.
        static SPANS: RefCell<Vec<Span>> = const { RefCell::new(Vec::new()) };
    }

    /// Records the spans of all threads: a subscriber of one thread may miss some while those of others come and go.
    struct Listener;

    /// The spans of this test.
    struct Spans;

    impl Spans {
        fn record() -> Self {
            static IS_SET: Once = Once::new();
            IS_SET.call_once(|| {
                tracing::subscriber::set_global_default(Listener).expect("nobody else listens");
            });
            SPANS.take();
            Spans
        }

        fn last(&self) -> Span {
            SPANS.with_borrow(|spans| spans.last().cloned()).unwrap()
        }

        fn count(&self) -> usize {
            SPANS.with_borrow(Vec::len)
        }
    }

    fn with(id: &Id, act: impl FnOnce(&mut Span)) {
        let index = usize::try_from(id.into_u64()).unwrap() - 1;
        // A thread that ends has none.
        let _ = SPANS.try_with(|spans| spans.borrow_mut().get_mut(index).map(act));
    }

    impl Subscriber for Listener {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.is_span() && metadata.target() == "tollgate"
        }

        fn new_span(&self, attributes: &Attributes<'_>) -> Id {
            let mut span = Span {
                name: attributes.metadata().name(),
                ..Span::default()
            };
            attributes.record(&mut span);
            // A thread that ends keeps none.
            let number = SPANS.try_with(|spans| {
                let mut spans = spans.borrow_mut();
                spans.push(span);
                spans.len() as u64
            });
            Id::from_u64(number.unwrap_or(1))
        }

        fn record(&self, id: &Id, values: &Record<'_>) {
            with(id, |span| values.record(span));
        }

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {}

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}

        fn try_close(&self, id: Id) -> bool {
            with(&id, |span| span.has_ended = true);
            true
        }
    }

    fn builder(quota: Quota) -> RateLimitBuilder {
        RateLimitLayer::builder(quota)
    }

    #[tokio::test(start_paused = true)]
    async fn waits_are_spans_that_end_when_the_request_leaves() {
        let spans = Spans::record();
        let layer = builder(Quota::per_second(1)).build().unwrap();
        let mut service = layer.layer(server(SECOND));
        service.call(Request::new(())).await.unwrap();
        assert_eq!(spans.count(), 0, "the first one does not wait");
        let look = async {
            sleep(10 * MS).await;
            let begun = spans.last();
            sleep(100 * MS).await;
            (begun, spans.last())
        };
        let (_, (begun, left)) = join!(service.call(Request::new(())), look);
        assert_eq!(begun.name, "tollgate.wait");
        assert!(!begun.has_ended && left.has_ended);
        let field = |name| begun.fields.get(name).map(String::as_str);
        assert_eq!(field("otel.kind"), Some("internal"));
        assert_eq!(field("key"), Some("all"));
        assert_eq!(field("reason"), Some("rate"));
        assert_eq!(field("limit"), Some("1/1s"));
        assert_eq!((field("hold"), field("error.type")), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn spans_have_the_hold_and_the_error_of_a_refusal() {
        let spans = Spans::record();
        let layer = builder(Quota::per_second(1)).build().unwrap();
        let limiter = layer.limiter();
        limiter.hold_for(Key::ALL, SECOND).await.unwrap();
        let mut service = layer.layer(server(MS));
        let hold = async {
            sleep(100 * MS).await;
            limiter.hold_for(Key::ALL, 3600 * SECOND).await.unwrap();
        };
        let (refused, ()) = join!(service.call(Request::new(())), hold);
        refused.unwrap_err();
        let span = spans.last();
        assert!(span.has_ended);
        let field = |name| span.fields.get(name).map(String::as_str);
        assert_eq!((field("reason"), field("hold")), (Some("hold"), Some("1s")));
        assert_eq!(field("error.type"), Some("held"));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_for_a_pace_are_spans() {
        let spans = Spans::record();
        waits(&AdaptiveThrottleLayer::new(), 100 * MS, 2).await;
        let span = spans.last();
        assert_eq!((span.name, spans.count()), ("tollgate.wait", 1));
        assert_eq!(span.fields["reason"], "pace");
        assert!(span.has_ended);
        // So is one by hand.
        let throttle = AdaptiveThrottleLayer::new().throttle();
        let first = throttle.acquire(Key::ALL).await.unwrap();
        let end = async {
            sleep(10 * MS).await;
            drop(first);
        };
        let (second, ()) = join!(throttle.acquire(Key::ALL), end);
        drop(second.unwrap());
        assert_eq!(spans.count(), 2);
        assert!(spans.last().has_ended);
    }
}
