//! Advance bookings: permits for a slot that is later than the first one that the key would have
//! given, because their requests cannot leave earlier. Such a request waits for another key.
//!
//! In the log of a window, the stamp of such a permit would count in every window before it, too.
//! One request that waits 15 s for another key would take a unit of this key for 16 s. So these
//! permits are kept in a list beside the logs, with their slots. They count only in the windows
//! that touch the time from slot to stamp.
//!
//! - A permit becomes an advance booking if its slot is later than the first free slot, by more
//!   than [`TOLERANCE`] or a fiftieth of the shortest window. Otherwise it goes into the logs.
//! - A bucket counts permits in the order of the list, after those of its log
//!   ([`BucketState`](super::bucket::BucketState)). So under a bucket, a permit behind the first advance
//!   booking becomes one as well.
//! - When the slot of an advance booking comes, its units enter the logs. It then counts in every
//!   later window anyway, until its stamp leaves.
//! - There are at most [`MOST`] for each key. If there are more, two neighbours join: they become
//!   one booking with the first slot, the latest stamp and all units.
//!
//! *Why a window is never exceeded.* Take any window in which permits were used, and the permit in
//! it that was booked last. When it was booked, the rule looked at this window, because the window
//! touches the time from its slot to its stamp. Each other permit that was used in the window has
//! its slot before the end of the window, and its stamp after the beginning. So the rule counted
//! it, in the log or in the list. To enter a log, to join and to round a stamp only lengthen the
//! time in which units count.
//!
//! Twin: `store/redis/lua/advance.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::{Micros, UnusedPermits};

/// A slot that is at most this much later than the first free slot goes into the logs: 10 ms.
pub(super) const TOLERANCE: Micros = 10_000;

/// The most advance bookings of a key.
const MOST: usize = 256;

/// Units of permits that are booked in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdvanceBooking {
    /// The slot. If bookings were joined: the first of their slots.
    pub(super) slot: Micros,
    /// The last of the slots. Later than `slot` only if bookings were joined.
    pub(super) last_slot: Micros,
    /// The stamp. If bookings were joined: the latest of their stamps.
    pub(super) stamp: Micros,
    /// The units of all permits.
    pub(super) units: u64,
}

impl AdvanceBooking {
    /// Returns this booking and a later one as one.
    fn joined(self, later: AdvanceBooking) -> AdvanceBooking {
        AdvanceBooking {
            slot: self.slot,
            last_slot: self.last_slot.max(later.last_slot),
            stamp: self.stamp.max(later.stamp),
            units: self.units + later.units,
        }
    }

    /// Returns for how long its units count, times the units.
    fn weight(self) -> u128 {
        u128::from(self.stamp - self.slot) * u128::from(self.units)
    }
}

/// The advance bookings of a key, sorted by slot.
#[derive(Clone, Debug, Default)]
pub(super) struct AdvanceBookings(Vec<AdvanceBooking>);

impl AdvanceBookings {
    pub(super) fn as_slice(&self) -> &[AdvanceBooking] {
        &self.0
    }

    /// Adds units of permits. If there are too many bookings, the two neighbours join whose units
    /// then count the least longer, of those whose slots are at most `longest_join` apart. Returns
    /// `false`, and adds nothing, if there are none.
    pub(super) fn add(
        &mut self,
        slot: Micros,
        stamp: Micros,
        units: u64,
        longest_join: Micros,
    ) -> bool {
        if let Some(index) = self.exact(slot, stamp) {
            self.0[index].units += units;
            return true;
        }
        if self.0.len() >= MOST {
            let Some(index) = self.cheapest_join(longest_join) else {
                return false;
            };
            let later = self.0.remove(index + 1);
            self.0[index] = self.0[index].joined(later);
        }
        let after = self.0.partition_point(|booking| booking.slot <= slot);
        let booking = AdvanceBooking {
            slot,
            last_slot: slot,
            stamp,
            units,
        };
        self.0.insert(after, booking);
        true
    }

    /// Returns the index of the booking with exactly this slot and stamp.
    fn exact(&self, slot: Micros, stamp: Micros) -> Option<usize> {
        let from = self.0.partition_point(|booking| booking.slot < slot);
        self.0[from..]
            .iter()
            .take_while(|booking| booking.slot == slot)
            .position(|booking| booking.last_slot == slot && booking.stamp == stamp)
            .map(|index| from + index)
    }

    /// Returns the index of the first of the two neighbours whose joint units would count the least
    /// longer, if their slots are at most `longest_join` apart.
    fn cheapest_join(&self, longest_join: Micros) -> Option<usize> {
        let pairs = self.0.windows(2).enumerate();
        let costs = pairs.filter_map(|(index, pair)| {
            let joined = pair[0].joined(pair[1]);
            let cost = joined.weight() - pair[0].weight() - pair[1].weight();
            (joined.last_slot - joined.slot <= longest_join).then_some((cost, index))
        });
        costs.min().map(|(_, index)| index)
    }

    /// Removes and returns the first booking if its slot has come at `now`.
    pub(super) fn pop_due(&mut self, now: Micros) -> Option<AdvanceBooking> {
        let is_due = self.0.first()?.slot <= now;
        is_due.then(|| self.0.remove(0))
    }

    /// Removes units of unused permits from the booking with exactly their slot and stamp. Returns
    /// how many units it removed.
    ///
    /// If the log has permits with this slot and stamp as well, the units of both are the same.
    pub(super) fn erase(&mut self, unused: UnusedPermits) -> u64 {
        let found = self.exact(unused.slot, unused.stamp);
        found.map_or(0, |index| self.take(index, unused.units))
    }

    /// Returns the indices of joined bookings that may contain these permits.
    fn joined_with(&self, unused: UnusedPermits) -> impl Iterator<Item = usize> {
        let all = self.0.iter().enumerate();
        let containing = all.filter(move |(_, booking)| {
            booking.slot < booking.last_slot
                && (booking.slot..=booking.last_slot).contains(&unused.slot)
                && unused.stamp <= booking.stamp
        });
        containing.map(|(index, _)| index)
    }

    /// Returns whether joined bookings may contain these permits.
    pub(super) fn may_contain(&self, unused: UnusedPermits) -> bool {
        self.joined_with(unused).next().is_some()
    }

    /// Removes units of unused permits, which are in no log, from the joined bookings that contain
    /// them. If several may contain them, the units stay. Returns how many units it removed.
    pub(super) fn erase_joined(&mut self, unused: UnusedPermits) -> u64 {
        let mut containing = self.joined_with(unused);
        let (first, second) = (containing.next(), containing.next());
        match (first, second) {
            (Some(index), None) => {
                drop(containing);
                self.take(index, unused.units)
            }
            _ => 0,
        }
    }

    /// Takes up to `units` from the booking at `index`. Returns how many it took.
    fn take(&mut self, index: usize, units: u64) -> u64 {
        let taken = units.min(self.0[index].units);
        self.0[index].units -= taken;
        if self.0[index].units == 0 {
            self.0.remove(index);
        }
        taken
    }
}
