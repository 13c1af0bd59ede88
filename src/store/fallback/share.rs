//! The share of a limit that one process uses while the store cannot be reached.

use crate::limit::LimitSpec;
use crate::quota::Quota;

/// A share of a limit: `part` of `of`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    pub(in crate::store) part: u64,
    pub(in crate::store) of: u64,
}

impl Share {
    /// The denominator of a configured share.
    const WHOLE: u64 = 1_000_000_000;

    /// Makes a share of more than 0 and at most 1. Returns `None` for any other number.
    pub(crate) fn new(share: f64) -> Option<Self> {
        let part = (share * Share::WHOLE as f64).round();
        // NaN is in no range.
        (1.0..=Share::WHOLE as f64)
            .contains(&part)
            .then_some(Share {
                part: part as u64,
                of: Share::WHOLE,
            })
    }

    /// Returns the limits of this share of `quota`, with the slacks and the life of `spec`.
    pub(super) fn limits(self, quota: Quota, spec: &LimitSpec) -> LimitSpec {
        let own = quota.part(self.part, self.of);
        LimitSpec::new(own, spec.transit_slack(), spec.boundary_guard()).with_life(spec.life())
    }
}
