//! What a layer does with a response.

use std::sync::Arc;
use std::time::Instant;

use http::HeaderMap;

use crate::key::Key;
use crate::signal::{ResponseInfo, Signal};

/// A closure that changes the signal that was read from a response; see
/// [`RateLimitBuilder::dialect`](crate::RateLimitBuilder::dialect).
type Dialect = Arc<dyn Fn(Key, &HeaderMap, Signal) -> Signal + Send + Sync>;

/// What a layer does with a response.
///
/// Each call in flight keeps a copy, so the type is one pointer, and `None` for the defaults.
#[derive(Clone, Default)]
pub(crate) struct ResponsePolicy(Option<Arc<Policy>>);

#[derive(Clone, Default)]
struct Policy {
    /// Whether a refusal by the upstream becomes an error. Otherwise it passes as a response.
    error_on_limit: bool,
    dialect: Option<Dialect>,
}

impl ResponsePolicy {
    /// Returns whether a refusal by the upstream becomes an error.
    pub(super) fn error_on_limit(&self) -> bool {
        self.0.as_ref().is_some_and(|policy| policy.error_on_limit)
    }

    /// Returns whether nothing was set.
    #[inline]
    pub(super) fn is_default(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the closure that changes signals, if one was set.
    pub(super) fn dialect(&self) -> Option<&Dialect> {
        self.0.as_ref()?.dialect.as_ref()
    }

    /// Reads the signal in the `response` to a request for `key`. The response arrived at `arrived`.
    ///
    /// If `host` is given and another host has responded, after a redirect, the signal is empty.
    pub(super) fn signal(
        &self,
        key: Key,
        host: Option<Key>,
        response: &impl ResponseInfo,
        arrived: Instant,
    ) -> Signal {
        if let (Some(requested), Some(responding)) = (host, response.host())
            && Key::host(responding) != requested
        {
            return Signal::default();
        }
        let signal = Signal::read_at(response, arrived);
        match (self.dialect(), response.headers()) {
            (Some(dialect), Some(headers)) => dialect(key, headers, signal),
            _ => signal,
        }
    }

    /// Makes refusals by the upstream errors.
    pub(super) fn set_error_on_limit(&mut self) {
        Arc::make_mut(self.0.get_or_insert_default()).error_on_limit = true;
    }

    /// Sets the closure that changes signals.
    pub(super) fn set_dialect(&mut self, dialect: Dialect) {
        Arc::make_mut(self.0.get_or_insert_default()).dialect = Some(dialect);
    }
}
