//! One limit of a key: what was used of it, and what is reserved for other clients.
//!
//! Twin: `see_limit` in `store/redis/lua/external.lua`, and `in_force_until` in `state.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::advance::AdvanceBooking;
use super::algorithm::{Algorithm, PermitTime};
use super::external::{ExternalUsage, Ours};
use super::lending::kept;
use super::{Micros, UnusedPermits, UpstreamRemaining, micros_up};
use crate::quota::Limit;
use crate::tuning::{LIVES_IN_WINDOW, LONGEST_LIFE};

#[derive(Clone, Debug)]
pub(super) struct LimitState {
    /// The limit.
    pub(super) limit: Limit,
    /// The algorithm of the limit, with the permits that count against it.
    pub(super) rule: Algorithm,
    /// When a caller last stated the limit.
    pub(super) last_stated: Micros,
    /// What other clients use of the limit, if they are known to use it. Boxed, because few limits
    /// are shared with other clients, and few upstreams state what is left.
    external: Option<Box<ExternalUsage>>,
}

impl LimitState {
    /// Makes the state of a limit that a caller states at `now`.
    pub(super) fn new(limit: Limit, rule: Algorithm, now: Micros) -> Self {
        LimitState {
            limit,
            rule,
            last_stated: now,
            external: None,
        }
    }

    /// Takes in whether the limit is the pace of a part, as the present caller states it.
    pub(super) fn set_pace(&mut self, is_pace: bool) {
        if let Algorithm::Bucket(bucket) = &mut self.rule {
            bucket.is_pace = is_pace;
        }
    }

    /// Returns whether the limit is the pace of a part, which limits only borrowers.
    pub(super) fn is_pace(&self) -> bool {
        matches!(&self.rule, Algorithm::Bucket(bucket) if bucket.is_pace)
    }

    /// Returns until when the limit applies, unless a caller states it again. That is two windows
    /// and a second after a caller last stated it, and `last_stated` may be half a window behind.
    pub(super) fn in_force_until(&self) -> Micros {
        let window = micros_up(self.limit.window());
        self.last_stated
            .saturating_add(window.saturating_mul(5) / 2 + 1_000_000)
    }

    /// Returns the first moment, not before `from`, at which `cost` units may leave besides those
    /// that are reserved then.
    pub(super) fn first_slot(
        &mut self,
        mut from: Micros,
        cost: u64,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> Micros {
        let Some(external) = &self.external else {
            return self.rule.first_slot(from, cost, open, 0, advance);
        };
        loop {
            let (reserved, until) = external.reserved_from(from, self.limit);
            let reserved = u64::from(reserved);
            let slot = self.rule.first_slot(from, cost, open, reserved, advance);
            if slot < until || until == Micros::MAX {
                return slot;
            }
            from = until;
        }
    }

    /// Returns the same for a borrower, of whose permits `percent` of the limit may be. `Micros::MAX` if
    /// the part never lends `cost` units.
    pub(super) fn first_slot_lent(
        &mut self,
        from: Micros,
        cost: u64,
        percent: u8,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> Micros {
        let cost = cost + u64::from(kept(self.limit, percent));
        if cost > u64::from(self.limit.largest_cost()) {
            return Micros::MAX;
        }
        self.first_slot(from, cost, open, advance)
    }

    /// Returns how many units may leave at `slot`, which is now, or not before the first slot of one unit.
    pub(super) fn room(
        &mut self,
        slot: Micros,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> u64 {
        let reserved = self.reserved(slot);
        self.rule.room(slot, open, advance).saturating_sub(reserved)
    }

    /// Returns whether other clients are known to use the limit too.
    pub(super) fn is_shared(&self) -> bool {
        self.external.is_some()
    }

    /// Returns the units that are reserved for other clients at a moment.
    pub(super) fn reserved(&self, at: Micros) -> u64 {
        let external = self.external.as_ref();
        external.map_or(0, |external| {
            let (units, _) = external.reserved_from(at, self.limit);
            u64::from(units)
        })
    }

    /// Takes back permits that were not used.
    pub(super) fn subtract(&mut self, now: Micros, unused: UnusedPermits) {
        self.rule.subtract(now, unused);
        self.returned(now, unused);
    }

    /// Takes in that permits came back unused.
    pub(super) fn returned(&mut self, now: Micros, unused: UnusedPermits) {
        if let Some(external) = &mut self.external {
            external.returned(now, unused.stamp, unused.units);
        }
    }

    /// Forgets what was reserved for other clients.
    pub(super) fn forget_others(&mut self) {
        self.external = None;
    }

    /// Takes in how much the upstream states is left, for a ledger that was made at `made_at`. Returns
    /// whether less is allowed than before.
    pub(super) fn see(
        &mut self,
        left: &UpstreamRemaining,
        now: Micros,
        made_at: Micros,
        transit_slack: Micros,
        advance: &[AdvanceBooking],
    ) -> bool {
        if left.forget {
            self.forget_others();
            return false;
        }
        // Permits with stamps up to this moment may have reached the upstream.
        let part_of_window = micros_up(self.limit.window()) / u64::from(LIVES_IN_WINDOW);
        let longest_life = micros_up(LONGEST_LIFE).max(part_of_window);
        let until = now + longest_life + transit_slack;
        let (least, most) = match &mut self.rule {
            Algorithm::Window(log) => {
                let (least, most) = log.used_until(until);
                let booked = advance.iter().filter(|booking| booking.stamp <= until);
                let booked: u64 = booked.map(|booking| booking.units).sum();
                (least + booked, most + booked)
            }
            Algorithm::Fixed(fixed) => {
                let used = fixed.used(now, advance);
                (used, used)
            }
            Algorithm::Bucket(bucket) => return bucket.see(now, micros_up(left.ago), left.units),
        };
        let ours = Ours { least, most, until };
        ExternalUsage::see(&mut self.external, left, ours, now, made_at)
    }

    /// Forgets what no longer matters at `now`.
    pub(super) fn advance(&mut self, now: Micros) {
        self.rule.advance(now);
        let external = self.external.as_mut();
        if external.is_some_and(|external| !external.roll(now, self.limit)) {
            self.external = None;
        }
    }

    /// Returns the first moment from which a new state of the limit would grant the same.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        let external = self.external.as_ref();
        let forgotten_from = external.map_or(0, |external| external.forgotten_from(self.limit));
        self.rule.fresh_from(advance).max(forgotten_from)
    }
}
