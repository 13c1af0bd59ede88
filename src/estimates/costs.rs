//! The recent costs of one name, and their quantile.

use super::Estimates;

/// The last costs, in a ring.
pub(super) struct Costs {
    recent: [u32; Estimates::RECENT],
    /// How many there are.
    count: usize,
    /// Where the next one goes.
    next: usize,
    /// The quantile of those that there are.
    quantile: u32,
}

impl Costs {
    pub(super) fn new() -> Self {
        Costs {
            recent: [0; Estimates::RECENT],
            count: 0,
            next: 0,
            quantile: 0,
        }
    }

    /// Adds a cost, in the place of the oldest if there is no other.
    pub(super) fn learn(&mut self, actual: u32, quantile: f64) {
        self.recent[self.next] = actual;
        self.next = (self.next + 1) % self.recent.len();
        self.count = self.recent.len().min(self.count + 1);
        let mut costs = self.recent;
        let costs = &mut costs[..self.count];
        let at_most = (quantile * self.count as f64).ceil() as usize;
        let rank = at_most.clamp(1, self.count) - 1;
        self.quantile = *costs.select_nth_unstable(rank).1;
    }

    /// Returns the quantile, if enough costs are known.
    pub(super) fn estimate(&self) -> Option<u32> {
        (self.count >= Estimates::LEAST).then_some(self.quantile)
    }
}
