//! The processes that share a line, as the register tells of them.

use std::time::{Duration, Instant};

use crate::pace::Notes;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) id: u64,
    /// Where it is told of changes.
    pub(super) address: u64,
    pub(super) in_flight: u32,
    /// How many wait there.
    pub(super) waits: u32,
    /// Since when the first of them does.
    pub(super) since: Option<Instant>,
    /// When it said so.
    pub(super) seen: Instant,
}

/// All but this one.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    pub(super) others: Vec<Peer>,
    /// Who was first of all when the register was written, and since when.
    first: u64,
    first_since: Option<Instant>,
}

/// What a process has on its way counts for so long after it last said anything.
const LONGEST_FLIGHT: Duration = Duration::from_secs(60);

/// Who is first and does not take its turn for so long waits no more, though nobody wants to pass it.
const LONGEST_TURN: Duration = Duration::from_secs(5);

/// More is not read.
const MOST: u64 = 100_000;

impl Peer {
    pub(super) fn is_waiting(&self) -> bool {
        self.waits > 0
    }

    pub(super) fn is_active(&self) -> bool {
        self.waits > 0 || self.in_flight > 0
    }

    fn place(&self) -> (Option<Instant>, u64) {
        (self.since, self.id)
    }

    fn share(&mut self, notes: &mut Notes<'_>) {
        notes.count(&mut self.id);
        notes.count(&mut self.address);
        notes.small(&mut self.in_flight);
        notes.small(&mut self.waits);
        notes.near(&mut self.since, Duration::ZERO);
        let mut seen = Some(self.seen);
        notes.near(&mut seen, Duration::ZERO);
        self.seen = seen.unwrap_or(self.seen);
        if self.since.is_none() {
            self.waits = 0;
        }
    }
}

impl Peers {
    /// Those who are before one that waits since then.
    pub(super) fn before(&self, since: Instant, id: u64) -> impl Iterator<Item = &Peer> {
        self.others.iter().filter(move |other| other.is_waiting() && other.place() < (Some(since), id))
    }

    /// From when the first of all might have left, where the line has this slot.
    pub(super) fn turn_from(&self, slot: Option<Instant>) -> Option<Instant> {
        slot.max(self.first_since)
    }

    /// Those before one that waits since then wait no more.
    pub(super) fn pass_over(&mut self, since: Instant, id: u64) {
        for other in &mut self.others {
            if other.is_waiting() && other.place() < (Some(since), id) {
                (other.waits, other.since) = (0, None);
            }
        }
    }

    /// Forgets those who are of no more use, and answers who is first of all, `me` included. The line had this slot.
    pub(super) fn settle(&mut self, me: &Peer, slot: Option<Instant>, now: Instant) -> Option<Peer> {
        let is_over = |from: Instant| now.saturating_duration_since(from) >= LONGEST_TURN;
        let gone = self.turn_from(slot).filter(|from| is_over(*from)).map(|_| self.first);
        for other in self.others.iter_mut().filter(|other| Some(other.id) == gone) {
            (other.waits, other.since) = (0, None);
        }
        self.others.retain(|other| {
            let is_recent = now.saturating_duration_since(other.seen) < LONGEST_FLIGHT;
            other.is_waiting() || other.in_flight > 0 && is_recent
        });
        let waiting = self.others.iter().chain([me]).filter(|peer| peer.is_waiting());
        let first = waiting.min_by_key(|peer| peer.place()).copied();
        let id = first.map_or(0, |first| first.id);
        if id != self.first || self.first_since.is_none() {
            (self.first, self.first_since) = (id, Some(now));
        }
        first
    }

    /// All of them, to be written or read. Written, `me` is one of them.
    pub(super) fn share(&mut self, me: &Peer, notes: &mut Notes<'_>) {
        notes.count(&mut self.first);
        notes.near(&mut self.first_since, Duration::ZERO);
        self.others.extend(Some(*me).filter(Peer::is_active));
        let mut count = self.others.len() as u64;
        notes.count(&mut count);
        self.others.resize(count.min(MOST) as usize, *me);
        self.others.iter_mut().for_each(|peer| peer.share(notes));
    }

    /// Takes one out.
    pub(super) fn take(&mut self, id: u64) -> Option<Peer> {
        let index = self.others.iter().position(|other| other.id == id)?;
        Some(self.others.swap_remove(index))
    }
}
