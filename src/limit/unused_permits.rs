//! Permits that go back to the store.

/// Permits of one slot that were surely not used, which a process gives back.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnusedPermits {
    /// The slot, in microseconds of the store's time, as in
    /// [`Grant::slot`](crate::store::Grant::slot).
    pub slot: u64,
    /// The stamp, in microseconds of the store's time, as in
    /// [`Grant::stamp`](crate::store::Grant::stamp).
    pub stamp: u64,
    /// The units of all the permits.
    pub units: u64,
    /// The incarnation of the state that granted the permits. A state of another incarnation does
    /// not take them back.
    pub incarnation: u64,
}

impl UnusedPermits {
    /// Makes `units` of permits with this slot and stamp, both in the store's time, which a state
    /// of `incarnation` granted.
    pub const fn new(slot: u64, stamp: u64, units: u64, incarnation: u64) -> Self {
        UnusedPermits {
            slot,
            stamp,
            units,
            incarnation,
        }
    }
}
