//! The requests of one process for a key, and the pace as this process knows it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::pace_state::{Load, PaceState};
use crate::clock;
use crate::pacing::{CallState, Dice};
use crate::wait_queue::Number;

#[derive(Debug)]
pub(super) struct LocalQueue {
    pub(super) pace_state: PaceState,
    pub(super) dice: Dice,
    /// The requests that wait for their turn. A refused request keeps its number. So when it is put
    /// back, it is before all later requests.
    pub(super) waiting: BTreeMap<Number, QueuedCall>,
    /// The requests that sleep, sorted by the end of that. Some paces let a single request sleep until a moment. After
    /// that, it waits for its turn.
    asleep: Vec<(Instant, Number, QueuedCall)>,
    next: Number,
    /// Requests sent and not yet answered.
    pub(super) in_flight: usize,
}

#[derive(Debug)]
pub(super) struct QueuedCall {
    pub(super) call: CallState,
    /// When the request arrived, or was put behind all others. The processes serve their first waiters in this order.
    pub(super) since: Instant,
}

impl LocalQueue {
    pub(super) fn new(pace_state: PaceState, dice: Dice) -> Self {
        LocalQueue {
            pace_state,
            dice,
            waiting: BTreeMap::new(),
            asleep: Vec::new(),
            next: 0,
            in_flight: 0,
        }
    }

    /// Returns the number of the next request.
    pub(super) fn next_number(&mut self) -> Number {
        let number = self.next;
        self.next += 1;
        number
    }

    /// Adds a request that sleeps for `sleep` first.
    pub(super) fn insert(
        &mut self,
        number: Number,
        call: QueuedCall,
        sleep: Duration,
        now: Instant,
    ) {
        if sleep.is_zero() {
            self.waiting.insert(number, call);
        } else {
            let until = clock::after(now, sleep);
            let place = self.asleep.partition_point(|(other, ..)| *other <= until);
            self.asleep.insert(place, (until, number, call));
        }
    }

    /// Moves the requests whose sleep is over to those that wait for their turn.
    pub(super) fn awake(&mut self, now: Instant) {
        let due = self.asleep.partition_point(|(until, ..)| *until <= now);
        for (_, number, call) in self.asleep.drain(..due) {
            self.waiting.insert(number, call);
        }
    }

    pub(super) fn awakes_at(&self) -> Option<Instant> {
        self.asleep.first().map(|(at, ..)| *at)
    }

    /// Returns until when a request sleeps by itself, if it does.
    #[cfg(feature = "__lab")]
    pub(super) fn asleep_until(&self, number: Number) -> Option<Instant> {
        let mut asleep = self.asleep.iter();
        asleep
            .find(|(_, other, _)| *other == number)
            .map(|(until, ..)| *until)
    }

    /// Removes a request that waits. Returns false if it does not wait.
    pub(super) fn leave(&mut self, number: Number) -> bool {
        let before = self.asleep.len();
        self.asleep.retain(|(_, other, _)| *other != number);
        self.asleep.len() < before || self.waiting.remove(&number).is_some()
    }

    /// Returns how many requests wait, and how many are in flight. Those that sleep count as
    /// waiting.
    pub(super) fn load(&self) -> Load {
        Load {
            waiting: self.waiting.len() + self.asleep.len(),
            in_flight: self.in_flight,
        }
    }

    pub(super) fn first_since(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(_, call)| call.since)
    }
}
