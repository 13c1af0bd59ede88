//! The wait of a request for its permit, whether it has one key or several.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use super::joint::{JointStarted, JointWaiter, UntilKnown};
use super::permit::Permit;
use super::waiter::Waiter;
use crate::error::Limited;

/// A request that waits. Dropping it frees its place in the queue.
#[derive(Debug)]
pub(crate) enum Waiting {
    /// A request of one key.
    One(Box<Waiter>),
    /// A joint request, which has several keys.
    Joint(Box<JointWaiter>),
    /// A request that waits until the permits of the layers around are known.
    Inside(Box<UntilKnown>),
}

impl Waiting {
    /// Waits again, in its old place in the queue, because `permit` expired before it could be
    /// used.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        match self {
            Waiting::One(waiter) => waiter.wait_again(permit),
            Waiting::Joint(waiter) => waiter.wait_again(permit),
            // Its permit is of a moment ago. If it has expired, the request has a new turn.
            Waiting::Inside(waiter) => waiter.begin_again(permit),
        }
    }
}

impl Future for Waiting {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut *self {
                Waiting::One(waiter) => return Pin::new(&mut **waiter).poll(cx),
                Waiting::Joint(waiter) => return Pin::new(&mut **waiter).poll(cx),
                Waiting::Inside(until_known) => match ready!(until_known.poll(cx)) {
                    JointStarted::Granted(permit) => return Poll::Ready(Ok(permit)),
                    JointStarted::Limited(limited) => return Poll::Ready(Err(limited)),
                    JointStarted::Waiting(waiter) => *self = Waiting::Joint(waiter),
                },
            }
        }
    }
}
