//! The only file that rolls dice.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A number that nobody can foretell, seeded by the operating system for each process anew.
pub(crate) fn dice() -> u64 {
    static ROLLS: AtomicU64 = AtomicU64::new(0);
    RandomState::new().hash_one(ROLLS.fetch_add(1, Ordering::Relaxed))
}

/// Between half of `span` and all of it, so that those who failed together do not come back together.
pub(crate) fn jittered(span: Duration) -> Duration {
    let half = span / 2;
    half.saturating_add(half.mul_f64(dice() as f64 / u64::MAX as f64))
}
