//! The errors of refused requests.

use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{Facts, Limited, LimitedInfo, Reason, StoreError};
use crate::events;
use crate::key::Label;
use crate::store::Refusal;

/// The shortest time after which a refused request is advised to retry.
///
/// Without it, a caller that retries at once after each refusal would spin.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// What is known about a request when it is refused.
pub(super) struct RefusedRequest {
    /// The name of its key.
    pub(super) label: Label,
    /// The name of its limit, if it has one.
    pub(super) name: Option<&'static str>,
    /// When it entered.
    pub(super) since: Instant,
    /// How often it got a slot. 0 if it never waited.
    pub(super) turns: u32,
}

impl RefusedRequest {
    /// A request that has not waited. `name` is that of its limit.
    pub(super) fn new(label: Label, name: Option<&'static str>, now: Instant) -> Self {
        RefusedRequest {
            label,
            name,
            since: now,
            turns: 0,
        }
    }

    /// Builds and reports the error of a request that this process refuses.
    pub(super) fn refuse(self, reason: Reason, refusal: Refusal, now: Instant) -> Limited {
        reported(Limited::Local {
            reason,
            report: self.report(refusal, now),
        })
    }

    /// Builds and reports the error of a request that failed because the store did.
    pub(super) fn fail(self, source: StoreError, now: Instant) -> Limited {
        reported(Limited::Store {
            source,
            report: self.report(Refusal::NEVER, now),
        })
    }

    fn report(self, refusal: Refusal, now: Instant) -> LimitedInfo {
        LimitedInfo::new(Facts {
            key: self.label,
            name: self.name,
            limit: refusal.limit,
            retry_after: refusal.wait.map(|wait| wait.max(SHORTEST_WAIT)),
            at: clock::wall(now),
            waited: now.saturating_duration_since(self.since),
            turns: self.turns,
        })
    }
}

fn reported(limited: Limited) -> Limited {
    events::limited(&limited);
    limited
}
