//! Paces to compare with [`Fair`](tollgate::pace::Fair).
//!
//! | pace | follows | good at | bad at |
//! |---|---|---|---|
//! | [`Aimd`] | refusals | even shares if servers state nothing | needs refusals to stay put; finds capacity slowly |
//! | [`Remaining`] | what is left, refusals | the best of the published four | needs refusals to stay put; chance decides who waits |
//! | [`Proportional`] | refusals | few refusals | emptying a full bucket: it is slow to let go |
//! | [`Gradual`] | refusals | simple | half of its requests are refused |
//! | [`Backoff`] | refusals | the usual first attempt | two thirds and more are refused |

mod aimd;
mod published;

use std::time::{Duration, Instant};

pub use aimd::Aimd;
pub use published::{Backoff, Gradual, Proportional, Remaining};

/// Returns the span of `seconds`, at most [`LONGEST`]; zero if the number is negative or not a
/// number.
fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, LONGEST)).unwrap_or(Duration::ZERO)
}

/// The longest interval and pause, in seconds.
const LONGEST: f64 = 900.0;

/// Returns the seconds from `earlier` to `later`; 0 if `later` is the earlier one.
fn seconds(earlier: Instant, later: Instant) -> f64 {
    later.saturating_duration_since(earlier).as_secs_f64()
}
