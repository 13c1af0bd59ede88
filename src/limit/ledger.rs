//! The ledger of a key: all its limits, the slots that were returned before they were due, and the
//! advance bookings.
//!
//! Twin: `store/redis/lua/main.lua`, and the returned slots in `ledger.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::time::Duration;

use super::advance::{AdvanceBooking, AdvanceBookings};
use super::algorithm::PermitTime;
use super::limit_set::LimitSet;
use super::returned::ReturnedSlots;
use super::set_quota::{ChangeKind, SetQuotaState, is_learned, is_set, next_version};
use super::{
    Booking, Charge, Lending, LimitSpec, Micros, SetQuota, StoredHold, TooLate, UnusedPermits,
    UpstreamRemaining, micros_down, micros_up,
};
use crate::quota::{Limit, Quota};

/// All limits of one key, with the permits that count against them, and what few keys have. A permit is booked in all limits or in none.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    /// The limits of all callers.
    limits: LimitSet,
    /// The ledger's time, which never goes back.
    now: Micros,
    /// When the ledger was made. It has no permits from before.
    made_at: Micros,
    /// What few keys have.
    rare: Option<Box<RareState>>,
}

/// What few keys have: most ledgers keep no block for it.
#[derive(Clone, Debug, Default)]
struct RareState {
    /// The hold of the key, also after it has ended.
    hold: StoredHold,
    /// The returned slots that lie ahead.
    returned: ReturnedSlots,
    /// The permits that are booked in advance. Their slots lie ahead.
    advance: AdvanceBookings,
    /// The set quota, or its end.
    quota: Option<Box<SetQuotaState>>,
    /// By how many microseconds the wall clock is ahead of the ledger's time. Fixed windows follow
    /// the wall clock.
    ahead: i64,
}

/// A change of the set quota.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaChange {
    pub(crate) kind: ChangeKind,
    /// For how long after its last use, or after it was learned last, the set quota applies.
    pub(crate) life: Duration,
    /// The new version is larger than this.
    pub(crate) above: u32,
}

/// Permits to book.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    /// The units of each permit.
    pub(crate) cost: u32,
    /// How many permits are booked.
    pub(crate) count: u32,
    /// The first moment at which a permit is of use.
    pub(crate) earliest: Micros,
    /// The latest slot that is of use.
    pub(crate) latest: Micros,
    /// How long after its slot a permit should be valid.
    pub(crate) life: Micros,
    /// Whether the permits are borrowed from the part of another class.
    pub(crate) borrows: bool,
}

impl Ledger {
    /// Makes an empty ledger with the limits of `spec`.
    pub(crate) fn new(spec: &LimitSpec, now: Micros) -> Self {
        let mut ledger = Ledger::empty(now);
        ledger.advance(spec, now);
        ledger
    }

    /// Makes a ledger without limits.
    pub(crate) fn empty(now: Micros) -> Self {
        Ledger {
            limits: LimitSet::new(),
            now,
            made_at: now,
            rare: None,
        }
    }

    /// Moves the boundaries of fixed windows to a wall clock that is `ahead` microseconds ahead of
    /// the ledger's time.
    pub(crate) fn align(&mut self, ahead: i64, now: Micros) {
        self.now = self.now.max(now);
        if ahead != self.ahead() {
            self.rare.get_or_insert_default().ahead = ahead;
            self.limits.align(ahead, self.now);
        }
    }

    /// Returns by how many microseconds the wall clock is ahead of the ledger's time.
    fn ahead(&self) -> i64 {
        self.rare.as_ref().map_or(0, |rare| rare.ahead)
    }

    /// Advances the ledger to `now`, with the limits of `spec`. Every call starts with this.
    /// Returns the ledger's time.
    pub(crate) fn advance(&mut self, spec: &LimitSpec, now: Micros) -> Micros {
        self.now = self.now.max(now);
        let now = self.now;
        self.limits.advance(now);
        if spec.quota_version() == 0 && self.set_quota().is_none() {
            self.limits.state(spec, now, self.ahead(), None);
        } else {
            self.take_in_version(spec);
        }
        self.limits.set_pace(spec.pace());
        self.insert_due();
        self.drain();
        now
    }

    /// Takes in the limits of `spec` by their quota version.
    fn take_in_version(&mut self, spec: &LimitSpec) {
        let now = self.now;
        self.end_set_quota();
        if spec.quota_version() > self.quota_version() {
            self.change_quota_version(spec);
        }
        let (is_outdated, ahead) = (self.is_outdated(spec), self.ahead());
        let quota = quota_mut(&mut self.rare);
        if quota.as_ref().is_some_and(|quota| quota.is_set()) {
            self.limits.forget_paused(now);
        } else if !is_outdated {
            self.limits.state(spec, now, ahead, quota);
        }
    }

    /// Returns the set quota, or its end.
    fn set_quota(&self) -> Option<&SetQuotaState> {
        self.rare.as_ref()?.quota.as_deref()
    }

    /// Returns whether the key has a set quota, or the end of one.
    pub(crate) fn has_set_quota(&self) -> bool {
        self.set_quota().is_some()
    }

    /// Returns all limits, also those that are paused.
    #[cfg(test)]
    pub(crate) fn all_limits(&self) -> Vec<Limit> {
        self.limits.all_limits().collect()
    }

    /// Returns the units of all returned slots that are kept for the next callers.
    #[cfg(test)]
    pub(crate) fn returned_units(&self) -> u64 {
        self.returned().map_or(0, ReturnedSlots::units)
    }

    /// Returns the version of the set quota or of its end. 0 if there is none.
    pub(crate) fn quota_version(&self) -> u32 {
        self.set_quota().map_or(0, |quota| quota.version)
    }

    /// Returns whether the limits of `spec` are those of a set quota that has ended. Then nothing is
    /// decided for the caller.
    pub(crate) fn is_outdated(&self, spec: &LimitSpec) -> bool {
        is_set(spec.quota_version()) && !is_set(self.quota_version())
    }

    /// Changes the set quota: the limits of `spec` become the set quota, or it ends. Advances the
    /// ledger to `now`. Returns the version from then on. It is a new one, unless a quota is learned again or
    /// while one of an operator applies, or the learned quota has ended that was to end.
    pub(crate) fn change_quota(
        &mut self,
        spec: &LimitSpec,
        change: QuotaChange,
        now: Micros,
    ) -> u32 {
        self.now = self.now.max(now);
        self.limits.advance(self.now);
        self.end_set_quota();
        let version = match change.kind {
            ChangeKind::Learn if self.learns_nothing_new(spec, change.life) => self.quota_version(),
            ChangeKind::End if self.has_ended_learned(spec) => self.quota_version(),
            kind => {
                let newest = self.quota_version().max(spec.quota_version());
                next_version(newest.max(change.above), kind)
            }
        };
        let spec = spec.clone().with_quota_version(version, change.life);
        self.advance(&spec, now);
        version
    }

    /// Returns whether the set quota stays as it is if the limits of `spec` are learned. The same quota
    /// applies for its `life` again.
    fn learns_nothing_new(&mut self, spec: &LimitSpec, life: Duration) -> bool {
        let (limits, now) = (&self.limits, self.now);
        let quota = quota_mut(&mut self.rare);
        let Some(quota) = quota.filter(|quota| quota.is_set()) else {
            return false;
        };
        if !quota.is_learned() {
            return true;
        }
        let learned = spec.limits();
        let is_same = quota.in_flight == spec.quota().most_in_flight()
            && limits.limits().all(|limit| learned.contains(&limit))
            && learned
                .iter()
                .all(|limit| limits.limits().any(|other| other == *limit));
        if is_same {
            quota.learn_again(micros_up(life), now);
        }
        is_same
    }

    /// Returns whether the change only ends a learned quota, with the version of `spec`, and another version has
    /// ended it before.
    fn has_ended_learned(&self, spec: &LimitSpec) -> bool {
        let (ends, newest) = (spec.quota_version(), self.quota_version());
        is_learned(ends) && newest > ends && !is_learned(newest)
    }

    /// Ends the set quota if its time is over. Forgets its end after some time.
    fn end_set_quota(&mut self) {
        let now = self.now;
        let Some(quota) = self.set_quota().filter(|quota| quota.until <= now) else {
            return;
        };
        if quota.is_set() {
            let (moment, was_learned) = (quota.until, quota.is_learned());
            self.drop_returned();
            let booked_until = self.limits.log_end();
            self.limits.unset(moment, was_learned);
            if let Some(quota) = quota_mut(&mut self.rare) {
                quota.end(booked_until);
            }
        }
        if let Some(rare) = &mut self.rare {
            rare.quota = rare.quota.take().filter(|quota| quota.until > now);
        }
    }

    /// Takes in a version of the set quota, or of its end, that is newer than the ledger's.
    fn change_quota_version(&mut self, spec: &LimitSpec) {
        let now = self.now;
        self.drop_returned();
        let booked_until = self.limits.log_end();
        let rare = self.rare.get_or_insert_default();
        let before = rare.quota.take().map(|before| *before);
        if let Some(before) = before.as_ref().filter(|before| before.is_set()) {
            self.limits.unset(now, before.is_learned());
        }
        let mut quota = SetQuotaState::new(spec, before, now, booked_until);
        if quota.is_set() {
            self.limits.set(spec, now, rare.ahead, &mut quota);
        }
        rare.quota = Some(Box::new(quota));
    }

    /// Notes that a caller uses the key. A set quota applies for its whole life again if half of it
    /// has passed.
    pub(crate) fn renew_quota(&mut self) {
        let now = self.now;
        if let Some(quota) = quota_mut(&mut self.rare) {
            quota.renew(now);
        }
    }

    /// Returns the set quota, or its end, if its version is another one than `known`.
    pub(crate) fn quota_unless(&self, known: u32) -> Option<SetQuota> {
        let quota = self.set_quota().filter(|quota| quota.version != known)?;
        let limits = quota.is_set().then(|| self.limits.limits());
        Some(SetQuota {
            version: quota.version,
            quota: limits.and_then(|limits| Quota::of_limits(limits, quota.in_flight)),
            left: Duration::from_micros(quota.until.saturating_sub(self.now)),
            life: Duration::from_micros(quota.life),
        })
    }

    /// Moves the advance bookings whose slot has come into the limits.
    fn insert_due(&mut self) {
        let Some(rare) = &mut self.rare else {
            return;
        };
        while let Some(booking) = rare.advance.pop_due(self.now) {
            self.limits.insert_due(self.now, booking);
        }
    }

    /// Removes the returned slots that no request can use any more. Their units leave the limits.
    fn drain(&mut self) {
        let earliest = self.earliest();
        while let Some(unused) = self
            .returned_mut()
            .and_then(|returned| returned.pop_before(earliest))
        {
            self.subtract(unused);
        }
    }

    /// Adds a hold. From now on no slot is before its end. Returns the hold that applies.
    pub(crate) fn hold(&mut self, hold: StoredHold) -> StoredHold {
        let in_force = self.in_force().or(hold);
        self.set_hold(in_force);
        self.drain();
        in_force
    }

    /// Takes in for how long the machine has slept in all: see [`StoredHold::wake`]. `slept` is asked only if the key is on hold.
    pub(crate) fn wake(&mut self, slept: impl FnOnce() -> Micros) {
        if let Some(rare) = self.rare.as_mut().filter(|rare| rare.hold.until > self.now) {
            rare.hold.wake(slept());
        }
    }

    /// Returns the hold that applies.
    fn in_force(&self) -> StoredHold {
        self.rare
            .as_ref()
            .map_or(StoredHold::default(), |rare| rare.hold)
    }

    fn set_hold(&mut self, hold: StoredHold) {
        if hold != self.in_force() {
            self.rare.get_or_insert_default().hold = hold;
        }
    }

    /// Adds a hold that begins now. Releases before it do not end it, even if the process that set it
    /// did not know of them. One without time left ends the probation that follows the last one, and no hold in
    /// force.
    pub(crate) fn hold_anew(&mut self, hold: StoredHold) -> StoredHold {
        if hold.until.max(self.in_force().until) <= self.now {
            return self.release();
        }
        self.hold(StoredHold {
            releases: hold.releases.max(self.in_force().releases),
            ..hold
        })
    }

    /// Ends the hold, and forgets what is reserved for other clients. Returns the hold that
    /// applies.
    pub(crate) fn release(&mut self) -> StoredHold {
        self.limits.forget_others();
        let released = StoredHold {
            until: 0,
            cut: false,
            releases: self.in_force().releases.saturating_add(1),
            slept: 0,
        };
        self.set_hold(released);
        released
    }

    /// Takes in what the upstream states is left of a limit. If less is allowed than before, the
    /// returned slots are removed, because they were granted when more seemed to be left.
    pub(crate) fn see(&mut self, spec: &LimitSpec, left: &UpstreamRemaining) {
        let transit_slack = micros_up(spec.transit_slack());
        let advance = advance(&self.rare);
        let limits = &mut self.limits;
        if limits.see(left, self.now, self.made_at, transit_slack, advance) {
            self.drop_returned();
        }
    }

    /// Removes the returned slots. Their units leave the limits.
    fn drop_returned(&mut self) {
        while let Some(unused) = self.returned_mut().and_then(ReturnedSlots::pop_last) {
            self.subtract(unused);
        }
    }

    /// Returns the earliest moment at which a permit may be used, if no limit forbids it.
    fn earliest(&self) -> Micros {
        self.now.max(self.in_force().until)
    }

    /// Books the permits of an order, in as few bookings as their slots allow.
    ///
    /// Calls `granted` with each booking.
    ///
    /// # Errors
    ///
    /// [`TooLate`] at the first permit whose slot would be later than `latest`. This permit and the
    /// permits after it leave no trace. The same if the key has too many advance bookings for one
    /// more.
    pub(crate) fn book(
        &mut self,
        spec: &LimitSpec,
        order: Order,
        mut granted: impl FnMut(Booking),
    ) -> Result<(), TooLate> {
        let Order {
            cost,
            mut count,
            earliest,
            latest,
            life,
            borrows,
        } = order;
        let largest = self.limits.largest_cost();
        if cost == 0 || largest.is_none_or(|largest| cost > largest) {
            return Err(TooLate {
                slot: Micros::MAX,
                limit: None,
            });
        }
        let cost = u64::from(cost);
        let open = open(spec, life, borrows);
        let from = self.earliest().max(earliest);
        // No permit has an earlier slot than the one before it, so each search goes on from there.
        let mut reached = from;
        while count > 0 {
            let (slot, limit) = self.first_slot(reached, cost, open);
            let within = from..=slot.min(latest);
            let returned = self.rare.as_deref_mut().map(|rare| &mut rare.returned);
            let again = returned
                .and_then(|returned| returned.take(&self.limits, within, cost, count, open));
            if let Some(booking) = again {
                count -= booking.count;
                granted(booking);
                continue;
            }
            if slot > latest {
                let slot = self.or_returned(slot, from, cost, open);
                return Err(TooLate { slot, limit });
            }
            let booking = self.booking(slot, open);
            let stamp = booking.stamp;
            let fits = if count == 1 || open.borrows.is_some() {
                1
            } else {
                let room = self.limits.room(slot, open, advance(&self.rare));
                u32::try_from(room / cost)
                    .unwrap_or(u32::MAX)
                    .clamp(1, count)
            };
            let units = cost * u64::from(fits);
            if self.is_in_advance(slot, from, cost, open) {
                let longest_join = self.limits.longest_join();
                let advance = &mut self.rare.get_or_insert_default().advance;
                if !advance.add(slot, stamp, units, longest_join) {
                    return Err(TooLate { slot, limit });
                }
            } else {
                self.limits.insert(self.now, slot, stamp, units);
            }
            reached = slot;
            count -= fits;
            granted(Booking {
                count: fits,
                ..booking
            });
        }
        Ok(())
    }

    /// Makes the booking of a permit at a slot.
    fn booking(&self, slot: Micros, open: PermitTime) -> Booking {
        let life = self.limits.longest_life(slot, open);
        Booking {
            slot,
            life,
            stamp: slot + life + open.transit_slack,
            count: 1,
        }
    }

    /// Returns whether a permit with this slot becomes an advance booking. `from` is the first
    /// moment at which the permit is of use.
    fn is_in_advance(&mut self, slot: Micros, from: Micros, cost: u64, open: PermitTime) -> bool {
        let earliest = self.earliest();
        let free = if from > earliest {
            self.first_slot(earliest, cost, open).0
        } else {
            slot
        };
        self.limits.is_in_advance(slot, free, advance(&self.rare))
    }

    /// Books up to `most` of the units that are free now, but at most a quarter of the free units.
    /// So one process cannot hoard a scarce limit.
    pub(crate) fn prefetch(
        &mut self,
        spec: &LimitSpec,
        most: u32,
        life: Micros,
    ) -> Option<Booking> {
        let count = u32::try_from(self.free() / 4).unwrap_or(u32::MAX).min(most);
        if count == 0 {
            return None;
        }
        let open = open(spec, life, false);
        let (slot, _) = self.first_slot(self.earliest(), u64::from(count), open);
        if slot > self.now {
            return None;
        }
        let booking = self.booking(slot, open);
        self.limits
            .insert(self.now, slot, booking.stamp, u64::from(count));
        Some(Booking { count, ..booking })
    }

    /// Counts units that were used without a permit `charge.age` ago or earlier, in every limit,
    /// even beyond the limit.
    pub(crate) fn charge(&mut self, spec: &LimitSpec, charge: Charge) {
        let used_at = self.now.saturating_sub(micros_down(charge.age));
        if charge.units > 0 {
            let transit_slack = micros_up(spec.transit_slack());
            self.limits
                .charge(self.now, used_at, transit_slack, charge.units);
        }
    }

    /// Takes back unused permits. An advance booking is erased. If the slot of another permit lies
    /// ahead, nothing is reserved for other clients then, and the set quota has not changed since,
    /// it is kept for the next caller as long as others are booked behind it. Otherwise the units
    /// leave the limits.
    pub(crate) fn take_back(&mut self, mut unused: UnusedPermits) {
        if unused.units == 0 || unused.stamp < unused.slot {
            return;
        }
        if self.may_miss(unused) {
            return;
        }
        unused.units -= self.erase(unused);
        if unused.units == 0 {
            return;
        }
        let is_shared = self.limits.is_reserved(unused.slot);
        let quota = self.set_quota();
        let is_earlier = quota.is_some_and(|quota| quota.may_be_earlier(unused.slot));
        let is_past = unused.slot <= self.now || unused.slot < self.earliest();
        if is_past || is_shared || is_earlier {
            self.subtract(unused);
        } else if let Some(last) = self.rare.get_or_insert_default().returned.put(unused) {
            // There was no room for another returned slot, so the units of the last one leave the
            // limits. They can be booked anew.
            self.subtract(last);
        }
        self.free_spare();
    }

    /// Removes the returned slots that the limits would give again, the last one first. Their units
    /// leave the limits.
    ///
    /// Stops at the first slot that is not spare. What is booked behind it is booked behind all earlier
    /// ones, too.
    fn free_spare(&mut self) {
        while let Some(last) = self.returned().and_then(ReturnedSlots::last)
            && self.is_spare(last)
        {
            self.returned_mut().and_then(ReturnedSlots::pop_last);
            self.subtract(last);
        }
    }

    /// Returns whether the limits would give a returned slot again without its units. If joined
    /// advance bookings may contain the slot, its units would not leave the limits.
    fn is_spare(&mut self, unused: UnusedPermits) -> bool {
        let bookings = self.rare.as_deref().map(|rare| &rare.advance);
        let may_be_joined = bookings.is_some_and(|bookings| bookings.may_contain(unused));
        !may_be_joined && self.limits.would_give_again(unused, advance(&self.rare))
    }

    /// Takes the units of unused permits out of the limits. If they may be a part of joined advance
    /// bookings, they stay: the limits may not have them.
    fn subtract(&mut self, mut unused: UnusedPermits) {
        if self.may_miss(unused) {
            return;
        }
        unused.units -= self.erase(unused);
        let rare = self.rare.as_deref();
        let may_be_joined = rare.is_some_and(|rare| rare.advance.may_contain(unused));
        if unused.units > 0 && !may_be_joined {
            self.limits.subtract(self.now, unused);
        }
    }

    /// Returns whether a limit may not count these permits, because the limits have changed since. Their
    /// units stay where they are.
    fn may_miss(&self, unused: UnusedPermits) -> bool {
        self.set_quota()
            .is_some_and(|quota| quota.may_miss(unused, self.now))
    }

    /// Takes the units of unused permits out of the advance bookings, if they are certainly there.
    /// Returns how many units it took.
    fn erase(&mut self, unused: UnusedPermits) -> u64 {
        let Some(rare) = &mut self.rare else {
            return 0;
        };
        let mut erased = rare.advance.erase(unused);
        if erased == 0 && self.limits.log_end() <= unused.slot {
            erased = rare.advance.erase_joined(unused);
        }
        if erased > 0 {
            let units = erased;
            self.limits
                .returned(self.now, UnusedPermits { units, ..unused });
        }
        erased
    }

    /// Returns the first moment, not before `from`, at which every limit allows `cost`, and the
    /// limit that allows it last.
    fn first_slot(&mut self, from: Micros, cost: u64, open: PermitTime) -> (Micros, Option<Limit>) {
        self.limits
            .first_slot(from, cost, open, advance(&self.rare))
    }

    /// Returns a limit of another process that applies and that the caller with the limits of `spec` does not state. Those of
    /// a set quota are of all processes.
    pub(crate) fn foreign(&self, spec: &LimitSpec) -> Option<Limit> {
        match self.set_quota() {
            Some(quota) if quota.is_set() => None,
            _ => self.limits.foreign(spec.limits()),
        }
    }

    /// Returns how many units could leave now.
    pub(crate) fn free(&mut self) -> u64 {
        if self.earliest() > self.now {
            0
        } else {
            self.limits
                .room(self.now, PermitTime::MOMENT, advance(&self.rare))
        }
    }

    /// Returns whether other clients are known to use a limit too.
    pub(crate) fn is_shared(&self) -> bool {
        self.limits.is_shared()
    }

    /// Returns each limit with its used units, its free units, and the units reserved for clients
    /// outside the fleet.
    pub(crate) fn usage(&mut self) -> impl Iterator<Item = (Limit, u64, u64, u64)> {
        self.limits.usage(self.now, advance(&self.rare))
    }

    /// Returns when a permit of `cost` could be used, if nothing else is booked. `Micros::MAX` if
    /// never.
    pub(crate) fn next_slot(&mut self, spec: &LimitSpec, cost: u32, life: Micros) -> Micros {
        let largest = self.limits.largest_cost();
        if largest.is_some_and(|largest| cost > largest) {
            return Micros::MAX;
        }
        let (earliest, cost) = (self.earliest(), u64::from(cost));
        let open = open(spec, life, false);
        let (slot, _) = self.first_slot(earliest, cost, open);
        self.or_returned(slot, earliest, cost, open)
    }

    /// Returns `slot`, or the first returned slot for `cost` if that is earlier, and not before
    /// `from`.
    fn or_returned(&self, slot: Micros, from: Micros, cost: u64, open: PermitTime) -> Micros {
        self.returned()
            .and_then(|returned| returned.first(&self.limits, from, cost, open))
            .map_or(slot, |returned| returned.min(slot))
    }

    /// Returns the returned slots, if there may be some.
    fn returned(&self) -> Option<&ReturnedSlots> {
        self.rare.as_deref().map(|rare| &rare.returned)
    }

    /// Returns the returned slots, if there may be some, to take some out.
    fn returned_mut(&mut self) -> Option<&mut ReturnedSlots> {
        self.rare.as_deref_mut().map(|rare| &mut rare.returned)
    }

    /// Returns for each limit, in the order of [`usage`](Self::usage), when it alone would allow a
    /// permit of `cost`. A hold does not matter. `Micros::MAX` if never.
    pub(crate) fn first_slots(
        &mut self,
        spec: &LimitSpec,
        cost: u32,
        life: Micros,
    ) -> impl Iterator<Item = Micros> {
        let advance = advance(&self.rare);
        self.limits
            .first_slots(self.now, cost, open(spec, life, false), advance)
    }

    /// Returns the first moment from which a new ledger would grant the same. From then on, this
    /// ledger can be forgotten.
    pub(crate) fn fresh_from(&self) -> Micros {
        let returned = self.returned().and_then(ReturnedSlots::last);
        let returned = returned.map_or(0, |last| last.slot + 1);
        // The number of releases matters only while messages about an older hold may still arrive,
        // so it keeps no ledger.
        let quota = self.set_quota().map_or(0, |quota| quota.until);
        self.limits
            .fresh_from(advance(&self.rare))
            .max(returned)
            .max(self.in_force().until)
            .max(quota)
    }
}

/// Returns the time in which a permit with this life may be used, and who asks for it.
fn open(spec: &LimitSpec, life: Micros, borrows: bool) -> PermitTime {
    PermitTime {
        life,
        guard: micros_up(spec.boundary_guard()),
        transit_slack: micros_up(spec.transit_slack()),
        borrows: spec.lending().filter(|_| borrows).map(Lending::percent),
    }
}

/// Returns the set quota of a key, or its end, to change it.
fn quota_mut(rare: &mut Option<Box<RareState>>) -> Option<&mut SetQuotaState> {
    rare.as_mut()?.quota.as_deref_mut()
}

fn advance(rare: &Option<Box<RareState>>) -> &[AdvanceBooking] {
    rare.as_ref().map_or(&[], |rare| rare.advance.as_slice())
}
