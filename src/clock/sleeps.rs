//! For how long the machine has slept: the monotonic clock stands still meanwhile, and the wall clock does not.
//!
//! What counts in real time at somebody else, as the time for which an upstream wants no requests, goes on while this
//! machine sleeps. Who waits for it keeps a [`SleepMark`] from when the wait began, and looks again now and then
//! ([`look_again`]): no timer fires earlier because of a sleep.
//!
//! A wall clock that is set forward looks the same as a sleep. Linux has a clock that tells them apart, but neither the standard
//! library nor Tokio reads it. So a hold may end early by as much as the clock is set forward.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{is_first_in, now, wall_ahead};
use crate::locks::lock;

/// The shortest sleep that is noticed. The wall clock is set by less than this now and then.
const SHORTEST: Duration = Duration::from_secs(2);

/// For how long it counts that the wall clock was set back. A clock that is set back and forth is set forward again
/// soon.
const SET_BACK_FOR: Duration = Duration::from_secs(600);

/// Returns after which time to look again whether the machine has slept, while something waits for `left`.
pub(crate) fn look_again(left: Duration) -> Duration {
    // Within two seconds, if it waits for up to an hour.
    (left / 2000).max(Duration::from_secs(1))
}

/// What the two clocks have shown.
#[derive(Debug)]
struct Clocks {
    /// By how many microseconds the wall clock was ahead when it was last read, if it was.
    ahead: Option<(i64, Instant)>,
    /// For how long the machine has slept.
    slept: Duration,
    /// By how much the wall clock was set back and not set forward again. That is no sleep.
    behind: Duration,
    /// Until when that counts.
    behind_until: Option<Instant>,
}

static CLOCKS: Mutex<Clocks> = Mutex::new(Clocks {
    ahead: None,
    slept: Duration::ZERO,
    behind: Duration::ZERO,
    behind_until: None,
});

/// Returns for how long the machine has slept since some moment, as far as the two clocks show.
pub(crate) fn slept() -> Duration {
    let mut clocks = lock(&CLOCKS);
    clocks.read(wall_ahead(), now());
    LATELY.store(as_micros(clocks.slept), Ordering::Relaxed);
    clocks.slept + pretended()
}

/// The same as it was within the last tenth of a second, for each look at a hold. What begins now asks [`slept`]: otherwise
/// a sleep before it would count.
pub(crate) fn slept_lately() -> Duration {
    static ASKED: AtomicU64 = AtomicU64::new(u64::MAX);
    if is_first_in(&ASKED, 100_000, now()) {
        return slept();
    }
    Duration::from_micros(LATELY.load(Ordering::Relaxed)) + pretended()
}

/// For how long the machine had slept when somebody looked last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SleepMark(Duration);

impl SleepMark {
    /// Begins now.
    pub(crate) fn new() -> Self {
        SleepMark(slept())
    }

    /// Returns for how long the machine has slept since the last look. A sleep may be seen a tenth of a second late, and then
    /// shorten what has begun meanwhile.
    pub(crate) fn look(&mut self) -> Duration {
        self.look_at(slept_lately())
    }

    /// The same without delay, for a look at which something begins.
    pub(crate) fn look_now(&mut self) -> Duration {
        self.look_at(slept())
    }

    fn look_at(&mut self, slept: Duration) -> Duration {
        slept.saturating_sub(std::mem::replace(&mut self.0, slept))
    }
}

/// What [`slept`] returned last, in microseconds.
static LATELY: AtomicU64 = AtomicU64::new(0);

fn as_micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX / 2)
}

impl Clocks {
    /// Takes in by how much the wall clock is ahead now. The clocks may run apart by a thousandth.
    fn read(&mut self, ahead: i64, now: Instant) {
        let (before, at) = self.ahead.unwrap_or((ahead, now));
        self.ahead = Some((ahead, now));
        let moved = Duration::from_micros(ahead.abs_diff(before));
        if moved <= SHORTEST + now.saturating_duration_since(at) / 1000 {
            return;
        }
        if self.behind_until.is_some_and(|until| until <= now) {
            self.behind = Duration::ZERO;
        }
        if ahead < before {
            self.behind += moved;
            self.behind_until = Some(now + SET_BACK_FOR);
        } else {
            let slept = moved.saturating_sub(self.behind);
            self.behind = self.behind.saturating_sub(moved);
            self.slept += slept;
        }
    }
}

fn pretended() -> Duration {
    #[cfg(test)]
    return pretended::SLEPT.get();
    #[cfg(not(test))]
    Duration::ZERO
}

/// In tests the machine sleeps when a test says so.
#[cfg(test)]
pub(crate) mod pretended {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        pub(super) static SLEPT: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// From now on, the machine has slept for `span` more, for this thread.
    pub(crate) fn sleep(span: Duration) {
        SLEPT.set(SLEPT.get() + span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a wall clock that is ahead by so many seconds, one after the other, each `apart` after the last one. Returns for how
    /// many seconds the machine seems to have slept.
    fn seconds_slept(apart: Duration, ahead: &[i64]) -> u64 {
        let mut clocks = Clocks {
            ahead: None,
            slept: Duration::ZERO,
            behind: Duration::ZERO,
            behind_until: None,
        };
        let mut at = now();
        for seconds in ahead {
            clocks.read(seconds * 1_000_000, at);
            at += apart;
        }
        clocks.slept.as_secs()
    }

    #[test]
    fn a_step_forward_is_a_sleep() {
        let second = Duration::from_secs(1);
        assert_eq!(seconds_slept(second, &[7, 3607, 3607]), 3600);
        assert_eq!(seconds_slept(second, &[0, 3600, 7200]), 7200);
        assert_eq!(seconds_slept(second, &[0, 2]), 0, "too short");
        assert_eq!(
            seconds_slept(second, &[0, 2, 4, 6]),
            0,
            "set little by little"
        );
        let hour = Duration::from_secs(3600);
        assert_eq!(seconds_slept(hour, &[0, 5]), 0, "the clocks run apart");
    }

    #[test]
    fn a_clock_that_is_set_back_and_forward_again_is_no_sleep() {
        let second = Duration::from_secs(1);
        assert_eq!(seconds_slept(second, &[0, -3600, -3600]), 0);
        assert_eq!(seconds_slept(second, &[0, -3600, 0]), 0);
        assert_eq!(seconds_slept(second, &[0, -3600, 100]), 100);
        assert_eq!(seconds_slept(second, &[0, -3600, -1800, 1800]), 1800);
    }

    /// As when a service starts before the clock is synchronized.
    #[test]
    fn a_clock_that_stays_set_back_hides_no_later_sleep() {
        let hour = Duration::from_secs(3600);
        assert_eq!(seconds_slept(hour, &[0, -3600, -1800]), 1800);
    }
}
