//! A process whose callers share one paced queue, without tasks: the fast way to run a pace.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tollgate::__lab::Dice;
use tollgate::__lab::Pace;
use tollgate::__lab::{Flight, PacedQueue, Refused};
use tollgate::Signal;

/// A queue, and the caller of each request in it.
pub(super) struct QueueProcess {
    queue: PacedQueue,
    calls: BTreeMap<u64, usize>,
    /// When the next look at the queue is planned for.
    look: Option<Instant>,
}

impl QueueProcess {
    pub(super) fn new(pace: Box<dyn Pace>, dice: Dice, now: Instant) -> Self {
        QueueProcess {
            queue: PacedQueue::new(pace, dice, FOREVER, now),
            calls: BTreeMap::new(),
            look: None,
        }
    }

    /// Queues a call of `caller`.
    pub(super) fn arrived(&mut self, caller: usize, now: Instant) {
        let number = self.queue.arrived(now);
        self.calls.insert(number, caller);
    }

    /// Returns the next caller whose request may leave now. Call it until it returns `None`.
    pub(super) fn depart(&mut self, now: Instant) -> Option<(usize, Flight)> {
        let flight = self.queue.depart(now)?;
        Some((self.calls[&flight.number], flight))
    }

    /// Reports whether the look that was planned for `at` has not been replaced.
    pub(super) fn is_to_look(&mut self, at: Instant) -> bool {
        let is_planned = self.look == Some(at);
        if is_planned {
            self.look = None;
        }
        is_planned
    }

    /// Returns when to look again, if that has changed.
    pub(super) fn next_look(&mut self) -> Option<Instant> {
        let look = self.queue.look_at();
        let is_new = self.look != look;
        self.look = look;
        look.filter(|_| is_new)
    }

    /// Ends a request in flight with its answer. Returns the request if it was refused, so that it
    /// may go [back](Self::back).
    pub(super) fn answered(
        &mut self,
        flight: Flight,
        signal: &Signal,
        now: Instant,
    ) -> Option<Refused> {
        let number = flight.number;
        let refused = self.queue.answered(flight, signal, now);
        if refused.is_none() {
            self.calls.remove(&number);
        }
        refused
    }

    /// Puts a refused request back to its old place.
    pub(super) fn back(&mut self, refused: Refused, now: Instant) {
        self.queue.back(refused, now);
    }

    /// Returns the callers whose requests sleep by themselves, and until when.
    pub(super) fn asleep(&self) -> impl Iterator<Item = (usize, Instant)> {
        self.calls
            .iter()
            .filter_map(|(number, caller)| Some((*caller, self.queue.asleep_until(*number)?)))
    }
}

/// The longest hold that a server can ask for: the simulation obeys every one.
const FOREVER: Duration = Duration::from_secs(366 * 86_400);
