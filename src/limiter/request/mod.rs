//! The way of a request to its permit, whether it has one key or several.
//!
//! 1. **Holds.** While a key or its host is on hold, the request keeps nothing but its place in the line. Once a request
//!    of one key is in the queue of that key, the queue obeys the hold of the key.
//! 2. **Slots**, in the [`RequestLine`] of its keys.
//! 3. **In-flight slots**, if calls in flight are limited. A request of one key has asked for its own before it entered
//!    the line, and keeps it there: nearly all requests that could use it wait behind it. A request of several keys asks for its own
//!    when its slots are due, and keeps the slots until the store has answered once. If none is free, the slots go back
//!    unused, and the request waits for the in-flight slot. Then it returns to its old place in the line, and keeps the
//!    in-flight slots if its next slots are due within the life of a permit.
//! 4. **It leaves**, if the slots are still valid and no key is on hold. Otherwise it goes back to 1, in its old place.
//!
//! So a request keeps nothing of one limit for as long as another one lets it wait, if requests with other keys could use
//! it. Tried before: in-flight slots first, for several keys, too. Then 20 requests that waited for the rate of one
//! channel kept the 20 in-flight slots of all channels. And slots that go back before the store has answered: the next slots
//! of a bucket are behind all that others have booked. Over Redis, twelve requests of 4/s took turns to give them back, and
//! one left in 15 s.
//!
//! | file | what it has |
//! |---|---|
//! | `mod` | [`Request`]: the order |
//! | `holds` | [`Request`]: the holds of its keys and hosts; [`Suspect`]: those of its kind |
//! | `in_flight` | [`Request`]: its in-flight slots |
//! | `stopped` | [`Request`]: what its caller reads if it gets no permit |

mod holds;
mod in_flight;
mod stopped;

use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::around;
use super::explanation::Because;
use super::holds::Probe;
use super::in_flight_slot;
use super::line::{LinePlace, RequestLine};
use super::part::{self, Part, PartRef, Slots};
use super::queue::next_number;
use super::reservation::{NoSlot, Stopped};
use super::taken::{OfKey, Taken};
use crate::clock::{self, Timer};
use crate::error::{Reason, StoreError};
use crate::quota::Limit;
use crate::stats::Engine;
use crate::store::Refusal;
use crate::wait_queue::WaitBound;

pub(crate) use holds::Suspect;
use in_flight::{InFlightGrant, InFlightPart, in_flight_of, waiting_in_flight};
pub(super) use stopped::cost_above_limit;

/// A request on the way to its permit. Dropping it frees its places.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) line: RequestLine,
    place: LinePlace,
    stage: WaitStage,
    /// Its parts with limits of calls in flight, in the order in which it asks for their slots.
    in_flight: SmallVec<[InFlightPart; 1]>,
    /// How often it got slots, this time included.
    pub(super) turns: u32,
    /// Whether it has waited for something else than slots.
    waited_before: bool,
    /// Whether it has entered its line before. Set when it enters.
    is_back: bool,
    /// Whether it has watched holds.
    watches: bool,
    /// Whether it is estimated to cost more than a whole limit.
    awaits_whole_limit: bool,
    /// Present if a key is under suspicion.
    suspect: Option<Box<Suspect>>,
}

/// What a request waits for.
#[derive(Debug)]
enum WaitStage {
    /// The end of a hold, without a place in the line.
    Hold(Timer),
    /// The first in-flight slot that it lacks, until the time runs out. If it has slots that are due, it waits only for one
    /// answer of the store.
    InFlight {
        until: Instant,
        slots: Option<Box<Slots>>,
    },
    /// Slots, in its line.
    Slots,
    /// Nothing: it enters, or leaves.
    Nothing,
}

/// A request that may leave now.
pub(super) struct Leaving {
    pub(super) taken: Taken,
    /// The part that it is uncounted under, and why.
    pub(super) uncounted: Option<(usize, StoreError)>,
    /// Whether it has waited for nothing but the answers of stores.
    pub(super) is_at_once: bool,
    /// The part that allowed it last.
    pub(super) last: usize,
}

impl Request {
    pub(super) fn new(
        parts: &[PartRef<'_>],
        bound: WaitBound,
        suspect: Option<Box<Suspect>>,
    ) -> Self {
        Request {
            line: RequestLine::of(parts, suspect.as_ref().map(|suspect| suspect.kind)),
            place: LinePlace {
                number: next_number(),
                costs: parts.iter().map(|part| part.entry.cost).collect(),
                bound,
                waits_for: None,
            },
            stage: WaitStage::Nothing,
            in_flight: in_flight_of(parts),
            turns: 1,
            waited_before: false,
            is_back: false,
            watches: false,
            awaits_whole_limit: false,
            suspect,
        }
    }

    pub(super) fn parts(&self) -> &[Part] {
        self.line.parts()
    }

    /// Returns how long the request can wait.
    pub(super) fn bound(&self) -> WaitBound {
        self.place.bound
    }

    /// Enters. Pending if the request waits, and is to be polled.
    pub(super) fn enter(&mut self, now: Instant) -> Poll<Result<Leaving, Stopped>> {
        let parts = self.line.parts().iter().zip(&mut self.place.costs);
        for (index, (Part { core, key, .. }, cost)) in parts.enumerate() {
            match stopped::awaited_cost(core, *key, *cost) {
                Ok(awaited) => {
                    self.awaits_whole_limit |= awaited < *cost;
                    *cost = awaited;
                }
                Err(reason) => {
                    return Poll::Ready(Err(
                        NoSlot::Refused(reason, Refusal::NEVER).for_part(index)
                    ));
                }
            }
        }
        let mut held = self.find_hold(now);
        if let Some(held) = &mut held {
            self.waits_for(held, now)?;
            self.waited_before = true;
            if !self.line.has_place_on_hold() {
                self.check_room_on_hold(held)?;
                self.stage = WaitStage::Hold(Timer::at(held.end));
                // It counts as waiting from now on. Its task polls later, and a Tower service may enter many before.
                self.watch_holds(now, &Context::from_waker(Waker::noop()));
                return Poll::Pending;
            }
        }
        self.check_room_in_flight()?;
        self.go_on(held.map(|held| held.end), now)
    }

    /// Polls until the request may leave now.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Leaving, Stopped>> {
        loop {
            let now = clock::now();
            let mut held = self.watch_holds(now, cx);
            if let Some(held) = &mut held {
                self.waits_for(held, now)?;
                self.keep_place_only(held, now);
            }
            let held_until = held.map(|held| held.end);
            let went_on = match &mut self.stage {
                WaitStage::Hold(timer) => match held_until {
                    Some(end) => {
                        // The end may have changed since it was last read.
                        timer.set(end);
                        timer.wake(cx);
                        return Poll::Pending;
                    }
                    None => {
                        // Further it counts where it waits next.
                        self.unwatch_holds();
                        self.go_on(None, now)
                    }
                },
                WaitStage::InFlight { until, .. } => {
                    let until = *until;
                    match ready!(self.poll_in_flight(until, now, cx))? {
                        Some(slots) => self.got(slots),
                        // All of them first: each time in the line would book slots anew.
                        None => match self.take_in_flight_slots(None, now)? {
                            Poll::Ready(_) => self.go_on(None, now),
                            Poll::Pending => Poll::Pending,
                        },
                    }
                }
                WaitStage::Slots => match self.line.poll(&self.place, held_until, now, cx) {
                    Poll::Ready(ended) => self.line_ended(ended, now),
                    Poll::Pending => {
                        if !self.in_flight.is_empty() && !self.line.is_near(&self.place, now) {
                            self.give_up_in_flight_slots();
                        }
                        return Poll::Pending;
                    }
                },
                WaitStage::Nothing => return Poll::Pending,
            };
            // What it waits for now has to know its task.
            if went_on.is_ready() {
                return went_on;
            }
        }
    }

    /// Waits again, in its old place, because what it had expired before it could leave.
    pub(super) fn wait_again(&mut self, taken: Taken) {
        let now = clock::now();
        let (slots, mut in_flight, probes) = taken.put_back();
        for of_part in &mut self.in_flight {
            let slot = in_flight[of_part.part].take();
            of_part.grant = slot.map_or(InFlightGrant::Missing, InFlightGrant::Slot);
        }
        let slots = Slots {
            costs: self.place.costs.clone(),
            until: slots.iter().flatten().map(|slot| slot.until).min(),
            slots: slots.into_iter().collect(),
            ..Slots::none(now)
        };
        self.again(Some(slots), now);
        // It is back in its place before another request can be the probe.
        drop(probes);
    }

    /// If the request waits in its line for a whole limit, because of an estimate, the next settlement wakes its task: see
    /// `whole_limit`. Returns whether there was one since the last time, or may have been: also at the first time.
    pub(super) fn watch_settlements(&self, cx: &Context<'_>) -> bool {
        let mut was_settled = false;
        if self.awaits_whole_limit && matches!(self.stage, WaitStage::Slots) {
            for part in self.parts() {
                was_settled |= part.core.whole_limit.watch(self.place.number, cx);
            }
        }
        was_settled
    }

    /// Takes new estimates of the costs, one for each part. If one is lower, the request asks for less, in its old place.
    /// Returns whether one is.
    pub(super) fn lower_costs(&mut self, estimates: impl Iterator<Item = u32>) -> bool {
        let mut lower = self.place.costs.clone();
        for (cost, estimate) in lower.iter_mut().zip(estimates) {
            // A store grants no slot of zero units.
            *cost = estimate.max(1).min(*cost);
        }
        let is_lower = lower != self.place.costs;
        if is_lower {
            let now = clock::now();
            self.line.leave(&self.place, now);
            // It watches no hold of a key of which it takes nothing any more. The next poll watches those of the others.
            self.unwatch_holds();
            self.place.costs = lower;
            self.line.come_back(&self.place, None, now);
        }
        is_lower
    }

    /// Returns how many requests wait for the same, this one included.
    pub(super) fn queued(&self) -> usize {
        match &self.stage {
            WaitStage::Hold(_) | WaitStage::Nothing => 1,
            WaitStage::InFlight { .. } => self.lacks().map_or(1, waiting_in_flight),
            WaitStage::Slots => self.line.waiting(),
        }
    }

    /// Returns what the request waits for now. If that is a hold, also how long it lasts.
    pub(super) fn because(&self, now: Instant) -> (Because, Option<Duration>) {
        if let Some(left) = self.held(now) {
            return (Because::Held, Some(left));
        }
        let because = match &self.stage {
            WaitStage::InFlight { .. } => self.lacks().map(|part| {
                let count = part.quota().quota().most_in_flight();
                Because::InFlight(Limit::InFlight {
                    count: count.unwrap_or_default(),
                })
            }),
            _ => match self.parts() {
                [only] => only.only_rate().map(Because::Limit),
                _ => None,
            },
        };
        let before = self.queued().saturating_sub(1);
        (because.unwrap_or(Because::Queue { before }), None)
    }

    /// Refuses a request before it enters, if it cannot leave whatever the state of its keys is.
    pub(super) fn check(&self, parts: &[PartRef<'_>], now: Instant) -> Result<(), Stopped> {
        let refused = |part, reason| Err(NoSlot::Refused(reason, Refusal::NEVER).for_part(part));
        let LinePlace { costs, bound, .. } = &self.place;
        let needs_permit = costs.iter().any(|cost| *cost > 0);
        if needs_permit && let Some(reason) = around::refusal(parts) {
            return refused(0, reason);
        }
        for (index, part) in parts.iter().enumerate() {
            if part.core.tally().is_draining() {
                return refused(index, Reason::Draining);
            }
        }
        if let Some(index) = part::repeated(parts) {
            return refused(index, Reason::SameKey);
        }
        if needs_permit && bound.latest < now {
            return refused(0, Reason::Deadline);
        }
        Ok(())
    }

    /// Refuses a new request if too many wait for what it would wait for. The queue of a key looks itself.
    pub(super) fn check_room(&self) -> Result<(), Stopped> {
        self.check_room_in_flight()?;
        self.line.check_room(&self.place)
    }

    /// Goes on after the holds: asks for what it lacks. Pending if it waits for that.
    fn go_on(
        &mut self,
        held_until: Option<Instant>,
        now: Instant,
    ) -> Poll<Result<Leaving, Stopped>> {
        self.stage = WaitStage::Nothing;
        if self.line.is_of_one_key() && self.take_in_flight_slots(None, now)?.is_pending() {
            return Poll::Pending;
        }
        // One that has waited for a hold without a place in the line came before those that fill it.
        let is_back = std::mem::replace(&mut self.is_back, true)
            || (self.waited_before && !self.line.has_place_on_hold());
        match self.line.enter(&mut self.place, is_back, held_until, now) {
            Some(ended) => self.line_ended(ended, now),
            None => {
                self.stage = WaitStage::Slots;
                Poll::Pending
            }
        }
    }

    /// Goes on when the wait in the line has ended. The quota may be lower than this process knew: a request that waits for a
    /// whole limit at most asks for no more than that.
    fn line_ended(
        &mut self,
        ended: Result<Slots, Stopped>,
        now: Instant,
    ) -> Poll<Result<Leaving, Stopped>> {
        let stopped = match ended {
            Ok(slots) => {
                self.stage = WaitStage::Nothing;
                return self.got(slots);
            }
            Err(stopped) => stopped,
        };
        let Part { core, key, .. } = &self.line.parts()[stopped.part];
        let cost = &mut self.place.costs[stopped.part];
        let is_never = matches!(stopped.no_slot, NoSlot::TooLate(Refusal { wait: None, .. }));
        match stopped::awaited_cost(core, *key, *cost) {
            Ok(awaited) if is_never && awaited < *cost => *cost = awaited,
            _ => return Poll::Ready(Err(stopped)),
        }
        self.awaits_whole_limit = true;
        self.again(None, now);
        Poll::Pending
    }

    /// Leaves with slots that are due. Pending if it cannot leave with them: then it waits for something else.
    fn got(&mut self, slots: Slots) -> Poll<Result<Leaving, Stopped>> {
        // It may have taken time to get them, and the answers may be about later moments.
        let now = clock::now();
        if slots.is_expired(now) {
            self.again(Some(slots), now);
            return Poll::Pending;
        }
        self.give_up_lost_slots(now);
        let Some(slots) = ready!(self.take_in_flight_slots(Some(slots), now))? else {
            return self.go_on(None, now);
        };
        let passed = if self.line.is_confirmed(&slots, now) {
            self.pass_holds(now)
        } else {
            None
        };
        match passed {
            Some(probes) => {
                self.line.left(&slots, now);
                Poll::Ready(Ok(self.leaves(slots, probes)))
            }
            None => {
                self.again(Some(slots), now);
                Poll::Pending
            }
        }
    }

    /// Returns to its old place in the line, because it cannot leave with the slots that it got.
    fn again(&mut self, slots: Option<Slots>, now: Instant) {
        self.turns += 1;
        if self.turns == 2 {
            self.waited_for_answer(now);
        }
        // It asks anew for the in-flight slots that it would have passed without.
        for of_part in &mut self.in_flight {
            if let InFlightGrant::Uncounted = of_part.grant {
                of_part.grant = InFlightGrant::Missing;
            }
        }
        self.stage = WaitStage::Slots;
        self.line.come_back(&self.place, slots, now);
    }

    /// Lets a request that cannot wait, because `max_wait` is zero, ask once more for what is due now: it has waited only
    /// for an answer of the store, or its task ran too late.
    fn waited_for_answer(&mut self, now: Instant) {
        let bound = &mut self.place.bound;
        if bound.is_none {
            bound.extend_to(now);
        }
    }

    /// Makes what the request leaves with.
    fn leaves(&mut self, mut slots: Slots, mut probes: Vec<Probe>) -> Leaving {
        probes.extend(slots.probe.take());
        let in_flight = &mut self.in_flight;
        let parts = self.line.parts().iter().zip(slots.slots).enumerate();
        let mut parts = parts.map(|(index, (part, slot))| {
            let mut of_part = in_flight.iter_mut().filter(|of_part| of_part.part == index);
            let in_flight_slot = of_part.next().and_then(InFlightPart::take_slot);
            OfKey::new(part, slot, in_flight_slot)
        });
        let first = parts.next().expect("a request has a key");
        let kind = self.suspect.as_ref().map(|suspect| suspect.kind);
        Leaving {
            taken: Taken::of_all(first, parts.collect(), probes).of_kind(kind),
            uncounted: slots.uncounted,
            is_at_once: slots.is_at_once && self.turns == 1 && !self.waited_before,
            last: slots.last,
        }
    }

    /// Frees its place, and gives up its in-flight slots.
    fn leave(&mut self, now: Instant) {
        match std::mem::replace(&mut self.stage, WaitStage::Nothing) {
            WaitStage::InFlight { slots, .. } => {
                if let Some(Part { core, key, .. }) = self.lacks() {
                    in_flight_slot::leave(core, *key, self.place.number);
                }
                if let Some(slots) = slots {
                    self.line.give_back(*slots);
                }
            }
            WaitStage::Slots => self.line.leave(&self.place, now),
            WaitStage::Hold(_) | WaitStage::Nothing => {}
        }
        self.give_up_in_flight_slots();
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !matches!(self.stage, WaitStage::Nothing) {
            self.leave(clock::now());
        }
        self.line.forget(&self.place);
        self.unwatch_holds();
        if self.awaits_whole_limit {
            let parts = self.parts().iter();
            parts.for_each(|part| part.core.whole_limit.forget(self.place.number));
        }
    }
}
