//! The queue of one key: requests leave in the order of their arrival, at the speed of the key's pace.
//!
//! The queue has no timer, no task and no clock. Its methods take the moment and return which request leaves, and when to
//! look again. The simulator runs it in virtual time. If processes share the pace, [`sharing`](super::sharing) has the
//! methods for that.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::pace_state::{Load, PaceState};
use super::peer_view::{Event, PeerView};
use crate::clock;
use crate::pace::{Call, Dice, Pace, Reply};
use crate::signal::Signal;
use crate::wait_queue::Number;

#[derive(Debug)]
pub(crate) struct PacedQueue {
    pub(super) pace_state: PaceState,
    pub(super) dice: Dice,
    /// The requests that wait for their turn. A refused request keeps its number, so it is first again.
    pub(super) waiting: BTreeMap<Number, QueuedCall>,
    /// The requests that sleep by themselves until a moment, as some paces demand, and then wait for their turn.
    asleep: BTreeMap<(Instant, Number), QueuedCall>,
    next: Number,
    /// Requests sent and not yet answered.
    pub(super) in_flight: usize,
    /// What this process knows of the register, if processes share the pace.
    pub(super) view: Option<Box<PeerView>>,
}

/// A request in the queue.
#[derive(Debug)]
pub(super) struct QueuedCall {
    call: Call,
    /// When the request arrived.
    pub(super) since: Instant,
}

/// A request in flight. It ends once, in [`PacedQueue::answered`], [`PacedQueue::lost`] or [`PacedQueue::unsent`].
#[derive(Debug)]
#[must_use = "a request in flight has to end"]
pub(crate) struct Flight {
    pub(crate) number: Number,
    call: QueuedCall,
    sent: Instant,
    /// When the request before it left.
    sent_before: Option<Instant>,
}

/// A refused request that may go back to its old place.
#[derive(Debug)]
pub(crate) struct Refused {
    number: Number,
    call: QueuedCall,
    /// How long the request sleeps first.
    pause: Duration,
}

impl PacedQueue {
    pub(crate) fn new(pace: Box<dyn Pace>, dice: Dice, max_hold: Duration, now: Instant) -> Self {
        PacedQueue {
            pace_state: PaceState::new(pace, max_hold, now),
            dice,
            waiting: BTreeMap::new(),
            asleep: BTreeMap::new(),
            next: 0,
            in_flight: 0,
            view: None,
        }
    }

    /// Appends a request that arrives now, and returns its number.
    pub(crate) fn arrived(&mut self, now: Instant) -> Number {
        let number = self.next;
        self.next += 1;
        let mut call = QueuedCall { call: Call::default(), since: now };
        let mut load = self.load();
        load.waiting += 1;
        let sleep = self.pace_state.arrived(load, &mut call.call, &mut self.dice, now);
        self.insert(number, call, sleep, now);
        number
    }

    /// Returns the next request that may leave now; it is in flight then. Call it until it returns `None`.
    pub(crate) fn depart(&mut self, now: Instant) -> Option<Flight> {
        while let Some(first) = self.asleep.first_entry()
            && first.key().0 <= now
        {
            let ((_, number), call) = first.remove_entry();
            self.waiting.insert(number, call);
        }
        if self.waiting.is_empty() {
            self.drop_grants(now);
            return None;
        }
        let sent_before = self.pace_state.last_sent;
        if !self.take_grant() {
            if !self.may_leave_alone(now) || self.slot().is_some_and(|slot| slot > now) {
                return None;
            }
            self.pace_state.sent(self.load(), now);
            self.record(now, |_| Event::Sent(now));
        }
        let (number, mut call) = self.waiting.pop_first()?;
        call.call.attempts = call.call.attempts.saturating_add(1);
        self.in_flight += 1;
        Some(Flight { number, call, sent: now, sent_before })
    }

    /// Returns when to call [`depart`](Self::depart) again if nothing else happens; `None` if only an event can let a
    /// request leave.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        let awake = self.asleep.first_key_value().map(|((at, _), _)| *at);
        let slot = (!self.waiting.is_empty() && self.is_alone()).then(|| self.slot()).flatten();
        match (awake, slot) {
            (Some(awake), Some(slot)) => Some(awake.min(slot)),
            (awake, slot) => awake.or(slot),
        }
    }

    /// Returns from when the first waiter may leave; `None` means at once.
    pub(crate) fn slot(&self) -> Option<Instant> {
        self.pace_state.slot(self.load())
    }

    /// Ends a request in flight with its answer. Returns the request if it was refused, so that it may go
    /// [back](Self::back).
    pub(crate) fn answered(&mut self, flight: Flight, signal: &Signal, now: Instant) -> Option<Refused> {
        let Flight { number, mut call, sent, .. } = flight;
        self.in_flight -= 1;
        let load = self.load();
        let reply = Reply::new(signal, sent, &mut call.call);
        let pause = self.pace_state.answered(load, reply, &mut self.dice, now);
        self.record(now, |releases| Event::Answered { signal: signal.clone(), sent, at: now, releases });
        pause.map(|pause| Refused { number, call, pause })
    }

    /// Puts a refused request back to its old place.
    pub(crate) fn back(&mut self, refused: Refused, now: Instant) {
        let Refused { number, call, pause } = refused;
        self.insert(number, call, pause, now);
    }

    /// Ends a request in flight without an answer.
    pub(crate) fn lost(&mut self, _: Flight, now: Instant) {
        self.in_flight -= 1;
        self.touch(now);
    }

    /// Ends a request that was not sent although its turn had come. The next request may leave in its place.
    pub(crate) fn unsent(&mut self, flight: Flight, now: Instant) {
        self.in_flight -= 1;
        if self.pace_state.last_sent == Some(flight.sent) {
            self.pace_state.last_sent = flight.sent_before;
        }
        self.touch(now);
    }

    /// Removes a request that waits. Returns false if it does not wait.
    pub(crate) fn leave(&mut self, number: Number) -> bool {
        if self.waiting.remove(&number).is_some() {
            return true;
        }
        let asleep = self.asleep.keys().find(|(_, other)| *other == number).copied();
        asleep.is_some_and(|key| self.asleep.remove(&key).is_some())
    }

    /// Holds the key until `until`. A hold can only be extended.
    pub(crate) fn hold_until(&mut self, until: Instant, now: Instant) {
        self.pace_state.hold_until(until);
        self.record(now, |releases| Event::Hold { until, releases });
    }

    /// Ends the hold of the key.
    pub(crate) fn release(&mut self, now: Instant) {
        self.pace_state.release();
        if let Some(view) = &mut self.view {
            // Kept during an outage too: the other processes learn of it once the store is back.
            view.push(Event::Released);
            view.touch(now);
        }
    }

    /// Returns until when a request sleeps by itself, if it does.
    #[cfg(feature = "sim")]
    pub(crate) fn asleep_until(&self, number: Number) -> Option<Instant> {
        self.asleep.keys().find(|(_, other)| *other == number).map(|(until, _)| *until)
    }

    /// Returns how many requests of this process wait, including those that sleep by themselves.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len() + self.asleep.len()
    }

    fn insert(&mut self, number: Number, call: QueuedCall, sleep: Duration, now: Instant) {
        if sleep.is_zero() {
            self.waiting.insert(number, call);
        } else {
            self.asleep.insert((clock::after(now, sleep), number), call);
        }
    }

    /// Returns the load of this process and of all others that share the pace.
    pub(super) fn load(&self) -> Load {
        let own = Load { waiting: self.waiting(), in_flight: self.in_flight };
        self.view.as_ref().map_or(own, |view| view.with_others(own))
    }
}
