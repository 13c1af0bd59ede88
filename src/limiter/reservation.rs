//! What one waits for: a slot, how long, and how the wait ends.

use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{Reason, StoreError};
use crate::limit::Unused;
use crate::store::Refusal;

/// Permits of one slot, as this process may use them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// The first moment.
    pub(super) at: Instant,
    /// From this moment no more.
    pub(super) until: Instant,
    /// The units of each permit.
    pub(super) cost: u32,
    /// How many permits.
    pub(super) count: u32,
    /// Slot and stamp in the store's time.
    pub(super) slot: u64,
    pub(super) stamp: u64,
    /// Which life of the store's state granted them.
    pub(super) incarnation: u64,
}

impl Slot {
    pub(super) fn unused(&self) -> Unused {
        let &Slot { cost, count, slot, stamp, incarnation, .. } = self;
        Unused { slot, stamp, units: u64::from(cost) * u64::from(count), incarnation }
    }
}

/// How long one waits, and which bound that is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) latest: Instant,
    pub(super) by_deadline: bool,
    /// Whether it cannot wait at all.
    pub(super) is_none: bool,
}

impl Patience {
    pub(super) fn new(deadline: Option<Instant>, now: Instant, max_wait: Duration) -> Self {
        let (latest, is_none) = (clock::after(now, max_wait), max_wait.is_zero());
        match deadline {
            Some(deadline) if deadline < latest => Patience { latest: deadline, by_deadline: true, is_none },
            _ => Patience { latest, by_deadline: false, is_none },
        }
    }

    pub(super) fn reason(&self, max_wait: Duration) -> Reason {
        if self.by_deadline { Reason::Deadline } else { Reason::MaxWait(max_wait) }
    }
}

/// How an attempt to get a `T` ended: a slot, or a place among the calls in flight.
///
/// This is what the state of a key returns, and what it keeps for a waiter until the waiter's future is polled. What does
/// not fit here because it spans several keys and both kinds of limits is an `Admission`.
#[derive(Clone, Debug)]
pub(super) enum Settled<T = Slot> {
    Granted(T),
    /// The wait would be too long, or was.
    Refused(Refusal),
    /// Too many requests wait already.
    QueueFull,
    /// The store failed.
    Failed(StoreError),
}
