//! tollgate keeps your HTTP client inside the rate limits of the services it calls.
//!
//! ```
//! use http::{Request, Response};
//! use tollgate::{Quota, RateLimitLayer};
//! use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
//! let limit = RateLimitLayer::new(Quota::per_second(50))?;
//! let mut service = ServiceBuilder::new().layer(limit).service(client);
//!
//! let request = Request::get("https://api.example.com/users").body(String::new())?;
//! let response = service.ready().await?.call(request).await?;
//! # assert_eq!(response.status(), 200);
//! # Ok(())
//! # }
//! ```
//!
//! With reqwest-middleware it is `ClientBuilder::new(http).with(limit)`, and without HTTP
//! `limit.limiter().acquire(key).await?`.
//!
//! # What happens to a request
//!
//! ```text
//!  request ── key ──> ┌──────┐ ── permit ──> the service inside ──> server
//!                     │ gate │                                        │
//!  Limited, at once <─└──────┘ <── signal ── response <───────────────┘
//!                      a request whose slot is near waits here, in line
//! ```
//!
//! A request reaches the **gate** and shows its [**key**](Key): whose limit it is. The [**quota**](Quota) of the key
//! tells the **slot**, the moment from which the request may leave. If that is now, the request gets its
//! [**permit**](Permit) and is sent. If it is near, the request waits in the line of its key. If it is further away
//! than [`max_wait`](RateLimitBuilder::max_wait) or beyond the request's own [`Deadline`], the request is **refused**
//! at once: [`Limited`] tells why, and when to come back. What the response says about our speed is read as a
//! [**signal**](Signal).
//!
//! The limit holds where it is counted, at the server: however late in its life a permit is used, and as long as
//! the time on the way varies by no more than [`transit_slack`](RateLimitBuilder::transit_slack), no window of the
//! server sees more than the quota. What tollgate cannot see is below, under [pitfalls](#pitfalls).
//!
//! # Choosing a layer
//!
//! [`RateLimitLayer`] is for limits that are known, and keeps them exactly. [`AdaptiveThrottleLayer`] is for those that
//! are unknown or move: it learns its [`pace`] from what answers say. If you want both, put the throttle outside: then a
//! permit of the exact layer is used as soon as it is there. Two exact layers around each other
//! [do not work](#pitfalls). One value of a layer fits every socket, and its clones share one count:
//!
//! | you call through | write | feature |
//! |---|---|---|
//! | a Tower service of `http::Request` | `ServiceBuilder::new().layer(limit).service(client)` | |
//! | `reqwest::Client` as a Tower service | the same | `reqwest` |
//! | reqwest-middleware | `ClientBuilder::new(http).with(limit)` | `reqwest-middleware` |
//! | a Tower service of your own requests | the same, with [`AsRequestInfo`] and [`AsResponseInfo`] | |
//! | anything else | [`limit.limiter()`](RateLimitLayer::limiter) and [`acquire`](Limiter::acquire) | |
//!
//! # Choosing a quota
//!
//! | the server | quota |
//! |---|---|
//! | counts a sliding window, or you do not know how it counts | [`Quota::per_second`], [`Quota::new`] |
//! | does so, and dislikes bursts | [`.burst(10)`](Quota::burst) besides |
//! | wants a pause between two calls | [`Quota::every`] |
//! | runs a token bucket | [`Quota::bucket`] and its [`refill`](Bucket::refill) |
//! | counts each full second, minute or hour of the clock | [`Quota::fixed`] |
//! | allows so many calls at the same time | [`Quota::in_flight`] |
//! | has several limits at once | one [`.and`](Quota::and) the other |
//! | is described in your configuration | `"25/5s, 300/60s".parse::<Quota>()?` |
//!
//! A sliding window is the safe choice: at most 50 in *any* second, so also in every second the server may count,
//! wherever it starts.
//!
//! # Features
//!
//! None is on by default, and each only adds: it never changes what other code does.
//!
//! | feature | what it gives |
//! |---|---|
//! | `reqwest` | the layer around a `reqwest::Client`, as a Tower service |
//! | `reqwest-middleware` | the layer as a `reqwest_middleware::Middleware`; turns on `reqwest` |
//! | `retry` | `RetryLimited` as a `tower::retry::Policy` |
//! | `reqwest-retry` | `RetryLimited` as a strategy of reqwest-retry; turns on `reqwest-middleware` |
//! | `redis` | `store::RedisStore`: one limit, or one pace, for many processes, with pages on it: `guide::many_processes`, `guide::guarantees`, `guide::costs` |
//! | `redis-cluster` | `store::RedisStore::cluster` |
//! | `redis-sentinel` | `store::RedisStore::sentinel` |
//! | `redis-tls-rustls` | `rediss://` URLs, with the rustls provider that the program has chosen |
//! | `body` | `Signal::read_with_body`: what the body of a response says of limits |
//! | `tracing` | events under the target `tollgate`: waits (debug), refusals (info), refusals by the server (warn) |
//! | `sim` | `sim`: fleets against servers with limits, in virtual time: how a [`pace`] does before it is used |
//! | `contract` | the contract of a [`store`] as a test suite that a store of your own can run |
//!
//! # Where it runs
//!
//! tollgate needs 64-bit atomics and a working `std::time::Instant`. It does not compile for targets without the former, such
//! as 32-bit MIPS, 32-bit PowerPC and ARMv5. `wasm32-unknown-unknown` lacks the latter: the first request panics there.
//!
//! # Testing with a paused clock
//!
//! tollgate asks Tokio for the time, so a test that pauses Tokio's clock waits for nothing. In a test, write
//! `#[tokio::test(start_paused = true)]`; it needs Tokio's feature `test-util`.
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{Key, Quota, RateLimitLayer};
//! use tokio::time::Instant;
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = RateLimitLayer::new(Quota::new(10, Duration::from_secs(10)))?.limiter();
//!
//! let start = Instant::now();
//! for _ in 0..11 {
//!     let _permit = limiter.acquire(Key::ALL).await?;
//! }
//! // Ten went at once; the eleventh waited for the window, the test did not.
//! assert!(start.elapsed() > Duration::from_secs(10));
//! assert!(start.elapsed() < Duration::from_secs(11));
//! # Ok(())
//! # }
//! ```
//!
//! Pause the clock only where no sockets are involved: while a test waits for one, paused time jumps to the next
//! timer.
//!
//! # Pitfalls
//!
//! **One count for everything, unless there is a key.** A layer without a [key function](RateLimitBuilder::key)
//! counts all that passes it together. Give it [`by_host`], [`by_header`] or a closure where each host, token or
//! tenant has a limit of its own. Only the count is one: a 429 of one host holds the requests to that host
//! ([`Key::host_hold`]) and no others. If several hosts are one account, so that a 429 of one is meant for all, give the
//! layer one key of your own: `.key(|_| Key::new("our account"))`. An [`AdaptiveThrottleLayer`] without a key function
//! learns one pace from all hosts, and a refusal by one holds them all.
//!
//! **Two layers, two counts.** Make the layer once and clone it. A layer that is made anew for each client, or for
//! each request, counts from zero each time.
//!
//! **Two limits with different keys.** Do not put one [`RateLimitLayer`] around another: the permit of the outer one is valid
//! for some milliseconds, and is spent while the request waits in the inner one, so the outer limit is exceeded. Limits of the
//! same key go into one quota, with [`and`](Quota::and). For those of different keys, take both permits
//! [by hand](Limiter#two-limits-with-different-keys).
//!
//! **An outer timeout that is shorter than the wait.** When it fires first, its "elapsed" is all that is left,
//! without reason and [`retry_after`](Limited::retry_after). Make it longer than
//! [`max_wait`](RateLimitBuilder::max_wait), which is 15 s by default. The order, from the outside in: total
//! timeout, retry, tollgate, timeout of an attempt, client.
//!
//! **Hidden attempts.** The server counts every attempt, tollgate those that pass it. A client that follows
//! redirects or repeats a request by itself makes more. With reqwest: `redirect(redirect::Policy::none())` and
//! `retry(reqwest::retry::never())`, and a retry outside of tollgate instead.
//!
//! **Redirects to another host.** If reqwest follows a redirect from `api.example.com` to `files.example.net`, the response is
//! of the second host. What it says is of no use for the key of the request: a 429 or 503 of the second host holds nothing, is
//! not learned and passes as a response. Call the host that answers, or follow redirects outside of tollgate. A middleware
//! inside of tollgate that rewrites the host of a request looks like a redirect: put it outside.
//!
//! **A way that varies.** Between the permit and the server lie the layers inside, the wait for a connection and
//! its handshakes. A request that opens a connection may take 100 ms longer than the next, which finds it open, and
//! the server may see them closer together than they left. Put tollgate next to the client, and make
//! [`transit_slack`](RateLimitBuilder::transit_slack), 10 ms by default, as long as the difference.
//!
//! **Long windows spend themselves in their first seconds.** [`Quota::per_hour(5000)`](Quota::per_hour) lets 5000
//! go at once under load; for the rest of the hour everything is refused. Add [`burst`](Quota::burst) to spread
//! them.
//!
//! **Short windows pay for the margin.** A permit lives for 10 ms, up to 50 ms where slots are far apart, and the way may
//! vary by 10 ms. So a window is 20 ms longer than the quota says: 2 % of 50 per second, but a sixth of 5 per 100 ms. Prefer the
//! former. For bursts and spacings too fine to work, [`build`](RateLimitBuilder::build) says so, and
//! [`max_rate_loss`](RateLimitBuilder::max_rate_loss) accepts the loss.
//!
//! **A permit that is dropped is spent.** Nobody knows whether its request had left, so neither a [`Permit`] that
//! is dropped nor a call that is cancelled on its way comes back. What is cancelled while it waits costs nothing.
//! If surely nothing was sent, say so with [`Permit::give_back`].
//!
//! **Steps of the system's clock and [fixed](Quota::fixed) windows.** The boundaries of fixed windows follow the wall clock,
//! which is asked once a second; with Redis, they follow its clock. After a step, or the sleep of a laptop, what was used in a
//! window counts in each new window that overlaps it: less than the limit may go for one window. In the second before a step is
//! seen, [`boundary_slack`](RateLimitBuilder::boundary_slack) covers small ones. A sliding window needs no wall clock.
//!
//! **A limit that seems too small.** [`Limiter::peek`] shows whether the key is held, and what is reserved for others who use the
//! same limit, by what the upstream says. [`Limiter::release`] ends the one and forgets the other.
//!
//! **Many processes.** Each counts, or learns, for itself, unless they share a [store](store) in Redis: feature `redis`, and
//! the page `guide::many_processes`.
//!
//! **The service inside has to be `Clone`**, because one that waits takes a clone along instead of the readied one.
//! Box it with Tower's `BoxCloneService`, not `BoxService`, or put a `Buffer` before it. And waiting needs a Tokio
//! runtime with timers.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::disallowed_methods, clippy::unwrap_used)]

mod clock;
mod config_error;
mod error;
mod events;
pub mod guide;
mod key;
mod key_map;
mod layer;
mod limit;
mod limiter;
pub mod pace;
mod quota;
mod rng;
mod signal;
#[cfg(feature = "sim")]
#[cfg_attr(docsrs, doc(cfg(feature = "sim")))]
pub mod sim;
pub mod store;
mod throttle;
mod wakers;

pub use config_error::ConfigError;
pub use error::{BoxError, Error, Limited, Reason, Report};
pub use key::{AsRequestInfo, Cost, Deadline, Key, RequestInfo, by_header, by_host};
pub use layer::body::{HeldBody, HoldBody, HoldUntilBodyEnd, Holding, HoldingFuture, InFlight};
#[cfg(any(feature = "retry", feature = "reqwest-retry"))]
#[cfg_attr(docsrs, doc(cfg(any(feature = "retry", feature = "reqwest-retry"))))]
pub use layer::retry::{AsError, RetryLimited};
pub use layer::service::{RateLimit, ResponseFuture};
pub use layer::throttle_service::{AdaptiveThrottle, CloneRequest, RetryingThrottle, ThrottledFuture};
pub use layer::{
    AdaptiveThrottleBuilder, AdaptiveThrottleLayer, RateLimitBuilder, RateLimitLayer, RetryingThrottleLayer,
};
pub use limiter::{Acquire, Learn, Learned, Limiter, OnStoreError, Peek, Permit};
pub use quota::{Bucket, Limit, Quota};
pub use signal::{AsResponseInfo, Observed, Signal};
pub use throttle::{Throttle, ThrottlePermit};

/// The programs in the README, compiled and run as tests.
#[cfg(all(doctest, feature = "redis", feature = "reqwest-middleware"))]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
