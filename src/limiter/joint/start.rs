//! The start of a joint request: it gets its permits at once, or waits.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use super::at_once::{give_up_outer, permit, take_all_at_once};
use super::waiter::JointWaiter;
use super::{Part, PartRef, PerPart, give_back_of, to_parts};
use crate::clock;
use crate::error::Limited;
use crate::events;
use crate::key::Label;
use crate::limiter::admission::Entry;
use crate::limiter::outer::{self, CallId, OuterPermit};
use crate::limiter::permit::Permit;

/// What a joint request gets when it enters.
pub(crate) enum JointStarted {
    Granted(Permit),
    Waiting(Box<JointWaiter>),
    Limited(Limited),
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
    let mut slots = PerPart::new();
    if take_all_at_once(parts, deadline, now, &mut slots) {
        let parts = parts.iter().copied();
        return JointStarted::Granted(permit(parts, slots, PerPart::new()));
    }
    let parts = to_parts(parts);
    start_slow(&parts, parts.len(), None, deadline, label(), now)
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
    let mut slots = PerPart::new();
    if take_all_at_once(parts, deadline, now, &mut slots) {
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

#[cold]
pub(super) fn start_slow(
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
            waiter.note_wait();
            JointStarted::Waiting(waiter)
        }
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
}
