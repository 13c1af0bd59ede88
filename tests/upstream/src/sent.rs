//! When a call was sent, passed from one process to another.
//!
//! The value is the monotonic time in nanoseconds since the Unix epoch: each process reads the wall
//! clock once, and then uses its monotonic clock. So the times of one process never step. Those of
//! several processes of one machine differ by the corrections of the system's clock between their
//! first calls, usually some microseconds.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use hyper::header::HeaderValue;

/// The request header in which a caller says when it sent the call: [`sent_now`].
pub const SENT_HEADER: &str = "x-sent";

/// Returns the value of [`SENT_HEADER`]: now. Set it right after the limiter granted the permit.
///
/// ```
/// # let mut request = hyper::Request::new(());
/// request.headers_mut().insert(upstream::SENT_HEADER, upstream::sent_now());
/// ```
pub fn sent_now() -> HeaderValue {
    let anchor = Anchor::of_this_process();
    HeaderValue::from(anchor.nanos + whole_nanos(anchor.instant.elapsed()))
}

/// Returns the moment in a header value, on the monotonic clock of this process.
pub(crate) fn read(value: &str) -> Option<Instant> {
    let anchor = Anchor::of_this_process();
    let nanos: u64 = value.parse().ok()?;
    match nanos.checked_sub(anchor.nanos) {
        Some(since) => anchor.instant.checked_add(Duration::from_nanos(since)),
        None => anchor
            .instant
            .checked_sub(Duration::from_nanos(anchor.nanos - nanos)),
    }
}

/// One moment on both clocks.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    instant: Instant,
    /// Since the Unix epoch.
    nanos: u64,
}

impl Anchor {
    fn of_this_process() -> Anchor {
        static ANCHOR: OnceLock<Anchor> = OnceLock::new();
        *ANCHOR.get_or_init(|| {
            // Of several tries, use the one with the fewest interruptions.
            let (_, anchor) = std::iter::repeat_with(Anchor::ask)
                .take(16)
                .min_by_key(|(took, _)| *took)
                .expect("16 tries are more than none");
            anchor
        })
    }

    /// Reads both clocks, and returns them with the time that took.
    fn ask() -> (Duration, Anchor) {
        let instant = Instant::now();
        let wall = SystemTime::now();
        let took = instant.elapsed();
        let since_epoch = wall
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        (
            took,
            Anchor {
                instant,
                nanos: whole_nanos(since_epoch),
            },
        )
    }
}

/// Fits until the year 2554.
fn whole_nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_survives_the_way_to_the_nanosecond() {
        let anchor = Anchor::of_this_process();
        for (nanos, expected) in [
            (anchor.nanos, Some(anchor.instant)),
            (
                anchor.nanos + 1,
                Some(anchor.instant + Duration::from_nanos(1)),
            ),
            (
                anchor.nanos - 1,
                Some(anchor.instant - Duration::from_nanos(1)),
            ),
        ] {
            assert_eq!(read(&nanos.to_string()), expected);
        }
    }

    #[test]
    fn other_text_is_no_moment() {
        for text in ["", "soon", "-1", "1.5", "18446744073709551616"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn time_goes_on() {
        let first = sent_now();
        std::thread::sleep(Duration::from_micros(50));
        let second = sent_now();
        let moments = [first, second].map(|value| read(value.to_str().unwrap()).unwrap());
        assert!(moments[0] + Duration::from_micros(50) <= moments[1]);
    }
}
