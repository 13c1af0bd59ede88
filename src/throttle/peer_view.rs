//! What one process knows of the others with whom it shares a line.

use std::time::{Duration, Instant};

use super::pace_state::Load;
use super::peers::{Peer, Peers};
use crate::clock;
use crate::error::StoreError;
use crate::signal::Signal;
use crate::store::{Register, Tell};

/// What one process knows of the others, and they may not know of it.
#[derive(Debug)]
pub(super) struct PeerView {
    /// What this process is to the others.
    pub(super) me: Peer,
    /// Since when the first waits whose place here they know. They count it by other clocks, and so does `me`: in what is
    /// shared all are seen by the same.
    pub(super) known: Option<Instant>,
    pub(super) peers: Peers,
    /// What its moments count from, by the clock of this process. Each process keeps to what it found first: else each
    /// change would move all moments by what is not known of a trip.
    pub(super) origin: Option<Instant>,
    /// The version of the register that is known.
    pub(super) version: Option<u64>,
    /// When it was known to be so.
    pub(super) known_at: Instant,
    /// What happened here and is not in the register.
    pub(super) events: Vec<Event>,
    /// How many events there have been.
    pub(super) pushed: u64,
    /// Since when anything is not in the register.
    pub(super) unwritten_since: Option<Instant>,
    pub(super) pending: Option<PendingCas>,
    /// Departures that are in the register and did not happen yet.
    pub(super) granted: usize,
    pub(super) conflicts: u32,
    pub(super) failures: u32,
    /// Why the store went away, and how many times it did.
    pub(super) last_error: Option<StoreError>,
    pub(super) outages: u64,
    /// The course when the store went away, and when that was, while it is away.
    pub(super) before_outage: Option<(Vec<u8>, Instant)>,
    /// No exchange before.
    pub(super) rests_until: Option<Instant>,
    /// How long an exchange takes.
    pub(super) round_trip: Duration,
    /// What was heard during an exchange.
    pub(super) received: Option<Register>,
}

/// What happened here.
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
    Held {
        until: Instant,
        /// How many releases this process knew of; `None` if it had not read the register.
        releases: Option<u32>,
    },
    Released,
}

impl Event {
    /// Whether it may hold all, or let all leave.
    pub(super) fn holds(&self) -> bool {
        match self {
            Event::Held { .. } | Event::Released => true,
            Event::Answered { signal, .. } => signal.limited().is_some(),
            Event::Sent(_) => false,
        }
    }

    pub(super) fn is_release(&self) -> bool {
        matches!(self, Event::Released)
    }
}

/// What was pushed up to now, to be asked whether it is in the register.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pushed: u64,
    outages: u64,
}

/// A change that is on its way.
#[derive(Debug)]
pub(super) struct PendingCas {
    /// When it began.
    pub(super) asked: Instant,
    /// How many of the events are in it.
    pub(super) events: usize,
    pub(super) grants: usize,
    pub(super) me: Peer,
    pub(super) known: Option<Instant>,
    pub(super) peers: Peers,
    pub(super) writes: bool,
}

/// What a register is to hold, if it is as it was seen; or, without a value, that it is to be read.
#[derive(Debug)]
pub(super) struct CasRequest {
    pub(super) seen: u64,
    pub(super) value: Option<Vec<u8>>,
    pub(super) tell: Tell,
}

/// Who does not take its turn within it is passed over by the next; the one after that waits twice as long.
const GRACE: Duration = Duration::from_millis(250);
const MOST_GRACES: u32 = 8;

/// By so much may a moment seem to be another than it was known to be, in a trip that takes long.
const APART: Duration = Duration::from_millis(250);

impl PeerView {
    pub(super) fn new(id: u64, address: u64, now: Instant) -> Self {
        PeerView {
            me: Peer { id, address, in_flight: 0, waits: 0, since: None, seen: now },
            known: None,
            peers: Peers::default(),
            origin: None,
            version: None,
            known_at: now,
            events: Vec::new(),
            pushed: 0,
            unwritten_since: None,
            pending: None,
            granted: 0,
            conflicts: 0,
            failures: 0,
            last_error: None,
            outages: 0,
            before_outage: None,
            rests_until: None,
            round_trip: Duration::ZERO,
            received: None,
        }
    }

    /// Who waits and who is on the way in all, where `mine` do here.
    pub(super) fn with_others(&self, mine: Load) -> Load {
        if self.is_away() {
            return mine;
        }
        let others = &self.peers.others;
        let count = |part: fn(&Peer) -> u32| others.iter().map(|other| part(other) as usize).sum::<usize>();
        Load {
            waiting: mine.waiting + count(|other| other.waits),
            in_flight: mine.in_flight + count(|other| other.in_flight),
        }
    }

    pub(super) fn is_away(&self) -> bool {
        self.failures > 0
    }

    /// How many processes have anything waiting or on its way, this one included.
    pub(super) fn process_count(&self) -> u32 {
        let others = self.peers.others.iter().filter(|other| other.is_active()).count();
        u32::try_from(others + 1).unwrap_or(u32::MAX)
    }

    /// The place of one that waits here since then, as the others see it.
    pub(super) fn place(&self, since: Instant) -> Instant {
        self.me.since.filter(|_| self.known == Some(since)).unwrap_or(since)
    }

    /// What the moments of a register count from that was written at this moment.
    pub(super) fn origin_of(&mut self, value: &[u8], written_at: Instant) -> Instant {
        let first = value.first_chunk().map(|first| f64::from_le_bytes(*first));
        let since = first.and_then(|first| Duration::try_from_secs_f64(first).ok()).unwrap_or_default();
        let seen = written_at.checked_sub(since).unwrap_or(written_at);
        let apart = |known: Instant| seen.max(known) - seen.min(known);
        // Another register, or a clock that was stepped or drifts.
        let known = self.origin.filter(|known| apart(*known) < APART);
        *self.origin.insert(known.unwrap_or(seen))
    }

    pub(super) fn push(&mut self, event: Event) {
        self.events.push(event);
        self.pushed += 1;
    }

    pub(super) fn mark(&self) -> Mark {
        Mark { pushed: self.pushed, outages: self.outages }
    }

    /// Whether all that was pushed before `mark` is in the register; an error if the store has been away since.
    pub(super) fn is_written(&self, mark: Mark) -> Result<bool, StoreError> {
        if self.is_away() || self.outages != mark.outages {
            return Err(self.last_error.clone().unwrap_or(StoreError::Lost));
        }
        Ok(self.pushed - self.events.len() as u64 >= mark.pushed)
    }

    pub(super) fn touch(&mut self, now: Instant) {
        self.unwritten_since.get_or_insert(now);
    }

    /// How long each of so many before it may take for its turn.
    pub(super) fn grace(&self, before: usize) -> Duration {
        let times = u32::try_from(before).unwrap_or(u32::MAX).min(MOST_GRACES);
        GRACE.max(self.round_trip * 4) * times
    }

    pub(super) fn rest(&mut self, now: Instant, span: Duration) {
        self.rests_until = Some(clock::after(now, span));
    }
}

/// What became of the store.
#[derive(Debug)]
pub(super) enum StoreChange {
    Away(StoreError),
    Back,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pace::Notes;

    #[test]
    fn moments_stay_where_they_are_however_long_trips_take() {
        let start = clock::now() + Duration::from_secs(7200);
        let mut view = PeerView::new(1, 1, start);
        let written =
            |millis: u32| Notes::write(start, |notes| notes.number(&mut (f64::from(millis) / 1000.0)));
        let at = |millis: u64| start + Duration::from_millis(millis);
        assert_eq!(view.origin_of(&written(5000), at(5003)), at(3));
        for (written_at, late) in [(6000, 40), (3_000_000, 0), (3_000_500, 200)] {
            assert_eq!(view.origin_of(&written(written_at), at(u64::from(written_at) + late)), at(3));
        }
        // Made anew by another, whose moments count from another one.
        assert_eq!(view.origin_of(&written(1000), at(3_600_000)), at(3_599_000));
        assert_eq!(view.origin_of(&[], at(7_200_000)), at(7_200_000), "where there is none it begins now");
    }
}
