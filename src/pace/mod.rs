//! How the speed of a client answers to what a server says: [`Pace`], and the paces that come with tollgate.
//!
//! A pace is pure: it asks no clock, rolls no dice of its own, waits for nothing. It is told what happens (a call comes,
//! a request leaves, an answer is there), each time with the moment and with [`Dice`], and it tells from when the next
//! request may leave. The gate keeps the line, the requests in flight and the hold. So a pace can be
//! judged in a simulation (feature `sim`) that runs in virtual time, and what was judged is what runs. How they do is on
//! a [page of the guide](crate::guide::pace).
//!
//! | pace | follows | good at | bad at |
//! |---|---|---|---|
//! | [`Fair`] | what is left, refusals, hints | fair shares without coordination, next to no refusals | hundreds of clients on an empty bucket |
//! | [`Aimd`] | refusals | even shares where servers tell nothing | needs refusals to stay put; finds capacity slowly |
//! | [`Remaining`] | what is left, refusals | the best of the published four | needs refusals to stay put; chance decides who waits |
//! | [`Proportional`] | refusals | few refusals | emptying a full bucket: it is slow to let go |
//! | [`Gradual`] | refusals | simple | half of its requests are refused |
//! | [`Backoff`] | refusals | what everybody writes first | two thirds and more are refused |
//! | [`Unpaced`] | nothing | rolling the layer out before it acts | |
//!
//! The processes of a fleet can [share](crate::AdaptiveThrottleBuilder::store) a [`Fair`] or an [`Aimd`].
//!
//! # A pace of your own
//!
//! Every method has a default, so a pace says only what it has to say:
//!
//! ```
//! use std::time::{Duration, Instant};
//! use tollgate::pace::{Dice, Notes, Pace, Pause, Reply, Traffic};
//!
//! /// Two seconds between two requests once it was refused.
//! #[derive(Debug, Default)]
//! struct Careful {
//!     refused: bool,
//! }
//!
//! impl Pace for Careful {
//!     fn slot(&self, traffic: &Traffic) -> Option<Instant> {
//!         let spacing = Duration::from_secs(if self.refused { 2 } else { 0 });
//!         Some(traffic.last_sent? + spacing)
//!     }
//!
//!     fn refused(&mut self, _: &mut Reply<'_>, _: &Traffic, _: &mut Dice) -> Pause {
//!         self.refused = true;
//!         Pause::of_all(Duration::from_secs(2))
//!     }
//!
//!     // Only for a fleet that is to share it.
//!     fn share(&mut self, notes: &mut Notes<'_>) -> bool {
//!         notes.flag(&mut self.refused);
//!         true
//!     }
//! }
//! ```

mod aimd;
mod fair;
mod notes;
mod published;
mod reading;
mod unpaced;

use std::fmt::Debug;
use std::time::{Duration, Instant};

pub use crate::rng::Dice;
use crate::signal::Signal;

pub use aimd::Aimd;
pub use fair::Fair;
pub use notes::Notes;
pub use published::{Backoff, Gradual, Proportional, Remaining};
pub(crate) use reading::wait_said;
pub use unpaced::Unpaced;

/// How the speed for one key answers to signals. See the [module](self) for what it may rely on, and for an example.
pub trait Pace: Debug + Send {
    /// A call comes. Answers for how long it sleeps by itself before it joins the line. Default: not at all.
    fn arrived(&mut self, _call: &mut Call, _traffic: &Traffic, _dice: &mut Dice) -> Duration {
        Duration::ZERO
    }

    /// From when the first in line may leave; `None`: at once. Default: at once.
    ///
    /// It is asked again after everything that happens. While nothing happens the answer must stay the same, however much
    /// time passes.
    fn slot(&self, _traffic: &Traffic) -> Option<Instant> {
        None
    }

    /// A request leaves, at `traffic.now`; `traffic` is as it was just before.
    fn sent(&mut self, _traffic: &Traffic) {}

    /// An answer has come, at `traffic.now`, which is no refusal.
    fn passed(&mut self, _reply: &mut Reply<'_>, _traffic: &Traffic, _dice: &mut Dice) {}

    /// A refusal has come, at `traffic.now`. Answers who pauses for how long. Default: nobody.
    ///
    /// If the server said how long to wait, the gate sees to it that nobody goes earlier.
    fn refused(&mut self, _reply: &mut Reply<'_>, _traffic: &Traffic, _dice: &mut Dice) -> Pause {
        Pause::default()
    }

    /// Names everything it has learned, always the same parts in the same order, so that the processes of a fleet share it
    /// through a [store](crate::AdaptiveThrottleBuilder::store). Answers whether it can be shared. Default: it cannot.
    ///
    /// What was configured is not learned, so it is not named. Called with notes to be read, what was known before is gone
    /// after it; a pace bounds what it has read as it bounds what it computes.
    fn share(&mut self, _notes: &mut Notes<'_>) -> bool {
        false
    }

    /// From now on this is one of so many equal processes that share the limit and no longer know of each other, since the
    /// store is away; `processes` is at least 1. Default: nothing changes.
    ///
    /// It changes only what [`share`](Pace::share) names: when the store is back, that is again what was shared, and nothing
    /// else is told.
    fn divide(&mut self, _processes: u32) {}

    /// Whether the gate is careful on its own account: before the first answer it sends one request alone, the probe, and
    /// what a refusal says of waiting it obeys. Default: yes.
    ///
    /// The published paces did neither, and are measured as they were published.
    fn is_careful(&self) -> bool {
        true
    }
}

/// What a pace may know of its line.
#[non_exhaustive]
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// The moment.
    pub now: Instant,
    /// How many wait: in line, and asleep by themselves. One that was just refused counts.
    pub waiting: usize,
    /// How many are on their way. One whose answer is there does not count.
    pub in_flight: usize,
    /// When the last request left.
    pub last_sent: Option<Instant>,
}

impl Traffic {
    /// The traffic of a line that waits for nothing. For tests of a pace.
    pub fn at(now: Instant) -> Self {
        Traffic { now, waiting: 0, in_flight: 0, last_sent: None }
    }
}

/// One call, from its arrival to the end of its last attempt.
///
/// Tests of a pace begin with `Call::default()`: one that was never sent.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Call {
    /// How often it was sent.
    pub attempts: u32,
    /// What the pace notes in it: for the published paces, how long it sleeps.
    pub note: Duration,
}

/// An answer as a pace sees it.
#[non_exhaustive]
#[derive(Debug)]
pub struct Reply<'a> {
    /// What it says.
    pub signal: &'a Signal,
    /// When its request left.
    pub sent: Instant,
    /// Its call.
    pub call: &'a mut Call,
}

impl<'a> Reply<'a> {
    /// The answer `signal` to a request that left at `sent`. For tests of a pace.
    pub fn new(signal: &'a Signal, sent: Instant, call: &'a mut Call) -> Self {
        Reply { signal, sent, call }
    }
}

/// Who pauses after a refusal, and for how long.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pause {
    /// Nobody leaves for so long. It never shortens an earlier pause.
    pub all: Duration,
    /// The refused call sleeps for so long by itself, before it takes its old place in the line.
    pub call: Duration,
}

impl Pause {
    /// Nobody leaves for so long.
    pub fn of_all(all: Duration) -> Self {
        Pause { all, call: Duration::ZERO }
    }

    /// The refused call sleeps for so long, others do not.
    pub fn of_call(call: Duration) -> Self {
        Pause { all: Duration::ZERO, call }
    }
}

/// A span of so many seconds; at most [`LONGEST`], and none where the number is negative or no number.
fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, LONGEST)).unwrap_or(Duration::ZERO)
}

/// No pace holds anything for longer, in seconds; hints of the server may.
const LONGEST: f64 = 900.0;

/// From `earlier` to `later`, in seconds; 0 where it is the other way round.
fn seconds(earlier: Instant, later: Instant) -> f64 {
    later.saturating_duration_since(earlier).as_secs_f64()
}
