//! The start of a joint request: it gets its permits at once, or waits.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::at_once::{take_all_at_once, taken};
use super::waiter::JointWaiter;
use super::{JointRequest, PartRef, PerPart};
use crate::clock;
use crate::error::Limited;
use crate::key::Label;
use crate::limiter::reservation::Counting;
use crate::limiter::taken::Taken;
use crate::stats::{Gate, Outcome};

/// What a joint request gets when it enters.
pub(crate) enum JointStarted {
    Granted(Taken),
    Waiting(Box<JointWaiter>),
    Limited(Limited),
}

/// Enters a joint request, and counts it unless it waits. `label` is the name of its first key.
pub(crate) fn start(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: impl FnOnce() -> Label,
) -> JointStarted {
    let now = clock::now_by_counter();
    let mut slots = PerPart::new();
    if take_all_at_once(parts, deadline, Counting::Request, now, &mut slots) {
        let parts = parts.iter().copied();
        let taken = taken(parts, slots, PerPart::new(), Vec::new());
        return JointStarted::Granted(taken.counted());
    }
    start_slow(parts, deadline, label())
}

/// Counts a joint request that did not wait, under its first key.
fn count(first: &PartRef<'_>, started: &JointStarted) {
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

/// Enters a joint request for which no permits are at hand.
#[cold]
pub(super) fn start_slow(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    label: Label,
) -> JointStarted {
    let request = JointRequest::new(parts);
    let started = match JointWaiter::enter(&request, deadline, label, clock::now()) {
        Ok(mut waiter) => {
            // A store that replies at once decides here.
            let mut cx = Context::from_waker(Waker::noop());
            match Pin::new(&mut *waiter).poll(&mut cx) {
                Poll::Ready(Ok(taken)) => JointStarted::Granted(taken),
                Poll::Ready(Err(limited)) => JointStarted::Limited(limited),
                Poll::Pending => {
                    waiter.note_wait();
                    JointStarted::Waiting(waiter)
                }
            }
        }
        Err(limited) => JointStarted::Limited(limited),
    };
    count(&parts[0], &started);
    started
}
