//! What a request waits for: a slot, which may be a probe's, and why it gets none.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

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

/// Why an attempt to get a slot, or an in-flight slot, brought none.
///
/// The state of a key returns it when a request enters, and keeps it for a waiter until the
/// waiter's future is polled. The caller's error is made of it at the end of the request: `request/stopped.rs`.
#[derive(Clone, Debug)]
pub(super) enum NoSlot {
    /// The wait would be too long, or was. The end of the request finds the reason.
    TooLate(Refusal),
    /// This process refuses the request, whatever slots there are.
    Refused(Reason, Refusal),
    /// The store failed.
    Failed(StoreError),
    /// The store failed, and the request may leave uncounted, as this probe if it is one.
    Uncounted(StoreError, Option<ProbeNumber>),
}

impl NoSlot {
    /// The request is refused, and it is not known when it could leave.
    pub(super) const NEVER: NoSlot = NoSlot::TooLate(Refusal::NEVER);

    /// The request is refused, because it would have to wait for `span`.
    pub(super) fn for_span(span: Duration) -> Self {
        NoSlot::TooLate(Refusal::for_span(span))
    }

    /// The request is refused, because `max_queue` requests wait already.
    pub(super) fn queue_full(max_queue: usize) -> Self {
        NoSlot::Refused(Reason::QueueFull(max_queue), Refusal::NEVER)
    }

    /// Ends a request because of this part.
    pub(super) fn for_part(self, part: usize) -> Stopped {
        Stopped {
            part,
            no_slot: self,
        }
    }
}

/// The end of a request that gets no permit.
#[derive(Clone, Debug)]
pub(super) struct Stopped {
    /// The part that stops it.
    pub(super) part: usize,
    pub(super) no_slot: NoSlot,
}
