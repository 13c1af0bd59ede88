//! The layer that keeps a known quota, and its Tower service.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use http::Extensions;
use smallvec::SmallVec;

use super::attempts::{Attempts, is_reported};
use super::extractors::{Extractors, Reading, class_in_extensions};
use super::rate_limit_builder::RateLimitBuilder;
use super::response_policy::{ResponsePolicy, is_own_response};
use super::seam::{Departure, Gate, show_wait, take_call};
use super::service::edge;
use crate::admission::Admission;
use crate::clock;
use crate::config_error::ConfigError;
use crate::cost::RequestCost;
use crate::error::{Limited, Reason};
use crate::guarded;
use crate::key::{HostKey, Key, Label, RequestInfo, RequestRef, host_names};
use crate::limiter::{
    Admitted, Entry, InnerCall, Limiter, MOST_PARTS, PartRef, QuotaId, Sent, Suspect, Taken, Wait,
    is_inside_a_layer, note_pair, send_all_at_once, start_slow,
};
use crate::quota::Quota;
use crate::signal::{ResponseInfo, Signal};
use crate::suspicion::is_any_suspected;
use crate::uncertain::is_any_uncertain;

/// Keeps a client within a known quota. Clones share one count.
///
/// The layer is a `tower_layer::Layer` over services of `http::Request<B>`, over `reqwest::Client`
/// (feature `reqwest`) and over services of your own requests ([`RequestInfo`]). It is also a
/// `reqwest_middleware::Middleware` (feature `reqwest-middleware`). For calls that are not HTTP,
/// use its [`limiter`](RateLimitLayer::limiter).
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
/// let request = Request::get("http://example.com/").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// # assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
///
/// # What happens to a request
///
/// `poll_ready` polls the inner service and nothing else. The permit is acquired in `call`, because
/// the key is known only when the request is there. A request that waits reserves nothing in the
/// inner service. It keeps a clone of the service, and polls the clone for readiness when the
/// permit is granted.
///
/// A request waits for at most [`max_wait`](RateLimitBuilder::max_wait), and until its own
/// [deadline](crate::Deadline). An outer timeout should be longer than both. If it fires before the
/// request is refused, the caller sees neither the reason nor the time to retry.
///
/// # Two layers
///
/// Prefer one layer with all limits: a request then waits once, and takes a permit of all limits or
/// of none. [`and_per`](RateLimitBuilder::and_per) adds a limit with another key,
/// [`and`](RateLimitLayer::and) joins two layers, and [`Quota::and`] joins limits of the same key.
/// The page [several limits](crate::guide::several_limits) compares them.
///
/// Inside of a layer with rates, a request to another limiter is refused with
/// [`Reason::Inside`](crate::Reason::Inside): while it waited, the outer permit would expire, and more
/// requests would leave than the outer limit allows. The same holds for an
/// [`AdaptiveThrottleLayer`](super::AdaptiveThrottleLayer) inside, which belongs outside, and for a
/// service inside that [acquires](crate::Limiter::acquire) permits by hand. A service that makes requests
/// of its own, such as for a token, belongs outside, too.
///
/// Inside of a call of the same limiter, another one passes. If calls in flight are limited, it is refused
/// with [`Reason::Nested`](crate::Reason::Nested) instead of waiting for a slot that the outer call may have.
///
/// A program that acquires a permit of [`limiter`](RateLimitLayer::limiter) by hand, and then sends the request through
/// the layer, takes two permits for it, and gets half of the rate. If it goes on,
/// [`Event::CountedTwice`](crate::stats::Event::CountedTwice) reports it.
///
/// A layer does not see through a task between the layers, such as `tower::buffer::Buffer` or a
/// spawned task. The permit of the outer layer may then expire before the request leaves.
#[derive(Clone, Debug)]
#[doc(alias = "throttle")]
pub struct RateLimitLayer {
    first: LimitOfLayer,
    /// The limits besides the first. Empty for most layers.
    further: Arc<[LimitOfLayer]>,
    /// Whether a request has several keys, or a limit of other units than requests.
    is_joint: bool,
    /// Whether key and deadline are all that is read of a request without extensions. So it counts in one limit,
    /// costs 1, and has no quota and no class of its own. The policy for responses is the default.
    is_plain: bool,
}

/// A limit of a layer, with a key of its own.
#[derive(Clone, Debug)]
pub(super) struct LimitOfLayer {
    /// The name of the limit, if it was added by [`RateLimitBuilder::and_per`] or
    /// [`RateLimitBuilder::routes`]. Such a limit does not see a request without a key.
    pub(super) name: Option<&'static str>,
    pub(super) limiter: Limiter,
    pub(super) extractors: Arc<Extractors>,
}

impl LimitOfLayer {
    /// Notes whether `request` has a class, if the limit is divided and has no class function.
    #[inline]
    fn note_class(&self, request: &impl RequestInfo) {
        if self.limiter.is_divided() && self.extractors.class.is_none() {
            let has_class = class_in_extensions(request).is_some();
            self.limiter.note_class(has_class);
        }
    }

    /// Returns the limiter that counts `request`: that of its class, if the quota is divided.
    #[inline]
    fn counting(&self, request: &impl RequestInfo) -> &Limiter {
        if self.limiter.is_divided() {
            self.limiter.of_class(self.extractors.read_class(request))
        } else {
            &self.limiter
        }
    }
}

impl RateLimitLayer {
    /// Creates a layer that keeps all its requests, together, within `quota`. Requests wait for at
    /// most 15 s. Permits are counted in memory. [`builder`](RateLimitLayer::builder) changes these
    /// defaults.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the quota is out of range. It states what to change.
    pub fn new(quota: Quota) -> Result<Self, ConfigError> {
        RateLimitLayer::builder(quota).build()
    }

    /// Creates a builder, to change the defaults.
    pub fn builder(quota: Quota) -> RateLimitBuilder {
        RateLimitBuilder::new(quota)
    }

    /// Returns the limiter of this layer, for calls that are not HTTP. It shares the layer's count.
    ///
    /// If the layer has [several limits](crate::guide::several_limits), this is the limiter of the
    /// first one.
    pub fn limiter(&self) -> Limiter {
        self.first.limiter.clone()
    }

    /// Returns the limiter of the limit that [`and_per`](RateLimitBuilder::and_per) or
    /// [`name`](RateLimitBuilder::name) gave this name. A limit of `and_per` has its keys under
    /// `key.and(name)`: see [`Key::and`].
    pub fn limiter_of(&self, name: &str) -> Option<Limiter> {
        self.limiters()
            .find(|limiter| limiter.name() == Some(name))
            .cloned()
    }

    /// Returns one layer with the limits of both. A request takes a permit of both limits or of
    /// none, and waits once. While it waits for one limit, it takes nothing from the other.
    ///
    /// Each layer keeps its own settings: store, key, cost, deadline. A request waits for at most
    /// the shorter [`max_wait`](RateLimitBuilder::max_wait), and until the earlier deadline. The
    /// first layer decides what happens to responses: its [`settle`](RateLimitBuilder::settle)
    /// states one cost for all limits, and that of `other` is not used. If the settings differ only
    /// in quota and key, [`and_per`](RateLimitBuilder::and_per) is shorter. The page [several
    /// limits](crate::guide::several_limits) has more.
    ///
    /// If a response is a refusal and does not say whose limit was exceeded, it holds the key of
    /// the last limit. So the narrowest limit should be the last.
    ///
    /// # Panics
    ///
    /// If both layers together have more than eight limits. Each [unit](Quota::of) of a quota is one.
    ///
    /// ```
    /// use http::header::AUTHORIZATION;
    /// use tollgate::{Quota, RateLimitLayer, by_header};
    ///
    /// let all = RateLimitLayer::new(Quota::per_second(50))?;
    /// let by_token = RateLimitLayer::builder(Quota::per_minute(100))
    ///     .key(by_header(AUTHORIZATION))
    ///     .build()?;
    /// let both = all.and(by_token);
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    #[must_use]
    pub fn and(self, other: RateLimitLayer) -> RateLimitLayer {
        let further = self.further.iter().chain(other.limits()).cloned();
        RateLimitLayer::join(self.first, further.collect())
            .expect("a layer has at most eight limits, where each unit of a quota is one")
    }

    /// Makes a layer of several limits. Returns `None` if they are too many.
    pub(super) fn join(first: LimitOfLayer, further: Arc<[LimitOfLayer]>) -> Option<Self> {
        let is_joint = !further.is_empty() || first.limiter.counts_units();
        let layer = RateLimitLayer {
            is_plain: !is_joint && !first.limiter.is_divided() && first.extractors.are_plain(),
            first,
            further,
            is_joint,
        };
        let units: usize = layer.limiters().map(Limiter::units).sum();
        (units <= MOST_PARTS).then_some(layer)
    }

    fn limits(&self) -> impl Iterator<Item = &LimitOfLayer> {
        std::iter::once(&self.first).chain(self.further.iter())
    }

    fn limiters(&self) -> impl Iterator<Item = &Limiter> {
        self.limits().map(|limit| &limit.limiter)
    }

    /// Adds to `parts` the limits that a request counts in, with its key and cost for each. Returns
    /// its deadline.
    ///
    /// # Errors
    ///
    /// The error of the request, if a layer that was added by [`and`](Self::and) finds no key, or if no request has
    /// stated a unit.
    // The list is not returned: its 300 bytes would be copied.
    fn read_parts<'a, R: RequestInfo>(
        &'a self,
        reading: Reading,
        request: &R,
        parts: &mut SmallVec<[PartRef<'a>; 4]>,
    ) -> Result<Option<Instant>, Limited> {
        let mut host = HostKey::of(request);
        self.add_parts(&self.first, &reading, request, &mut host, parts)?;
        let (mut without_routes, mut deadline) = (reading.without_routes, reading.deadline);
        for limit in self.further.iter() {
            limit.note_class(request);
            let own = limit
                .extractors
                .read(request, &mut host, Some(without_routes));
            let mut own = match (own, limit.name) {
                (Some(own), _) => own,
                (None, Some(_)) => continue,
                (None, None) => return Err(self.unreadable(&limit.limiter, Reason::NoKey)),
            };
            match limit.name {
                Some(name) => own.key = own.key.and(name),
                None => without_routes = own.without_routes,
            }
            // The shorter of two deadlines; a limit without one allows any wait.
            deadline = deadline.into_iter().chain(own.deadline).min();
            self.add_parts(limit, &own, request, &mut host, parts)?;
        }
        Ok(deadline)
    }

    /// Adds to `parts` what `limit` counts of `request`, of which it has read `own`.
    #[inline]
    fn add_parts<'a, R: RequestInfo>(
        &self,
        limit: &'a LimitOfLayer,
        own: &Reading,
        request: &R,
        host: &mut HostKey<'_, R>,
        parts: &mut SmallVec<[PartRef<'a>; 4]>,
    ) -> Result<(), Limited> {
        let quota = limit.extractors.read_quota(own, request, &limit.limiter);
        let quota = quota.map_err(|reason| self.unreadable(&limit.limiter, reason))?;
        let limiter = limit.counting(request);
        let mut host_key = limiter.host_of(own.key, host);
        // Which of several limits a response may reach depends on its host.
        if !self.further.is_empty() {
            host_key = host_key.or_else(|| host.get());
            limiter.note_host(own.key, host_key);
        }
        if !limiter.counts_units() {
            parts.push(limiter.part(own.key, own.cost.under(None), quota, host_key));
            return Ok(());
        }
        let differs = limiter.check_units(&own.cost, |unit| {
            !self.limiters().any(|limiter| limiter.counts(unit))
        });
        if let Some(reason) = differs {
            return Err(self.unreadable(limiter, reason));
        }
        parts.extend(limiter.parts(own.key, &own.cost, quota, host_key));
        Ok(())
    }

    /// Returns the error of a request that `limiter` cannot count.
    fn unreadable(&self, limiter: &Limiter, reason: Reason) -> Limited {
        limiter.unreadable(reason, &self.first.limiter)
    }

    /// Admits a request of which more than key and deadline may matter, as [`Gate::enter_fast`] does.
    // Not inlined, so that a plain request has all its values in registers.
    #[inline(never)]
    fn enter_any(&self, request: &impl RequestInfo) -> Result<Admitted, Option<Reading>> {
        let first = &self.first;
        first.note_class(request);
        let mut host = HostKey::of(request);
        let Some(mut reading) = first.extractors.read(request, &mut host, None) else {
            return Err(None);
        };
        // Of a key under suspicion, kinds of requests may be on hold.
        if self.is_joint
            || is_inside_a_layer()
            || is_any_suspected()
            || !first.extractors.policy.is_default()
        {
            return Err(Some(reading));
        }
        let Ok(quota) = first
            .extractors
            .read_quota(&reading, request, &first.limiter)
        else {
            // The slow path makes the error.
            return Err(Some(reading));
        };
        let limiter = first.counting(request);
        let entry = Entry {
            key: limiter.key_of(reading.key),
            cost: reading.cost.under(None),
            deadline: reading.deadline,
            host: limiter.host_of(reading.key, &mut host),
            quota,
        };
        match limiter.send_at_once(&entry) {
            Some(now) => {
                self.sends(request);
                Ok(limiter.admitted(&entry, now))
            }
            None => {
                reading.quota = Some(quota);
                Err(Some(reading))
            }
        }
    }

    /// Admits a request of which only key and deadline matter.
    #[inline(never)]
    fn enter_keyed(&self, request: &impl RequestInfo) -> Result<Admitted, Option<Reading>> {
        let first = &self.first;
        let mut host = HostKey::of(request);
        let Some(key) = first.extractors.read_key(request, &mut host, None) else {
            return Err(None);
        };
        let entry = Entry {
            key,
            cost: 1,
            deadline: first.extractors.read_deadline(request),
            host: first.limiter.host_of(key, &mut host),
            quota: QuotaId::NONE,
        };
        send_at_once(&first.limiter, entry)
    }

    /// Admits a request on the slow path, makes it wait, or refuses it.
    fn admit(&self, reading: Reading, request: &impl RequestInfo) -> Admission<Sent, Box<Wait>> {
        let key = reading.key;
        let cost = reading.cost.under(None);
        let mut parts = SmallVec::new();
        let deadline = match self.read_parts(reading, request, &mut parts) {
            Ok(deadline) => deadline,
            Err(limited) => return Admission::No(limited),
        };
        let suspect = Suspect::find(&parts, || self.first.extractors.read_kind(request, cost));
        let kind = suspect.as_ref().map(|suspect| suspect.kind);
        if suspect
            .as_ref()
            .is_none_or(|suspect| suspect.is_clear(&parts))
            && let Some(sent) = send_all_at_once(&parts, deadline)
        {
            return Admission::Go(self.with_label(sent.of_kind(kind), key, request));
        }
        let label = || self.label(key, request);
        note_pair(&parts[0], &label);
        start_slow(&parts, deadline, suspect, &label)
            .map(|taken| self.with_label(taken.sent(), key, request))
    }

    /// Keeps the name of the key of a request that is sent now, if a refusal may become an error.
    ///
    /// Later the request is gone, and with it the host. An error names the host.
    fn with_label(&self, sent: Sent, key: Key, request: &impl RequestInfo) -> Sent {
        if self.first.extractors.policy.error_on_limit() {
            sent.named(self.label(key, request))
        } else {
            sent
        }
    }

    /// Counts a request that is sent now, and that may have been sent before.
    #[cold]
    fn sends_again(&self, attempts: &Attempts, request: &impl RequestInfo) {
        let limiter = self.first.counting(request);
        let count = attempts.is_sent(limiter.id());
        if count < 2 {
            return;
        }
        limiter.sent_again(count, is_reported(count), &|| {
            let extractors = &self.first.extractors;
            let read = extractors.read(request, &mut HostKey::of(request), None);
            self.label(read.map_or(Key::ALL, |read| read.key), request)
        });
    }

    /// Notes the host of `request` as the name of the keys that it has because of its host.
    fn note_host_names(&self, request: &impl RequestInfo) {
        let mut host = HostKey::of(request);
        for limit in self.limits().filter(|limit| limit.extractors.are_by_host()) {
            if let (Some(key), Some(text)) = (host.get(), request.host()) {
                host_names::note(limit.name.map_or(key, |name| key.and(name)), text);
            }
        }
    }

    /// Returns the name of `key`, which came with `request`, for errors and events.
    #[cold]
    fn label(&self, key: Key, request: &impl RequestInfo) -> Label {
        let request = RequestRef::new(request);
        self.first.limiter.label(key, Some(&request))
    }
}

/// Admits a request of which only key and deadline matter, and which `limiter` counts, if a permit is at hand.
#[inline(never)]
fn send_at_once(limiter: &Limiter, entry: Entry) -> Result<Admitted, Option<Reading>> {
    match limiter.send_at_once(&entry) {
        Some(now) => Ok(limiter.admitted(&entry, now)),
        None => Err(Some(Reading {
            key: entry.key,
            without_routes: entry.key,
            quota: Some(entry.quota),
            cost: RequestCost::Requests(entry.cost),
            deadline: entry.deadline,
        })),
    }
}

impl Gate for RateLimitLayer {
    type Wait = Box<Wait>;
    type Permit = Taken;
    type Call = Sent;
    type Admitted = Admitted;
    /// `None` if the request states no key.
    type Entry = Option<Reading>;

    #[inline]
    fn enter_fast(&self, request: &impl RequestInfo) -> Result<Admitted, Option<Reading>> {
        let is_plain = self.is_plain
            && request.extensions().is_none_or(Extensions::is_empty)
            && !is_inside_a_layer()
            && !is_any_suspected();
        if !is_plain {
            return self.enter_any(request);
        }
        let first = &self.first;
        if !first.extractors.have_one_key() {
            return self.enter_keyed(request);
        }
        let entry = Entry {
            key: Key::ALL,
            cost: 1,
            deadline: first.extractors.read_deadline(request),
            host: first.limiter.host_of(Key::ALL, &mut HostKey::of(request)),
            quota: QuotaId::NONE,
        };
        match first.limiter.send_one_unlocked(&entry) {
            Some(now) => Ok(first.limiter.admitted(&entry, now)),
            None => send_at_once(&first.limiter, entry),
        }
    }

    #[inline]
    fn sent(&self, admitted: Admitted) -> Sent {
        Sent::at_once(admitted)
    }

    /// Enters a request for which no permit was at hand, or for which more matters than one permit: several limits, calls
    /// in flight, a hold of the host, a deadline that has passed, a layer around, or a policy of its own for responses.
    fn enter_slow(
        &self,
        reading: Option<Reading>,
        request: &impl RequestInfo,
    ) -> Admission<Sent, Box<Wait>> {
        if !self.limiters().any(Limiter::is_divided)
            && let Some(class) = class_in_extensions(request)
        {
            self.first.limiter.unknown_class(class);
        }
        self.note_host_names(request);
        let Some(reading) = reading else {
            return Admission::No(self.unreadable(&self.first.limiter, Reason::NoKey));
        };
        let key = reading.key;
        let admission = self.admit(reading, request);
        if let Admission::Go(_) = admission {
            self.sends(request);
        }
        let limiter = self.first.counting(request);
        if let Some(name_of) = &self.first.extractors.key_name
            && limiter.is_unnamed(key)
            && let Some(name) = name_of(&RequestRef::new(request))
        {
            limiter.name_key(key, &name);
        }
        admission
    }

    #[inline]
    fn sends(&self, request: &impl RequestInfo) {
        let extensions = request.extensions().filter(|all| !all.is_empty());
        if let Some(attempts) = extensions.and_then(Extensions::get::<Attempts>) {
            self.sends_again(attempts, request);
        }
    }

    #[inline]
    fn begin_inner(call: &Sent) -> Option<InnerCall> {
        call.begin_inner()
    }

    #[inline]
    fn policy(&self) -> ResponsePolicy {
        self.first.extractors.policy.clone()
    }

    fn poll_estimated(
        &self,
        wait: &mut Box<Wait>,
        request: &impl RequestInfo,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Taken, Limited>> {
        let polled = Self::poll_permit(wait, cx);
        // First it takes what it has waited for, even if it would cost less by now: that is settled later.
        let is_lower = polled.is_pending()
            && wait.estimate_anew(cx, || {
                let mut parts = SmallVec::new();
                let mut host = HostKey::of(request);
                if let Some(reading) = self.first.extractors.read(request, &mut host, None) {
                    // A request that can no longer be read keeps its costs.
                    let _ = self.read_parts(reading, request, &mut parts);
                }
                parts
            });
        match is_lower {
            true => Self::poll_permit(wait, cx),
            false => polled,
        }
    }

    fn poll_permit(wait: &mut Box<Wait>, cx: &mut Context<'_>) -> Poll<Result<Taken, Limited>> {
        Pin::new(wait).poll(cx)
    }

    fn send(taken: Taken, wait: &mut Box<Wait>) -> Result<Option<Sent>, Limited> {
        Ok(wait.leave(taken)?.map(Taken::sent))
    }

    #[inline]
    fn poll_lost(call: &Sent, cx: &mut Context<'_>) -> Poll<Limited> {
        call.poll_lost(cx)
    }

    #[cfg(feature = "grpc")]
    fn settle(call: &Sent, response: &mut impl ResponseInfo, policy: &ResponsePolicy) {
        if let Some(waited) = call.waited() {
            show_wait(waited, response);
        }
        let signal = response.signal().unwrap_or_default();
        policy.settle(response, &signal, || call.settlement());
    }

    /// Ends `call`. A limiter never retries: that is for a policy outside of the layer.
    #[inline]
    fn leave<T>(
        call: &mut Option<Sent>,
        response: &mut impl ResponseInfo,
        policy: &ResponsePolicy,
        _repeat: Option<T>,
    ) -> Departure<Box<Wait>, T> {
        if let Some(waited) = call.as_ref().and_then(Sent::waited) {
            show_wait(waited, response);
        }
        if policy.is_default()
            && !is_any_uncertain()
            && !Signal::is_any_in(response)
            && !guarded::may_be_bad(response.status())
        {
            return Departure::Pass(take_call(call).into_in_flight_slot());
        }
        leave_slow(take_call(call), response, policy)
    }
}

/// Ends `call` with a response that may state something about limits.
// Not inlined, so that the common path of `leave` stays small.
#[inline(never)]
fn leave_slow<T>(
    call: Sent,
    response: &mut impl ResponseInfo,
    policy: &ResponsePolicy,
) -> Departure<Box<Wait>, T> {
    if is_own_response(response) {
        return Departure::Pass(None);
    }
    let (signal, status) = policy.read(call.key(), call.host(), response, clock::now());
    policy.settle(response, &signal, || call.settlement());
    match call.end(&signal, status) {
        (_, Some(limited)) if policy.error_on_limit() => Departure::Refuse(limited),
        (in_flight_slot, _) => Departure::Pass(in_flight_slot),
    }
}

edge! {
    RateLimitLayer { gate: |layer| layer => RateLimitLayer, request: RequestInfo, clone: None }
}
