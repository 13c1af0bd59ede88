//! Returned slots: slots that were booked, and given back before they were due. They are kept for
//! the next caller.
//!
//! Their units stay in the limits, as if the slot were still booked. So the next caller gets such a
//! slot without arithmetic, and no slot is lost if many callers cancel.
//!
//! Only a hole is kept: a slot with others booked behind it, which the limits would not give again.
//! If nothing is booked behind a returned slot, its units leave the limits. A caller that comes
//! after a pause would otherwise wait for a slot of a queue that is gone.
//!
//! Twin: `find_returned`, `take_back`, `free_spare` and `drain` in `store/redis/lua/ledger.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::ops::RangeInclusive;

use super::algorithm::PermitTime;
use super::limit_set::LimitSet;
use super::{Booking, Micros, UnusedPermits};

#[derive(Clone, Debug, Default)]
pub(super) struct ReturnedSlots {
    /// The slots, sorted by slot and stamp.
    slots: Vec<UnusedPermits>,
}

/// The most returned slots that are kept for each key.
const MOST: usize = 32;

impl ReturnedSlots {
    /// Adds a slot. If there are then too many, removes the last slot and returns it.
    pub(super) fn put(&mut self, unused: UnusedPermits) -> Option<UnusedPermits> {
        let slots = &mut self.slots;
        let key = (unused.slot, unused.stamp);
        match slots.binary_search_by_key(&key, |other| (other.slot, other.stamp)) {
            Ok(index) => slots[index].units += unused.units,
            Err(index) => slots.insert(index, unused),
        }
        if slots.len() > MOST {
            slots.pop()
        } else {
            None
        }
    }

    /// Returns the index of the first slot, not before `from`, that has `units` and at least half of
    /// the life of `open`, and for how long its permits are valid.
    fn position(
        &self,
        limits: &LimitSet,
        from: Micros,
        units: u64,
        open: PermitTime,
    ) -> Option<(usize, Micros)> {
        let slots = self.slots.iter().enumerate();
        let mut fitting = slots.filter(|(_, slot)| slot.slot >= from && slot.units >= units);
        fitting.find_map(|(index, unused)| {
            // The slack of the caller that booked the slot may have been longer.
            let life = unused.stamp.checked_sub(unused.slot + open.transit_slack)?;
            let life = life.min(limits.longest_life(unused.slot, open));
            // If the round trips of a process have grown, it requests a longer life than that of the
            // slots it gave back. Half the life is better than a lost slot.
            (life >= open.life / 2).then_some((index, life))
        })
    }

    /// Returns the first slot, not before `from`, that has `units` and at least half of the life of
    /// `open`.
    pub(super) fn first(
        &self,
        limits: &LimitSet,
        from: Micros,
        units: u64,
        open: PermitTime,
    ) -> Option<Micros> {
        let (index, _) = self.position(limits, from, units, open)?;
        Some(self.slots[index].slot)
    }

    /// Takes up to `count` permits of `cost` units from the first slot that has them, if it lies
    /// within `span`.
    pub(super) fn take(
        &mut self,
        limits: &LimitSet,
        span: RangeInclusive<Micros>,
        cost: u64,
        count: u32,
        open: PermitTime,
    ) -> Option<Booking> {
        let (index, life) = self.position(limits, *span.start(), cost, open)?;
        let unused = &mut self.slots[index];
        if unused.slot > *span.end() {
            return None;
        }
        let taken = u32::try_from(unused.units / cost)
            .unwrap_or(u32::MAX)
            .min(count);
        unused.units -= u64::from(taken) * cost;
        let grant = Booking {
            slot: unused.slot,
            life,
            stamp: unused.stamp,
            count: taken,
        };
        if unused.units == 0 {
            self.slots.remove(index);
        }
        Some(grant)
    }

    /// Removes and returns the first slot if it is before `now`.
    pub(super) fn pop_before(&mut self, now: Micros) -> Option<UnusedPermits> {
        let slots = &mut self.slots;
        let passed = slots.first()?.slot < now;
        passed.then(|| slots.remove(0))
    }

    pub(super) fn pop_last(&mut self) -> Option<UnusedPermits> {
        self.slots.pop()
    }

    #[cfg(test)]
    pub(super) fn units(&self) -> u64 {
        self.slots.iter().map(|unused| unused.units).sum()
    }

    pub(super) fn last(&self) -> Option<UnusedPermits> {
        self.slots.last().copied()
    }
}
