//! The in-flight slots of a request.

use std::task::{Context, Poll, ready};
use std::time::Instant;

use smallvec::SmallVec;

use super::{Request, WaitStage};
use crate::key_map::Full;
use crate::limiter::in_flight_slot::{self, InFlightSlot};
use crate::limiter::line::LinePlace;
use crate::limiter::part::{Part, PartRef, Slots};
use crate::limiter::queue::Number;
use crate::limiter::reservation::{NoSlot, Stopped};
use crate::wait_queue::WaitBound;

/// What a request has of a limit of calls in flight.
#[derive(Debug)]
pub(super) struct InFlightPart {
    pub(super) part: usize,
    pub(super) grant: InFlightGrant,
}

#[derive(Debug)]
pub(super) enum InFlightGrant {
    /// It lacks its slot.
    Missing,
    Slot(InFlightSlot),
    /// It passes without a slot, because the store failed.
    Uncounted,
}

impl InFlightPart {
    fn is_missing(&self) -> bool {
        matches!(self.grant, InFlightGrant::Missing)
    }

    /// Takes the slot, if the request has one.
    pub(super) fn take_slot(&mut self) -> Option<InFlightSlot> {
        match std::mem::replace(&mut self.grant, InFlightGrant::Missing) {
            InFlightGrant::Slot(slot) => Some(slot),
            InFlightGrant::Missing | InFlightGrant::Uncounted => None,
        }
    }
}

/// Returns the parts with limits of calls in flight, the narrowest limit first: so requests with other parts never wait
/// for each other in a circle. A limit that is set while a request waits does not change the order.
pub(super) fn in_flight_of(parts: &[PartRef<'_>]) -> SmallVec<[InFlightPart; 1]> {
    let limited = parts.iter().enumerate();
    let limited = limited.filter(|(_, part)| part.core.in_flight.is_some() && part.entry.cost > 0);
    let mut all: SmallVec<[_; 1]> = limited
        .map(|(part, _)| InFlightPart {
            part,
            grant: InFlightGrant::Missing,
        })
        .collect();
    all.sort_by_key(|of_part| {
        let PartRef { core, entry } = &parts[of_part.part];
        // All classes of a divided quota have the key in common.
        let key = core.whole(entry.key);
        (core.settings.spec.quota().most_in_flight(), key, core.id)
    });
    all
}

impl Request {
    /// Returns the first part whose in-flight slot the request lacks.
    pub(super) fn lacks(&self) -> Option<&Part> {
        self.missing()
            .map(|index| &self.parts()[self.in_flight[index].part])
    }

    /// Refuses the request if too many wait for one of its in-flight slots.
    pub(super) fn check_room_in_flight(&self) -> Result<(), Stopped> {
        for &InFlightPart { part, .. } in &self.in_flight {
            let of_part = &self.parts()[part];
            let Part { core, key, .. } = of_part;
            if waiting_in_flight(of_part) >= core.settings.max_queue {
                let no_slot = in_flight_slot::queue_full(core, *key);
                return Err(no_slot.for_part(part));
            }
        }
        Ok(())
    }

    /// Takes the in-flight slots that the request lacks. Ready with the `slots` that are due, if it has some and keeps them.
    /// Otherwise it waits for the first that it lacks.
    ///
    /// It keeps its slots while the store answers once, until they expire. If that brings no in-flight slot, they go back
    /// and it waits on.
    pub(super) fn take_in_flight_slots(
        &mut self,
        mut slots: Option<Slots>,
        now: Instant,
    ) -> Poll<Result<Option<Slots>, Stopped>> {
        let LinePlace { number, bound, .. } = self.place;
        let latest = bound.patient_until;
        let can_wait = now < latest;
        while let Some(index) = self.missing() {
            let part = self.in_flight[index].part;
            let Part { core, key, .. } = &self.parts()[part];
            // While it keeps its slots, it waits for the answer of a store alone.
            let asks_once = can_wait && slots.is_some();
            let impatient = !can_wait || asks_once;
            // The room was looked at before, and other threads may have taken it. A request that has waited keeps its
            // place. If it asks once, it needs no room.
            let takes_room = !self.waited_before && !asks_once;
            let max_queue = takes_room.then_some(core.settings.max_queue);
            let entered = in_flight_slot::enter(core, *key, number, impatient, max_queue, now);
            let ended = entered.unwrap_or_else(|Full| Some(Err(NoSlot::Failed(core.full()))));
            let Some(ended) = ended else {
                if !asks_once {
                    self.waited_before = true;
                    // Requests that wait for a narrower limit keep nothing of a wider one, or they would wait in a circle.
                    for later in &mut self.in_flight[index + 1..] {
                        later.grant = InFlightGrant::Missing;
                    }
                }
                let expire = slots.as_ref().and_then(|slots| slots.until);
                self.stage = WaitStage::InFlight {
                    until: match expire.filter(|_| asks_once) {
                        Some(expire) => expire.min(latest),
                        None => bound.answered_by(now),
                    },
                    slots: slots.map(Box::new),
                };
                return Poll::Pending;
            };
            slots = self.in_flight_ended(index, ended, slots, now)?;
        }
        Poll::Ready(Ok(slots))
    }

    /// Polls for the in-flight slot that the request waits for. Ready with the slots that it has kept meanwhile.
    pub(super) fn poll_in_flight(
        &mut self,
        until: Instant,
        now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Slots>, Stopped>> {
        let Some(index) = self.missing() else {
            return Poll::Ready(Ok(None));
        };
        let Part { core, key, .. } = &self.parts()[self.in_flight[index].part];
        let number = self.place.number;
        let ended = ready!(in_flight_slot::poll(core, *key, number, until, now, cx));
        let slots = match std::mem::replace(&mut self.stage, WaitStage::Nothing) {
            WaitStage::InFlight { slots, .. } => slots.map(|slots| *slots),
            _ => None,
        };
        let slots = self.in_flight_ended(index, ended, slots, now)?;
        self.waited_for_answer(now);
        Poll::Ready(Ok(slots))
    }

    /// Returns the first in-flight slot that the request lacks.
    fn missing(&self) -> Option<usize> {
        self.in_flight.iter().position(InFlightPart::is_missing)
    }

    /// Takes in how the request for an in-flight slot has ended. Returns the `slots` of the request. It has none, and still
    /// lacks the in-flight slot, if it has asked once and can wait for it without them.
    fn in_flight_ended(
        &mut self,
        index: usize,
        ended: Result<Number, NoSlot>,
        mut slots: Option<Slots>,
        now: Instant,
    ) -> Result<Option<Slots>, Stopped> {
        let LinePlace { bound, .. } = self.place;
        let is_refused = matches!(ended, Err(NoSlot::TooLate(_)));
        if let Some(slots) = slots.take_if(|_| is_refused && bound.patience_ends(now).is_some()) {
            self.turns += 1;
            self.line.give_back_to_stores(slots);
            return Ok(None);
        }
        let part = self.in_flight[index].part;
        match grant_of(&self.parts()[part], bound, ended) {
            Ok(grant) => {
                self.in_flight[index].grant = grant;
                Ok(slots)
            }
            Err(no_slot) => {
                if let Some(slots) = slots {
                    self.line.give_back(slots);
                }
                Err(no_slot.for_part(part))
            }
        }
    }

    /// Gives up the in-flight slots that the store may have granted to other calls, while the request waited for its
    /// slots.
    pub(super) fn give_up_lost_slots(&mut self, now: Instant) {
        for of_part in &mut self.in_flight {
            if let InFlightGrant::Slot(slot) = &of_part.grant
                && slot.is_lost(now)
            {
                of_part.grant = InFlightGrant::Missing;
            }
        }
    }

    pub(super) fn give_up_in_flight_slots(&mut self) {
        for of_part in &mut self.in_flight {
            of_part.grant = InFlightGrant::Missing;
        }
    }
}

/// Returns how many requests wait for the in-flight slots of a part.
pub(super) fn waiting_in_flight(Part { core, key, .. }: &Part) -> usize {
    let calls = core.in_flight.as_ref();
    calls.map_or(0, |calls| calls.waiting(core.whole(*key)))
}

/// Returns what a request got of the limit of calls in flight of a part.
fn grant_of(
    Part { core, key, .. }: &Part,
    bound: WaitBound,
    ended: Result<Number, NoSlot>,
) -> Result<InFlightGrant, NoSlot> {
    match ended {
        Ok(number) => {
            let slot = InFlightSlot::new(core.clone(), *key, number);
            Ok(InFlightGrant::Slot(slot))
        }
        Err(NoSlot::Failed(error)) if core.fails_open_on(&error) => Ok(InFlightGrant::Uncounted),
        Err(NoSlot::TooLate(_)) => {
            let refusal = in_flight_slot::refusal(core, *key);
            Err(NoSlot::Refused(bound.reason(), refusal))
        }
        Err(no_slot) => Err(no_slot),
    }
}
