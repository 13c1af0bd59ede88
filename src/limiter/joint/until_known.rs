//! The first request of a layer that turns out to be inside of another one.

use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::start::{JointStarted, start};
use super::{Part, PartRef, PerPart, to_parts};
use crate::key::Label;
use crate::limiter::outer;
use crate::limiter::permit::Permit;

/// A request that waits until the permits of the layers around are known: see
/// [`outer`](crate::limiter::outer).
#[derive(Debug)]
pub(crate) struct UntilKnown {
    parts: PerPart<Part>,
    deadline: Option<Instant>,
    label: Label,
    /// Whether the layer around was notified again, when this was polled first.
    was_polled: bool,
}

impl UntilKnown {
    /// Makes the wait of a request of `parts`. `label` is the name of its first key. Returns `None`
    /// if the permits are known, or if no layer is around.
    pub(in crate::limiter) fn of(
        parts: &[PartRef<'_>],
        deadline: Option<Instant>,
        label: impl FnOnce() -> Label,
    ) -> Option<Box<Self>> {
        (outer::is_any() && outer::find_mark()).then(|| {
            Box::new(UntilKnown {
                parts: to_parts(parts),
                deadline,
                label: label(),
                was_polled: false,
            })
        })
    }

    /// Enters the request, once the permits of the layers around are known.
    pub(in crate::limiter) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<JointStarted> {
        ready!(poll_known(&mut self.was_polled, cx));
        let parts: PerPart<PartRef<'_>> = self.parts.iter().map(Part::as_ref).collect();
        Poll::Ready(start(&parts, self.deadline, || self.label.clone()))
    }

    /// Gives back a permit that has expired. The request enters again when it is polled.
    pub(in crate::limiter) fn begin_again(&mut self, permit: Permit) {
        permit.give_back();
    }
}

/// Polls until the permits of the layers around are known. The layer around is notified, and makes
/// them known before it polls again. `was_polled` keeps whether it was notified.
pub(super) fn poll_known(was_polled: &mut bool, cx: &Context<'_>) -> Poll<()> {
    // A mark that is still there after the first poll is of a service that has panicked.
    if !*was_polled && outer::find_mark() {
        *was_polled = true;
        cx.waker().wake_by_ref();
        return Poll::Pending;
    }
    Poll::Ready(())
}
