//! Probation: what follows a hold after which the upstream may still refuse. It was cut to `max_hold`, or the upstream
//! stated no wait, or its stated waits are known to be too short.
//!
//! When the hold is over, one request leaves first, as a probe, of all processes: see [`fleet_probe`](super::fleet_probe). The
//! others leave once the upstream has accepted it. A refusal of the probe is a new hold. The response of the probe may take
//! long, because the call takes a minute, and that says nothing about the limit. So after [`PATIENCE`] two more leave, then
//! four, then eight at a time.
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
//!        a hold, and no time is sure
//! ```

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::clock;
use crate::limiter::reservation::ProbeNumber;

/// Others follow a probe if its response takes twice as long as the hold did, within these bounds.
const PATIENCE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(5);

/// The most that follow at a time.
const MOST_AT_A_TIME: u32 = 8;

/// The longest probation. It is no longer than `max_hold` either.
pub(super) const LONGEST_PROBATION: Duration = Duration::from_secs(60);

/// The probation of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probation {
    /// All requests may leave at the end of the hold.
    Off,
    /// At the end of the hold one request may leave, as the probe.
    Due { patience: Duration },
    /// Probes left.
    Probing(Probing),
}

/// Requests that left as probes at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probing {
    last: ProbeNumber,
    /// When the first of them left.
    since: Instant,
    /// How many they are.
    count: u32,
    /// How many of them have not left.
    left: u32,
    patience: Duration,
}

impl Probing {
    /// Returns when the next requests leave, if none of these is answered.
    fn ends_at(&self) -> Instant {
        clock::after(self.since, self.patience)
    }
}

/// Which requests may leave a key that is not on hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// All requests may leave.
    Open,
    /// One request may leave, as the probe.
    Probe,
    /// One request of the fleet may leave. The store says of which process.
    Asking,
    /// No request may leave until the probe is accepted, or for this long.
    Probing(Duration),
}

impl Probation {
    /// Returns the probation after a new hold that lasts for `span`.
    pub(super) fn after(is_cut: bool, span: Duration) -> Self {
        if is_cut {
            let patience = span.saturating_mul(2);
            Probation::Due {
                patience: patience.clamp(*PATIENCE.start(), *PATIENCE.end()),
            }
        } else {
            Probation::Off
        }
    }

    pub(super) fn is_on(&self) -> bool {
        *self != Probation::Off
    }

    /// Returns how long others wait for the response to the probe, if none has left.
    pub(super) fn due(&self) -> Option<Duration> {
        match self {
            Probation::Due { patience } => Some(*patience),
            Probation::Off | Probation::Probing(_) => None,
        }
    }

    /// Returns which requests may leave after a hold that ended at `end`.
    pub(super) fn passage(&self, end: Instant, max_hold: Duration, now: Instant) -> Passage {
        if !self.is_on() || clock::after(end, LONGEST_PROBATION.min(max_hold)) <= now {
            return Passage::Open;
        }
        match self {
            Probation::Probing(probing) if probing.left == 0 && probing.ends_at() > now => {
                Passage::Probing(probing.ends_at() - now)
            }
            _ => Passage::Probe,
        }
    }

    pub(super) fn probe_leaves(&mut self, number: ProbeNumber, now: Instant) {
        let (count, patience) = match self {
            Probation::Off => return,
            Probation::Due { patience } => (1, *patience),
            Probation::Probing(probing) if probing.left > 0 => {
                probing.last = number;
                probing.left -= 1;
                return;
            }
            Probation::Probing(before) => (MOST_AT_A_TIME.min(2 * before.count), before.patience),
        };
        *self = Probation::Probing(Probing {
            last: number,
            since: now,
            count,
            left: count - 1,
            patience,
        });
    }

    /// Returns whether this probe is on its way, and no later one.
    pub(super) fn is_probe(&self, number: ProbeNumber) -> bool {
        matches!(self, Probation::Probing(probing) if probing.last == number)
    }

    /// Notes that a probe was not sent. Returns whether another one may leave now.
    pub(super) fn probe_comes_back(&mut self, number: ProbeNumber) -> bool {
        match *self {
            Probation::Probing(Probing { last, patience, .. }) if last == number => {
                *self = Probation::Due { patience };
                true
            }
            _ => false,
        }
    }
}
