//! The limits of a key, as a process states them.

use std::time::Duration;

use crate::config_error::ConfigError;
use crate::quota::{LIFE, Quota, Slacks};

/// The limits of a key, as a process states them: its quota, and the slack for the way to the
/// upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    quota: Quota,
    transit_slack: Duration,
    boundary_guard: Duration,
    life: Duration,
}

impl LimitSpec {
    /// Makes the limits of `quota`, with the slack for the way to the upstream (`transit_slack`)
    /// and around the boundaries of fixed windows (`boundary_guard`).
    pub(crate) fn new(quota: Quota, transit_slack: Duration, boundary_guard: Duration) -> Self {
        LimitSpec {
            quota,
            transit_slack,
            boundary_guard,
            life: LIFE,
        }
    }

    /// Makes the limits of `quota`, for an upstream that counts a request up to `counted_within` after it
    /// was sent.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the quota is out of range.
    pub(crate) fn checked(
        quota: Quota,
        slacks: Slacks,
        counted_within: Duration,
    ) -> Result<Self, ConfigError> {
        let life = quota.check(slacks)?;
        let transit_slack = slacks.transit + counted_within;
        Ok(LimitSpec::new(quota, transit_slack, slacks.boundary).with_life(life))
    }

    /// Returns the same limits, with permits that are valid for `life`. They are valid for longer
    /// if wake-ups or round trips to the store are late.
    pub(crate) fn with_life(self, life: Duration) -> Self {
        LimitSpec { life, ..self }
    }

    /// Returns how long after its slot a permit is valid.
    pub(crate) fn life(&self) -> Duration {
        self.life
    }

    /// Returns limits that allow everything.
    pub(crate) fn none() -> Self {
        LimitSpec::new(
            Quota::in_flight(Quota::LARGEST_COUNT),
            Duration::ZERO,
            Duration::ZERO,
        )
    }

    /// Returns what is allowed.
    pub fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Returns how much later than the deadline of its permit a request may arrive at the upstream.
    pub fn transit_slack(&self) -> Duration {
        self.transit_slack
    }

    /// Returns for how long before and after each boundary of a fixed window no request is sent.
    pub fn boundary_guard(&self) -> Duration {
        self.boundary_guard
    }
}
