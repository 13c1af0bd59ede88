#![doc = include_str!("../guide/headers.md")]

// Reading never fails and never panics: unreadable values are ignored. The time to read is linear
// in the size of the headers: about 10 ns for a response without such headers. Reading needs at most
// 4 kB of memory, and four times the size of what it reads.
//
// `generic::lines` finds the few headers that matter in one pass. Each then goes to one of three
// readers: `standard` (the structured fields of the IETF), `generic` (any name with words for a
// limit in it), or a row of `vendor`. A new server needs a row only if its words do not say what it
// means. `combine` makes one quota of the headers that describe the same bucket,
// `standard::retry_after` reads the hints, `body` and `prose` read what a refusal says, and `refusal`
// decides. The readers of values are in `parse`.
//
// A signal only states what the server sent. The limiter and the throttle decide what follows from
// it.

mod body;
mod combine;
mod generic;
#[cfg(feature = "grpc")]
pub(crate) mod grpc;
mod observed;
#[cfg(test)]
mod page_tests;
mod parse;
mod prose;
mod read;
mod refusal;
mod response_ref;
mod spent;
mod standard;
mod vendor;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod vector_tests;

use std::time::{Duration, Instant};

use http::{Extensions, HeaderMap, StatusCode};
use smallvec::SmallVec;

pub use observed::ObservedQuota;
pub use response_ref::ResponseRef;
pub use spent::{Spent, SpentReader};

use crate::clock;

/// The properties of a response that tollgate uses.
///
/// Implemented for `http::Response<B>` and, with the feature `reqwest`, for `reqwest::Response`.
/// Implement it for responses of your own. Every method has a default. A response without a status
/// and headers is never a refusal.
///
/// ```
/// struct Done;
///
/// impl tollgate::signal::ResponseInfo for Done {}
/// ```
#[diagnostic::on_unimplemented(
    message = "tollgate cannot read `{Self}` as a response",
    label = "this response is unknown to tollgate",
    note = "for `reqwest::Response`, switch on tollgate's feature `reqwest`",
    note = "for a response of your own, write `impl tollgate::signal::ResponseInfo for {Self}`"
)]
pub trait ResponseInfo {
    /// Returns the status of the response. Default: `None`.
    fn status(&self) -> Option<StatusCode> {
        None
    }

    /// Returns the headers of the response. Default: `None`.
    fn headers(&self) -> Option<&HeaderMap> {
        None
    }

    /// Returns what the response says about limits, if its protocol states that in another way than
    /// HTTP. Default: `None`, and the signal is read from [`status`](Self::status) and
    /// [`headers`](Self::headers).
    fn signal(&self) -> Option<Signal> {
        None
    }

    /// Returns the host that sent the response, if the client inside [follows
    /// redirects](crate::key::RequestInfo::follows_redirects). Default: `None`, which means the
    /// host of the request. For `reqwest::Response`: the host of its URL.
    ///
    /// If it is not the host of the request, the signal describes the limits of another host. Then
    /// it starts no hold, and nothing is learned from it.
    fn host(&self) -> Option<&str> {
        None
    }

    /// Returns the extensions of the response. Default: `None`.
    fn extensions(&self) -> Option<&Extensions> {
        None
    }

    /// Returns the extensions of the response, to be changed. Default: `None`, and the response gets
    /// no [`Settlement`](crate::Settlement).
    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        None
    }
}

impl<B> ResponseInfo for http::Response<B> {
    fn status(&self) -> Option<StatusCode> {
        Some(http::Response::status(self))
    }

    fn headers(&self) -> Option<&HeaderMap> {
        Some(http::Response::headers(self))
    }

    fn extensions(&self) -> Option<&Extensions> {
        Some(http::Response::extensions(self))
    }

    fn extensions_mut(&mut self) -> Option<&mut Extensions> {
        Some(http::Response::extensions_mut(self))
    }
}

/// What a response says about limits.
///
/// [`read`](Signal::read) reads it from the status and the headers of the response. The page
/// [`signal`](crate::signal) lists the headers that tollgate recognises. Unreadable
/// values are ignored.
///
/// # A dialect of your own
///
/// If a server uses headers that tollgate does not know, amend the signal that was read. A layer
/// does that for each response, with the function of
/// [`dialect`](crate::RateLimitBuilder::dialect). Without a layer, it looks like this:
///
/// ```
/// use std::time::Duration;
/// use http::{HeaderMap, StatusCode};
/// use tollgate::signal::ObservedQuota;
/// use tollgate::Signal;
///
/// /// `X-Pause: 3`: a refusal, whatever the status; retry in three seconds.
/// /// `X-Left: 0`: the number of pages that are left.
/// fn our_dialect(headers: &HeaderMap, mut signal: Signal) -> Signal {
///     let number = |name| headers.get(name)?.to_str().ok()?.parse::<u64>().ok();
///     if let Some(seconds) = number("x-pause") {
///         let refused = StatusCode::TOO_MANY_REQUESTS;
///         let wait = Duration::from_secs(seconds);
///         signal = signal.with_refusal(refused).with_retry_after(wait);
///     }
///     if let Some(left) = number("x-left") {
///         let pages = ObservedQuota::new().with_name("pages").with_remaining(left);
///         signal = signal.with_quota(pages);
///     }
///     signal
/// }
///
/// let response = http::Response::builder()
///     .header("x-pause", 3)
///     .header("x-left", 0)
///     .body(())?;
/// let signal = our_dialect(response.headers(), Signal::read(&response));
/// assert_eq!(signal.retry_after(), Some(Duration::from_secs(3)));
/// assert_eq!(signal.quotas()[0].remaining(), Some(0));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signal {
    limited: Option<StatusCode>,
    retry_after: Option<Duration>,
    /// Whether `retry_after` is only the time to the reset of quotas that are used up: the response asks for no wait.
    waits_for_reset: bool,
    scope: Option<Box<str>>,
    quotas: SmallVec<[ObservedQuota; 1]>,
    spent: Spent,
}

impl Signal {
    /// The most quotas that a signal has. If a response states more, the others are ignored.
    pub(crate) const MOST_QUOTAS: usize = 16;

    /// Reads status and headers of a response that has just arrived. Reading never fails.
    ///
    /// Call it as soon as the response arrives: moments that the response states become durations
    /// from now.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::Signal;
    ///
    /// let response = http::Response::builder()
    ///     .status(403)
    ///     .header("X-RateLimit-Limit", 60)
    ///     .header("X-RateLimit-Remaining", 0)
    ///     .header("X-RateLimit-Reset", 90)
    ///     .body(())?;
    /// let signal = Signal::read(&response);
    /// assert!(signal.refusal().is_some());
    /// assert_eq!(signal.retry_after(), Some(Duration::from_secs(90)));
    /// assert_eq!(signal.quotas()[0].limit(), Some(60));
    /// # Ok::<(), http::Error>(())
    /// ```
    pub fn read(response: &impl ResponseInfo) -> Self {
        Signal::read_lazily(response, clock::now)
    }

    /// Reads status and headers of a response that arrived at `arrived`.
    pub(crate) fn read_at(response: &impl ResponseInfo, arrived: Instant) -> Self {
        Signal::read_lazily(response, || arrived)
    }

    /// Reads a response. Calls `arrived` only if a header needs the time, because most responses
    /// have no such header.
    fn read_lazily(response: &impl ResponseInfo, arrived: impl FnOnce() -> Instant) -> Self {
        if let Some(signal) = response.signal() {
            return signal;
        }
        let status = response.status();
        match response
            .headers()
            .filter(|headers| generic::lines::any(headers))
        {
            Some(headers) => read::signal(status, Some(headers), None, clock::wall(arrived())),
            None => Signal {
                limited: status.filter(|status| refusal::is_always(*status)),
                ..Signal::default()
            },
        }
    }

    /// Returns whether a response may say anything about limits. Most do not, and are not read.
    #[inline]
    pub(crate) fn is_any_in(response: &impl ResponseInfo) -> bool {
        response.signal().is_some()
            || response.status().is_some_and(refusal::is_always)
            || response.headers().is_some_and(generic::lines::any)
    }

    /// Reads status, headers and body of a response that has just arrived.
    ///
    /// Some servers say only in the body that a limit was hit, or when to retry. Pass the whole
    /// body: a part of one is not valid JSON. Headers about waiting take precedence over the body.
    /// The body may also state what the request has [used](Signal::spent).
    ///
    /// ```
    /// # use tollgate::Signal;
    /// let response = http::Response::new(());
    /// let body = br#"{"ok": false, "error": "ratelimited"}"#;
    /// assert_eq!(Signal::read(&response).refusal(), None);
    /// assert_eq!(Signal::read_with_body(&response, body).refusal(), Some(http::StatusCode::OK));
    /// ```
    pub fn read_with_body(response: &impl ResponseInfo, body: &[u8]) -> Self {
        read::signal(
            response.status(),
            response.headers(),
            Some(body),
            clock::wall(clock::now()),
        )
    }

    /// Reads the headers or the trailers of a gRPC response that have just arrived. Reading never
    /// fails.
    ///
    /// The status of a call is in the headers if the response has no message, else in the trailers.
    /// [`RateLimitLayer::grpc`](crate::RateLimitLayer::grpc) reads both.
    ///
    /// | status | signal |
    /// |---|---|
    /// | `RESOURCE_EXHAUSTED` (8) | a refusal, with the status 429 |
    /// | `UNAVAILABLE` (14) with a time to retry | a refusal, with the status 503 |
    /// | others | no refusal |
    ///
    /// The time to retry is `grpc-retry-pushback-ms`, or that of a `google.rpc.RetryInfo` in
    /// `grpc-status-details-bin`, of which 16 kB are read at most. A pushback that is negative or
    /// unreadable means "do not retry", which is no time. Quotas and `retry-after` in the metadata are
    /// read as in HTTP.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{HeaderMap, StatusCode};
    /// use tollgate::Signal;
    ///
    /// let mut trailers = HeaderMap::new();
    /// trailers.insert("grpc-status", "8".parse()?);
    /// trailers.insert("grpc-retry-pushback-ms", "1500".parse()?);
    /// let signal = Signal::read_grpc(&trailers);
    /// assert_eq!(signal.refusal(), Some(StatusCode::TOO_MANY_REQUESTS));
    /// assert_eq!(signal.retry_after(), Some(Duration::from_millis(1500)));
    /// # Ok::<(), http::header::InvalidHeaderValue>(())
    /// ```
    #[cfg(feature = "grpc")]
    #[cfg_attr(docsrs, doc(cfg(feature = "grpc")))]
    pub fn read_grpc(headers: &HeaderMap) -> Self {
        grpc::signal(headers, clock::wall(clock::now()))
    }

    /// Returns the status with which the upstream refused the request because of a limit or too
    /// much load. `None` if it did not refuse.
    ///
    /// The statuses 429, 420, 430, 509 and 529 are always refusals. 400, 402, 403, 418 and 503 are
    /// refusals if the response has some evidence. Evidence is a time to retry, a header or an error
    /// code; for 402, 403 and 503 also a quota that is used up. Each other status is a refusal if the response has an
    /// error code of a limit, or a body that says the same, except redirections (300 to 399). The
    /// [guide](crate::signal#which-responses-are-refusals) has the table.
    #[doc(alias = "429")]
    #[doc(alias = "too many requests")]
    pub fn refusal(&self) -> Option<StatusCode> {
        self.limited
    }

    /// Returns how long the upstream asks the client to wait, counted from the arrival of the
    /// response; at most 366 days.
    ///
    /// The wait is that of a header such as `Retry-After`. If there is none, the wait of a refusal
    /// is the time to the reset of the quotas that are used up. `Duration::ZERO` means that the
    /// client may retry at once, and `None` that the response does not state a wait. Responses
    /// other than refusals may state one as well (RFC 9110, section 10.2.3).
    #[doc(alias = "retry-after")]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Returns the wait that the response explicitly asks for. The time to the reset of a quota is none: for a bucket it
    /// may be the time until it is full again, which is far too long.
    pub(crate) fn asked_wait(&self) -> Option<Duration> {
        self.retry_after.filter(|_| !self.waits_for_reset)
    }

    /// Returns the scope of the limit that was exceeded, in lower case, such as `global`, `shared`
    /// or `service`. `None` if the response does not name it.
    pub fn scope(&self) -> Option<&str> {
        self.scope.as_deref()
    }

    /// Returns the quotas that the response states, in no order; at most
    /// 16 of them.
    pub fn quotas(&self) -> &[ObservedQuota] {
        &self.quotas
    }

    /// Returns what the body states that the request has used: tokens or points.
    ///
    /// Empty if the signal was not read with [`read_with_body`](Signal::read_with_body). To read it
    /// from a body that is streamed, use a [`SpentReader`].
    ///
    /// ```
    /// # use tollgate::Signal;
    /// let response = http::Response::new(());
    /// let body = br#"{"data": {}, "extensions": {"cost": {"actualQueryCost": 46}}}"#;
    /// let signal = Signal::read_with_body(&response, body);
    /// assert_eq!(signal.spent().count("points"), Some(46));
    /// ```
    pub fn spent(&self) -> Spent {
        self.spent
    }

    /// Sets the status with which the upstream refused. `None` means that it did not refuse.
    pub fn with_refusal(mut self, status: impl Into<Option<StatusCode>>) -> Self {
        self.limited = status.into();
        self
    }

    /// Sets [`retry_after`](Signal::retry_after), rounded up to whole milliseconds and cut to 366
    /// days. `None` means that the response does not state it.
    pub fn with_retry_after(mut self, wait: impl Into<Option<Duration>>) -> Self {
        let millis = wait.into().map(observed::millis);
        self.retry_after = millis.map(Duration::from_millis);
        self.waits_for_reset = false;
        self
    }

    /// Sets the [scope](Signal::scope), cut after 95 bytes.
    pub fn with_scope(mut self, scope: &str) -> Self {
        self.scope = Some(parse::text::Text::of(&[scope]).into());
        self
    }

    /// Adds a quota. Has no effect if there are 16 already.
    pub fn with_quota(mut self, quota: ObservedQuota) -> Self {
        if self.quotas.len() < Self::MOST_QUOTAS {
            self.quotas.push(quota);
        }
        self
    }

    /// Removes all quotas, to state others instead.
    pub(crate) fn without_quotas(mut self) -> Self {
        self.quotas.clear();
        self
    }
}
