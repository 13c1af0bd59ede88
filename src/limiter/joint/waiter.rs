//! The future of a joint request.
//!
//! # The order of a wait
//!
//! 1. **Holds.** While a key or its host is on hold, the request keeps nothing, and stands in the line of its set.
//! 2. **A joint slot**, in the line of the set: [`Stage::Slot`].
//! 3. **In-flight slots.** When the joint slot is due, the request asks for its in-flight slots. If one is not free,
//!    the joint slot goes back unused, and the request waits for the in-flight slot: [`Stage::InFlight`]. Then it
//!    goes to 2, in its old place. It keeps the in-flight slots if the next joint slot is due within the life of a
//!    permit.
//! 4. **It leaves**, if the slots are still valid and no key is on hold.
//!
//! So a request keeps nothing of one limit for as long as another one lets it wait: requests with other keys could use
//! it. Tried before: in-flight slots first. Then 20 requests that waited for the rate of one channel kept
//! the 20 in-flight slots of all channels.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::at_once::taken;
use super::confirmation::doubtful;
use super::set::JointSet;
use super::{
    Cause, Costs, JointRefusal, JointRequest, JointSlot, Part, PerPart, max_queue, max_wait,
};
use crate::clock;
use crate::error::{Limited, Reason, StoreError};
use crate::events;
use crate::key::{Key, Label};
use crate::limiter::admission::{self, Admission};
use crate::limiter::around;
use crate::limiter::counting;
use crate::limiter::engine::Core;
use crate::limiter::holds;
use crate::limiter::in_flight_slot::{self, InFlightSlot};
use crate::limiter::limited::RefusedRequest;
use crate::limiter::own_quota;
use crate::limiter::probe::Probe;
use crate::limiter::queue::{Number, next_number};
use crate::limiter::reservation::{Settled, WaitBound};
use crate::limiter::sent::PastWait;
use crate::limiter::taken::Taken;
use crate::stats::OpenRequest;
use crate::store::Refusal;
use crate::wait_queue::answer_by;

/// A joint request that waits. Dropping it frees its place in the queue of its set.
#[derive(Debug)]
pub(crate) struct JointWaiter {
    set: Arc<JointSet>,
    /// Its number in the line of the set, and in those of the in-flight slots. It also watches the holds of its keys under
    /// this number.
    number: Number,
    costs: Costs,
    bound: WaitBound,
    stage: Stage,
    /// Its in-flight slots by part.
    in_flight: PerPart<Option<InFlightSlot>>,
    /// The parts of which it has its in-flight slot, or passes without one, because a store failed.
    is_in_flight: PerPart<bool>,
    /// When the wait began.
    since: Instant,
    /// How often its turn has come.
    turns: u32,
    /// Whether it has waited for something else than a joint slot.
    waited_before: bool,
    /// The name of its first key in errors and events.
    label: Label,
}

/// The part that stops a request, and how.
type Stopped = Box<(usize, Admission)>;

/// A joint slot with which a request may leave at a moment, and the probes that it leaves as.
type Found = (JointSlot, Vec<Probe>, Instant);

#[derive(Debug)]
enum Stage {
    /// Waits for the in-flight slot of a part, until the time runs out.
    InFlight {
        /// The part, counted in [`in_flight_order`].
        next: usize,
        until: Instant,
    },
    /// Waits for a joint slot.
    Slot,
    Done,
}

/// Asks the stores about holds of hosts for which this process has no state. Another process may
/// know of a hold.
fn inquire_hosts(parts: &[Part], now: Instant) {
    for Part {
        core, key, host, ..
    } in parts
    {
        if let Some(hold) = core.hosts.hold_of(*key, *host)
            && core.states.find(hold, |_| ()).is_none()
        {
            holds::inquire(core, hold, now);
        }
    }
}

/// Returns why a request cannot be granted whatever the store says, and the part that refuses it.
fn unfit(request: &JointRequest, bound: WaitBound, now: Instant) -> Option<(usize, Reason)> {
    let JointRequest { parts, costs } = request;
    if let Some(reason) = around::refusal(&parts[0].core) {
        return Some((0, reason));
    }
    for (index, part) in parts.iter().enumerate() {
        let cost = costs[index];
        if let Some(reason) = admission::known_above_limit(&part.core, part.key, cost) {
            return Some((index, reason));
        }
        if part.core.settings.tally.is_draining() {
            return Some((index, Reason::Draining));
        }
        if parts[..index].iter().any(|other| other.is_same(part)) {
            return Some((index, Reason::SameKey));
        }
    }
    (bound.latest < now).then_some((0, Reason::Deadline))
}

/// Returns the numbers of the parts with limits of calls in flight. A request takes its in-flight
/// slots in this order, the narrowest limit first, so that requests with other parts never wait for
/// each other in a circle. A limit that is set while a request waits does not change the order: the request would leave
/// the line of another part than the one that it waits in.
fn in_flight_order(parts: &[Part], costs: &[u32]) -> PerPart<usize> {
    let mut order: PerPart<usize> = (0..parts.len())
        .filter(|part| parts[*part].core.in_flight.is_some() && costs[*part] > 0)
        .collect();
    order.sort_by_key(|part| {
        let Part { core, key, .. } = &parts[*part];
        // All classes of a divided quota have the key in common.
        let key = core.whole(*key);
        (core.settings.spec.quota().most_in_flight(), key, core.id)
    });
    order
}

impl Part {
    /// Returns whether two parts would count a request twice under one key.
    fn is_same(&self, other: &Part) -> bool {
        self.key == other.key && (self.core.id == other.core.id || self.has_store_of(other))
    }
}

/// Returns the name of the key of a part. `first` is that of the first part. Parts that count several
/// units of one key have one name.
fn label_of(parts: &[Part], part: usize, first: &Label) -> Label {
    let is_further_unit = |part: &&Part| part.core.settings.is_further_unit;
    let further = parts[..=part].iter().rev().take_while(is_further_unit);
    match part - further.count() {
        0 => first.clone(),
        of_key => parts[of_key].core.label(parts[of_key].key, None),
    }
}

impl JointWaiter {
    /// Enters a request.
    ///
    /// # Errors
    ///
    /// The error of a request that cannot wait.
    pub(super) fn enter(
        request: &JointRequest,
        deadline: Option<Instant>,
        label: Label,
        now: Instant,
    ) -> Result<Box<Self>, Limited> {
        let parts = &request.parts;
        let is_nested = parts.iter().any(|part| around::is_nested(&part.core));
        let bound = WaitBound::new(deadline, now, max_wait(parts)).nested_if(is_nested, now);
        for part in parts {
            own_quota::choose(&part.core, part.key, part.quota, now);
        }
        if let Some((part, reason)) = unfit(request, bound, now) {
            let limit = parts[part].limit_name();
            let refused = RefusedRequest::new(label_of(parts, part, &label), limit, now);
            return Err(refused.refuse(reason, Refusal::NEVER, now));
        }
        inquire_hosts(parts, now);
        let mut waiter = Box::new(JointWaiter {
            set: parts[0].core.joint.find(request),
            costs: request.costs.clone(),
            number: next_number(),
            bound,
            stage: Stage::Done,
            in_flight: parts.iter().map(|_| None).collect(),
            is_in_flight: parts.iter().map(|_| false).collect(),
            since: now,
            turns: 0,
            waited_before: false,
            label,
        });
        match waiter.enter_line(now) {
            Err(stopped) => {
                let (part, admission) = *stopped;
                Err(waiter.stopped(part, admission, now))
            }
            Ok(()) => Ok(waiter),
        }
    }

    /// Reports that the request waits.
    pub(super) fn note_wait(&self) {
        events::waiting(&self.label, self.set.waiting());
        let Part { core, key, .. } = &self.set.parts[0];
        counting::note_label(core, *key, &self.label);
    }

    /// Returns the request for its error.
    pub(in crate::limiter) fn refused_request(&self) -> RefusedRequest {
        RefusedRequest {
            label: self.label.clone(),
            limit: self.set.parts[0].limit_name(),
            since: self.since,
            turns: self.turns,
        }
    }

    /// Makes the request that waits, to be counted under its first key.
    pub(in crate::limiter) fn open_request(&self) -> OpenRequest<Core> {
        let Part { core, key, .. } = &self.set.parts[0];
        OpenRequest::new(core.clone(), *key, self.since)
    }

    /// Waits again, in its old place, because what it had expired before it could leave.
    pub(crate) fn wait_again(&mut self, taken: Taken) {
        let now = clock::now();
        let (slots, in_flight) = taken.put_all_back();
        self.in_flight = in_flight;
        self.forget_uncounted();
        self.enter_again(now);
        self.set.give_up(JointSlot {
            costs: self.costs.clone(),
            slots,
            changes: PerPart::new(),
            at: now,
            until: None,
            last: 0,
            is_at_once: false,
            uncounted: None,
        });
    }

    fn enter_again(&mut self, now: Instant) {
        self.turns += 1;
        if self.turns == 1 && self.bound.is_none {
            // `max_wait` is zero, so the request cannot wait. Its task ran too late, so the request
            // asks once more for permits that are due now.
            self.bound.latest = self.bound.latest.max(now);
        }
        self.stage = Stage::Slot;
        self.set
            .enter(self.number, &self.costs, self.bound, 0, true, now);
    }

    /// Enters the line of the set, if there is room in it, and in those of the in-flight slots.
    fn enter_line(&mut self, now: Instant) -> Result<(), Stopped> {
        for &part in &self.in_flight_order() {
            let Part { core, key, .. } = &self.set.parts[part];
            let calls = core.in_flight.as_ref();
            let waiting = calls.map_or(0, |calls| calls.waiting(core.whole(*key)));
            if waiting >= core.settings.max_queue {
                let settled = Settled::QueueFull;
                admission::in_flight_slot_settled(core, *key, self.bound, settled)
                    .map_err(|stopped| Box::new((part, stopped)))?;
            }
        }
        let max_queue = max_queue(self.set.parts.iter().map(|part| &part.core));
        let (number, bound) = (self.number, self.bound);
        if !self
            .set
            .enter(number, &self.costs, bound, max_queue, false, now)
        {
            let reason = Reason::QueueFull(max_queue);
            return Err(Box::new((0, Admission::Refused(reason, Refusal::NEVER))));
        }
        self.stage = Stage::Slot;
        Ok(())
    }

    /// Takes the in-flight slots from the `next` one on. Returns whether the request has all of them. Otherwise it waits
    /// for the first that it lacks.
    fn take_in_flight_slots(&mut self, next: usize, now: Instant) -> Result<bool, Stopped> {
        let order = self.in_flight_order();
        for (index, &part) in order.iter().enumerate().skip(next) {
            if self.is_in_flight[part] {
                continue;
            }
            let &Part { ref core, key, .. } = &self.set.parts[part];
            let impatient = self.bound.latest <= now;
            let entered = in_flight_slot::enter(core, key, self.number, impatient, usize::MAX, now);
            let taken = match entered {
                Ok(None) => {
                    self.waited_before = true;
                    self.stage = Stage::InFlight {
                        next: index,
                        until: answer_by(self.bound.latest, now),
                    };
                    return Ok(false);
                }
                Ok(Some(settled)) => {
                    admission::in_flight_slot_settled(core, key, self.bound, settled)
                }
                Err(_) => {
                    let reason = Reason::TooManyKeys(core.settings.max_keys);
                    Err(Admission::Refused(reason, Refusal::NEVER))
                }
            };
            match taken {
                Ok(slot) => self.take_in_flight_slot(part, slot),
                Err(stopped) => return Err(Box::new((part, stopped))),
            }
        }
        Ok(true)
    }

    /// Returns the keys whose holds stop the request, each with its part: those that the request costs
    /// something of.
    fn hold_keys(&self) -> impl Iterator<Item = (usize, &Part, Key)> {
        let parts = self.set.parts.iter().enumerate();
        let parts = parts.filter(|(index, _)| self.costs[*index] > 0);
        parts.flat_map(|(index, part)| part.hold_keys().map(move |key| (index, part, key)))
    }

    /// See [`in_flight_order`].
    fn in_flight_order(&self) -> PerPart<usize> {
        in_flight_order(&self.set.parts, &self.costs)
    }

    /// Watches the holds of all keys. Returns the latest end, and the part whose key it holds.
    ///
    /// A key whose hold is watched keeps its state. Otherwise the state of one key could be evicted
    /// for that of another one, and the slots of both would never be known at one moment.
    fn watch_holds(&self, now: Instant, cx: &Context<'_>) -> Option<(Instant, usize)> {
        let keys = self.hold_keys();
        let ends = keys.filter_map(|(index, part, key)| {
            let left = holds::watch(&part.core, key, self.number, now, cx)?;
            Some((clock::after(now, left), index))
        });
        ends.max()
    }

    /// Returns the part whose in-flight slot the store may have granted to another call, while the
    /// request waited for its joint slot.
    fn lost_in_flight_slot(&self, now: Instant) -> Option<usize> {
        let is_lost =
            |slot: &Option<InFlightSlot>| slot.as_ref().is_some_and(|slot| slot.is_lost(now));
        self.in_flight.iter().position(is_lost)
    }

    /// Returns the probes that the request leaves as, if it may leave now with its slots: no slot has expired,
    /// the stores have confirmed them, and neither a hold nor a probe stops one of its keys.
    fn pass(&self, slot: &JointSlot, now: Instant) -> Option<Vec<Probe>> {
        if slot.is_expired(now) || !doubtful(&self.set.parts, slot, now).is_empty() {
            return None;
        }
        let mut probes: Vec<Probe> = Vec::new();
        for (_, part, key) in self.hold_keys() {
            // Two keys may have the hold of one host.
            if probes.iter().any(|probe| probe.is_of(part.core.id, key)) {
                continue;
            }
            // If one stops it, the probes of the keys before are dropped.
            probes.extend(holds::pass(&part.core, key, now).ok()?);
        }
        Some(probes)
    }

    /// Ends the wait: the request leaves, as these probes.
    fn granted(&mut self, slot: JointSlot, probes: Vec<Probe>, now: Instant) -> Taken {
        self.stage = Stage::Done;
        self.turns += 1;
        if let Some((part, cause)) = &slot.uncounted {
            let of_part = &self.set.parts[*part];
            let label = label_of(&self.set.parts, *part, &self.label);
            events::passed(&of_part.core.settings.tally, &label, cause);
        }
        let is_uncounted = slot.uncounted.is_some();
        let is_at_once = slot.is_at_once && self.turns == 1 && !self.waited_before;
        let in_flight = std::mem::take(&mut self.in_flight);
        let parts = self.set.parts.iter().zip(&self.costs);
        let parts = parts.map(|(part, cost)| part.with_cost(*cost));
        let mut taken = taken(parts, slot.slots, in_flight, probes);
        taken.count_units();
        let waited = now.saturating_duration_since(self.since);
        if waited.is_zero() && !is_uncounted {
            return taken;
        }
        if !waited.is_zero() {
            events::waited(&self.label, waited, self.turns);
        }
        taken.after(PastWait {
            label: self.label.clone(),
            waited,
            turns: self.turns,
            is_uncounted,
            is_at_once,
        })
    }

    /// Ends the wait with an error.
    fn refused(&mut self, refusal: JointRefusal, now: Instant) -> Limited {
        let JointRefusal { part, cause } = refusal;
        let max_wait = max_wait(&self.set.parts);
        let reason = |refusal| Admission::Refused(self.bound.reason(max_wait), refusal);
        let admission = match cause {
            Cause::Wait(refusal) => {
                let Part { core, key, .. } = &self.set.parts[part];
                let above = admission::cost_above_limit(core, *key, self.costs[part]);
                match above.filter(|_| refusal.wait.is_none()) {
                    Some(above) => Admission::Refused(above, refusal),
                    None => reason(refusal),
                }
            }
            Cause::Held(refusal) => Admission::Refused(Reason::Held, refusal),
            Cause::Failed(StoreError::Full { max_keys }) => {
                Admission::Refused(Reason::TooManyKeys(max_keys), Refusal::NEVER)
            }
            Cause::Failed(error) => Admission::Failed(error),
        };
        self.stopped(part, admission, now)
    }

    /// Ends the wait with the error of an admission that stops the request.
    fn stopped(&mut self, part: usize, admission: Admission, now: Instant) -> Limited {
        self.leave();
        let request = RefusedRequest {
            label: label_of(&self.set.parts, part, &self.label),
            limit: self.set.parts[part].limit_name(),
            since: self.since,
            turns: self.turns,
        };
        match admission {
            Admission::Refused(reason, refusal) => request.refuse(reason, refusal, now),
            Admission::Failed(source) => request.fail(source, now),
            Admission::Granted(..) | Admission::Waits { .. } => {
                unreachable!("no request is stopped by these")
            }
        }
    }

    /// Polls for the in-flight slot that the request waits for. Then it waits for what it lacks next.
    fn poll_in_flight(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<(), Stopped>> {
        let Stage::InFlight { next, until } = self.stage else {
            return Poll::Ready(Ok(()));
        };
        let part = self.in_flight_order()[next];
        let &Part { ref core, key, .. } = &self.set.parts[part];
        let settled = ready!(in_flight_slot::poll(core, key, self.number, until, now, cx));
        self.stage = Stage::Done;
        if self.bound.is_none {
            // `max_wait` is zero, so the request waited only for the answer of the store.
            self.bound.latest = self.bound.latest.max(now);
        }
        let slot = admission::in_flight_slot_settled(core, key, self.bound, settled)
            .map_err(|stopped| Box::new((part, stopped)))?;
        self.take_in_flight_slot(part, slot);
        if self.take_in_flight_slots(next + 1, now)? {
            self.enter_again(now);
        }
        Poll::Ready(Ok(()))
    }

    /// Frees the place of the request, and gives up its in-flight slots.
    fn leave(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::InFlight { next, .. } => {
                let part = self.in_flight_order()[next];
                let Part { core, key, .. } = &self.set.parts[part];
                in_flight_slot::leave(core, *key, self.number);
            }
            Stage::Slot => self.set.leave(self.number),
            Stage::Done => {}
        }
        self.give_up_in_flight_slots();
    }

    fn take_in_flight_slot(&mut self, part: usize, slot: Option<InFlightSlot>) {
        self.in_flight[part] = slot;
        self.is_in_flight[part] = true;
    }

    fn give_up_in_flight_slots(&mut self) {
        self.in_flight.iter_mut().for_each(|slot| *slot = None);
        self.is_in_flight.fill(false);
    }

    /// Gives up all but the place in the line of the set, because a key is on hold.
    fn keep_place_only(&mut self, now: Instant) {
        self.waited_before = true;
        if matches!(self.stage, Stage::InFlight { .. }) {
            self.leave();
            self.enter_again(now);
        } else {
            self.give_up_in_flight_slots();
        }
    }

    /// Polls until the request may leave now.
    fn poll_found(&mut self, cx: &mut Context<'_>) -> Poll<Result<Found, Limited>> {
        loop {
            let mut now = clock::now();
            let held = self.watch_holds(now, cx);
            if let Some((end, part)) = held {
                if end > self.bound.latest {
                    let left = end.saturating_duration_since(now);
                    let cause = Cause::Held(Refusal::new(Some(left), None));
                    let refusal = JointRefusal { part, cause };
                    return Poll::Ready(Err(self.refused(refusal, now)));
                }
                self.keep_place_only(now);
            }
            if matches!(self.stage, Stage::InFlight { .. }) {
                if let Err(stopped) = ready!(self.poll_in_flight(now, cx)) {
                    let (part, stopped) = *stopped;
                    return Poll::Ready(Err(self.stopped(part, stopped, now)));
                }
                continue;
            }
            let held_until = held.map(|(end, _)| end);
            let slot = match self.set.poll(self.number, held_until, &mut now, cx) {
                Poll::Ready(Ok(slot)) => slot,
                Poll::Ready(Err(refusal)) => return Poll::Ready(Err(self.refused(refusal, now))),
                Poll::Pending => {
                    if !self.set.is_near(now) {
                        self.give_up_in_flight_slots();
                    }
                    return Poll::Pending;
                }
            };
            if slot.is_expired(now) {
                self.enter_again(now);
                self.set.give_up(slot);
                continue;
            }
            self.stage = Stage::Done;
            match self.take_in_flight_slots(0, now) {
                Ok(true) => {}
                Ok(false) => {
                    // It goes back at once: units of slots that have expired are lost. Tried: to keep it while the
                    // store answers. Then its units come back while the request asks for others.
                    self.set.give_back_to_stores(slot);
                    continue;
                }
                Err(stopped) => {
                    let (part, stopped) = *stopped;
                    self.set.give_back([slot]);
                    return Poll::Ready(Err(self.stopped(part, stopped, now)));
                }
            }
            if let Some(part) = self.lost_in_flight_slot(now) {
                self.set.give_back([slot]);
                let lost = Admission::Failed(StoreError::InFlightSlotLost);
                return Poll::Ready(Err(self.stopped(part, lost, now)));
            }
            if let Some(probes) = self.pass(&slot, now) {
                let parts = self.set.parts.iter().zip(&slot.slots);
                for (part, _) in parts.filter(|(_, slot)| slot.is_some()) {
                    part.ended(now, true);
                }
                return Poll::Ready(Ok((slot, probes, now)));
            }
            self.forget_uncounted();
            self.enter_again(now);
            self.set.give_up(slot);
        }
    }

    /// Asks for the in-flight slots anew that the request would have passed without.
    fn forget_uncounted(&mut self) {
        for (is_in_flight, slot) in self.is_in_flight.iter_mut().zip(&self.in_flight) {
            *is_in_flight = slot.is_some();
        }
    }

    fn unwatch_holds(&self) {
        for (_, part, key) in self.hold_keys() {
            holds::leave(&part.core, key, self.number);
        }
    }
}

impl Future for JointWaiter {
    type Output = Result<Taken, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (slot, probes, now) = ready!(self.poll_found(cx))?;
        Poll::Ready(Ok(self.granted(slot, probes, now)))
    }
}

impl Drop for JointWaiter {
    fn drop(&mut self) {
        self.leave();
        self.unwatch_holds();
    }
}
