//! The wait of a request for its permit, whether it has one key or several.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::engine::Core;
use super::joint::JointWaiter;
use super::taken::Taken;
use super::waiter::Waiter;
use crate::clock;
use crate::error::{Limited, Reason};
use crate::stats::OpenRequest;
use crate::store::Refusal;

/// A request that waits. Dropping it frees its place in the queue.
///
/// The request counts as refused when this returns an error. If it may leave, the owner calls
/// [`leave`](Waiting::leave): what it has may expire before.
#[derive(Debug)]
pub(crate) struct Waiting {
    wait: Wait,
    /// Boxed, because the future of a request that passes at once has the room for it, too.
    open: Box<OpenRequest<Core>>,
}

#[derive(Debug)]
enum Wait {
    /// A request of one key.
    One(Box<Waiter>),
    /// A joint request, which has several keys.
    Joint(Box<JointWaiter>),
}

impl Waiting {
    /// Makes the wait of a request of one key.
    pub(crate) fn one(waiter: Box<Waiter>) -> Self {
        let open = waiter.open_request();
        Waiting {
            wait: Wait::One(waiter),
            open: Box::new(open),
        }
    }

    /// Makes the wait of a joint request.
    pub(crate) fn joint(waiter: Box<JointWaiter>) -> Self {
        let open = waiter.open_request();
        Waiting {
            wait: Wait::Joint(waiter),
            open: Box::new(open),
        }
    }

    /// Lets the request leave with what it has, and counts it. Returns `None` if that has expired, or if the
    /// limiter is drained: then the request waits again, in its old place.
    pub(crate) fn leave(&mut self, taken: Taken) -> Option<Taken> {
        if taken.is_valid() && !self.open.is_drained() {
            self.open.left(taken.outcome());
            return Some(taken);
        }
        match &mut self.wait {
            Wait::One(waiter) => waiter.wait_again(taken),
            Wait::Joint(waiter) => waiter.wait_again(taken),
        }
        None
    }

    /// Refuses the request, which waits no longer, and counts it.
    #[cold]
    pub(crate) fn refuse(&mut self, reason: Reason) -> Limited {
        let limited = self.refused_for(reason);
        self.open.refused(&limited);
        limited
    }

    /// Returns the error of a request that is refused.
    #[cold]
    fn refused_for(&self, reason: Reason) -> Limited {
        let request = match &self.wait {
            Wait::One(waiter) => waiter.refused_request(),
            Wait::Joint(waiter) => waiter.refused_request(),
        };
        request.refuse(reason, Refusal::NEVER, clock::now())
    }

    fn poll_permit(&mut self, cx: &mut Context<'_>) -> Poll<Result<Taken, Limited>> {
        match &mut self.wait {
            Wait::One(waiter) => Pin::new(&mut **waiter).poll(cx),
            Wait::Joint(waiter) => Pin::new(&mut **waiter).poll(cx),
        }
    }
}

impl Future for Waiting {
    type Output = Result<Taken, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.open.poll_drained(cx).is_ready() {
            return Poll::Ready(Err(self.refuse(Reason::Draining)));
        }
        let result = ready!(self.poll_permit(cx));
        let result = result.map_err(|limited| self.open.as_drained(limited));
        if let Err(limited) = &result {
            self.open.refused(limited);
        }
        Poll::Ready(result)
    }
}
