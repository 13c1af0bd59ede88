//! A booking of permits, and the refusal of a booking.

use super::Micros;
use crate::quota::Limit;

/// Permits of one slot. Each is usable once, from the slot to its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Booking {
    /// The first moment at which the permits may be used.
    pub(crate) slot: Micros,
    /// How long after the slot the deadline is.
    pub(crate) life: Micros,
    /// The moment from which the permits count: the deadline plus the transit slack.
    pub(crate) stamp: Micros,
    /// How many permits were booked.
    pub(crate) count: u32,
}

/// The refusal of a booking: its first slot is later than the latest slot that the caller can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLate {
    /// The first slot that there would have been, or [`Micros::MAX`] if there is none.
    pub(crate) slot: Micros,
    /// The limit that delayed the slot last, if there is one.
    pub(crate) limit: Option<Limit>,
}
