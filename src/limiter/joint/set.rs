//! The requests of this process with equal keys, and their joint slots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use super::booking;
use super::confirmation::{self, doubtful};
use super::lanes::Lanes;
use super::{Cause, JointRefusal, give_back};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limiter::engine::CoreId;
use crate::limiter::entry::Entry;
use crate::limiter::part::{Costs, Part, PartRef, PerPart, max_queue};
use crate::limiter::queue::Number;
use crate::limiter::reservation::WaitBound;
use crate::limiter::slots::Slots;
use crate::quota::LONGEST_LIFE;
use crate::store::Refusal;
use crate::wait_queue::{ANSWER, Left, WaitQueue, answer_by, is_missed};
use crate::wakers::Wakers;

/// What identifies a set: limiter, key and host of each part, and whether the requests cost something
/// of it. A request that needs nothing of a scarce key does not wait behind others that do.
type SetId = PerPart<(CoreId, Key, bool, Option<Key>)>;

/// The sets whose first part is of one limiter.
#[derive(Debug, Default)]
pub(in crate::limiter) struct JointSets {
    sets: Mutex<BTreeMap<SetId, Weak<JointSet>>>,
    /// The number of sets. It is read without the lock.
    count: AtomicUsize,
}

/// The requests of this process with equal keys.
#[derive(Debug)]
pub(in crate::limiter) struct JointSet {
    pub(in crate::limiter) parts: PerPart<Part>,
    id: SetId,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiters: WaitQueue<JointWait, Result<Slots, JointRefusal>>,
    /// The same requests and slots, by their costs.
    lanes: Lanes,
    /// The joint slots that are booked, the first ones first. There are never more than waiters.
    slots: VecDeque<Slots>,
    /// Joint slots of no use, whose requests wait for others. Each goes back while another one is
    /// booked. Together with `slots`, there are never more than waiters.
    given_up: Vec<Slots>,
    /// Whether a task books.
    is_booking: bool,
    /// Whether a task asks stores to confirm the first joint slot.
    is_confirming: bool,
    /// Until when a hold of a key lets no request leave, by what was known last.
    held_until: Option<Instant>,
    /// The part that allowed the last request last, or that refused it last. It is asked first.
    scarcest: usize,
    /// The last refusal of a slot that had to be near, and when it came.
    refused_near: Option<(Refusal, Instant)>,
}

/// A request that waits.
#[derive(Clone, Debug)]
struct JointWait {
    costs: Costs,
    bound: WaitBound,
    /// When the request asked the stores, for the first time or after it had to come back.
    asked_at: Instant,
    /// When the wait ends, even if the store has not replied.
    gives_up_at: Instant,
    /// Whether the request has waited: a store has refused a slot to it, or to one before it, or its slot lay
    /// ahead.
    is_in_line: bool,
}

/// The tasks that have to begin.
#[derive(Debug, Default, PartialEq)]
struct Tasks {
    /// The parts whose stores have to confirm the first joint slot, which is due.
    confirm: PerPart<usize>,
    /// Whether a task has to book.
    book: bool,
}

/// What to book next.
pub(super) struct Wanted {
    pub(super) bound: WaitBound,
    pub(super) held_until: Option<Instant>,
    pub(super) scarcest: usize,
    /// The request to book for.
    pub(super) number: Number,
    pub(super) costs: Costs,
    /// A joint slot of no use, which goes back meanwhile.
    pub(super) given_up: Option<Slots>,
}

/// Returns what identifies the set of `parts`.
fn id_of(parts: &[PartRef<'_>]) -> SetId {
    let id = |part: &PartRef<'_>| {
        let Entry {
            key, cost, host, ..
        } = part.entry;
        (part.core.id, key, cost > 0, host)
    };
    parts.iter().map(id).collect()
}

impl JointSets {
    /// Returns the set of the requests with these parts.
    pub(in crate::limiter) fn find(&self, parts: &[PartRef<'_>]) -> Arc<JointSet> {
        let id = id_of(parts);
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(set) = sets.get(&id).and_then(Weak::upgrade) {
            return set;
        }
        let set = Arc::new(JointSet {
            parts: parts.iter().copied().map(PartRef::to_part).collect(),
            id: id.clone(),
            state: Mutex::default(),
        });
        sets.insert(id, Arc::downgrade(&set));
        self.count.store(sets.len(), Ordering::Relaxed);
        set
    }

    /// Returns whether requests with these parts wait. Then no other such request may overtake
    /// them.
    pub(in crate::limiter) fn is_any_waiting(&self, parts: &[PartRef<'_>]) -> bool {
        let set = self.set_of(parts);
        set.is_some_and(|set| set.waiting() > 0)
    }

    /// Returns how many requests with these parts stop others although no store knows of them. If units
    /// may come back, no slots are booked behind the first request.
    pub(in crate::limiter) fn waiting_unbooked(&self, parts: &[PartRef<'_>]) -> usize {
        let set = self.set_of(parts).filter(|set| set.settles());
        set.map_or(0, |set| {
            set.with(|state, _| state.waiters.waiting() - state.slots.len())
        })
    }

    /// Returns how many requests with these parts may wait, if as many wait.
    pub(in crate::limiter) fn full(&self, parts: &[PartRef<'_>]) -> Option<usize> {
        let (_, max_queue) = max_queue(parts.iter().map(|part| part.core));
        let waiting = self.set_of(parts).map_or(0, |set| set.waiting());
        (waiting >= max_queue).then_some(max_queue)
    }

    /// Returns the set of requests with these parts, if there is one.
    fn set_of(&self, parts: &[PartRef<'_>]) -> Option<Arc<JointSet>> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        // The map is unlocked before a set of which this is the last use is dropped.
        let set = sets.get(&id_of(parts));
        set.and_then(Weak::upgrade)
    }

    /// Refuses the requests whose joint slot is later than `by`.
    pub(in crate::limiter) fn end_by(&self, by: Instant) {
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        let all: Vec<_> = sets.values().filter_map(Weak::upgrade).collect();
        // A set of which this is the last use locks the map when it is dropped.
        drop(sets);
        for set in all {
            set.end_by(by);
        }
    }

    /// Forgets a set that is dropped, unless there is a new one already.
    fn forget(&self, id: &SetId) {
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        if sets.get(id).is_some_and(|set| set.strong_count() == 0) {
            sets.remove(id);
            self.count.store(sets.len(), Ordering::Relaxed);
        }
    }
}

impl JointSet {
    fn with<R>(&self, act: impl FnOnce(&mut State, &mut Wakers) -> R) -> R {
        let mut wakers = Wakers::default();
        let done = act(
            &mut self.state.lock().unwrap_or_else(PoisonError::into_inner),
            &mut wakers,
        );
        wakers.wake();
        done
    }

    /// Enters a request, as one of at most `max_queue`. A request that `is_back` returns to its old place. Returns
    /// whether there was room.
    pub(in crate::limiter) fn enter(
        &self,
        number: Number,
        costs: &Costs,
        bound: WaitBound,
        max_queue: usize,
        is_back: bool,
        now: Instant,
    ) -> bool {
        // A request that comes back has had an answer, so it may get a slot of one behind it at any time.
        let gives_up_at = if bound.by_deadline {
            bound.latest
        } else if is_back {
            answer_by(bound.latest, now)
        } else {
            bound.latest.max(clock::after(now, ANSWER))
        };
        self.with(|state, _| {
            let has_room = is_back || state.waiters.waiting() < max_queue;
            if has_room {
                let wait = JointWait {
                    costs: costs.clone(),
                    bound,
                    asked_at: now,
                    gives_up_at,
                    is_in_line: state.refused_near.is_some() && state.waiters.waiting() > 0,
                };
                state.lanes.enter(costs, number);
                state.waiters.enter(number, wait, gives_up_at);
            }
            has_room
        })
    }

    /// Polls the wait of a request. `held_until` is when the last hold of its keys ends.
    pub(in crate::limiter) fn poll(
        self: &Arc<Self>,
        number: Number,
        held_until: Option<Instant>,
        mut now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Slots, JointRefusal>> {
        // A store that replies at once may bring a joint slot that is due.
        loop {
            let mut unused = Vec::new();
            let (settled, tasks) = self.with(|state, wakers| {
                state.waiters.runs(number);
                state.obey(held_until, now);
                let confirm = state.hand_out(&self.parts, now, Some(number), &mut unused, wakers);
                let mut settled = state.waiters.collect(number);
                let tasks = state.begin_tasks(confirm);
                let has_begun = tasks != Tasks::default();
                if settled.is_none()
                    && let Some(refusal) = state.over(number, has_begun, self.settles(), now)
                {
                    state.leave(number);
                    state.trim(&mut unused);
                    settled = Some(Err(refusal));
                }
                if !has_begun {
                    state.register(number, now, cx);
                }
                (settled, tasks)
            });
            let has_begun = tasks != Tasks::default();
            self.give_back(unused);
            self.run(tasks);
            match settled {
                Some(settled) => return Poll::Ready(settled),
                None if has_begun => now = clock::now(),
                None => return Poll::Pending,
            }
        }
    }

    /// Removes a request. A joint slot that it had goes to the next request.
    pub(in crate::limiter) fn leave(self: &Arc<Self>, number: Number) {
        let now = clock::now();
        self.change(|state, unused, _| match state.leave(number) {
            Some(Left::Settled(Ok(slot))) if slot.is_expired(now) => unused.push(slot),
            Some(Left::Settled(Ok(slot))) => state.insert(slot),
            _ => {}
        });
    }

    /// Refuses the requests whose joint slot is later than `by`.
    fn end_by(self: &Arc<Self>, by: Instant) {
        self.change(|state, _, wakers| {
            let in_time = |costs: &Costs| {
                let slots = state.slots.iter();
                let in_time = slots.filter(|slot| slot.costs == *costs && slot.at <= by);
                in_time.count()
            };
            for number in state.lanes.with_slot_beyond(in_time) {
                let cause = Cause::Refused(Refusal::NEVER);
                state.settle(number, Err(JointRefusal { part: 0, cause }), wakers);
            }
        });
    }

    /// Makes a change. Then gives back the joint slots that no request needs, hands out those that
    /// are due, and begins the tasks that are needed.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut State, &mut Vec<Slots>, &mut Wakers)) {
        let now = clock::now();
        let mut unused = Vec::new();
        let tasks = self.with(|state, wakers| {
            change(state, &mut unused, wakers);
            state.trim(&mut unused);
            let confirm = state.hand_out(&self.parts, now, None, &mut unused, wakers);
            state.begin_tasks(confirm)
        });
        self.give_back(unused);
        self.run(tasks);
    }

    fn run(self: &Arc<Self>, tasks: Tasks) {
        let Tasks { confirm, book } = tasks;
        if !confirm.is_empty() {
            confirmation::begin(self, &confirm);
        }
        if book {
            booking::begin(self);
        }
    }

    /// Returns what to book next. `None` if each request has a joint slot: then the task that books
    /// ends.
    pub(super) fn next_wanted(&self) -> Option<Wanted> {
        self.with(|state, _| {
            let wanted = state.next_wanted();
            state.is_booking = wanted.is_some();
            wanted
        })
    }

    /// Takes in that a part has refused a slot that had to be near.
    pub(super) fn refused_near(&self, part: usize, refusal: Refusal, now: Instant) {
        self.with(|state, _| {
            state.scarcest = part;
            state.refused_near = Some((refusal, now));
            for waiter in state.waiters.iter_mut() {
                waiter.request.is_in_line = true;
            }
        });
    }

    /// Takes in what became of a booking.
    pub(super) fn booked(self: &Arc<Self>, wanted: &Wanted, outcome: Result<Slots, JointRefusal>) {
        self.change(|state, _, wakers| match outcome {
            Ok(slot) => {
                state.scarcest = slot.last;
                state.refused_near = None;
                if !slot.is_at_once {
                    state.note_wait(wanted.number);
                }
                state.insert(slot);
                state.wake_for_last_slot(wanted);
                let now = clock::now();
                if self.limits_calls() && !state.is_near(wanted.number, &wanted.costs, now) {
                    // It gives up its in-flight slots.
                    if let Some(waiter) = state.waiters.get_mut(wanted.number) {
                        waiter.wake_at(now);
                    }
                }
            }
            Err(
                refusal @ JointRefusal {
                    cause: Cause::Failed(_),
                    ..
                },
            ) => {
                // The store failed for all requests that have no joint slot.
                let without_slot: Vec<Number> = state.lanes.all_without_slot().collect();
                for number in without_slot {
                    state.settle(number, Err(refusal.clone()), wakers);
                }
            }
            Err(refusal) => {
                // If the request has left meanwhile, nothing was booked for the others.
                state.settle(wanted.number, Err(refusal), wakers);
            }
        });
    }

    /// Takes in that the stores of the first joint slot were asked to confirm it. If they have not,
    /// it is given back, and its request books anew.
    pub(super) fn confirmed(self: &Arc<Self>) {
        let now = clock::now();
        self.change(|state, _, _| {
            state.is_confirming = false;
            let is_lost = |slot: &Slots| !doubtful(&self.parts, slot, now).is_empty();
            while let Some(slot) = state.take_due(now, is_lost) {
                state.given_up.push(slot);
            }
        });
    }

    /// Ends a booking whose task was dropped with its runtime. Another request begins it again.
    pub(super) fn booking_lost(&self) {
        self.task_lost(|state| state.is_booking = false);
    }

    /// Ends a confirmation whose task was dropped with its runtime. Another request begins it again.
    pub(super) fn confirmation_lost(&self) {
        self.task_lost(|state| state.is_confirming = false);
    }

    fn task_lost(&self, note: impl FnOnce(&mut State)) {
        self.with(|state, wakers| {
            note(state);
            state.waiters.wake_where(|_| true, wakers);
        });
    }

    /// Returns whether a request may give units back after it was sent.
    pub(super) fn settles(&self) -> bool {
        self.parts.iter().any(|part| part.core.settings.settles)
    }

    /// Returns whether the joint slot of a request is due within the life of a permit, or may be: it is being booked.
    pub(in crate::limiter) fn is_near(&self, number: Number, costs: &Costs, now: Instant) -> bool {
        self.with(|state, _| state.is_near(number, costs, now))
    }

    /// Returns whether calls in flight are limited.
    fn limits_calls(&self) -> bool {
        self.parts.iter().any(|part| part.core.in_flight.is_some())
    }

    /// Returns whether a request waits.
    pub(super) fn is_waiting(&self, number: Number) -> bool {
        self.with(|state, _| state.waiters.get(number).is_some())
    }

    /// Returns how many requests wait.
    pub(in crate::limiter) fn waiting(&self) -> usize {
        self.with(|state, _| state.waiters.waiting())
    }

    /// Takes back the joint slot of a request that has entered again, because the slot is of no use.
    pub(in crate::limiter) fn give_up(&self, slot: Slots) {
        self.with(|state, _| state.given_up.push(slot));
    }

    /// Gives all slots of `unused` back.
    fn give_back(&self, unused: impl IntoIterator<Item = Slots>) {
        for Slots { slots, .. } in unused {
            give_back(&self.parts, slots);
        }
    }
}

impl Drop for JointSet {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let slots = std::mem::take(&mut state.slots);
        let given_up = std::mem::take(&mut state.given_up);
        self.give_back(slots.into_iter().chain(given_up));
        if let Some(first) = self.parts.first() {
            first.core.joint.forget(&self.id);
        }
    }
}

impl State {
    /// Removes a request, whether its wait has ended or not.
    fn leave(&mut self, number: Number) -> Option<Left<JointWait, Result<Slots, JointRefusal>>> {
        let left = self.waiters.leave(number);
        if let Some(Left::Waiting(wait)) = &left {
            self.lanes.leave(&wait.costs, number);
        }
        left
    }

    /// Ends the wait of a request. Does nothing if it has left.
    fn settle(
        &mut self,
        number: Number,
        outcome: Result<Slots, JointRefusal>,
        wakers: &mut Wakers,
    ) {
        if let Some(waiter) = self.waiters.get(number) {
            self.lanes.leave(&waiter.request.costs, number);
            // It waits, so its wait ends.
            let _ = self.waiters.settle(number, outcome, wakers);
        }
    }

    /// Adds a joint slot at its place.
    fn insert(&mut self, slot: Slots) {
        self.lanes.add_slot(&slot.costs);
        let place = self.slots.partition_point(|other| other.at <= slot.at);
        self.slots.insert(place, slot);
    }

    /// See [`JointSet::is_near`].
    fn is_near(&self, number: Number, costs: &Costs, now: Instant) -> bool {
        let mut slots = self.slots.iter().filter(|slot| slot.costs == *costs);
        match slots.nth(self.lanes.before(costs, number)) {
            Some(slot) => slot.at <= clock::after(now, LONGEST_LIFE),
            None => self.is_booking && self.refused_near.is_none(),
        }
    }

    /// Notes that a request waits: its joint slot lies ahead. It may still leave with the earlier slot that
    /// is booked for a request behind it.
    fn note_wait(&mut self, number: Number) {
        if let Some(waiter) = self.waiters.get_mut(number) {
            waiter.request.is_in_line = true;
        }
    }

    /// Wakes the request that a joint slot was booked for when the last slot of its lane is due.
    fn wake_for_last_slot(&mut self, wanted: &Wanted) {
        let mut slots = self.slots.iter().rev();
        let Some(slot) = slots.find(|slot| slot.costs == wanted.costs) else {
            return;
        };
        if let Some(waiter) = self.waiters.get_mut(wanted.number) {
            waiter.wake_at(slot.at.min(waiter.request.gives_up_at));
        }
    }

    /// Moves the joint slots that no request needs to `unused`, the last ones first. After a
    /// request has left, the requests behind it have the slots before theirs.
    fn trim(&mut self, unused: &mut Vec<Slots>) {
        while let Some(costs) = self.lanes.unneeded() {
            self.lanes.remove_slot(&costs);
            let place = self.slots.iter().rposition(|slot| slot.costs == costs);
            unused.extend(place.and_then(|place| self.slots.remove(place)));
        }
        let without_slot = self.waiters.waiting() - self.slots.len();
        while self.given_up.len() > without_slot {
            unused.extend(self.given_up.pop());
        }
    }

    /// Gives the joint slots that are due to the first requests. Stops at a slot that stores have
    /// to confirm first, and returns the parts of these stores.
    ///
    /// A slot that has expired for some time goes to its request, too, unless that is the `running` one: so requests
    /// that are not polled get no more.
    ///
    /// The first request then wakes for the first slot. The others wake for the slots that they had
    /// when they were booked. If requests before them have left since, that is too late. It matters
    /// only if the task of the first request does not poll its wait.
    fn hand_out(
        &mut self,
        parts: &[Part],
        now: Instant,
        running: Option<Number>,
        unused: &mut Vec<Slots>,
        wakers: &mut Wakers,
    ) -> PerPart<usize> {
        while let Some(mut slot) = self.take_due(now, |_| true) {
            let Some(first) = self.lanes.first(&slot.costs) else {
                unused.push(slot);
                continue;
            };
            if slot.is_expired(now) {
                let is_missed = slot.until.is_some_and(|until| is_missed(until, now));
                if is_missed && running != Some(first) {
                    self.settle(first, Ok(slot), wakers);
                } else {
                    self.given_up.push(slot);
                }
                continue;
            }
            let confirm = doubtful(parts, &slot, now);
            if !confirm.is_empty() {
                self.lanes.add_slot(&slot.costs);
                self.slots.push_front(slot);
                return confirm;
            }
            let waiter = self.waiters.get(first);
            slot.is_at_once &= waiter.is_some_and(|waiter| !waiter.request.is_in_line);
            self.settle(first, Ok(slot), wakers);
        }
        if let Some(slot) = self.slots.front()
            && let Some(first) = self.lanes.first(&slot.costs)
            && let Some(first) = self.waiters.get_mut(first)
            && first.wakes_at() > slot.at
        {
            first.wake_at(slot.at);
        }
        PerPart::new()
    }

    /// Takes the first joint slot, if it is due and `is_taken`.
    fn take_due(&mut self, now: Instant, is_taken: impl Fn(&Slots) -> bool) -> Option<Slots> {
        let first = self.slots.front()?;
        let is_taken = first.at <= now && is_taken(first);
        let slot = is_taken.then(|| self.slots.pop_front())??;
        self.lanes.remove_slot(&slot.costs);
        Some(slot)
    }

    /// Registers the task of a request that waits. If it woke too early, it wakes for the next slot.
    fn register(&mut self, number: Number, now: Instant, cx: &mut Context<'_>) {
        let next = self.slots.front().map(|slot| slot.at);
        let Some(waiter) = self.waiters.get_mut(number) else {
            return;
        };
        if waiter.wakes_at() <= now {
            let gives_up_at = waiter.request.gives_up_at;
            // A slot that is due waits for its confirmation, which wakes its request.
            let next = next.filter(|at| *at > now).unwrap_or(gives_up_at);
            waiter.wake_at(next.min(gives_up_at));
        }
        waiter.register(cx);
    }

    /// Takes in until when a hold lets no request leave. Joint slots before its end are useless. If
    /// the hold ends earlier than before, earlier slots may be free.
    fn obey(&mut self, held_until: Option<Instant>, now: Instant) {
        let before = self.held_until.filter(|until| *until > now);
        self.held_until = held_until;
        if held_until == before {
            return;
        }
        let is_later = held_until > before;
        let is_kept = |slot: &Slots| is_later && Some(slot.at) >= held_until;
        let slots = std::mem::take(&mut self.slots).into_iter();
        let (kept, given_up): (VecDeque<_>, VecDeque<_>) = slots.partition(is_kept);
        for slot in &given_up {
            self.lanes.remove_slot(&slot.costs);
        }
        self.slots = kept;
        self.given_up.extend(given_up);
    }

    /// Returns why a request can wait no longer, if that is so. In the last moment of its wait, a
    /// task that `has_begun` may still bring its joint slot.
    fn over(
        &self,
        number: Number,
        has_begun: bool,
        settles: bool,
        now: Instant,
    ) -> Option<JointRefusal> {
        let wait = &self.waiters.get(number)?.request;
        if wait.gives_up_at > now || (has_begun && wait.gives_up_at == now) {
            return None;
        }
        // If units may come back, nothing is booked ahead for requests behind the first.
        let has_answer = settles || self.slots.len() >= self.waiters.waiting();
        let cause = if let Some((refusal, at)) = self.refused_near {
            let since = now.saturating_duration_since(at);
            let wait = refusal.wait.map(|wait| wait.saturating_sub(since));
            Cause::Refused(Refusal { wait, ..refusal })
        } else if wait.bound.by_deadline || has_answer || now < clock::after(wait.asked_at, ANSWER)
        {
            Cause::Refused(Refusal::NEVER)
        } else {
            Cause::Failed(StoreError::NoAnswer { waited: ANSWER })
        };
        Some(JointRefusal {
            part: self.scarcest,
            cause,
        })
    }

    /// Notes which tasks begin. `confirm` are the parts whose stores have to confirm the first joint
    /// slot.
    fn begin_tasks(&mut self, confirm: PerPart<usize>) -> Tasks {
        let book = !self.is_booking && self.waiters.waiting() > self.slots.len();
        self.is_booking |= book;
        let confirm = if self.is_confirming {
            PerPart::new()
        } else {
            confirm
        };
        self.is_confirming |= !confirm.is_empty();
        Tasks { confirm, book }
    }

    fn next_wanted(&mut self) -> Option<Wanted> {
        let number = self.lanes.first_without_slot()?;
        let waiter = self.waiters.get(number)?;
        Some(Wanted {
            costs: waiter.request.costs.clone(),
            bound: waiter.request.bound,
            held_until: self.held_until,
            scarcest: self.scarcest,
            number,
            given_up: self.given_up.pop(),
        })
    }
}
