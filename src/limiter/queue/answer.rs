//! What the answer to a call, or a pause of the store, means for the waiters of one cost.

use std::time::Instant;

use smallvec::SmallVec;

use super::GivenUp;
use crate::limiter::lanes::{Booked, Lane, SlotWait};
use crate::limiter::reservation::{NoSlot, ProbeNumber, Reservation};
use crate::store::Refusal;
use crate::wait_queue::Number;
use crate::wakers::Wakers;

impl Booked for Reservation {
    type Costs = u32;
    type Outcome = Result<Reservation, NoSlot>;

    fn costs(&self) -> &u32 {
        &self.cost
    }

    fn at(&self) -> Instant {
        self.at
    }

    fn until(&self) -> Option<Instant> {
        Some(self.until)
    }

    fn permits(&self) -> usize {
        self.count as usize
    }

    fn split(&mut self, permits: usize) -> Option<Self> {
        let count = u32::try_from(permits).ok()?;
        self.count = self.count.checked_sub(count).filter(|left| *left > 0)?;
        Some(Reservation { count, ..*self })
    }

    fn granted(self, is_in_line: bool, probe: Option<ProbeNumber>) -> Result<Reservation, NoSlot> {
        Ok(Reservation {
            is_at_once: self.is_at_once && !is_in_line,
            probe,
            ..self
        })
    }
}

/// The result of a call to the store, for the waiters of one cost.
pub(super) struct CallResult<'a> {
    /// The number of permits for waiters that had none before.
    pub(super) granted: usize,
    /// How many waiters of the call got no slot.
    pub(super) left_out: usize,
    /// How the wait of these waiters ends. `None` if they are asked for again.
    pub(super) end: Option<&'a NoSlot>,
    /// The last waiter when the call was sent, if it asked for permits.
    pub(super) last_asked: Option<Number>,
    /// If the store refused: when the call was sent, and the last waiter then. A waiter that
    /// arrived later, in the place of one that left, is asked for again.
    pub(super) refused_at: Option<(Instant, Number)>,
}

/// A waiter that got no slot from a call.
struct LeftOut {
    number: Number,
    /// Whether it waited when the call was sent.
    is_asked_for: bool,
}

impl Lane<Reservation> {
    /// Notes that a call is sent at `now`: its waiters wait for the answer from now on. `entered`
    /// may be later, if they waited for a hold that was released since.
    pub(super) fn asked_at(&mut self, now: Instant) {
        for wait in self.undecided() {
            wait.entered = wait.entered.min(now);
        }
    }

    /// Returns the last waiters, on which the store has not decided, the last one first.
    fn undecided(&mut self) -> impl Iterator<Item = &mut SlotWait> {
        let waiters = self.iter_mut().rev().map(|(_, wait)| wait);
        waiters.take_while(|wait| !wait.is_decided)
    }

    /// Lets no request leave before `until`: gives back the slots before it, and refuses with
    /// `refusal` the waiters that cannot wait until then.
    pub(super) fn withdraw(
        &mut self,
        until: Instant,
        refusal: Refusal,
        returns: &mut GivenUp,
        wakers: &mut Wakers,
    ) {
        self.take_before(until, |slot| returns.add(&slot));
        self.settle_where(
            |_, wait| (wait.bound.latest < until).then_some(Err(NoSlot::TooLate(refusal))),
            wakers,
        );
        self.enter_from(until);
    }

    /// Pauses calls to a store that decides nothing before `until`. Refuses with `refusal` the
    /// waiters without a slot that cannot wait until then.
    pub(super) fn pause(&mut self, until: Instant, refusal: Refusal, wakers: &mut Wakers) {
        self.asked = 0;
        self.enter_from(until);
        let Some(first) = self.numbers_without_slot().next() else {
            return;
        };
        self.settle_where(
            |number, wait| {
                let cannot_wait = number >= first && wait.bound.latest < until;
                cannot_wait.then_some(Err(NoSlot::TooLate(refusal)))
            },
            wakers,
        );
    }

    /// Counts the time until `from` against `max_wait`, because the store is not called before.
    fn enter_from(&mut self, from: Instant) {
        // The others have slots, which may be due now.
        let with_slot = self.waiting() - self.without_slot();
        for (index, (_, wait)) in self.iter_mut().enumerate() {
            wait.entered = wait.entered.max(from);
            wait.is_in_line |= index >= with_slot;
        }
    }

    /// Takes in the result of a call to the store. The granted permits were added already.
    ///
    /// In the queue, three groups of waiters follow each other:
    ///
    /// 1. The waiters with a slot. The last `granted` of them had none before the call.
    /// 2. The waiters that the call asked for in vain.
    /// 3. The waiters that arrived after the call was sent. The next call asks for them.
    ///
    /// The new slots are assigned to the end of the first group. If a waiter cannot wait for its
    /// slot, it leaves, and all waiters behind it move up. So the first waiter of the second group
    /// has a slot after all. The wait of the others in that group ends with `end`, if there is one
    /// and if the call asked for them.
    pub(super) fn take_in(&mut self, result: &CallResult<'_>, now: Instant, wakers: &mut Wakers) {
        let without_slot = self.without_slot();
        let left_out = self.left_out(result, without_slot);
        self.count_waits_from(now);
        let too_late = self.assign(result.granted, without_slot, now);
        let mut leaving: SmallVec<[(Number, NoSlot); 2]> = SmallVec::new();
        leaving.extend(too_late.into_iter().map(|(number, slot)| {
            let wait = Some(slot.saturating_duration_since(now));
            (number, NoSlot::TooLate(Refusal { wait, limit: None }))
        }));
        if let Some(end) = result.end {
            let moved_up = leaving.len();
            let still_left_out = left_out.len().saturating_sub(moved_up);
            let asked_for = left_out
                .iter()
                .take(still_left_out)
                .filter(|waiter| waiter.is_asked_for);
            leaving.extend(asked_for.map(|waiter| (waiter.number, end.clone())));
        }
        for (number, no_slot) in leaving {
            self.settle(number, Err(no_slot), wakers);
        }
        if let Some(last) = result.last_asked {
            let without_slot = self.without_slot();
            let waiters = self.iter_mut().rev().take(without_slot);
            for (_, wait) in waiters.filter(|(number, _)| *number <= last) {
                wait.is_in_line = true;
            }
        }
    }

    /// Returns the second group of [`take_in`](Self::take_in), the last waiter first.
    ///
    /// If a waiter left while the call was under way, one that arrived later is in its place. The
    /// call did not ask for that one.
    fn left_out(&self, result: &CallResult<'_>, without_slot: usize) -> SmallVec<[LeftOut; 4]> {
        let newcomers = without_slot.saturating_sub(result.left_out);
        let last = self
            .iter()
            .rev()
            .skip(newcomers)
            .take(without_slot - newcomers);
        let left_out = last.map(|(number, wait)| {
            let is_asked_for = result
                .refused_at
                .is_none_or(|(sent, last)| wait.entered <= sent && number <= last);
            LeftOut {
                number,
                is_asked_for,
            }
        });
        left_out.collect()
    }

    /// Restarts `max_wait` at `now`, when the answer arrived, for the waiters that the store had
    /// not decided on. The time until the answer does not count against `max_wait`. A deadline does
    /// not move.
    fn count_waits_from(&mut self, now: Instant) {
        for wait in self.undecided() {
            let asking = now.saturating_duration_since(wait.entered);
            wait.entered = now.max(wait.entered);
            wait.bound.extend_by(asking);
        }
    }
}
