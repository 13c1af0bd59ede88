//! What a request gets in its line: a slot of each of its keys.

use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use super::holds::Probe;
use super::part::Costs;
use super::reservation::Reservation;
use crate::error::StoreError;

/// The slots of a request, which have a moment in common.
#[derive(Debug)]
pub(super) struct Slots {
    /// What they were booked for: any request of the set with these costs can use them. The queue of a key does
    /// not read it.
    pub(super) costs: Costs,
    /// The slots by part. `None` for a part that needs none, or that passes uncounted because its
    /// store failed.
    pub(super) slots: SmallVec<[Option<Reservation>; 1]>,
    /// How often the limits of each part had changed when its slot was booked. Empty if they go back.
    pub(super) changes: Costs,
    /// The moment from which all of them may be used.
    pub(super) at: Instant,
    /// The moment from which one of them may no longer be used. `None` if there are none.
    pub(super) until: Option<Instant>,
    /// The part that allows the request last.
    pub(super) last: usize,
    /// Whether the request that takes it has waited for nothing but the answers of stores.
    pub(super) is_at_once: bool,
    /// Why a part passes uncounted.
    pub(super) uncounted: Option<(usize, StoreError)>,
    /// The probe that a request without a slot leaves as. With a slot, the slot has it.
    pub(super) probe: Option<Probe>,
}

impl Slots {
    /// What a request has that needs no slot.
    pub(super) fn none(now: Instant) -> Self {
        Slots {
            costs: Costs::new(),
            slots: smallvec![None],
            changes: Costs::new(),
            at: now,
            until: None,
            last: 0,
            is_at_once: false,
            uncounted: None,
            probe: None,
        }
    }

    /// The slot of a request with one key.
    pub(super) fn of_one(slot: Reservation) -> Self {
        Slots {
            slots: smallvec![Some(slot)],
            until: Some(slot.until),
            is_at_once: slot.is_at_once,
            ..Slots::none(slot.at)
        }
    }

    pub(super) fn is_expired(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}
