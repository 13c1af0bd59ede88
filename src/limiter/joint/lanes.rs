//! The requests of a joint set by their costs, and which of them have a joint slot.

use std::collections::{BTreeMap, BTreeSet};

use crate::limiter::part::Costs;
use crate::limiter::queue::Number;

/// The requests that wait in a set, one lane for equal costs.
///
/// A joint slot can be used by any request with its costs. The slots of a lane are for its first
/// requests.
#[derive(Debug, Default)]
pub(super) struct Lanes(BTreeMap<Costs, Lane>);

#[derive(Debug, Default)]
struct Lane {
    waiting: BTreeSet<Number>,
    slots: usize,
}

impl Lane {
    /// Returns the first request without a slot.
    fn first_without_slot(&self) -> Option<Number> {
        let without_slot = self.waiting.len().checked_sub(self.slots)?;
        let behind = without_slot.checked_sub(1)?;
        let mut numbers = self.waiting.iter();
        // Mostly either few have a slot, or few have none.
        if behind < self.slots {
            numbers.nth_back(behind).copied()
        } else {
            numbers.nth(self.slots).copied()
        }
    }
}

impl Lanes {
    pub(super) fn enter(&mut self, costs: &Costs, number: Number) {
        self.change(costs, |lane| {
            lane.waiting.insert(number);
        });
    }

    /// Removes a request. Its slot goes to the next request of its lane.
    pub(super) fn leave(&mut self, costs: &Costs, number: Number) {
        self.change(costs, |lane| {
            lane.waiting.remove(&number);
        });
    }

    pub(super) fn add_slot(&mut self, costs: &Costs) {
        self.change(costs, |lane| lane.slots += 1);
    }

    pub(super) fn remove_slot(&mut self, costs: &Costs) {
        self.change(costs, |lane| lane.slots = lane.slots.saturating_sub(1));
    }

    fn change(&mut self, costs: &Costs, change: impl FnOnce(&mut Lane)) {
        if let Some(lane) = self.0.get_mut(costs) {
            change(lane);
            if lane.waiting.is_empty() && lane.slots == 0 {
                self.0.remove(costs);
            }
        } else {
            change(self.0.entry(costs.clone()).or_default());
        }
    }

    /// Returns the first request with these costs.
    pub(super) fn first(&self, costs: &Costs) -> Option<Number> {
        self.0.get(costs)?.waiting.first().copied()
    }

    /// Returns how many requests with these costs are before a request.
    pub(super) fn before(&self, costs: &Costs, number: Number) -> usize {
        let lane = self.0.get(costs);
        lane.map_or(0, |lane| lane.waiting.range(..number).count())
    }

    /// Returns the first request without a slot.
    pub(super) fn first_without_slot(&self) -> Option<Number> {
        self.0.values().filter_map(Lane::first_without_slot).min()
    }

    /// Returns the requests without a slot, in no order.
    pub(super) fn all_without_slot(&self) -> impl Iterator<Item = Number> {
        let lanes = self.0.values();
        lanes.flat_map(|lane| lane.waiting.iter().skip(lane.slots).copied())
    }

    /// Returns the requests that have a slot, but none of the first slots of their lane. `first` returns
    /// the number of first slots for the costs of a lane.
    pub(super) fn with_slot_beyond(&self, first: impl Fn(&Costs) -> usize) -> Vec<Number> {
        let lanes = self.0.iter().flat_map(|(costs, lane)| {
            let with_slot = lane.waiting.iter().take(lane.slots);
            with_slot.skip(first(costs)).copied()
        });
        lanes.collect()
    }

    /// Returns the costs of a slot that no request needs.
    pub(super) fn unneeded(&self) -> Option<Costs> {
        let mut lanes = self.0.iter();
        let (costs, _) = lanes.find(|(_, lane)| lane.slots > lane.waiting.len())?;
        Some(costs.clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Enter(u32, Number),
        Leave(usize),
        Add(u32),
        Remove(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..3_u32, 0..50_u64).prop_map(|(cost, number)| Step::Enter(cost, number)),
            (0..20_usize).prop_map(Step::Leave),
            (0..3_u32).prop_map(Step::Add),
            (0..3_u32).prop_map(Step::Remove),
        ]
    }

    fn costs(cost: u32) -> Costs {
        Costs::from_slice(&[cost])
    }

    proptest! {
        #![proptest_config(histories::config(64))]

        /// The model is a list of all requests in order, and a list of the costs of all slots.
        #[test]
        fn lanes_know_who_has_a_slot(steps in prop::collection::vec(step(), 0..60)) {
            let mut lanes = Lanes::default();
            let mut waiting: BTreeMap<Number, u32> = BTreeMap::new();
            let mut slots: Vec<u32> = Vec::new();
            for step in steps {
                match step {
                    Step::Enter(cost, number) => {
                        if waiting.contains_key(&number) {
                            continue;
                        }
                        waiting.insert(number, cost);
                        lanes.enter(&costs(cost), number);
                    }
                    Step::Leave(index) => {
                        let Some((&number, &cost)) = waiting.iter().nth(index) else { continue };
                        waiting.remove(&number);
                        lanes.leave(&costs(cost), number);
                    }
                    Step::Add(cost) => {
                        slots.push(cost);
                        lanes.add_slot(&costs(cost));
                    }
                    Step::Remove(cost) => {
                        let Some(place) = slots.iter().position(|slot| *slot == cost) else { continue };
                        slots.remove(place);
                        lanes.remove_slot(&costs(cost));
                    }
                }
                let mut free = slots.clone();
                let mut without = Vec::new();
                for (&number, cost) in &waiting {
                    match free.iter().position(|slot| slot == cost) {
                        Some(place) => drop(free.remove(place)),
                        None => without.push(number),
                    }
                }
                prop_assert_eq!(lanes.first_without_slot(), without.first().copied());
                let mut all: Vec<Number> = lanes.all_without_slot().collect();
                all.sort_unstable();
                prop_assert_eq!(&all, &without);
                prop_assert_eq!(lanes.unneeded().is_some(), !free.is_empty());
                let with_slot = lanes.with_slot_beyond(|_| 0).len();
                prop_assert_eq!(with_slot + without.len(), waiting.len());
                for cost in 0..3 {
                    let mut with_cost = waiting.iter().filter(|(_, other)| **other == cost);
                    prop_assert_eq!(lanes.first(&costs(cost)), with_cost.next().map(|(n, _)| *n));
                }
            }
        }
    }
}
