//! Probation: what follows a hold that was cut to `max_hold`, or whose stated wait is known to be
//! too short.
//!
//! When the hold is over, the upstream may still refuse. So one request leaves first, as a probe.
//! The others leave once the upstream has accepted it. A refusal of the probe is a new hold. If the
//! probe's response takes long, another probe follows.
//!
//! A probe has a number. Whoever leaves as the probe has it until the response arrives, and gives back
//! this probe if it was not sent: nobody else can give it back, or end it in its place.
//!
//! ```text
//!             the probe leaves
//!     Due ──────────────────────> Probing
//!      ^ <─────────────────────────┘  │
//!      │       it comes back          │ a request is accepted
//!      │                              v
//!      └──────────────────────────── Off
//!             a hold is cut
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::clock;
use crate::limiter::reservation::ProbeNumber;

/// If the response to a probe takes longer than this, another probe leaves.
const PROBE: Duration = Duration::from_secs(5);

/// The longest probation. It is no longer than `max_hold` either.
pub(super) const LONGEST_PROBATION: Duration = Duration::from_secs(60);

/// The probation of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probation {
    /// All requests may leave at the end of the hold.
    Off,
    /// At the end of the hold one request may leave, as the probe.
    Due,
    /// This probe left at this moment.
    Probing(ProbeNumber, Instant),
}

/// Which requests may leave a key that is not on hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// All requests may leave.
    Open,
    /// One request may leave, as the probe.
    Probe,
    /// No request may leave until the probe is accepted, or for this long.
    Probing(Duration),
}

impl Probation {
    /// Returns the probation after a new hold.
    pub(super) fn after(is_cut: bool) -> Self {
        if is_cut {
            Probation::Due
        } else {
            Probation::Off
        }
    }

    pub(super) fn is_on(&self) -> bool {
        *self != Probation::Off
    }

    /// Returns which requests may leave after a hold that ended at `end`.
    pub(super) fn passage(&self, end: Instant, max_hold: Duration, now: Instant) -> Passage {
        if !self.is_on() || clock::after(end, LONGEST_PROBATION.min(max_hold)) <= now {
            return Passage::Open;
        }
        match *self {
            Probation::Probing(_, since) if clock::after(since, PROBE) > now => {
                Passage::Probing(clock::after(since, PROBE) - now)
            }
            _ => Passage::Probe,
        }
    }

    /// Notes that this probe leaves now.
    pub(super) fn probe_leaves(&mut self, number: ProbeNumber, now: Instant) {
        if self.is_on() {
            *self = Probation::Probing(number, now);
        }
    }

    /// Returns whether this probe is on its way, and no later one.
    pub(super) fn is_probe(&self, number: ProbeNumber) -> bool {
        matches!(*self, Probation::Probing(on_its_way, _) if on_its_way == number)
    }

    /// Notes that a probe was not sent. Returns whether another one may leave now.
    pub(super) fn probe_comes_back(&mut self, number: ProbeNumber) -> bool {
        let was_probe = self.is_probe(number);
        if was_probe {
            *self = Probation::Due;
        }
        was_probe
    }
}

/// Exists while an accepted request would change what a key knows of its upstream. While there is
/// one in the process, all responses are read.
#[derive(Debug)]
pub(super) struct Uncertain(());

/// How many [`Uncertain`] there are in the process.
static UNCERTAIN: AtomicUsize = AtomicUsize::new(0);

impl Uncertain {
    pub(super) fn new() -> Self {
        UNCERTAIN.fetch_add(1, Ordering::Relaxed);
        Uncertain(())
    }
}

impl Drop for Uncertain {
    fn drop(&mut self) {
        UNCERTAIN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns whether responses other than refusals matter to any key.
#[inline]
pub(in crate::limiter) fn is_any_uncertain() -> bool {
    UNCERTAIN.load(Ordering::Relaxed) > 0
}
