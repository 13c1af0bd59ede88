//! The errors of refused requests. Their callers count and report them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{Facts, Limited, LimitedInfo, Reason, StoreError};
use crate::key::Label;
use crate::store::Refusal;

/// The shortest time after which a refused request is advised to retry.
///
/// Without it, a caller that retries at once after each refusal would spin.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

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
    /// How often it got a slot. 0 if it never waited.
    pub(super) turns: u32,
}

impl RefusedRequest {
    /// A request that has not waited.
    pub(super) fn new(label: Label, limit: LimitName, now: Instant) -> Self {
        RefusedRequest {
            label,
            limit,
            since: now,
            turns: 0,
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
        LimitedInfo::new(Facts {
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
