//! Time in whole microseconds.

use std::time::Duration;

/// A moment of the store's time, in microseconds since the Unix epoch, or a span of time.
pub(crate) type Micros = u64;

/// Returns a span in microseconds, rounded up. Very long spans become a quarter of the largest
/// number, so that a few of them can be added.
pub(crate) fn micros_up(span: Duration) -> Micros {
    u64::try_from(span.as_nanos().div_ceil(1000))
        .unwrap_or(u64::MAX / 4)
        .min(u64::MAX / 4)
}

/// Returns a span in microseconds, rounded down. Very long spans are as in [`micros_up`].
pub(crate) fn micros_down(span: Duration) -> Micros {
    u64::try_from(span.as_micros())
        .unwrap_or(u64::MAX / 4)
        .min(u64::MAX / 4)
}
