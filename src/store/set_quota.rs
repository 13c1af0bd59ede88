//! The set quota of a key, as a store states it.

use std::time::Duration;

use crate::limit::{QuotaInForce, is_learned, is_set};
use crate::quota::Quota;

/// A quota that an operator set for a key, or that the upstream stated, or the end of one.
///
/// It applies to all processes, in place of the quotas that they have for the key. Units that were
/// used stay used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SetQuota {
    /// The quota version: the number of the last change. It is odd if the quota applies, and even if
    /// it has ended. Of two versions of one key, the larger one is newer.
    pub version: u32,
    /// The quota. `None` if it has ended. Its limits count what the key counts, and name no unit.
    pub quota: Option<Quota>,
    /// How long the quota applies if it is not used, or not learned again. If it has ended, how long that
    /// is remembered.
    pub left: Duration,
    /// For how long after its last use the quota applies. If it is [learned](Self::is_learned), for how
    /// long after it was learned last.
    pub life: Duration,
}

impl SetQuota {
    /// Makes a quota that applies for `left`, and for `life` after each use. Without a quota, the end
    /// of one.
    ///
    /// # Panics
    ///
    /// If the version is odd and there is no quota, or even and there is one.
    pub fn new(version: u32, quota: Option<Quota>, left: Duration, life: Duration) -> Self {
        assert_eq!(
            is_set(version),
            quota.is_some(),
            "an odd version is of a quota, and an even one of its end"
        );
        SetQuota {
            version,
            quota,
            left,
            life,
        }
    }
}

impl SetQuota {
    /// Returns whether the upstream has stated the quota, and no operator has set it.
    pub fn is_learned(&self) -> bool {
        is_learned(self.version)
    }
}

impl From<QuotaInForce> for SetQuota {
    fn from(quota: QuotaInForce) -> Self {
        SetQuota {
            version: quota.version,
            quota: quota.quota,
            left: Duration::from_micros(quota.left),
            life: Duration::from_micros(quota.life),
        }
    }
}
