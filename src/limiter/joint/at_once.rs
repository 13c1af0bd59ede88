//! Permits of several keys that are at hand, and the record that has them all.

use std::time::Instant;

use super::{PartRef, PerPart, give_back_of};
use crate::clock::Moment;
use crate::limiter::around;
use crate::limiter::counting;
use crate::limiter::entry::Entry;
use crate::limiter::in_flight_slot::InFlightSlot;
use crate::limiter::probe::Probe;
use crate::limiter::reservation::{Counting, Reservation};
use crate::limiter::start::take_counting;
use crate::limiter::taken::{OfKey, Taken};

/// Takes permits that are at hand, of all parts or of none, and adds them to `slots`. Returns whether
/// it took them: not if a part has none, if requests with these parts wait, or if a layer may be around.
///
/// The units of all parts are counted. `counting` says whether the request is counted, under its first
/// key. That key is the last that is asked, so that no request is counted that does not leave.
// The list is not returned: its 300 bytes would be copied.
pub(super) fn take_all_at_once(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    counting: Counting,
    now: Moment,
    slots: &mut PerPart<Option<Reservation>>,
) -> bool {
    if around::is_any() || parts[0].core.joint.is_any_waiting(parts) {
        return false;
    }
    let take = |part: &PartRef<'_>, counting| {
        let entry = Entry {
            deadline,
            ..part.entry
        };
        take_counting(part.core, &entry, counting, now)
    };
    slots.push(None);
    for part in &parts[1..] {
        match take(part, Counting::Units) {
            Some(slot) => slots.push(slot),
            None => {
                give_up_at_once(parts, std::mem::take(slots));
                return false;
            }
        }
    }
    match take(&parts[0], counting) {
        Some(slot) => slots[0] = slot,
        None => {
            give_up_at_once(parts, std::mem::take(slots));
            return false;
        }
    }
    true
}

/// Gives back permits that [`take_all_at_once`] took.
fn give_up_at_once(parts: &[PartRef<'_>], slots: PerPart<Option<Reservation>>) {
    for (part, slot) in parts.iter().zip(&slots) {
        counting::give_back_units(part.core, slot.as_ref());
    }
    give_back_of(parts.iter().map(PartRef::core_and_key), slots);
}

/// Makes the record of what a joint request has.
pub(super) fn taken<'a>(
    parts: impl Iterator<Item = PartRef<'a>>,
    slots: PerPart<Option<Reservation>>,
    in_flight: PerPart<Option<InFlightSlot>>,
    probes: Vec<Probe>,
) -> Taken {
    let mut in_flight = in_flight.into_iter();
    let mut all = parts.zip(slots).map(|(part, slot)| {
        let Entry { key, host, .. } = part.entry;
        let in_flight_slot = in_flight.next().flatten();
        OfKey::new(part.core.clone(), key, host, slot, in_flight_slot)
    });
    let first = all.next().expect("a joint request has parts");
    Taken::of_all(first, all.collect(), probes)
}
