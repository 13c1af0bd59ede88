//! Time in whole microseconds.

use std::time::Duration;

/// A moment of the store's time, in microseconds since the Unix epoch, or a span of time.
pub(crate) type Micros = u64;

/// Returns a span in microseconds, rounded up. Very long spans become a quarter of the largest
/// number, so that a few of them can be added.
pub(crate) fn micros_up(span: Duration) -> Micros {
    micros(span, u64::from(span.subsec_nanos().div_ceil(1000)))
}

/// Returns a span in microseconds, rounded down. Very long spans are as in [`micros_up`].
pub(crate) fn micros_down(span: Duration) -> Micros {
    micros(span, u64::from(span.subsec_micros()))
}

/// Returns the whole seconds of a span and `fraction` in microseconds. A division of all its
/// nanoseconds would be one of 128 bits, which is slow.
fn micros(span: Duration, fraction: Micros) -> Micros {
    span.as_secs()
        .saturating_mul(1_000_000)
        .saturating_add(fraction)
        .min(u64::MAX / 4)
}
