//! Time in whole microseconds.

use std::time::Duration;

/// A moment of the store's time, in microseconds since the Unix epoch, or a span of time.
pub(crate) type Micros = u64;

/// Returns a span in microseconds, rounded up.
pub(crate) fn micros_up(span: Duration) -> Micros {
    u64::try_from(span.as_nanos().div_ceil(1000))
        .unwrap_or(u64::MAX / 4)
        .min(u64::MAX / 4)
}

/// Returns a span in microseconds, rounded down.
pub(crate) fn micros_down(span: Duration) -> Micros {
    u64::try_from(span.as_micros())
        .unwrap_or(u64::MAX / 4)
        .min(u64::MAX / 4)
}
