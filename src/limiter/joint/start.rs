//! The start of a joint request: it gets its permits at once, or waits.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use super::at_once::{give_up_at_once, give_up_outer, take_all_at_once, take_outer, taken};
use super::waiter::JointWaiter;
use super::{JointRequest, JointSlot, Part, PartRef, PerPart, give_back};
use crate::clock;
use crate::error::Limited;
use crate::events;
use crate::key::Label;
use crate::limiter::outer::{self, CallId, OuterPermit};
use crate::limiter::quotas::QuotaId;
use crate::limiter::reservation::Counting;
use crate::limiter::taken::Taken;
use crate::stats::{Gate, Outcome};

/// What a joint request gets when it enters.
pub(crate) enum JointStarted {
    Granted(Taken),
    Waiting(Box<JointWaiter>),
    Limited(Limited),
}

/// What a request has from the layers around it.
pub(super) struct Inside {
    call: CallId,
    /// Their permits, one slot for each part.
    brought: Option<JointSlot>,
}

/// Enters a joint request, and counts it unless it waits. `label` is the name of its first key.
pub(crate) fn start(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl FnOnce() -> Label,
) -> JointStarted {
    match begin(parts, deadline, Counting::Request, label) {
        (started, true) => started,
        (started, false) => {
            count(&parts[0], &started);
            started
        }
    }
}

/// Enters a joint request, which the caller counts.
pub(super) fn start_uncounted(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl FnOnce() -> Label,
) -> JointStarted {
    begin(parts, deadline, Counting::Units, label).0
}

/// Enters a joint request. Returns whether `counting` was done: it is for permits at hand.
fn begin(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    counting: Counting,
    label: impl FnOnce() -> Label,
) -> (JointStarted, bool) {
    if outer::are_known() {
        return (start_inside(parts, deadline, label), false);
    }
    let now = clock::now_by_counter();
    let mut slots = PerPart::new();
    if take_all_at_once(parts, deadline, counting, now, &mut slots) {
        let parts = parts.iter().copied();
        let taken = taken(parts, slots, PerPart::new(), Vec::new());
        return (JointStarted::Granted(taken.counted()), true);
    }
    let request = JointRequest::new(parts);
    let started = start_slow(&request, parts.len(), None, deadline, label());
    (started, false)
}

/// Counts a joint request that did not wait, under its first key.
pub(super) fn count(first: &PartRef<'_>, started: &JointStarted) {
    let PartRef { core, entry } = first;
    match started {
        JointStarted::Granted(taken) if taken.is_uncounted() => {
            core.count(entry.key, Outcome::Uncounted);
        }
        JointStarted::Granted(_) => core.count(entry.key, Outcome::Passed),
        JointStarted::Limited(limited) => core.refused(entry.key, limited),
        JointStarted::Waiting(_) => {}
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
    let now = clock::now_by_counter();
    let mut slots = PerPart::new();
    if take_all_at_once(parts, deadline, Counting::Units, now, &mut slots) {
        if outer::use_all(call, now.instant()) {
            let taken = taken(parts.iter().copied(), slots, PerPart::new(), Vec::new());
            let taken = taken.counted().inside(call, outer::first_expiry());
            return JointStarted::Granted(taken);
        }
        give_up_at_once(parts, slots);
    }
    let mut all = JointRequest::new(parts);
    all.add_outer();
    let brought = take_outer(&all, parts.len(), call);
    let inside = Some(Inside { call, brought });
    start_slow(&all, parts.len(), inside, deadline, label())
}

/// Begins to renew the permits of the layers around, for the call `call`. Returns `None` if there
/// are none.
pub(super) fn renew_outer(
    deadline: Option<Instant>,
    call: CallId,
) -> Result<Option<Box<JointWaiter>>, Limited> {
    let mut all = JointRequest::new(&[]);
    all.add_outer();
    let Some(Part { core, key, .. }) = all.parts.first() else {
        return Ok(None);
    };
    let label = core.label(*key, None);
    give_up_outer(call);
    let entered = JointWaiter::enter(&all, 0, Some(call), deadline, label, clock::now());
    if let Err(limited) = &entered {
        events::limited(&core.settings.tally, limited);
    }
    entered.map(Some)
}

#[cold]
pub(super) fn start_slow(
    request: &JointRequest,
    own: usize,
    inside: Option<Inside>,
    deadline: Option<Instant>,
    label: Label,
) -> JointStarted {
    let (call, brought) = match inside {
        Some(Inside { call, brought }) => (Some(call), brought),
        None => (None, None),
    };
    let mut waiter = match JointWaiter::enter(request, own, call, deadline, label, clock::now()) {
        Ok(waiter) => waiter,
        Err(limited) => {
            if let Some(brought) = brought {
                give_back(&request.parts, brought.slots);
            }
            return JointStarted::Limited(limited);
        }
    };
    if let Some(brought) = brought {
        waiter.bring(brought);
    }
    // A store that replies at once decides here.
    let mut cx = Context::from_waker(std::task::Waker::noop());
    match Pin::new(&mut *waiter).poll(&mut cx) {
        Poll::Ready(Ok(taken)) => JointStarted::Granted(taken),
        Poll::Ready(Err(limited)) => JointStarted::Limited(limited),
        Poll::Pending => {
            waiter.note_wait();
            JointStarted::Waiting(waiter)
        }
    }
}

impl JointRequest {
    /// Adds the keys of the layers around whose limiters exist.
    fn add_outer(&mut self) {
        for permit in outer::all() {
            let OuterPermit {
                core,
                key,
                cost,
                host,
                ..
            } = permit;
            if let Some(core) = core.find() {
                self.parts.push(Part {
                    core,
                    key,
                    host,
                    quota: QuotaId::NONE,
                });
                self.costs.push(cost);
            }
        }
    }
}
