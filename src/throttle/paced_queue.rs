//! The line of one key: first come, first served, at the speed of its pace.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::pace_state::{Load, PaceState};
use super::peer_view::{Event, PeerView};
use crate::clock;
use crate::pace::{Call, Dice, Pace, Reply};
use crate::signal::Signal;

/// The number of a call: smaller came earlier.
pub(crate) type Number = u64;

/// Who waits for one key, who is on the way, until when nothing may leave.
#[derive(Debug)]
pub(crate) struct PacedQueue {
    pub(super) pace_state: PaceState,
    pub(super) dice: Dice,
    /// Those who may leave, in their order. One that was refused has the smallest number, so it is first again.
    pub(super) waiting: BTreeMap<Number, QueuedCall>,
    /// Those who sleep by themselves, as some paces want it.
    asleep: BTreeMap<(Instant, Number), QueuedCall>,
    next: Number,
    pub(super) in_flight: usize,
    /// The others, where the line is shared with other processes.
    pub(super) view: Option<Box<PeerView>>,
}

/// The place of a call in the line.
#[derive(Debug)]
pub(super) struct QueuedCall {
    call: Call,
    /// When it came.
    pub(super) since: Instant,
}

/// A call on its way. It ends in [`Line::answered`] or [`Line::lost`], once.
#[derive(Debug)]
#[must_use = "a call on its way has to end"]
pub(crate) struct Flight {
    pub(crate) number: Number,
    place: QueuedCall,
    sent: Instant,
    /// When the request before it left.
    before: Option<Instant>,
}

/// A refused call that may have its old place again.
#[derive(Debug)]
pub(crate) struct Refused {
    number: Number,
    place: QueuedCall,
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

    /// A call comes, and is last in line.
    pub(crate) fn arrived(&mut self, now: Instant) -> Number {
        let number = self.next;
        self.next += 1;
        let mut place = QueuedCall { call: Call::default(), since: now };
        let mut load = self.load();
        load.waiting += 1;
        let sleep = self.pace_state.arrived(load, &mut place.call, &mut self.dice, now);
        self.place(number, place, sleep, now);
        number
    }

    /// The call that may leave now, if one may; it is on its way then. To be asked until there is none.
    pub(crate) fn depart(&mut self, now: Instant) -> Option<Flight> {
        while let Some(first) = self.asleep.first_entry()
            && first.key().0 <= now
        {
            let ((_, number), place) = first.remove_entry();
            self.waiting.insert(number, place);
        }
        if self.waiting.is_empty() {
            self.drop_grants(now);
            return None;
        }
        let before = self.pace_state.last_sent;
        if !self.take_grant() {
            if !self.may_leave_alone(now) || self.slot().is_some_and(|slot| slot > now) {
                return None;
            }
            self.pace_state.sent(self.load(), now);
            self.record(now, |_| Event::Sent(now));
        }
        let (number, mut place) = self.waiting.pop_first()?;
        place.call.attempts = place.call.attempts.saturating_add(1);
        self.in_flight += 1;
        Some(Flight { number, place, sent: now, before })
    }

    /// When to look again whether one may leave, if nothing else happens before; `None`: not before something does.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        let awake = self.asleep.first_key_value().map(|((at, _), _)| *at);
        let slot = (!self.waiting.is_empty() && self.is_alone()).then(|| self.slot()).flatten();
        match (awake, slot) {
            (Some(awake), Some(slot)) => Some(awake.min(slot)),
            (awake, slot) => awake.or(slot),
        }
    }

    /// From when the first in line may leave; `None`: at once.
    pub(crate) fn slot(&self) -> Option<Instant> {
        self.pace_state.slot(self.load())
    }

    /// An answer has come: `Some` where it is a refusal, whose call may go [back](Self::back).
    pub(crate) fn answered(&mut self, flight: Flight, signal: &Signal, now: Instant) -> Option<Refused> {
        let Flight { number, mut place, sent, .. } = flight;
        self.in_flight -= 1;
        let (load, reply) = (self.load(), Reply::new(signal, sent, &mut place.call));
        let pause = self.pace_state.answered(load, reply, &mut self.dice, now);
        self.record(now, |releases| Event::Answered { signal: signal.clone(), sent, at: now, releases });
        pause.map(|pause| Refused { number, place, pause })
    }

    /// A refused call takes its old place.
    pub(crate) fn back(&mut self, refused: Refused, now: Instant) {
        let Refused { number, place, pause } = refused;
        self.place(number, place, pause, now);
    }

    /// A call on its way ends without an answer.
    pub(crate) fn lost(&mut self, _: Flight, now: Instant) {
        self.in_flight -= 1;
        self.changed(now);
    }

    /// A call that may have left did not: the next may leave in its place.
    pub(crate) fn unsent(&mut self, flight: Flight, now: Instant) {
        self.in_flight -= 1;
        if self.pace_state.last_sent == Some(flight.sent) {
            self.pace_state.last_sent = flight.before;
        }
        self.changed(now);
    }

    /// A call that waits gives up its place. Answers whether it did wait.
    pub(crate) fn leave(&mut self, number: Number) -> bool {
        if self.waiting.remove(&number).is_some() {
            return true;
        }
        let asleep = self.asleep.keys().find(|(_, other)| *other == number).copied();
        asleep.is_some_and(|place| self.asleep.remove(&place).is_some())
    }

    /// Nothing leaves before `until`. It only ever moves to a later moment.
    pub(crate) fn hold_until(&mut self, until: Instant, now: Instant) {
        self.pace_state.hold_until(until);
        self.record(now, |releases| Event::Held { until, releases });
    }

    /// Ends the hold.
    pub(crate) fn release(&mut self, now: Instant) {
        self.pace_state.release();
        if let Some(view) = &mut self.view {
            // Also if the store is away: the others are told when it is back.
            view.push(Event::Released);
            view.touch(now);
        }
    }

    /// Until when nothing may leave.
    pub(crate) fn held_until(&self) -> Option<Instant> {
        self.pace_state.held_until
    }

    /// Until when a call sleeps by itself, if it does.
    #[cfg(feature = "sim")]
    pub(crate) fn asleep_until(&self, number: Number) -> Option<Instant> {
        self.asleep.keys().find(|(_, other)| *other == number).map(|(until, _)| *until)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len() + self.asleep.len()
    }

    fn place(&mut self, number: Number, place: QueuedCall, sleep: Duration, now: Instant) {
        if sleep.is_zero() {
            self.waiting.insert(number, place);
        } else {
            self.asleep.insert((clock::after(now, sleep), number), place);
        }
    }

    /// Who waits and who is on the way, others included where they are known.
    pub(super) fn load(&self) -> Load {
        let mine = Load { waiting: self.waiting(), in_flight: self.in_flight };
        self.view.as_ref().map_or(mine, |view| view.with_others(mine))
    }
}
