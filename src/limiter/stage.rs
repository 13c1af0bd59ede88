//! What a waiter waits for.

use std::sync::Arc;
use std::time::Instant;

use super::admission::WaitFor;
use super::engine::Core;
use super::holds::{self, HoldWait};
use super::in_flight_slot;
use super::key_state::Ticket;
use super::queue::{Number, next_number};
use crate::clock;
use crate::key::Key;
use crate::wait_queue::answer_by;

/// What a waiter waits for: a [`WaitFor`], with the timer that it needs.
// Which stage can follow which:
//
// - HostHold => InFlightSlot | Slot | Hold | Done
// - InFlightSlot => Slot | Hold | Done
// - Slot, Hold => Done, and HostHold if the host was held meanwhile
// - Done => Slot, if the permit expired before it could be used
#[derive(Debug)]
pub(super) enum Stage {
    /// Waits until its host is not on hold. Requests to other hosts go on.
    HostHold(HoldWait),
    /// Waits for an in-flight slot, but not longer than `until`.
    InFlightSlot { number: Number, until: Instant },
    /// Waits for a slot, under the number of the ticket.
    Slot,
    /// Waits until its key is not on hold. Only for keys without limits of rates.
    Hold(HoldWait),
    /// Waits for nothing: the future is about to end, or has ended.
    Done,
}

impl Stage {
    /// Begins a wait. If the request waits for a slot or for a hold of its key, `ticket` gets the
    /// number of the wait.
    pub(super) fn begin(wait: WaitFor, ticket: &mut Ticket, now: Instant) -> Self {
        match wait {
            WaitFor::HostHold(end) => Stage::HostHold(HoldWait::new(end)),
            WaitFor::InFlightSlot(number) => Stage::InFlightSlot {
                number,
                until: answer_by(ticket.bound.latest, now),
            },
            WaitFor::Slot(number) => {
                ticket.number = number;
                Stage::Slot
            }
            WaitFor::Hold(end) => {
                if ticket.number == 0 {
                    ticket.number = next_number();
                }
                Stage::Hold(HoldWait::new(end))
            }
        }
    }

    /// Gives up the place of the waiter in the queue of this stage. The hold of a host has no place
    /// to give up: the waiter watches it in all stages.
    pub(super) fn leave(&self, core: &Arc<Core>, key: Key, ticket: &Ticket) {
        match *self {
            Stage::InFlightSlot { number, .. } => in_flight_slot::leave(core, key, number),
            Stage::Slot => {
                core.with_state(key, clock::now(), |state, ctx| ticket.leave(state, ctx));
            }
            Stage::Hold(_) => holds::leave(core, key, ticket.number),
            Stage::HostHold(_) | Stage::Done => {}
        }
    }
}
