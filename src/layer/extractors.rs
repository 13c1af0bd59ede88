//! What a layer reads from a request.

use std::fmt;
use std::sync::OnceLock;
use std::time::Instant;

use super::response_policy::ResponsePolicy;
use crate::key::{Cost, Deadline, Key, RequestRef};
use crate::limiter::Entry;

/// What a layer reads from a request, and its policy for responses.
#[derive(Default)]
pub(super) struct Extractors {
    pub(super) key: Option<Extractor<Option<Key>>>,
    pub(super) cost: Option<Extractor<u32>>,
    pub(super) deadline: Option<Extractor<Option<Instant>>>,
    pub(super) policy: ResponsePolicy,
    /// The host of the first request under [`Key::ALL`], and its key. Most programs call one host, so this saves the hash.
    pub(super) first_host: OnceLock<(Box<str>, Key)>,
}

/// A closure that reads one value from a request.
type Extractor<T> = Box<dyn Fn(&RequestRef<'_>) -> T + Send + Sync>;

impl Extractors {
    /// Reads key, cost, deadline and host of `request`. Returns `None` if the key function finds no key.
    ///
    /// Values in the extensions of the request take precedence over the functions.
    #[inline]
    pub(super) fn entry(&self, request: &RequestRef<'_>) -> Option<Entry> {
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

    /// Returns the key of the request's host.
    #[inline]
    fn host_key(&self, request: &RequestRef<'_>) -> Option<Key> {
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
