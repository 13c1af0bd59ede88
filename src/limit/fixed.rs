//! Fixed windows, aligned to the epoch.

use std::collections::VecDeque;

use super::Micros;

/// At most `limit` units in each window; nothing within `guard` of a boundary, where nobody can tell on which side
/// the upstream will count it.
#[derive(Debug)]
pub(super) struct Fixed {
    limit: u64,
    window: Micros,
    guard: Micros,
    /// The units of each window from the current one on that has any; sorted.
    used: VecDeque<(u64, u64)>,
    /// Windows before this one take nothing more.
    open_from: u64,
}

/// The most windows that are kept apart; when more are booked ahead, the earliest of them closes.
const MOST_WINDOWS: usize = 64;

impl Fixed {
    pub(super) fn new(limit: u32, window: Micros, guard: Micros) -> Self {
        Fixed { limit: u64::from(limit), window, guard, used: VecDeque::new(), open_from: 0 }
    }

    pub(super) fn advance(&mut self, now: Micros) {
        let current = now / self.window;
        while self.used.front().is_some_and(|&(window, _)| window < current) {
            self.used.pop_front();
        }
    }

    fn units_in(&self, window: u64) -> u64 {
        let at = self.used.binary_search_by_key(&window, |&(window, _)| window);
        at.map_or(0, |index| self.used[index].1)
    }

    /// The first moment not before `from` whose whole life lies in one window that has room besides `reserved` units, or
    /// nothing in it.
    pub(super) fn first_slot(&self, from: Micros, cost: u64, life: Micros, reserved: u64) -> Micros {
        let most = self.limit.saturating_sub(reserved).max(cost);
        let mut window = (from / self.window).max(self.open_from);
        let open = self.window.saturating_sub(2 * self.guard);
        loop {
            let start = window.saturating_mul(self.window).saturating_add(self.guard);
            let slot = from.max(start);
            let last = start.saturating_add(open.saturating_sub(life));
            if slot <= last && self.units_in(window) + cost <= most {
                return slot;
            }
            if window == u64::MAX / self.window {
                return u64::MAX;
            }
            window += 1;
        }
    }

    /// How many units may go at `slot`.
    pub(super) fn room(&self, slot: Micros) -> u64 {
        let window = slot / self.window;
        if window < self.open_from {
            return 0;
        }
        self.limit.saturating_sub(self.units_in(window))
    }

    pub(super) fn used(&self, now: Micros) -> u64 {
        self.units_in(now / self.window)
    }

    pub(super) fn insert(&mut self, slot: Micros, units: u64) {
        let window = slot / self.window;
        match self.used.binary_search_by_key(&window, |&(window, _)| window) {
            Ok(index) => self.used[index].1 += units,
            Err(index) => self.used.insert(index, (window, units)),
        }
        while self.used.len() > MOST_WINDOWS {
            if let Some((closed, _)) = self.used.pop_front() {
                self.open_from = self.open_from.max(closed + 1);
            }
        }
    }

    pub(super) fn subtract(&mut self, slot: Micros, units: u64) {
        if let Ok(index) = self.used.binary_search_by_key(&(slot / self.window), |&(window, _)| window) {
            self.used[index].1 = self.used[index].1.saturating_sub(units);
        }
    }

    pub(super) fn fresh_from(&self) -> Micros {
        let last = self.used.iter().rev().find(|&&(_, units)| units > 0).map_or(0, |&(window, _)| window + 1);
        last.max(self.open_from).saturating_mul(self.window)
    }
}
