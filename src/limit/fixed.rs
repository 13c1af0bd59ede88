//! Fixed windows, aligned to the epoch.
//!
//! Twin: `store/redis/lua/fixed.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::Micros;
use super::advance::AdvanceBooking;
use super::algorithm::PermitTime;

/// Allows at most `limit` units in each window. It allows none within a guard of a boundary,
/// because the upstream may count them on either side. The caller states the guard
/// ([`LimitSpec::boundary_guard`](super::LimitSpec::boundary_guard)).
///
/// Windows are numbered: window `n` begins at `n * window - phase` in the ledger's time. The
/// boundaries follow the wall clock, but the ledger's time ignores a step of that clock. So when
/// the wall clock is set, `phase` changes. Then the units of an old window count in each new window
/// that overlaps it, up to that of the last stamp, because the other moments of their use are not kept. So the limit is
/// never exceeded. Until the end of the window of the last stamp, less than the limit is used. Without that bound, each
/// step would take a further window.
#[derive(Clone, Debug)]
pub(super) struct Fixed {
    /// The units that are allowed in each window.
    limit: u64,
    /// The length of a window.
    window: Micros,
    /// How much earlier than the multiples of `window` the windows begin. Less than `window`.
    phase: Micros,
    /// The number and the units of each window that has any, sorted by number. The window before
    /// the current one is kept, because the current one may begin earlier when the clock is set.
    used: VecDeque<(u64, u64)>,
    /// The number of the first window that is open. Earlier windows take no more units.
    open_from: u64,
    /// The last stamp of the permits that were counted, or the last use without a permit.
    last_stamp: Micros,
}

/// The most windows whose units are kept. If more are booked ahead, the earliest of them closes.
const MOST_WINDOWS: usize = 64;

/// The most windows between the slots of advance bookings that join.
const MOST_JOINED_WINDOWS: u64 = 8;

/// The smallest step of the boundaries: 20 ms. A smaller move is a drift of the clocks, and the
/// units of a window stay in that window.
const SMALLEST_STEP: Micros = 20_000;

impl Fixed {
    /// Makes a fixed window of which nothing is used yet. The wall clock is `ahead` microseconds
    /// ahead of the ledger's time.
    pub(super) fn new(limit: u32, window: Micros, ahead: i64) -> Self {
        let (limit, phase) = (u64::from(limit), phase(ahead, window));
        Fixed {
            limit,
            window,
            phase,
            used: VecDeque::new(),
            open_from: 0,
            last_stamp: 0,
        }
    }

    /// Returns windows with the same use and another limit.
    pub(super) fn with_limit(&self, limit: u32) -> Self {
        Fixed {
            limit: u64::from(limit),
            ..self.clone()
        }
    }

    /// Returns the number of the window of a moment.
    fn number(&self, at: Micros) -> u64 {
        at.saturating_add(self.phase) / self.window
    }

    fn start(&self, number: u64) -> Micros {
        number
            .saturating_mul(self.window)
            .saturating_sub(self.phase)
    }

    /// Forgets windows that are over.
    pub(super) fn advance(&mut self, now: Micros) {
        let current = self.number(now);
        while self
            .used
            .front()
            .is_some_and(|&(window, _)| window + 1 < current)
        {
            self.used.pop_front();
        }
    }

    /// Moves the boundaries to a wall clock that is `ahead` microseconds ahead of the ledger's
    /// time. First forgets the windows that are over by the old boundaries: nothing that was used
    /// in them is in a window that is open now.
    pub(super) fn align(&mut self, ahead: i64, now: Micros) {
        let phase = phase(ahead, self.window);
        if phase == self.phase {
            return;
        }
        self.advance(now);
        let moved = phase.abs_diff(self.phase);
        let is_drift = moved.min(self.window - moved) < SMALLEST_STEP;
        let moved = Fixed {
            phase,
            used: VecDeque::new(),
            open_from: 0,
            ..*self
        };
        let old = std::mem::replace(self, moved);
        if old.open_from > 0 {
            let closed = self.overlapping(&old, old.open_from - 1, is_drift);
            self.open_from = closed.end() + 1;
        }
        for &(number, units) in &old.used {
            for number in self.overlapping(&old, number, is_drift) {
                self.add(number, units);
            }
        }
    }

    /// Returns the numbers of the windows that may have the units of a window of `old`, whose boundaries are
    /// others.
    fn overlapping(&self, old: &Fixed, number: u64, is_drift: bool) -> RangeInclusive<u64> {
        let start = old.start(number);
        if is_drift {
            let number = self.number(start + self.window / 2);
            return number..=number;
        }
        let last = (start + self.window - 1).min(self.last_stamp.max(start));
        self.number(start)..=self.number(last)
    }

    /// Returns the numbers of the windows in which the units of an advance booking count. These are
    /// all windows between its slots, because their distance is bounded by
    /// [`longest_join`](Fixed::longest_join). If the bookings joined before this limit was stated,
    /// there may be more windows, and the first of them count.
    fn windows_of(&self, booking: &AdvanceBooking) -> RangeInclusive<u64> {
        let first = self.number(booking.slot);
        let last = self.number(booking.last_slot);
        first..=last.min(first + MOST_JOINED_WINDOWS)
    }

    /// Returns the units used or booked in the window of this number.
    fn units_with(&self, advance: &[AdvanceBooking], window: u64) -> u64 {
        let booked: u64 = advance
            .iter()
            .filter(|booking| self.windows_of(booking).contains(&window))
            .map(|booking| booking.units)
            .sum();
        self.units_in(window) + booked
    }

    /// Returns the units used in the window of this number, without the advance bookings.
    fn units_in(&self, window: u64) -> u64 {
        self.place(window).map_or(0, |index| self.used[index].1)
    }

    /// Returns the index of the window of this number in `used`, or where it would be.
    fn place(&self, number: u64) -> Result<usize, usize> {
        self.used
            .binary_search_by_key(&number, |&(window, _)| window)
    }

    /// Returns the first slot, not before `from`, for `cost` units. The whole life of the permit
    /// lies in one window, `guard` away from its boundaries. That window has room besides
    /// `reserved` units, or has no units.
    pub(super) fn first_slot(
        &self,
        from: Micros,
        cost: u64,
        open: PermitTime,
        reserved: u64,
        advance: &[AdvanceBooking],
    ) -> Micros {
        let PermitTime { life, guard, .. } = open;
        let guard = self.bounded(guard);
        let most = self.limit.saturating_sub(reserved).max(cost);
        let mut window = self.number(from).max(self.open_from);
        let whole = self.window.saturating_sub(2 * guard);
        loop {
            let start = self.start(window).saturating_add(guard);
            let slot = from.max(start);
            let last = start.saturating_add(whole.saturating_sub(life));
            if slot <= last && self.units_with(advance, window) + cost <= most {
                return slot;
            }
            if window >= u64::MAX / self.window - 1 {
                return u64::MAX;
            }
            window += 1;
        }
    }

    /// Returns how long a permit may be valid at a slot, so that it is used in the window of that slot.
    pub(super) fn longest_life(&self, slot: Micros, guard: Micros) -> Micros {
        let end = self.start(self.number(slot) + 1);
        end.saturating_sub(self.bounded(guard)).saturating_sub(slot)
    }

    /// Returns the guard that applies. That of a caller that does not know this limit may be longer than a
    /// window.
    fn bounded(&self, guard: Micros) -> Micros {
        guard.min(self.window / 4)
    }

    /// Returns whether the window of a moment takes units.
    pub(super) fn is_open(&self, at: Micros) -> bool {
        self.number(at) >= self.open_from
    }

    /// Returns how many units may leave at `slot`.
    pub(super) fn room(&self, slot: Micros, advance: &[AdvanceBooking]) -> u64 {
        if !self.is_open(slot) {
            return 0;
        }
        self.limit
            .saturating_sub(self.units_with(advance, self.number(slot)))
    }

    /// Returns the units used in the current window.
    pub(super) fn used(&self, now: Micros, advance: &[AdvanceBooking]) -> u64 {
        self.units_with(advance, self.number(now))
    }

    /// Returns the units of each window that has begun and is kept, with the last moment, not after
    /// `now`, at which they may have been used.
    pub(super) fn last_uses(&self, now: Micros) -> impl Iterator<Item = (Micros, u64)> {
        let current = self.number(now);
        let begun = self
            .used
            .iter()
            .filter(move |(number, _)| *number <= current);
        begun.map(move |&(number, units)| (now.min(self.start(number + 1) - 1), units))
    }

    /// Counts units in the window of `slot`.
    pub(super) fn insert(&mut self, slot: Micros, stamp: Micros, units: u64) {
        self.last_stamp = self.last_stamp.max(stamp);
        self.add(self.number(slot), units);
    }

    /// Counts units of an advance booking whose slot has come.
    pub(super) fn insert_due(&mut self, booking: AdvanceBooking) {
        self.last_stamp = self.last_stamp.max(booking.stamp);
        self.windows_of(&booking)
            .for_each(|number| self.add(number, booking.units));
    }

    /// Returns how far the slots of joined advance bookings may be apart. Joined units count in
    /// each window between their slots.
    pub(super) fn longest_join(&self) -> Micros {
        self.window.saturating_mul(MOST_JOINED_WINDOWS)
    }

    /// Counts units that were used without a permit. Units that were used in an earlier window than
    /// the current one do not count.
    pub(super) fn charge(&mut self, now: Micros, used_at: Micros, units: u64) {
        if self.number(used_at) >= self.number(now) {
            self.insert(used_at, used_at, units);
        }
    }

    /// Adds units to the window of this number.
    fn add(&mut self, number: u64, units: u64) {
        match self.place(number) {
            Ok(index) => self.used[index].1 += units,
            Err(index) => self.used.insert(index, (number, units)),
        }
        while self.used.len() > MOST_WINDOWS {
            if let Some((closed, _)) = self.used.pop_front() {
                self.open_from = self.open_from.max(closed + 1);
            }
        }
    }

    /// Takes back units that were not used.
    pub(super) fn subtract(&mut self, slot: Micros, units: u64) {
        if let Ok(index) = self.place(self.number(slot)) {
            self.used[index].1 = self.used[index].1.saturating_sub(units);
        }
    }

    /// Returns the end of the last window that has units or is closed.
    pub(super) fn fresh_from(&self, advance: &[AdvanceBooking]) -> Micros {
        let used = self.used.iter().rev().find(|(_, units)| *units > 0);
        let booked = advance
            .iter()
            .map(|booking| *self.windows_of(booking).end());
        let last = booked.chain(used.map(|(window, _)| *window)).max();
        let after_last = last.map_or(0, |window| window + 1);
        match after_last.max(self.open_from) {
            0 => 0,
            open => self.start(open),
        }
    }
}

/// Returns the phase of windows that follow a wall clock `ahead` microseconds ahead of the ledger's
/// time.
fn phase(ahead: i64, window: Micros) -> Micros {
    let window = i128::from(window);
    i128::from(ahead).rem_euclid(window) as Micros // less than the window
}
