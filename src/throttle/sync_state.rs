//! The state of the connection to a register: the compare-and-set under way, and outages of the
//! store.
//!
//! The module [`sharing`](super::sharing) draws the states.

use std::time::{Duration, Instant};

use super::peers::{Peer, Peers};
use crate::clock;
use crate::error::StoreError;
use crate::rng::Backoff;
use crate::store::Recipients;

/// The pause after the first failed attempt to reach the store, and the longest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(3200);

/// What this process does with the register. The module [`sharing`](super::sharing) explains it.
#[derive(Debug)]
pub(super) enum SyncState {
    /// The store is reachable, and nothing is under way.
    Idle {
        /// This process writes nothing before this moment, because other processes were faster too
        /// often.
        rests_until: Option<Instant>,
    },
    /// A compare-and-set is under way.
    Asking(PendingCas),
    /// The store did not answer, and is asked again after a pause.
    Away {
        outage: Outage,
        rests_until: Instant,
    },
    /// The store did not answer, and is being asked again.
    Probing { outage: Outage, cas: PendingCas },
}

/// A time in which the store does not answer.
#[derive(Debug)]
pub(super) struct Outage {
    backoff: Backoff,
    /// The pace state that the processes shared before the outage.
    pub(super) before: Vec<u8>,
    pub(super) began: Instant,
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

impl Default for SyncState {
    fn default() -> Self {
        SyncState::Idle { rests_until: None }
    }
}

impl SyncState {
    /// Returns whether the store does not answer.
    pub(super) fn is_away(&self) -> bool {
        matches!(self, SyncState::Away { .. } | SyncState::Probing { .. })
    }

    /// Returns the compare-and-set under way.
    pub(super) fn pending(&self) -> Option<&PendingCas> {
        match self {
            SyncState::Asking(cas) | SyncState::Probing { cas, .. } => Some(cas),
            SyncState::Idle { .. } | SyncState::Away { .. } => None,
        }
    }

    /// Notes that a compare-and-set is sent.
    pub(super) fn begin(&mut self, cas: PendingCas) {
        *self = match std::mem::take(self) {
            SyncState::Idle { .. } | SyncState::Asking(_) => SyncState::Asking(cas),
            SyncState::Away { outage, .. } | SyncState::Probing { outage, .. } => {
                SyncState::Probing { outage, cas }
            }
        };
    }

    /// Ends the compare-and-set under way, if there is one, and returns it with the outage that it
    /// probes. The state is idle until the caller notes a failure.
    pub(super) fn end(&mut self) -> Option<(PendingCas, Option<Outage>)> {
        match std::mem::take(self) {
            SyncState::Asking(cas) => Some((cas, None)),
            SyncState::Probing { outage, cas } => Some((cas, Some(outage))),
            state @ (SyncState::Idle { .. } | SyncState::Away { .. }) => {
                *self = state;
                None
            }
        }
    }

    /// Notes another failure of `outage`, and when to ask the store again.
    pub(super) fn fail(&mut self, mut outage: Outage, now: Instant) {
        let rests_until = clock::after(now, outage.backoff.pause());
        *self = SyncState::Away {
            outage,
            rests_until,
        };
    }

    /// Notes that this process writes nothing for `span`.
    pub(super) fn rest(&mut self, now: Instant, span: Duration) {
        *self = SyncState::Idle {
            rests_until: Some(clock::after(now, span)),
        };
    }
}

impl Outage {
    /// Begins an outage in which no request has failed yet. `before` is the pace state that the
    /// processes share.
    pub(super) fn new(before: Vec<u8>, now: Instant) -> Self {
        Outage {
            backoff: Backoff::between(SHORTEST_PAUSE, LONGEST_PAUSE),
            before,
            began: now,
        }
    }
}
