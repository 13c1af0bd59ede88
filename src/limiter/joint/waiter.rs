//! The future of a joint request, and its entrance.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::confirmation::doubtful;
use super::set::JointSet;
use super::until_known::UntilKnown;
use super::{
    Cause, JointRefusal, JointSlot, Part, PartRef, PerPart, give_back_of, max_wait, to_parts,
};
use crate::clock;
use crate::error::{Limited, Reason, StoreError};
use crate::events;
use crate::key::Label;
use crate::limiter::admission::{self, Admission, Entry};
use crate::limiter::engine::CoreId;
use crate::limiter::holds;
use crate::limiter::hosts::host_hold;
use crate::limiter::in_flight_slot::{self, InFlightSlot};
use crate::limiter::limited::RefusedRequest;
use crate::limiter::outer::{self, CallId, OuterPermit};
use crate::limiter::permit::{JointPermit, PastWait, Permit, Sent};
use crate::limiter::queue::{Number, next_number};
use crate::limiter::reservation::{Reservation, WaitBound};
use crate::limiter::start::take_at_once;
use crate::store::Refusal;
use crate::wait_queue::answer_by;

/// What a joint request gets when it enters.
pub(crate) enum JointStarted {
    Granted(Permit),
    Waiting(Box<JointWaiter>),
    Limited(Limited),
}

/// The same, for the request of a layer.
pub(crate) enum Entered {
    /// The request is sent at once, with permits at hand.
    Sent(Sent),
    /// The request waits until the permits of the layers around are known.
    UntilKnown(Box<UntilKnown>),
    Started(JointStarted),
}

/// Enters the request of a layer. `label` is the name of its first key.
pub(crate) fn enter(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl Fn() -> Label,
) -> Entered {
    if let Some(until_known) = UntilKnown::of(parts, deadline, &label) {
        return Entered::UntilKnown(until_known);
    }
    if outer::is_any() || parts[0].core.has_inner() {
        return Entered::Started(start(parts, deadline, label));
    }
    // No `Permit` is made.
    let now = clock::now();
    match take_all_at_once(parts, deadline, now) {
        Some(_) => Entered::Sent(Sent::all_at_once(
            parts.iter().map(PartRef::id_and_entry),
            now,
        )),
        None => {
            let parts = to_parts(parts);
            let started = start_slow(&parts, parts.len(), None, deadline, label(), now);
            Entered::Started(started)
        }
    }
}

/// A joint request that waits. Dropping it frees its place in the queue of its set.
#[derive(Debug)]
pub(crate) struct JointWaiter {
    set: Arc<JointSet>,
    /// Its number in the queue of the set. It also watches the holds of its keys under this number.
    number: Number,
    bound: WaitBound,
    stage: Stage,
    /// Its in-flight slots by part.
    in_flight: PerPart<Option<InFlightSlot>>,
    /// When the wait began.
    since: Instant,
    /// How often its turn has come.
    turns: u32,
    /// The name of its first key in errors and events.
    label: Label,
    /// The number of the request's own parts. The others are of layers around.
    own: usize,
    /// The call, if other layers are around.
    inside: Option<CallId>,
}

#[derive(Debug)]
enum Stage {
    /// Waits for the in-flight slot of a part. `next` counts the parts in [`in_flight_order`].
    InFlight {
        next: usize,
        number: Number,
        until: Instant,
    },
    /// Waits for a joint slot.
    Slot,
    Done,
}

/// Enters a joint request. `label` is the name of its first key.
pub(crate) fn start(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl FnOnce() -> Label,
) -> JointStarted {
    if outer::are_known() {
        return start_inside(parts, deadline, label);
    }
    let now = clock::now();
    match take_all_at_once(parts, deadline, now) {
        Some(slots) => {
            let parts = parts.iter().copied();
            JointStarted::Granted(permit(parts, slots, PerPart::new()))
        }
        None => {
            let parts = to_parts(parts);
            start_slow(&parts, parts.len(), None, deadline, label(), now)
        }
    }
}

/// Enters a request that other layers are around.
#[cold]
fn start_inside(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl FnOnce() -> Label,
) -> JointStarted {
    events::inside();
    let call = CallId::new();
    let now = clock::now();
    if let Some(slots) = take_all_at_once(parts, deadline, now) {
        if outer::use_all(call, now) {
            let permit = permit(parts.iter().copied(), slots, PerPart::new());
            return JointStarted::Granted(permit.inside(call, outer::first_expiry()));
        }
        give_back_of(parts.iter().copied(), slots);
    }
    let mut all = to_parts(parts);
    all.extend(outer::all().iter().filter_map(Part::around));
    give_up_outer();
    start_slow(&all, parts.len(), Some(call), deadline, label(), now)
}

/// Begins to renew the permits of the layers around, for the call `call`. Returns `None` if there
/// are none.
pub(super) fn renew_outer(
    deadline: Option<Instant>,
    call: CallId,
) -> Result<Option<Box<JointWaiter>>, Limited> {
    let all: PerPart<Part> = outer::all().iter().filter_map(Part::around).collect();
    let Some(Part { core, entry }) = all.first() else {
        return Ok(None);
    };
    let label = core.label(entry.key, None);
    give_up_outer();
    JointWaiter::enter(&all, 0, Some(call), deadline, label, clock::now()).map(Some)
}

/// Gives back the unused permits of the layers around, which are about to be acquired anew.
fn give_up_outer() {
    for (core, key, slot) in outer::take_unused() {
        if let Some(core) = core.find() {
            core.give_back(key, slot);
        }
    }
}

/// Takes permits that are at hand, of all parts or of none. Returns `None` if a part has none, or if
/// requests with these parts wait.
fn take_all_at_once(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    now: Instant,
) -> Option<PerPart<Option<Reservation>>> {
    if parts[0].core.joint.is_any_waiting(parts) {
        return None;
    }
    let mut slots = PerPart::new();
    for part in parts {
        let entry = Entry {
            deadline,
            ..part.entry
        };
        match take_at_once(part.core, &entry, now) {
            Ok(slot) => slots.push(slot),
            Err(_) => {
                give_back_of(parts.iter().copied(), slots);
                return None;
            }
        }
    }
    Some(slots)
}

#[cold]
fn start_slow(
    parts: &[Part],
    own: usize,
    inside: Option<CallId>,
    deadline: Option<Instant>,
    label: Label,
    now: Instant,
) -> JointStarted {
    let mut waiter = match JointWaiter::enter(parts, own, inside, deadline, label, now) {
        Ok(waiter) => waiter,
        Err(limited) => return JointStarted::Limited(limited),
    };
    // A store that replies at once decides here.
    let mut cx = Context::from_waker(std::task::Waker::noop());
    match Pin::new(&mut *waiter).poll(&mut cx) {
        Poll::Ready(Ok(permit)) => JointStarted::Granted(permit),
        Poll::Ready(Err(limited)) => JointStarted::Limited(limited),
        Poll::Pending => {
            events::waiting(&waiter.label, waiter.set.waiting());
            JointStarted::Waiting(waiter)
        }
    }
}

/// Asks the stores about holds of hosts for which this process has no state. Another process may
/// know of a hold.
fn inquire_hosts(parts: &[Part], now: Instant) {
    for Part { core, entry } in parts {
        if let Some(hold) = host_hold(entry.key, entry.host)
            && core.states.find(hold, |_| ()).is_none()
        {
            holds::inquire(core, hold, now);
        }
    }
}

/// Returns why a request cannot be granted whatever the store says, and the part that refuses it.
fn unfit(parts: &[Part], own: usize, bound: WaitBound, now: Instant) -> Option<(usize, Reason)> {
    for (index, part) in parts.iter().enumerate() {
        let (cost, largest) = (
            part.entry.cost,
            part.core.settings.spec.quota().largest_cost(),
        );
        if cost > largest {
            return Some((index, Reason::CostAboveLimit { cost, largest }));
        }
        if index < own && parts[..index].iter().any(|other| other.is_same(part)) {
            return Some((index, Reason::SameKey));
        }
    }
    (bound.latest < now).then_some((0, Reason::Deadline))
}

/// Returns the numbers of the parts with limits of calls in flight. A request takes its in-flight
/// slots in this order, the narrowest limit first, so that requests with other parts never wait for
/// each other in a circle.
fn in_flight_order(parts: &[Part]) -> PerPart<usize> {
    let mut order: PerPart<usize> = (0..parts.len())
        .filter(|part| parts[*part].core.in_flight.is_some() && parts[*part].entry.cost > 0)
        .collect();
    order.sort_by_key(|part| {
        let Part { core, entry, .. } = &parts[*part];
        let limit = core.in_flight.as_ref().map(|calls| calls.limit());
        (limit, entry.key, core.id)
    });
    order
}

/// Makes the permit of a joint request.
fn permit<'a>(
    parts: impl Iterator<Item = PartRef<'a>>,
    slots: PerPart<Option<Reservation>>,
    in_flight: PerPart<Option<InFlightSlot>>,
) -> Permit {
    let mut in_flight = in_flight.into_iter();
    let mut permits = parts.zip(slots).map(|(part, slot)| {
        let in_flight = in_flight.next().flatten();
        JointPermit {
            permit: Permit::new(part.core.clone(), part.entry.key, slot, in_flight),
            host: part.entry.host,
        }
    });
    let first = permits.next().expect("a joint request has parts");
    let JointPermit { permit, host, .. } = first;
    permit.with(host, permits.collect())
}

impl PartRef<'_> {
    fn id_and_entry(&self) -> (CoreId, Entry) {
        (self.core.id, self.entry)
    }
}

impl Part {
    /// Returns the part of the permit of a layer around. `None` if its limiter was dropped.
    fn around(permit: &OuterPermit) -> Option<Self> {
        let &OuterPermit {
            core,
            key,
            cost,
            host,
            ..
        } = permit;
        let entry = Entry {
            key,
            cost,
            deadline: None,
            host,
        };
        Some(Part {
            core: core.find()?,
            entry,
        })
    }

    /// Returns whether two parts would count a request twice under one key.
    fn is_same(&self, other: &Part) -> bool {
        self.entry.key == other.entry.key
            && (self.core.id == other.core.id || self.has_store_of(other))
    }

    /// Returns the name of the key of part `index`. `first` is that of the first part.
    fn label(&self, index: usize, first: &Label) -> Label {
        if index == 0 {
            first.clone()
        } else {
            self.core.label(self.entry.key, None)
        }
    }
}

impl JointWaiter {
    /// Enters a request. The first `own` parts are its own, the others are of layers around.
    ///
    /// # Errors
    ///
    /// The error of a request that cannot wait.
    fn enter(
        parts: &[Part],
        own: usize,
        inside: Option<CallId>,
        deadline: Option<Instant>,
        label: Label,
        now: Instant,
    ) -> Result<Box<Self>, Limited> {
        let bound = WaitBound::new(deadline, now, max_wait(parts));
        if let Some((part, reason)) = unfit(parts, own, bound, now) {
            let refused = {
                let Part { core, .. } = &parts[part];
                RefusedRequest::new(parts[part].label(part, &label), core.settings.name, now)
            };
            return Err(refused.refuse(reason, Refusal::NEVER, now));
        }
        inquire_hosts(parts, now);
        let mut waiter = Box::new(JointWaiter {
            set: parts[0].core.joint.find(parts),
            number: next_number(),
            bound,
            stage: Stage::Done,
            in_flight: parts.iter().map(|_| None).collect(),
            since: now,
            turns: 0,
            label,
            own,
            inside,
        });
        match waiter.take_in_flight_slots(0, now) {
            Some((part, admission)) => Err(waiter.stopped(part, admission, now)),
            None => Ok(waiter),
        }
    }

    /// Waits again, in its old place, because `permit` expired before it could be used.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        self.in_flight = permit.return_slots();
        if self.inside.is_some() {
            give_up_outer();
        }
        self.enter_again(clock::now());
    }

    fn enter_again(&mut self, now: Instant) {
        self.turns += 1;
        if self.turns == 1 && self.bound.is_none {
            // `max_wait` is zero, so the request cannot wait. Its task ran too late, so the request
            // asks once more for permits that are due now.
            self.bound.latest = self.bound.latest.max(now);
        }
        self.stage = Stage::Slot;
        self.set.enter(self.number, self.bound, usize::MAX, now);
    }

    /// Takes the in-flight slots from the `next` one on. Then enters the queue of the set.
    ///
    /// Returns the admission that stops the request, and the part that does.
    fn take_in_flight_slots(&mut self, next: usize, now: Instant) -> Option<(usize, Admission)> {
        let order = in_flight_order(&self.set.parts[..self.own]);
        for (index, &part) in order.iter().enumerate().skip(next) {
            let Part { core, entry, .. } = &self.set.parts[part];
            let number = next_number();
            let impatient = self.bound.latest <= now;
            match in_flight_slot::enter(core, entry.key, number, impatient, now) {
                Ok(None) => {
                    self.stage = Stage::InFlight {
                        next: index,
                        number,
                        until: answer_by(self.bound.latest, now),
                    };
                    return None;
                }
                Ok(Some(settled)) => {
                    match admission::in_flight_slot_settled(core, entry.key, self.bound, settled) {
                        Ok(slot) => self.in_flight[part] = slot,
                        Err(stopped) => return Some((part, stopped)),
                    }
                }
                Err(_) => {
                    let reason = Reason::TooManyKeys(core.settings.max_keys);
                    return Some((part, Admission::Refused(reason, Refusal::NEVER)));
                }
            }
        }
        let queues = self
            .set
            .parts
            .iter()
            .map(|part| part.core.settings.max_queue);
        let max_queue = queues.min().unwrap_or(usize::MAX);
        self.stage = Stage::Slot;
        if self.set.enter(self.number, self.bound, max_queue, now) {
            return None;
        }
        self.stage = Stage::Done;
        let reason = Reason::QueueFull(max_queue);
        Some((0, Admission::Refused(reason, Refusal::NEVER)))
    }

    /// Watches the holds of all keys. Returns the latest end, and the part whose key it holds.
    ///
    /// A key whose hold is watched keeps its state. Otherwise the state of one key could be evicted
    /// for that of another one, and the slots of both would never be known at one moment.
    fn watch_holds(&self, now: Instant, cx: &Context<'_>) -> Option<(Instant, usize)> {
        let parts = self.set.parts.iter().enumerate();
        let ends = parts.flat_map(|(index, part)| {
            part.hold_keys().filter_map(move |key| {
                let left = holds::watch(&part.core, key, self.number, now, cx)?;
                Some((clock::after(now, left), index))
            })
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

    /// Returns whether the request may leave now with its slots: no slot has expired, the stores
    /// have confirmed them, and no key is on hold. A key on probation takes the request as its
    /// probe.
    fn may_leave(&self, slot: &JointSlot, now: Instant) -> bool {
        let is_in_time = slot.until.is_none_or(|until| now < until);
        is_in_time
            && doubtful(&self.set.parts, slot, now).is_empty()
            && self.set.parts.iter().all(|part| {
                let mut keys = part.hold_keys();
                keys.all(|key| holds::pass(&part.core, key, now).is_ok())
            })
    }

    /// Ends the wait with the permit.
    fn granted(&mut self, slot: JointSlot, now: Instant) -> Permit {
        self.stage = Stage::Done;
        self.turns += 1;
        if let Some((part, cause)) = &slot.uncounted {
            events::passed(&self.set.parts[*part].label(*part, &self.label), cause);
        }
        let parts = &self.set.parts;
        let mut slots = slot.slots;
        if let Some(call) = self.inside {
            outer::renew(slots.drain(self.own..), call);
        }
        let in_flight = std::mem::take(&mut self.in_flight);
        let own = parts[..self.own].iter().map(Part::as_ref);
        let mut permit = permit(own, slots, in_flight);
        if let Some(call) = self.inside {
            permit = permit.inside(call, outer::first_expiry());
        }
        let waited = now.saturating_duration_since(self.since);
        if waited.is_zero() {
            return permit;
        }
        events::waited(&self.label, waited, self.turns);
        permit.after(PastWait {
            label: self.label.clone(),
            waited,
            turns: self.turns,
            host: parts[0].entry.host,
        })
    }

    /// Ends the wait with an error.
    fn refused(&mut self, refusal: JointRefusal, now: Instant) -> Limited {
        let JointRefusal { part, cause } = refusal;
        let max_wait = max_wait(&self.set.parts);
        let reason = |refusal| Admission::Refused(self.bound.reason(max_wait), refusal);
        let admission = match cause {
            Cause::Wait(refusal) => reason(refusal),
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
            label: self.set.parts[part].label(part, &self.label),
            name: self.set.parts[part].core.settings.name,
            since: self.since,
            turns: self.turns,
        };
        match admission {
            Admission::Refused(reason, refusal) => request.refuse(reason, refusal, now),
            Admission::Failed(source) => request.fail(source, now),
            Admission::Granted { .. } | Admission::Uncounted { .. } | Admission::Waits { .. } => {
                unreachable!("no request is stopped by these")
            }
        }
    }

    fn poll_in_flight(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Limited>> {
        while let Stage::InFlight {
            next,
            number,
            until,
        } = self.stage
        {
            let now = clock::now();
            let part = in_flight_order(&self.set.parts[..self.own])[next];
            let Part { core, entry, .. } = &self.set.parts[part];
            let settled = ready!(in_flight_slot::poll(
                core, entry.key, number, until, now, cx
            ));
            self.stage = Stage::Done;
            if self.bound.is_none {
                // `max_wait` is zero, so the request waited only for the answer of the store.
                self.bound.latest = self.bound.latest.max(now);
            }
            let stopped =
                match admission::in_flight_slot_settled(core, entry.key, self.bound, settled) {
                    Ok(slot) => {
                        self.in_flight[part] = slot;
                        self.take_in_flight_slots(next + 1, now)
                    }
                    Err(stopped) => Some((part, stopped)),
                };
            if let Some((part, admission)) = stopped {
                return Poll::Ready(Err(self.stopped(part, admission, now)));
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Frees the place of the request, and gives up its in-flight slots.
    fn leave(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::InFlight { next, number, .. } => {
                let part = in_flight_order(&self.set.parts[..self.own])[next];
                let Part { core, entry, .. } = &self.set.parts[part];
                in_flight_slot::leave(core, entry.key, number);
            }
            Stage::Slot => self.set.leave(self.number),
            Stage::Done => {}
        }
        self.in_flight.iter_mut().for_each(|slot| *slot = None);
    }

    /// Polls for a joint slot with which the request may leave now. Returns it, and the moment.
    fn poll_slot(&mut self, cx: &mut Context<'_>) -> Poll<Result<(JointSlot, Instant), Limited>> {
        if let Err(limited) = ready!(self.poll_in_flight(cx)) {
            return Poll::Ready(Err(limited));
        }
        loop {
            let mut now = clock::now();
            let held = self.watch_holds(now, cx);
            if let Some((end, part)) = held
                && end > self.bound.latest
            {
                let left = end.saturating_duration_since(now);
                let refusal = Refusal::new(Some(left), None);
                let refusal = JointRefusal {
                    part,
                    cause: Cause::Held(refusal),
                };
                return Poll::Ready(Err(self.refused(refusal, now)));
            }
            let held_until = held.map(|(end, _)| end);
            let slot = match ready!(self.set.poll(self.number, held_until, &mut now, cx)) {
                Ok(slot) => slot,
                Err(refusal) => return Poll::Ready(Err(self.refused(refusal, now))),
            };
            if let Some(part) = self.lost_in_flight_slot(now) {
                self.set.give_back([slot]);
                let lost = Admission::Failed(StoreError::InFlightSlotLost);
                return Poll::Ready(Err(self.stopped(part, lost, now)));
            }
            if self.may_leave(&slot, now) {
                let parts = self.set.parts.iter().zip(&slot.slots);
                for (part, _) in parts.filter(|(_, slot)| slot.is_some()) {
                    part.as_ref().ended(now, true);
                }
                return Poll::Ready(Ok((slot, now)));
            }
            self.set.give_back([slot]);
            self.enter_again(now);
        }
    }

    /// Polls for the renewal of the permits of the layers around. Returns the call that uses them.
    pub(super) fn poll_renewal(&mut self, cx: &mut Context<'_>) -> Poll<Result<CallId, Limited>> {
        let (slot, _) = ready!(self.poll_slot(cx))?;
        self.stage = Stage::Done;
        let call = self.inside.unwrap_or_else(CallId::new);
        outer::renew(slot.slots.into_iter(), call);
        Poll::Ready(Ok(call))
    }

    fn unwatch_holds(&self) {
        for part in &self.set.parts {
            for key in part.hold_keys() {
                holds::leave(&part.core, key, self.number);
            }
        }
    }
}

impl Future for JointWaiter {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (slot, now) = ready!(self.poll_slot(cx))?;
        Poll::Ready(Ok(self.granted(slot, now)))
    }
}

impl Drop for JointWaiter {
    fn drop(&mut self) {
        self.leave();
        self.unwatch_holds();
    }
}
