//! The wait of a request for its permit, whether it has one key or several.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::joint::JointWaiter;
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
}

impl Waiting {
    /// Waits again, in its old place in the queue, because `permit` expired before it could be
    /// used.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        match self {
            Waiting::One(waiter) => waiter.wait_again(permit),
            Waiting::Joint(waiter) => waiter.wait_again(permit),
        }
    }
}

impl Future for Waiting {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Waiting::One(waiter) => Pin::new(&mut **waiter).poll(cx),
            Waiting::Joint(waiter) => Pin::new(&mut **waiter).poll(cx),
        }
    }
}
