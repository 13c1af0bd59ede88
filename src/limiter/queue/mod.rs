//! The waiters of one key: first come, first served, with one timer and one wake-up each.
//!
//! Waiters and the slots booked for them are two sorted lists, and the first waiter gets the first slot. So the slot of a waiter that
//! leaves is the next waiter's, and a waiter that was late is first again. The timer of a waiter is set to the slot that was its own
//! when it was booked. A waiter that wakes hands out all slots that are due, so no waiter depends on a task that is not polled. Only
//! the timer of the first waiter is ever moved, to the first slot.
//!
//! A slot is booked for permits of one cost: each cost has its two lists.

mod asked;
mod cost_class;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::prefetched::Prefetched;
use super::reservation::{Reservation, Settled, WaitBound};
use crate::clock::{self, Timer};
use crate::limit::UnusedPermits;
use crate::store::{Demand, Refusal};
use crate::wakers::Wakers;

use cost_class::{CostClass, Waiting};

/// How long a request waits for the store's answer, even if it can wait less for a slot. An older call counts as lost.
pub(super) const ANSWER: Duration = Duration::from_secs(1);

/// The longest that a call waits for other requests to join it. A request in another process may overtake by this much.
const LONGEST_GATHERING: Duration = Duration::from_millis(10);

/// The resolution of timers.
const SHORTEST_TIMER: Duration = Duration::from_millis(1);

/// The number of a waiter: smaller is earlier. 0 is none.
pub(super) type Number = u64;

/// The number of a call to the store. The answer to any but the last call is late.
pub(super) type CallNumber = u64;

/// Returns the next number. All keys of the process share one count, since the state of a key may be dropped and made anew while one of
/// its waiters means to return to its place.
pub(super) fn next_number() -> Number {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The waiters of a key, and the call to the store for them.
#[derive(Default)]
pub(super) struct Queue {
    /// Waiters and slots by cost.
    classes: BTreeMap<u32, CostClass>,
    /// How waits ended whose futures have not been polled since.
    settled: BTreeMap<Number, Settled>,
    /// How many wait, over all costs.
    waiting: usize,
    /// The latest slot that a waiter can use.
    latest: Option<Instant>,
    /// The call under way.
    call: Option<Calling>,
    /// When the oldest call was sent that the store has not answered, given up or not.
    unanswered: Option<Instant>,
    /// The needs of the call under way.
    asked: SmallVec<[Demand; 2]>,
    pub(super) gathering: Gathering,
    /// When gathering ends.
    gathers_until: Option<Instant>,
    /// The slot for which the store was last asked to confirm it ahead of time.
    pub(super) confirmed: Option<Instant>,
    /// Until when the store decides nothing, because it learns what it granted before it lost its state.
    paused_until: Option<Instant>,
    /// Permits that no waiter can use. They go back with the next call.
    pub(super) returns: SmallVec<[UnusedPermits; 4]>,
}

/// A call to the store.
#[derive(Clone, Copy, Debug)]
struct Calling {
    number: CallNumber,
    /// When it was sent. After [`ANSWER`] it counts as lost.
    sent: Instant,
    /// The last waiter when it was sent.
    last: Option<Number>,
    /// Whether waiters wake when it counts as lost, because it runs in the runtime of a caller.
    watched: bool,
}

/// What an answer of the store brought.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    /// Whether permits expired on their way.
    pub(super) died: bool,
    /// The cost of the first need that was not granted in full.
    pub(super) refused: Option<u32>,
}

/// What was handed out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HandedOut {
    /// How many permits waiters got.
    pub(super) count: usize,
    /// Whether permits had expired before a waiter took them.
    pub(super) died: bool,
}

/// Whether the next call waits for other requests to join it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Gathering {
    #[default]
    NotYet,
    UnderWay,
    Done,
}

impl Queue {
    /// Returns how many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns whether no request waits, no result is to be collected and no call is under way.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        self.waiting == 0 && self.settled.is_empty() && !self.is_calling(now)
    }

    /// Returns whether a call is under way.
    pub(super) fn is_calling(&self, now: Instant) -> bool {
        self.call.is_some_and(|call| now < clock::after(call.sent, ANSWER))
    }

    /// Returns for how long the store has not answered, if it was asked.
    pub(super) fn unanswered_for(&self, now: Instant) -> Option<Duration> {
        self.unanswered.map(|since| now.saturating_duration_since(since))
    }

    /// Returns whether this call is the one under way.
    pub(super) fn is_call(&self, number: CallNumber) -> bool {
        self.call.is_some_and(|call| call.number == number)
    }

    /// Gives up a call that was not answered in time. Its needs are asked for again.
    pub(super) fn give_up_call(&mut self) {
        if self.call.take().is_some() {
            self.asked.clear();
            self.classes.values_mut().for_each(|class| class.asked = 0);
        }
    }

    /// Returns when waiters wake because the call may be lost.
    fn watched_until(&self) -> Option<Instant> {
        self.call.filter(|call| call.watched).map(|call| clock::after(call.sent, ANSWER))
    }

    /// Returns the last slot that is booked.
    pub(super) fn last_booked(&self) -> Option<Instant> {
        self.classes.values().filter_map(|class| class.slots.back()).map(|slot| slot.at).max()
    }

    pub(super) fn latest(&self) -> Option<Instant> {
        self.latest
    }

    /// Adds a waiter: a new one at the end, or one that missed its slot in its old place. If the key is on hold, for `held`, the store
    /// is asked at its end.
    pub(super) fn wait(
        &mut self,
        number: Number,
        cost: u32,
        bound: WaitBound,
        now: Instant,
        held: Option<Duration>,
    ) {
        let WaitBound { latest, by_deadline, .. } = bound;
        let gives_up_at = if by_deadline { latest } else { latest.max(clock::after(now, ANSWER)) };
        let asked_from = held.map_or(now, |left| clock::after(now, left));
        let entered = self.paused_until.map_or(asked_from, |until| until.max(asked_from));
        // The runtime in which the store is called may have stopped, so the waiter watches the call.
        let wake_at = held.map_or(gives_up_at, |_| gives_up_at.min(clock::after(asked_from, ANSWER)));
        let wake_at = self.watched_until().map_or(wake_at, |watched| wake_at.min(watched));
        let waiting =
            Waiting { bound, entered, heard: false, gives_up_at, wake_at, timer: None, waker: None };
        self.classes.entry(cost).or_default().waiting.insert(number, waiting);
        self.waiting += 1;
        self.latest = self.latest.max(Some(latest));
    }

    /// Removes a waiter. Returns whether it waited.
    pub(super) fn leave(&mut self, number: Number, cost: u32) -> bool {
        let left = self.classes.get_mut(&cost).is_some_and(|class| class.waiting.remove(&number).is_some());
        self.waiting -= usize::from(left);
        left
    }

    /// Takes how the wait of `number` ended, if it did.
    pub(super) fn collect(&mut self, number: Number) -> Option<Settled> {
        self.settled.remove(&number)
    }

    /// Adds slots for the waiters of their cost.
    pub(super) fn add(&mut self, slot: Reservation) {
        self.classes.entry(slot.cost).or_default().add(slot);
    }

    /// Moves permits at hand to waiters without a slot.
    pub(super) fn take_from(&mut self, prefetched: &mut Prefetched, now: Instant) {
        for (cost, class) in &mut self.classes {
            if let Some(slot) = prefetched.take_many(*cost, class.missing(), now) {
                class.add(slot);
            }
        }
    }

    /// Hands out the slots that are due, the first to the first waiter, up to `most` in all. `me` needs no waking.
    pub(super) fn hand_out(
        &mut self,
        most: usize,
        now: Instant,
        me: Option<Number>,
        wakers: &mut Wakers,
    ) -> HandedOut {
        let (mut died, mut count) = (false, 0);
        for class in self.classes.values_mut() {
            while let Some(slot) = class.slots.front_mut()
                && slot.at <= now
            {
                if slot.until <= now {
                    died = true;
                    class.booked -= slot.count as usize;
                    self.returns.push(slot.unused());
                    class.slots.pop_front();
                    continue;
                }
                if count == most {
                    break;
                }
                let Some((number, waiting)) = class.waiting.pop_first() else { break };
                self.waiting -= 1;
                count += 1;
                self.settled.insert(number, Settled::Granted(Reservation { count: 1, ..*slot }));
                if Some(number) != me {
                    wakers.add(waiting.waker);
                }
                class.booked -= 1;
                slot.count -= 1;
                if slot.count == 0 {
                    class.slots.pop_front();
                }
            }
            if let Some(slot) = class.slots.front()
                && let Some(mut first) = class.waiting.first_entry()
                && first.get().wake_at > slot.at
            {
                first.get_mut().wake_at(slot.at);
            }
        }
        HandedOut { count, died }
    }

    /// Returns slots that no waiter needs, the last ones first.
    pub(super) fn trim(&mut self) {
        for class in self.classes.values_mut() {
            while class.booked > class.waiting.len()
                && let Some(last) = class.slots.back_mut()
            {
                let surplus =
                    u32::try_from(class.booked - class.waiting.len()).unwrap_or(u32::MAX).min(last.count);
                self.returns.push(Reservation { count: surplus, ..*last }.unused());
                class.booked -= surplus as usize;
                last.count -= surplus;
                if last.count == 0 {
                    class.slots.pop_back();
                }
            }
        }
        self.classes.retain(|_, class| !class.waiting.is_empty() || class.asked > 0);
        if self.waiting == 0 {
            self.latest = None;
        }
    }

    /// Returns whether a request waits.
    pub(super) fn is_waiting(&self, number: Number, cost: u32) -> bool {
        self.classes.get(&cost).is_some_and(|class| class.waiting.contains_key(&number))
    }

    /// Returns whether a waiter can wait no longer.
    pub(super) fn is_over(&self, number: Number, cost: u32, now: Instant) -> bool {
        let waiting = self.classes.get(&cost).and_then(|class| class.waiting.get(&number));
        // Its timer may be set to a slot that is gone meanwhile.
        waiting.is_some_and(|waiting| {
            let end = if waiting.heard { waiting.bound.latest } else { waiting.gives_up_at };
            end <= now
        })
    }

    /// Starts to gather, and returns how long the next call waits for other requests to join it.
    ///
    /// It waits until tasks that are about to ask have asked. If slots lie ahead, so that new requests wait anyway, it waits for some
    /// milliseconds. If the store is learning, it waits until it has learned.
    pub(super) fn gather(&mut self, now: Instant) -> Duration {
        let ahead = self.last_booked().map_or(Duration::ZERO, |last| last.saturating_duration_since(now));
        let paused = self.paused_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        let delay = paused.max((ahead / 8).min(LONGEST_GATHERING));
        self.gather_for(delay, now);
        if delay < SHORTEST_TIMER { Duration::ZERO } else { delay }
    }

    /// Lets the next call wait for `delay`.
    pub(super) fn gather_for(&mut self, delay: Duration, now: Instant) {
        (self.gathering, self.gathers_until) = (Gathering::UnderWay, Some(clock::after(now, delay)));
    }

    /// Returns whether the end of gathering is overdue: its task was lost with its runtime.
    pub(super) fn gathers_too_long(&self, now: Instant) -> bool {
        self.gathers_until.is_some_and(|until| clock::after(until, ANSWER) <= now)
    }

    /// Returns for how long the store decides nothing, if that is longer than a request can wait.
    pub(super) fn paused_beyond(&self, bound: WaitBound, now: Instant) -> Option<Duration> {
        let until = self.paused_until.filter(|until| *until > bound.latest && *until > now)?;
        Some(until.saturating_duration_since(now))
    }

    /// Returns whether a slot is due that a waiter needs.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let due = |class: &CostClass| class.slots.front().is_some_and(|slot| slot.at <= now);
        self.classes.values().any(|class| due(class) && !class.waiting.is_empty())
    }

    /// Returns the next slot that a waiter takes.
    pub(super) fn next_slot(&self) -> Option<Instant> {
        let waited_for = self.classes.values().filter(|class| !class.waiting.is_empty());
        waited_for.filter_map(|class| class.slots.front()).map(|slot| slot.at).min()
    }

    /// Wakes the waiter of the slot `slot` at `at`, before its slot.
    pub(super) fn wake_before(&mut self, slot: Instant, at: Instant) {
        let has_slot = |class: &&mut CostClass| class.slots.front().is_some_and(|first| first.at == slot);
        if let Some(class) = self.classes.values_mut().find(has_slot)
            && let Some(mut first) = class.waiting.first_entry()
        {
            first.get_mut().wake_at(at);
        }
    }

    /// Drops all slots, which are not valid any more. Waiters keep their places.
    pub(super) fn void(&mut self) {
        for class in self.classes.values_mut() {
            class.slots.clear();
            class.booked = 0;
        }
    }

    /// Wakes all waiters.
    pub(super) fn wake_all(&self, wakers: &mut Wakers) {
        let waiting = self.classes.values().flat_map(|class| class.waiting.values());
        wakers.add(waiting.filter_map(|waiting| waiting.waker.clone()));
    }

    /// Returns all slots that are booked.
    pub(super) fn give_up_slots(&mut self) {
        for class in self.classes.values_mut() {
            self.returns.extend(class.slots.drain(..).map(|slot| slot.unused()));
            class.booked = 0;
        }
    }

    /// Lets no request leave before `until`: returns the slots before it, and refuses waiters that cannot wait until then.
    pub(super) fn withdraw(&mut self, until: Instant, now: Instant, wakers: &mut Wakers) {
        let Queue { classes, settled, waiting, returns, .. } = self;
        let refusal = Refusal { wait: Some(until.saturating_duration_since(now)), limit: None };
        for class in classes.values_mut() {
            while let Some(slot) = class.slots.front().filter(|slot| slot.at < until) {
                returns.push(slot.unused());
                class.booked -= slot.count as usize;
                class.slots.pop_front();
            }
            class.waiting.retain(|&number, one| {
                let stays = one.bound.latest >= until;
                if stays {
                    one.entered = one.entered.max(until);
                } else {
                    *waiting -= 1;
                    settled.insert(number, Settled::Refused(refusal));
                    wakers.add(one.waker.take());
                }
                stays
            });
        }
    }

    /// Waits for a store that decides nothing for `wait`. Refuses waiters that cannot wait until then.
    pub(super) fn pause(&mut self, wait: Duration, now: Instant, wakers: &mut Wakers) {
        let until = clock::after(now, wait);
        (self.call, self.unanswered) = (None, None);
        self.gathering = Gathering::NotYet;
        self.paused_until = Some(until);
        self.asked.clear();
        let Queue { classes, settled, waiting, .. } = self;
        for class in classes.values_mut() {
            class.asked = 0;
            for waiting in class.waiting.values_mut() {
                waiting.entered = waiting.entered.max(until);
            }
            let without = class.waiting.len().saturating_sub(class.booked);
            let newcomers = class.waiting.iter().rev().take(without);
            let leaving: SmallVec<[Number; 4]> = newcomers
                .filter(|(_, waiting)| waiting.bound.latest < until)
                .map(|(&number, _)| number)
                .collect();
            for number in leaving {
                *waiting -= 1;
                settled.insert(number, Settled::Refused(Refusal { wait: Some(wait), limit: None }));
                wakers.add(class.waiting.remove(&number).and_then(|waiting| waiting.waker));
            }
        }
    }

    /// Registers the task of a waiter, which wakes at its slot, or when it can wait no longer.
    pub(super) fn poll(&mut self, number: Number, cost: u32, now: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let watched = self.watched_until().filter(|until| *until > now);
        let Some(class) = self.classes.get_mut(&cost) else { return Poll::Ready(()) };
        let first_slot = class.slots.front().map(|slot| slot.at);
        let Some(waiting) = class.waiting.get_mut(&number) else { return Poll::Ready(()) };
        if waiting.wake_at <= now {
            // A slot that is due and was not handed out waits for the store's answer, which wakes its waiter.
            let wake_at = match first_slot {
                Some(slot) if slot <= now => clock::after(now, ANSWER),
                Some(slot) => slot,
                None if waiting.heard => waiting.bound.latest,
                None => waiting.gives_up_at,
            };
            waiting.wake_at(watched.map_or(wake_at, |watched| wake_at.min(watched)));
        }
        match &mut waiting.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => waiting.waker = Some(cx.waker().clone()),
        }
        waiting.timer.get_or_insert_with(|| Timer::at(waiting.wake_at)).poll(cx)
    }

    /// Returns the last slot that is booked for a cost.
    pub(super) fn last_slot(&self, cost: u32) -> Option<Instant> {
        self.classes.get(&cost)?.slots.back().map(|slot| slot.at)
    }
}
