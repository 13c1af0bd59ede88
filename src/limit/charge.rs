//! Units that were used without a permit.

use std::time::Duration;

/// Units that were used without a permit, for
/// [`LeaseRequest::charges`](crate::store::LeaseRequest::charges).
///
/// They count in each limit of the key as if permits for them had been used `age` ago. The units
/// used may then exceed the limit. A process charges what a request cost more than its permit, and, if
/// the upstream counts late, its cost instead of the permit ([`Settlement`](crate::Settlement)). With
/// [`FallbackShare`](crate::OnStoreError::FallbackShare), it also charges the units that it used alone
/// during an outage.
///
/// A sliding window ignores units older than the window. A fixed window ignores units of earlier
/// windows. A charge leaves a bucket empty at most. If one charge has more units than a limit
/// allows, only as many units as the limit allows count.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// How long ago the last of the units was used, at least.
    pub age: Duration,
    /// How many units were used.
    pub units: u64,
}

impl Charge {
    /// The most charges in one call of a store.
    pub const MOST: usize = 64;

    /// Makes a charge of `units` that were used `age` ago or earlier.
    pub fn new(age: Duration, units: u64) -> Self {
        Charge { age, units }
    }
}
