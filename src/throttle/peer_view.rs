//! What one process knows of the register of a key, and what it has not written to it yet.

use std::time::{Duration, Instant};

use super::pace_state::Load;
use super::peers::{Peer, Peers};
use super::sync_state::SyncState;
use crate::error::StoreError;
use crate::signal::Signal;
use crate::store::Register;

/// What one process knows of the register of a key.
#[derive(Debug)]
pub(super) struct PeerView {
    /// This process as the register lists it.
    pub(super) me: Peer,
    /// When the request arrived that the register lists as this process's first waiter, by the clock of this process.
    /// `me.since` is the same moment as the other processes know it.
    pub(super) written_first: Option<Instant>,
    /// The other processes as the register lists them.
    pub(super) peers: Peers,
    /// The moment from which the register counts, by the clock of this process. A process keeps the origin that it found
    /// first: otherwise each change would move all moments by the uncertainty of one round trip.
    pub(super) origin: Option<Instant>,
    /// The last version of the register that this process has read or written.
    pub(super) version: Option<u64>,
    /// When the register had that version.
    pub(super) version_seen_at: Instant,
    /// The events of this process that are not in the register.
    pub(super) events: Vec<Event>,
    /// How many events there have been.
    pub(super) event_count: u64,
    /// Since when the register lacks anything.
    pub(super) unwritten_since: Option<Instant>,
    pub(super) sync: SyncState,
    /// How many requests may leave because the register has their departure.
    pub(super) granted: usize,
    /// How many attempts to write have failed, one after the other, because another process was faster.
    pub(super) conflicts: u32,
    /// The error that began the last outage of the store.
    pub(super) last_error: Option<StoreError>,
    /// How many outages there have been.
    pub(super) outages: u64,
    /// How long a compare-and-set takes.
    pub(super) round_trip: Duration,
    /// A register that was received while a compare-and-set was under way.
    pub(super) received: Option<Register>,
}

/// An event at this process that the other processes have to know.
#[derive(Debug)]
pub(super) enum Event {
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

impl Event {
    /// Reports whether the event may begin or end a hold.
    pub(super) fn holds(&self) -> bool {
        match self {
            Event::Hold { .. } | Event::Released => true,
            Event::Answered { signal, .. } => signal.refusal().is_some(),
            Event::Sent(_) => false,
        }
    }

    pub(super) fn is_release(&self) -> bool {
        matches!(self, Event::Released)
    }
}

/// A point in the sequence of events, for [`PeerView::is_written`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    event_count: u64,
    outages: u64,
}

/// How long the process whose turn is next may leave it unused before the next one takes it. The process after that
/// waits twice as long, up to `MOST_GRACES` times as long.
const GRACE: Duration = Duration::from_millis(250);
const MOST_GRACES: u32 = 8;

/// How far the origin of a register may seem to move because of a slow round trip.
const ORIGIN_TOLERANCE: Duration = Duration::from_millis(250);

impl PeerView {
    pub(super) fn new(id: u64, address: u64, now: Instant) -> Self {
        PeerView {
            me: Peer { id, address, in_flight: 0, waiting: 0, since: None, seen: now },
            written_first: None,
            peers: Peers::default(),
            origin: None,
            version: None,
            version_seen_at: now,
            events: Vec::new(),
            event_count: 0,
            unwritten_since: None,
            sync: SyncState::default(),
            granted: 0,
            conflicts: 0,
            last_error: None,
            outages: 0,
            round_trip: Duration::ZERO,
            received: None,
        }
    }

    /// Adds the load of the other processes to the load of this one, unless the store is unreachable.
    pub(super) fn with_others(&self, own: Load) -> Load {
        if self.sync.is_away() {
            return own;
        }
        let others = &self.peers.others;
        let count = |part: fn(&Peer) -> u32| others.iter().map(|other| part(other) as usize).sum::<usize>();
        Load {
            waiting: own.waiting + count(|other| other.waiting),
            in_flight: own.in_flight + count(|other| other.in_flight),
        }
    }

    /// Returns how many processes have requests that wait or are in flight, this process included.
    pub(super) fn process_count(&self) -> u32 {
        let others = self.peers.others.iter().filter(|other| other.is_active()).count();
        u32::try_from(others + 1).unwrap_or(u32::MAX)
    }

    /// Returns the arrival of a request of this process as the other processes know it.
    pub(super) fn place(&self, since: Instant) -> Instant {
        self.me.since.filter(|_| self.written_first == Some(since)).unwrap_or(since)
    }

    /// Returns the moment from which a register counts that was written at `written_at`.
    pub(super) fn origin_of(&mut self, value: &[u8], written_at: Instant) -> Instant {
        let first = value.first_chunk().map(|first| f64::from_le_bytes(*first));
        let since = first.and_then(|first| Duration::try_from_secs_f64(first).ok()).unwrap_or_default();
        let seen = written_at.checked_sub(since).unwrap_or(written_at);
        let distance = |known: Instant| seen.max(known) - seen.min(known);
        // A larger distance means another register, or a clock that was stepped or drifts.
        let known = self.origin.filter(|known| distance(*known) < ORIGIN_TOLERANCE);
        *self.origin.insert(known.unwrap_or(seen))
    }

    /// Adds an event to those that are not in the register.
    pub(super) fn push(&mut self, event: Event) {
        self.events.push(event);
        self.event_count += 1;
    }

    /// Notes that the register lacks something.
    pub(super) fn touch(&mut self, now: Instant) {
        self.unwritten_since.get_or_insert(now);
    }

    /// Returns the current point in the sequence of events.
    pub(super) fn mark(&self) -> Mark {
        Mark { event_count: self.event_count, outages: self.outages }
    }

    /// Reports whether the register has all events before `mark`. Fails if the store has been away since.
    pub(super) fn is_written(&self, mark: Mark) -> Result<bool, StoreError> {
        if self.sync.is_away() || self.outages != mark.outages {
            return Err(self.last_error.clone().unwrap_or(StoreError::Lost));
        }
        Ok(self.event_count - self.events.len() as u64 >= mark.event_count)
    }

    /// Returns how long `before` waiters may leave their turn unused until it passes to the next one.
    pub(super) fn grace(&self, before: usize) -> Duration {
        let times = u32::try_from(before).unwrap_or(u32::MAX).min(MOST_GRACES);
        GRACE.max(self.round_trip * 4) * times
    }

    /// Averages the length of a round trip. The first one may include the connect, and any may include a stall, so a
    /// shorter one weighs more.
    pub(super) fn measure(&mut self, round_trip: Duration) {
        self.round_trip = match round_trip < self.round_trip {
            true => (self.round_trip + round_trip) / 2,
            false => (self.round_trip * 7 + round_trip) / 8,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::pace::Notes;

    #[test]
    fn origin_stays_when_round_trips_are_slow() {
        let start = clock::now() + Duration::from_secs(7200);
        let mut view = PeerView::new(1, 1, start);
        let written =
            |millis: u32| Notes::write(start, |notes| notes.number(&mut (f64::from(millis) / 1000.0)));
        let at = |millis: u64| start + Duration::from_millis(millis);
        assert_eq!(view.origin_of(&written(5000), at(5003)), at(3));
        for (written_at, late) in [(6000, 40), (3_000_000, 0), (3_000_500, 200)] {
            assert_eq!(view.origin_of(&written(written_at), at(u64::from(written_at) + late)), at(3));
        }
        // Another process has created the register anew, with another origin.
        assert_eq!(view.origin_of(&written(1000), at(3_600_000)), at(3_599_000));
        assert_eq!(view.origin_of(&[], at(7_200_000)), at(7_200_000), "an empty register begins now");
    }
}
