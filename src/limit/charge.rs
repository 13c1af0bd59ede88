//! Units that were used without a permit.

use std::time::Duration;

/// Units that were used without a permit, for [`LeaseRequest::charges`](crate::store::LeaseRequest::charges): they count in every limit of the key
/// as if a permit for them had been used then, even beyond the limit.
///
/// With [`FallbackShare`](crate::OnStoreError::FallbackShare), a process charges the store after an outage with the units that
/// it used alone.
///
/// A sliding window ignores units older than the window. A fixed window ignores units of earlier windows. A bucket is left
/// empty at most. More units than a limit allows count as the limit.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// How long ago the last of them was used, at least.
    pub age: Duration,
    /// How many units.
    pub units: u64,
}

impl Charge {
    /// The most charges in one call of a store.
    pub const MOST: usize = 64;

    /// `units` that were used `age` ago, or before.
    pub fn new(age: Duration, units: u64) -> Self {
        Charge { age, units }
    }
}
