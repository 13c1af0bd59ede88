//! The time by the counter of the processor, for requests whose permit is at hand.
//!
//! To read the system's clock takes a third of the time that such a request spends in a layer. The counter
//! of the processor takes a third of that, but is no clock: it may restart when the machine resumes, may
//! have another speed after a virtual machine has moved, and may differ between processors. So each
//! thread reads the clock again when the counter has gone on for a quarter of a millisecond, or has gone
//! back ([`Anchor`]). In between it adds to that reading what the counter has counted since.
//!
//! A jump of the counter puts the time of a busy thread behind or ahead by at most a quarter of a millisecond. A
//! counter of half the measured speed puts it behind by as much. If the counter jumps back to what it was when a
//! thread last read the clock, the time of that thread is behind by as long as it was idle, for a quarter of a
//! millisecond. Requests that wait, and calls to stores, use the clock.
//!
//! The clock of Tokio can be paused if a crate of the program enables the feature `test-util` of Tokio.
//! In such a program, as in most tests, this is the clock of Tokio.

use std::cell::Cell;
use std::sync::{Once, OnceLock};
use std::thread;

use super::{Moment, now};

/// How long a thread counts from one reading of the clock, in nanoseconds.
const SPAN_NANOS: u64 = 250_000;

/// The longest time between two readings of the counter that counts as one moment, in nanoseconds.
const MOMENT_NANOS: u64 = 1_000;

/// Whether the clock of Tokio can be paused: whether `tokio::time` has a function `pause`.
const CAN_PAUSE: bool = {
    // The inner import hides the outer one: `pause` is the function of Tokio, of size 0, if there is one,
    // and else our `u8`.
    #[allow(unused_imports, reason = "Tokio may have a `pause` of its own")]
    use without_pause::*;
    {
        #[allow(unused_imports, reason = "Tokio may have no `pause`")]
        use tokio::time::*;
        size_of_val(&pause) == 0
    }
};

mod without_pause {
    #[allow(non_upper_case_globals, reason = "named as the function of Tokio")]
    #[allow(dead_code, reason = "Tokio may have a `pause` of its own")]
    pub(super) const pause: u8 = 0;
}

/// The counter, once its speed is known.
static COUNTER: OnceLock<quanta::Clock> = OnceLock::new();

thread_local! {
    static ANCHOR: Cell<Option<Anchor>> = const { Cell::new(None) };
}

/// A moment by the clock, and the counter at that moment.
#[derive(Clone, Copy)]
struct Anchor {
    at: Moment,
    ticks: u64,
}

impl Anchor {
    /// Returns the time at which the counter is `ticks`. `nanos` says how long the counter takes from one
    /// value to another. Returns `None` if the clock is to be read again.
    #[inline]
    fn time_at(self, ticks: u64, nanos: impl FnOnce(u64, u64) -> u64) -> Option<Moment> {
        if ticks < self.ticks {
            return None;
        }
        let since = nanos(self.ticks, ticks);
        (since < SPAN_NANOS).then(|| Moment::from_nanos(self.at.nanos() + since))
    }
}

/// Measures the speed of the counter, in a thread of its own: that takes from half a millisecond to 200 ms.
/// Until then [`now_by_counter`] reads the clock.
pub(crate) fn prepare() {
    static PREPARED: Once = Once::new();
    if CAN_PAUSE {
        return;
    }
    PREPARED.call_once(|| {
        // Without the thread, the clock is read each time.
        let _ = thread::Builder::new()
            .name("tollgate-clock".into())
            .spawn(|| _ = COUNTER.set(quanta::Clock::new()));
    });
}

/// Returns the time by the counter, if its speed is known. Unless the counter jumps, it is at most a microsecond
/// ahead of [`now`], and a reading may be that much before an earlier one.
#[inline]
pub(crate) fn now_by_counter() -> Moment {
    match COUNTER.get() {
        Some(counter) if !CAN_PAUSE => by(counter),
        _ => Moment::of(now()),
    }
}

#[inline]
fn by(counter: &quanta::Clock) -> Moment {
    let ticks = counter.raw();
    let nanos = |from, to| counter.delta_as_nanos(from, to);
    let time = ANCHOR.get().and_then(|anchor| anchor.time_at(ticks, nanos));
    time.unwrap_or_else(|| anchor(counter))
}

/// Reads the clock, and lets this thread count from there.
#[cold]
#[inline(never)]
fn anchor(counter: &quanta::Clock) -> Moment {
    let ticks = counter.raw();
    let at = Moment::of(now());
    // If this thread stood still between the two readings, its time would be ahead by that.
    if counter.delta_as_nanos(ticks, counter.raw()) < MOMENT_NANOS {
        ANCHOR.set(Some(Anchor { at, ticks }));
    }
    at
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A counter that needs a quarter of a nanosecond for a tick.
    fn nanos(from: u64, to: u64) -> u64 {
        (to - from) / 4
    }

    #[test]
    fn tokio_of_the_tests_can_pause() {
        const { assert!(CAN_PAUSE) };
    }

    #[test]
    fn counter_shows_the_time_of_the_clock() {
        let counter = quanta::Clock::new();
        let look = || {
            for _ in 0..100_000 {
                let before = now();
                let time = by(&counter).instant();
                let span = Duration::from_nanos(SPAN_NANOS);
                assert!(before <= time + span, "behind by {:?}", before - time);
                let after = now();
                let moment = Duration::from_nanos(2 * MOMENT_NANOS);
                assert!(time <= after + moment, "ahead by {:?}", time - after);
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| _ = scope.spawn(look)));
    }

    #[test]
    fn anchor_counts_for_a_quarter_of_a_millisecond() {
        let at = Moment::of(now());
        let anchor = Anchor { at, ticks: 4_000 };
        let later = |nanos| Some(Moment::from_nanos(at.nanos() + nanos));
        assert_eq!(anchor.time_at(4_000, nanos), later(0));
        assert_eq!(anchor.time_at(404_000, nanos), later(100_000));
        assert_eq!(anchor.time_at(1_003_996, nanos), later(249_999));
        assert_eq!(anchor.time_at(1_004_000, nanos), None, "the span is over");
        assert_eq!(anchor.time_at(u64::MAX, nanos), None, "the counter jumped");
        assert_eq!(anchor.time_at(3_999, nanos), None, "the counter restarted");
    }
}
