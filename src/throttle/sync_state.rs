//! The state of the connection to a register: the compare-and-set under way, outages of the store, and
//! *conflicts*, in which another process has written the register first.
//!
//! The module [`sharing`](super::sharing) draws the states.

use std::time::{Duration, Instant};

use super::pace_state::SavedPace;
use super::peers::{Peer, Peers};
use crate::clock;
use crate::error::StoreError;
use crate::rng::{Backoff, Dice};
use crate::store::Recipients;

/// The pause after the first failed attempt to reach the store, and the longest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(3200);

/// After how many conflicts in a row a process rests. Each further rest is up to four times as
/// long, but after `MOST_RESTS` rests they no longer grow. So a thousand processes that begin
/// together soon have no more conflicts.
const CONFLICTS_PER_REST: u32 = 4;
const MOST_RESTS: u32 = 4;

/// What this process does with the register. The module [`sharing`](super::sharing) explains it.
#[derive(Debug, Default)]
pub(super) struct SyncState {
    /// The compare-and-set under way.
    pub(super) pending: Option<PendingCas>,
    /// Present while the store does not answer.
    pub(super) outage: Option<Outage>,
    /// Until when the process writes nothing: other processes were faster too often, or the store does not answer.
    rests_until: Option<Instant>,
    /// How many attempts in a row to write have failed, because another process was faster.
    conflicts: u32,
}

/// A time in which the store does not answer.
#[derive(Debug)]
pub(super) struct Outage {
    backoff: Backoff,
    /// The pace state that the processes shared before the outage.
    pub(super) before: SavedPace,
}

/// A compare-and-set that the store has not answered.
#[derive(Debug)]
pub(super) struct PendingCas {
    pub(super) sent: Instant,
    /// How many of the unwritten events it writes.
    pub(super) events: usize,
    /// How many requests may leave once it is written.
    pub(super) grants: usize,
    /// This process as the register lists it once it is written.
    pub(super) me: Peer,
    /// When the request arrived that is this process's first waiter once it is written.
    pub(super) first: Option<Instant>,
    /// The other processes once it is written.
    pub(super) peers: Peers,
    /// Whether it writes. Otherwise it only reads.
    pub(super) writes: bool,
}

/// A compare-and-set to send: writes `value` if the register's version is `seen`. Without a value
/// it only reads.
#[derive(Debug)]
pub(super) struct CasRequest {
    pub(super) seen: u64,
    pub(super) value: Option<Vec<u8>>,
    /// The processes to notify.
    pub(super) tell: Recipients,
}

/// How the store's reachability has changed.
#[derive(Debug)]
pub(super) enum StoreChange {
    Away(StoreError),
    Back,
}

impl SyncState {
    /// Ends the compare-and-set under way, if there is one, and returns it with the outage that it
    /// probes. The store counts as reachable until the caller notes a failure.
    pub(super) fn end(&mut self) -> Option<(PendingCas, Option<Outage>)> {
        let cas = self.pending.take()?;
        self.rests_until = None;
        Some((cas, self.outage.take()))
    }

    /// Notes another failure of `outage`, and when to ask the store again.
    pub(super) fn fail(&mut self, mut outage: Outage, now: Instant) {
        self.rests_until = Some(clock::after(now, outage.backoff.pause()));
        self.outage = Some(outage);
    }

    /// Returns `at`, or the end of the rest if that is later.
    pub(super) fn after_rest(&self, at: Instant) -> Instant {
        self.rests_until.map_or(at, |until| at.max(until))
    }

    /// Ends the conflicts in a row, because the register was written.
    pub(super) fn written(&mut self) {
        self.conflicts = 0;
    }

    /// Counts a conflict: another process has written the register first. After every fourth one, the process rests, for
    /// `longest` at most.
    ///
    /// If it does not rest, the next attempt follows at once: it has the best chance, because this
    /// process has just read the latest version.
    pub(super) fn conflicted(
        &mut self,
        round_trip: Duration,
        longest: Duration,
        dice: &mut Dice,
        now: Instant,
    ) {
        self.conflicts += 1;
        if self.conflicts.is_multiple_of(CONFLICTS_PER_REST) {
            let times = 4_u32.pow((self.conflicts / CONFLICTS_PER_REST).min(MOST_RESTS));
            let most = round_trip.saturating_mul(times).min(longest);
            self.rests_until = Some(clock::after(now, most.mul_f64(dice.roll())));
        }
    }
}

impl Outage {
    /// Begins an outage in which no request has failed yet. `before` is the pace state that the
    /// processes share.
    pub(super) fn new(before: SavedPace) -> Self {
        Outage {
            backoff: Backoff::between(SHORTEST_PAUSE, LONGEST_PAUSE),
            before,
        }
    }
}
