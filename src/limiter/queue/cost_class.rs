//! The waiters for permits of one cost, and the slots booked for them.
//!
//! Both are sorted, and the first waiter owns the first permit, the second waiter the second one,
//! and so on. So the first `booked` waiters have a slot, and the waiters without a slot are always
//! the last ones. A call under way asks for the first `asked` of the waiters without a slot. The
//! others of them arrived later.

use std::collections::VecDeque;
use std::task::Context;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{GivenUp, HandedOut};
use crate::clock;
use crate::limiter::reservation::{ProbeNumber, Reservation, Settled, WaitBound};
use crate::store::Refusal;
use crate::wait_queue::{ANSWER, Number, WaitQueue, is_missed};
use crate::wakers::Wakers;

/// A slot is of use instead of another one if it is this much earlier.
const SHORTEST_GAIN: Duration = Duration::from_millis(1);

/// The waiters and slots of one cost.
#[derive(Default)]
pub(super) struct CostClass {
    pub(super) waiters: WaitQueue<SlotWait, Settled>,
    /// Sorted by time.
    pub(super) slots: VecDeque<Reservation>,
    /// The number of permits in `slots`.
    booked: usize,
    /// The number of permits that the call under way asks for.
    pub(super) asked: usize,
}

/// What is known of a request that waits for a slot.
pub(super) struct SlotWait {
    pub(super) bound: WaitBound,
    /// From this moment on the request waits for the answer of the store. That time does not count
    /// against `max_wait`.
    pub(super) entered: Instant,
    /// Whether the store has decided on the request.
    pub(super) is_decided: bool,
    /// Whether the request has waited for more than a round trip to the store: its key was on hold or
    /// the store paused when it came, its slot was ahead, or a call was answered and brought it no slot.
    pub(super) is_in_line: bool,
    /// When the request gives up if the store has not decided on it.
    pub(super) gives_up_at: Instant,
}

impl SlotWait {
    /// Returns when the request can wait no longer.
    pub(super) fn ends_at(&self) -> Instant {
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

impl CostClass {
    /// Returns how many waiters have no slot.
    pub(super) fn without_slot(&self) -> usize {
        self.waiters.waiting().saturating_sub(self.booked)
    }

    /// Returns how many waiters have no slot and are not part of a call.
    pub(super) fn missing(&self) -> usize {
        self.without_slot().saturating_sub(self.asked)
    }

    /// Returns the waiters that have no slot and are not part of a call.
    pub(super) fn missing_numbers(&self) -> impl Iterator<Item = Number> {
        self.waiters.numbers().skip(self.booked + self.asked)
    }

    /// Returns whether the class has neither waiters nor outcomes to collect, and no call asks for
    /// it.
    pub(super) fn is_unused(&self) -> bool {
        self.waiters.is_empty() && self.asked == 0
    }

    /// Returns the first slot, if a request waits for it.
    pub(super) fn next_slot(&self) -> Option<Instant> {
        self.slots
            .front()
            .filter(|_| self.waiters.waiting() > 0)
            .map(|slot| slot.at)
    }

    /// Returns how many permits no request waits for.
    fn surplus(&self) -> usize {
        self.booked.saturating_sub(self.waiters.waiting())
    }

    /// Returns the last slot that a request waits for.
    fn last_needed(&self) -> Option<&Reservation> {
        let mut surplus = self.surplus();
        self.slots.iter().rev().find(|slot| {
            let is_needed = slot.count as usize > surplus;
            surplus = surplus.saturating_sub(slot.count as usize);
            is_needed
        })
    }

    /// Returns whether a request waits for a slot later than `moment`, or without a slot.
    pub(super) fn waits_beyond(&self, moment: Instant) -> bool {
        let waiting = self.waiters.waiting();
        let is_late = |slot: &Reservation| slot.at > moment;
        waiting > 0 && (waiting > self.booked || self.last_needed().is_some_and(is_late))
    }

    /// Returns the first waiter, how many wait, and the latest slot that is of use to one of them.
    pub(super) fn sooner(&self) -> Option<(Number, usize, Instant)> {
        let first = self.waiters.numbers().next()?;
        let waiting = self.waiters.waiting();
        let latest = if waiting > self.booked {
            self.waiters
                .iter()
                .map(|(_, waiter)| waiter.request.bound.latest)
                .max()?
        } else {
            self.last_needed()?.at.checked_sub(SHORTEST_GAIN)?
        };
        Some((first, waiting, latest))
    }

    /// Adds a waiter. If it is the last one and can wait for a slot that is kept, it has this slot.
    /// Otherwise the slots that are kept are returned.
    pub(super) fn enter(
        &mut self,
        number: Number,
        wait: SlotWait,
        wakes_at: Instant,
        now: Instant,
        returns: &mut GivenUp,
    ) {
        let is_last = self.waiters.numbers().next_back() < Some(number);
        let of_use = |spare: &Reservation| is_last && spare.at <= wait.bound.latest;
        let has_slot = self.spare().is_some_and(of_use);
        if !has_slot {
            self.trim(None, returns);
        }
        self.waiters.enter(number, wait, wakes_at);
        if has_slot {
            let leaving = self.assign(1, 0, now);
            debug_assert!(leaving.is_empty(), "it can wait for its slot");
        }
    }

    /// Returns the last slot, if no request waits for it.
    pub(super) fn spare(&self) -> Option<&Reservation> {
        self.slots.back().filter(|_| self.surplus() > 0)
    }

    /// Adds a slot for the waiters.
    pub(super) fn add(&mut self, slot: Reservation) {
        let index = self.slots.partition_point(|other| other.at <= slot.at);
        self.slots.insert(index, slot);
        self.booked += slot.count as usize;
    }

    /// Drops all slots, which are not valid any more. The waiters keep their places.
    pub(super) fn void(&mut self) {
        self.slots.clear();
        self.booked = 0;
    }

    /// Returns all slots.
    pub(super) fn give_up_slots(&mut self, returns: &mut GivenUp) {
        self.slots.iter().for_each(|slot| returns.add(slot));
        self.void();
    }

    /// Returns the slots that no request waits for, the last ones first. While requests wait, as many
    /// stay as have slots later than `spared_from`.
    pub(super) fn trim(&mut self, spared_from: Option<Instant>, returns: &mut GivenUp) {
        let spared = spared_from.filter(|_| self.waiters.waiting() > 0);
        let spared = spared.map_or(0, |from| {
            let late = self.slots.iter().rev().take_while(|slot| slot.at > from);
            late.map(|slot| slot.count as usize).sum()
        });
        while self.surplus() > spared
            && let Some(last) = self.slots.back_mut()
        {
            let surplus = self.booked - self.waiters.waiting() - spared;
            let surplus = u32::try_from(surplus).unwrap_or(u32::MAX).min(last.count);
            returns.add(&Reservation {
                count: surplus,
                ..*last
            });
            self.booked -= surplus as usize;
            last.count -= surplus;
            if last.count == 0 {
                self.slots.pop_back();
            }
        }
    }

    /// Gives up to `most` permits of the slots that are due to the first waiters. The task of waiter `running` runs
    /// already.
    ///
    /// A slot that has expired for some time goes to its waiter, too: so that waiter has an outcome to collect, and the
    /// next slots are for waiters that are polled. Otherwise ten futures that are not polled would get ten
    /// slots, then nine, then eight: all those of the waiters behind them.
    pub(super) fn hand_out(
        &mut self,
        most: usize,
        probe: Option<ProbeNumber>,
        now: Instant,
        running: Option<Number>,
        returns: &mut GivenUp,
        wakers: &mut Wakers,
    ) -> HandedOut {
        let mut handed_out = HandedOut::default();
        while let Some(slot) = self.slots.front_mut()
            && slot.at <= now
        {
            if slot.until <= now {
                handed_out.died = true;
                self.booked -= slot.count as usize;
                let mut died = *slot;
                self.slots.pop_front();
                if is_missed(died.until, now) {
                    died.count -= self.miss(died, running, wakers);
                }
                if died.count > 0 {
                    returns.add(&died);
                }
                continue;
            }
            let first = self.waiters.first_mut();
            let is_in_line = first.is_some_and(|first| first.request.is_in_line);
            let permit = Settled::Granted(Reservation {
                count: 1,
                is_at_once: slot.is_at_once && !is_in_line,
                probe,
                ..*slot
            });
            if handed_out.count == most || self.waiters.settle_first(permit, wakers).is_none() {
                break;
            }
            handed_out.count += 1;
            self.booked -= 1;
            slot.count -= 1;
            if slot.count == 0 {
                self.slots.pop_front();
            }
        }
        if let Some(slot) = self.slots.front()
            && let Some(first) = self.waiters.first_mut()
        {
            let at = wakes_for_slot(slot.at, now);
            if first.wakes_at() > at {
                first.wake_at(first.request.wakes_for(at));
            }
        }
        handed_out
    }

    /// Ends the waits of the first waiters but `running`, which have not come for a slot that has `died`. Returns how
    /// many these are.
    fn miss(&mut self, died: Reservation, running: Option<Number>, wakers: &mut Wakers) -> u32 {
        let is_running = running.is_some() && self.waiters.numbers().next() == running;
        let most = died.count.saturating_sub(u32::from(is_running));
        let permit = Settled::Granted(Reservation { count: 1, ..died });
        (0..most)
            .take_while(|_| {
                self.waiters
                    .settle_first_but(running, permit.clone(), wakers)
            })
            .count() as u32
    }

    /// Wakes the first waiter at `at`.
    pub(super) fn wake_first(&mut self, at: Instant) {
        if let Some(first) = self.waiters.first_mut() {
            first.wake_at(first.request.wakes_for(at));
        }
    }

    /// Wakes the waiters without a slot at `at` at the latest.
    pub(super) fn wake_by(&mut self, at: Instant) {
        let without_slot = self.without_slot();
        let waiters = self.waiters.iter_mut().rev().take(without_slot);
        for waiter in waiters.filter(|waiter| waiter.wakes_at() > at) {
            waiter.wake_at(waiter.request.wakes_for(at));
        }
    }

    /// Notes that a call is sent at `now`: its waiters wait for the answer from now on. `entered`
    /// may be later, if they waited for a hold that was released since.
    pub(super) fn asked_at(&mut self, now: Instant) {
        for waiter in self
            .waiters
            .iter_mut()
            .rev()
            .take_while(|waiter| !waiter.request.is_decided)
        {
            waiter.request.entered = waiter.request.entered.min(now);
        }
    }

    /// Lets no request leave before `until`: returns the slots before it, and refuses with
    /// `refusal` the waiters that cannot wait until then.
    pub(super) fn withdraw(
        &mut self,
        until: Instant,
        refusal: Refusal,
        returns: &mut GivenUp,
        wakers: &mut Wakers,
    ) {
        while let Some(slot) = self.slots.front().filter(|slot| slot.at < until) {
            returns.add(slot);
            self.booked -= slot.count as usize;
            self.slots.pop_front();
        }
        let refuse =
            |_, wait: &SlotWait| (wait.bound.latest < until).then_some(Settled::Refused(refusal));
        self.waiters.settle_where(refuse, wakers);
        self.enter_from(until);
    }

    /// Lets no request wait for longer than `by`. Refuses those whose slot is later.
    pub(super) fn end_by(&mut self, by: Instant, wakers: &mut Wakers) {
        for waiter in self.waiters.iter_mut() {
            let wait = &mut waiter.request;
            wait.bound.latest = wait.bound.latest.min(by);
            wait.bound.by_deadline = true;
            wait.gives_up_at = wait.gives_up_at.min(by);
        }
        let each_permit = |slot: &Reservation| std::iter::repeat_n(slot.at, slot.count as usize);
        let mut slots = self.slots.iter().flat_map(each_permit);
        let refuse = |_, _: &SlotWait| {
            let is_late = slots.next().is_some_and(|slot| slot > by);
            is_late.then_some(Settled::Refused(Refusal::NEVER))
        };
        self.waiters.settle_where(refuse, wakers);
    }

    /// Pauses calls to a store that decides nothing before `until`. Refuses with `refusal` the
    /// waiters without a slot that cannot wait until then.
    pub(super) fn pause(&mut self, until: Instant, refusal: Refusal, wakers: &mut Wakers) {
        self.asked = 0;
        self.enter_from(until);
        let without_slot = self.without_slot();
        let Some(first) = self.waiters.numbers().rev().take(without_slot).last() else {
            return;
        };
        let refuse = |number, wait: &SlotWait| {
            (number >= first && wait.bound.latest < until).then_some(Settled::Refused(refusal))
        };
        self.waiters.settle_where(refuse, wakers);
    }

    /// Counts the time until `from` against `max_wait`, because the store is not called before.
    fn enter_from(&mut self, from: Instant) {
        for waiter in self.waiters.iter_mut() {
            waiter.request.entered = waiter.request.entered.max(from);
        }
        // The others have slots, which may be due now.
        let without_slot = self.without_slot();
        for waiter in self.waiters.iter_mut().rev().take(without_slot) {
            waiter.request.is_in_line = true;
        }
    }

    /// Registers the task of a waiter. It wakes at its slot, at `watched` if the call may be lost
    /// then, or when it can wait no longer.
    pub(super) fn register(
        &mut self,
        number: Number,
        watched: Option<Instant>,
        now: Instant,
        cx: &mut Context<'_>,
    ) {
        let first_slot = self.slots.front().map(|slot| slot.at);
        let Some(waiter) = self.waiters.get_mut(number) else {
            return;
        };
        if waiter.wakes_at() <= now {
            let wakes_at =
                first_slot.map_or(waiter.request.ends_at(), |slot| wakes_for_slot(slot, now));
            let wakes_at = watched.map_or(wakes_at, |watched| wakes_at.min(watched));
            waiter.wake_at(waiter.request.wakes_for(wakes_at));
        }
        waiter.register(cx);
    }

    /// Takes in the result of a call to the store. The granted permits are in `slots` already.
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
    pub(super) fn settle(&mut self, result: &CallResult<'_>, now: Instant, wakers: &mut Wakers) {
        let without_slot = self.without_slot();
        let left_out = self.left_out(result, without_slot);
        self.count_waits_from(now);
        let mut leaving = self.assign(result.granted, without_slot, now);
        if let Some(end) = result.end {
            let moved_up = leaving.len();
            let still_left_out = left_out.len().saturating_sub(moved_up);
            let asked_for = left_out
                .iter()
                .take(still_left_out)
                .filter(|waiter| waiter.is_asked_for);
            leaving.extend(asked_for.map(|waiter| (waiter.number, end.clone())));
        }
        for (number, settled) in leaving {
            _ = self.waiters.settle(number, settled, wakers);
        }
        if let Some(last) = result.last_asked {
            let without_slot = self.without_slot();
            let waiters = self
                .waiters
                .iter_mut_with_numbers()
                .rev()
                .take(without_slot);
            for (_, waiter) in waiters.filter(|(number, _)| *number <= last) {
                waiter.request.is_in_line = true;
            }
        }
    }

    /// Returns the second group of [`settle`](Self::settle), the last waiter first.
    ///
    /// If a waiter left while the call was under way, one that arrived later is in its place. The
    /// call did not ask for that one.
    fn left_out(&self, result: &CallResult<'_>, without_slot: usize) -> SmallVec<[LeftOut; 4]> {
        let newcomers = without_slot.saturating_sub(result.left_out);
        let last = self
            .waiters
            .iter()
            .rev()
            .skip(newcomers)
            .take(without_slot - newcomers);
        let left_out = last.map(|(number, waiter)| {
            let entered = waiter.request.entered;
            let is_asked_for = result
                .refused_at
                .is_none_or(|(sent, last)| entered <= sent && number <= last);
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
        for waiter in self
            .waiters
            .iter_mut()
            .rev()
            .take_while(|waiter| !waiter.request.is_decided)
        {
            let wait = &mut waiter.request;
            let asking = now.saturating_duration_since(wait.entered);
            wait.entered = now.max(wait.entered);
            if !wait.bound.by_deadline {
                wait.bound.latest = clock::after(wait.bound.latest, asking);
            }
        }
    }

    /// Assigns the last `granted` slots to the waiters in front of the last `without_slot` ones, and
    /// sets the timers of these waiters. Slots that no waiter needs are left out.
    ///
    /// If a waiter cannot wait for its slot, the next waiter has the slot. Returns the waiters that
    /// leave for this reason.
    fn assign(
        &mut self,
        granted: usize,
        without_slot: usize,
        now: Instant,
    ) -> SmallVec<[(Number, Settled); 2]> {
        let mut leaving = SmallVec::new();
        let surplus = self.booked.saturating_sub(self.waiters.waiting());
        let each_permit = |slot: &Reservation| std::iter::repeat_n(slot.at, slot.count as usize);
        let last_first = self.slots.iter().rev().flat_map(each_permit);
        let new_slots: SmallVec<[Instant; 4]> = last_first.skip(surplus).take(granted).collect();
        // Behind the first waiter with a new slot stand the others with a new slot, and the waiters
        // without a slot.
        let Some(others) = new_slots.len().checked_sub(1) else {
            return leaving;
        };
        let Some(first) = self.waiters.numbers().rev().nth(others + without_slot) else {
            return leaving;
        };
        // In order, because timers that fire at the same tick do so in the order in which they were
        // set.
        let mut slots = new_slots.iter().rev().peekable();
        for (number, waiter) in self.waiters.iter_mut_from(first) {
            let Some(&&slot) = slots.peek() else { break };
            if slot > waiter.request.bound.latest {
                let wait = Some(slot.saturating_duration_since(now));
                leaving.push((number, Settled::Refused(Refusal { wait, limit: None })));
            } else {
                waiter.request.is_decided = true;
                waiter.request.is_in_line |= slot > now;
                waiter.wake_at(waiter.request.wakes_for(slot));
                slots.next();
            }
        }
        leaving
    }
}

/// Returns when the task of a waiter wakes for a slot at `slot`.
///
/// A slot that is due and was not handed out waits for the store's answer, which wakes its waiter. If its
/// waiter woke at once, the first waiters of two costs would wake each other until that answer arrives.
fn wakes_for_slot(slot: Instant, now: Instant) -> Instant {
    if slot > now {
        slot
    } else {
        clock::after(now, ANSWER)
    }
}

/// The result of a call to the store, for the waiters of one cost.
pub(super) struct CallResult<'a> {
    /// The number of permits for waiters that had none before.
    pub(super) granted: usize,
    /// How many waiters of the call got no slot.
    pub(super) left_out: usize,
    /// How the wait of these waiters ends. `None` if they are asked for again.
    pub(super) end: Option<&'a Settled>,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The call that was to decide on the request failed, so it has no slot, and the first slot is that of
    /// a waiter that has left.
    #[tokio::test(start_paused = true)]
    async fn an_undecided_request_wakes_when_its_wait_ends() {
        let now = clock::now();
        let at = |seconds| clock::after(now, Duration::from_secs(seconds));
        let mut class = CostClass::default();
        class.add(Reservation {
            at: at(10),
            until: at(11),
            cost: 1,
            count: 1,
            slot: 0,
            stamp: 0,
            incarnation: 0,
            lender: None,
            probe: None,
            is_at_once: true,
        });
        let wait = SlotWait {
            bound: WaitBound::new(Some(at(3)), now, Duration::from_secs(60)),
            entered: now,
            is_decided: false,
            is_in_line: false,
            gives_up_at: at(3),
        };
        class.waiters.enter(1, wait, now);
        class.register(
            1,
            None,
            now,
            &mut Context::from_waker(std::task::Waker::noop()),
        );
        assert_eq!(class.waiters.get(1).unwrap().wakes_at(), at(3));
    }
}
