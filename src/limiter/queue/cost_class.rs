//! The waiters for permits of one cost, and the slots booked for them.
//!
//! Both are sorted, and the first waiter owns the first permit, the second the second, and so on: `booked` permits are the first
//! `booked` waiters'. So the waiters without a slot are always the last ones. The next `asked` of them are part of a call under way;
//! the waiters after them came later.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;
use std::time::Instant;

use smallvec::SmallVec;

use super::Number;
use crate::clock::{self, Timer};
use crate::limiter::reservation::{Reservation, Settled, WaitBound};
use crate::store::Refusal;

/// The waiters and slots of one cost.
#[derive(Default)]
pub(super) struct CostClass {
    pub(super) waiting: BTreeMap<Number, Waiting>,
    /// Sorted by time.
    pub(super) slots: VecDeque<Reservation>,
    /// How many permits lie in `slots`.
    pub(super) booked: usize,
    /// How many permits the call under way asks for.
    pub(super) asked: usize,
}

pub(super) struct Waiting {
    pub(super) bound: WaitBound,
    /// From this moment the time until the store answers does not count as waiting.
    pub(super) entered: Instant,
    /// Whether the store has decided on it.
    pub(super) heard: bool,
    /// When it gives up if the store has not decided on it.
    pub(super) gives_up_at: Instant,
    /// The moment of its timer, which is made when the waiter is first polled.
    pub(super) wake_at: Instant,
    pub(super) timer: Option<Timer>,
    pub(super) waker: Option<Waker>,
}

impl Waiting {
    pub(super) fn wake_at(&mut self, slot: Instant) {
        let wake_at = if self.heard { slot.min(self.bound.latest) } else { slot };
        if wake_at != self.wake_at {
            self.wake_at = wake_at;
            if let Some(timer) = &mut self.timer {
                timer.set(wake_at);
            }
        }
    }
}

impl CostClass {
    /// Returns how many waiters have no slot and are not with a call.
    pub(super) fn missing(&self) -> usize {
        self.waiting.len().saturating_sub(self.booked + self.asked)
    }

    /// Returns the waiters that have no slot and are not with a call.
    pub(super) fn without(&self) -> impl Iterator<Item = Number> {
        self.waiting.keys().skip(self.booked + self.asked).copied()
    }

    pub(super) fn add(&mut self, slot: Reservation) {
        let index = self.slots.partition_point(|other| other.at <= slot.at);
        self.slots.insert(index, slot);
        self.booked += slot.count as usize;
    }

    /// A call is sent at `now`. If a hold that ended later was released, the wait of its waiters begins now.
    pub(super) fn asked_at(&mut self, now: Instant) {
        for waiting in self.waiting.values_mut().rev().take_while(|waiting| !waiting.heard) {
            waiting.entered = waiting.entered.min(now);
        }
    }

    /// Wakes the waiters without a slot at `at` at the latest.
    pub(super) fn wake_by(&mut self, at: Instant) {
        let without = self.waiting.len().saturating_sub(self.booked);
        for waiting in self.waiting.values_mut().rev().take(without).filter(|waiting| waiting.wake_at > at) {
            waiting.wake_at(at);
        }
    }

    /// Takes in what a call to the store brought, whose permits lie in `slots` already. Returns the waiters that leave.
    pub(super) fn settle(
        &mut self,
        brought: &Brought<'_>,
        now: Instant,
    ) -> SmallVec<[(Number, Option<Waker>, Settled); 2]> {
        let without_slot = self.waiting.len().saturating_sub(self.booked);
        let left_out = self.left_out(brought, without_slot);
        self.count_waits_from(now);
        let mut leaving = self.assign(brought.granted, without_slot, now);
        if let Some(end) = brought.end {
            // A waiter that leaves frees its slot for the first that was left out.
            let still_left_out = left_out.len().saturating_sub(leaving.len());
            let asked = left_out.iter().take(still_left_out).filter(|waiter| waiter.asked_for);
            leaving.extend(asked.map(|waiter| (waiter.number, end.clone())));
        }
        let take = |(number, settled)| Some((number, self.waiting.remove(&number)?.waker, settled));
        leaving.into_iter().filter_map(take).collect()
    }

    /// Returns the waiters that the call asked for in vain, the last one first. Of the waiters without a slot, the last ones came
    /// after the call was sent.
    fn left_out(&self, brought: &Brought<'_>, without_slot: usize) -> SmallVec<[LeftOut; 4]> {
        let newcomers = without_slot.saturating_sub(brought.left_out);
        let last = self.waiting.iter().rev().skip(newcomers).take(without_slot - newcomers);
        let left_out = |(&number, waiting): (&Number, &Waiting)| {
            let asked_for =
                brought.refused_at.is_none_or(|(sent, last)| waiting.entered <= sent && number <= last);
            LeftOut { number, asked_for }
        };
        last.map(left_out).collect()
    }

    /// Counts the waits that the store decided on from `now`. The store counted them from when it was asked; a deadline is a
    /// deadline.
    fn count_waits_from(&mut self, now: Instant) {
        for waiting in self.waiting.values_mut().rev().take_while(|waiting| !waiting.heard) {
            let asking = now.saturating_duration_since(waiting.entered);
            waiting.entered = now.max(waiting.entered);
            if !waiting.bound.by_deadline {
                waiting.bound.latest = clock::after(waiting.bound.latest, asking);
            }
        }
    }

    /// Gives the last `granted` slots in use to their waiters, whose timers are set. A waiter that cannot wait for its slot leaves,
    /// and the slot is the next waiter's.
    fn assign(
        &mut self,
        granted: usize,
        without_slot: usize,
        now: Instant,
    ) -> SmallVec<[(Number, Settled); 2]> {
        let unused = self.booked.saturating_sub(self.waiting.len());
        let from_last = self.slots.iter().rev();
        let moments = from_last.flat_map(|slot| std::iter::repeat_n(slot.at, slot.count as usize));
        let from_last: SmallVec<[Instant; 4]> = moments.skip(unused).take(granted).collect();
        let mut leaving = SmallVec::new();
        let Some(others) = from_last.len().checked_sub(1) else { return leaving };
        let Some(&first) = self.waiting.keys().rev().nth(without_slot + others) else { return leaving };
        // In order, since timers that fire at the same tick do so in the order in which they were set.
        let mut slots = from_last.iter().rev().peekable();
        for (&number, waiting) in self.waiting.range_mut(first..) {
            let Some(&&slot) = slots.peek() else { break };
            if slot > waiting.bound.latest {
                let wait = Some(slot.saturating_duration_since(now));
                leaving.push((number, Settled::Refused(Refusal { wait, limit: None })));
            } else {
                waiting.heard = true;
                waiting.wake_at(slot);
                slots.next();
            }
        }
        leaving
    }
}

/// The result of a store call for the waiters of one cost.
pub(super) struct Brought<'a> {
    /// Permits for waiters that had none before.
    pub(super) granted: usize,
    /// How many waiters of the call got no slot.
    pub(super) left_out: usize,
    /// How their wait ends.
    pub(super) end: Option<&'a Settled>,
    /// If the store refused: when the call was sent, and the last waiter then. A waiter that came later, in the place of one that
    /// left, is asked for anew.
    pub(super) refused_at: Option<(Instant, Number)>,
}

/// A waiter that a call asked for in vain.
struct LeftOut {
    number: Number,
    /// Whether it waited when the call was sent.
    asked_for: bool,
}
