//! The end of a gate: requests that wait may still leave until a deadline, and no others come.

use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::event::Event;
use super::registry::Engine;
use crate::clock::{self, Timer};
use crate::error::StoreError;
use crate::locks::lock;
use crate::wakers::add_task;

/// What became of the requests that waited when a limiter or throttle was
/// [drained](crate::Limiter::drain).
///
/// Its `Display` is one line for a log: `14 left in time, 3 refused, 120 permits given back in 2.1s`.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Requests that waited and left in time.
    pub left: u64,
    /// Requests that waited and were refused.
    pub refused: u64,
    /// The units that were at hand and went back to the store.
    pub given_back: u64,
    /// How long it took.
    pub took: Duration,
}

impl Drained {
    /// Adds what became of the requests of another gate, drained at the same time.
    pub(super) fn add(&mut self, other: &Drained) {
        self.left += other.left;
        self.refused += other.refused;
        self.given_back += other.given_back;
        self.took = self.took.max(other.took);
    }
}

impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Drained {
            left,
            refused,
            given_back,
            took,
        } = self;
        let tenths = took.as_millis().div_ceil(100);
        let (seconds, tenths) = (tenths / 10, tenths % 10);
        write!(
            f,
            "{left} left in time, {refused} refused, {given_back} permits given back in {seconds}.{tenths}s"
        )
    }
}

/// Whether a gate is drained, and how far it is.
#[derive(Default)]
pub(super) struct DrainState {
    is_draining: AtomicBool,
    progress: Mutex<Progress>,
    left: AtomicU64,
    refused: AtomicU64,
}

/// How a request that waited counts in a drain.
#[derive(Clone, Copy, Debug)]
pub(super) enum DrainedAs {
    Left,
    Refused,
}

#[derive(Default)]
struct Progress {
    /// Until when requests that wait may leave.
    by: Option<Instant>,
    /// The tasks that drain the gate.
    wakers: Vec<Waker>,
}

impl DrainState {
    fn progress<R>(&self, act: impl FnOnce(&mut Progress) -> R) -> R {
        act(&mut lock(&self.progress))
    }

    /// Begins to drain. The earliest of several deadlines counts.
    fn begin(&self, by: Instant) {
        self.progress(|progress| progress.by = Some(progress.by.map_or(by, |other| other.min(by))));
        self.is_draining.store(true, Ordering::SeqCst);
        self.wake();
    }

    #[inline]
    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::SeqCst)
    }

    /// Returns until when requests that wait may leave, if the gate is drained.
    pub(super) fn by(&self) -> Option<Instant> {
        if !self.is_draining() {
            return None;
        }
        self.progress(|progress| progress.by)
    }

    /// Counts a request that waited.
    pub(super) fn count(&self, drained: DrainedAs) {
        if self.is_draining() {
            let count = match drained {
                DrainedAs::Left => &self.left,
                DrainedAs::Refused => &self.refused,
            };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how many requests that waited have left, and how many were refused.
    pub(super) fn counts(&self) -> Drained {
        Drained {
            left: self.left.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            ..Drained::default()
        }
    }

    /// Wakes the tasks that drain the gate, because it may be idle.
    pub(super) fn wake(&self) {
        if self.is_draining() {
            let wakers = self.progress(|progress| std::mem::take(&mut progress.wakers));
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

/// How often the task yields after the deadline, so that waiting tasks take in that they are refused.
const MOST_YIELDS: u32 = 16;

pub(crate) async fn drain<G: Engine + ?Sized>(
    gate: Arc<G>,
    within: Duration,
) -> Result<Drained, StoreError> {
    let start = clock::now();
    let state = gate.tally().drain_state();
    let by = clock::after(start, within);
    state.begin(by);
    let given_back = gate.clone().stop(state.by().unwrap_or(by));
    gate.tally().wake_waiting();
    until_idle(&*gate, state).await;
    for _ in 0..MOST_YIELDS {
        if gate.tally().waiting() == 0 {
            break;
        }
        tokio::task::yield_now().await;
    }
    let flushed = gate.clone().flush().await;
    // No request leaves after the deadline, whether or not its task has run since.
    let drained = Drained {
        given_back,
        took: clock::now().saturating_duration_since(start),
        ..gate.tally().drained()
    };
    gate.tally().tell(&Event::Drained { drained: &drained });
    flushed.map(|()| drained)
}

/// Waits until no request waits and no call is in flight, or until the deadline.
async fn until_idle<G: Engine + ?Sized>(gate: &G, state: &DrainState) {
    let mut timer = Timer::at(clock::now());
    poll_fn(|cx| {
        // The waker is registered before the gate is looked at, so that no change is missed.
        let by = state.progress(|progress| {
            add_task(&mut progress.wakers, cx);
            progress.by
        });
        let by = by.unwrap_or_else(clock::now);
        let is_idle = gate.tally().waiting() == 0 && gate.in_flight() == 0;
        if is_idle || by <= clock::now() {
            return Poll::Ready(());
        }
        timer.set(by);
        timer.poll(cx)
    })
    .await;
}
