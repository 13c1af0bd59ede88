//! What a layer reads from a request.

use std::fmt;
use std::time::Instant;

use http::Extensions;

use super::response_policy::ResponsePolicy;
use crate::key::{Cost, Deadline, Key, RequestInfo, RequestRef};

/// What a layer reads from a request, and its policy for responses.
#[derive(Default)]
pub(super) struct Extractors {
    pub(super) key: Option<Extractor<Option<Key>>>,
    pub(super) cost: Option<Extractor<u32>>,
    pub(super) deadline: Option<Extractor<Option<Instant>>>,
    pub(super) policy: ResponsePolicy,
}

/// A closure that reads one value from a request.
type Extractor<T> = Box<dyn Fn(&RequestRef<'_>) -> T + Send + Sync>;

impl Extractors {
    /// Reads key, cost and deadline of `request`. Returns `None` if the key function finds no key.
    ///
    /// Values in the extensions of the request take precedence over the functions.
    // Inlined, and generic: a request that no function reads is never seen through a `dyn`.
    #[inline]
    pub(super) fn read(&self, request: &impl RequestInfo) -> Option<Reading> {
        let extensions = request.extensions().filter(|extensions| !extensions.is_empty());
        let key = match (extensions.and_then(Extensions::get::<Key>), &self.key) {
            (Some(key), _) => *key,
            (None, Some(key_of)) => key_of(&RequestRef::new(request))?,
            (None, None) => Key::ALL,
        };
        let cost = match (extensions.and_then(Extensions::get::<Cost>), &self.cost) {
            (Some(Cost(cost)), _) => *cost,
            (None, Some(cost_of)) => cost_of(&RequestRef::new(request)),
            (None, None) => 1,
        };
        let deadline = match (extensions.and_then(Extensions::get::<Deadline>), &self.deadline) {
            (Some(Deadline(deadline)), _) => Some(*deadline),
            (None, Some(deadline_of)) => deadline_of(&RequestRef::new(request)),
            (None, None) => None,
        };
        Some(Reading { key, cost, deadline })
    }
}

/// What a layer has read from a request.
pub(super) struct Reading {
    pub(super) key: Key,
    pub(super) cost: u32,
    pub(super) deadline: Option<Instant>,
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
