//! The only file that asks the time or sleeps.
//!
//! It stands on Tokio's clock: under `tokio::time::pause` all of tollgate stands still, and moves
//! when the test moves the clock. Wall time moves along with it, and is asked of the system each
//! time it is wanted: the system's clock may be set while the program runs, and the monotonic clock
//! may stand still while the machine sleeps.

#![expect(clippy::disallowed_methods, reason = "this is the file that asks")]

mod counter;
mod moment;
mod sleeps;

use std::future::Future;
use std::pin::Pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

pub(crate) use counter::{now_by_counter, prepare};
pub(crate) use moment::Moment;
#[cfg(test)]
pub(crate) use sleeps::pretended;
pub(crate) use sleeps::{SleepMark, look_again, slept, slept_lately};

/// The monotonic time.
#[inline]
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The monotonic time of the machine, which no test moves: for what all the runtimes of a process have in common.
pub(crate) fn of_machine() -> Instant {
    Instant::now()
}

/// A pair of moments that were one: when both clocks were first asked.
#[inline]
fn anchor() -> (Instant, SystemTime) {
    static ANCHOR: OnceLock<(Instant, SystemTime)> = OnceLock::new();
    #[cfg(feature = "__lab")]
    if let Some(start) = laboratory::START.get() {
        return (start, SystemTime::UNIX_EPOCH + laboratory::WALL);
    }
    *ANCHOR.get_or_init(both_clocks)
}

/// Reads both clocks at the same moment, to within [`SMALLEST_STEP`].
///
/// A thread may stand still between two readings. So this reads the monotonic clock on both sides of
/// the wall clock, and reads again if they lie far apart. If that goes on, the monotonic time is the
/// later one: the wall clock then seems to be behind, never ahead.
fn both_clocks() -> (Instant, SystemTime) {
    const MOST_READINGS: u32 = 16;
    let mut readings = 0;
    let mut earlier = Instant::now();
    loop {
        let wall = SystemTime::now();
        let later = Instant::now();
        readings += 1;
        let apart = later.duration_since(earlier);
        if apart < Duration::from_micros(SMALLEST_STEP) || readings == MOST_READINGS {
            return (later, wall);
        }
        earlier = later;
    }
}

/// Returns the wall time at `instant`, by the present setting of the system's clock.
pub(crate) fn wall(instant: Instant) -> SystemTime {
    let (anchor, wall) = anchor();
    let moment = match instant.checked_duration_since(anchor) {
        Some(since) => wall.checked_add(since),
        None => wall.checked_sub(anchor.duration_since(instant)),
    };
    let ahead = wall_ahead();
    let by = Duration::from_micros(ahead.unsigned_abs());
    let moment = moment.and_then(|at| {
        if ahead < 0 {
            at.checked_sub(by)
        } else {
            at.checked_add(by)
        }
    });
    moment.unwrap_or(wall)
}

/// Returns by how many microseconds the wall clock is ahead of the monotonic clock, compared with
/// when both were first asked. It is ahead if the wall clock was set, or if the machine slept,
/// during which the monotonic clock stands still.
pub(crate) fn wall_ahead() -> i64 {
    #[cfg(feature = "__lab")]
    if laboratory::START.get().is_some() {
        return 0;
    }
    let (anchor, wall) = anchor();
    let (instant, present) = both_clocks();
    let passed = i128::try_from(instant.saturating_duration_since(anchor).as_micros());
    let walked = match present.duration_since(wall) {
        Ok(since) => i128::try_from(since.as_micros()),
        Err(before) => i128::try_from(before.duration().as_micros()).map(|micros| -micros),
    };
    let ahead = walked
        .ok()
        .zip(passed.ok())
        .and_then(|(walked, passed)| i64::try_from(walked - passed).ok());
    ahead
        .filter(|ahead| ahead.unsigned_abs() >= SMALLEST_STEP)
        .unwrap_or(0)
}

/// Returns whether the machine slept, or its wall clock was set forward, within the last `span`,
/// before which [`wall_ahead`] was `before`. The clocks may run apart by a thousandth.
pub(crate) fn has_slept(before: i64, span: Duration) -> bool {
    const LEAST: i64 = 250_000;
    let drift = i64::try_from(span.as_micros() / 1000).unwrap_or(i64::MAX / 2);
    wall_ahead().saturating_sub(before) > LEAST.saturating_add(drift)
}

/// The least by which the clocks are taken to differ, in microseconds.
const SMALLEST_STEP: u64 = 1000;

/// What [`wall_ahead`] said within the last second before `now`.
pub(crate) fn wall_ahead_lately(now: Instant) -> i64 {
    static ASKED: AtomicU64 = AtomicU64::new(u64::MAX);
    static AHEAD: AtomicI64 = AtomicI64::new(0);
    if is_first_in(&ASKED, 1_000_000, now) {
        AHEAD.store(wall_ahead(), Ordering::Relaxed);
    }
    AHEAD.load(Ordering::Relaxed)
}

/// Returns true once in each span of `span` microseconds. `asked` keeps the last one in which it has.
fn is_first_in(asked: &AtomicU64, span: u64, now: Instant) -> bool {
    let present = micros(now) / span;
    asked.load(Ordering::Relaxed) != present && asked.swap(present, Ordering::Relaxed) != present
}

/// The steady time at `instant` in whole microseconds, rounded down. It is the wall time since the
/// Unix epoch, but for what [`wall_ahead`] tells.
pub(crate) fn micros(instant: Instant) -> u64 {
    let (epoch, micros) = epoch();
    match instant.checked_duration_since(epoch) {
        Some(since) => {
            micros.saturating_add(u64::try_from(since.as_micros()).unwrap_or(u64::MAX / 4))
        }
        None => {
            let before = epoch.duration_since(instant).as_nanos().div_ceil(1000);
            micros.saturating_sub(u64::try_from(before).unwrap_or(u64::MAX))
        }
    }
}

/// The moment at which the steady time is `micros`: see [`micros`]. If that is beyond all use, a moment that is near
/// enough.
pub(crate) fn instant(micros: u64) -> Instant {
    let (epoch, since) = epoch();
    match micros.checked_sub(since) {
        Some(later) => after(epoch, Duration::from_micros(later)),
        None => epoch
            .checked_sub(Duration::from_micros(since - micros))
            .unwrap_or(epoch),
    }
}

/// The same pair, with the wall time in microseconds since the Unix epoch.
fn epoch() -> (Instant, u64) {
    static EPOCH: OnceLock<(Instant, u64)> = OnceLock::new();
    #[cfg(feature = "__lab")]
    if laboratory::START.get().is_some() {
        return since_unix_epoch(anchor());
    }
    *EPOCH.get_or_init(|| since_unix_epoch(anchor()))
}

fn since_unix_epoch((anchor, wall): (Instant, SystemTime)) -> (Instant, u64) {
    let since = wall
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    (anchor, u64::try_from(since.as_micros()).unwrap_or(0))
}

/// In the laboratory every run begins at the same wall time: windows of the clock and whole
/// microseconds fall alike.
#[cfg(feature = "__lab")]
pub(crate) mod laboratory {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    thread_local! {
        pub(super) static START: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    /// The first day of 2026, since the Unix epoch.
    pub(super) const WALL: Duration = Duration::from_secs(20_454 * 86_400);

    /// From now on `start` was that moment, on this thread.
    pub fn begin(start: Instant) {
        START.set(Some(start));
    }
}

/// The resolution of timers.
pub(crate) const SHORTEST_TIMER: Duration = Duration::from_millis(1);

/// `span` after `instant`; for a span beyond all use, a moment that is far enough.
pub(crate) fn after(instant: Instant, span: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(10 * 366 * 86_400);
    instant.checked_add(span.min(FAR)).unwrap_or(instant)
}

/// `span` before `instant`, or `instant` if the clock shows no moment that early.
pub(crate) fn before(instant: Instant, span: Duration) -> Instant {
    instant.checked_sub(span).unwrap_or(instant)
}

pub(crate) async fn sleep_until(instant: Instant) {
    tokio::time::sleep_until(instant.into()).await;
}

pub(crate) async fn sleep(span: Duration) {
    sleep_until(after(now(), span)).await;
}

/// A timer that any thread may set anew; it wakes the task that polled it last.
#[derive(Debug)]
pub(crate) struct Timer {
    moment: Instant,
    /// `None` until the first poll, which needs a Tokio runtime.
    sleep: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Timer {
    #[inline]
    pub(crate) fn at(moment: Instant) -> Self {
        let sleep = None;
        Timer { moment, sleep }
    }

    /// Returns when it fires.
    #[inline]
    pub(crate) fn moment(&self) -> Instant {
        self.moment
    }

    #[inline]
    pub(crate) fn set(&mut self, moment: Instant) {
        if self.moment == moment {
            return;
        }
        self.moment = moment;
        if let Some(sleep) = &mut self.sleep {
            sleep.as_mut().reset(moment.into());
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let moment = self.moment.into();
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(moment)));
        sleep.as_mut().poll(cx)
    }

    /// Wakes the task when it fires. If it has fired since the owner read the time, the task is woken at once.
    pub(crate) fn wake(&mut self, cx: &mut Context<'_>) {
        if self.poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
    }
}
