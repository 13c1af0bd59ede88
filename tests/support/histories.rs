//! Random histories: how many of them a law is checked with, and the clock that they run by.

use std::future::Future;

/// Returns `usual`, or the number in `TOLLGATE_SETTLE_HISTORIES`, which `.ci/run --long` sets.
pub(crate) fn histories(usual: u32) -> u32 {
    let stated = std::env::var("TOLLGATE_SETTLE_HISTORIES").ok();
    stated
        .and_then(|stated| stated.parse().ok())
        .unwrap_or(usual)
}

/// Runs `test` under a paused clock.
pub(crate) fn paused(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.unwrap().block_on(test);
}
