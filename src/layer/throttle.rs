//! The layer that finds the pace of an unknown limit, and its Tower service.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::extractors::{Extractors, Reading};
use super::response_policy::{ResponsePolicy, is_own_response};
use super::retrying::RetryingThrottleLayer;
use super::seam::{Departure, Gate, show_wait, take_call};
use super::service::edge;
use super::throttle_builder::AdaptiveThrottleBuilder;
use crate::admission::Admission;
use crate::clock;
use crate::error::{Limited, Reason};
use crate::key::{HostKey, RequestInfo, RequestRef};
use crate::limiter::{Because, Waited};
#[cfg(doc)]
use crate::pacing::Fair;
use crate::signal::ResponseInfo;
use crate::store::Refusal;
use crate::suspicion::is_any_suspected;
use crate::throttle::{PaceEntry, PaceWait, Throttle, ThrottlePermit, Turn};

/// Finds the speed that a server allows if its limit is unknown or changes. Clones share what they
/// learn.
///
/// The layer learns from responses: from refusals, from the units that are left, and from the times
/// to retry. Its [pace](crate::pace) is the rule by which it learns. The default is [`Fair`]: it
/// causes next to no refusals, and all clients that use it converge on equal shares without talking
/// to each other.
///
/// If you know the limit, use [`RateLimitLayer`](super::RateLimitLayer), which keeps it exactly. If
/// you want both, put this layer outside. The page [`pace`](crate::pace) says what to
/// expect.
///
/// The layer is a `tower_layer::Layer` over the same services as
/// [`RateLimitLayer`](super::RateLimitLayer), and a `reqwest_middleware::Middleware` (feature
/// `reqwest-middleware`). For calls that are not HTTP, use its
/// [`throttle`](AdaptiveThrottleLayer::throttle).
///
/// ```
/// use http::{Request, Response};
/// use tollgate::{AdaptiveThrottleLayer, by_host};
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let throttle = AdaptiveThrottleLayer::builder().key(by_host).build()?;
/// let mut service = ServiceBuilder::new().layer(throttle).service(client);
///
/// let request = Request::get("https://api.example.com/users").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// # assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
///
/// # What happens to a request
///
/// The request joins the queue of its key, first come, first served. The first request of a key is
/// sent alone: the others wait for its response, for at most a second. After that, the pace decides
/// when the next request is sent.
///
/// A refusal puts the key on hold for the time that the server states, at most
/// [`max_hold`](AdaptiveThrottleBuilder::max_hold). If the server states none, the pace chooses a
/// time. The refusal passes as a response. With [`retrying`](AdaptiveThrottleLayer::retrying), the
/// request takes its old place in the queue instead, before all others, and is sent again. After a second refusal it goes
/// behind the others.
///
/// # What it does not do
///
/// The layer counts no permits, so the server refuses some requests. Each process learns for
/// itself, unless the processes share a [store](AdaptiveThrottleBuilder::store).
#[derive(Clone, Debug)]
#[doc(alias = "429")]
#[doc(alias = "unknown limit")]
pub struct AdaptiveThrottleLayer {
    pub(super) throttle: Throttle,
    pub(super) extractors: Arc<Extractors>,
    /// Whether the kind of each request is read, because refused requests are sent again.
    pub(super) reads_kinds: bool,
}

impl AdaptiveThrottleLayer {
    /// Creates a layer that learns one pace for all its requests. Requests wait for at most 15 s.
    /// [`builder`](AdaptiveThrottleLayer::builder) changes these defaults.
    #[expect(
        clippy::new_without_default,
        reason = "each layer learns for itself, so it is created explicitly"
    )]
    pub fn new() -> Self {
        AdaptiveThrottleLayer::builder()
            .build()
            .expect("the defaults are in range")
    }

    /// Creates a builder, to change the defaults.
    pub fn builder() -> AdaptiveThrottleBuilder {
        AdaptiveThrottleBuilder::new()
    }

    /// Returns the throttle of this layer, for calls that are not HTTP. Throttle and layer share
    /// what they learn.
    pub fn throttle(&self) -> Throttle {
        self.throttle.clone()
    }

    /// Returns this layer with retries: it sends requests that the server refuses again, each in
    /// its old place in the queue, and after a second refusal behind the others. All attempts together wait for at most
    /// [`max_wait`](AdaptiveThrottleBuilder::max_wait).
    pub fn retrying(mut self) -> RetryingThrottleLayer {
        self.reads_kinds = true;
        RetryingThrottleLayer { layer: self }
    }
}

/// Puts into the extensions of a response how its request waited, if it did.
fn show_wait_of(permit: &ThrottlePermit, response: &mut impl ResponseInfo) {
    let waited = permit.waited();
    if !waited.is_zero() {
        let waited = Waited::new(waited, Because::Pace, permit.label(), None);
        show_wait(&waited, response);
    }
}

impl Gate for AdaptiveThrottleLayer {
    type Wait = Box<PaceWait>;
    type Permit = Turn;
    type Call = ThrottlePermit;
    type Admitted = Infallible;
    type Entry = ();

    /// Never admits at once: a throttle has one path.
    fn enter_fast(&self, _request: &impl RequestInfo) -> Result<Infallible, ()> {
        Err(())
    }

    fn sent(&self, admitted: Infallible) -> Self::Call {
        match admitted {}
    }

    fn enter_slow(&self, (): (), request: &impl RequestInfo) -> Admission<Self::Call, Self::Wait> {
        let mut host = HostKey::of(request);
        let read = self.extractors.read(request, &mut host, None);
        let Some(reading) = read else {
            let (never, now) = (Refusal::NEVER, clock::now());
            return (self.throttle).refuse(None, Reason::NoKey, "none".into(), never, now);
        };
        let Reading { key, deadline, .. } = reading;
        let reads_kind = self.reads_kinds || is_any_suspected();
        let kind = reads_kind.then(|| self.extractors.read_kind(request, 1));
        let entry = PaceEntry {
            key,
            kind,
            host: host.get_if_redirected(),
            deadline,
        };
        let label = || self.throttle.label(key, Some(&RequestRef::new(request)));
        let begun = self.throttle.begin(entry, label);
        if let Some(name_of) = &self.extractors.key_name
            && self.throttle.is_unnamed(key)
            && let Some(name) = name_of(&RequestRef::new(request))
        {
            self.throttle.name_key(key, &name);
        }
        begun.map(|permit| match self.extractors.policy.error_on_limit() {
            true => permit.named(label()),
            false => permit,
        })
    }

    fn policy(&self) -> ResponsePolicy {
        self.extractors.policy.clone()
    }

    fn poll_permit(wait: &mut Self::Wait, cx: &mut Context<'_>) -> Poll<Result<Turn, Limited>> {
        Pin::new(wait).poll(cx)
    }

    /// Sends the request. The permits of a throttle do not expire, but a hold may have begun while the inner service
    /// got ready.
    fn send(turn: Turn, wait: &mut Self::Wait) -> Result<Option<Self::Call>, Limited> {
        wait.leave(turn)
    }

    #[cfg(feature = "grpc")]
    fn settle(call: &Self::Call, response: &mut impl ResponseInfo, _policy: &ResponsePolicy) {
        show_wait_of(call, response);
    }

    /// Never ends: a throttle has no in-flight slots.
    fn poll_lost(_call: &Self::Call, _cx: &mut Context<'_>) -> Poll<Limited> {
        Poll::Pending
    }

    fn leave<T>(
        call: &mut Option<Self::Call>,
        response: &mut impl ResponseInfo,
        policy: &ResponsePolicy,
        repeat: Option<T>,
    ) -> Departure<Self::Wait, T> {
        let permit = take_call(call);
        if is_own_response(response) {
            return Departure::Pass(None);
        }
        show_wait_of(&permit, response);
        let arrived = clock::now();
        let (signal, status) = policy.read(permit.key(), permit.host(), response, arrived);
        match (
            permit.end(&signal, status, repeat.is_some(), arrived),
            repeat,
        ) {
            (Ok(Some(wait)), Some(repeat)) => Departure::Retry(wait, repeat),
            (Err(limited), _) if policy.error_on_limit() => Departure::Refuse(limited),
            _ => Departure::Pass(None),
        }
    }
}

edge! {
    AdaptiveThrottleLayer { gate: |layer| layer => AdaptiveThrottleLayer, request: RequestInfo, clone: None }
}
