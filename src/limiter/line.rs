//! Where a request waits for its slots: the queue of its key, or the set of requests with the same keys.
//!
//! Both have the same face. A request enters under its number, is told when its slots are due, and leaves or comes
//! back under the same number. What differs is how slots are booked: one call for all requests of a key, but
//! a search for each request of several keys.

use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use super::holds::Probe;
use super::joint::{self, JointSet};
use super::key_state::Ticket;
use super::part::{Costs, Part, PartRef, Slots};
use super::queue::Number;
use super::reservation::{NoSlot, Reservation, Stopped};
use crate::key::Key;
use crate::key_map::Full;
use crate::wait_queue::WaitBound;

/// Where a request waits for its slots.
#[derive(Debug)]
pub(super) enum RequestLine {
    /// The queue of its only key.
    Key(Part),
    /// Nowhere: the rates of its only key are not limited, or it costs nothing.
    NoRates(Part),
    /// The requests with the same keys.
    Set(Arc<JointSet>),
}

/// The place of a request in its line.
#[derive(Debug)]
pub(super) struct LinePlace {
    /// Its number in the line, and in those of its in-flight slots. It also watches holds under this number.
    pub(super) number: Number,
    pub(super) costs: Costs,
    pub(super) bound: WaitBound,
    /// The part for which a request of several keys counts as waiting, from its first time in the line on.
    pub(super) waits_for: Option<u8>,
}

impl LinePlace {
    /// The same place in the queue of the only key.
    fn ticket(&self) -> Ticket {
        Ticket::new(self.number, self.costs[0], self.bound)
    }
}

impl RequestLine {
    /// Returns the line of requests with these keys, of this kind if a key is under suspicion.
    pub(super) fn of(parts: &[PartRef<'_>], kind: Option<Key>) -> Self {
        match parts {
            [only] if only.core.has_rates() && only.entry.cost > 0 => {
                RequestLine::Key(only.to_part())
            }
            [only] => RequestLine::NoRates(only.to_part()),
            _ => RequestLine::Set(parts[0].core.joint.find(parts, kind)),
        }
    }

    pub(super) fn parts(&self) -> &[Part] {
        match self {
            RequestLine::Key(part) | RequestLine::NoRates(part) => std::slice::from_ref(part),
            RequestLine::Set(set) => &set.parts,
        }
    }

    /// Returns how many requests wait in the line.
    pub(super) fn waiting(&self) -> usize {
        match self {
            RequestLine::Key(Part { core, key, .. }) => {
                core.states.find(*key, |state| state.waiting()).unwrap_or(1)
            }
            RequestLine::NoRates(_) => 1,
            RequestLine::Set(set) => set.waiting(),
        }
    }

    /// Refuses a new request of several keys, if too many wait for the key that it would wait for, whatever their other
    /// keys are. The queue of a key looks itself.
    pub(super) fn check_room(&self, place: &LinePlace) -> Result<(), Stopped> {
        let RequestLine::Set(set) = self else {
            return Ok(());
        };
        let part = set.awaited(&place.costs);
        let Part { core, key, .. } = &set.parts[part];
        match core.full_queue(*key, place.costs[part]) {
            Some(max_queue) => Err(NoSlot::queue_full(max_queue).for_part(part)),
            None => Ok(()),
        }
    }

    /// Returns how many requests stop a new one although no store knows of them: see [`JointSet::unbooked`].
    pub(super) fn unbooked(&self) -> usize {
        match self {
            RequestLine::Key(_) | RequestLine::NoRates(_) => 0,
            RequestLine::Set(set) => set.unbooked(),
        }
    }

    /// Returns whether the line obeys the holds of its key: it hands out no slot meanwhile.
    pub(super) fn obeys_hold(&self) -> bool {
        matches!(self, RequestLine::Key(_))
    }

    /// Returns whether in-flight slots come first. The requests that could use them wait in the same queue, behind this
    /// one: but for those of another class, and those with further keys.
    pub(super) fn is_of_one_key(&self) -> bool {
        !matches!(self, RequestLine::Set(_))
    }

    /// Returns whether a request has a place in the line while a key is on hold. In the queue of a key it has none while
    /// its host is: requests to other hosts wait there, too.
    pub(super) fn has_place_on_hold(&self) -> bool {
        matches!(self, RequestLine::Set(_))
    }

    /// Returns whether the next slots of a request are due within the life of a permit, or may be.
    pub(super) fn is_near(&self, place: &LinePlace, now: Instant) -> bool {
        match self {
            // It keeps its in-flight slot in any case.
            RequestLine::Key(_) | RequestLine::NoRates(_) => true,
            RequestLine::Set(set) => set.is_near(place.number, &place.costs, now),
        }
    }

    /// Enters a request. One that `is_back` has waited before, and returns to its old place. Returns `None` if it
    /// waits. No slot before the end of a hold is of use: `held_until`.
    pub(super) fn enter(
        &self,
        place: &mut LinePlace,
        is_back: bool,
        held_until: Option<Instant>,
        now: Instant,
    ) -> Option<Result<Slots, Stopped>> {
        match self {
            RequestLine::Key(part) => {
                let ticket = place.ticket();
                let Part { core, key, .. } = part;
                let enter =
                    core.with_new_state(*key, now, |state, ctx| ticket.enter(state, ctx, is_back));
                let ended = match enter {
                    Ok(ended) => ended?,
                    Err(Full) => Err(NoSlot::Failed(core.full())),
                };
                Some(self.ended(ended, now))
            }
            RequestLine::NoRates(_) => Some(Ok(Slots::none(now))),
            RequestLine::Set(set) => {
                if !is_back && let Err(full) = self.check_room(place) {
                    return Some(Err(full));
                }
                set.enter(place.number, &place.costs, place.bound, is_back, now);
                // A store that replies at once decides here.
                let mut cx = Context::from_waker(Waker::noop());
                match self.poll(place, held_until, now, &mut cx) {
                    Poll::Ready(result) => Some(result),
                    Poll::Pending => {
                        if !is_back {
                            count_waiting(set, place, now);
                        }
                        None
                    }
                }
            }
        }
    }

    /// Polls the wait of a request.
    pub(super) fn poll(
        &self,
        place: &LinePlace,
        held_until: Option<Instant>,
        now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Slots, Stopped>> {
        match self {
            RequestLine::Key(part) => {
                let ticket = place.ticket();
                let Part { core, key, .. } = part;
                let poll = core.with_state(*key, now, |state, ctx| ticket.poll(state, ctx, cx));
                // Without a state, there was no room to make it anew when the request came back.
                let ended =
                    ready!(poll.unwrap_or_else(|| Poll::Ready(Err(NoSlot::Failed(core.full())))));
                Poll::Ready(self.ended(ended, now))
            }
            RequestLine::NoRates(_) => Poll::Ready(Ok(Slots::none(now))),
            RequestLine::Set(set) => set.poll(place.number, &place.costs, held_until, now, cx),
        }
    }

    /// Ends the wait of a request. A slot that it had goes to the next one.
    pub(super) fn leave(&self, place: &LinePlace, now: Instant) {
        match self {
            RequestLine::Key(Part { core, key, .. }) => {
                let ticket = place.ticket();
                core.with_state(*key, now, |state, ctx| ticket.leave(state, ctx));
            }
            RequestLine::NoRates(_) => {}
            RequestLine::Set(set) => set.leave(place.number, &place.costs),
        }
    }

    /// Ends what a request counts as, when it waits for nothing any more.
    pub(super) fn forget(&self, place: &LinePlace) {
        if let Some(part) = place.waits_for {
            let Part { core, key, .. } = &self.parts()[usize::from(part)];
            core.states.find(*key, |state| state.hold.leave_joint());
        }
    }

    /// Returns a request to its old place. It could not leave with its `slots`, if it had any.
    pub(super) fn come_back(&self, place: &LinePlace, slots: Option<Slots>, now: Instant) {
        match self {
            RequestLine::Key(Part { core, key, .. }) => {
                let ticket = place.ticket();
                let slot = slots.and_then(|slots| slots.slots.first().copied().flatten());
                let come_back = core.with_new_state(*key, now, |state, ctx| {
                    ticket.come_back(state, ctx, slot);
                });
                // If there is no room for the state of the key, the request has no place in the queue. Then
                // the next poll ends its wait.
                if let (Err(Full), Some(slot)) = (come_back, slot) {
                    core.give_back(*key, slot);
                }
            }
            RequestLine::NoRates(_) => {}
            RequestLine::Set(set) => {
                set.enter(place.number, &place.costs, place.bound, true, now);
                if let Some(slots) = slots {
                    set.give_up(slots);
                }
            }
        }
    }

    /// Gives slots back, for the next requests.
    pub(super) fn give_back(&self, slots: Slots) {
        joint::give_back(self.parts(), slots.slots);
    }

    /// Gives slots that are due back to the stores, for a request that asks for others when it has its in-flight
    /// slots.
    pub(super) fn give_back_to_stores(&self, slots: Slots) {
        for (Part { core, key, .. }, slot) in self.parts().iter().zip(slots.slots) {
            if let Some(slot) = slot {
                core.give_back_to_store(*key, slot);
            }
        }
    }

    /// Returns whether a request may leave with its slots, as far as the stores are known to have them.
    pub(super) fn is_confirmed(&self, slots: &Slots, now: Instant) -> bool {
        match self {
            // The queue hands out no others.
            RequestLine::Key(_) | RequestLine::NoRates(_) => true,
            RequestLine::Set(set) => joint::doubtful(&set.parts, slots, now).is_empty(),
        }
    }

    /// Takes in that a request leaves with its slots.
    pub(super) fn left(&self, slots: &Slots, now: Instant) {
        if let RequestLine::Set(set) = self {
            let parts = set.parts.iter().zip(&slots.slots);
            for (part, _) in parts.filter(|(_, slot)| slot.is_some()) {
                joint::ended(&part.core, part.key, now, true);
            }
        }
    }

    /// Returns what follows from the end of a wait in the queue of the only key.
    fn ended(&self, ended: Result<Reservation, NoSlot>, now: Instant) -> Result<Slots, Stopped> {
        match ended {
            Ok(slot) => Ok(Slots::of_one(slot)),
            Err(NoSlot::Uncounted(cause, probe)) => {
                let Part { core, key, .. } = &self.parts()[0];
                Ok(Slots {
                    uncounted: Some((0, cause)),
                    // It has waited for the answer of the store. The request knows whether a hold stopped it before.
                    is_at_once: true,
                    probe: probe.map(|number| Probe::new(core.id, *key, number)),
                    ..Slots::none(now)
                })
            }
            Err(no_slot) => Err(no_slot.for_part(0)),
        }
    }
}

/// Counts a request of several keys as waiting for one of them, until [`RequestLine::forget`].
fn count_waiting(set: &JointSet, place: &mut LinePlace, now: Instant) {
    let part = set.awaited(&place.costs);
    let Part { core, key, .. } = &set.parts[part];
    let counted = core.states.find(*key, |state| state.hold.enter_joint(now));
    place.waits_for = counted.and_then(|()| u8::try_from(part).ok());
}
