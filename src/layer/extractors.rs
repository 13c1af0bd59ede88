//! How requests and their answers are read.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use http::HeaderMap;

use crate::error::Limited;
use crate::key::{Cost, Deadline, Key, RequestInfo};
use crate::limiter::{Entry, Seat, Sent};
use crate::signal::{AsResponseInfo, Signal};

/// How requests and their answers are read.
#[derive(Default)]
pub(super) struct Extractors {
    pub(super) key: Option<Extractor<Option<Key>>>,
    pub(super) cost: Option<Extractor<u32>>,
    pub(super) deadline: Option<Extractor<Option<Instant>>>,
    pub(super) policy: ResponsePolicy,
    /// The first host that requests without a key function went to, and its key: most programs call one.
    pub(super) first_host: OnceLock<(Box<str>, Key)>,
}

/// What a closure finds in a request.
type Extractor<T> = Box<dyn Fn(&RequestInfo<'_>) -> T + Send + Sync>;

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

    fn dialect(&self) -> Option<&Dialect> {
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

/// The response to a request leaves the gate: an error where it is a refusal, and refusals are errors. Its call is in
/// flight until the seat, if there is one, is dropped.
#[inline]
pub(crate) fn leave(
    sent: Sent,
    response: &impl AsResponseInfo,
    policy: &ResponsePolicy,
) -> Result<Option<Seat>, Limited> {
    if policy.0.is_none() && !sent.is_listened_for() && !Signal::is_any_in(response) {
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

impl Extractors {
    #[inline]
    pub(super) fn entry(&self, request: &RequestInfo<'_>) -> Option<Entry> {
        let key = match (request.extension::<Key>(), &self.key) {
            (Some(key), _) => *key,
            (None, Some(key_of)) => key_of(request)?,
            (None, None) => Key::ALL,
        };
        let cost = match (request.extension::<Cost>(), &self.cost) {
            (Some(Cost(cost)), _) => *cost,
            (None, Some(cost_of)) => cost_of(request),
            (None, None) => 1,
        };
        let deadline = match (request.extension::<Deadline>(), &self.deadline) {
            (Some(Deadline(deadline)), _) => Some(*deadline),
            (None, Some(deadline_of)) => deadline_of(request),
            (None, None) => None,
        };
        let host = if key == Key::ALL { self.host_key(request) } else { request.host_if_redirected() };
        Some(Entry { key, cost, deadline, host })
    }

    #[inline]
    fn host_key(&self, request: &RequestInfo<'_>) -> Option<Key> {
        let host = request.host()?;
        match self.first_host.get() {
            Some((first, key)) if **first == *host => Some(*key),
            _ => Some(self.other_host_key(host)),
        }
    }

    #[cold]
    fn other_host_key(&self, host: &str) -> Key {
        let key = Key::host(host);
        self.first_host.get_or_init(|| (host.into(), key));
        key
    }
}

impl fmt::Debug for Extractors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extractors")
            .field("key", &self.key.is_some())
            .field("cost", &self.cost.is_some())
            .field("deadline", &self.deadline.is_some())
            .field("error_on_upstream_limit", &self.policy.error_on_limit())
            .field("dialect", &self.policy.dialect().is_some())
            .finish()
    }
}
