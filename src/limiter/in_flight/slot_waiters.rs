//! The requests of one key that wait for an in-flight slot.

use std::task::Context;
use std::time::Instant;

use crate::error::StoreError;
use crate::limiter::reservation::NoSlot;
use crate::wait_queue::{Left, Number, WaitQueue};
use crate::wakers::Wakers;

/// The requests that wait for a slot, in their order.
#[derive(Default)]
pub(super) struct SlotWaiters {
    queue: WaitQueue<Patience, Result<Number, NoSlot>>,
    /// The claim whose answer ends the wait of the last impatient request. Zero if none has entered since that answer.
    until_answer: u64,
    /// The slots that were not collected at the last look.
    overdue: Vec<Number>,
}

/// How long a request waits for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Until it gets a slot, or leaves.
    Patient,
    /// Until the store answers the claim with this number. The request cannot wait for longer.
    Impatient { until_answer: u64 },
}

impl SlotWaiters {
    /// Returns how many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.waiting()
    }

    /// Returns whether no request waits, and no outcome is to be collected.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Enters a request, in the place of its `number`. No task waits yet: the first
    /// [`register`](SlotWaiters::register) sets when its task wakes.
    pub(super) fn enter(&mut self, number: Number, wait: Patience, now: Instant) {
        if let Patience::Impatient { until_answer } = wait {
            self.until_answer = until_answer;
        }
        self.queue.enter(number, wait, now);
    }

    /// Enters a request that is refused at once.
    pub(super) fn enter_refused(&mut self, number: Number) {
        self.queue.enter_settled(number, Err(NoSlot::NEVER));
    }

    /// Returns whether an impatient request waits for the answer to a claim after the claim
    /// `number`. It may have left, while others wait.
    pub(super) fn want_answer_after(&self, number: u64) -> bool {
        self.waiting() > 0 && self.until_answer > number
    }

    pub(super) fn is_waiting(&self, number: Number) -> bool {
        self.queue.get(number).is_some()
    }

    /// Returns how the wait of `number` ended, if it did.
    pub(super) fn collect(&mut self, number: Number) -> Option<Result<Number, NoSlot>> {
        self.queue.collect(number)
    }

    /// Wakes the task of `number` when its wait ends, or at `until`. Returns whether `number`
    /// waits.
    pub(super) fn register(
        &mut self,
        number: Number,
        until: Instant,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(waiter) = self.queue.get_mut(number) else {
            return false;
        };
        waiter.wake_at(until);
        waiter.register(cx);
        true
    }

    /// Removes `number`. Returns what it had.
    pub(super) fn leave(
        &mut self,
        number: Number,
    ) -> Option<Left<Patience, Result<Number, NoSlot>>> {
        self.queue.leave(number)
    }

    /// Grants `slot` to the request that came first, if one waits.
    pub(super) fn grant_first(&mut self, slot: Number, wakers: &mut Wakers) {
        self.queue.settle_first(Ok(slot), wakers);
    }

    /// Returns whether a request has not collected its slot.
    pub(super) fn is_any_uncollected(&self) -> bool {
        self.granted().next().is_some()
    }

    /// Returns the requests that have not collected their slots, with these slots.
    fn granted(&self) -> impl Iterator<Item = (Number, Number)> {
        self.queue
            .uncollected()
            .filter_map(|(number, outcome)| match outcome {
                Ok(slot) => Some((number, *slot)),
                _ => None,
            })
    }

    /// Takes the slots of the requests that have not collected them since this was last called. A request that is
    /// polled after that waits again, in its old place.
    pub(super) fn take_overdue(&mut self) -> Vec<Number> {
        let (overdue, granted): (Vec<_>, Vec<_>) = self
            .granted()
            .partition(|(_, slot)| self.overdue.contains(slot));
        self.overdue = granted.into_iter().map(|(_, slot)| slot).collect();
        overdue
            .into_iter()
            .map(|(number, slot)| {
                _ = self.queue.collect(number);
                slot
            })
            .collect()
    }

    /// Refuses the impatient requests that waited for the answer to the claim `number`, or to an
    /// earlier one.
    pub(super) fn refuse_answered(&mut self, number: u64, wakers: &mut Wakers) {
        if self.until_answer == 0 {
            return;
        }
        self.queue.settle_where(
            |_, wait| match *wait {
                Patience::Impatient { until_answer } if until_answer <= number => {
                    Some(Err(NoSlot::NEVER))
                }
                _ => None,
            },
            wakers,
        );
        if self.until_answer <= number {
            self.until_answer = 0;
        }
    }

    /// Ends all waits with `error` of the store.
    pub(super) fn fail(&mut self, error: &StoreError, wakers: &mut Wakers) {
        self.queue
            .settle_where(|_, _| Some(Err(NoSlot::Failed(error.clone()))), wakers);
        self.until_answer = 0;
    }
}
