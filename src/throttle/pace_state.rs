//! What decides when the next request may leave: the pace, and what happened last. It is what a fleet shares.

use std::time::{Duration, Instant};

use crate::clock;
use crate::pace::{Call, Dice, Notes, Pace, Pause, Reply, Traffic, wait_said};
use crate::signal::Signal;

/// How long a probe that hangs keeps others from going.
const PROBE: Duration = Duration::from_secs(1);

/// No hold is longer.
pub(super) const LONGEST_HOLD: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
pub(super) struct PaceState {
    pub(super) pace: Box<dyn Pace>,
    pub(super) last_sent: Option<Instant>,
    /// Whether an answer has come: before, one request alone is out.
    answered: bool,
    /// Whether nothing left since the last refusal.
    refused: bool,
    /// Until when nothing may leave.
    pub(super) held_until: Option<Instant>,
    /// How many times a hold was released. A hold that was seen before the last release no longer counts.
    pub(super) releases: u32,
    /// When something happened last.
    last_change: Instant,
    /// The longest that the word of the server holds anything.
    max_hold: Duration,
}

/// Who waits and who is on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) waiting: usize,
    pub(super) in_flight: usize,
}

impl PaceState {
    pub(super) fn new(pace: Box<dyn Pace>, max_hold: Duration, now: Instant) -> Self {
        PaceState {
            pace,
            last_sent: None,
            answered: false,
            refused: false,
            held_until: None,
            releases: 0,
            last_change: now,
            max_hold,
        }
    }

    /// From when the first in line may leave; `None`: at once.
    pub(super) fn slot(&self, load: Load) -> Option<Instant> {
        let probe = match self.last_sent {
            Some(last) if load.in_flight > 0 && !self.answered && self.pace.is_careful() => {
                Some(clock::after(last, PROBE))
            }
            _ => None,
        };
        // A pace tells its slot from what happened, not from how late it is.
        let traffic = self.traffic(load, self.last_change);
        probe.max(self.pace.slot(&traffic)).max(self.held_until)
    }

    /// The time between two requests, whatever holds all.
    pub(super) fn interval(&self, load: Load) -> Duration {
        let slot = self.pace.slot(&self.traffic(load, self.last_change));
        slot.zip(self.last_sent).map_or(Duration::ZERO, |(slot, last)| slot.saturating_duration_since(last))
    }

    /// Whether nothing would hold back one more request, if another had left just now with so many on their way.
    pub(super) fn is_open(&self, in_flight: usize, now: Instant) -> bool {
        let traffic = Traffic { now, waiting: 0, in_flight, last_sent: Some(now) };
        let may_leave_alone = |slot: Option<Instant>| slot.is_none_or(|slot| slot <= now);
        self.answered
            && !self.refused
            && may_leave_alone(self.held_until)
            && may_leave_alone(self.pace.slot(&traffic))
    }

    /// A call comes. Answers for how long it sleeps by itself.
    pub(super) fn arrived(&mut self, load: Load, call: &mut Call, dice: &mut Dice, now: Instant) -> Duration {
        self.last_change = now;
        let traffic = self.traffic(load, now);
        self.pace.arrived(call, &traffic, dice)
    }

    /// A request leaves; `crowd` is as it was just before.
    pub(super) fn sent(&mut self, load: Load, now: Instant) {
        let traffic = self.traffic(load, now);
        self.pace.sent(&traffic);
        self.last_sent = Some(now);
        self.last_change = now;
        self.refused = false;
    }

    /// An answer has come, for which `crowd` no longer counts the request. Answers what becomes of a refused call: for how
    /// long it sleeps by itself.
    pub(super) fn answered(
        &mut self,
        load: Load,
        mut reply: Reply<'_>,
        dice: &mut Dice,
        now: Instant,
    ) -> Option<Duration> {
        self.answered = true;
        self.last_change = now;
        let traffic = self.traffic(load, now);
        let signal: &Signal = reply.signal;
        if signal.limited().is_none() {
            self.pace.passed(&mut reply, &traffic, dice);
            return None;
        }
        self.refused = true;
        let traffic = Traffic { waiting: traffic.waiting + 1, ..traffic };
        let Pause { all, call } = self.pace.refused(&mut reply, &traffic, dice);
        let said =
            if self.pace.is_careful() { wait_said(signal).unwrap_or_default() } else { Duration::ZERO };
        let least = said.min(self.max_hold);
        // A pace may add to what was said; that it does not count more than may be is seen to here.
        let hold = if said > self.max_hold { all.saturating_sub(said) + least } else { all.max(least) };
        if !hold.is_zero() {
            self.hold_until(clock::after(now, hold));
        }
        Some(call)
    }

    /// From now on this is one of so many processes that do not know of each other: each goes at its part of the speed, and
    /// begins somewhere in its interval.
    pub(super) fn divide(&mut self, processes: u32, dice: &mut Dice, now: Instant) {
        self.pace.divide(processes);
        let traffic = self.traffic(Load { waiting: 1, in_flight: 0 }, now);
        if let (Some(slot), Some(last)) = (self.pace.slot(&traffic), self.last_sent) {
            let part = slot.saturating_duration_since(last).mul_f64(dice.roll());
            self.last_sent = last.checked_sub(part).or(Some(last));
            self.held_until = self.held_until.map(|until| clock::after(until, part));
        }
    }

    /// Nothing leaves before `until`. It only ever moves to a later moment.
    pub(super) fn hold_until(&mut self, until: Instant) {
        self.held_until = self.held_until.max(Some(until));
    }

    /// Ends the hold.
    pub(super) fn release(&mut self) {
        self.held_until = None;
        self.releases = self.releases.saturating_add(1);
    }

    /// All of it, to be written or read. Answers whether the pace can be shared.
    pub(super) fn share(&mut self, notes: &mut Notes<'_>) -> bool {
        notes.near(&mut self.last_sent, Duration::ZERO);
        notes.flag(&mut self.answered);
        notes.flag(&mut self.refused);
        notes.near(&mut self.held_until, LONGEST_HOLD);
        notes.small(&mut self.releases);
        self.pace.share(notes)
    }

    /// How much is shared: who learns other things shares them in another place. `None` where the pace cannot be shared.
    pub(super) fn kind(&mut self) -> Option<u64> {
        let mut is_written = false;
        let written = Notes::write(self.last_change, |notes| is_written = self.share(notes));
        let is_read = Notes::read(&written, self.last_change, |notes| _ = self.share(notes));
        (is_written && is_read).then_some(written.len() as u64)
    }

    fn traffic(&self, load: Load, now: Instant) -> Traffic {
        Traffic { now, waiting: load.waiting, in_flight: load.in_flight, last_sent: self.last_sent }
    }
}
