//! A process whose callers share one pure line: the quick way to run a pace.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::pace::Pace;
use crate::rng::Dice;
use crate::signal::Signal;
use crate::throttle::{Flight, Number, PacedQueue, Refused};

/// A line, and whose call has which number in it.
pub(super) struct QueueProcess {
    queue: PacedQueue,
    calls: BTreeMap<Number, usize>,
    /// For when the next look at the line is planned.
    look: Option<Instant>,
}

impl QueueProcess {
    pub(super) fn new(pace: Box<dyn Pace>, dice: Dice, now: Instant) -> Self {
        QueueProcess { queue: PacedQueue::new(pace, dice, FOREVER, now), calls: BTreeMap::new(), look: None }
    }

    /// A call of `caller` joins the line.
    pub(super) fn join(&mut self, caller: usize, now: Instant) {
        let number = self.queue.arrived(now);
        self.calls.insert(number, caller);
    }

    /// Who may leave now, if one may. To be asked until there is none.
    pub(super) fn depart(&mut self, now: Instant) -> Option<(usize, Flight)> {
        let flight = self.queue.depart(now)?;
        Some((self.calls[&flight.number], flight))
    }

    /// Whether the look that was planned for `at` is still of use.
    pub(super) fn is_to_look(&mut self, at: Instant) -> bool {
        let is_planned = self.look == Some(at);
        if is_planned {
            self.look = None;
        }
        is_planned
    }

    /// When to look again, where that is to be planned anew.
    pub(super) fn next_look(&mut self) -> Option<Instant> {
        let look = self.queue.look_at();
        let is_new = self.look != look;
        self.look = look;
        look.filter(|_| is_new)
    }

    /// An answer has come: what is refused may go [back](Self::back), what is not has ended.
    pub(super) fn answered(&mut self, flight: Flight, signal: &Signal, now: Instant) -> Option<Refused> {
        let number = flight.number;
        let refused = self.queue.answered(flight, signal, now);
        if refused.is_none() {
            self.calls.remove(&number);
        }
        refused
    }

    pub(super) fn back(&mut self, refused: Refused, now: Instant) {
        self.queue.back(refused, now);
    }

    /// Those who sleep by themselves, and until when.
    pub(super) fn asleep(&self) -> impl Iterator<Item = (usize, Instant)> {
        self.calls.iter().filter_map(|(number, caller)| Some((*caller, self.queue.asleep_until(*number)?)))
    }
}

/// The lines of a fleet obey the word of the server, however long.
const FOREVER: Duration = Duration::from_secs(366 * 86_400);
