//! A request that is refused, and its error. Its caller counts and reports it.

use std::time::{Duration, Instant};

use http::StatusCode;

use crate::clock;
use crate::error::{ErrorFacts, LimitName, Limited, LimitedInfo, Reason, StoreError};
use crate::key::Label;
use crate::store::Refusal;

/// The shortest time after which a refused request is advised to retry.
///
/// Without it, a caller that retries at once after each refusal would spin.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// What is known about a request when it is refused.
pub(crate) struct RefusedRequest {
    /// The name of its key.
    pub(crate) label: Label,
    pub(crate) limit: LimitName,
    pub(crate) waited: Duration,
    /// How often it waited for a slot: see [`LimitedInfo::turns`].
    pub(crate) turns: u32,
}

impl RefusedRequest {
    /// A request of a throttle, which has no limit.
    pub(crate) fn of_pace(label: Label, waited: Duration, turns: u32) -> Self {
        RefusedRequest {
            waited,
            turns,
            ..RefusedRequest::new(label, LimitName::default())
        }
    }

    /// A request that has not waited.
    pub(crate) fn new(label: Label, limit: LimitName) -> Self {
        RefusedRequest {
            label,
            limit,
            waited: Duration::ZERO,
            turns: 0,
        }
    }

    /// Builds the error of a request that this process refuses.
    pub(crate) fn refuse(self, reason: Reason, refusal: Refusal, now: Instant) -> Limited {
        let wait = refusal.wait.map(|wait| wait.max(SHORTEST_WAIT));
        Limited::Local {
            reason,
            report: self.report(Refusal { wait, ..refusal }, now),
        }
    }

    /// Builds the error of a request that failed because the store did.
    pub(crate) fn fail(self, source: StoreError, now: Instant) -> Limited {
        Limited::Store {
            source,
            report: self.report(Refusal::NEVER, now),
        }
    }

    /// Builds the error of a request that the upstream has refused with this `status`.
    pub(crate) fn refused_upstream(
        self,
        status: StatusCode,
        retry_after: Option<Duration>,
        now: Instant,
    ) -> Limited {
        Limited::Upstream {
            status,
            report: self.report(Refusal::new(retry_after, None), now),
        }
    }

    fn report(self, refusal: Refusal, now: Instant) -> LimitedInfo {
        LimitedInfo::new(ErrorFacts {
            key: self.label,
            limit_name: self.limit,
            limit: refusal.limit,
            retry_after: refusal.wait,
            at: clock::wall(now),
            waited: self.waited,
            turns: self.turns,
        })
    }
}
