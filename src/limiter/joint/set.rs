//! The requests of this process with equal keys and costs, and their joint slots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use super::booking;
use super::{Cause, JointRefusal, JointSlot, Part, PerPart, give_back};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limiter::admission::Entry;
use crate::limiter::engine::CoreId;
use crate::limiter::queue::Number;
use crate::limiter::reservation::WaitBound;
use crate::store::Refusal;
use crate::wait_queue::{ANSWER, Left, WaitQueue};
use crate::wakers::Wakers;

/// What identifies a set: limiter, key, cost and host of each part.
type SetId = PerPart<(CoreId, Key, u32, Option<Key>)>;

/// The sets whose first part is of one limiter.
#[derive(Debug, Default)]
pub(in crate::limiter) struct JointSets {
    sets: Mutex<BTreeMap<SetId, Weak<JointSet>>>,
    /// The number of sets. It is read without the lock.
    count: AtomicUsize,
}

/// The requests of this process with equal keys and costs.
#[derive(Debug)]
pub(super) struct JointSet {
    pub(super) parts: PerPart<Part>,
    id: SetId,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiters: WaitQueue<JointWait, Result<JointSlot, JointRefusal>>,
    /// The joint slots that are booked, the first ones first. There are never more than waiters.
    slots: VecDeque<JointSlot>,
    /// Whether a task books.
    is_booking: bool,
    /// Until when a hold of a key lets no request leave, by what was known last.
    held_until: Option<Instant>,
    /// The part that allowed the last request last. It is asked first.
    scarcest: usize,
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
struct JointWait {
    bound: WaitBound,
    /// When the wait ends, even if the store has not replied.
    gives_up_at: Instant,
}

/// What to book next.
pub(super) struct Wanted {
    pub(super) bound: WaitBound,
    pub(super) held_until: Option<Instant>,
    pub(super) scarcest: usize,
    /// The request to book for.
    pub(super) number: Number,
}

/// Returns what identifies the set of `parts`.
fn id_of(parts: &[Part]) -> SetId {
    let id = |part: &Part| {
        let Entry {
            key, cost, host, ..
        } = part.entry;
        (part.core.id, key, cost, host)
    };
    parts.iter().map(id).collect()
}

impl JointSets {
    /// Returns the set of `parts`.
    pub(super) fn find(&self, parts: &[Part]) -> Arc<JointSet> {
        let id = id_of(parts);
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(set) = sets.get(&id).and_then(Weak::upgrade) {
            return set;
        }
        let set = Arc::new(JointSet {
            parts: parts.iter().cloned().collect(),
            id: id.clone(),
            state: Mutex::default(),
        });
        sets.insert(id, Arc::downgrade(&set));
        self.count.store(sets.len(), Ordering::Relaxed);
        set
    }

    /// Returns whether requests with these parts wait. Then no other such request may overtake
    /// them.
    pub(super) fn is_any_waiting(&self, parts: &[Part]) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        let set = sets.get(&id_of(parts)).and_then(Weak::upgrade);
        drop(sets);
        set.is_some_and(|set| set.waiting() > 0)
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

    /// Enters a request. A request that comes back returns to its old place. Returns whether there
    /// was room.
    pub(super) fn enter(&self, number: Number, bound: WaitBound, max_queue: usize) -> bool {
        let now = clock::now();
        let gives_up_at = if bound.by_deadline {
            bound.latest
        } else {
            bound.latest.max(clock::after(now, ANSWER))
        };
        self.with(|state, _| {
            let has_room = state.waiters.waiting() < max_queue;
            if has_room {
                let wait = JointWait { bound, gives_up_at };
                state.waiters.enter(number, wait, gives_up_at);
                state.set_timers();
            }
            has_room
        })
    }

    /// Polls the wait of a request. `held_until` is when the last hold of its keys ends.
    pub(super) fn poll(
        self: &Arc<Self>,
        number: Number,
        held_until: Option<Instant>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<JointSlot, JointRefusal>> {
        // A store that replies at once may bring a joint slot that is due.
        loop {
            let now = clock::now();
            let mut unused = Vec::new();
            let (settled, must_book) = self.with(|state, wakers| {
                state.waiters.runs(number);
                state.obey(held_until, now, &mut unused);
                state.hand_out(now, &mut unused, wakers);
                if let Some(settled) = state.waiters.collect(number) {
                    return (Some(settled), false);
                }
                if let Some(refusal) = state.over(number, now) {
                    state.waiters.leave(number);
                    state.trim(&mut unused);
                    return (Some(Err(refusal)), false);
                }
                let must_book = state.begin_booking();
                if !must_book && let Some(waiter) = state.waiters.get_mut(number) {
                    waiter.register(cx);
                }
                (None, must_book)
            });
            self.give_back(unused);
            match settled {
                Some(settled) => return Poll::Ready(settled),
                None if must_book => booking::begin(self),
                None => return Poll::Pending,
            }
        }
    }

    /// Removes a request. A joint slot that it had goes to the next request.
    pub(super) fn leave(self: &Arc<Self>, number: Number) {
        let now = clock::now();
        let mut unused = Vec::new();
        let must_book = self.with(|state, wakers| {
            if let Some(Left::Settled(Ok(slot))) = state.waiters.leave(number) {
                state.insert(slot);
            }
            state.trim(&mut unused);
            state.hand_out(now, &mut unused, wakers);
            state.begin_booking()
        });
        self.give_back(unused);
        if must_book {
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

    /// Takes in what became of a booking.
    pub(super) fn booked(&self, wanted: &Wanted, outcome: Result<JointSlot, JointRefusal>) {
        let now = clock::now();
        let mut unused = Vec::new();
        self.with(|state, wakers| {
            match outcome {
                Ok(slot) => {
                    state.scarcest = slot.last;
                    state.insert(slot);
                    state.trim(&mut unused);
                }
                Err(
                    refusal @ JointRefusal {
                        cause: Cause::Failed(_),
                        ..
                    },
                ) => {
                    // The store failed for all requests that have no joint slot.
                    let mut served = state.slots.len();
                    state.waiters.settle_where(
                        |_, _| {
                            let has_slot = served > 0;
                            served = served.saturating_sub(1);
                            (!has_slot).then(|| Err(refusal.clone()))
                        },
                        wakers,
                    );
                }
                Err(refusal) => {
                    // If the request has left meanwhile, nothing was booked for the others.
                    let _ = state.waiters.settle(wanted.number, Err(refusal), wakers);
                }
            }
            state.hand_out(now, &mut unused, wakers);
        });
        self.give_back(unused);
    }

    /// Ends a booking whose task was dropped with its runtime. Another request begins it again.
    pub(super) fn booking_lost(&self) {
        self.with(|state, wakers| {
            state.is_booking = false;
            state.waiters.wake_where(|_| true, wakers);
        });
    }

    /// Returns whether a request waits.
    pub(super) fn is_waiting(&self, number: Number) -> bool {
        self.with(|state, _| state.waiters.get(number).is_some())
    }

    /// Returns how many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.with(|state, _| state.waiters.waiting())
    }

    /// Gives all slots of `unused` back.
    pub(super) fn give_back(&self, unused: impl IntoIterator<Item = JointSlot>) {
        for JointSlot { slots, .. } in unused {
            give_back(&self.parts, slots);
        }
    }
}

impl Drop for JointSet {
    fn drop(&mut self) {
        let slots = std::mem::take(
            &mut self
                .state
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .slots,
        );
        self.give_back(slots);
        if let Some(first) = self.parts.first() {
            first.core.joint.forget(&self.id);
        }
    }
}

impl State {
    /// Adds a joint slot at its place.
    fn insert(&mut self, slot: JointSlot) {
        let place = self.slots.partition_point(|other| other.at <= slot.at);
        self.slots.insert(place, slot);
        self.set_timers();
    }

    /// Sets the timers of the requests to their joint slots. A request without one wakes when it
    /// gives up.
    fn set_timers(&mut self) {
        let mut slots = self.slots.iter();
        for waiter in self.waiters.iter_mut() {
            let gives_up_at = waiter.request.gives_up_at;
            let slot = slots.next().map(|slot| slot.at);
            waiter.wake_at(slot.map_or(gives_up_at, |slot| slot.min(gives_up_at)));
        }
    }

    /// Moves the joint slots that no request needs to `unused`, the last ones first. After a
    /// request has left, the requests behind it have the slots before theirs.
    fn trim(&mut self, unused: &mut Vec<JointSlot>) {
        while self.slots.len() > self.waiters.waiting() {
            unused.extend(self.slots.pop_back());
        }
        self.set_timers();
    }

    /// Gives the joint slots that are due to the first requests.
    fn hand_out(&mut self, now: Instant, unused: &mut Vec<JointSlot>, wakers: &mut Wakers) {
        let mut has_changed = false;
        while self.slots.front().is_some_and(|slot| slot.at <= now)
            && let Some(slot) = self.slots.pop_front()
        {
            has_changed = true;
            if slot.until.is_some_and(|until| until <= now) || self.waiters.waiting() == 0 {
                unused.push(slot);
            } else {
                self.waiters.settle_first(Ok(slot), wakers);
            }
        }
        if has_changed {
            self.set_timers();
            // Requests whose slots had expired have to be polled, so that they book anew.
            if self.slots.len() < self.waiters.waiting() && !self.is_booking {
                self.waiters.wake_where(|_| true, wakers);
            }
        }
    }

    /// Takes in until when a hold lets no request leave. Joint slots before its end are useless. If
    /// the hold ends earlier than before, earlier slots may be free.
    fn obey(&mut self, held_until: Option<Instant>, now: Instant, unused: &mut Vec<JointSlot>) {
        let before = self.held_until.filter(|until| *until > now);
        self.held_until = held_until;
        if held_until == before {
            return;
        }
        let is_later = held_until > before;
        let is_kept = |slot: &JointSlot| is_later && Some(slot.at) >= held_until;
        let slots = std::mem::take(&mut self.slots).into_iter();
        let (kept, given_up): (VecDeque<_>, VecDeque<_>) = slots.partition(is_kept);
        self.slots = kept;
        unused.extend(given_up);
        self.set_timers();
    }

    /// Returns why a request can wait no longer, if that is so.
    fn over(&self, number: Number, now: Instant) -> Option<JointRefusal> {
        let wait = self.waiters.get(number)?.request;
        if wait.gives_up_at > now {
            return None;
        }
        let cause = if wait.bound.by_deadline || self.slots.len() >= self.waiters.waiting() {
            Cause::Wait(Refusal::NEVER)
        } else {
            Cause::Failed(StoreError::NoAnswer { waited: ANSWER })
        };
        Some(JointRefusal {
            part: self.scarcest,
            cause,
        })
    }

    /// Notes that a task begins to book, if one has to.
    fn begin_booking(&mut self) -> bool {
        let must_book = !self.is_booking && self.waiters.waiting() > self.slots.len();
        self.is_booking |= must_book;
        must_book
    }

    fn next_wanted(&self) -> Option<Wanted> {
        let (number, waiter) = self.waiters.iter().nth(self.slots.len())?;
        Some(Wanted {
            bound: waiter.request.bound,
            held_until: self.held_until,
            scarcest: self.scarcest,
            number,
        })
    }
}
