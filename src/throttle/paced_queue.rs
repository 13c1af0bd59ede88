//! The queue of one key: requests leave in the order of their arrival, at the speed of the key's
//! pace.
//!
//! The queue has no timer, no task and no clock. Its methods take the moment and return which
//! request leaves, and when to look again. The simulator runs it in virtual time.
//!
//! A [`LocalQueue`] has the requests of this process. If processes share the pace, a [`Sharing`]
//! has what this process knows of the others. Without it, or while the store is unreachable, the
//! queue works alone.

use std::time::{Duration, Instant};

use super::event_log::{FleetEvent, LogMark};
use super::local_queue::{LocalQueue, QueuedCall};
use super::pace_state::{Load, PaceState, SavedPace};
use super::sharing::Sharing;
use super::sync_state::{CasRequest, StoreChange};
use crate::error::StoreError;
use crate::pacing::{CallState, Dice, Pace, Reply};
use crate::signal::Signal;
use crate::store::Register;
use crate::wait_queue::Number;

/// The queue of one key.
#[derive(Debug)]
pub struct PacedQueue {
    pub(super) local: LocalQueue,
    sharing: Option<Box<Sharing>>,
}

/// A request in flight. It ends once: with its answer, without one, or because it was not sent.
#[derive(Debug)]
#[must_use = "a request in flight has to end"]
pub struct Flight {
    /// The number of the request.
    pub number: Number,
    call: QueuedCall,
    sent: Instant,
    /// Whether the store has granted its turn. Another request of this process may have it.
    is_granted: bool,
    /// When the request before it left.
    sent_before: Option<Instant>,
}

/// What a request that arrives now would find.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PaceOutlook {
    /// From when the first waiter may leave. `None` means at once.
    pub(super) slot: Option<Instant>,
    /// Whether requests wait for the response to the first one.
    pub(super) is_probing: bool,
    /// The time between two requests.
    pub(super) interval: Duration,
    /// How many requests of all processes wait.
    pub(super) waiting: usize,
    /// How many requests of all processes are in flight.
    pub(super) in_flight: usize,
    /// How many processes have requests, this one included.
    pub(super) processes: u32,
    /// Whether the store is unreachable.
    pub(super) is_alone: bool,
}

impl Flight {
    /// Returns when the request left.
    pub(super) fn sent(&self) -> Instant {
        self.sent
    }
}

/// A refused request that may go back to its old place.
#[derive(Debug)]
pub struct Refused {
    number: Number,
    call: QueuedCall,
    /// How long the request sleeps first.
    pause: Duration,
}

impl PacedQueue {
    /// Creates an empty queue. A response can hold it for `max_hold` at most.
    pub fn new(pace: Box<dyn Pace>, dice: Dice, max_hold: Duration, now: Instant) -> Self {
        let pace_state = PaceState::new(pace, max_hold, now);
        PacedQueue {
            local: LocalQueue::new(pace_state, dice),
            sharing: None,
        }
    }

    /// Shares the pace from now on, as process `id`, which the store notifies at `address`.
    pub(super) fn share(&mut self, id: u64, address: u64, now: Instant) {
        self.sharing = Some(Box::new(Sharing::new(id, address, now)));
    }

    /// Appends a request that arrives now, and returns its number.
    pub fn arrived(&mut self, now: Instant) -> Number {
        let mut call = QueuedCall {
            call: CallState::default(),
            since: now,
        };
        let mut load = self.load();
        load.waiting += 1;
        let LocalQueue {
            pace_state, dice, ..
        } = &mut self.local;
        let sleep = pace_state.arrived(load, &mut call.call, dice, now);
        let number = self.local.next_number();
        self.local.insert(number, call, sleep, now);
        number
    }

    /// Returns the next request that may leave now. From then on it is in flight. The caller
    /// repeats the call until it returns `None`.
    pub fn depart(&mut self, now: Instant) -> Option<Flight> {
        self.local.awake(now);
        let is_held = self.held_until().is_some_and(|until| until > now);
        if is_held || self.local.waiting.is_empty() {
            // The store may have granted turns before it knew of the hold.
            if let Some(sharing) = &mut self.sharing {
                sharing.drop_grants(now);
            }
            return None;
        }
        let sent_before = self.local.pace_state.last_sent;
        let is_granted = self
            .sharing
            .as_mut()
            .is_some_and(|sharing| sharing.take_grant());
        if !is_granted {
            if !self.may_leave_alone(now) || self.slot().is_some_and(|slot| slot > now) {
                return None;
            }
            self.local.pace_state.sent(self.load(), now);
            self.record(now, |_| FleetEvent::Sent(now));
        }
        let (number, mut call) = self.local.waiting.pop_first()?;
        call.call.attempts = call.call.attempts.saturating_add(1);
        self.local.in_flight += 1;
        Some(Flight {
            number,
            call,
            sent: now,
            is_granted,
            sent_before,
        })
    }

    /// Returns when to call [`depart`](Self::depart) again if nothing else happens; `None` if only
    /// an event can let a request leave.
    pub fn look_at(&self) -> Option<Instant> {
        let is_alone = self
            .sharing
            .as_ref()
            .is_none_or(|sharing| sharing.is_alone());
        let slot = (is_alone && !self.local.waiting.is_empty())
            .then(|| self.slot())
            .flatten();
        self.local.awakes_at().into_iter().chain(slot).min()
    }

    /// Returns from when the first waiter may leave; `None` means at once.
    pub(super) fn slot(&self) -> Option<Instant> {
        self.local.pace_state.slot(self.load())
    }

    /// Returns the time between two requests, without holds.
    pub(super) fn interval(&self) -> Duration {
        self.local.pace_state.interval(self.load())
    }

    /// Ends a request in flight with its answer. Returns the request if it was refused, so that it
    /// may go [back](Self::back).
    pub fn answered(&mut self, flight: Flight, signal: &Signal, now: Instant) -> Option<Refused> {
        let Flight {
            number,
            mut call,
            sent,
            ..
        } = flight;
        self.local.in_flight -= 1;
        let load = self.load();
        let reply = Reply::new(signal, sent, &mut call.call);
        let LocalQueue {
            pace_state, dice, ..
        } = &mut self.local;
        let pause = pace_state.answered(load, reply, dice, now);
        self.record(now, |releases| FleetEvent::Answered {
            signal: signal.clone(),
            sent,
            at: now,
            releases,
        });
        pause.map(|pause| Refused {
            number,
            call,
            pause,
        })
    }

    /// Returns whether the pace obeys the waits that refusals state.
    pub(super) fn is_careful(&self) -> bool {
        self.local.pace_state.pace.is_careful()
    }

    /// Returns what the pace knows, for [`restore_pace`](Self::restore_pace). `None` if processes share it, or if it is one
    /// of a user that cannot be saved.
    pub(super) fn save_pace(&mut self, now: Instant) -> Option<SavedPace> {
        if self.sharing.is_some() {
            return None;
        }
        self.local.pace_state.remember(now)
    }

    /// Forgets what the pace has learned since then, and a hold.
    pub(super) fn restore_pace(&mut self, before: &SavedPace, now: Instant) {
        self.local.pace_state.forget_since(before);
        self.touch(now);
    }

    /// Puts a refused request back to its old place.
    pub fn back(&mut self, refused: Refused, now: Instant) {
        self.local
            .insert(refused.number, refused.call, refused.pause, now);
    }

    /// Puts a refused request behind all others, of all processes. It sleeps first, as the pace wants. Returns its new
    /// number.
    pub(super) fn back_behind(&mut self, mut refused: Refused, now: Instant) -> Number {
        refused.call.since = now;
        let number = self.local.next_number();
        self.local.insert(number, refused.call, refused.pause, now);
        number
    }

    /// Ends a request in flight without an answer.
    pub(super) fn lost(&mut self, _: Flight, now: Instant) {
        self.local.in_flight -= 1;
        self.touch(now);
    }

    /// Ends a request that was not sent although its turn had come. The next request may leave in
    /// its place.
    pub(super) fn unsent(&mut self, flight: Flight, now: Instant) {
        self.give_turn_up(&flight, now);
    }

    /// Gives up the turn of a request that was not sent.
    fn give_turn_up(&mut self, flight: &Flight, now: Instant) {
        self.local.in_flight -= 1;
        let last_sent = &mut self.local.pace_state.last_sent;
        match &mut self.sharing {
            Some(sharing) if flight.is_granted => sharing.give_grant_back(),
            _ if *last_sent == Some(flight.sent) => *last_sent = flight.sent_before,
            _ => {}
        }
        self.touch(now);
    }

    /// Lets a request whose turn had come, but which was not sent, wait in its old place.
    pub(super) fn wait_again(&mut self, flight: Flight, now: Instant) {
        self.give_turn_up(&flight, now);
        let Flight {
            number, mut call, ..
        } = flight;
        call.call.attempts = call.call.attempts.saturating_sub(1);
        self.local.insert(number, call, Duration::ZERO, now);
    }

    /// Removes a request that waits. Returns false if it does not wait.
    pub(super) fn leave(&mut self, number: Number) -> bool {
        self.local.leave(number)
    }

    /// Holds the key until `until`. A hold can only be extended.
    pub(super) fn hold_until(&mut self, until: Instant, now: Instant) {
        self.local.pace_state.hold_until(until);
        self.record(now, |releases| FleetEvent::Hold { until, releases });
    }

    /// Lets the hold end earlier by `span`, for which the clock of this process stood still. Other processes have clocks
    /// of their own.
    pub(super) fn hold_is_shorter(&mut self, span: Duration) {
        self.local.pace_state.hold_is_shorter(span);
    }

    pub(super) fn release(&mut self, now: Instant) {
        self.local.pace_state.release();
        if let Some(sharing) = &mut self.sharing {
            // Kept during an outage too: the other processes learn of it once the store is back.
            sharing.log.push(FleetEvent::Released);
            sharing.log.touch(now);
        }
    }

    /// Returns when the hold of the key ends, if there was one.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.local.pace_state.held_until
    }

    /// Returns until when a request sleeps by itself, if it does.
    #[cfg(feature = "__lab")]
    pub fn asleep_until(&self, number: Number) -> Option<Instant> {
        self.local.asleep_until(number)
    }

    /// Returns what a request that arrives now would find, as far as this process knows.
    pub(super) fn outlook(&self, now: Instant) -> PaceOutlook {
        let Load { waiting, in_flight } = self.load();
        let load = Load {
            waiting: waiting + 1,
            in_flight,
        };
        let pace_state = &self.local.pace_state;
        let probe_ends_at = pace_state.probe_ends_at(load);
        let sharing = self.sharing.as_ref();
        PaceOutlook {
            slot: pace_state.slot_after(load, now),
            is_probing: probe_ends_at.is_some_and(|at| at > now),
            interval: pace_state.interval(load),
            waiting,
            in_flight,
            processes: sharing.map_or(1, |sharing| sharing.process_count()),
            is_alone: sharing.is_some_and(|sharing| sharing.is_alone()),
        }
    }

    /// Returns how many requests of this process wait, including those that sleep by themselves.
    pub(super) fn waiting(&self) -> usize {
        self.local.load().waiting
    }

    /// Returns how many requests of this process are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.local.in_flight
    }

    /// Returns the load of this process and of all others that share the pace.
    fn load(&self) -> Load {
        self.sharing
            .as_ref()
            .map_or_else(|| self.local.load(), |sharing| sharing.load(&self.local))
    }

    /// Returns whether a request may leave without a compare-and-set.
    fn may_leave_alone(&self, now: Instant) -> bool {
        self.sharing
            .as_ref()
            .is_none_or(|sharing| sharing.may_leave_alone(&self.local, now))
    }

    /// Records an event for the other processes. `event` takes the number of releases that this
    /// process knows of.
    fn record(&mut self, now: Instant, event: impl FnOnce(Option<u32>) -> FleetEvent) {
        if let Some(sharing) = &mut self.sharing {
            sharing.record(&self.local, now, event);
        }
    }

    /// Notes that the number of requests in flight has changed.
    fn touch(&mut self, now: Instant) {
        if let Some(sharing) = &mut self.sharing {
            sharing.log.touch(now);
        }
    }

    /// Returns whether the first waiter waits for an answer of the store.
    pub(super) fn awaits_register(&self) -> bool {
        self.sharing
            .as_ref()
            .is_some_and(|sharing| sharing.awaits_register(&self.local))
    }

    /// Returns the current point in the sequence of events; `None` if the pace is not shared.
    pub(super) fn mark(&self) -> Option<LogMark> {
        self.sharing.as_ref().map(|sharing| sharing.log.mark())
    }

    /// Returns whether the register has all events before `mark`. Fails if the store has been away
    /// since.
    pub(super) fn is_written(&self, mark: LogMark) -> Result<bool, StoreError> {
        self.sharing.as_ref().map_or(Ok(true), |sharing| {
            sharing.log.is_written(mark, sharing.is_alone())
        })
    }

    /// Returns whether this process has released the key, and the register does not have that yet.
    pub(super) fn has_unwritten_release(&self) -> bool {
        let sharing = self.sharing.as_ref();
        sharing.is_some_and(|sharing| sharing.log.has_release())
    }

    /// Returns when the compare-and-set under way was sent.
    pub(super) fn cas_sent_at(&self) -> Option<Instant> {
        self.sharing.as_ref()?.cas_sent_at()
    }

    /// Returns when the next compare-and-set is due if nothing else happens.
    pub(super) fn next_cas_at(&self) -> Option<Instant> {
        self.sharing.as_ref()?.next_cas_at(&self.local)
    }

    /// Returns the compare-and-set to send now, if one is due. The caller ends it with
    /// [`cas_answered`](Self::cas_answered).
    pub(super) fn next_cas(&mut self, now: Instant) -> Option<CasRequest> {
        self.sharing.as_mut()?.next_cas(&mut self.local, now)
    }

    /// Ends the compare-and-set under way, if there is one, with the store's response. Returns whether
    /// the store became unreachable or reachable.
    pub(super) fn cas_answered(
        &mut self,
        answer: Result<Register, StoreError>,
        now: Instant,
    ) -> Option<StoreChange> {
        self.sharing
            .as_mut()?
            .cas_answered(&mut self.local, answer, now)
    }

    /// Takes the register that another process has written, unless it is out of date or the store
    /// is unreachable.
    pub(super) fn register_changed(&mut self, register: Register, now: Instant) {
        if let Some(sharing) = &mut self.sharing {
            sharing.register_changed(&mut self.local, register, now);
        }
    }

    /// Notes that notifications may have been missed, so that this process reads the register if
    /// any request waits. Returns whether any does.
    pub(super) fn events_missed(&mut self, now: Instant) -> bool {
        let is_waiting = !self.local.waiting.is_empty();
        if is_waiting {
            self.touch(now);
        }
        is_waiting
    }
}
