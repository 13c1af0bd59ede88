//! Seconds as spans, and random numbers that scenarios need.

use std::time::Duration;

use tollgate::__lab::Dice;

/// Returns an exponentially distributed number with this mean.
pub(super) fn exponential(dice: &mut Dice, mean: f64) -> f64 {
    -mean * (1.0 - dice.roll()).ln()
}

/// Returns the span of `seconds`; zero if that is negative or not a number.
pub(super) fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
