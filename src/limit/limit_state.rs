//! One limit of a key: what was used of it, and what is reserved for other clients.
//!
//! Twin: `see_limit` in `store/redis/lua/external.lua`, and `in_force_until` in `ledger.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::advance::AdvanceBooking;
use super::algorithm::{Algorithm, PermitTime};
use super::external::{ExternalUsage, Ours, Size, Statement};
use super::{Micros, UnusedPermits, UpstreamRemaining, micros_up};
use crate::quota::Limit;

/// The state of one limit of a key.
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

/// The greatest age of a response whose reset counts: 250 ms, or a twentieth of the window if that
/// is longer. Since an older response, units may have left the log. A steady response has no such
/// limit.
const OLDEST_RESPONSE: Micros = 250_000;

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

    /// Returns the size of the limit.
    fn size(&self) -> Size {
        Size {
            count: self.limit.count(),
            window: micros_up(self.limit.window()),
        }
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
        let size = self.size();
        let Some(external) = &self.external else {
            return self.rule.first_slot(from, cost, open, 0, advance);
        };
        loop {
            let (reserved, until) = external.reserved_from(from, size);
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
        let most = u64::from(self.limit.largest_cost());
        let cost = cost + most - most * u64::from(percent) / 100;
        if cost > most {
            return Micros::MAX;
        }
        self.first_slot(from, cost, open, advance)
    }

    /// Returns how many units may leave at `slot`, which is not before the first slot of one unit.
    pub(super) fn room(
        &mut self,
        slot: Micros,
        open: PermitTime,
        advance: &[AdvanceBooking],
    ) -> u64 {
        let reserved = self.reserved(slot);
        self.rule.room(slot, open, advance).saturating_sub(reserved)
    }

    /// Returns how many units may leave at `now`.
    pub(super) fn free(&mut self, now: Micros, advance: &[AdvanceBooking]) -> u64 {
        let reserved = self.reserved(now);
        self.rule.free(now, advance).saturating_sub(reserved)
    }

    /// Returns whether other clients are known to use the limit too.
    pub(super) fn is_shared(&self) -> bool {
        self.external.is_some()
    }

    /// Returns the units that are reserved for other clients at a moment.
    pub(super) fn reserved(&self, at: Micros) -> u64 {
        let reserved = self
            .external
            .as_ref()
            .map(|external| external.reserved_from(at, self.size()));
        reserved.map_or(0, |(units, _)| u64::from(units))
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

    /// Takes in how much the upstream states is left, for a ledger that was made at `made_at`.
    /// Permits with stamps up to `sent` may have reached the upstream. Returns whether less is
    /// allowed than before.
    pub(super) fn see(
        &mut self,
        left: &UpstreamRemaining,
        now: Micros,
        sent: Micros,
        made_at: Micros,
        advance: &[AdvanceBooking],
    ) -> bool {
        let size @ Size { count, window } = self.size();
        if left.forget {
            self.forget_others();
            return false;
        }
        let ago = micros_up(left.ago);
        let units = u32::try_from(left.units).unwrap_or(u32::MAX);
        let (least, most) = match &mut self.rule {
            Algorithm::Window(log) => {
                let (least, most) = log.used_until(sent);
                let until = advance.iter().filter(|booking| booking.stamp <= sent);
                let booked: u64 = until.map(|booking| booking.units).sum();
                (least + booked, most + booked)
            }
            Algorithm::Fixed(fixed) => (fixed.used(now, advance), fixed.used(now, advance)),
            Algorithm::Bucket(bucket) => return bucket.see(now, ago, left.units),
        };
        let is_recent = left.steady || ago <= OLDEST_RESPONSE.max(window / 20);
        let resets_at = left
            .reset_in
            .filter(|_| is_recent)
            .map(|reset_in| now.saturating_add(micros_up(reset_in)));
        let is_used_by_others =
            resets_at.is_some() && u64::from(count.saturating_sub(units)) > most;
        if self.external.is_none() && !is_used_by_others && left.refused == 0 && !left.urgent {
            return false;
        }
        let (steady, refused) = (left.steady && resets_at.is_some(), left.refused);
        let ends = resets_at
            .filter(|_| steady)
            .unwrap_or(now.saturating_add(window));
        // If it is not known when the upstream's count began, the log has to know the window that
        // ends now. A tenth of the window may be missing.
        let known_from = if steady { ends } else { now };
        let log_is_complete = made_at.saturating_add(window - window / 10) <= known_from;
        let external = self
            .external
            .get_or_insert_with(|| Box::new(ExternalUsage::new(ends, log_is_complete)));
        if steady || refused > 0 {
            external.begin(ends, log_is_complete);
        }
        let valid_until = now.saturating_add(micros_up(left.valid_for));
        let stated_at = now.saturating_sub(ago);
        let statement = Statement {
            now,
            left: units,
            stated_at,
            resets_at,
            steady,
            refused,
            valid_until,
        };
        external.see(
            size,
            statement,
            Ours {
                least,
                most,
                until: sent,
            },
        )
    }

    /// Forgets what no longer matters at `now`.
    pub(super) fn advance(&mut self, now: Micros) {
        self.rule.advance(now);
        let size = self.size();
        if self
            .external
            .as_mut()
            .is_some_and(|external| !external.roll(now, size))
        {
            self.external = None;
        }
    }

    /// Returns the first moment from which a new state of the limit would grant the same.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        let size = self.size();
        let external = self
            .external
            .as_ref()
            .map_or(0, |external| external.forgotten_from(size));
        self.rule.fresh_from(advance).max(external)
    }
}
