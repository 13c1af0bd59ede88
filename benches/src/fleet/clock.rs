//! One clock for all processes.

use std::sync::OnceLock;
use std::time::Instant;

/// Returns the time in nanoseconds since the Unix epoch, by a clock that ignores steps of the
/// system clock: see `upstream::sent_now`.
pub(crate) fn now() -> u64 {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    let (start, nanos) = START.get_or_init(|| {
        // The first call reads both clocks, which takes a moment.
        let _ = upstream::sent_now();
        let (start, sent) = (Instant::now(), upstream::sent_now());
        let nanos = sent.to_str().ok().and_then(|sent| sent.parse().ok());
        (start, nanos.expect("a number is text"))
    });
    nanos + start.elapsed().as_nanos() as u64
}
