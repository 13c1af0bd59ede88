//! The state that decides when the next request of a key may leave: its pace, its last request and
//! its hold.
//!
//! It is pure: every method takes the moment. Processes that share the pace of a key share all of
//! it.

use std::time::{Duration, Instant};

use crate::clock;
use crate::pacing::{CallState, Dice, Pace, Pause, Reply, StateCodec, Traffic, wait_said};
use crate::signal::{ObservedQuota, Signal};

/// How long an unanswered probe keeps the other requests waiting.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) const LONGEST_HOLD: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
pub(super) struct PaceState {
    pub(super) pace: Box<dyn Pace>,
    pub(super) last_sent: Option<Instant>,
    /// Whether any request was answered. Before the first answer one request, the probe, leaves
    /// alone.
    answered: bool,
    /// Whether the last answer was a refusal and no request has left since.
    refused: bool,
    /// When the hold ends, if there was one.
    pub(super) held_until: Option<Instant>,
    /// Until when this process waits behind that hold in an outage of the store. It is no part of the hold, and no other process
    /// learns of it.
    waits_until: Option<Instant>,
    /// How often a hold was released. A hold that a process saw before the last release no longer
    /// counts.
    pub(super) releases: u32,
    /// When the state changed last.
    last_change: Instant,
    /// The longest hold that the upstream can ask for.
    max_hold: Duration,
}

/// How many requests of a key wait, and how many are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) waiting: usize,
    pub(super) in_flight: usize,
}

/// What a pace knew at a moment.
#[derive(Debug)]
pub(super) struct SavedPace {
    state: Vec<u8>,
    pub(super) at: Instant,
}

impl PaceState {
    pub(super) fn new(pace: Box<dyn Pace>, max_hold: Duration, now: Instant) -> Self {
        PaceState {
            pace,
            last_sent: None,
            answered: false,
            refused: false,
            held_until: None,
            waits_until: None,
            releases: 0,
            last_change: now,
            max_hold,
        }
    }

    /// Returns from when the first waiter may leave; `None` means at once.
    pub(super) fn slot(&self, load: Load) -> Option<Instant> {
        // A pace computes its slot from what happened, not from the current time.
        self.slot_after(load, self.last_change)
    }

    /// Returns the slot of the first waiter, if the state changes last at `last_change`.
    pub(super) fn slot_after(&self, load: Load, last_change: Instant) -> Option<Instant> {
        let traffic = self.traffic(load, last_change);
        let slot = self.probe_ends_at(load).max(self.pace.slot(&traffic));
        slot.max(self.held_until).max(self.waits_until)
    }

    /// Returns until when requests wait for the response to the first one, if they do.
    pub(super) fn probe_ends_at(&self, load: Load) -> Option<Instant> {
        let last = self.last_sent?;
        let is_probing = load.in_flight > 0 && !self.answered && self.pace.is_careful();
        is_probing.then(|| clock::after(last, PROBE_TIMEOUT))
    }

    /// Returns the time between two requests, without holds.
    pub(super) fn interval(&self, load: Load) -> Duration {
        let slot = self.pace.slot(&self.traffic(load, self.last_change));
        slot.zip(self.last_sent)
            .map_or(Duration::ZERO, |(slot, last)| {
                slot.saturating_duration_since(last)
            })
    }

    /// Returns whether another request could leave at once after one that leaves now, with
    /// `in_flight` requests in flight.
    pub(super) fn is_open(&self, in_flight: usize, now: Instant) -> bool {
        let traffic = Traffic {
            now,
            waiting: 0,
            in_flight,
            last_sent: Some(now),
        };
        let slot = self.pace.slot(&traffic).max(self.held_until);
        self.answered && !self.refused && slot.is_none_or(|slot| slot <= now)
    }

    /// Notes that a request has arrived. Returns how long it sleeps before it joins the queue.
    pub(super) fn arrived(
        &mut self,
        load: Load,
        call: &mut CallState,
        dice: &mut Dice,
        now: Instant,
    ) -> Duration {
        self.last_change = now;
        let traffic = self.traffic(load, now);
        self.pace.arrived(call, &traffic, dice)
    }

    /// Notes that a request leaves. `load` is the load just before.
    pub(super) fn sent(&mut self, load: Load, now: Instant) {
        let traffic = self.traffic(load, now);
        self.pace.sent(&traffic);
        self.last_sent = Some(now);
        self.last_change = now;
        self.refused = false;
    }

    /// Notes the answer to a request that `load` no longer counts. If it is a refusal, returns how
    /// long the request sleeps before it goes back to its place.
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
        if signal.refusal().is_none() {
            self.pace.passed(&mut reply, &traffic, dice);
            return None;
        }
        self.refused = true;
        let traffic = Traffic {
            waiting: traffic.waiting + 1,
            ..traffic
        };
        let Pause { all, call } = self.pace.refused(&mut reply, &traffic, dice);
        let hold = self.hold_after_refusal(all, signal);
        if !hold.is_zero() {
            self.hold_until(clock::after(now, hold));
        }
        Some(call)
    }

    /// Returns how long a refusal holds the key: the `pause` that the pace wants, and no less than
    /// the refusal asks for, up to `max_hold`. The pause may be the time to the reset of a used-up quota,
    /// which is cut in the same way.
    fn hold_after_refusal(&self, pause: Duration, signal: &Signal) -> Duration {
        if !self.pace.is_careful() {
            return pause;
        }
        let pause = pause.max(wait_said(signal).unwrap_or_default());
        let used_up = signal.quotas().iter().filter(|quota| quota.is_used_up());
        let reset = used_up.filter_map(ObservedQuota::reset_after).max();
        let stated = signal.retry_after().max(reset).unwrap_or_default();
        match stated > self.max_hold {
            // The pace may have added to what was stated. Only that part exceeds `max_hold`.
            true => pause.min(pause.saturating_sub(stated) + self.max_hold),
            false => pause,
        }
    }

    /// Slows down to the part of this process in the pace, because the `processes` that shared the
    /// pace no longer know of each other. A random offset spreads their requests over the interval.
    pub(super) fn divide(&mut self, processes: u32, dice: &mut Dice, now: Instant) {
        self.pace.divide(processes);
        let traffic = self.traffic(
            Load {
                waiting: 1,
                in_flight: 0,
            },
            now,
        );
        if let (Some(slot), Some(last)) = (self.pace.slot(&traffic), self.last_sent) {
            let part = slot.saturating_duration_since(last).mul_f64(dice.roll());
            self.last_sent = Some(clock::before(last, part));
            let held_until = self.held_until.filter(|until| *until > now);
            self.waits_until = held_until.map(|until| clock::after(until, part));
        }
    }

    /// Holds the key until `until`. A hold can only be extended.
    pub(super) fn hold_until(&mut self, until: Instant) {
        self.held_until = self.held_until.max(Some(until));
    }

    /// Lets the hold end earlier by `span`.
    pub(super) fn hold_is_shorter(&mut self, span: Duration) {
        for until in [&mut self.held_until, &mut self.waits_until] {
            *until = until.and_then(|until| until.checked_sub(span));
        }
    }

    pub(super) fn release(&mut self) {
        self.held_until = None;
        self.waits_until = None;
        self.releases = self.releases.saturating_add(1);
    }

    /// Writes or reads all of the state that processes share. Returns whether the pace can be
    /// shared.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) -> bool {
        codec.near(&mut self.last_sent, Duration::ZERO);
        codec.flag(&mut self.answered);
        codec.flag(&mut self.refused);
        codec.near(&mut self.held_until, LONGEST_HOLD);
        codec.small_count(&mut self.releases);
        self.pace.share(codec)
    }

    /// Saves the state that processes share, for [`restore`](Self::restore).
    pub(super) fn save(&mut self, now: Instant) -> SavedPace {
        let state = StateCodec::write(now, |codec| _ = self.share(codec));
        SavedPace { state, at: now }
    }

    /// Returns to the state that [`save`](Self::save) returned.
    pub(super) fn restore(&mut self, saved: &SavedPace) {
        self.waits_until = None;
        StateCodec::read(&saved.state, saved.at, |codec| _ = self.share(codec));
    }

    /// Saves the state of a pace that processes do not share, for [`forget_since`](Self::forget_since). Returns `None` if the
    /// pace cannot be shared: then it cannot be saved either.
    pub(super) fn remember(&mut self, now: Instant) -> Option<SavedPace> {
        let mut is_whole = false;
        let state = StateCodec::save(now, |codec| is_whole = self.share(codec));
        is_whole.then_some(SavedPace { state, at: now })
    }

    /// Returns to the state that [`remember`](Self::remember) returned, but for when the last request left.
    pub(super) fn forget_since(&mut self, saved: &SavedPace) {
        let last_sent = self.last_sent;
        StateCodec::restore(&saved.state, saved.at, |codec| _ = self.share(codec));
        self.last_sent = self.last_sent.max(last_sent);
    }

    /// Returns the kind of the register for this pace: the size of its written state. Returns
    /// `None` if the pace cannot be shared.
    pub(super) fn kind(&mut self) -> Option<u64> {
        let mut is_shared = false;
        let written = StateCodec::write(self.last_change, |codec| is_shared = self.share(codec));
        let is_read = StateCodec::read(&written, self.last_change, |codec| _ = self.share(codec));
        (is_shared && is_read).then_some(written.len() as u64)
    }

    fn traffic(&self, load: Load, now: Instant) -> Traffic {
        Traffic {
            now,
            waiting: load.waiting,
            in_flight: load.in_flight,
            last_sent: self.last_sent,
        }
    }
}
