//! The limits of a key, as a process states them.

use std::time::Duration;

use super::lending::Lending;
use crate::config_error::ConfigError;
use crate::quota::{LIFE, Limit, Quota, Slacks};

/// The limits of a key, as a process states them: its quota, and the slack for the way to the
/// upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    quota: Quota,
    transit_slack: Duration,
    boundary_guard: Duration,
    life: Duration,
    quota_version: u32,
    quota_life: Duration,
    lending: Option<Lending>,
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
            quota_version: 0,
            quota_life: Duration::ZERO,
            lending: None,
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

    /// Returns the same limits, stated with a quota version. The set quota of that version, or its
    /// end, has the life `life`. At most 100 years count.
    pub(crate) fn with_quota_version(self, version: u32, life: Duration) -> Self {
        const LONGEST: Duration = Duration::from_secs(100 * 366 * 86_400);
        LimitSpec {
            quota_version: version,
            quota_life: life.min(LONGEST),
            ..self
        }
    }

    /// Returns the same limits, as those of a part that lends `percent` of each of them. Its permits are
    /// valid for [`life`](Self::life) when they are borrowed at the pace that follows from that.
    pub(crate) fn with_lending(self, percent: u8) -> Self {
        let lending = Lending::new(&self.quota, percent, self.life + self.transit_slack);
        LimitSpec { lending, ..self }
    }

    /// Returns how the key lends to other classes, if it is the part of a class.
    pub fn lending(&self) -> Option<&Lending> {
        self.lending.as_ref()
    }

    /// Returns the limits of rate, and then the pace of the part if there is one.
    pub(crate) fn limits(&self) -> &[Limit] {
        self.lending
            .as_ref()
            .map_or(self.quota.limits(), Lending::limits)
    }

    /// Returns the pace of the part, if the key is the part of a class.
    pub(crate) fn pace(&self) -> Option<Limit> {
        self.lending.as_ref().map(Lending::pace)
    }

    /// Returns the version of the set quota that these limits are of, or of its end: odd if it
    /// applies, even if it has ended. 0 if the process knows of no set quota of the key.
    pub fn quota_version(&self) -> u32 {
        self.quota_version
    }

    /// Returns for how long after its last use the set quota applies, or after it was learned last. A store
    /// that has lost its state takes it from here.
    pub fn quota_life(&self) -> Duration {
        self.quota_life
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

    /// Returns what another quota with the same slacks has to allow for.
    pub(crate) fn slacks(&self) -> Slacks {
        Slacks {
            transit: self.transit_slack,
            boundary: self.boundary_guard,
            rate_loss: Slacks::RATE_LOSS,
        }
    }
}
