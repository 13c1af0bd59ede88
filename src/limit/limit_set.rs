//! All limits of one key. A permit counts in all of them or in none.
//!
//! Twin: `store/redis/lua/ledger.lua`, and `update_limits` in `main.lua`.
//! After a change: `cargo test --all-features --lib differential`

use super::advance::{AdvanceBooking, TOLERANCE};
use super::algorithm::{Algorithm, Open};
use super::limit_state::LimitState;
use super::limit_states::LimitStates;
use super::{LimitSpec, Micros, UnusedPermits, UpstreamRemaining, micros_up};
use crate::quota::Limit;

/// The longest life of a permit: 50 ms, or a twentieth of the window if that is longer. If a stamp
/// is more than this and the transit slack ahead, its permit was certainly not used yet.
const LONGEST_LIFE: Micros = 50_000;

/// The most limits of one key. A limit that only other callers state is *foreign* to the present
/// caller.
pub(super) const MOST_LIMITS: usize = 32;

/// The most rounds of the search for a slot that all limits allow. Some limits have no such slot,
/// for example fixed windows with different guards.
const MOST_ROUNDS: usize = 1000;

/// All limits of one key.
///
/// If callers state different limits for one key, all of these limits apply to all callers. A limit
/// applies until no caller has stated it for at least two windows and a second, or until there are
/// too many limits.
#[derive(Clone, Debug)]
pub(super) struct LimitSet {
    states: LimitStates,
    /// By how many microseconds the wall clock is ahead of the ledger's time. Fixed windows follow
    /// the wall clock.
    ahead: i64,
}

impl LimitSet {
    /// Makes a set without limits.
    pub(super) fn new() -> Self {
        LimitSet {
            states: LimitStates::NONE,
            ahead: 0,
        }
    }

    /// Moves the boundaries of fixed windows to a wall clock that is `ahead` microseconds ahead of
    /// the ledger's time.
    pub(super) fn align(&mut self, ahead: i64, now: Micros) {
        if ahead != self.ahead {
            self.ahead = ahead;
            self.states
                .iter_mut()
                .for_each(|state| state.rule.align(ahead, now));
        }
    }

    /// Advances all limits to `now`. Adds the limits of `spec`, or records that a caller stated
    /// them. Forgets the limits that no longer apply.
    pub(super) fn update(&mut self, spec: &LimitSpec, now: Micros) {
        for state in self.states.iter_mut() {
            state.advance(now);
        }
        for limit in spec.quota().limits() {
            match self.states.iter_mut().find(|state| state.limit == *limit) {
                // A statement is recorded only if the last record is older than half a window. So
                // most refusals do not change the state.
                Some(state) if now - state.last_stated > micros_up(limit.window()) / 2 => {
                    state.last_stated = now
                }
                Some(_) => {}
                None => {
                    let rule = self.rule_for(*limit, now, micros_up(spec.transit_slack()));
                    self.states.push(LimitState::new(*limit, rule, now));
                }
            }
        }
        if self.states.len() > spec.quota().limits().len() {
            self.states.retain(|state| state.in_force_until() >= now);
        }
        while self.states.len() > MOST_LIMITS && self.forget_foreign(spec) {}
    }

    /// Forgets one of the limits that `spec` does not have: the one that would be forgotten next.
    /// Returns whether there was one.
    ///
    /// The next caller that states the limit adds it again, with the use that the other limits
    /// remember. So a large fleet goes on even if the upstream states another limit to each
    /// process.
    fn forget_foreign(&mut self, spec: &LimitSpec) -> bool {
        let ours = spec.quota().limits();
        let all = self.states.iter().enumerate();
        let foreign = all.filter(|(_, state)| !ours.contains(&state.limit));
        let first = foreign
            .min_by_key(|(_, state)| state.in_force_until())
            .map(|(index, _)| index);
        first.map(|index| self.states.remove(index)).is_some()
    }

    /// Makes the algorithm of a limit that is new to this key. It starts with the use that the
    /// other limits remember: with the log of the longest sliding window, or else with the largest
    /// number of units in use.
    fn rule_for(&self, limit: Limit, now: Micros, transit_slack: Micros) -> Algorithm {
        let mut rule = Algorithm::new(limit, self.ahead);
        let windows = self
            .states
            .iter()
            .filter(|state| matches!(state.rule, Algorithm::Window(_)));
        match windows.max_by_key(|state| state.limit.window()) {
            Some(LimitState {
                rule: Algorithm::Window(window),
                ..
            }) => {
                // Each chunk is inserted as if its stamp were now.
                for chunk in window.chunks() {
                    rule.insert(chunk.stamp, chunk.stamp, chunk.stamp, chunk.count);
                }
            }
            _ => {
                let used = self.states.iter().map(|state| state.rule.used(now)).max();
                let used = used.unwrap_or(0).min(u64::from(limit.largest_cost()));
                if used > 0 {
                    rule.insert(now, now, now + transit_slack, used);
                }
            }
        }
        rule.advance(now);
        rule
    }

    /// Forgets what is reserved for other clients.
    pub(super) fn forget_others(&mut self) {
        self.states.iter_mut().for_each(LimitState::forget_others);
    }

    /// Takes in what the upstream states is left of a limit, in a ledger that was made at
    /// `made_at`. Returns whether less is allowed than before.
    pub(super) fn see(
        &mut self,
        left: &UpstreamRemaining,
        now: Micros,
        made_at: Micros,
        transit_slack: Micros,
        advance: &[AdvanceBooking],
    ) -> bool {
        let longest_life = LONGEST_LIFE.max(micros_up(left.limit.window()) / 20);
        let sent = now + longest_life + transit_slack;
        let stated = |state: &&mut LimitState| state.limit == left.limit;
        self.states
            .iter_mut()
            .find(stated)
            .is_some_and(|state| state.see(left, now, sent, made_at, advance))
    }

    /// Returns the largest cost that every limit allows. `None` if there is no limit.
    pub(super) fn largest_cost(&self) -> Option<u32> {
        let costs = self.states.iter().map(|state| state.limit.largest_cost());
        costs.min()
    }

    /// Returns the first moment, not before `from`, at which every limit allows `cost`, and the
    /// limit that allows it last.
    pub(super) fn first_slot(
        &mut self,
        from: Micros,
        cost: u64,
        open: Open,
        advance: &[AdvanceBooking],
    ) -> (Micros, Option<Limit>) {
        let mut slot = from;
        let mut limit = None;
        for _ in 0..MOST_ROUNDS {
            let before = slot;
            for state in self.states.iter_mut() {
                let first = state.first_slot(slot, cost, open, advance);
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

    /// Returns how many units may leave at `slot`, which is not before the first slot of one unit.
    pub(super) fn room(&mut self, slot: Micros, open: Open, advance: &[AdvanceBooking]) -> u64 {
        let states = self.states.iter_mut();
        let rooms = states.map(|state| state.room(slot, open, advance));
        rooms.min().unwrap_or(0)
    }

    /// Returns whether a permit with this slot becomes an advance booking, if its first free slot
    /// is `free`.
    pub(super) fn is_in_advance(
        &self,
        slot: Micros,
        free: Micros,
        advance: &[AdvanceBooking],
    ) -> bool {
        let windows = self.states.iter().map(|state| state.limit.window());
        let tolerance = windows.min().map_or(0, |window| micros_up(window) / 50);
        slot > free.saturating_add(tolerance.max(TOLERANCE))
            || (advance.first().is_some_and(|first| first.slot <= slot) && self.has_bucket())
    }

    /// Returns whether one of the limits is a bucket, which counts permits in the order of their
    /// slots.
    fn has_bucket(&self) -> bool {
        let mut states = self.states.iter();
        states.any(|state| matches!(state.rule, Algorithm::Bucket(_)))
    }

    /// Returns how far the slots of joined advance bookings may be apart.
    pub(super) fn longest_join(&self) -> Micros {
        let spans = self.states.iter().map(|state| state.rule.longest_join());
        spans.min().unwrap_or(Micros::MAX)
    }

    /// Counts units of a permit in every limit.
    pub(super) fn insert(&mut self, now: Micros, slot: Micros, stamp: Micros, units: u64) {
        for state in self.states.iter_mut() {
            state.rule.insert(now, slot, stamp, units);
        }
    }

    /// Counts units of an advance booking, whose slot has come, in every limit.
    pub(super) fn insert_due(&mut self, now: Micros, booking: AdvanceBooking) {
        for state in self.states.iter_mut() {
            state.rule.insert_due(now, booking);
            // The stamp may have left the window as well.
            state.rule.advance(now);
        }
    }

    /// Counts units in every limit that were used at `used_at` or earlier, even beyond the limit.
    pub(super) fn charge(
        &mut self,
        now: Micros,
        used_at: Micros,
        transit_slack: Micros,
        units: u64,
    ) {
        for state in self.states.iter_mut() {
            state.rule.charge(now, used_at, transit_slack, units);
        }
    }

    /// Takes back permits that were not used.
    pub(super) fn subtract(&mut self, now: Micros, unused: UnusedPermits) {
        for state in self.states.iter_mut() {
            state.subtract(now, unused);
        }
    }

    /// Takes in that advance bookings came back unused.
    pub(super) fn returned(&mut self, now: Micros, unused: UnusedPermits) {
        for state in self.states.iter_mut() {
            state.returned(now, unused);
        }
    }

    /// Returns a moment that is not before the slot of any permit in the logs.
    pub(super) fn log_end(&self) -> Micros {
        let ends = self.states.iter().map(|state| state.rule.log_end());
        ends.max().unwrap_or(0)
    }

    /// Returns whether units of a limit are reserved for other clients at a moment.
    pub(super) fn is_reserved(&self, at: Micros) -> bool {
        self.states.iter().any(|state| state.reserved(at) > 0)
    }

    /// Returns whether other clients are known to use a limit too.
    pub(super) fn is_shared(&self) -> bool {
        self.states.iter().any(LimitState::is_shared)
    }

    /// Returns how many units may leave now.
    pub(super) fn free(&mut self, now: Micros, advance: &[AdvanceBooking]) -> u64 {
        let states = self.states.iter_mut();
        let free = states.map(|state| state.free(now, advance));
        free.min().unwrap_or(u64::MAX)
    }

    /// Returns each limit with its used units, its free units, and the units reserved for other
    /// clients.
    pub(super) fn usage(
        &mut self,
        now: Micros,
        advance: &[AdvanceBooking],
    ) -> impl Iterator<Item = (Limit, u64, u64, u64)> {
        self.states.iter_mut().map(move |state| {
            (
                state.limit,
                state.rule.used_and_booked(now, advance),
                state.free(now, advance),
                state.reserved(now),
            )
        })
    }

    /// Returns for each limit the first moment, not before `from`, at which it allows `cost`.
    /// `Micros::MAX` if it never does.
    pub(super) fn first_slots(
        &mut self,
        from: Micros,
        cost: u32,
        open: Open,
        advance: &[AdvanceBooking],
    ) -> impl Iterator<Item = Micros> {
        self.states.iter_mut().map(move |state| {
            if cost > state.limit.largest_cost() {
                Micros::MAX
            } else {
                state.first_slot(from, u64::from(cost), open, advance)
            }
        })
    }

    /// Returns the first moment from which new limits would grant the same.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        let states = self.states.iter();
        let moments = states.map(|state| state.fresh_from(advance));
        moments.max().unwrap_or(0)
    }
}
