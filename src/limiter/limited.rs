//! Why a request ends without a permit.

use std::time::Instant;

use super::engine::Core;
use crate::error::{Limited, Reason, StoreError};
use crate::key::Key;
pub(super) use crate::refused::RefusedRequest;
use crate::store::Refusal;

/// Why a request ends without a permit.
#[derive(Debug)]
pub(super) struct Stopped {
    /// The part that stops it.
    pub(super) part: usize,
    pub(super) why: Why,
}

#[derive(Debug)]
pub(super) enum Why {
    /// This process refuses the request.
    Refused(Reason, Refusal),
    /// The store failed.
    Failed(StoreError),
}

impl Stopped {
    pub(super) fn refused(part: usize, reason: Reason, refusal: Refusal) -> Self {
        let why = Why::Refused(reason, refusal);
        Stopped { part, why }
    }

    /// `max_queue` requests wait already.
    pub(super) fn queue_full(part: usize, max_queue: usize) -> Self {
        Stopped::refused(part, Reason::QueueFull(max_queue), Refusal::NEVER)
    }
}

impl Why {
    /// A process without room for one more key is no failure of the store.
    pub(super) fn failed(error: StoreError) -> Self {
        match error {
            StoreError::Full { max_keys } => {
                Why::Refused(Reason::TooManyKeys(max_keys), Refusal::NEVER)
            }
            error => Why::Failed(error),
        }
    }
}

impl RefusedRequest {
    /// A request of `key` that has not waited.
    pub(super) fn of_key(core: &Core, key: Key) -> Self {
        RefusedRequest::new(core.label(key, None), core.limit_name(key))
    }

    /// Builds the error of a request that ends without a permit.
    pub(super) fn end(self, why: Why, now: Instant) -> Limited {
        match why {
            Why::Refused(reason, refusal) => self.refuse(reason, refusal, now),
            Why::Failed(source) => self.fail(source, now),
        }
    }
}
