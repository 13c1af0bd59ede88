//! The waiters of a line by costs, and the slots booked for them by time. The queue of a key and the requests with
//! the same keys both stand in such [`Lanes`].
//!
//! A slot is booked for the costs of a request, so the waiters with equal costs and their slots are two sorted lists, a
//! [`Lane`]: the first waiter gets the first slot. If a waiter leaves, the next waiter of its lane has its slot. A waiter
//! that could not use its slot in time is first again.
//!
//! There may be as many lanes as waiters, such as requests that cost their tokens. So nothing looks at all of them
//! for the sake of one: the lanes are found by their first and last slot, and by their first waiter without one.
//!
//! What differs between a key and several is how slots are booked. That is left to the owners.
//!
//! # Slots that are booked anew
//!
//! A slot that comes back unused may let waiters leave earlier whose slots were booked behind it. So the next slots
//! behind it go back as well, and the next call books for their waiters again, in their order
//! ([`Lanes::take_after`]).
//!
//! # How many are woken at once
//!
//! Only so many permits are on their way to tasks as are in time for them: see [`Handed`].
//!
//! For the same reason only the first waiters have timers for their slots ([`FRONT`]): to set those of 100,000 waiters that
//! are booked anew took longer than a permit lasts. A waiter that comes to the front gets its timer. If no task of the
//! front comes, the owner goes on ([`Lanes::goes_on_at`]).

mod handed;
mod lane;
#[cfg(test)]
mod properties;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::task::Context;
use std::time::{Duration, Instant};

use super::reservation::ProbeNumber;
use crate::clock;
use crate::tuning::{ANSWER, MISSED};
use crate::wait_queue::{Left, Number};
use crate::wakers::Wakers;

use handed::Handed;
use lane::LaneFacts;
pub(super) use lane::{Lane, SlotWait};

/// How many waiters of a lane have timers for their slots.
const FRONT: usize = 64;

/// Permits of one slot, for requests with these costs.
pub(super) trait Booked: Sized + Debug {
    /// The default is the least.
    type Costs: Ord + Clone + Default + Debug;
    /// How the wait of a request ends.
    type Outcome: Debug;

    fn costs(&self) -> &Self::Costs;
    fn at(&self) -> Instant;
    /// Returns when it expires, if it does.
    fn until(&self) -> Option<Instant>;
    fn permits(&self) -> usize;
    /// Splits off `permits`. `None` if there are no more than that.
    fn split(&mut self, permits: usize) -> Option<Self>;
    /// Returns the outcome of a request that gets this permit. `is_in_line`: it has waited for it.
    fn granted(self, is_in_line: bool, probe: Option<ProbeNumber>) -> Self::Outcome;
}

/// How slots are handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandOut {
    /// How many permits at most.
    pub(super) most: usize,
    /// The probe that the first request leaves as.
    pub(super) probe: Option<ProbeNumber>,
    /// The waiter whose task runs, so it is not woken.
    pub(super) running: Option<Number>,
    pub(super) now: Instant,
}

/// What is known of tasks that come too late.
#[derive(Clone, Copy, Debug)]
struct Late {
    /// How long a permit is on its way to its task.
    takes: Duration,
    /// How many waiters may be settled with a slot for which they did not come.
    most_missed: usize,
}

/// Which permits were handed out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HandedOut {
    /// How many permits waiters got.
    pub(super) count: usize,
    /// Whether permits had expired before a waiter took them.
    pub(super) died: bool,
    /// How many waiters did not come for their slots.
    missed: usize,
    /// Whether a slot that is due stays, because it may not be handed out yet.
    stays: bool,
}

/// The costs of some lanes, sorted by what finds them: a moment, a waiter, or neither.
///
/// All four are of one type: each further type of sorted set adds some 6,000 lines of LLVM to a program.
type Index<C> = BTreeSet<(Option<Instant>, Number, C)>;

/// The waiters of a line by their costs, and the slots booked for them.
#[derive(Debug)]
pub(super) struct Lanes<S: Booked> {
    lanes: BTreeMap<S::Costs, Lane<S>>,
    /// The lanes by their first slots, for which requests wait. Of slots at one moment, that of the first waiter is
    /// handed out first.
    first_slots: Index<S::Costs>,
    last_slots: Index<S::Costs>,
    /// The lanes by their first waiters without a slot.
    without_slot: Index<S::Costs>,
    /// The lanes with more permits than waiters.
    with_surplus: Index<S::Costs>,
    waiting: usize,
    waiting_without_slot: usize,
    handed: Handed,
    /// The lanes whose first waiter or first slot has changed: the timer of that waiter may have to be moved.
    changed: Vec<S::Costs>,
}

impl<S: Booked> Default for Lanes<S> {
    fn default() -> Self {
        Lanes {
            lanes: BTreeMap::new(),
            first_slots: BTreeSet::new(),
            last_slots: BTreeSet::new(),
            without_slot: BTreeSet::new(),
            with_surplus: BTreeSet::new(),
            waiting: 0,
            waiting_without_slot: 0,
            handed: Handed::default(),
            changed: Vec::new(),
        }
    }
}

impl<S: Booked> Lanes<S> {
    /// Returns how many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns how many requests wait and have no slot.
    pub(super) fn waiting_without_slot(&self) -> usize {
        self.waiting_without_slot
    }

    /// Returns how many different costs there are.
    pub(super) fn costs(&self) -> usize {
        self.lanes.len()
    }

    /// Returns whether no request waits, and all outcomes were collected.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0 && self.lanes.values().all(Lane::is_empty)
    }

    /// Returns the first slot that a request waits for.
    pub(super) fn next_slot(&self) -> Option<Instant> {
        self.first_slots.first()?.0
    }

    pub(super) fn last_slot(&self) -> Option<Instant> {
        self.last_slots.last()?.0
    }

    /// Returns the first waiter without a slot, and its costs.
    pub(super) fn first_without_slot(&self) -> Option<(Number, &S::Costs)> {
        let (_, number, costs) = self.without_slot.first()?;
        Some((*number, costs))
    }

    /// Returns the lanes with waiters without a slot, by the first of these.
    pub(super) fn without_slot(&self) -> impl Iterator<Item = (Number, &S::Costs, &Lane<S>)> {
        let lanes = self.without_slot.iter();
        lanes.filter_map(|(_, number, costs)| Some((*number, costs, self.lanes.get(costs)?)))
    }

    /// Returns whether only one lane has waiters without a slot.
    pub(super) fn is_one_without_slot(&self) -> bool {
        self.without_slot.len() == 1
    }

    /// Wakes the waiter of the next slot at `at`.
    pub(super) fn wake_for_next_slot(&mut self, at: Instant) {
        if let Some((_, _, costs)) = self.first_slots.first()
            && let Some(lane) = self.lanes.get_mut(costs)
        {
            lane.wake_first(at);
        }
    }

    /// Returns all lanes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&S::Costs, &Lane<S>)> {
        self.lanes.iter()
    }

    /// Returns a request that waits.
    pub(super) fn wait_of(&self, number: Number, costs: &S::Costs) -> Option<&SlotWait> {
        self.lanes.get(costs)?.get(number)
    }

    /// Returns what is known of the requests that wait.
    pub(super) fn waits_mut(&mut self) -> impl Iterator<Item = &mut SlotWait> {
        let waiters = self.lanes.values_mut().flat_map(Lane::iter_mut);
        waiters.map(|(_, wait)| wait)
    }

    pub(super) fn get(&self, costs: &S::Costs) -> Option<&Lane<S>> {
        self.lanes.get(costs)
    }

    /// Changes a lane.
    pub(super) fn change<R>(&mut self, costs: &S::Costs, act: impl FnOnce(&mut Lane<S>) -> R) -> R {
        let lane = self.lanes.entry(costs.clone()).or_default();
        let before = lane.facts();
        let done = act(lane);
        let (after, is_unused) = (lane.facts(), lane.is_unused());
        if is_unused {
            self.lanes.remove(costs);
        }
        self.note(costs, before, after);
        done
    }

    /// Changes all lanes.
    pub(super) fn change_all(&mut self, mut act: impl FnMut(&mut Lane<S>)) {
        let all: Vec<S::Costs> = self.lanes.keys().cloned().collect();
        for costs in all {
            self.change(&costs, &mut act);
        }
    }

    /// Takes in that the facts of a lane have changed.
    fn note(&mut self, costs: &S::Costs, before: LaneFacts, after: LaneFacts) {
        let places = [
            (&mut self.first_slots, before.first_slot, after.first_slot),
            (&mut self.last_slots, before.last_slot, after.last_slot),
            (
                &mut self.without_slot,
                before.first_without_slot,
                after.first_without_slot,
            ),
            (&mut self.with_surplus, before.surplus, after.surplus),
        ];
        for (index, before, after) in places {
            if before == after {
                continue;
            }
            if let Some((at, number)) = before {
                index.remove(&(at, number, costs.clone()));
            }
            if let Some((at, number)) = after {
                index.insert((at, number, costs.clone()));
            }
        }
        self.waiting = self.waiting - before.waiting + after.waiting;
        self.waiting_without_slot =
            self.waiting_without_slot - before.without_slot + after.without_slot;
        let may_wake = after.first_slot.is_some() && before != after;
        if may_wake && self.changed.last() != Some(costs) {
            self.changed.push(costs.clone());
        }
    }

    pub(super) fn add(&mut self, slot: S) {
        let costs = slot.costs().clone();
        self.change(&costs, |lane| lane.add(slot));
    }

    /// Removes a request, whether its wait has ended or not.
    pub(super) fn leave(
        &mut self,
        number: Number,
        costs: &S::Costs,
    ) -> Option<Left<SlotWait, S::Outcome>> {
        self.handed.left(number);
        self.change(costs, |lane| lane.leave(number))
    }

    /// Takes the outcome of a wait that has ended.
    pub(super) fn collect(
        &mut self,
        number: Number,
        costs: &S::Costs,
        now: Instant,
    ) -> Option<S::Outcome> {
        let lane = self.lanes.get_mut(costs)?;
        let outcome = lane.collect(number)?;
        if lane.is_unused() {
            self.lanes.remove(costs);
        }
        self.handed.collected(number, now);
        Some(outcome)
    }

    /// Hands out the slots that are due, the first one first, to the first waiters with its costs. Stops at a slot
    /// that may not be handed out. Expired permits go to `died`.
    pub(super) fn hand_out(
        &mut self,
        how: HandOut,
        mut may_leave: impl FnMut(&S) -> bool,
        mut died: impl FnMut(S),
        wakers: &mut Wakers,
    ) -> HandedOut {
        let mut handed = std::mem::take(&mut self.handed);
        let mut all = HandedOut::default();
        while let Some((Some(at), _, costs)) = self.first_slots.first()
            && *at <= how.now
        {
            let costs = costs.clone();
            let most = handed.room(how.now).min(how.most - all.count);
            let how = HandOut { most, ..how };
            // Those behind the front had no timer, so it says nothing that they have not come.
            let late = Late {
                takes: handed.takes(how.now),
                most_missed: FRONT - all.missed,
            };
            let hand = |number, until: Option<Instant>| {
                // The task that runs has its permit already.
                if how.running != Some(number)
                    && let Some(until) = until
                {
                    handed.add(number, until, how.now);
                }
            };
            let of_lane = self.change(&costs, |lane| {
                lane.hand_out_first(how, late, &mut may_leave, hand, &mut died, wakers)
            });
            all.count += of_lane.count;
            all.died |= of_lane.died;
            all.missed += of_lane.missed;
            if of_lane.stays {
                break;
            }
        }
        self.handed = handed;
        let due_at = self.due_slots_wake_at(how.now);
        for costs in std::mem::take(&mut self.changed) {
            if let Some(lane) = self.lanes.get_mut(&costs) {
                lane.wake_front(due_at, how.now);
            }
        }
        all
    }

    /// Takes the first slot if it is due and `chosen`.
    pub(super) fn take_due_if(
        &mut self,
        now: Instant,
        chosen: impl FnOnce(&S) -> bool,
    ) -> Option<S> {
        let (at, _, costs) = self.first_slots.first()?;
        if *at > Some(now) {
            return None;
        }
        let costs = costs.clone();
        self.change(&costs, |lane| lane.take_first_if(chosen))
    }

    /// Takes the slots that no request waits for, the last ones first. While requests wait, as many stay
    /// as have slots later than `spared_from`. Returns the first slot of those taken.
    pub(super) fn trim(
        &mut self,
        spared_from: Option<Instant>,
        mut taken: impl FnMut(S),
    ) -> Option<Instant> {
        let mut first: Option<Instant> = None;
        let mut take = |slot: S| {
            first = Some(first.map_or(slot.at(), |first| first.min(slot.at())));
            taken(slot);
        };
        let lanes = self.with_surplus.iter();
        let lanes: Vec<S::Costs> = lanes.map(|(_, _, costs)| costs.clone()).collect();
        for costs in lanes {
            self.change(&costs, |lane| lane.trim(spared_from, &mut take));
        }
        first
    }

    /// Takes up to `most` slots after `moment`, to book anew for their waiters.
    pub(super) fn take_after(&mut self, moment: Instant, most: usize, mut taken: impl FnMut(S)) {
        let from = clock::after(moment, Duration::from_nanos(1));
        let later = self
            .last_slots
            .range((Some(from), 0, S::Costs::default())..);
        let later: Vec<S::Costs> = later
            .take(most)
            .map(|(_, _, costs)| costs.clone())
            .collect();
        let mut slots = Vec::new();
        for costs in later {
            let left = most - slots.len();
            self.change(&costs, |lane| {
                lane.take_after(moment, left, |slot| slots.push(slot))
            });
        }
        // A ledger takes back the last bookings without a trace.
        slots.sort_by_key(|slot| Reverse(slot.at()));
        slots.into_iter().for_each(&mut taken);
    }

    /// Registers the task of a waiter. See [`Lane::register`].
    pub(super) fn register(
        &mut self,
        number: Number,
        costs: &S::Costs,
        watched: Option<Instant>,
        now: Instant,
        cx: &mut Context<'_>,
    ) {
        let due_at = self.due_slots_wake_at(now);
        if let Some(lane) = self.lanes.get_mut(costs) {
            lane.register(number, watched, due_at, now, cx);
        }
    }

    /// Returns when the waiter of a slot that is due and was not handed out wakes.
    ///
    /// As many permits as may be are on their way: if their tasks do not come, the others go on when they expire. Or the
    /// slot waits for the store's answer, which wakes its waiter. If its waiter woke at once, the first waiters of two
    /// costs would wake each other until that answer arrives.
    fn due_slots_wake_at(&self, now: Instant) -> Instant {
        let has_room_at = self.handed.has_room_at(now);
        has_room_at.unwrap_or(clock::after(now, ANSWER))
    }

    /// Returns when the key has to be visited if no waiter wakes for its slot. Those behind the front have no timer for it.
    pub(super) fn goes_on_at(&self, now: Instant) -> Option<Instant> {
        let slot = self.next_slot().filter(|_| self.waiting > FRONT)?;
        Some(clock::after(slot.max(now), 2 * MISSED))
    }

    /// Notes that the task of a request runs. The end of its wait does not wake it, unless it registers again.
    pub(super) fn runs(&mut self, number: Number, costs: &S::Costs) {
        if let Some(lane) = self.lanes.get_mut(costs) {
            lane.runs(number);
        }
    }

    /// Wakes the waiters without a slot at `at` at the latest.
    pub(super) fn wake_by(&mut self, at: Instant) {
        self.lanes.values_mut().for_each(|lane| lane.wake_by(at));
    }

    pub(super) fn wake_where(&mut self, which: impl Fn(&SlotWait) -> bool, wakers: &mut Wakers) {
        self.lanes
            .values_mut()
            .for_each(|lane| lane.wake_where(&which, wakers));
    }
}
