//! The algorithm of one limit, of any kind. It keeps what was used of the limit.
//!
//! Twin: `rule_of` and `earlier_use` in `store/redis/lua/ledger.lua`, and the table `rule` in
//! `window.lua`, `bucket.lua` and `fixed.lua`. After a change: `cargo test --all-features --lib
//! differential`

use super::advance::AdvanceBooking;
use super::bucket::BucketState;
use super::fixed::Fixed;
use super::window::Window;
use super::{Micros, UnusedPermits, micros_up};
use crate::quota::Limit;

/// The time in which a permit may be used.
#[derive(Clone, Copy, Debug)]
pub(super) struct PermitTime {
    /// How long after its slot the permit is valid.
    pub(super) life: Micros,
    /// How far all of that time has to stay from the boundaries of a fixed window.
    pub(super) guard: Micros,
    /// How much later than that a used permit counts.
    pub(super) transit_slack: Micros,
    /// The percentage of each limit that a borrower may use. `None` for an owner.
    pub(super) borrows: Option<u8>,
}

impl PermitTime {
    /// The time of a permit that is used at its slot, and arrives at once.
    pub(super) const MOMENT: PermitTime = PermitTime {
        life: 0,
        guard: 0,
        transit_slack: 0,
        borrows: None,
    };

    /// Returns the time from the slot of the permit to its stamp.
    pub(super) fn length(self) -> Micros {
        self.life + self.transit_slack
    }
}

/// What was used of one limit.
#[derive(Clone, Debug)]
pub(super) enum Algorithm {
    Window(Window),
    /// Boxed, because it is larger than a window, which is the limit of most keys.
    Bucket(Box<BucketState>),
    /// Boxed, as a bucket is.
    Fixed(Box<Fixed>),
}

impl Algorithm {
    /// Makes the algorithm of `limit`, of which nothing is used yet. The wall clock is `ahead`
    /// microseconds ahead of the ledger's time. This may be negative.
    pub(super) fn new(limit: Limit, ahead: i64) -> Self {
        let window = micros_up(limit.window());
        match limit {
            Limit::Sliding { count, .. } => Algorithm::Window(Window::new(count, window)),
            Limit::Bucket {
                capacity, count, ..
            } => Algorithm::Bucket(Box::new(BucketState::new(capacity, count, window))),
            Limit::Fixed { count, .. } => {
                Algorithm::Fixed(Box::new(Fixed::new(count, window, ahead)))
            }
            Limit::InFlight { .. } => unreachable!("Quota::limits are of rate"),
        }
    }

    /// Forgets what no longer matters at `now`.
    pub(super) fn advance(&mut self, now: Micros) {
        match self {
            Algorithm::Window(window) => window.advance(now),
            Algorithm::Bucket(_) => {}
            Algorithm::Fixed(fixed) => fixed.advance(now),
        }
    }

    /// Returns the first moment, not before `from`, at which `cost` units may leave. A window keeps
    /// `reserved` units for other clients. A bucket ignores `reserved`.
    pub(super) fn first_slot(
        &mut self,
        from: Micros,
        cost: u64,
        open: PermitTime,
        reserved: u64,
        advance: &[AdvanceBooking],
    ) -> Micros {
        match self {
            Algorithm::Window(window) => window.first_slot(from, cost, open, reserved, advance),
            Algorithm::Bucket(bucket) => bucket.first_slot(from, cost, open, advance),
            Algorithm::Fixed(fixed) => fixed.first_slot(from, cost, open, reserved, advance),
        }
    }

    /// Moves the boundaries of a fixed window to a wall clock that is `ahead` microseconds ahead of
    /// the ledger's time.
    pub(super) fn align(&mut self, ahead: i64, now: Micros) {
        if let Algorithm::Fixed(fixed) = self {
            fixed.align(ahead, now);
        }
    }

    /// Counts units that were used without a permit, even if there is no room for them. The last of
    /// them was used at `end` or earlier.
    pub(super) fn charge(&mut self, now: Micros, end: Micros, transit_slack: Micros, units: u64) {
        let stamp = end + transit_slack;
        match self {
            Algorithm::Window(window) => window.charge(now, stamp, units),
            Algorithm::Bucket(bucket) => bucket.charge(now, stamp, units),
            Algorithm::Fixed(fixed) => fixed.charge(now, end, units),
        }
    }

    /// Returns how many units may leave at `slot`, which is now, or not before the first slot of one unit.
    pub(super) fn room(
        &mut self,
        slot: Micros,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> u64 {
        match self {
            Algorithm::Window(window) => window.room(slot, open, advance),
            Algorithm::Bucket(bucket) => bucket.room(slot, open, advance),
            Algorithm::Fixed(fixed) => fixed.room(slot, advance),
        }
    }

    /// Counts units of a permit with this slot and stamp, even if there is no room for them.
    pub(super) fn insert(&mut self, now: Micros, slot: Micros, stamp: Micros, units: u64) {
        match self {
            Algorithm::Window(window) => window.insert(stamp, units),
            Algorithm::Bucket(bucket) => bucket.insert(slot, stamp, units, slot > now),
            Algorithm::Fixed(fixed) => fixed.insert(slot, stamp, units),
        }
    }

    /// Counts units of an advance booking whose slot has come.
    pub(super) fn insert_due(&mut self, now: Micros, booking: AdvanceBooking) {
        match self {
            Algorithm::Fixed(fixed) => fixed.insert_due(booking),
            _ => self.insert(now, booking.slot, booking.stamp, booking.units),
        }
    }

    /// Returns what the limit remembers of the time until `now`, for a limit that begins then. The parts
    /// are like joined bookings: the slots of their units are not kept. Of the upcoming slots of fixed windows and
    /// buckets, nothing is returned.
    pub(super) fn earlier_use(&self, now: Micros, transit_slack: Micros) -> Vec<AdvanceBooking> {
        let used_at = |last: Micros, units: u64| AdvanceBooking {
            slot: last,
            last_slot: last,
            stamp: last + transit_slack,
            units,
        };
        match self {
            Algorithm::Window(window) => {
                // The units of a chunk are later than the chunk before.
                let mut before = now;
                let chunks = window.chunks().map(|chunk| {
                    let slot = before.min(chunk.stamp);
                    before = before.max(chunk.stamp);
                    AdvanceBooking {
                        slot,
                        last_slot: chunk.stamp,
                        stamp: chunk.stamp,
                        units: chunk.count,
                    }
                });
                chunks.collect()
            }
            Algorithm::Bucket(bucket) => vec![used_at(now, bucket.used(now))],
            Algorithm::Fixed(fixed) => {
                let uses = fixed.last_uses(now);
                uses.map(|(last, units)| used_at(last, units)).collect()
            }
        }
    }

    /// Returns how far the slots of joined advance bookings may be apart.
    pub(super) fn longest_join(&self) -> Micros {
        match self {
            Algorithm::Window(_) | Algorithm::Bucket(_) => Micros::MAX,
            Algorithm::Fixed(fixed) => fixed.longest_join(),
        }
    }

    /// Takes back permits that were not used.
    pub(super) fn subtract(&mut self, now: Micros, unused: UnusedPermits) {
        match self {
            Algorithm::Window(window) => window.subtract(now, unused.stamp, unused.units),
            Algorithm::Bucket(bucket) => bucket.subtract(now, unused),
            Algorithm::Fixed(fixed) => fixed.subtract(unused.slot, unused.units),
        }
    }

    /// Returns whether the slot of unused permits, which lies ahead, would be given again once they are
    /// taken back. A window would if what it counts at the slot, with these permits and all behind
    /// them, is within the limit. A fixed window that is open would: it counts in no order.
    pub(super) fn would_give_again(
        &mut self,
        unused: UnusedPermits,
        advance: &[AdvanceBooking],
    ) -> bool {
        match self {
            Algorithm::Window(window) => {
                window.first_slot(unused.slot, 0, PermitTime::MOMENT, 0, advance) == unused.slot
            }
            Algorithm::Bucket(bucket) => bucket.would_give_again(unused),
            Algorithm::Fixed(fixed) => fixed.is_open(unused.slot),
        }
    }

    /// Returns how many units count as used at `now`, without the advance bookings.
    pub(super) fn used(&self, now: Micros) -> u64 {
        match self {
            Algorithm::Window(window) => window.used(),
            Algorithm::Bucket(bucket) => bucket.used(now),
            Algorithm::Fixed(fixed) => fixed.used(now, &[]),
        }
    }

    /// Returns how many units count as used at `now`, with the advance bookings.
    pub(super) fn used_and_booked(&self, now: Micros, advance: &[AdvanceBooking]) -> u64 {
        match self {
            Algorithm::Fixed(fixed) => fixed.used(now, advance),
            _ => {
                let booked: u64 = advance.iter().map(|booking| booking.units).sum();
                self.used(now) + booked
            }
        }
    }

    /// Returns the first moment from which a new algorithm would grant the same.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        match self {
            Algorithm::Window(window) => window.fresh_from(advance),
            Algorithm::Bucket(bucket) => bucket.fresh_from(advance),
            Algorithm::Fixed(fixed) => fixed.fresh_from(advance),
        }
    }

    /// Returns a moment that is not before any slot in the log.
    pub(super) fn log_end(&self) -> Micros {
        match self {
            Algorithm::Window(window) => window.newest().unwrap_or(0),
            Algorithm::Bucket(_) | Algorithm::Fixed(_) => self.fresh_from(&[]),
        }
    }
}
