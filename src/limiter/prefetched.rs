//! Permits fetched ahead of need, so that the next calls need no store.
//!
//! How many follows from how fast they are used: twice as many when they were used up before half their life, half as
//! many when more than half of them come back.

use std::time::{Duration, Instant};

use super::reservation::Slot;
use crate::clock;
use crate::limit::{Terms, Unused};

/// Units of one slot that is due.
pub(super) struct Stock {
    units: u32,
    until: Instant,
    slot: u64,
    stamp: u64,
    incarnation: u64,
    /// How many there were.
    fetched: u32,
    /// Who asks the store again before this moment is in a hurry.
    soon: Instant,
    /// How many to fetch next time.
    next: u32,
}

impl Stock {
    pub(super) fn new(now: Instant) -> Self {
        Stock { units: 0, until: now, slot: 0, stamp: 0, incarnation: 0, fetched: 0, soon: now, next: 0 }
    }

    /// Until when it is of use.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Until when it is of use to know how fast permits are used.
    pub(super) fn soon(&self) -> Instant {
        self.soon
    }

    /// Units at hand.
    pub(super) fn units(&self, now: Instant) -> u32 {
        if now < self.until { self.units } else { 0 }
    }

    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Slot> {
        let &mut Stock { until, slot, stamp, incarnation, .. } = self;
        self.spend(cost, now).then_some(Slot { at: now, until, cost, count: 1, slot, stamp, incarnation })
    }

    /// The same, for a request that leaves at once.
    #[inline]
    pub(super) fn spend(&mut self, cost: u32, now: Instant) -> bool {
        let enough = cost <= self.units && now < self.until;
        if enough {
            self.units -= cost;
        }
        enough
    }

    /// Takes up to `most` permits.
    pub(super) fn take_many(&mut self, cost: u32, most: usize, now: Instant) -> Option<Slot> {
        if now >= self.until || cost == 0 {
            return None;
        }
        let count = (self.units / cost).min(u32::try_from(most).unwrap_or(u32::MAX));
        self.units -= count * cost;
        let &mut Stock { until, slot, stamp, incarnation, .. } = self;
        (count > 0).then_some(Slot { at: now, until, cost, count, slot, stamp, incarnation })
    }

    /// Takes back a permit of this stock. Answers whether it was one, and of use.
    pub(super) fn put(&mut self, slot: &Slot, now: Instant) -> bool {
        let ours = (self.slot, self.stamp) == (slot.slot, slot.stamp) && now < self.until;
        if ours {
            self.units = self.units.saturating_add(slot.cost);
        }
        ours
    }

    /// Puts what was fetched on the shelf.
    pub(super) fn fill(&mut self, slot: &Slot) {
        let units = slot.cost.saturating_mul(slot.count);
        (self.units, self.fetched) = (units, units);
        (self.until, self.slot, self.stamp) = (slot.until, slot.slot, slot.stamp);
        self.incarnation = slot.incarnation;
    }

    /// Takes out what is left, for the store.
    pub(super) fn clear(&mut self) -> Option<Unused> {
        let &mut Stock { units, slot, stamp, incarnation, .. } = self;
        let left = Unused { slot, stamp, units: u64::from(units), incarnation };
        (self.units, self.fetched) = (0, 0);
        (left.units > 0).then_some(left)
    }

    /// The store is about to be asked for permits that live for `life`: how many to fetch besides.
    pub(super) fn order(&mut self, terms: &Terms, life: Duration, now: Instant) -> u32 {
        let most = most_ahead(terms);
        if self.units > self.fetched / 2 {
            self.next /= 2;
        } else if now < self.soon {
            self.next = self.next.saturating_mul(2).max(1);
        }
        self.next = self.next.min(most);
        self.soon = clock::after(now, life / 2);
        self.next
    }
}

/// At most a fiftieth of the smallest limit.
fn most_ahead(terms: &Terms) -> u32 {
    let limits = terms.quota().limits().iter();
    limits.map(|limit| limit.count().min(limit.largest_cost()) / 50).min().unwrap_or(0)
}
