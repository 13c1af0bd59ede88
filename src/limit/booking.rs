//! What a ledger books, and why it books nothing.

use super::Micros;
use crate::quota::Limit;

/// Permits of one slot: each unit usable once, from `slot` to its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Booking {
    /// The first moment.
    pub(crate) slot: Micros,
    /// How long after the slot the deadline is.
    pub(crate) life: Micros,
    /// What the log keeps.
    pub(crate) stamp: Micros,
    /// How many permits.
    pub(crate) count: u32,
}

/// No slot up to the latest one asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLate {
    /// The first slot there would have been.
    pub(crate) slot: Micros,
    /// The limit that was the last to allow it.
    pub(crate) limit: Option<Limit>,
}
