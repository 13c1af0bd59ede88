//! The call to the store under way: what it asks for the waiters, and what its answer means for
//! them.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::answer::CallResult;
use super::{Gathering, Queue, next_number};
use crate::clock;
use crate::limiter::lanes::Lane;
use crate::limiter::reservation::{NoSlot, Reservation};
use crate::store::{Demand, Refusal};
use crate::wait_queue::{ANSWER, Number};
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
