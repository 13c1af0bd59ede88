//! Permits that go back to the store.

/// A permit that was surely not used, as it was granted: what a caller gives back.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnusedPermits {
    /// Its slot, in the store's time.
    pub slot: u64,
    /// Its stamp, in the store's time.
    pub stamp: u64,
    /// How many units.
    pub units: u64,
    /// Which life of the state granted it: in another it is not taken back.
    pub incarnation: u64,
}

impl UnusedPermits {
    /// Makes `units` of a permit that was granted from `slot` with `stamp`, both in the store's time, in a life of the state.
    pub const fn new(slot: u64, stamp: u64, units: u64, incarnation: u64) -> Self {
        UnusedPermits { slot, stamp, units, incarnation }
    }
}
