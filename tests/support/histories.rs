//! How many random histories a law is checked with.

/// Returns `usual`, or the number in `TOLLGATE_SETTLE_HISTORIES`, which `.ci/run --long` sets.
pub(crate) fn histories(usual: u32) -> u32 {
    let stated = std::env::var("TOLLGATE_SETTLE_HISTORIES").ok();
    stated
        .and_then(|stated| stated.parse().ok())
        .unwrap_or(usual)
}
