//! The first request of a layer that turns out to be inside of another one.

use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::start::{JointStarted, start_uncounted};
use super::{JointRequest, Part, PartRef, PerPart};
use crate::clock;
use crate::key::Label;
use crate::limiter::engine::Core;
use crate::limiter::limited::RefusedRequest;
use crate::limiter::outer;
use crate::stats::OpenRequest;

/// A request that waits until the permits of the layers around are known: see
/// [`outer`](crate::limiter::outer).
#[derive(Debug)]
pub(crate) struct UntilKnown {
    request: JointRequest,
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
                request: JointRequest::new(parts),
                deadline,
                label: label(),
                was_polled: false,
            })
        })
    }

    /// Returns the request for its error.
    pub(in crate::limiter) fn refused_request(&self) -> RefusedRequest {
        let limit = self.request.parts[0].limit_name();
        RefusedRequest::new(self.label.clone(), limit, clock::now())
    }

    /// Makes the request that waits, to be counted under its first key.
    pub(in crate::limiter) fn open_request(&self) -> OpenRequest<Core> {
        let Part { core, key, .. } = &self.request.parts[0];
        OpenRequest::new(core.clone(), *key, clock::now())
    }

    /// Enters the request, once the permits of the layers around are known.
    pub(in crate::limiter) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<JointStarted> {
        ready!(poll_known(&mut self.was_polled, cx));
        let parts: PerPart<PartRef<'_>> = self.request.refs().collect();
        Poll::Ready(start_uncounted(&parts, self.deadline, || {
            self.label.clone()
        }))
    }
}

/// Polls until the permits of the layers around are known. The layer around is notified, and makes
/// them known before it polls again. `was_polled` keeps whether it was notified.
pub(super) fn poll_known(was_polled: &mut bool, cx: &Context<'_>) -> Poll<()> {
    // A mark that is still there after the first poll is of a service that has panicked.
    if *was_polled {
        outer::remove_stale_mark();
    }
    if !*was_polled && outer::find_mark() {
        *was_polled = true;
        cx.waker().wake_by_ref();
        return Poll::Pending;
    }
    Poll::Ready(())
}
