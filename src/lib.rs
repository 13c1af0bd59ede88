//! tollgate keeps your HTTP client inside the rate limits of the services it calls.
//!
//! ```
//! use std::time::Duration;
//!
//! use http::{Request, Response};
//! use tollgate::{Limited, Quota, RateLimitLayer};
//! use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
//! let limit = RateLimitLayer::builder(Quota::per_second(50))
//!     .max_wait(Duration::from_secs(5))
//!     .build()?;
//! let mut service = ServiceBuilder::new().layer(limit).service(client);
//!
//! let request = Request::get("https://api.example.com/users").body(String::new())?;
//! match service.ready().await?.call(request).await {
//!     Ok(response) => println!("{}", response.status()),
//!     Err(error) => match Limited::find(&error).and_then(Limited::retry_after) {
//!         Some(wait) => println!("not sent; try again in {wait:?}"),
//!         None => return Err(error.into()),
//!     },
//! }
//! # Ok(())
//! # }
//! ```
//!
//! With reqwest-middleware, write `ClientBuilder::new(client).with(limit)`. Without HTTP, write
//! `limit.limiter().acquire(key).await?.begin()?`. The [guide] has one page for each task. If you compare
//! crates, begin with [choosing a limiter](guide::choosing_a_limiter), else with [first
//! steps](guide::first_steps).
//!
//! # What happens to a request
//!
//! Each request has a [**key**](Key), which says whose limit applies to it. The [**quota**](Quota)
//! is what the server allows for each key. From it the limiter computes the request's **slot**: the
//! moment from which the request may leave.
//!
//! - If the slot is now, the request gets its [**permit**](Permit) and is sent.
//! - If the slot is near, the request waits in the queue of its key.
//! - If the slot is further away than [`max_wait`](RateLimitBuilder::max_wait), or after the
//!   request's own [`Deadline`], the request is **refused** at once. [`Limited`] says why, and when
//!   to try again.
//!
//! What the response says about limits is read as a [**signal**](Signal). A 429 **holds** the key:
//! no request of this key is sent until the time that the server named. If that is longer than
//! [`max_hold`](RateLimitBuilder::max_hold), one request is sent after `max_hold`, to find out.
//!
//! The limit is kept where it is counted: at the server. If the time that a request takes to the
//! server varies by at most [`transit_slack`](RateLimitBuilder::transit_slack), the server never
//! sees more than the quota in a window. The section [pitfalls](#pitfalls) has the cases that
//! tollgate cannot see.
//!
//! # Choosing a layer
//!
//! - [`RateLimitLayer`] is for limits that you know, and keeps them exactly. See [choosing a
//!   quota](guide::choosing_a_quota).
//! - [`AdaptiveThrottleLayer`] is for limits that are unknown or move. It learns its [`pace`] from
//!   responses. See [limits you do not know](pace).
//!
//! To use both, put [`AdaptiveThrottleLayer`] outside. Then a permit of [`RateLimitLayer`] is used
//! when it is granted. Instead of one [`RateLimitLayer`] around another, [join them](#pitfalls).
//!
//! A layer fits Tower services of `http::Request`, `reqwest::Client`, reqwest-middleware, and
//! services whose request type is your own ([`RequestInfo`](key::RequestInfo),
//! [`ResponseInfo`](signal::ResponseInfo)).
//!
//! # Features
//!
//! No feature is on by default, and a feature only adds items.
//!
//! | feature | what it gives |
//! |---|---|
//! | `reqwest` | the layers fit around a `reqwest::Client`, as a Tower service |
//! | `reqwest-middleware` | the layers are `reqwest_middleware::Middleware`; turns on `reqwest` |
//! | `retry` | `RetryLimited` as a `tower::retry::Policy` |
//! | `reqwest-retry` | `RetryLimited` as a strategy of reqwest-retry; turns on `reqwest-middleware` |
//! | `redis` | `store::RedisStore`: one limit, or one pace, for [many processes](guide::many_processes) |
//! | `redis-sentinel` | `store::RedisStore::sentinel` |
//! | `redis-tls-rustls` | `rediss://` URLs, with the provider of cryptography that the program has chosen for rustls |
//! | `unstable-store` | the trait `store::Store`, for [stores of your own](store#a-store-of-your-own); outside of semver |
//! | `grpc` | `RateLimitLayer::grpc` and `AdaptiveThrottleLayer::grpc`: layers for clients of [gRPC](grpc), such as tonic |
//! | `llm` | `Llm` and `RateLimitBuilder::build_llm`: requests are charged the tokens of [language models](guide::llm_apis), from their bodies |
//! | `tracing` | events under the target `tollgate`: waits (debug), refusals (info, at most one a second for a key), refusals by the server (warn) |
//! | `metrics` | `metrics`: the counts of all layers as counters, gauges and histograms of the crate `metrics`, for Prometheus and other systems |
//!
//! # Where it runs
//!
//! tollgate needs 64-bit atomics and a working `std::time::Instant`. It does not compile for
//! targets without 64-bit atomics, such as 32-bit MIPS, 32-bit PowerPC and ARMv5.
//! `wasm32-unknown-unknown` has no `Instant`: the first request panics there.
//!
//! tollgate needs Rust 1.88 or later. The changelog names each release that needs a later one.
//! Waiting needs a Tokio runtime with timers, or a thread that may block: see [blocking
//! code](blocking). In tests, [pause its clock](guide::testing).
//!
//! # Pitfalls
//!
//! **One count for everything, unless there is a key.** A layer without a [key
//! function](RateLimitBuilder::key) counts all requests together. If each host, token or tenant has
//! a limit of its own, use [`by_host`], [`by_header`] or a closure. If a [`RateLimitLayer`] has no
//! key function, a 429 of one host holds only the requests to that host: see [keys](key).
//!
//! **Two layers, two counts.** Create the layer once and clone it. A layer that is created for each
//! client, or for each request, counts from zero each time.
//!
//! **Two layers around each other.** Put all limits into one layer instead: a request then waits
//! once. Limits of the same key go into one quota, with [`and`](Quota::and). For limits of different
//! keys, use [`and_per`](RateLimitBuilder::and_per) or [`and`](RateLimitLayer::and): see [several
//! limits](guide::several_limits). A layer inside of another one is [refused](RateLimitLayer#two-layers).
//!
//! **An outer timeout that is shorter than the wait.** If it fires before the request is refused,
//! its error has no reason and no [`retry_after`](Limited::retry_after). Make it longer than
//! [`max_wait`](RateLimitBuilder::max_wait), which is 15 s by default. [Retry and
//! timeout](guide::retry_and_timeout) has the order of the layers.
//!
//! **Hidden attempts.** The server counts each attempt, and tollgate counts requests that pass it.
//! A client that follows redirects or repeats requests by itself sends more than tollgate counts.
//! With reqwest, use `redirect(redirect::Policy::none())` and `retry(reqwest::retry::never())`, and
//! a retry outside of tollgate instead.
//!
//! **Redirects to another host.** If reqwest follows a redirect from `api.example.com` to
//! `files.example.net`, the response belongs to the second host. If it is a 429 or 503, tollgate
//! holds no key, learns nothing from it, and passes it on. Call the host that answers, or follow
//! redirects outside of tollgate. A middleware inside of tollgate that rewrites the host of a
//! request looks like a redirect: put it outside.
//!
//! **A varying time to the server.** After a request has its permit, it passes the inner layers,
//! and waits for a connection and its handshakes. A request that opens a connection may take 100 ms
//! longer than the next one. Put tollgate next to the client. Set
//! [`transit_slack`](RateLimitBuilder::transit_slack), 10 ms by default, to the largest such
//! difference.
//!
//! **Long windows are used up in their first seconds.** Under load,
//! [`Quota::per_hour(5000)`](Quota::per_hour) lets 5000 requests leave at once, and for the rest of
//! the hour every request is refused. Add [`burst`](Quota::burst), which limits how many leave back
//! to back and spreads the others.
//!
//! **Short windows lose more to the margin.** tollgate usually makes a window 20 to 60 ms longer than
//! the quota says. That costs 2 % of 50 per second, but a sixth of 5 per 100 ms. Prefer the former.
//! See [the margin](guide::choosing_a_quota#the-margin).
//!
//! **A permit that is dropped counts as used.** If a [`Permit`] is dropped, or a call is cancelled
//! after it got its permit, the request may have left. So it counts as sent. A request that is
//! cancelled while it waits costs nothing. If you are sure that nothing was sent, call
//! [`Permit::give_back`].
//!
//! **A wall clock that is set, and [fixed](Quota::fixed) windows.** The boundaries of fixed windows
//! follow the wall clock. With Redis they follow the clock of Redis. After this clock is set, less
//! than the limit may be sent for one window. A sliding window needs no wall clock.
//!
//! **Fewer requests than the limit allows.** [`Limiter::peek`] shows whether the key is on hold,
//! and what is [reserved for other clients](guide::learning) of the same limit.
//! [`Limiter::release`] ends the hold and drops the reservation.
//!
//! **Many processes.** Each process counts, or learns, for itself, unless all processes have a
//! [store] in the same Redis: see [many processes](guide::many_processes).
//!
//! **The service inside must be `Clone`**, because a request that waits takes a clone of it. Box it
//! with Tower's `BoxCloneService` instead of `BoxService`, or put a `Buffer` before it.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::disallowed_methods, clippy::unwrap_used)]
// The pages of the guide are the same with and without features: a link to an item whose feature is off leads nowhere.
#![cfg_attr(
    not(all(
        feature = "grpc",
        feature = "llm",
        feature = "redis",
        feature = "retry"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

#[cfg(feature = "__lab")]
#[doc(hidden)]
#[path = "lab.rs"]
pub mod __lab;
mod admission;
pub mod blocking;
mod clock;
mod config_error;
mod cost;
pub mod error;
mod estimates;
mod events;
mod guard;
mod guarded;
pub mod guide;
mod join;
pub mod key;
mod key_map;
mod layer;
#[cfg_attr(not(feature = "unstable-store"), allow(unreachable_pub, dead_code))]
mod limit;
pub mod limiter;
mod locks;
#[cfg(feature = "metrics")]
#[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
pub mod metrics;
#[cfg_attr(not(feature = "__lab"), allow(unreachable_pub, dead_code))]
mod pacing;
pub mod quota;
mod refused;
mod rng;
pub mod signal;
pub mod stats;
pub mod store;
mod suspicion;
pub mod throttle;
mod tuning;
mod uncertain;
mod wait_queue;
mod wakers;

pub use config_error::ConfigError;
pub use cost::Cost;
#[doc(inline)]
pub use error::{Error, Limited, Reason};
pub use estimates::Estimates;
pub use guard::Guard;
#[doc(inline)]
pub use key::{Class, Deadline, Key, RequestRef, by_header, by_host};
#[cfg(feature = "grpc")]
#[doc(inline)]
pub use key::{by_grpc_method, by_grpc_service};
#[cfg(feature = "llm")]
#[cfg_attr(docsrs, doc(cfg(feature = "llm")))]
pub use layer::Llm;
#[cfg(any(feature = "retry", feature = "reqwest-retry"))]
#[cfg_attr(docsrs, doc(cfg(any(feature = "retry", feature = "reqwest-retry"))))]
pub use layer::retry::RetryLimited;
pub use layer::routes::Routes;
pub use layer::{AdaptiveThrottleBuilder, AdaptiveThrottleLayer, RateLimitBuilder, RateLimitLayer};
#[doc(inline)]
pub use limiter::{HeaderTrust, Limiter, OnStoreError, Permit, Sent, Settlement, Waited};
#[doc(inline)]
pub use quota::Quota;
#[doc(inline)]
pub use signal::Signal;
pub use stats::drain_all;
#[doc(inline)]
pub use throttle::{Throttle, ThrottlePermit};

#[doc = include_str!("guide/pace.md")]
pub mod pace {
    pub use crate::pacing::{Fair, NoPacing};
}

/// The services that the layers make, and their futures.
pub mod service {
    pub use crate::layer::{
        AdaptiveThrottle, Attempts, CloneRequest, RateLimit, ResponseFuture, RetryingThrottleLayer,
    };
}

/// Layers that look into the bodies of responses.
pub mod body {
    pub use crate::layer::body::{BodyLayer, BodyOpener, Opened, Opening, TrackBody, WatchedBody};
}

#[doc = include_str!("guide/grpc.md")]
#[cfg(feature = "grpc")]
#[cfg_attr(docsrs, doc(cfg(feature = "grpc")))]
pub mod grpc {
    pub use crate::layer::grpc::{GrpcBody, GrpcLayer, GrpcRateLimit, LocalRefusal};
}

/// The programs in the README, compiled and run as tests.
#[cfg(all(doctest, feature = "redis", feature = "reqwest-middleware"))]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
