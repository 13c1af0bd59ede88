//! The batching delay of the next call to the store. Other requests join the call meanwhile.
//!
//! ```text
//!           a call is needed           the delay ends
//!   NotYet ─────────────────> UnderWay ──────────────> Done
//!     ^                                                 │
//!     └─────────────────────────────────────────────────┘
//!              the call is sent, or is not needed
//! ```
//!
//! A release ends a delay early. A hold, a probe or a change of the quota also begins one when the last is over.

use std::time::{Duration, Instant};

use crate::clock::{self, SHORTEST_TIMER};

/// Whether the next call waits for other requests to join it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::limiter) enum Gathering {
    /// No call was needed since the last one.
    #[default]
    NotYet,
    /// The next call is sent at `until`.
    UnderWay { until: Instant },
    /// The next call is sent at once.
    Done,
}

/// What the batching delay means for a call that is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::limiter) enum Delay {
    /// The delay starts now, and the call is sent after it.
    Starts,
    /// The delay is under way.
    UnderWay,
    /// The call is sent now.
    Over,
}

impl Gathering {
    /// Returns whether a call waits for other requests to join it. If it is the first to be needed
    /// since the last call, the delay starts, for `delay`.
    pub(super) fn batch(&mut self, delay: Duration, now: Instant) -> Delay {
        match *self {
            Gathering::NotYet => self.start(delay, now),
            Gathering::UnderWay { .. } => Delay::UnderWay,
            Gathering::Done => Delay::Over,
        }
    }

    /// Puts a call off for `delay`, unless it waits already.
    pub(in crate::limiter) fn put_off(&mut self, delay: Duration, now: Instant) -> Delay {
        if self.is_under_way() {
            Delay::UnderWay
        } else {
            self.start(delay, now)
        }
    }

    fn start(&mut self, delay: Duration, now: Instant) -> Delay {
        *self = Gathering::UnderWay {
            until: clock::after(now, delay),
        };
        Delay::Starts
    }

    /// Returns when the delay ends, if it is under way.
    pub(in crate::limiter) fn until(self) -> Option<Instant> {
        match self {
            Gathering::UnderWay { until } => Some(until),
            Gathering::NotYet | Gathering::Done => None,
        }
    }

    pub(in crate::limiter) fn is_under_way(self) -> bool {
        matches!(self, Gathering::UnderWay { .. })
    }

    /// Returns whether the delay under way is not the one that ends at `now`.
    pub(in crate::limiter) fn ends_after(self, now: Instant) -> bool {
        // A shorter delay ends at once.
        let later = clock::after(now, SHORTEST_TIMER);
        self.until().is_some_and(|until| until >= later)
    }

    /// Returns whether a call is put off for no longer than the resolution of timers.
    pub(in crate::limiter) fn is_short(self, now: Instant) -> bool {
        let soon = clock::after(now, SHORTEST_TIMER);
        self.until().is_some_and(|until| until <= soon)
    }

    /// Ends the delay, if it is under way.
    pub(in crate::limiter) fn end(&mut self) {
        if self.is_under_way() {
            *self = Gathering::Done;
        }
    }
}
