//! The events of a run that are still to happen.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// An event, with the index of what it happens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A caller begins a call.
    Call(usize),
    /// A caller tries the call that its gate has refused again.
    Again(usize),
    /// The server judges the request of a caller.
    Judge(usize),
    /// The response to a caller arrives.
    Answer(usize),
    /// The next request of a process may leave.
    Look(usize),
    /// A consumer outside of the fleet sends a request.
    Stranger(usize),
    /// The limits of the server change.
    Change(usize),
}

/// The planned events, in the order of their time. Events at the same time are in the order in
/// which they were planned.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    /// How many events have been planned.
    planned: u64,
}

impl Schedule {
    /// Plans an event. `at` is the time since the beginning of the run.
    pub(super) fn plan(&mut self, at: Duration, event: Event) {
        self.planned += 1;
        self.events.push(Reverse((at, self.planned, event)));
    }

    /// Returns the time of the next event.
    pub(super) fn next_at(&self) -> Option<Duration> {
        self.events.peek().map(|Reverse((at, ..))| *at)
    }

    /// Takes the next event, with its time.
    pub(super) fn take_next(&mut self) -> Option<(Duration, Event)> {
        self.events.pop().map(|Reverse((at, _, event))| (at, event))
    }
}
