//! What a request waits for: a slot, which may be a probe's, the bound on its wait, and how the wait ends.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{Reason, StoreError};
use crate::limit::UnusedPermits;
use crate::store::Refusal;

/// Permits of one slot, as this process may use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    /// The moment from which they may be used.
    pub(super) at: Instant,
    /// The moment from which they may no longer be used.
    pub(super) until: Instant,
    /// The units of each permit.
    pub(super) cost: u32,
    /// How many permits there are.
    pub(super) count: u32,
    /// The slot, in the store's time.
    pub(super) slot: u64,
    /// The moment from which used permits count, in the store's time.
    pub(super) stamp: u64,
    /// The incarnation of the store's state that granted them. A store that has lost its state
    /// begins a new one.
    pub(super) incarnation: u64,
    /// The number of the part that has lent them. `None` for permits of the own part.
    pub(super) lender: Option<u8>,
    /// The probe of the key, if the request that takes them leaves as it.
    pub(super) probe: Option<ProbeNumber>,
    /// Whether the request that takes them has waited for nothing but the store's answer.
    pub(super) is_at_once: bool,
}

impl Reservation {
    /// Returns what the store gets back if none of the permits was used.
    pub(super) fn unused(&self) -> UnusedPermits {
        UnusedPermits {
            slot: self.slot,
            stamp: self.stamp,
            units: u64::from(self.cost) * u64::from(self.count),
            incarnation: self.incarnation,
        }
    }
}

/// Identifies a probe among those of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProbeNumber(NonZeroU32);

impl ProbeNumber {
    pub(super) fn next() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let next = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        // After 2^32 probes nobody has the first one.
        ProbeNumber(NonZeroU32::new(next).unwrap_or(NonZeroU32::MIN))
    }
}

/// What is counted when a permit at hand is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CountedAs {
    /// A request that passes, and its units.
    Request,
    /// Units only. The request counts under another of its keys, or later.
    Units,
}

/// How long a request can wait for a slot, and whether its deadline or `max_wait` decides that.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitBound {
    /// The latest slot that the request can wait for.
    pub(super) latest: Instant,
    /// Whether the deadline of the request decides. Otherwise `max_wait` does.
    pub(super) by_deadline: bool,
    /// Whether `max_wait` is zero, so that no request waits for a slot.
    pub(super) is_none: bool,
    /// Whether no request waits because it is made inside of a call of the same limiter: see
    /// [`around`](super::around).
    pub(super) is_nested: bool,
}

impl WaitBound {
    /// Takes the earlier of a request's `deadline` and `max_wait` after `now`.
    pub(super) fn new(deadline: Option<Instant>, now: Instant, max_wait: Duration) -> Self {
        let longest = clock::after(now, max_wait);
        let deadline = deadline.filter(|deadline| *deadline < longest);
        WaitBound {
            latest: deadline.unwrap_or(longest),
            by_deadline: deadline.is_some(),
            is_none: max_wait.is_zero(),
            is_nested: false,
        }
    }

    /// Lets the request not wait at all if it `is_nested`.
    pub(super) fn nested_if(self, is_nested: bool, now: Instant) -> Self {
        if is_nested && self.latest > now {
            WaitBound {
                latest: now,
                by_deadline: false,
                is_none: true,
                is_nested: true,
            }
        } else {
            self
        }
    }

    /// Returns whether the request cannot wait for `span`.
    pub(super) fn is_too_long(&self, span: Duration, now: Instant) -> bool {
        clock::after(now, span) > self.latest
    }

    /// Returns the reason of a refusal because the slot would be too late.
    pub(super) fn reason(&self, max_wait: Duration) -> Reason {
        if self.is_nested {
            Reason::Nested
        } else if self.by_deadline {
            Reason::Deadline
        } else {
            Reason::MaxWait(max_wait)
        }
    }
}

/// How an attempt to get a `T` ended. `T` is a slot, or the number of an in-flight slot.
///
/// The state of a key returns it when a request enters, and keeps it for a waiter until the
/// waiter's future is polled.
#[derive(Clone, Debug)]
pub(super) enum Settled<T = Reservation> {
    Granted(T),
    /// The wait would be too long, or was.
    Refused(Refusal),
    /// Too many requests wait already.
    QueueFull,
    /// The store failed.
    Failed(StoreError),
    /// The store failed, and the request may leave uncounted, as this probe if it is one.
    Uncounted(StoreError, Option<ProbeNumber>),
}
