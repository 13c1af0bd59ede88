//! The text of errors and events: enough to act on, and never a key.

mod support;

use std::fmt::Write as _;
use std::sync::Arc;

use http::header::AUTHORIZATION;
use tollgate::store::StoreError;
use tollgate::{
    Cost, Deadline, Error, Key, Limited, Quota, RateLimitBuilder, RateLimitLayer, Reason, by_header,
};
use tower::{Layer, Service, ServiceExt};

use support::{Failing, Upstream, get, limited, long_ago, ms, settle};

const SECRET: &str = "s3cr3t-token";

/// A request whose key is a secret, and which has the secret in every private place.
fn secret() -> http::Request<String> {
    let mut request = get(&format!(
        "http://{SECRET}:{SECRET}@api.example.com/{SECRET}?token={SECRET}"
    ));
    request
        .headers_mut()
        .insert(AUTHORIZATION, SECRET.parse().unwrap());
    request
}

fn with<T: Clone + Send + Sync + 'static>(extension: T) -> http::Request<String> {
    let mut request = secret();
    request.extensions_mut().insert(extension);
    request
}

fn builder() -> RateLimitBuilder {
    RateLimitLayer::builder(Quota::per_second(1)).key(by_header(AUTHORIZATION))
}

/// The error of the second request: the first takes the only permit.
async fn second(builder: RateLimitBuilder, request: http::Request<String>) -> Limited {
    let service = builder.build().unwrap().layer(Upstream::new());
    service.clone().oneshot(secret()).await.unwrap();
    only(service.oneshot(request).await)
}

/// The error of the first request.
async fn first(builder: RateLimitBuilder, request: http::Request<String>) -> Limited {
    only(
        builder
            .build()
            .unwrap()
            .layer(Upstream::answering([limited("7")]))
            .oneshot(request)
            .await,
    )
}

fn only<T>(result: Result<T, Error>) -> Limited {
    match result {
        Err(Error::Limited(limited)) => limited,
        _ => panic!("it was to be limited"),
    }
}

/// The error of `request` while another waits.
async fn behind_another(builder: RateLimitBuilder, request: http::Request<String>) -> Limited {
    let service = builder.build().unwrap().layer(Upstream::new());
    service.clone().oneshot(secret()).await.unwrap();
    let waits = tokio::spawn(service.clone().oneshot(secret()));
    settle().await;
    let limited = only(service.oneshot(request).await);
    waits.abort();
    limited
}

/// Every kind of refusal, and a word in its text that names the remedy.
async fn every_no() -> Vec<(Limited, &'static str)> {
    let failing = |error| {
        builder().store(Arc::new(Failing {
            error,
            later: false,
        }))
    };
    let another_key = with(Key::new(SECRET).and("another"));
    let mut keyless = secret();
    keyless.headers_mut().remove(AUTHORIZATION);
    vec![
        (
            second(builder().max_wait(ms(10)), secret()).await,
            "max_wait",
        ),
        (
            second(builder(), with(Deadline::at(long_ago()))).await,
            "deadline",
        ),
        (
            behind_another(builder().max_queue(1), secret()).await,
            "max_queue",
        ),
        (
            behind_another(builder().max_keys(1), another_key).await,
            "max_keys",
        ),
        (
            second(builder(), with(Cost::new(9))).await,
            "split it, or raise the limit",
        ),
        (
            first(builder(), keyless).await,
            "by_host needs an absolute URL",
        ),
        (
            first(builder().error_on_upstream_limit(), secret()).await,
            "try again in 7",
        ),
        (
            first(failing(StoreError::Full { max_keys: 3 }), secret()).await,
            "raise max_keys",
        ),
        (first(failing(StoreError::Lost), secret()).await, "store"),
        (
            first(builder().store(Arc::new(Failing::away(false))), secret()).await,
            "connection refused",
        ),
    ]
}

#[tokio::test(start_paused = true)]
async fn errors_show_no_key_and_name_the_remedy() {
    events::listen();
    let mut reasons = Vec::new();
    for (limited, word) in every_no().await {
        let key = limited.report().key().to_owned();
        assert!(key == "none" || key.len() == 8, "{key}");
        if let Limited::Local { reason, .. } = &limited {
            reasons.push(reason.clone());
        }
        let error = Error::from(limited);
        let (shown, debug) = (error.to_string(), format!("{error:?} {error:#?}"));
        assert!(shown.contains(word), "it names no {word}: {shown}");
        assert!(shown.contains(&key), "it names no key: {shown}");
        assert!(
            !shown.contains('\n') && !shown.ends_with('.'),
            "one line, no final stop: {shown}"
        );
        assert!(!shown.starts_with(char::is_uppercase), "{shown}");
        assert!(
            !shown.contains(SECRET) && !debug.contains(SECRET),
            "{shown} {debug}"
        );
    }
    assert!(matches!(
        reasons[..],
        [
            Reason::MaxWait(_),
            Reason::Deadline,
            Reason::QueueFull(1),
            Reason::TooManyKeys(1),
            Reason::CostAboveLimit {
                cost: 9,
                largest: 1,
                unit: Cost::REQUESTS,
            },
            Reason::NoKey,
            Reason::TooManyKeys(3),
        ]
    ));
}

#[tokio::test(start_paused = true)]
async fn no_debug_output_shows_a_key() {
    events::listen();
    let limit = builder().build().unwrap();
    let mut service = limit.layer(Upstream::new());
    let mut text = format!("{limit:?} {:?} {:?}", limit.limiter(), builder());
    let permit = limit.limiter().acquire(Key::new(SECRET)).await.unwrap();
    write!(
        text,
        "{permit:?} {:?}",
        limit.limiter().peek(Key::new(SECRET)).await.unwrap()
    )
    .unwrap();
    let explanation = limit.limiter().explain(Key::new(SECRET)).await.unwrap();
    write!(text, "{explanation} {explanation:?}").unwrap();
    let mut acquire = Box::pin(limit.limiter().acquire(Key::new(SECRET)));
    assert!(futures::poll!(acquire.as_mut()).is_pending());
    let call = service.ready().await.unwrap().call(secret());
    write!(
        text,
        "{acquire:?} {call:?} {service:?} {:?}",
        Key::new(SECRET)
    )
    .unwrap();
    assert!(!text.contains(SECRET), "{text}");
}

#[cfg(feature = "tracing")]
#[tokio::test(start_paused = true)]
async fn events_show_no_key_and_count_each_refusal_once() {
    events::listen();
    let refusals = every_no().await.len();
    let waits = builder().build().unwrap().layer(Upstream::new());
    for _ in 0..2 {
        support::soon(waits.clone().oneshot(secret()))
            .await
            .unwrap();
    }
    let told = events::told();
    assert!(!told.contains(SECRET), "{told}");
    let count = |what: &str| told.lines().filter(|line| line.contains(what)).count();
    assert_eq!(count("message=request refused"), refusals, "{told}");
    assert_eq!(
        (count("waiting for a permit"), count("permit granted")),
        (3, 1),
        "{told}"
    );
}

/// Records the events of `tracing`, for each thread; a test is one thread.
#[cfg(feature = "tracing")]
mod events {
    use std::cell::RefCell;
    use std::fmt::{Debug, Write};
    use std::sync::Once;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    thread_local!(static TOLD: RefCell<String> = const { RefCell::new(String::new()) });

    /// Every test starts with this call: a call site first reached by a thread without a subscriber
    /// may stay disabled.
    pub(crate) fn listen() {
        static LISTENS: Once = Once::new();
        LISTENS.call_once(|| {
            tracing::subscriber::set_global_default(Listener).expect("nobody else listens")
        });
        TOLD.take();
    }

    /// The events of this thread.
    pub(crate) fn told() -> String {
        TOLD.with_borrow(String::clone)
    }

    struct Listener;

    struct Fields;

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            TOLD.with_borrow_mut(|told| {
                write!(told, "{field}={value:?} ").expect("a string grows")
            });
        }
    }

    impl Subscriber for Listener {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, attributes: &Attributes<'_>) -> Id {
            attributes.record(&mut Fields);
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, values: &Record<'_>) {
            values.record(&mut Fields);
        }

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            event.record(&mut Fields);
            TOLD.with_borrow_mut(|told| told.push('\n'));
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }
}

#[cfg(not(feature = "tracing"))]
mod events {
    pub(crate) fn listen() {}
}
