//! The ledger of a key: all its limits, and the slots that were returned before they were due.
//!
//! Twin: `store/redis/lua/main.lua` and `ledger.lua`.
//! After a change: `cargo test --all-features --lib differential`

use smallvec::SmallVec;

use super::algorithm::{Algorithm, Open};
use super::limit_state::LimitState;
use super::returned::ReturnedSlots;
use super::{
    Booking, Charge, Hold, LimitSpec, Micros, TooLate, UnusedPermits, UpstreamRemaining,
    micros_down, micros_up,
};
use crate::quota::Limit;

/// The longest life of a permit is this, or a twentieth of the window if that is longer. If a stamp
/// is more than this and the transit slack ahead, its permit was certainly not used yet.
const LONGEST_LIFE: Micros = 50_000;

/// The most limits of one key. A limit that only other callers state is *foreign* to the present
/// caller.
pub(super) const MOST_LIMITS: usize = 32;

/// The most rounds of the search for a slot that all limits allow. Some limits have no such slot,
/// for example fixed windows with different guards.
const MOST_ROUNDS: usize = 1000;

/// All limits of one key, and the slots that were returned before they were due. A permit is booked
/// in all limits or in none.
///
/// If callers state different limits for one key, all of these limits apply to all callers. A limit
/// applies until no caller has stated it for at least two windows and a second, or until there are
/// too many limits.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// The state of each limit. Most keys have one limit.
    limits: SmallVec<[LimitState; 1]>,
    /// The returned slots that lie ahead.
    returned: ReturnedSlots,
    /// The transit slack of the present caller.
    transit_slack: Micros,
    /// The boundary guard of the present caller.
    boundary_guard: Micros,
    /// The ledger's time, which never goes back.
    now: Micros,
    /// By how many microseconds the wall clock is ahead of `now`. Fixed windows follow the wall
    /// clock.
    ahead: i64,
    /// When the ledger was made.
    born: Micros,
    /// The hold of the key.
    hold: Hold,
}

impl Ledger {
    /// Makes an empty ledger with the limits of `spec`.
    pub(crate) fn new(spec: &LimitSpec, now: Micros) -> Self {
        let mut ledger = Ledger {
            limits: SmallVec::new(),
            returned: ReturnedSlots::default(),
            transit_slack: 0,
            boundary_guard: 0,
            now,
            ahead: 0,
            born: now,
            hold: Hold::default(),
        };
        ledger.advance(spec, now);
        ledger
    }

    /// Moves the boundaries of fixed windows to a wall clock that is `ahead` microseconds ahead of
    /// the ledger's time.
    pub(crate) fn align(&mut self, ahead: i64) {
        if ahead != self.ahead {
            self.ahead = ahead;
            self.limits
                .iter_mut()
                .for_each(|state| state.rule.align(ahead));
        }
    }

    /// Advances the ledger to `now`, with the limits of `spec`. Every call starts with this.
    /// Returns the ledger's time.
    pub(crate) fn advance(&mut self, spec: &LimitSpec, now: Micros) -> Micros {
        self.now = self.now.max(now);
        let now = self.now;
        self.transit_slack = micros_up(spec.transit_slack());
        self.boundary_guard = micros_up(spec.boundary_guard());
        for state in &mut self.limits {
            state.advance(now);
        }
        for limit in spec.quota().limits() {
            match self.limits.iter_mut().find(|state| state.limit == *limit) {
                // A statement is recorded only if the last record is older than half a window. So
                // most refusals do not change the state.
                Some(state) if now - state.last_stated > micros_up(limit.window()) / 2 => {
                    state.last_stated = now
                }
                Some(_) => {}
                None => {
                    let rule = self.rule_for(*limit, now);
                    self.limits.push(LimitState::new(*limit, rule, now));
                }
            }
        }
        if self.limits.len() > spec.quota().limits().len() {
            self.limits.retain(|state| state.in_force_until() >= now);
        }
        while self.limits.len() > MOST_LIMITS && self.forget_foreign(spec) {}
        self.drain();
        now
    }

    /// Forgets one of the limits that `spec` does not have: the one that would be forgotten next.
    /// Returns whether there was one.
    ///
    /// The next caller that states the limit adds it again, with the use that the other limits
    /// remember. So a large fleet goes on even if the upstream states another limit to each
    /// process.
    fn forget_foreign(&mut self, spec: &LimitSpec) -> bool {
        let ours = spec.quota().limits();
        let all = self.limits.iter().enumerate();
        let foreign = all.filter(|(_, state)| !ours.contains(&state.limit));
        let first = foreign
            .min_by_key(|(_, state)| state.in_force_until())
            .map(|(index, _)| index);
        first.map(|index| self.limits.remove(index)).is_some()
    }

    /// Removes the returned slots that no request can use any more, also from the logs.
    fn drain(&mut self) {
        let earliest = self.earliest();
        while let Some(unused) = self.returned.pop_before(earliest) {
            self.subtract(unused);
        }
    }

    /// Makes the algorithm of a limit that is new to this key. It starts with the use that the
    /// other limits remember.
    fn rule_for(&self, limit: Limit, now: Micros) -> Algorithm {
        let mut rule = Algorithm::new(limit, self.ahead);
        let longest = self
            .limits
            .iter()
            .filter(|state| matches!(state.rule, Algorithm::Window(_)));
        match longest.max_by_key(|state| state.limit.window()) {
            Some(LimitState {
                rule: Algorithm::Window(window),
                ..
            }) => {
                for chunk in window.chunks() {
                    rule.insert(chunk.stamp, chunk.stamp, chunk.stamp, chunk.count);
                }
            }
            _ => {
                let used = self
                    .limits
                    .iter()
                    .map(|state| state.rule.used(now))
                    .max()
                    .unwrap_or(0);
                if used > 0 {
                    rule.insert(
                        now,
                        now,
                        now + self.transit_slack,
                        used.min(u64::from(limit.largest_cost())),
                    );
                }
            }
        }
        rule.advance(now);
        rule
    }

    /// Adds a hold. From now on no slot is before its end. Returns the hold that applies.
    pub(crate) fn hold(&mut self, hold: Hold) -> Hold {
        self.hold = self.hold.or(hold);
        self.drain();
        self.hold
    }

    /// Adds a hold that begins now. Earlier releases do not end it, even if the process that set it
    /// did not know of them.
    pub(crate) fn hold_anew(&mut self, hold: Hold) -> Hold {
        self.hold(Hold {
            releases: hold.releases.max(self.hold.releases),
            ..hold
        })
    }

    /// Ends the hold, and forgets what is reserved for other clients. Returns the hold that
    /// applies.
    pub(crate) fn release(&mut self) -> Hold {
        self.limits.iter_mut().for_each(LimitState::forget_others);
        self.hold = Hold {
            until: 0,
            cut: false,
            releases: self.hold.releases.saturating_add(1),
        };
        self.hold
    }

    /// Takes in what the upstream states is left of a limit. If less is allowed than before, the
    /// returned slots are removed, because they were granted under the earlier state.
    pub(crate) fn see(&mut self, left: &UpstreamRemaining) {
        let (now, born) = (self.now, self.born);
        let Some(state) = self
            .limits
            .iter_mut()
            .find(|state| state.limit == left.limit)
        else {
            return;
        };
        let sent = now + LONGEST_LIFE.max(micros_up(left.limit.window()) / 20) + self.transit_slack;
        if state.see(left, now, sent, born) {
            while let Some(unused) = self.returned.pop_last() {
                self.subtract(unused);
            }
        }
    }

    /// Returns the earliest moment at which a permit may be used, if no limit forbids it.
    fn earliest(&self) -> Micros {
        self.now.max(self.hold.until)
    }

    /// Books `count` permits of `cost` units each, in as few bookings as their slots allow. No slot
    /// is later than `latest`.
    ///
    /// Calls `granted` with each booking.
    ///
    /// # Errors
    ///
    /// [`TooLate`] at the first permit whose slot would be later than `latest`. This permit and the
    /// permits after it leave no trace.
    pub(crate) fn book(
        &mut self,
        latest: Micros,
        cost: u32,
        mut count: u32,
        life: Micros,
        mut granted: impl FnMut(Booking),
    ) -> Result<(), TooLate> {
        let largest = self
            .limits
            .iter()
            .map(|state| state.limit.largest_cost())
            .min();
        if cost == 0 || largest.is_none_or(|largest| cost > largest) {
            return Err(TooLate {
                slot: Micros::MAX,
                limit: None,
            });
        }
        let cost = u64::from(cost);
        while count > 0 {
            let (slot, limit) = self.first_slot(cost, life);
            if let Some(grant) = self.returned.take(
                self.earliest()..=slot.min(latest),
                cost,
                count,
                life,
                self.transit_slack,
            ) {
                count -= grant.count;
                granted(grant);
                continue;
            }
            if slot > latest {
                let returned = self
                    .returned
                    .first(self.earliest(), cost, life, self.transit_slack);
                return Err(TooLate {
                    slot: returned.map_or(slot, |returned| returned.min(slot)),
                    limit,
                });
            }
            let room = self
                .limits
                .iter_mut()
                .map(|state| state.room(slot))
                .min()
                .unwrap_or(0);
            let fits = u32::try_from(room / cost)
                .unwrap_or(u32::MAX)
                .clamp(1, count);
            let stamp = slot + life + self.transit_slack;
            for state in &mut self.limits {
                state
                    .rule
                    .insert(self.now, slot, stamp, cost * u64::from(fits));
            }
            count -= fits;
            granted(Booking {
                slot,
                life,
                stamp,
                count: fits,
            });
        }
        Ok(())
    }

    /// Books up to `most` of the units that are free now, but at most a quarter of the free units.
    /// So one process cannot hoard a scarce limit.
    pub(crate) fn prefetch(&mut self, most: u32, life: Micros) -> Option<Booking> {
        let count = u32::try_from(self.free() / 4).unwrap_or(u32::MAX).min(most);
        if count == 0 || self.first_slot(u64::from(count), life).0 > self.now {
            return None;
        }
        let stamp = self.now + life + self.transit_slack;
        for state in &mut self.limits {
            state
                .rule
                .insert(self.now, self.now, stamp, u64::from(count));
        }
        Some(Booking {
            slot: self.now,
            life,
            stamp,
            count,
        })
    }

    /// Counts units that were used without a permit `charge.age` ago or earlier, in every limit,
    /// even beyond the limit.
    pub(crate) fn charge(&mut self, charge: Charge) {
        let end = self.now.saturating_sub(micros_down(charge.age));
        if charge.units > 0 {
            for state in &mut self.limits {
                state
                    .rule
                    .charge(self.now, end, self.transit_slack, charge.units);
            }
        }
    }

    /// Takes back unused permits. If their slot lies ahead and nothing is reserved for other
    /// clients then, it is kept for the next caller. Otherwise the permits are removed from the
    /// logs.
    pub(crate) fn take_back(&mut self, unused: UnusedPermits) {
        if unused.units == 0 || unused.stamp < unused.slot {
            return;
        }
        let shared = self
            .limits
            .iter()
            .any(|state| state.reserved(unused.slot) > 0);
        if unused.slot <= self.now || unused.slot < self.earliest() || shared {
            self.subtract(unused);
        } else if let Some(last) = self.returned.put(unused) {
            // There was no room for another returned slot, so the last one leaves the logs. Its
            // units can be booked anew.
            self.subtract(last);
        }
    }

    /// Removes permits from the logs.
    fn subtract(&mut self, unused: UnusedPermits) {
        for state in &mut self.limits {
            state.subtract(self.now, unused);
        }
    }

    /// Returns the first moment at which every limit allows `cost`, and the limit that allows it
    /// last.
    fn first_slot(&mut self, cost: u64, life: Micros) -> (Micros, Option<Limit>) {
        let open = Open {
            life,
            guard: self.boundary_guard,
        };
        let mut slot = self.earliest();
        let mut limit = None;
        for _ in 0..MOST_ROUNDS {
            let before = slot;
            for state in &mut self.limits {
                let first = state.first_slot(slot, cost, open);
                if first > slot {
                    slot = first;
                    limit = Some(state.limit);
                }
            }
            // If one limit moved the slot, the other limits have to allow it too. Each limit moves
            // it only later.
            if slot == before {
                return (slot, limit);
            }
        }
        (Micros::MAX, None)
    }

    /// Returns how many units could leave now.
    pub(crate) fn free(&mut self) -> u64 {
        let now = self.now;
        if self.earliest() > now {
            return 0;
        }
        self.limits
            .iter_mut()
            .map(|state| state.free(now))
            .min()
            .unwrap_or(u64::MAX)
    }

    /// Returns whether other clients are known to use a limit too.
    pub(crate) fn is_shared(&self) -> bool {
        self.limits.iter().any(LimitState::is_shared)
    }

    /// Returns each limit with its used units, its free units, and the units reserved for clients
    /// outside the fleet.
    pub(crate) fn usage(&mut self) -> impl Iterator<Item = (Limit, u64, u64, u64)> {
        let now = self.now;
        self.limits.iter_mut().map(move |state| {
            (
                state.limit,
                state.rule.used(now),
                state.free(now),
                state.reserved(now),
            )
        })
    }

    /// Returns when one unit could be sent, if nothing else is booked.
    pub(crate) fn next_slot(&mut self, life: Micros) -> Micros {
        let slot = self.first_slot(1, life).0;
        self.returned
            .first(self.earliest(), 1, life, self.transit_slack)
            .map_or(slot, |returned| returned.min(slot))
    }

    /// Returns the first moment from which a new ledger would grant the same. From then on, this
    /// ledger can be forgotten.
    pub(crate) fn fresh_from(&self) -> Micros {
        let limits = self
            .limits
            .iter()
            .map(|state| state.fresh_from())
            .max()
            .unwrap_or(0);
        let returned = self.returned.last_slot().map_or(0, |slot| slot + 1);
        // The number of releases matters only while messages about an older hold may still arrive,
        // so it keeps no ledger.
        limits.max(returned).max(self.hold.until)
    }
}
