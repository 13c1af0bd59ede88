//! Permits of several keys that are at hand, and the permit that has them all.

use std::time::Instant;

use super::{PartRef, PerPart, give_back_of};
use crate::limiter::admission::Entry;
use crate::limiter::in_flight_slot::InFlightSlot;
use crate::limiter::outer;
use crate::limiter::permit::{JointPermit, Permit};
use crate::limiter::reservation::Reservation;
use crate::limiter::start::take_at_once;

/// Takes permits that are at hand, of all parts or of none, and adds them to `slots`. Returns whether
/// it took them: not if a part has none, or if requests with these parts wait.
// The list is not returned: its 300 bytes would be copied.
pub(super) fn take_all_at_once(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    now: Instant,
    slots: &mut PerPart<Option<Reservation>>,
) -> bool {
    if parts[0].core.joint.is_any_waiting(parts) {
        return false;
    }
    for part in parts {
        let entry = Entry {
            deadline,
            ..part.entry
        };
        match take_at_once(part.core, &entry, now) {
            Ok(slot) => slots.push(slot),
            Err(_) => {
                give_back_of(parts.iter().copied(), std::mem::take(slots));
                return false;
            }
        }
    }
    true
}

/// Makes the permit of a joint request.
pub(super) fn permit<'a>(
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

/// Gives back the unused permits of the layers around, which are about to be acquired anew.
pub(super) fn give_up_outer() {
    for (core, key, slot) in outer::take_unused() {
        if let Some(core) = core.find() {
            core.give_back(key, slot);
        }
    }
}
