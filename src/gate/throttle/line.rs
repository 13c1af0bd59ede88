//! The line of one key: first come, first served, at the speed of its pace.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::clock;
use crate::pace::{Call, Dice, Pace, Pause, Reply, Traffic, wait_said};
use crate::signal::Signal;

/// The number of a call: smaller came earlier.
pub(crate) type Number = u64;

/// How long a probe that hangs keeps others from going.
const PROBE: Duration = Duration::from_secs(1);

/// Who waits for one key, who is on the way, until when nothing may leave.
#[derive(Debug)]
pub(crate) struct Line {
    pace: Box<dyn Pace>,
    dice: Dice,
    /// Those who may leave, in their order. One that was refused has the smallest number, so it is first again.
    waiting: BTreeMap<Number, Call>,
    /// Those who sleep by themselves, as some paces want it.
    asleep: BTreeMap<(Instant, Number), Call>,
    next: Number,
    in_flight: usize,
    last_sent: Option<Instant>,
    /// Whether an answer has come: before, one request alone is out.
    answered: bool,
    /// Until when nothing may leave.
    held_until: Option<Instant>,
    /// When something happened last.
    last_change: Instant,
    /// The longest that the word of the server holds anything.
    max_hold: Duration,
}

/// A call on its way. It ends in [`Line::answered`] or [`Line::lost`], once.
#[derive(Debug)]
#[must_use = "a call on its way has to end"]
pub(crate) struct Flight {
    pub(crate) number: Number,
    call: Call,
    sent: Instant,
    /// When the request before it left.
    before: Option<Instant>,
}

/// A refused call that may have its old place again.
#[derive(Debug)]
pub(crate) struct Refused {
    number: Number,
    call: Call,
    pause: Duration,
}

impl Line {
    pub(crate) fn new(pace: Box<dyn Pace>, dice: Dice, max_hold: Duration, now: Instant) -> Self {
        Line {
            pace,
            dice,
            waiting: BTreeMap::new(),
            asleep: BTreeMap::new(),
            next: 0,
            in_flight: 0,
            last_sent: None,
            answered: false,
            held_until: None,
            last_change: now,
            max_hold,
        }
    }

    /// A call comes, and is last in line.
    pub(crate) fn join(&mut self, now: Instant) -> Number {
        let number = self.next;
        self.next += 1;
        self.last_change = now;
        let mut call = Call::default();
        let mut traffic = self.traffic(now);
        traffic.waiting += 1;
        let sleep = self.pace.arrived(&mut call, &traffic, &mut self.dice);
        self.place(number, call, sleep, now);
        number
    }

    /// The call that may leave now, if one may; it is on its way then. To be asked until there is none.
    pub(crate) fn depart(&mut self, now: Instant) -> Option<Flight> {
        while let Some(first) = self.asleep.first_entry()
            && first.key().0 <= now
        {
            let ((_, number), call) = first.remove_entry();
            self.waiting.insert(number, call);
        }
        if self.waiting.is_empty() || self.slot().is_some_and(|slot| slot > now) {
            return None;
        }
        let traffic = self.traffic(now);
        let (number, mut call) = self.waiting.pop_first()?;
        self.pace.sent(&traffic);
        call.attempts = call.attempts.saturating_add(1);
        self.in_flight += 1;
        let before = self.last_sent.replace(now);
        self.last_change = now;
        Some(Flight { number, call, sent: now, before })
    }

    /// When to look again whether one may leave, if nothing else happens before; `None`: not before something does.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        let awake = self.asleep.first_key_value().map(|((at, _), _)| *at);
        let slot = (!self.waiting.is_empty()).then(|| self.slot()).flatten();
        match (awake, slot) {
            (Some(awake), Some(slot)) => Some(awake.min(slot)),
            (awake, slot) => awake.or(slot),
        }
    }

    /// From when the first in line may leave; `None`: at once.
    pub(crate) fn slot(&self) -> Option<Instant> {
        let probe = match self.last_sent {
            Some(last) if self.in_flight > 0 && !self.answered && self.pace.is_careful() => {
                Some(clock::after(last, PROBE))
            }
            _ => None,
        };
        // A pace tells its slot from what happened, not from how late it is.
        probe.max(self.pace.slot(&self.traffic(self.last_change))).max(self.held_until)
    }

    /// An answer has come: `Some` where it is a refusal, whose call may go [back](Self::back).
    pub(crate) fn answered(&mut self, flight: Flight, signal: &Signal, now: Instant) -> Option<Refused> {
        let Flight { number, mut call, sent, .. } = flight;
        self.in_flight -= 1;
        self.answered = true;
        self.last_change = now;
        let mut traffic = self.traffic(now);
        if signal.limited().is_none() {
            self.pace.passed(&mut Reply::new(signal, sent, &mut call), &traffic, &mut self.dice);
            return None;
        }
        traffic.waiting += 1;
        let Pause { all, call: pause } =
            self.pace.refused(&mut Reply::new(signal, sent, &mut call), &traffic, &mut self.dice);
        let said =
            if self.pace.is_careful() { wait_said(signal).unwrap_or_default() } else { Duration::ZERO };
        let least = said.min(self.max_hold);
        // A pace may add to what was said; that it does not count more than may be is seen to here.
        let hold = if said > self.max_hold { all.saturating_sub(said) + least } else { all.max(least) };
        if !hold.is_zero() {
            self.hold_until(clock::after(now, hold));
        }
        Some(Refused { number, call, pause })
    }

    /// A refused call takes its old place.
    pub(crate) fn back(&mut self, refused: Refused, now: Instant) {
        let Refused { number, call, pause } = refused;
        self.place(number, call, pause, now);
    }

    /// A call on its way ends without an answer.
    pub(crate) fn lost(&mut self, _: Flight) {
        self.in_flight -= 1;
    }

    /// A call that may have left did not: the next may leave in its place.
    pub(crate) fn unsent(&mut self, flight: Flight) {
        self.in_flight -= 1;
        if self.last_sent == Some(flight.sent) {
            self.last_sent = flight.before;
        }
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
    pub(crate) fn hold_until(&mut self, until: Instant) {
        self.held_until = self.held_until.max(Some(until));
    }

    /// Until when nothing may leave.
    pub(crate) fn held_until(&self) -> Option<Instant> {
        self.held_until
    }

    /// Until when a call sleeps by itself, if it does.
    #[cfg(feature = "sim")]
    pub(crate) fn asleep_until(&self, number: Number) -> Option<Instant> {
        self.asleep.keys().find(|(_, other)| *other == number).map(|(until, _)| *until)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len() + self.asleep.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn place(&mut self, number: Number, call: Call, sleep: Duration, now: Instant) {
        if sleep.is_zero() {
            self.waiting.insert(number, call);
        } else {
            self.asleep.insert((clock::after(now, sleep), number), call);
        }
    }

    fn traffic(&self, now: Instant) -> Traffic {
        Traffic { now, waiting: self.waiting(), in_flight: self.in_flight, last_sent: self.last_sent }
    }
}
