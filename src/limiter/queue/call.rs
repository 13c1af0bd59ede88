//! The call to the store under way: what it asks for the waiters, and what its answer means for
//! them.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{Gathering, GivenUp, Queue, next_number};
use crate::clock;
use crate::limiter::lanes::{Lane, SlotWait};
use crate::limiter::reservation::{NoSlot, Reservation};
use crate::store::{Demand, Refusal};
use crate::tuning::ANSWER;
use crate::wait_queue::Number;
use crate::wakers::Wakers;

/// The most demands of one call. There is one for each change from one cost to another.
const MOST_DEMANDS: usize = 64;

/// The number of a call to the store. The answer to any call but the last one is late.
pub(in crate::limiter) type CallNumber = u64;

/// A call to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calling {
    number: CallNumber,
    /// When it was sent. It counts as lost [`ANSWER`] later.
    sent: Instant,
    /// The last waiter when it was sent.
    last: Option<Number>,
    /// Whether waiters wake when it counts as lost, because it runs in the runtime of a caller.
    watched: bool,
}

/// What the answer to a call means for the next calls.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct Answered {
    /// Whether permits expired on their way.
    pub(in crate::limiter) died: bool,
    /// The cost of the first demand that was not granted in full.
    pub(in crate::limiter) refused: Option<u32>,
}

impl Queue {
    /// Returns whether a call is under way.
    pub(in crate::limiter) fn is_calling(&self, now: Instant) -> bool {
        self.call
            .is_some_and(|call| now < clock::after(call.sent, ANSWER))
    }

    /// Returns for how long the store has not answered, if it was asked.
    pub(in crate::limiter) fn unanswered_for(&self, now: Instant) -> Option<Duration> {
        self.unanswered
            .map(|since| now.saturating_duration_since(since))
    }

    /// Returns the number of the call under way.
    pub(in crate::limiter) fn call_number(&self) -> Option<CallNumber> {
        self.call.map(|call| call.number)
    }

    /// Gives up a call that was not answered in time. The next call asks for the same again.
    pub(in crate::limiter) fn give_up_call(&mut self) {
        if self.call.take().is_some() {
            for demand in self.asked.drain(..) {
                self.lanes.change(&demand.cost, |lane| lane.asked = 0);
            }
        }
    }

    /// Returns when waiters wake because the call may be lost.
    pub(super) fn watched_until(&self) -> Option<Instant> {
        self.call
            .filter(|call| call.watched)
            .map(|call| clock::after(call.sent, ANSWER))
    }

    /// Returns what the waiters without a slot need, in their order; `most` permits in all, without those that the
    /// call under way asks for.
    pub(in crate::limiter) fn needs(&self, most: usize) -> SmallVec<[Demand; 2]> {
        let mut left = u32::try_from(most).unwrap_or(u32::MAX);
        let mut demands: SmallVec<[Demand; 2]> = SmallVec::new();
        let mut lanes = self.lanes.without_slot().peekable();
        let demand = |cost: u32, count: usize, left: &mut u32| {
            let count = u32::try_from(count).unwrap_or(u32::MAX).min(*left);
            *left -= count;
            Demand::new(cost, count)
        };
        if let Some((_, &cost, lane)) = lanes.next_if(|_| self.lanes.is_one_without_slot()) {
            demands.push(demand(cost, lane.missing(), &mut left));
        }
        // Waiters of different costs stand between each other. Each lane is looked at when its first waiter is next.
        let mut open: SmallVec<[(u32, Number, &Lane<Reservation>); 4]> = SmallVec::new();
        while left > 0 {
            let next_of_open = (0..open.len()).min_by_key(|lane: &usize| open[*lane].1);
            let first_of_open = next_of_open.map(|lane| open[lane].1);
            if let Some((_, &cost, lane)) =
                lanes.next_if(|(first, ..)| first_of_open.is_none_or(|open| *first < open))
            {
                let first = lane.numbers_without_slot().nth(lane.asked);
                open.extend(first.map(|first| (cost, first, lane)));
                continue;
            }
            let Some(next) = next_of_open else { break };
            let (cost, number, lane) = open[next];
            let is_full = demands.len() == MOST_DEMANDS;
            match demands.last_mut() {
                Some(last) if last.cost == cost => {
                    left -= 1;
                    last.count += 1;
                }
                _ if is_full => break,
                _ => demands.push(demand(cost, 1, &mut left)),
            }
            match lane.next_after(number) {
                Some(number) => open[next].1 = number,
                None => _ = open.swap_remove(next),
            }
        }
        demands.retain(|demand| demand.count > 0);
        demands
    }

    /// Notes that a call for `demands` is sent. If it is `watched`, the waiters without a slot wake
    /// when the call counts as lost.
    pub(in crate::limiter) fn call_sent(
        &mut self,
        demands: &[Demand],
        now: Instant,
        watched: bool,
    ) -> CallNumber {
        let number = next_number();
        self.call = Some(Calling {
            number,
            sent: now,
            last: self.last.filter(|_| self.waiting() > 0),
            watched,
        });
        self.unanswered.get_or_insert(now);
        if !demands.is_empty() {
            self.gathering = Gathering::NotYet;
        }
        self.asked.clear();
        self.asked.extend_from_slice(demands);
        for demand in demands {
            self.lanes.change(&demand.cost, |lane| {
                lane.asked += demand.count as usize;
                lane.asked_at(now);
            });
        }
        if watched {
            let lost_at = clock::after(now, ANSWER);
            self.lanes.wake_by(lost_at);
        }
        number
    }

    /// Returns the missing permits of the first demand that was not granted in full. The store has
    /// not decided on the demands after it.
    fn first_missing(&self, granted: &Granted) -> Option<Demand> {
        let mut granted = granted.clone();
        self.asked.iter().find_map(|&demand| {
            let missing = demand.count - granted.take(demand.cost, demand.count);
            (missing > 0).then_some(Demand {
                count: missing,
                ..demand
            })
        })
    }

    /// Takes in an answer to the call: `slots`, and `end` for the waiters that got none. Gives back
    /// a slot ahead that can be used for less than `least`.
    pub(in crate::limiter) fn answered(
        &mut self,
        slots: impl IntoIterator<Item = Reservation>,
        end: Option<&NoSlot>,
        least: Duration,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Answered {
        let call = self.call.take();
        self.unanswered = None;
        let mut granted = Granted::default();
        let mut usable = Granted::default();
        for slot in slots {
            granted.add(slot.cost, slot.count);
            let lasts = slot.until.saturating_duration_since(slot.at.max(now));
            if !lasts.is_zero() && (slot.at <= now || lasts >= least) {
                usable.add(slot.cost, slot.count);
                self.add(slot);
            } else {
                // The slot expired on its way, or nearly. The next call asks for its waiters again.
                self.returns.add(&slot);
            }
        }
        let died = granted != usable;
        let refused = self.first_missing(&granted);
        let last_asked = call.filter(|_| !self.asked.is_empty());
        let last_asked = last_asked.and_then(|call| call.last);
        let asked = self.asked.drain(..).chain(usable.0.iter().copied());
        let mut costs: SmallVec<[u32; 4]> = asked.map(|demand| demand.cost).collect();
        costs.sort_unstable();
        costs.dedup();
        let is_refusal = matches!(end, Some(NoSlot::TooLate(_)));
        let refused_at = call
            .filter(|_| is_refusal)
            .and_then(|call| Some((call.sent, call.last?)));
        for cost in costs {
            self.lanes.change(&cost, |lane| {
                let asked = std::mem::take(&mut lane.asked);
                let left_out = match refused {
                    // The waiters after the refused one, and those whose permits expired, are asked for
                    // again.
                    Some(demand) if is_refusal && demand.cost == cost => demand.count as usize,
                    _ if is_refusal => 0,
                    _ => asked.saturating_sub(granted.of(cost) as usize),
                };
                let result = CallResult {
                    granted: usable.of(cost) as usize,
                    left_out,
                    end,
                    last_asked,
                    refused_at,
                };
                lane.take_in(&result, now, wakers);
            });
        }
        Answered {
            died,
            refused: refused.map(|demand| demand.cost),
        }
    }

    /// Counts the time until `from` against `max_wait`: the waiters have not waited for the store, but for a probe.
    pub(in crate::limiter) fn enter_from(&mut self, from: Instant) {
        self.lanes.change_all(|lane| lane.enter_from(from));
    }

    /// Pauses calls to a store that decides nothing for `wait`. Refuses the waiters without a slot
    /// that cannot wait until then.
    pub(in crate::limiter) fn pause(&mut self, wait: Duration, now: Instant, wakers: &mut Wakers) {
        let until = clock::after(now, wait);
        self.call = None;
        self.unanswered = None;
        self.gathering = Gathering::NotYet;
        self.paused_until = Some(until);
        self.asked.clear();
        let refusal = Refusal::for_span(wait);
        self.lanes
            .change_all(|lane| lane.pause(until, refusal, wakers));
    }
}

/// Permits by their cost.
#[derive(Clone, Debug, Default, PartialEq)]
struct Granted(SmallVec<[Demand; 2]>);

impl Granted {
    fn add(&mut self, cost: u32, count: u32) {
        match self.0.iter_mut().find(|demand| demand.cost == cost) {
            Some(demand) => demand.count += count,
            None => self.0.push(Demand::new(cost, count)),
        }
    }

    fn of(&self, cost: u32) -> u32 {
        self.0
            .iter()
            .find(|demand| demand.cost == cost)
            .map_or(0, |demand| demand.count)
    }

    /// Takes up to `count` permits of a cost. Returns how many it took.
    fn take(&mut self, cost: u32, count: u32) -> u32 {
        let Some(demand) = self.0.iter_mut().find(|demand| demand.cost == cost) else {
            return 0;
        };
        let taken = demand.count.min(count);
        demand.count -= taken;
        taken
    }
}

/// The result of a call to the store, for the waiters of one cost.
struct CallResult<'a> {
    /// The number of permits for waiters that had none before.
    granted: usize,
    /// How many waiters of the call got no slot.
    left_out: usize,
    /// How the wait of these waiters ends. `None` if they are asked for again.
    end: Option<&'a NoSlot>,
    /// The last waiter when the call was sent, if it asked for permits.
    last_asked: Option<Number>,
    /// If the store refused: when the call was sent, and the last waiter then. A waiter that
    /// arrived later, in the place of one that left, is asked for again.
    refused_at: Option<(Instant, Number)>,
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
    fn asked_at(&mut self, now: Instant) {
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
    fn pause(&mut self, until: Instant, refusal: Refusal, wakers: &mut Wakers) {
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
    fn take_in(&mut self, result: &CallResult<'_>, now: Instant, wakers: &mut Wakers) {
        let without_slot = self.without_slot();
        let left_out = self.left_out(result, without_slot);
        self.count_waits_from(now);
        let too_late = self.assign(result.granted, without_slot, now);
        let mut leaving: Vec<(Number, NoSlot)> = Vec::new();
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
    fn left_out(&self, result: &CallResult<'_>, without_slot: usize) -> Vec<LeftOut> {
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
