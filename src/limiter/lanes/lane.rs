//! The waiters with equal costs, and the slots booked for them.
//!
//! Both are sorted, and the first waiter owns the first permit, the second waiter the second one, and so on. So the
//! first `booked` waiters have a slot, and the waiters without a slot are always the last ones. A call under way asks
//! for the first `asked` of them. The others of them arrived later.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::task::Context;
use std::time::{Duration, Instant};

use super::{Booked, FRONT, HandOut, HandedOut, Late};
use crate::clock::{self, SHORTEST_TIMER};
use crate::tuning::ANSWER;
use crate::wait_queue::{Left, Number, WaitBound, WaitQueue, is_missed};
use crate::wakers::Wakers;

/// The least gain for which a waiter changes its slot for an earlier one.
const SHORTEST_GAIN: Duration = Duration::from_millis(1);

/// The waiters with equal costs, and the slots booked for them.
#[derive(Debug)]
pub(in crate::limiter) struct Lane<S: Booked> {
    waiters: WaitQueue<SlotWait, S::Outcome>,
    /// Sorted by time.
    slots: VecDeque<S>,
    /// The number of permits in `slots`.
    booked: usize,
    /// The number of permits that the call under way asks for.
    pub(in crate::limiter) asked: usize,
    /// The first waiter without a slot.
    first_without_slot: Option<Number>,
    /// Half of the front, or more, has timers for its slots as long as the first waiter is before this one.
    timed_until: Number,
    /// Whether waiters behind the front may have none.
    has_untimed: bool,
}

/// What is known of a request that waits for a slot.
#[derive(Clone, Debug)]
pub(in crate::limiter) struct SlotWait {
    pub(in crate::limiter) bound: WaitBound,
    /// From this moment on the request waits for the answer of the store. That time does not count
    /// against `max_wait`.
    pub(in crate::limiter) entered: Instant,
    /// Whether the store has decided on the request.
    pub(in crate::limiter) is_decided: bool,
    /// Whether the request has waited for more than a round trip to the store: its key was on hold or
    /// the store paused when it came, its slot was ahead, or a call was answered and brought it no slot.
    pub(in crate::limiter) is_in_line: bool,
    /// When the request gives up if the store has not decided on it.
    pub(in crate::limiter) gives_up_at: Instant,
}

impl SlotWait {
    /// A request that enters at `now`.
    pub(in crate::limiter) fn new(bound: WaitBound, now: Instant) -> Self {
        SlotWait {
            bound,
            entered: now,
            is_decided: false,
            is_in_line: false,
            gives_up_at: bound.decided_by(now),
        }
    }

    /// Returns when the request can wait no longer.
    pub(in crate::limiter) fn ends_at(&self) -> Instant {
        if self.is_decided {
            self.bound.latest
        } else {
            self.gives_up_at
        }
    }

    /// Returns when the task of the request wakes for something that happens at `at`: no later than
    /// the request can wait.
    fn wakes_for(&self, at: Instant) -> Instant {
        at.min(self.ends_at())
    }
}

/// By what a lane is found: a moment, a waiter, both or neither.
pub(super) type Place = (Option<Instant>, Number);

/// What the lines of all costs need to know of a lane, to find it without looking at all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LaneFacts {
    /// The first slot, if a request waits for it, and the first waiter.
    pub(super) first_slot: Option<Place>,
    pub(super) last_slot: Option<Place>,
    pub(super) first_without_slot: Option<Place>,
    /// If there are more permits than waiters.
    pub(super) surplus: Option<Place>,
    pub(super) waiting: usize,
    pub(super) without_slot: usize,
}

impl<S: Booked> Default for Lane<S> {
    fn default() -> Self {
        Lane {
            waiters: WaitQueue::default(),
            slots: VecDeque::new(),
            booked: 0,
            asked: 0,
            first_without_slot: None,
            timed_until: 0,
            has_untimed: false,
        }
    }
}

impl<S: Booked> Lane<S> {
    pub(super) fn facts(&self) -> LaneFacts {
        LaneFacts {
            first_slot: self.next_slot(),
            last_slot: self.last_slot().map(|at| (Some(at), 0)),
            first_without_slot: self.first_without_slot.map(|number| (None, number)),
            surplus: (self.surplus() > 0).then_some((None, 0)),
            waiting: self.waiting(),
            without_slot: self.without_slot(),
        }
    }

    /// Returns how many requests wait.
    pub(in crate::limiter) fn waiting(&self) -> usize {
        self.waiters.waiting()
    }

    /// Returns how many waiters have no slot.
    pub(in crate::limiter) fn without_slot(&self) -> usize {
        self.waiting().saturating_sub(self.booked)
    }

    /// Returns how many waiters have no slot and are not part of a call.
    pub(in crate::limiter) fn missing(&self) -> usize {
        self.without_slot().saturating_sub(self.asked)
    }

    /// Returns the waiters that have no slot, in order.
    pub(in crate::limiter) fn numbers_without_slot(
        &self,
    ) -> impl DoubleEndedIterator<Item = Number> {
        let first = self.first_without_slot.unwrap_or(Number::MAX);
        self.waiters.numbers(first..)
    }

    pub(super) fn first_waiter(&self) -> Option<Number> {
        self.waiters.numbers(..).next()
    }

    /// Returns the waiter behind another one.
    pub(in crate::limiter) fn next_after(&self, number: Number) -> Option<Number> {
        self.waiters.numbers(number + 1..).next()
    }

    /// Returns whether there are neither waiters, outcomes to collect nor slots, and no call asks for
    /// any.
    pub(super) fn is_unused(&self) -> bool {
        self.waiters.is_empty() && self.asked == 0 && self.slots.is_empty()
    }

    /// Returns whether no request waits, and all outcomes were collected.
    pub(super) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Returns a request that waits.
    pub(in crate::limiter) fn get(&self, number: Number) -> Option<&SlotWait> {
        Some(&self.waiters.get(number)?.request)
    }

    /// Returns a request that waits.
    pub(in crate::limiter) fn get_mut(&mut self, number: Number) -> Option<&mut SlotWait> {
        Some(&mut self.waiters.get_mut(number)?.request)
    }

    /// Returns the requests that wait, in order.
    pub(in crate::limiter) fn iter(&self) -> impl DoubleEndedIterator<Item = (Number, &SlotWait)> {
        let waiters = self.waiters.iter();
        waiters.map(|(number, waiter)| (number, &waiter.request))
    }

    /// Returns the requests that wait, in order.
    pub(in crate::limiter) fn iter_mut(
        &mut self,
    ) -> impl DoubleEndedIterator<Item = (Number, &mut SlotWait)> {
        let waiters = self.waiters.iter_mut(..);
        waiters.map(|(number, waiter)| (number, &mut waiter.request))
    }

    /// Returns the first slot, if a request waits for it, and the first waiter.
    fn next_slot(&self) -> Option<Place> {
        Some((Some(self.slots.front()?.at()), self.first_waiter()?))
    }

    pub(in crate::limiter) fn last_slot(&self) -> Option<Instant> {
        self.slots.back().map(S::at)
    }

    /// Returns the slot that a request has.
    pub(in crate::limiter) fn slot_of(&self, number: Number) -> Option<Instant> {
        let before = self.waiters.numbers(..).take_while(|other| *other < number);
        let mut permits = self.slots.iter().flat_map(each_permit);
        permits.nth(before.count())
    }

    /// Returns how many permits no request waits for.
    fn surplus(&self) -> usize {
        self.booked.saturating_sub(self.waiting())
    }

    /// Returns the last slot that a request waits for.
    fn last_needed(&self) -> Option<&S> {
        let mut surplus = self.surplus();
        self.slots.iter().rev().find(|slot| {
            let is_needed = slot.permits() > surplus;
            surplus = surplus.saturating_sub(slot.permits());
            is_needed
        })
    }

    /// Returns whether a request waits for a slot later than `moment`, or without a slot.
    pub(in crate::limiter) fn waits_beyond(&self, moment: Instant) -> bool {
        let waiting = self.waiting();
        if waiting > self.booked {
            return true;
        }
        waiting > 0 && self.last_needed().is_some_and(|slot| slot.at() > moment)
    }

    /// Returns the first waiter, how many wait, and the latest slot that is of use to one of them.
    pub(in crate::limiter) fn sooner(&self) -> Option<(Number, usize, Instant)> {
        let first = self.first_waiter()?;
        let waiting = self.waiting();
        let latest = if waiting > self.booked {
            self.iter().map(|(_, wait)| wait.bound.latest).max()?
        } else {
            self.last_needed()?.at().checked_sub(SHORTEST_GAIN)?
        };
        Some((first, waiting, latest))
    }

    /// Returns the last slot, if no request waits for it.
    pub(in crate::limiter) fn spare(&self) -> Option<&S> {
        self.slots.back().filter(|_| self.surplus() > 0)
    }

    pub(in crate::limiter) fn would_be_last(&self, number: Number) -> bool {
        self.waiters.numbers(..).next_back() < Some(number)
    }

    /// Adds a waiter.
    pub(in crate::limiter) fn enter(&mut self, number: Number, wait: SlotWait, wakes_at: Instant) {
        self.waiters.enter(number, wait, wakes_at);
        match self.first_without_slot {
            None if self.waiting() > self.booked => {
                self.first_without_slot = self.waiters.numbers(..).next_back();
            }
            // It has the slot of the last waiter with one.
            Some(first) if number < first => {
                self.first_without_slot = self.waiters.numbers(..first).next_back();
            }
            _ => {}
        }
    }

    /// Removes a request, whether its wait has ended or not.
    pub(in crate::limiter) fn leave(
        &mut self,
        number: Number,
    ) -> Option<Left<SlotWait, S::Outcome>> {
        let left = self.waiters.leave(number);
        if matches!(left, Some(Left::Waiting(_))) {
            self.waits_no_longer(number);
        }
        left
    }

    /// Takes the outcome of a wait that has ended.
    pub(super) fn collect(&mut self, number: Number) -> Option<S::Outcome> {
        self.waiters.collect(number)
    }

    /// Ends the wait of a request. Does nothing if it does not wait.
    pub(in crate::limiter) fn settle(
        &mut self,
        number: Number,
        outcome: S::Outcome,
        wakers: &mut Wakers,
    ) {
        if self.waiters.settle(number, outcome, wakers).is_ok() {
            self.waits_no_longer(number);
        }
    }

    /// Ends the wait of each request for which `outcome` returns one.
    pub(in crate::limiter) fn settle_where(
        &mut self,
        outcome: impl FnMut(Number, &SlotWait) -> Option<S::Outcome>,
        wakers: &mut Wakers,
    ) {
        if self.waiters.settle_where(outcome, wakers) > 0 {
            let without_slot = self.without_slot();
            let mut last = self.waiters.numbers(..).rev();
            self.first_without_slot = without_slot.checked_sub(1).and_then(|n| last.nth(n));
        }
    }

    pub(super) fn wake_where(&mut self, which: impl Fn(&SlotWait) -> bool, wakers: &mut Wakers) {
        self.waiters.wake_where(which, wakers);
    }

    /// Notes that the task of a request runs.
    pub(super) fn runs(&mut self, number: Number) {
        self.waiters.runs(number);
    }

    /// Takes in that a request before the waiters without a slot, or the first of them, waits no longer.
    fn waits_no_longer(&mut self, number: Number) {
        if let Some(first) = self.first_without_slot.filter(|first| number <= *first) {
            self.first_without_slot = self.waiters.numbers(first + 1..).next();
        }
    }

    pub(in crate::limiter) fn add(&mut self, slot: S) {
        self.booked += slot.permits();
        if let Some(first) = self.first_without_slot {
            self.first_without_slot = self.waiters.numbers(first..).nth(slot.permits());
        }
        let index = self.slots.partition_point(|other| other.at() <= slot.at());
        self.slots.insert(index, slot);
    }

    /// Takes in that the last waiters with a slot have lost `permits`.
    fn lost(&mut self, permits: usize) {
        let of_waiters = permits.saturating_sub(self.surplus());
        self.booked -= permits;
        if let Some(others) = of_waiters.checked_sub(1) {
            let end = self.first_without_slot.unwrap_or(Number::MAX);
            self.first_without_slot = self.waiters.numbers(..end).rev().nth(others);
        }
    }

    /// Takes up to `most` slots from `first` on. The waiters keep their places.
    fn take(&mut self, first: usize, most: usize, mut taken: impl FnMut(S)) {
        let end = self.slots.len().min(first.saturating_add(most));
        let slots: VecDeque<S> = self.slots.drain(first..end).collect();
        self.lost(slots.iter().map(S::permits).sum());
        slots.into_iter().for_each(&mut taken);
    }

    /// Takes all slots.
    pub(in crate::limiter) fn take_all(&mut self, taken: impl FnMut(S)) {
        self.take(0, usize::MAX, taken);
    }

    /// Takes the slots before `until`.
    pub(in crate::limiter) fn take_before(&mut self, until: Instant, taken: impl FnMut(S)) {
        let before = self.slots.partition_point(|slot| slot.at() < until);
        self.take(0, before, taken);
    }

    /// Takes up to `most` slots after `moment`, the first ones.
    pub(super) fn take_after(&mut self, moment: Instant, most: usize, taken: impl FnMut(S)) {
        let first = self.slots.partition_point(|slot| slot.at() <= moment);
        self.take(first, most, taken);
    }

    /// Takes the first slot if it is `chosen`.
    pub(super) fn take_first_if(&mut self, chosen: impl FnOnce(&S) -> bool) -> Option<S> {
        if !chosen(self.slots.front()?) {
            return None;
        }
        let first = self.slots.pop_front()?;
        self.lost(first.permits());
        Some(first)
    }

    /// Takes the slots that no request waits for, the last ones first. While requests wait, as many
    /// stay as have slots later than `spared_from`.
    pub(in crate::limiter) fn trim(
        &mut self,
        spared_from: Option<Instant>,
        mut taken: impl FnMut(S),
    ) {
        let spared = spared_from.filter(|_| self.waiting() > 0);
        let spared = spared.map_or(0, |from| {
            let late = self.slots.iter().rev().take_while(|slot| slot.at() > from);
            late.map(S::permits).sum()
        });
        while let surplus @ 1.. = self.surplus().saturating_sub(spared)
            && let Some(last) = self.slots.back_mut()
        {
            let Some(slot) = last.split(surplus).or_else(|| self.slots.pop_back()) else {
                return;
            };
            self.booked -= slot.permits();
            taken(slot);
        }
    }

    /// Gives the permits of the first slot to the first waiters, if it is due and `may_leave`, and does not expire before
    /// their tasks come.
    ///
    /// A slot that has expired for some time goes to its waiter, too: so that waiter has an outcome to collect, and the
    /// next slots are for waiters that are polled. Otherwise ten futures that are not polled would get ten
    /// slots, then nine, then eight: all those of the waiters behind them.
    pub(super) fn hand_out_first(
        &mut self,
        how: HandOut,
        late: Late,
        mut may_leave: impl FnMut(&S) -> bool,
        mut handed: impl FnMut(Number, Option<Instant>),
        mut died: impl FnMut(S),
        wakers: &mut Wakers,
    ) -> HandedOut {
        let now = how.now;
        let mut all = HandedOut::default();
        while let Some(slot) = self.slots.front_mut()
            && slot.at() <= now
        {
            let runs = how.running.is_some() && self.waiters.numbers(..).next() == how.running;
            if is_too_late(slot, if runs { Duration::ZERO } else { late.takes }, now) {
                let Some(slot) = self.take_first_if(|_| true) else {
                    break;
                };
                all.died = true;
                let permits = slot.permits();
                let left = self.miss(slot, how, late.most_missed, wakers);
                all.missed = permits - left.as_ref().map_or(0, S::permits);
                left.into_iter().for_each(&mut died);
                break;
            }
            let Some((first, waiter)) = self.waiters.iter().next() else {
                break;
            };
            if !may_leave(slot) || all.count == how.most {
                all.stays = true;
                break;
            }
            let is_in_line = waiter.request.is_in_line;
            let until = slot.until();
            let is_last = slot.permits() == 1;
            let Some(permit) = slot.split(1).or_else(|| self.slots.pop_front()) else {
                break;
            };
            self.booked -= 1;
            let outcome = permit.granted(is_in_line, how.probe);
            // It waits, so its wait ends.
            _ = self.waiters.settle(first, outcome, wakers);
            // With the first waiter goes the first permit, so the others have what they had.
            handed(first, until);
            all.count += 1;
            if is_last {
                break;
            }
        }
        all
    }

    /// Ends the waits of up to `most` of the first waiters, but not of the running one, if they have not come for a slot that
    /// has expired for some time. Returns what is left of it.
    fn miss(&mut self, mut slot: S, how: HandOut, most: usize, wakers: &mut Wakers) -> Option<S> {
        if slot.until().is_none_or(|until| !is_missed(until, how.now)) {
            return Some(slot);
        }
        let is_running = how.running.is_some() && self.first_waiter() == how.running;
        let missed = slot.permits() - usize::from(is_running);
        let missed = missed.min(most);
        let numbers: Vec<Number> = self
            .waiters
            .numbers(..)
            .filter(|number| Some(*number) != how.running)
            .take(missed)
            .collect();
        for number in numbers {
            let Some(permit) = slot.split(1) else {
                self.settle(number, slot.granted(true, None), wakers);
                return None;
            };
            self.settle(number, permit.granted(true, None), wakers);
        }
        Some(slot)
    }

    /// Wakes the first waiter at `at`.
    pub(super) fn wake_first(&mut self, at: Instant) {
        if let Some((_, first)) = self.waiters.iter_mut(..).next() {
            first.wake_at(first.request.wakes_for(at));
        }
    }

    /// Wakes the first waiter for the first slot, and those behind it in the front for theirs, unless they wake earlier.
    /// A slot that is due wakes its waiter at `due_at`.
    pub(super) fn wake_front(&mut self, due_at: Instant, now: Instant) {
        let Some(first) = self.first_waiter() else {
            return;
        };
        let is_last_front = self.waiting() <= FRONT;
        let is_timed = first < self.timed_until && !(is_last_front && self.has_untimed);
        let timed = if is_timed { 1 } else { FRONT };
        self.has_untimed &= !is_last_front;
        let slots = self.slots.iter().flat_map(each_permit);
        let front = self.waiters.iter_mut(..).take(timed).zip(slots);
        for (index, ((number, waiter), slot)) in front.enumerate() {
            let at = wakes_for_slot(slot, due_at, now);
            // The first one hands out the slots of one moment in order. If another one woke first, it would leave first.
            let at = if index == 0 {
                at
            } else {
                clock::after(at, SHORTEST_TIMER)
            };
            if waiter.wakes_at() > at {
                waiter.wake_at(waiter.request.wakes_for(at));
            }
            if index == FRONT / 2 {
                self.timed_until = number;
            }
        }
    }

    /// Wakes a waiter for something that happens at `at`.
    pub(in crate::limiter) fn wake(&mut self, number: Number, at: Instant) {
        if let Some(waiter) = self.waiters.get_mut(number) {
            waiter.wake_at(waiter.request.wakes_for(at));
        }
    }

    /// Wakes the waiters without a slot at `at` at the latest.
    pub(in crate::limiter) fn wake_by(&mut self, at: Instant) {
        let without_slot = self.without_slot();
        let waiters = self.waiters.iter_mut(..).rev().take(without_slot);
        for (_, waiter) in waiters.filter(|(_, waiter)| waiter.wakes_at() > at) {
            waiter.wake_at(waiter.request.wakes_for(at));
        }
    }

    /// Lets no request wait for longer than `by`. Ends the waits of those whose slot is later with `end`.
    pub(in crate::limiter) fn end_by(
        &mut self,
        by: Instant,
        end: impl Fn() -> S::Outcome,
        wakers: &mut Wakers,
    ) {
        for (_, wait) in self.iter_mut() {
            wait.bound.end_by(by);
            wait.gives_up_at = wait.gives_up_at.min(by);
        }
        let slots: Vec<Instant> = self.slots.iter().flat_map(each_permit).collect();
        let mut slots = slots.into_iter();
        self.settle_where(
            |_, _| slots.next().filter(|slot| *slot > by).map(|_| end()),
            wakers,
        );
    }

    /// Registers the task of a waiter. It wakes at the first slot, or at `due_at` if that is due, at `watched` if there is
    /// something else to look at then, or when it can wait no longer.
    pub(super) fn register(
        &mut self,
        number: Number,
        watched: Option<Instant>,
        due_at: Instant,
        now: Instant,
        cx: &mut Context<'_>,
    ) {
        let first_slot = self.slots.front().map(S::at);
        let Some(waiter) = self.waiters.get_mut(number) else {
            return;
        };
        if waiter.wakes_at() <= now {
            let wakes_at = first_slot.map_or(waiter.request.ends_at(), |slot| {
                wakes_for_slot(slot, due_at, now)
            });
            let patience = waiter.request.bound.patience_ends(now);
            let others = watched.into_iter().chain(patience);
            let wakes_at = others.fold(wakes_at, Instant::min);
            waiter.wake_at(waiter.request.wakes_for(wakes_at));
        }
        waiter.register(cx);
    }

    /// Assigns the last `granted` permits to the waiters in front of the last `without_slot` ones, and
    /// sets the timers of those in the front. Permits that no waiter needs are left out.
    ///
    /// If a waiter cannot wait for its slot, the next waiter has the slot. Returns the waiters that
    /// leave for this reason, with the slot.
    pub(in crate::limiter) fn assign(
        &mut self,
        granted: usize,
        without_slot: usize,
        now: Instant,
    ) -> Vec<(Number, Instant)> {
        let mut leaving = Vec::new();
        let last_first = self.slots.iter().rev().flat_map(each_permit);
        let new_slots: Vec<Instant> = last_first.skip(self.surplus()).take(granted).collect();
        // Behind the first waiter with a new slot stand the others with a new slot, and the waiters
        // without a slot.
        let Some(others) = new_slots.len().checked_sub(1) else {
            return leaving;
        };
        let Some(first) = self.waiters.numbers(..).rev().nth(others + without_slot) else {
            return leaving;
        };
        let place = self.waiting() - without_slot - new_slots.len();
        self.has_untimed |= place + new_slots.len() > FRONT;
        // In order, because timers that fire at the same tick do so in the order in which they were
        // set.
        let mut slots = (place..).zip(new_slots.iter().rev()).peekable();
        for (number, waiter) in self.waiters.iter_mut(first..) {
            let Some(&(place, &slot)) = slots.peek() else {
                break;
            };
            if slot > waiter.request.bound.latest {
                leaving.push((number, slot));
            } else {
                waiter.request.is_decided = true;
                waiter.request.is_in_line |= slot > now;
                if place < FRONT {
                    waiter.wake_at(waiter.request.wakes_for(slot));
                } else if !backup(slot).contains(&waiter.wakes_at()) {
                    waiter.wake_at(waiter.request.wakes_for(clock::after(slot, ANSWER)));
                }
                slots.next();
            }
        }
        leaving
    }
}

/// Returns when the task of a waiter behind the front may wake: not before its slot, and some time behind it. The timer
/// stays as it is if the slot moves a little. It is for tasks that wait in a runtime that runs while the one in which the
/// key is visited does not.
fn backup(slot: Instant) -> RangeInclusive<Instant> {
    slot..=clock::after(slot, 2 * ANSWER)
}

/// Returns whether the permits of a slot that is due would expire on the way to their tasks. In the first half of their
/// life none counts as that: others that are booked instead would be no better.
fn is_too_late<S: Booked>(slot: &S, takes: Duration, now: Instant) -> bool {
    slot.until().is_some_and(|until| {
        let life = until.saturating_duration_since(slot.at());
        until <= clock::after(now, takes.min(life / 2))
    })
}

/// Returns when the task of a waiter wakes for a slot. One that is due and was not handed out wakes it at `due_at`.
fn wakes_for_slot(slot: Instant, due_at: Instant, now: Instant) -> Instant {
    if slot > now { slot } else { due_at }
}

fn each_permit<S: Booked>(slot: &S) -> impl Iterator<Item = Instant> + use<S> {
    std::iter::repeat_n(slot.at(), slot.permits())
}
