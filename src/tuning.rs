//! Durations that depend on each other, across files. Before you change one of them, look at the others here. A duration
//! that means something in one file alone stands there.
//!
//! ```text
//! life of a permit    WAKE_UP 5 ms < LONGEST_ASKED_LIFE 20 ms < LONGEST_LIFE 50 ms = MISSED
//! a call of a store   LONGEST_ON_WAY 250 ms = STORE_TIMEOUT < ANSWER 1 s < DETECTION_TIME 2 s
//! ```

use std::time::Duration;

/// How late the task of a waiter may wake: the validity of permits allows for it. Timers are a millisecond late, and those
/// of a busy runtime some more.
pub(crate) const WAKE_UP: Duration = Duration::from_millis(5);

/// A permit may live for this part of the shortest window, if that is longer than the spans below: 1/20.
///
/// Twin: `see_limit` in `store/redis/lua/external.lua`.
pub(crate) const LIVES_IN_WINDOW: u32 = 20;

/// The longest validity that a process asks for because its permits expire before they are used, unless
/// [a part of the window](LIVES_IN_WINDOW) is longer. A unit whose permit expires unused is lost for that time.
pub(crate) const LONGEST_ASKED_LIFE: Duration = Duration::from_millis(20);

/// The longest life of a permit, unless [a part of the window](LIVES_IN_WINDOW) is longer.
///
/// Twin: `LONGEST_LIFE` in `store/redis/lua/external.lua`.
pub(crate) const LONGEST_LIFE: Duration = Duration::from_millis(50);

/// How long after its slot has expired a request may still come for it, because its program runs late. A request that does
/// not come is not polled, and gets nothing until it is.
pub(crate) const MISSED: Duration = LONGEST_LIFE;

/// How long a call of Redis and its reply are assumed to take at most. A later run of a script may be that of a call whose
/// process was suspended.
#[cfg(feature = "redis")]
pub(crate) const LONGEST_ON_WAY: Duration = Duration::from_millis(250);

/// How long a call of Redis may take, unless the program sets another time. With one of [`ANSWER`] or longer, several
/// calls of a key may be under way.
#[cfg(feature = "redis")]
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_millis(250);

/// If a call to the store has no answer, or a task has not run, after this time, it counts as lost. For so long a request
/// that cannot wait for its turn at all waits for an answer: `WaitBound::answered_by`.
pub(crate) const ANSWER: Duration = Duration::from_secs(1);

/// Within this span all processes that call the store find out that it cannot be reached. The share of a process during
/// the outage is the least of the windows in it.
pub(crate) const DETECTION_TIME: Duration = Duration::from_secs(2);

const _: () = {
    assert!(WAKE_UP.as_micros() < LONGEST_ASKED_LIFE.as_micros());
    assert!(LONGEST_ASKED_LIFE.as_micros() < LONGEST_LIFE.as_micros());
    assert!(ANSWER.as_micros() < DETECTION_TIME.as_micros());
};

#[cfg(feature = "redis")]
const _: () = assert!(STORE_TIMEOUT.as_micros() < ANSWER.as_micros());
