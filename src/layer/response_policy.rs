//! What a layer does with a response.

use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, StatusCode};

use crate::cost::Cost;
use crate::key::Key;
use crate::limiter::Settlement;
use crate::signal::{ResponseInfo, ResponseRef, Signal};

/// A closure that changes the signal that was read from a response; see
/// [`RateLimitBuilder::dialect`](crate::RateLimitBuilder::dialect).
pub(super) type Dialect = Arc<dyn Fn(Key, &HeaderMap, Signal) -> Signal + Send + Sync>;

/// How the true cost of a request is read from its response; see
/// [`RateLimitBuilder::settle`](crate::RateLimitBuilder::settle).
pub(super) type CostOf = Arc<dyn Fn(&ResponseRef<'_>) -> Option<Cost> + Send + Sync>;

/// What a layer does with a response.
///
/// Each call in flight keeps a copy, so the type is one pointer, and `None` for the defaults.
#[derive(Clone, Default)]
pub(crate) struct ResponsePolicy(Option<Arc<Policy>>);

/// What is set of a [`ResponsePolicy`].
#[derive(Clone, Default)]
pub(super) struct Policy {
    /// Whether a refusal by the upstream becomes an error. Otherwise it passes as a response.
    pub(super) error_on_limit: bool,
    pub(super) dialect: Option<Dialect>,
    pub(super) settle: Option<CostOf>,
    /// Whether each response gets its [`Settlement`].
    pub(super) settles_by_hand: bool,
}

impl ResponsePolicy {
    pub(super) fn error_on_limit(&self) -> bool {
        self.0.as_ref().is_some_and(|policy| policy.error_on_limit)
    }

    /// Returns whether nothing was set.
    #[inline]
    pub(super) fn is_default(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn dialect(&self) -> Option<&Dialect> {
        self.0.as_ref()?.dialect.as_ref()
    }

    /// Returns whether a function reads the true cost from a response.
    #[cfg(feature = "llm")]
    pub(super) fn has_settle(&self) -> bool {
        (self.0.as_ref()).is_some_and(|policy| policy.settle.is_some())
    }

    /// Returns whether the true cost of a request may be stated after its response.
    pub(super) fn settles(&self) -> bool {
        let policy = self.0.as_ref();
        policy.is_some_and(|policy| policy.settle.is_some() || policy.settles_by_hand)
    }

    /// Settles the request of `response`, or leaves that to the caller.
    pub(super) fn settle(
        &self,
        response: &mut impl ResponseInfo,
        signal: &Signal,
        settlement: impl FnOnce() -> Settlement,
    ) {
        let Some(policy) = self.0.as_ref().filter(|_| self.settles()) else {
            return;
        };
        let settlement = settlement();
        let seen = ResponseRef::new(response).with_signal(signal);
        if let Some(actual) = policy.settle.as_ref().and_then(|read| read(&seen)) {
            settlement.settle(actual);
        }
        if policy.settles_by_hand
            && let Some(extensions) = response.extensions_mut()
        {
            extensions.insert(settlement);
        }
    }

    /// Returns this policy for a response whose request was settled.
    #[cfg(feature = "grpc")]
    pub(super) fn without_settle(&self) -> Self {
        let mut policy = self.clone();
        if self.settles() {
            let policy = policy.change();
            policy.settle = None;
            policy.settles_by_hand = false;
        }
        policy
    }

    /// Reads the signal and the status of the `response` to a request for `key`. The response arrived at `arrived`.
    ///
    /// If `host` is given and another host has responded, after a redirect, both are empty.
    pub(super) fn read(
        &self,
        key: Key,
        host: Option<Key>,
        response: &impl ResponseInfo,
        arrived: Instant,
    ) -> (Signal, Option<StatusCode>) {
        if let (Some(requested), Some(responding)) = (host, response.host())
            && Key::host(responding) != requested
        {
            return (Signal::default(), None);
        }
        let signal = Signal::read_at(response, arrived);
        let signal = match (self.dialect(), response.headers()) {
            (Some(dialect), Some(headers)) => dialect(key, headers, signal),
            _ => signal,
        };
        (signal, response.status())
    }

    /// Returns what is set, to be changed.
    pub(super) fn change(&mut self) -> &mut Policy {
        Arc::make_mut(self.0.get_or_insert_default())
    }
}

/// Returns whether a layer inside has refused or cancelled the request, so that the upstream has not answered it.
pub(super) fn is_own_response(response: &impl ResponseInfo) -> bool {
    #[cfg(feature = "grpc")]
    {
        super::grpc::OwnResponse::is_in(response.extensions())
    }
    #[cfg(not(feature = "grpc"))]
    {
        let _ = response;
        false
    }
}
