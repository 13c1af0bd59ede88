//! Those who wait for permits of one cost, and the slots booked for them.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;
use std::time::Instant;

use smallvec::SmallVec;

use super::Number;
use crate::clock::{self, Timer};
use crate::limiter::reservation::{Patience, Settled, Slot};
use crate::store::Refusal;

/// Waiters and slots of one cost.
#[derive(Default)]
pub(super) struct Class {
    pub(super) waiting: BTreeMap<Number, Waiting>,
    /// Sorted by time.
    pub(super) slots: VecDeque<Slot>,
    /// Permits in `slots`.
    pub(super) booked: usize,
    /// Permits that a call under way asks for.
    pub(super) asked: usize,
}

pub(super) struct Waiting {
    pub(super) patience: Patience,
    /// From when on the time until the store answers does not count as its wait.
    pub(super) entered: Instant,
    /// Whether the store has answered for it.
    pub(super) heard: bool,
    /// When it waits no longer for the store to answer for it.
    pub(super) gives_up_at: Instant,
    /// Where its timer stands, or will when it is first polled.
    pub(super) wake_at: Instant,
    pub(super) timer: Option<Timer>,
    pub(super) waker: Option<Waker>,
}

impl Waiting {
    pub(super) fn wake_at(&mut self, slot: Instant) {
        let wake_at = if self.heard { slot.min(self.patience.latest) } else { slot };
        if wake_at != self.wake_at {
            self.wake_at = wake_at;
            if let Some(timer) = &mut self.timer {
                timer.set(wake_at);
            }
        }
    }
}

impl Class {
    /// How many have no slot, and none asked for.
    pub(super) fn missing(&self) -> usize {
        self.waiting.len().saturating_sub(self.booked + self.asked)
    }

    /// Those who have no slot, and none asked for.
    pub(super) fn without(&self) -> impl Iterator<Item = Number> {
        self.waiting.keys().skip(self.booked + self.asked).copied()
    }

    pub(super) fn add(&mut self, slot: Slot) {
        let index = self.slots.partition_point(|other| other.at <= slot.at);
        self.slots.insert(index, slot);
        self.booked += slot.count as usize;
    }

    /// A call asks: a hold until after `now` was released.
    pub(super) fn asked_at(&mut self, now: Instant) {
        for waiting in self.waiting.values_mut().rev().take_while(|waiting| !waiting.heard) {
            waiting.entered = waiting.entered.min(now);
        }
    }

    /// Those without a slot wake at `at`, if not before.
    pub(super) fn wake_by(&mut self, at: Instant) {
        let without = self.waiting.len().saturating_sub(self.booked);
        for waiting in self.waiting.values_mut().rev().take(without).filter(|waiting| waiting.wake_at > at) {
            waiting.wake_at(at);
        }
    }

    /// The call under way brought `granted` permits, for waiters that had none before; `ended` of its needs got none.
    ///
    /// Ends the wait of those, and of whoever cannot wait for the slot that became its own. Who came later than
    /// was refused, in the place of one who left, is asked for anew.
    pub(super) fn settle(
        &mut self,
        granted: usize,
        ended: usize,
        end: Option<&Settled>,
        refused_at: Option<(Instant, Number)>,
        now: Instant,
    ) -> SmallVec<[(Number, Option<Waker>, Settled); 2]> {
        let mut leaving: SmallVec<[(Number, Settled); 2]> = SmallVec::new();
        let without = self.waiting.len().saturating_sub(self.booked);
        let newcomers = without.saturating_sub(ended);
        let last = self.waiting.iter().rev().skip(newcomers).take(without - newcomers);
        // The last first, and whether it was asked for.
        let unlucky: SmallVec<[(Number, bool); 4]> = last
            .map(|(&number, waiting)| {
                let asked = refused_at.is_none_or(|(at, last)| waiting.entered <= at && number <= last);
                (number, asked)
            })
            .collect();
        // The store counted their wait from when it was asked, we count from its answer; a deadline is a deadline.
        for waiting in self.waiting.values_mut().rev().take_while(|waiting| !waiting.heard) {
            let asking = now.saturating_duration_since(waiting.entered);
            waiting.entered = now.max(waiting.entered);
            if !waiting.patience.by_deadline {
                waiting.patience.latest = clock::after(waiting.patience.latest, asking);
            }
        }
        let unneeded = self.booked.saturating_sub(self.waiting.len());
        let slots = self.slots.iter().rev();
        let moments = slots.flat_map(|slot| std::iter::repeat_n(slot.at, slot.count as usize));
        let theirs: SmallVec<[Instant; 4]> = moments.skip(unneeded).take(granted).collect();
        let back = theirs.len().checked_sub(1).map(|others| without + others);
        let first = back.and_then(|back| self.waiting.keys().rev().nth(back)).copied();
        let newly = self.waiting.range_mut(first.unwrap_or(Number::MAX)..);
        // Timers of one tick fire in the order in which they were set.
        // What is too late for one is for the next.
        let mut theirs = theirs.iter().rev().peekable();
        for (&number, waiting) in newly {
            let Some(&&slot) = theirs.peek() else { break };
            if slot > waiting.patience.latest {
                let wait = Some(slot.saturating_duration_since(now));
                leaving.push((number, Settled::Refused(Refusal { wait, limit: None })));
            } else {
                waiting.heard = true;
                waiting.wake_at(slot);
                theirs.next();
            }
        }
        if let Some(end) = end {
            let unlucky = unlucky.iter().take(unlucky.len().saturating_sub(leaving.len()));
            let asked = unlucky.filter(|(_, asked)| *asked).map(|&(number, _)| (number, end.again()));
            let asked: SmallVec<[(Number, Settled); 2]> = asked.collect();
            leaving.extend(asked);
        }
        let take = |(number, settled)| Some((number, self.waiting.remove(&number)?.waker, settled));
        leaving.into_iter().filter_map(take).collect()
    }
}
