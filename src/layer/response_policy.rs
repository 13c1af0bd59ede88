//! What becomes of a response.

use std::sync::Arc;

use http::HeaderMap;

use crate::key::Key;
use crate::signal::{AsResponseInfo, Signal};

/// What a closure makes of what was read from the headers.
type Dialect = Arc<dyn Fn(Key, &HeaderMap, Signal) -> Signal + Send + Sync>;

/// How the answer to a request is read. A call on its way carries it, so it is small, and mostly nothing.
#[derive(Clone, Default)]
pub(crate) struct ResponsePolicy(Option<Arc<Policy>>);

#[derive(Clone, Default)]
struct Policy {
    /// Whether a refusal by the upstream is an error; else it passes.
    errors: bool,
    dialect: Option<Dialect>,
}

impl ResponsePolicy {
    pub(super) fn error_on_limit(&self) -> bool {
        self.0.as_ref().is_some_and(|policy| policy.errors)
    }

    #[inline]
    pub(super) fn is_default(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn dialect(&self) -> Option<&Dialect> {
        self.0.as_ref()?.dialect.as_ref()
    }

    /// What `response` says to a request to `host` under `key`: nothing, if a redirect led to another host.
    pub(super) fn signal(&self, key: Key, host: Option<Key>, response: &impl AsResponseInfo) -> Signal {
        if let (Some(asked), Some(answered)) = (host, response.host())
            && Key::host(answered) != asked
        {
            return Signal::default();
        }
        let signal = Signal::read(response);
        match (self.dialect(), response.headers()) {
            (Some(dialect), Some(headers)) => dialect(key, headers, signal),
            _ => signal,
        }
    }

    pub(super) fn set_error_on_limit(&mut self) {
        Arc::make_mut(self.0.get_or_insert_default()).errors = true;
    }

    pub(super) fn set_dialect(&mut self, dialect: Dialect) {
        Arc::make_mut(self.0.get_or_insert_default()).dialect = Some(dialect);
    }
}
