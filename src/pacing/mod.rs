//! How the speed of a client follows the signals of a server: [`Pace`], and the paces that there are.
//!
//! A pace is pure: it reads no clock, has no random numbers of its own, and never waits. The
//! throttle calls it for each event (a request arrives, a request leaves, a response arrives) with
//! the time and with random numbers ([`Dice`]). The pace returns the moment from which the next
//! request may leave. The throttle keeps the queue, the requests in flight and the hold. So a
//! simulation (`examples/simulate`) can measure in virtual time the same code that programs run.
//!
//! What a pace has to do is open to the laboratory alone: it still changes, and a program chooses one
//! of the paces that `crate::pace` shows. `examples/simulate/mine.rs` is a pace in one file.

mod fair;
mod no_pacing;
mod reading;
mod state_codec;

use std::fmt::Debug;
use std::time::{Duration, Instant};

pub use crate::rng::Dice;
use crate::signal::Signal;

pub use fair::Fair;
pub use no_pacing::NoPacing;
pub(crate) use reading::wait_said;
pub use state_codec::StateCodec;

/// How the speed for one key follows signals. Every method has a default.
pub trait Pace: Debug + Send {
    /// Takes note that a request arrives. Returns how long it sleeps before it joins the queue.
    /// Default: not at all.
    fn arrived(&mut self, _call: &mut CallState, _traffic: &Traffic, _dice: &mut Dice) -> Duration {
        Duration::ZERO
    }

    /// Returns from when the first waiter may leave; `None` means at once. Default: at once.
    ///
    /// The throttle calls it again after each event. Between events it must return the same moment,
    /// however much time passes.
    fn slot(&self, _traffic: &Traffic) -> Option<Instant> {
        None
    }

    /// Takes note that a request leaves at `traffic.now`. `traffic` is the traffic just before.
    fn sent(&mut self, _traffic: &Traffic) {}

    /// Takes note of a response that is not a refusal and that arrived at `traffic.now`.
    fn passed(&mut self, _reply: &mut Reply<'_>, _traffic: &Traffic, _dice: &mut Dice) {}

    /// Takes note of a refusal that arrived at `traffic.now`. Returns which requests pause, and for
    /// how long. Default: none.
    ///
    /// If the server states how long to wait, the throttle lets no request leave earlier.
    fn refused(&mut self, _reply: &mut Reply<'_>, _traffic: &Traffic, _dice: &mut Dice) -> Pause {
        Pause::default()
    }

    /// Passes everything that the pace has learned to `codec`, always the same parts in the same
    /// order. The processes of a fleet share it through a
    /// [store](crate::AdaptiveThrottleBuilder::store). Returns whether the pace can be shared.
    /// Default: it cannot.
    ///
    /// Configured values are not learned, so do not pass them. If `codec` reads, it replaces what
    /// the pace has learned. Bound what is read as you bound what you compute.
    fn share(&mut self, _codec: &mut StateCodec<'_>) -> bool {
        false
    }

    /// Takes note that the store is unreachable, and that each of `processes` equal processes uses
    /// the limit without coordination. `processes` is at least 1. Default: nothing changes.
    ///
    /// Change only what [`share`](Pace::share) passes: once the store is reachable again, that is
    /// replaced with what was shared before.
    fn divide(&mut self, _processes: u32) {}

    /// Returns whether the throttle is careful: it sends one request alone until the first
    /// response, and it obeys the wait that a refusal states. Default: yes.
    ///
    /// The published paces did neither, and tollgate runs them as they were published.
    fn is_careful(&self) -> bool {
        true
    }
}

/// The traffic of a key, as a pace sees it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// The current moment.
    pub now: Instant,
    /// How many requests wait in the queue, or sleep before they join it. A request that was just
    /// refused is one of them.
    pub waiting: usize,
    /// How many requests are sent and not yet answered. The request of the current response is not
    /// one of them.
    pub in_flight: usize,
    /// When the last request left. `None` if no request has left.
    pub last_sent: Option<Instant>,
}

impl Traffic {
    /// Creates the traffic of an empty queue, for tests of a pace.
    pub fn at(now: Instant) -> Self {
        Traffic {
            now,
            waiting: 0,
            in_flight: 0,
            last_sent: None,
        }
    }
}

/// What a pace keeps of one request, from its arrival to the end of its last attempt.
///
/// Tests of a pace begin with `CallState::default()`, a request that was never sent.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallState {
    /// How often the request was sent.
    pub attempts: u32,
    /// A note of the pace. The published paces keep the length of the next sleep in it.
    pub note: Duration,
}

/// A response, as a pace sees it.
#[non_exhaustive]
#[derive(Debug)]
pub struct Reply<'a> {
    /// What the response says about limits.
    pub signal: &'a Signal,
    /// When the request left.
    pub sent: Instant,
    /// The request.
    pub call: &'a mut CallState,
}

impl<'a> Reply<'a> {
    /// Creates the response `signal` to a request that left at `sent`, for tests of a pace.
    pub fn new(signal: &'a Signal, sent: Instant, call: &'a mut CallState) -> Self {
        Reply { signal, sent, call }
    }
}

/// Which requests pause after a refusal, and for how long.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pause {
    /// How long no request leaves. It never shortens an earlier pause.
    pub all: Duration,
    /// How long the refused request sleeps before it goes back to its old place in the queue.
    pub call: Duration,
}

impl Pause {
    /// Pauses all requests.
    pub fn of_all(all: Duration) -> Self {
        Pause {
            all,
            call: Duration::ZERO,
        }
    }

    /// Pauses only the refused request.
    pub fn of_call(call: Duration) -> Self {
        Pause {
            all: Duration::ZERO,
            call,
        }
    }
}

/// Returns the span of `seconds`, at most [`LONGEST`]; zero if the number is negative or not a
/// number.
fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, LONGEST)).unwrap_or(Duration::ZERO)
}

/// The longest interval and pause of a pace, in seconds. A hold that the server asks for may be
/// longer.
const LONGEST: f64 = 900.0;

/// Returns the seconds from `earlier` to `later`; 0 if `later` is the earlier one.
fn seconds(earlier: Instant, later: Instant) -> f64 {
    later.saturating_duration_since(earlier).as_secs_f64()
}
