//! The processes that share the pace of a key, as its register lists them.

use std::time::{Duration, Instant};

use crate::pacing::StateCodec;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) id: u64,
    /// The store address at which the process is notified.
    pub(super) address: u64,
    /// Requests sent and not yet answered.
    pub(super) in_flight: u32,
    /// Requests that wait for their turn.
    pub(super) waiting: u32,
    /// When the first of them arrived.
    pub(super) since: Option<Instant>,
    /// When the process wrote this entry.
    pub(super) seen: Instant,
}

/// All processes but this one.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers {
    pub(super) others: Vec<Peer>,
    /// The process whose turn was next when the register was written, and since when it was next.
    first: u64,
    first_since: Option<Instant>,
}

/// How long the requests in flight of a process count after it last wrote its entry.
const LONGEST_FLIGHT: Duration = Duration::from_secs(60);

/// How long a process may leave its turn unused before it counts as not waiting, even if no other
/// process wants the turn.
const LONGEST_TURN: Duration = Duration::from_secs(5);

/// The most processes that are read from a register.
const MOST_PEERS: u64 = 100_000;

impl Peer {
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    pub(super) fn is_active(&self) -> bool {
        self.waiting > 0 || self.in_flight > 0
    }

    /// Returns the position of its first waiter in the order of turns: by arrival, then by id.
    fn place(&self) -> (Option<Instant>, u64) {
        (self.since, self.id)
    }

    fn stop_waiting(&mut self) {
        self.waiting = 0;
        self.since = None;
    }

    fn share(&mut self, codec: &mut StateCodec<'_>) {
        codec.count(&mut self.id);
        codec.count(&mut self.address);
        codec.small_count(&mut self.in_flight);
        codec.small_count(&mut self.waiting);
        codec.near(&mut self.since, Duration::ZERO);
        let mut seen = Some(self.seen);
        codec.near(&mut seen, Duration::ZERO);
        self.seen = seen.unwrap_or(self.seen);
        if self.since.is_none() {
            self.waiting = 0;
        }
    }
}

impl Peers {
    /// Returns the processes whose turn comes before that of a waiter of process `id` that arrived
    /// at `since`.
    pub(super) fn before(&self, since: Instant, id: u64) -> impl Iterator<Item = &Peer> {
        self.others
            .iter()
            .filter(move |other| other.is_waiting() && other.place() < (Some(since), id))
    }

    /// Returns from when the first waiter of all processes could have left. `slot` is the slot of
    /// the queue.
    pub(super) fn turn_from(&self, slot: Option<Instant>) -> Option<Instant> {
        slot.max(self.first_since)
    }

    /// Notes that the processes before a waiter of process `id` that arrived at `since` did not
    /// take their turn, and no longer wait.
    pub(super) fn pass_over(&mut self, since: Instant, id: u64) {
        for other in &mut self.others {
            if other.is_waiting() && other.place() < (Some(since), id) {
                other.stop_waiting();
            }
        }
    }

    /// Forgets the processes that no longer count. Returns the process whose turn is next, which
    /// may be `me`. `slot` is the slot of the queue.
    pub(super) fn settle(
        &mut self,
        me: &Peer,
        slot: Option<Instant>,
        now: Instant,
    ) -> Option<Peer> {
        // The process whose turn it was has left it unused for so long that it may have ended.
        let turn_from = self.turn_from(slot);
        if turn_from.is_some_and(|from| now.saturating_duration_since(from) >= LONGEST_TURN) {
            let late = self.others.iter_mut();
            let late = late.filter(|other| other.id == self.first);
            late.for_each(Peer::stop_waiting);
        }
        self.others.retain(|other| {
            let is_recent = now.saturating_duration_since(other.seen) < LONGEST_FLIGHT;
            other.is_waiting() || other.in_flight > 0 && is_recent
        });
        let waiting = self
            .others
            .iter()
            .chain([me])
            .filter(|peer| peer.is_waiting());
        let first = waiting.min_by_key(|peer| peer.place()).copied();
        let id = first.map_or(0, |first| first.id);
        if id != self.first || self.first_since.is_none() {
            self.first = id;
            self.first_since = Some(now);
        }
        first
    }

    /// Writes or reads all entries. If they are written, `me` becomes one of them.
    pub(super) fn share(&mut self, me: &Peer, codec: &mut StateCodec<'_>) {
        codec.count(&mut self.first);
        codec.near(&mut self.first_since, Duration::ZERO);
        self.others.extend(Some(*me).filter(Peer::is_active));
        let mut count = self.others.len() as u64;
        codec.count(&mut count);
        self.others.resize(count.min(MOST_PEERS) as usize, *me);
        self.others.iter_mut().for_each(|peer| peer.share(codec));
    }

    pub(super) fn take(&mut self, id: u64) -> Option<Peer> {
        let index = self.others.iter().position(|other| other.id == id)?;
        Some(self.others.swap_remove(index))
    }
}
