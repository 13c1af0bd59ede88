//! The words a user says: the layer and its builder.

use std::sync::Arc;
use std::time::Instant;

use super::extractors::Extractors;
use super::rate_limit_builder::RateLimitBuilder;
use super::response_policy::ResponsePolicy;
use crate::config_error::ConfigError;
use crate::error::Limited;
use crate::key::RequestInfo;
use crate::limiter::{Entry, Limiter, Seat, Sent, Started, Waiter};
use crate::quota::Quota;
use crate::signal::{AsResponseInfo, Signal};

/// Keeps a client within a known quota. Clones share one count.
///
/// It is a `tower_layer::Layer` over services of `http::Request<B>`, over `reqwest::Client` (feature `reqwest`) and over
/// services of your own requests ([`AsRequestInfo`](crate::AsRequestInfo)), and it is a `reqwest_middleware::Middleware` (feature
/// `reqwest-middleware`). Without HTTP, take its [`limiter`](RateLimitLayer::limiter).
///
/// ```
/// use http::{Request, Response};
/// use tower::{service_fn, BoxError, Service, ServiceBuilder, ServiceExt};
/// use tollgate::{Quota, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let mut service = ServiceBuilder::new()
///     .layer(RateLimitLayer::new(Quota::per_second(50))?)
///     .service(client);
///
/// let response = service.ready().await?.call(Request::get("http://example.com/").body(String::new())?).await?;
/// # assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
///
/// # What happens to a request
///
/// The permit is taken in `call`, because only there the request, and with it the key, is known; `poll_ready` only asks
/// the service inside. A request that has to wait holds nothing of the service inside while it waits: it takes a clone,
/// and asks that one when its permit is there.
///
/// The wait is bounded by [`max_wait`](RateLimitBuilder::max_wait) and by the request's own deadline. An outer timeout
/// should be longer than both: when it fires first, its error is all that is left.
///
/// # Two layers
///
/// One `RateLimitLayer` around another does not keep its limit: its permit is spent while the request waits in the inner
/// one. Limits of the same key go into one quota, with [`and`](Quota::and). For limits of different keys, take both permits
/// [by hand](Limiter#two-limits-with-different-keys).
#[derive(Clone, Debug)]
pub struct RateLimitLayer {
    pub(super) limiter: Limiter,
    pub(super) extractors: Arc<Extractors>,
}

impl RateLimitLayer {
    /// A layer that keeps everything that passes it, together, within `quota`. Waits up to 15 s; counts in memory.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] when the quota makes no sense; it says what to change.
    pub fn new(quota: Quota) -> Result<Self, ConfigError> {
        RateLimitLayer::builder(quota).build()
    }

    /// A builder, to change the defaults.
    pub fn builder(quota: Quota) -> RateLimitBuilder {
        RateLimitBuilder::new(quota)
    }

    /// The gate behind this layer, for what is not HTTP. It shares the layer's count.
    pub fn limiter(&self) -> Limiter {
        self.limiter.clone()
    }

    /// A request enters the gate.
    #[inline]
    pub(crate) fn enter(&self, request: &RequestInfo<'_>) -> Entered {
        let Some(entry) = self.extractors.entry(request) else {
            return Entered::Limited(self.limiter.no_key());
        };
        let label = || self.limiter.label(entry.key, Some(request));
        let (started, now) = match self.limiter.send_at_once(&entry) {
            Ok(now) => return Entered::Sent(self.sent(&entry, now, None, label)),
            Err(now) => (self.limiter.start_slow(&entry, now, label), now),
        };
        match started {
            Started::Granted(_, seat) => Entered::Sent(self.sent(&entry, now, seat, label)),
            Started::Waiting(waiter) => Entered::Waiting(waiter),
            Started::Limited(limited) => Entered::Limited(limited),
        }
    }

    /// Later the request is gone, and with it the host: where its name may be asked for, it is kept.
    #[inline]
    fn sent(
        &self,
        entry: &Entry,
        now: Instant,
        seat: Option<Seat>,
        label: impl FnOnce() -> Box<str>,
    ) -> Sent {
        let sent = Sent::at_once(self.limiter.id(), entry, now, seat);
        if self.extractors.policy.error_on_limit() { sent.named(label()) } else { sent }
    }

    /// How the answer to a request is read.
    #[inline]
    pub(crate) fn policy(&self) -> ResponsePolicy {
        self.extractors.policy.clone()
    }
}

/// What came of a request at the gate; one that may leave is taken to leave now.
pub(crate) enum Entered {
    Sent(Sent),
    Waiting(Box<Waiter>),
    Limited(Limited),
}

/// The response to a request leaves the gate: an error where it is a refusal, and refusals are errors. Its call is in
/// flight until the seat, if there is one, is dropped.
#[inline]
pub(crate) fn leave(
    sent: Sent,
    response: &impl AsResponseInfo,
    policy: &ResponsePolicy,
) -> Result<Option<Seat>, Limited> {
    if policy.is_default() && !sent.is_listened_for() && !Signal::is_any_in(response) {
        return Ok(sent.into_seat());
    }
    read(sent, response, policy)
}

fn read(
    sent: Sent,
    response: &impl AsResponseInfo,
    policy: &ResponsePolicy,
) -> Result<Option<Seat>, Limited> {
    let signal = policy.signal(sent.key(), sent.host(), response);
    match sent.answered(&signal) {
        (_, Some(limited)) if policy.error_on_limit() => Err(limited),
        (seat, _) => Ok(seat),
    }
}
