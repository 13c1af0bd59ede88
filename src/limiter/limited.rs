//! The errors of refused requests. Their callers count and report them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Core;
use crate::clock;
use crate::error::{ErrorFacts, Limited, LimitedInfo, Reason, StoreError};
use crate::key::{Key, Label};
use crate::store::Refusal;

/// The shortest time after which a refused request is advised to retry.
///
/// Without it, a caller that retries at once after each refusal would spin.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

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

/// What the error of a request calls its limit.
#[derive(Default)]
pub(super) struct LimitName {
    /// The name of the limit, if it has one.
    pub(super) name: Option<&'static str>,
    /// The pattern of the route whose quota it is, if it is that of a route.
    pub(super) route: Option<Arc<str>>,
    /// What the limit counts. `None` for requests.
    pub(super) unit: Option<&'static str>,
    /// The class whose share it is, if the quota is divided.
    pub(super) class: Option<&'static str>,
}

/// What is known about a request when it is refused.
pub(super) struct RefusedRequest {
    /// The name of its key.
    pub(super) label: Label,
    pub(super) limit: LimitName,
    /// When it entered.
    pub(super) since: Instant,
    /// How often it waited for a slot: see [`LimitedInfo::turns`].
    pub(super) turns: u32,
}

impl RefusedRequest {
    /// A request of `key` that has not waited.
    pub(super) fn of_key(core: &Core, key: Key, now: Instant) -> Self {
        RefusedRequest::new(core.label(key, None), core.limit_name(key), now)
    }

    /// A request that has not waited.
    pub(super) fn new(label: Label, limit: LimitName, now: Instant) -> Self {
        RefusedRequest {
            label,
            limit,
            since: now,
            turns: 0,
        }
    }

    /// Builds the error of a request that ends without a permit.
    pub(super) fn end(self, why: Why, now: Instant) -> Limited {
        match why {
            Why::Refused(reason, refusal) => self.refuse(reason, refusal, now),
            Why::Failed(source) => self.fail(source, now),
        }
    }

    /// Builds the error of a request that this process refuses.
    pub(super) fn refuse(self, reason: Reason, refusal: Refusal, now: Instant) -> Limited {
        Limited::Local {
            reason,
            report: self.report(refusal, now),
        }
    }

    /// Builds the error of a request that failed because the store did.
    pub(super) fn fail(self, source: StoreError, now: Instant) -> Limited {
        Limited::Store {
            source,
            report: self.report(Refusal::NEVER, now),
        }
    }

    fn report(self, refusal: Refusal, now: Instant) -> LimitedInfo {
        LimitedInfo::new(ErrorFacts {
            key: self.label,
            name: self.limit.name,
            route: self.limit.route,
            unit: self.limit.unit,
            class: self.limit.class,
            limit: refusal.limit,
            retry_after: refusal.wait.map(|wait| wait.max(SHORTEST_WAIT)),
            at: clock::wall(now),
            waited: now.saturating_duration_since(self.since),
            turns: self.turns,
        })
    }
}
