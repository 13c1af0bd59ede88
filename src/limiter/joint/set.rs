//! The requests of this process with equal keys, and their joint slots.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use smallvec::SmallVec;

use super::booking::{self, doubtful};
use super::give_back;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limiter::engine::CoreId;
use crate::limiter::lanes::{Booked, HandOut, Lanes, SlotWait};
use crate::limiter::part::{Costs, Part, PartRef, PerPart, Slots};
use crate::limiter::queue::Number;
use crate::limiter::reservation::{NoSlot, ProbeNumber, Stopped};
use crate::locks::lock;
use crate::store::{Refusal, unless_lost};
use crate::tuning::{ANSWER, LONGEST_LIFE};
use crate::wait_queue::{Left, WaitBound};
use crate::wakers::Wakers;

/// The most joint slots that are booked anew behind one that came back. Each takes a search.
const MOST_BOOKED_ANEW: usize = 8;

/// What identifies a set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SetId {
    /// Limiter, key and host of each part, and whether the requests cost something of it. A request that needs nothing of
    /// a scarce key does not wait behind others that do.
    parts: PerPart<(CoreId, Key, bool, Option<Key>)>,
    /// The kind of the requests, if a key is under suspicion: a hold of one kind does not stop the others.
    kind: Option<Key>,
}

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
    state: Mutex<SetState>,
}

#[derive(Debug, Default)]
struct SetState {
    /// The requests that wait, and the joint slots that are booked. There are never more slots than waiters.
    lanes: Lanes<Slots>,
    /// Joint slots of no use, whose requests wait for others. Each goes back while another one is
    /// booked. There are never more than waiters without a slot.
    given_up: Vec<Slots>,
    /// Whether a task books.
    is_booking: bool,
    /// Whether a task asks stores to confirm the first joint slot.
    is_confirming: bool,
    /// Until when a hold of a key lets no request leave, by what was known last.
    held_until: Option<Instant>,
    /// The part that allowed the last request last, or that refused it last, if one has. It is asked first.
    scarcest: Option<usize>,
    /// The last refusal of a slot that had to be near, and when it came.
    refused_near: Option<(Refusal, Instant)>,
    /// The task that books, while it rests.
    resting: Option<Waker>,
    /// Whether a request has left, or a hold has ended early, since it was known for whom to book, or since the last rest.
    ends_rest: bool,
}

impl Booked for Slots {
    type Costs = Costs;
    type Outcome = Result<Slots, Stopped>;

    fn costs(&self) -> &Costs {
        &self.costs
    }

    fn at(&self) -> Instant {
        self.at
    }

    fn until(&self) -> Option<Instant> {
        self.until
    }

    fn permits(&self) -> usize {
        1
    }

    fn split(&mut self, _permits: usize) -> Option<Self> {
        None
    }

    fn granted(self, is_in_line: bool, _probe: Option<ProbeNumber>) -> Self::Outcome {
        Ok(Slots {
            is_at_once: self.is_at_once && !is_in_line,
            ..self
        })
    }
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
pub(super) struct WantedSlot {
    pub(super) bound: WaitBound,
    /// The end of the hold from which on the last search asked for slots.
    pub(super) held_until: Option<Instant>,
    pub(super) scarcest: usize,
    /// The request to book for.
    pub(super) number: Number,
    pub(super) costs: Costs,
    /// A joint slot of no use, which goes back meanwhile.
    pub(super) given_up: Option<Slots>,
}

impl SetId {
    fn new(parts: &[PartRef<'_>], kind: Option<Key>) -> Self {
        let parts = parts
            .iter()
            .map(|PartRef { core, entry }| (core.id, entry.key, entry.cost > 0, entry.host));
        SetId {
            parts: parts.collect(),
            kind,
        }
    }
}

impl JointSets {
    /// Returns the set of the requests with these parts, of this kind if a key is under suspicion.
    pub(in crate::limiter) fn find(
        &self,
        parts: &[PartRef<'_>],
        kind: Option<Key>,
    ) -> Arc<JointSet> {
        let id = SetId::new(parts, kind);
        let mut sets = lock(&self.sets);
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

    /// Returns whether requests with these parts wait, of any kind. Then no other such request may overtake
    /// them.
    pub(in crate::limiter) fn is_any_waiting(&self, parts: &[PartRef<'_>]) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let first = SetId::new(parts, None);
        let sets = lock(&self.sets);
        let alike = sets.range(&first..);
        let alike = alike.take_while(|(id, _)| id.parts == first.parts);
        let alike: SmallVec<[_; 2]> = alike.filter_map(|(_, set)| set.upgrade()).collect();
        // A set of which this is the last use locks the map when it is dropped.
        drop(sets);
        alike.iter().any(|set| set.waiting() > 0)
    }

    /// Refuses the requests whose joint slot is later than `by`.
    pub(in crate::limiter) fn end_by(&self, by: Instant) {
        let sets = lock(&self.sets);
        let all: Vec<_> = sets.values().filter_map(Weak::upgrade).collect();
        // A set of which this is the last use locks the map when it is dropped.
        drop(sets);
        for set in all {
            set.end_by(by);
        }
    }

    /// Forgets a set that is dropped, unless there is a new one already.
    fn forget(&self, id: &SetId) {
        let mut sets = lock(&self.sets);
        if sets.get(id).is_some_and(|set| set.strong_count() == 0) {
            sets.remove(id);
            self.count.store(sets.len(), Ordering::Relaxed);
        }
    }
}

impl JointSet {
    fn with<R>(&self, act: impl FnOnce(&mut SetState, &mut Wakers) -> R) -> R {
        let mut wakers = Wakers::default();
        let done = act(&mut lock(&self.state), &mut wakers);
        wakers.wake();
        done
    }

    /// Enters a request. One that `is_back` returns to its old place.
    pub(in crate::limiter) fn enter(
        &self,
        number: Number,
        costs: &Costs,
        bound: WaitBound,
        is_back: bool,
        now: Instant,
    ) {
        let mut wait = SlotWait::new(bound, now);
        if is_back {
            // It has had an answer, so it may get a slot of one behind it at any time.
            wait.gives_up_at = bound.answered_by(now);
        }
        self.with(|state, _| {
            wait.is_in_line = state.refused_near.is_some() && state.lanes.waiting() > 0;
            let wakes_at = wait.gives_up_at;
            state
                .lanes
                .change(costs, |lane| lane.enter(number, wait, wakes_at));
        });
    }

    /// Returns the part for which a request that enters counts as waiting: the one that let the last one leave last. If
    /// no request of the set waits, the one for which the most wait; of equal ones, the first.
    pub(in crate::limiter) fn awaited(&self, costs: &Costs) -> usize {
        let scarcest = self.with(|state, _| state.scarcest.filter(|_| state.lanes.waiting() > 0));
        if let Some(scarcest) = scarcest {
            return scarcest;
        }
        let parts = self.parts.iter().zip(costs).enumerate();
        let needed = parts.filter(|(_, (_, cost))| **cost > 0);
        let queued = needed.map(|(index, (part, _))| (index, part.core.queued(part.key)));
        let longest = queued.max_by_key(|(index, queued)| (*queued, Reverse(*index)));
        longest.map_or(0, |(index, _)| index)
    }

    /// Returns how many of the requests stop others although no store knows of them. If units may come back, no slots are
    /// booked behind the first request.
    pub(in crate::limiter) fn unbooked(&self) -> usize {
        if !self.settles() {
            return 0;
        }
        self.with(|state, _| state.lanes.waiting_without_slot())
    }

    /// Polls the wait of a request. `held_until` is when the last hold of its keys ends.
    pub(in crate::limiter) fn poll(
        self: &Arc<Self>,
        number: Number,
        costs: &Costs,
        held_until: Option<Instant>,
        mut now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Slots, Stopped>> {
        // A store that replies at once may bring a joint slot that is due.
        loop {
            let mut unused = Vec::new();
            let (settled, tasks) = self.with(|state, wakers| {
                state.lanes.runs(number, costs);
                state.obey(held_until, now, wakers);
                // A permit that has come makes room for another one on its way.
                let has_come = state.lanes.collect(number, costs, now);
                let confirm = state.hand_out(&self.parts, now, Some(number), wakers);
                let mut settled = has_come.or_else(|| state.lanes.collect(number, costs, now));
                let tasks = state.begin_tasks(confirm);
                let has_begun = tasks != Tasks::default();
                // If units may come back, nothing is booked ahead for requests behind the first. A store in this process
                // always answers.
                let needs_answer = !self.settles() && self.parts.iter().any(Part::is_remote);
                if settled.is_none()
                    && let Some(stopped) = state.over(number, costs, has_begun, needs_answer, now)
                {
                    state.lanes.leave(number, costs);
                    settled = Some(Err(stopped));
                }
                state.trim(&self.parts, &mut unused);
                if !has_begun {
                    state.lanes.register(number, costs, None, now, cx);
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
    pub(in crate::limiter) fn leave(self: &Arc<Self>, number: Number, costs: &Costs) {
        let now = clock::now();
        self.change(|state, unused, wakers| {
            match state.lanes.leave(number, costs) {
                Some(Left::Settled(Ok(slot))) if slot.is_expired(now) => unused.push(slot),
                Some(Left::Settled(Ok(slot))) => state.lanes.add(slot),
                _ => {}
            }
            // One behind it may cost less.
            state.end_rest(wakers);
        });
    }

    /// Returns when the hold ends that lets no request leave.
    pub(super) fn held_until(&self) -> Option<Instant> {
        self.with(|state, _| state.held_until)
    }

    /// Rests until this moment, or until a request leaves or a hold ends early.
    pub(super) async fn rest(&self, until: Instant) {
        let mut timer = pin!(clock::sleep_until(until));
        poll_fn(|cx| {
            let ends_rest = self.with(|state, _| {
                state.resting = Some(cx.waker().clone());
                std::mem::take(&mut state.ends_rest)
            });
            match ends_rest {
                true => Poll::Ready(()),
                false => timer.as_mut().poll(cx),
            }
        })
        .await;
    }

    /// Refuses the requests whose joint slot is later than `by`.
    fn end_by(self: &Arc<Self>, by: Instant) {
        self.change(|state, _, wakers| {
            state.lanes.change_all(|lane| {
                lane.end_by(by, || Err(NoSlot::NEVER.for_part(0)), wakers);
            });
        });
    }

    /// Makes a change. Then gives back the joint slots that no request needs, hands out those that
    /// are due, and begins the tasks that are needed.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut SetState, &mut Vec<Slots>, &mut Wakers)) {
        let now = clock::now();
        let mut unused = Vec::new();
        let tasks = self.with(|state, wakers| {
            change(state, &mut unused, wakers);
            state.trim(&self.parts, &mut unused);
            let confirm = state.hand_out(&self.parts, now, None, wakers);
            state.begin_tasks(confirm)
        });
        self.give_back(unused);
        self.run(tasks);
    }

    fn run(self: &Arc<Self>, tasks: Tasks) {
        let Tasks { confirm, book } = tasks;
        if !confirm.is_empty() {
            let confirm = booking::confirm(self.clone(), confirm);
            self.start(confirm, |state| state.is_confirming = false);
        }
        if book {
            let book = booking::book(self.clone());
            self.start(book, |state| state.is_booking = false);
        }
    }

    /// Starts a task. If the stores of the parts reply at once, it is done when this returns. If it is dropped with its
    /// runtime, `lost` notes that it has ended, and another request begins it again.
    fn start(
        self: &Arc<Self>,
        task: impl Future<Output = ()> + Send + 'static,
        lost: fn(&mut SetState),
    ) {
        let of_lost = self.clone();
        let task = unless_lost(task, move || {
            of_lost.with(|state, wakers| {
                lost(state);
                state.lanes.wake_where(|_| true, wakers);
            });
        });
        if let Some(first) = self.parts.first() {
            first.core.start(task);
        }
    }

    /// Returns what to book next. `None` if each request has a joint slot: then the task that books
    /// ends.
    pub(super) fn next_wanted(&self) -> Option<WantedSlot> {
        self.with(|state, _| {
            let wanted = state.next_wanted();
            state.is_booking = wanted.is_some();
            wanted
        })
    }

    /// Takes in that a part has refused a slot that had to be near.
    pub(super) fn refused_near(&self, part: usize, refusal: Refusal, now: Instant) {
        self.with(|state, _| {
            state.scarcest = Some(part);
            state.refused_near = Some((refusal, now));
            let waits = state.lanes.waits_mut();
            waits.for_each(|wait| wait.is_in_line = true);
        });
    }

    /// Takes in what became of a booking.
    pub(super) fn booked(self: &Arc<Self>, wanted: &WantedSlot, outcome: Result<Slots, Stopped>) {
        let WantedSlot { number, costs, .. } = wanted;
        self.change(|state, _, wakers| match outcome {
            Ok(slot) if state.has_ended_early(wanted.held_until) => state.given_up.push(slot),
            Ok(slot) => {
                state.scarcest = Some(slot.last);
                state.refused_near = None;
                let is_ahead = !slot.is_at_once;
                state.lanes.add(slot);
                let now = clock::now();
                // It gives up its in-flight slots.
                let limits_calls = self.parts.iter().any(|part| part.core.in_flight.is_some());
                let gives_up = limits_calls && !state.is_near(*number, costs, now);
                state.lanes.change(costs, |lane| {
                    if let Some(wait) = lane.get_mut(*number) {
                        // It waits. It may still leave with the earlier slot that is booked for a request behind it.
                        wait.is_in_line |= is_ahead;
                    }
                    let last = lane.last_slot().filter(|_| !gives_up);
                    lane.wake(*number, last.unwrap_or(now));
                });
            }
            Err(
                stopped @ Stopped {
                    no_slot: NoSlot::Failed(_),
                    ..
                },
            ) => {
                // The store failed for all requests that have no joint slot.
                let without_slot = state.lanes.without_slot();
                let all: Vec<Costs> = without_slot.map(|(_, costs, _)| costs.clone()).collect();
                for costs in all {
                    state.lanes.change(&costs, |lane| {
                        let numbers: Vec<Number> = lane.numbers_without_slot().collect();
                        for number in numbers {
                            lane.settle(number, Err(stopped.clone()), wakers);
                        }
                    });
                }
            }
            Err(stopped) => {
                // If the request has left meanwhile, nothing was booked for the others.
                state
                    .lanes
                    .change(costs, |lane| lane.settle(*number, Err(stopped), wakers));
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
            while let Some(slot) = state.lanes.take_due_if(now, is_lost) {
                state.given_up.push(slot);
            }
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

    /// Returns whether a request waits.
    pub(super) fn is_waiting(&self, number: Number, costs: &Costs) -> bool {
        self.with(|state, _| state.lanes.wait_of(number, costs).is_some())
    }

    pub(in crate::limiter) fn waiting(&self) -> usize {
        self.with(|state, _| state.lanes.waiting())
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
        let mut slots = std::mem::take(&mut state.given_up);
        state
            .lanes
            .change_all(|lane| lane.take_all(|slot| slots.push(slot)));
        self.give_back(slots);
        if let Some(first) = self.parts.first() {
            first.core.joint.forget(&self.id);
        }
    }
}

impl SetState {
    /// See [`JointSet::is_near`].
    fn is_near(&self, number: Number, costs: &Costs, now: Instant) -> bool {
        let lane = self.lanes.get(costs);
        match lane.and_then(|lane| lane.slot_of(number)) {
            Some(slot) => slot <= clock::after(now, LONGEST_LIFE),
            None => self.is_booking && self.refused_near.is_none(),
        }
    }

    /// Moves the joint slots that no request needs to `unused`, the last ones first. After a
    /// request has left, the requests behind it have the slots before theirs.
    fn trim(&mut self, parts: &[Part], unused: &mut Vec<Slots>) {
        if let Some(freed) = self.lanes.trim(None, |slot| unused.push(slot)) {
            self.book_anew_behind(parts, freed);
        }
        while self.given_up.len() > self.lanes.waiting_without_slot() {
            unused.extend(self.given_up.pop());
        }
    }

    /// Gives the joint slots that are due to the first requests. Stops at a slot that stores have
    /// to confirm first, and returns the parts of these stores.
    fn hand_out(
        &mut self,
        parts: &[Part],
        now: Instant,
        running: Option<Number>,
        wakers: &mut Wakers,
    ) -> PerPart<usize> {
        let how = HandOut {
            most: usize::MAX,
            probe: None,
            running,
            now,
        };
        let mut confirm = PerPart::new();
        let handed_out = self.lanes.hand_out(
            how,
            |slot| {
                confirm = doubtful(parts, slot, now);
                confirm.is_empty()
            },
            |slot| self.given_up.push(slot),
            wakers,
        );
        if handed_out.died {
            self.book_anew_behind(parts, now);
        }
        confirm
    }

    /// Gives up joint slots after `moment`, because an earlier one came back: their requests may leave sooner. Not if a
    /// store answers later: it may fail, or answer when these slots would have been due.
    fn book_anew_behind(&mut self, parts: &[Part], moment: Instant) {
        if parts.iter().any(Part::is_remote) {
            return;
        }
        self.lanes
            .take_after(moment, MOST_BOOKED_ANEW, |slot| self.given_up.push(slot));
    }

    /// Returns whether the hold that was to end at `held_until` has ended, or ends before.
    fn has_ended_early(&self, held_until: Option<Instant>) -> bool {
        held_until > self.held_until && held_until > Some(clock::now())
    }

    /// Lets the task that books go on, because there may be a slot for another request, or an earlier one.
    fn end_rest(&mut self, wakers: &mut Wakers) {
        self.ends_rest = true;
        wakers.add(self.resting.take());
    }

    /// Takes in until when a hold lets no request leave. Joint slots before its end are useless. If
    /// the hold ends earlier than before, earlier slots may be free.
    fn obey(&mut self, held_until: Option<Instant>, now: Instant, wakers: &mut Wakers) {
        let before = self.held_until.filter(|until| *until > now);
        self.held_until = held_until;
        if held_until == before {
            return;
        }
        let later = held_until.filter(|until| before.is_none_or(|before| *until > before));
        if later.is_none() {
            self.end_rest(wakers);
        }
        self.lanes.change_all(|lane| match later {
            Some(until) => lane.take_before(until, |slot| self.given_up.push(slot)),
            None => lane.take_all(|slot| self.given_up.push(slot)),
        });
    }

    /// Returns why a request can wait no longer, if that is so. In the last moment of its wait, a
    /// task that `has_begun` may still bring its joint slot.
    fn over(
        &self,
        number: Number,
        costs: &Costs,
        has_begun: bool,
        needs_answer: bool,
        now: Instant,
    ) -> Option<Stopped> {
        let wait = self.lanes.wait_of(number, costs)?;
        if wait.gives_up_at > now || (has_begun && wait.gives_up_at == now) {
            return None;
        }
        let has_answer = !needs_answer || self.lanes.first_without_slot().is_none();
        let no_slot = if let Some((refusal, at)) = self.refused_near {
            let since = now.saturating_duration_since(at);
            let wait = refusal.wait.map(|wait| wait.saturating_sub(since));
            NoSlot::TooLate(Refusal { wait, ..refusal })
        } else if wait.bound.is_by_deadline()
            || has_answer
            || now < clock::after(wait.entered, ANSWER)
        {
            NoSlot::NEVER
        } else {
            NoSlot::Failed(StoreError::NoAnswer { waited: ANSWER })
        };
        Some(Stopped {
            part: self.scarcest.unwrap_or(0),
            no_slot,
        })
    }

    /// Notes which tasks begin. `confirm` are the parts whose stores have to confirm the first joint
    /// slot.
    fn begin_tasks(&mut self, confirm: PerPart<usize>) -> Tasks {
        let book = !self.is_booking && self.lanes.first_without_slot().is_some();
        self.is_booking |= book;
        let confirm = if self.is_confirming {
            PerPart::new()
        } else {
            confirm
        };
        self.is_confirming |= !confirm.is_empty();
        Tasks { confirm, book }
    }

    fn next_wanted(&mut self) -> Option<WantedSlot> {
        let (number, costs) = self.lanes.first_without_slot()?;
        let costs = costs.clone();
        self.ends_rest = false;
        let wait = self.lanes.wait_of(number, &costs)?;
        Some(WantedSlot {
            bound: wait.bound,
            held_until: None,
            scarcest: self.scarcest.unwrap_or(0),
            number,
            costs,
            given_up: self.given_up.pop(),
        })
    }
}
