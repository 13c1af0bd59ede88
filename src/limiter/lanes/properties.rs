//! Lanes against two plain lists: the waiters, and the slots.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::{Booked, HandOut, Lanes, SlotWait};
use crate::limiter::reservation::ProbeNumber;
use crate::wait_queue::{Number, WaitBound};
use crate::wakers::Wakers;

/// Permits of one slot.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Slot {
    cost: u32,
    at: Instant,
    permits: usize,
}

impl Booked for Slot {
    type Costs = u32;
    type Outcome = Instant;

    fn costs(&self) -> &u32 {
        &self.cost
    }

    fn at(&self) -> Instant {
        self.at
    }

    fn until(&self) -> Option<Instant> {
        None
    }

    fn permits(&self) -> usize {
        self.permits
    }

    fn split(&mut self, permits: usize) -> Option<Self> {
        let left = self.permits.checked_sub(permits).filter(|left| *left > 0)?;
        self.permits = left;
        Some(Slot { permits, ..*self })
    }

    fn granted(self, _is_in_line: bool, _probe: Option<ProbeNumber>) -> Instant {
        self.at
    }
}

#[derive(Clone, Debug)]
enum Step {
    Enter(u32, Number),
    Leave(usize),
    Add { cost: u32, at: u64, permits: usize },
    TakeBefore(u64),
    TakeAfter(u64, usize),
    Trim,
    HandOut { at: u64, most: usize },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..4_u32, 0..50_u64).prop_map(|(cost, number)| Step::Enter(cost, number)),
        2 => (0..20_usize).prop_map(Step::Leave),
        4 => (1..4_u32, 0..20_u64, 1..4_usize)
            .prop_map(|(cost, at, permits)| Step::Add { cost, at, permits }),
        1 => (0..20_u64).prop_map(Step::TakeBefore),
        1 => (0..20_u64, 0..9_usize).prop_map(|(at, most)| Step::TakeAfter(at, most)),
        2 => Just(Step::Trim),
        1 => (0..20_u64, 0..9_usize).prop_map(|(at, most)| Step::HandOut { at, most }),
    ]
}

/// The model: the waiters with their costs, and each permit.
#[derive(Default)]
struct Model {
    waiters: Vec<(Number, u32)>,
    permits: Vec<(Instant, u32)>,
}

impl Model {
    fn of_cost(&self, cost: u32) -> (Vec<Number>, Vec<Instant>) {
        let waiters = self.waiters.iter().filter(|waiter| waiter.1 == cost);
        let permits = self.permits.iter().filter(|permit| permit.1 == cost);
        let mut waiters: Vec<_> = waiters.map(|waiter| waiter.0).collect();
        let mut permits: Vec<_> = permits.map(|permit| permit.0).collect();
        waiters.sort_unstable();
        permits.sort_unstable();
        (waiters, permits)
    }

    fn remove(&mut self, slot: Slot) {
        for _ in 0..slot.permits {
            let same = |permit: &(Instant, u32)| *permit == (slot.at, slot.cost);
            let place = self.permits.iter().position(same).expect("it was there");
            self.permits.remove(place);
        }
    }
}

proptest! {
    #![proptest_config(histories::config(128))]

    /// Whatever is added, taken and handed out, each lane is found by what it has.
    #[test]
    fn lanes_know_who_has_a_slot(steps in prop::collection::vec(step(), 0..60)) {
        let start = crate::clock::now();
        let at = |millis| start + Duration::from_millis(millis);
        let wait = || SlotWait::new(WaitBound::new(None, start, Duration::from_secs(60), Duration::ZERO), start);
        let mut wakers = Wakers::default();
        let mut lanes: Lanes<Slot> = Lanes::default();
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Enter(cost, number) => {
                    if model.waiters.iter().all(|waiter| waiter.0 != number) {
                        model.waiters.push((number, cost));
                        lanes.change(&cost, |lane| lane.enter(number, wait(), at(60_000)));
                    }
                }
                Step::Leave(index) => {
                    if index < model.waiters.len() {
                        let (number, cost) = model.waiters.remove(index);
                        prop_assert!(lanes.leave(number, &cost).is_some());
                    }
                }
                Step::Add { cost, at: slot, permits } => {
                    let slot = Slot { cost, at: at(slot), permits };
                    model.permits.extend(std::iter::repeat_n((slot.at, cost), permits));
                    lanes.add(slot);
                }
                Step::TakeBefore(until) => {
                    lanes.change_all(|lane| lane.take_before(at(until), |slot| model.remove(slot)));
                    prop_assert!(model.permits.iter().all(|permit| permit.0 >= at(until)));
                }
                Step::TakeAfter(moment, most) => {
                    let mut taken = Vec::new();
                    lanes.take_after(at(moment), most, |slot| taken.push(slot));
                    prop_assert!(taken.len() <= most);
                    prop_assert!(taken.iter().all(|slot| slot.at > at(moment)));
                    prop_assert!(taken.is_sorted_by(|one, other| one.at >= other.at));
                    taken.into_iter().for_each(|slot| model.remove(slot));
                }
                Step::Trim => {
                    lanes.trim(None, |slot| model.remove(slot));
                    for cost in 1..4 {
                        let (waiters, permits) = model.of_cost(cost);
                        prop_assert!(permits.len() <= waiters.len());
                    }
                }
                Step::HandOut { at: moment, most } => {
                    let now = at(moment);
                    let how = HandOut { most, probe: None, running: None, now };
                    let handed = lanes.hand_out(how, |_| true, |_| {}, &mut wakers);
                    prop_assert!(handed.count <= most && !handed.died);
                    let mut got = 0;
                    for (number, cost) in model.waiters.clone() {
                        if let Some(slot) = lanes.collect(number, &cost, start) {
                            got += 1;
                            model.waiters.retain(|waiter| waiter.0 != number);
                            model.remove(Slot { cost, at: slot, permits: 1 });
                            // Nobody with the same costs was passed over.
                            let (waiters, _) = model.of_cost(cost);
                            let waits = |other: &Number| {
                                lanes.get(&cost).is_some_and(|lane| lane.get(*other).is_some())
                            };
                            prop_assert!(!waiters.iter().any(|other| *other < number && waits(other)));
                        }
                    }
                    prop_assert_eq!(got, handed.count);
                }
            }
            let mut first_slots = Vec::new();
            let mut without_slot = Vec::new();
            for cost in 1..4 {
                let (waiters, permits) = model.of_cost(cost);
                first_slots.extend(permits.first().filter(|_| !waiters.is_empty()));
                let lacking: Vec<Number> = waiters.iter().skip(permits.len()).copied().collect();
                let lane = lanes.get(&cost);
                let found: Option<Vec<Number>> =
                    lane.map(|lane| lane.numbers_without_slot().collect());
                prop_assert_eq!(found.unwrap_or_default(), lacking.clone());
                for (number, slot) in waiters.iter().zip(&permits) {
                    prop_assert_eq!(lane.and_then(|lane| lane.slot_of(*number)), Some(*slot));
                }
                without_slot.extend(lacking);
            }
            let last_slot = model.permits.iter().map(|permit| permit.0).max();
            prop_assert_eq!(lanes.next_slot(), first_slots.into_iter().min());
            prop_assert_eq!(lanes.last_slot(), last_slot);
            prop_assert_eq!(lanes.waiting(), model.waiters.len());
            prop_assert_eq!(lanes.waiting_without_slot(), without_slot.len());
            let first = lanes.first_without_slot().map(|(number, _)| number);
            prop_assert_eq!(first, without_slot.into_iter().min());
        }
    }
}
