//! The paused clock: it moves when the test waits, and only then.

use std::future::Future;
use std::time::{Duration, Instant};

/// The virtual time.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Lets `span` pass, and everything due in it happen in order.
pub(crate) async fn pass(span: Duration) {
    tokio::time::sleep(span).await;
}

/// Lets every task run as far as it can without time passing.
pub(crate) async fn settle() {
    for _ in 0..64 {
        tokio::task::yield_now().await;
    }
}

/// Awaits `future` for an hour of virtual time: a hang is a failure and not a test that never ends.
pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(3600), future)
        .await
        .expect("it hangs")
}

/// Returns the last moment that the platform can represent, or near it.
pub(crate) fn far_future() -> Instant {
    let (mut moment, mut step) = (now(), Duration::MAX);
    while step > Duration::from_secs(1) {
        match moment.checked_add(step) {
            Some(later) => moment = later,
            None => step /= 2,
        }
    }
    moment
}

/// Returns a moment in the past, if the platform has one.
pub(crate) fn long_ago() -> Instant {
    let started = now();
    started
        .checked_sub(Duration::from_secs(1))
        .unwrap_or(started)
}

/// From now on tollgate rolls the dice of this seed on this thread.
pub(crate) fn roll_dice(seed: u64) {
    tollgate::__lab::begin_dice(tollgate::__lab::Dice::seeded(seed));
}

/// Makes a runtime with a paused clock for this thread, on which tollgate rolls the dice of the seed:
/// the same history is the same run.
pub(crate) fn paused_runtime() -> tokio::runtime::Runtime {
    roll_dice(histories::seed());
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
}

/// Runs `test` under a paused clock.
pub(crate) fn paused(test: impl Future<Output = ()>) {
    paused_runtime().block_on(test);
}
