//! What a ledger books, and why it books nothing.

use super::Micros;
use crate::quota::Limit;

/// Permits of one slot. Each is usable once, from the slot to its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Booking {
    /// The first moment at which the permits may be used.
    pub(crate) slot: Micros,
    /// How long after the slot the deadline is.
    pub(crate) life: Micros,
    /// The stamp, which the log keeps: the deadline plus the transit slack.
    pub(crate) stamp: Micros,
    /// How many permits were booked.
    pub(crate) count: u32,
}

/// There is no slot up to the latest one that the caller can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLate {
    /// The first slot there would have been. [`Micros::MAX`] if there is none.
    pub(crate) slot: Micros,
    /// The limit that allows this slot last.
    pub(crate) limit: Option<Limit>,
}
