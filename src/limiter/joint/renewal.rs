//! Renews the permits of the layers around, for a call that has no permit of a limiter itself.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::start::renew_outer;
use super::until_known::poll_known;
use super::waiter::JointWaiter;
use crate::clock;
use crate::error::Limited;
use crate::limiter::outer::{self, CallId, InnerCall, OuterPermit, UseOf};

/// A call that waits until the permits of the layers around are valid and unused: see
/// [`outer`](crate::limiter::outer).
#[derive(Debug)]
pub(crate) struct Renewal {
    deadline: Option<Instant>,
    /// Whether the layer around was notified, when this was polled first.
    was_polled: bool,
    waiter: Option<Box<JointWaiter>>,
}

/// A call inside of layers whose permits are valid and unused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Renewed {
    use_of: UseOf,
    /// When the first of their permits expires.
    until: Option<Instant>,
}

impl Renewal {
    /// Makes the renewal for a request with this deadline.
    pub(crate) fn new(deadline: Option<Instant>) -> Self {
        Renewal {
            deadline,
            was_polled: false,
            waiter: None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Renewed, Limited>> {
        loop {
            if let Some(waiter) = &mut self.waiter {
                let renewed = ready!(Pin::new(&mut **waiter).poll_renewal(cx));
                if let Err(limited) = &renewed {
                    waiter.report(limited);
                }
                return Poll::Ready(renewed.map(Renewed::new));
            }
            ready!(poll_known(&mut self.was_polled, cx));
            let call = CallId::new();
            if outer::use_all(call, clock::now()) {
                return Poll::Ready(Ok(Renewed::new(call)));
            }
            match renew_outer(self.deadline, call) {
                Ok(Some(waiter)) => self.waiter = Some(waiter),
                Ok(None) => return Poll::Ready(Ok(Renewed::new(call))),
                Err(limited) => return Poll::Ready(Err(limited)),
            }
        }
    }
}

impl Renewed {
    fn new(call: CallId) -> Self {
        Renewed {
            use_of: UseOf {
                call: Some(call),
                by: None,
            },
            until: outer::first_expiry(),
        }
    }

    /// Returns whether the call may still be sent.
    pub(crate) fn is_valid(&self) -> bool {
        self.until.is_none_or(|until| clock::now() < until)
    }

    /// Begins a call or poll of the inner service. Layers inside of it see that the permits of the
    /// layers around are for them, too.
    pub(crate) fn begin_inner(&self) -> InnerCall {
        let place = OuterPermit::place_of(self.use_of);
        InnerCall::publish(std::iter::once(place))
    }

    /// Ends a call or poll of the inner service.
    pub(crate) fn end_inner(&mut self, inner: &InnerCall) {
        if let Some(permit) = inner.changed().first() {
            self.use_of = permit.use_of;
        }
    }
}
