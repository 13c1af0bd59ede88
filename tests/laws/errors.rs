//! `Limited::find` looks through every wrapper, and every public type may cross threads.

use crate::support;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use http::{Request, Response};
use tollgate::error::{BoxError, LimitedInfo};
use tollgate::limiter::{Acquire, KeyStatus};
use tollgate::quota::Limit;
use tollgate::service::{RateLimit, ResponseFuture};
use tollgate::store::{LimitSpec, MemoryStore, Store, StoreError};
use tollgate::{
    ConfigError, Cost, Deadline, Error, Key, Limited, Limiter, Permit, Quota, RateLimitBuilder,
    RateLimitLayer, Reason, Signal,
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};

use support::{Failing, Upstream, get, limited, ms, who_said_no};

/// One refusal by each of the three sources: the limiter, the upstream, the store.
async fn one_of_each() -> [(Error, &'static str); 3] {
    let builder = || RateLimitLayer::builder(Quota::per_second(1)).error_on_upstream_limit();
    let here = builder().key(|_| None::<Key>).build().unwrap();
    let there = builder().build().unwrap();
    let store = builder()
        .store(Arc::new(Failing::away(false)))
        .build()
        .unwrap();
    let error = async |limit: RateLimitLayer| {
        limit
            .layer(Upstream::answering([limited("7")]))
            .oneshot(get("/"))
            .await
            .unwrap_err()
    };
    [
        (error(here).await, "local"),
        (error(there).await, "upstream"),
        (error(store).await, "store"),
    ]
}

/// A wrapper as `thiserror` makes it with `#[error(transparent)]`.
#[derive(Debug)]
struct Transparent(Error);

impl fmt::Display for Transparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Transparent {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

#[tokio::test(start_paused = true)]
async fn limited_is_found_in_plain_and_boxed_errors() {
    for (error, expected) in one_of_each().await {
        assert_eq!(who_said_no(&error), expected);
        let Error::Limited(limited) = &error else {
            panic!("{error}")
        };
        assert_eq!(who_said_no(limited), expected);
        let boxed: BoxError = Box::new(error);
        assert_eq!(who_said_no(&*boxed), expected);
        assert_eq!(
            who_said_no(&io::Error::other(boxed)),
            expected,
            "a box in a box"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn limited_is_found_through_transparent_wrappers_of_any_depth() {
    for (error, expected) in one_of_each().await {
        let transparent = Transparent(error);
        assert_eq!(who_said_no(&transparent), expected);
        let twice = io::Error::other(io::Error::other(transparent));
        assert_eq!(who_said_no(&twice), expected);
    }
}

/// Two programs limit one key by different quotas.
#[tokio::test(start_paused = true)]
async fn the_limit_that_refused_is_named() {
    let stores: [Arc<dyn Store>; 2] = [
        Arc::new(MemoryStore::default()),
        Arc::new(support::Distant::new(ms(5))),
    ];
    for store in stores {
        let limiter = |count| {
            let builder = RateLimitLayer::builder(Quota::per_second(count));
            let builder = builder.store(store.clone()).max_wait(ms(100));
            builder.build().unwrap().limiter()
        };
        let (strict, loose) = (limiter(5), limiter(50));
        for _ in 0..5 {
            drop(strict.acquire(Key::ALL).await.unwrap());
        }
        for _ in 0..3 {
            let refused = loose.acquire(Key::ALL).await.unwrap_err();
            let five = Limit::sliding(5, ms(1000));
            assert_eq!(refused.report().limit(), Some(five));
            let text = refused.to_string();
            assert!(text.contains("the limit is 5/1s; try again in"), "{text}");
        }
    }
}

/// A service that acquires a permit by hand fails with a `Limited`, which a layer around it passes.
#[tokio::test(start_paused = true)]
async fn limited_is_found_as_the_error_of_an_inner_service() {
    for (error, expected) in one_of_each().await {
        let Error::Limited(limited) = error else {
            panic!("{error}")
        };
        assert_eq!(who_said_no(&Error::Inner(limited.into())), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn limited_is_found_through_anyhow_with_or_without_context() {
    for (error, expected) in one_of_each().await {
        let plain = anyhow::Error::from(error);
        assert_eq!(who_said_no(plain.as_ref()), expected);
        let told = plain
            .context("while fetching the invoice")
            .context("in job 17");
        assert_eq!(who_said_no(told.as_ref()), expected);
        assert_eq!(who_said_no(&*told.into_boxed_dyn_error()), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn limited_is_found_through_reqwest_middleware_and_retry() {
    use reqwest_middleware::Error as Middleware;
    use reqwest_retry::RetryError;

    for retries in [0, 3] {
        for (error, expected) in one_of_each().await {
            let err = Middleware::middleware(error);
            assert_eq!(who_said_no(&err), expected);
            let retry = match retries {
                0 => RetryError::Error(err),
                retries => RetryError::WithRetries { retries, err },
            };
            assert_eq!(who_said_no(&retry), expected);
            assert_eq!(who_said_no(&Middleware::middleware(retry)), expected);
        }
    }
}

#[cfg(feature = "reqwest-middleware")]
#[tokio::test(start_paused = true)]
async fn our_error_becomes_theirs_with_a_question_mark() {
    fn theirs(error: Error) -> Result<(), reqwest_middleware::Error> {
        Err(error)?
    }
    for (error, expected) in one_of_each().await {
        assert_eq!(who_said_no(&theirs(error).unwrap_err()), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn limited_is_found_through_timeout_buffer_and_load_shed() {
    for expected in ["local", "upstream", "store"] {
        let builder = RateLimitLayer::builder(Quota::per_second(1)).error_on_upstream_limit();
        let limit = match expected {
            "local" => builder.key(|_| None::<Key>),
            "store" => builder.store(Arc::new(Failing::away(false))),
            _ => builder,
        };
        let service = ServiceBuilder::new()
            .timeout(ms(1000))
            .buffer::<Request<String>>(1)
            .load_shed()
            .concurrency_limit(1)
            .layer(limit.build().unwrap())
            .service(Upstream::answering([limited("7")]));
        assert_eq!(
            who_said_no(&*service.oneshot(get("/")).await.unwrap_err()),
            expected
        );
    }
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_stay_flat_with_other_layers_between() {
    let outer = RateLimitLayer::new(Quota::in_flight(40)).unwrap();
    for (number, expected) in ["local", "upstream", "store"].into_iter().enumerate() {
        let inner = RateLimitLayer::builder(Quota::per_second(1)).error_on_upstream_limit();
        let inner = match number {
            0 => inner.key(|_| None::<Key>),
            1 => inner,
            _ => inner.store(Arc::new(Failing::away(false))),
        };
        let service = ServiceBuilder::new()
            .layer(outer.clone())
            .timeout(ms(1000))
            .boxed_clone_sync()
            .layer(outer.clone())
            .layer(inner.build().unwrap())
            .service(Upstream::answering([limited("7")]));
        let error = service.oneshot(get("/")).await.unwrap_err();
        assert!(matches!(error, Error::Limited(_)), "{error:?}");
        assert_eq!(who_said_no(&error), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn no_limit_is_found_where_there_is_none() {
    let limit = RateLimitLayer::new(Quota::per_second(1)).unwrap();
    let failing = limit.layer(Upstream::answering([support::other_error()]));
    assert_eq!(
        who_said_no(&failing.oneshot(get("/")).await.unwrap_err()),
        "inner"
    );
    for error in [
        Box::new(io::Error::from(io::ErrorKind::TimedOut)) as BoxError,
        Box::new(tower::timeout::error::Elapsed::new()),
        Box::new(tower::load_shed::error::Overloaded::new()),
        Box::new(
            RateLimitLayer::new(Quota::per_second(0))
                .map(|_| ())
                .unwrap_err(),
        ),
        anyhow::anyhow!("429").context("limited").into(),
    ] {
        assert_eq!(who_said_no(&*error), "inner", "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_error_source_adds_new_text() {
    for (error, _) in one_of_each().await {
        let Some(limited) = error.source() else {
            panic!("the limit is the source")
        };
        assert!(limited.is::<Limited>());
        let mut next = Some(limited);
        while let Some(error) = next {
            next = error.source();
            assert_ne!(
                next.map(|deeper| deeper.to_string()),
                Some(error.to_string())
            );
        }
    }
}

#[test]
fn public_types_are_send_sync_and_static() {
    fn shared<T: Send + Sync + 'static>() {}
    fn sent<T: Send + 'static>(_: &T) {}

    shared::<RateLimitLayer>();
    shared::<RateLimitBuilder>();
    shared::<RateLimit<Upstream>>();
    shared::<ResponseFuture<Upstream, Request<String>>>();
    shared::<<RateLimit<Upstream> as Service<Request<String>>>::Future>();
    shared::<Limiter>();
    shared::<Acquire>();
    shared::<Permit>();
    shared::<KeyStatus>();
    shared::<(Error, Limited, Reason, LimitedInfo, ConfigError, StoreError)>();
    shared::<(Key, Cost, Deadline, Quota, Limit, Signal)>();
    shared::<(MemoryStore, Arc<LimitSpec>)>();

    let limiter = RateLimitLayer::new(Quota::per_second(1)).unwrap().limiter();
    let owned = limiter.clone();
    sent(&async move { owned.peek(Key::ALL).await });
    sent(&limiter.acquire(Key::ALL));
}

#[test]
fn response_future_needs_send_parts_but_not_sync() {
    type Local = std::cell::Cell<u8>;
    type Boxed = std::pin::Pin<Box<dyn Future<Output = Result<Response<()>, BoxError>> + Send>>;

    #[derive(Clone)]
    struct NotSync;

    impl Service<Request<Local>> for NotSync {
        type Response = Response<()>;
        type Error = BoxError;
        type Future = Boxed;

        fn poll_ready(
            &mut self,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Result<(), BoxError>> {
            std::task::Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<Local>) -> Boxed {
            Box::pin(async { Ok(Response::new(())) })
        }
    }

    fn sent<T: Send + 'static>() {}
    sent::<ResponseFuture<NotSync, Request<Local>>>();
}
