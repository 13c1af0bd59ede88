//! What a caller asserts.

use std::time::Duration;

use crate::quota::{LIFE, Quota};

/// What a caller asserts about a key: its quota, and the slack that the way to the upstream takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    quota: Quota,
    transit_slack: Duration,
    boundary_guard: Duration,
    life: Duration,
}

impl LimitSpec {
    /// Makes the terms of `quota` with the slack for the way to the upstream (`transit_slack`) and
    /// around the boundaries of fixed windows (`boundary_guard`).
    pub(crate) fn new(quota: Quota, transit_slack: Duration, boundary_guard: Duration) -> Self {
        LimitSpec { quota, transit_slack, boundary_guard, life: LIFE }
    }

    /// Returns the same terms, under which permits live for `life`, unless wake-ups or round trips
    /// to the store are late.
    pub(crate) fn with_life(self, life: Duration) -> Self {
        LimitSpec { life, ..self }
    }

    /// How long after its slot a permit is usable.
    pub(crate) fn life(&self) -> Duration {
        self.life
    }

    /// Nothing is asserted.
    pub(crate) fn none() -> Self {
        LimitSpec::new(Quota::in_flight(Quota::LARGEST_COUNT), Duration::ZERO, Duration::ZERO)
    }

    /// What is allowed.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// How much later than its deadline a permit may arrive at the upstream.
    pub fn transit_slack(&self) -> Duration {
        self.transit_slack
    }

    /// How long before and after the boundary of a fixed window nothing is sent.
    pub fn boundary_guard(&self) -> Duration {
        self.boundary_guard
    }
}
