//! The entrance of the joint requests of a layer.

use std::time::Instant;

use super::at_once::take_all_at_once;
use super::start::{JointStarted, start, start_slow};
use super::{PartRef, PerPart};
use crate::clock;
use crate::key::Label;
use crate::limiter::engine::CoreId;
use crate::limiter::entry::Entry;
use crate::limiter::reservation::Counting;
use crate::limiter::sent::Sent;

/// What a request of a layer gets when it enters.
pub(crate) enum Entered {
    /// The request is sent at once, with permits at hand.
    Sent(Sent),
    Started(JointStarted),
}

/// Enters the request of a layer. `label` is the name of its first key.
pub(crate) fn enter(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl Fn() -> Label,
) -> Entered {
    if parts[0].core.settings.settles {
        return Entered::Started(start(parts, deadline, label));
    }
    // No `Permit` is made.
    let now = clock::now_by_counter();
    if take_all_at_once(parts, deadline, Counting::Request, now, &mut PerPart::new()) {
        let parts = parts.iter().map(PartRef::id_and_entry);
        return Entered::Sent(Sent::all_at_once(parts, now));
    }
    Entered::Started(start_slow(parts, deadline, label()))
}

impl PartRef<'_> {
    fn id_and_entry(&self) -> (CoreId, Entry) {
        (self.core.id, self.entry)
    }
}
