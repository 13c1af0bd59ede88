//! What happened at one process and is not in the register of a key yet.

use std::time::Instant;

use super::pace_state::{Load, PaceState};
use crate::error::StoreError;
use crate::pacing::{CallState, Dice, Reply};
use crate::signal::Signal;

/// An event at this process that the other processes have to know.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "half of the events are answers")]
pub(super) enum FleetEvent {
    Sent(Instant),
    Answered {
        signal: Signal,
        sent: Instant,
        at: Instant,
        /// How many releases this process knew of; `None` if it had not read the register.
        releases: Option<u32>,
    },
    Hold {
        until: Instant,
        /// How many releases this process knew of; `None` if it had not read the register.
        releases: Option<u32>,
    },
    Released,
}

/// The events of this process that are not in the register, in order.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    events: Vec<FleetEvent>,
    /// Since when the register lacks anything: an event, or the number of requests in flight.
    pub(super) unwritten_since: Option<Instant>,
    /// How many events there have been.
    count: u64,
    /// The error that began the last outage of the store.
    last_error: Option<StoreError>,
    /// How many outages there have been.
    outages: u64,
}

/// A point in the sequence of events. [`EventLog::is_written`] returns whether the register has all
/// events before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogMark {
    count: u64,
    outages: u64,
}

impl FleetEvent {
    /// Returns whether the event may begin or end a hold.
    fn holds(&self) -> bool {
        match self {
            FleetEvent::Hold { .. } | FleetEvent::Released => true,
            FleetEvent::Answered { signal, .. } => signal.refusal().is_some(),
            FleetEvent::Sent(_) => false,
        }
    }

    fn is_release(&self) -> bool {
        matches!(self, FleetEvent::Released)
    }
}

impl EventLog {
    /// Returns how many events are not in the register.
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// Returns whether any event may begin or end a hold.
    pub(super) fn has_hold(&self) -> bool {
        self.events.iter().any(FleetEvent::holds)
    }

    /// Returns whether any event ends a hold.
    pub(super) fn has_release(&self) -> bool {
        self.events.iter().any(FleetEvent::is_release)
    }

    pub(super) fn push(&mut self, event: FleetEvent) {
        self.events.push(event);
        self.count += 1;
    }

    /// Notes that the register lacks something.
    pub(super) fn touch(&mut self, now: Instant) {
        self.unwritten_since.get_or_insert(now);
    }

    /// Notes that the register has the first `count` events.
    pub(super) fn written(&mut self, count: usize) {
        self.events.drain(..count.min(self.events.len()));
    }

    /// Begins an outage of the store. Only releases are kept: the other events are out of date by
    /// the time the store is back.
    pub(super) fn begin_outage(&mut self, error: StoreError) {
        self.outages += 1;
        self.last_error = Some(error);
        self.events.retain(FleetEvent::is_release);
    }

    /// Returns the current point in the sequence of events.
    pub(super) fn mark(&self) -> LogMark {
        LogMark {
            count: self.count,
            outages: self.outages,
        }
    }

    /// Returns whether the register has all events before `mark`. Fails if the store is unreachable
    /// (`is_away`), or was at any time since.
    pub(super) fn is_written(&self, mark: LogMark, is_away: bool) -> Result<bool, StoreError> {
        if is_away || self.outages != mark.outages {
            return Err(self.last_error.clone().unwrap_or(StoreError::Lost));
        }
        Ok(self.count - self.events.len() as u64 >= mark.count)
    }

    /// Applies the events to a pace state that was read from the register.
    ///
    /// A hold that this process saw before another process released it is not restored.
    pub(super) fn replay(&self, pace_state: &mut PaceState, load: Load, dice: &mut Dice) {
        let releases_read = pace_state.releases;
        let is_released =
            |releases: Option<u32>| releases.is_some_and(|releases| releases < releases_read);
        let mut released_here = false;
        for event in &self.events {
            match event {
                FleetEvent::Sent(at) => {
                    let last_sent = pace_state.last_sent;
                    pace_state.sent(load, *at);
                    pace_state.last_sent = last_sent.max(Some(*at));
                }
                FleetEvent::Answered {
                    signal,
                    sent,
                    at,
                    releases,
                } => {
                    let mut call = CallState::default();
                    let held_until = pace_state.held_until;
                    let reply = Reply::new(signal, *sent, &mut call);
                    pace_state.answered(load, reply, dice, *at);
                    if !released_here && is_released(*releases) {
                        pace_state.held_until = held_until;
                    }
                }
                FleetEvent::Hold { until, releases } => {
                    if released_here || !is_released(*releases) {
                        pace_state.hold_until(*until);
                    }
                }
                FleetEvent::Released => {
                    pace_state.release();
                    released_here = true;
                }
            }
        }
    }
}
