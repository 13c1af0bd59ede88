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

/// What the costs of one name say of the next one.
pub(crate) enum TypicalCost {
    Quantile(u32),
    LargestOfFew(u32),
}

impl Costs {
    /// An estimate from `n` costs, if they are few, is this many `n`-ths above the largest.
    const MARGIN: u64 = 3;

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

    /// Returns the quantile. Of a few costs, more than the largest: four times the only one, twice the largest of three.
    // Many requests may start before the first is settled, and its answer may be a cheap one. With no estimate before 20
    // costs are known, a limit that has room for one cautious guess a window took 20 windows to learn.
    pub(super) fn estimate(&self) -> Option<u32> {
        let count = self.count as u64;
        match self.typical()? {
            TypicalCost::Quantile(quantile) => Some(quantile),
            TypicalCost::LargestOfFew(largest) => {
                let cautious = u64::from(largest) * (count + Costs::MARGIN) / count;
                Some(u32::try_from(cautious).unwrap_or(u32::MAX))
            }
        }
    }

    pub(super) fn typical(&self) -> Option<TypicalCost> {
        if self.count >= Estimates::LEAST {
            return Some(TypicalCost::Quantile(self.quantile));
        }
        let largest = self.recent[..self.count].iter().max()?;
        Some(TypicalCost::LargestOfFew(*largest))
    }
}
