//! The future that [`Limiter::acquire`](crate::Limiter::acquire) returns.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::admission::Entry;
use super::engine::Core;
use super::permit::Permit;
use super::start::{self, Started};
use super::waiter::Waiter;
use crate::error::Limited;
use crate::key::Key;

/// The future of a [`Permit`], with setters for the cost and the deadline of the request.
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it, and describes its errors and cancel
/// safety.
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Acquire(Step);

// New => Waiting | Done
// Waiting => Done
#[derive(Debug)]
enum Step {
    New(Arc<Core>, Request),
    Waiting(Box<Waiter>),
    Done,
}

/// A request that has not entered.
#[derive(Clone, Copy, Debug)]
struct Request {
    key: Key,
    cost: u32,
    deadline: Option<Instant>,
}

impl Acquire {
    /// Makes the future of a request of `key` that takes one unit.
    pub(super) fn new(core: Arc<Core>, key: Key) -> Self {
        Acquire(Step::New(
            core,
            Request {
                key,
                cost: 1,
                deadline: None,
            },
        ))
    }

    /// Sets how many units of each limit the request takes. Default: 1. A request of cost 0 passes
    /// at once, even if its key is on hold.
    ///
    /// Has no effect once the future was polled.
    pub fn cost(mut self, cost: u32) -> Self {
        if let Step::New(_, request) = &mut self.0 {
            request.cost = cost;
        }
        self
    }

    /// Sets the moment by which the request must leave. Default: none.
    /// [`max_wait`](crate::RateLimitBuilder::max_wait) limits the wait as well.
    ///
    /// Has no effect once the future was polled.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        if let Step::New(_, request) = &mut self.0 {
            request.deadline = Some(deadline);
        }
        self
    }
}

impl Future for Acquire {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                &mut Step::New(
                    ref core,
                    Request {
                        key,
                        cost,
                        deadline,
                    },
                ) => {
                    let entry = Entry {
                        key,
                        cost,
                        deadline,
                        host: None,
                    };
                    // The common case makes its permit here. By way of `Started`, the permit would
                    // be copied twice.
                    let taken = start::take_at_once(core, &entry);
                    let Step::New(core, _) = mem::replace(&mut self.0, Step::Done) else {
                        continue;
                    };
                    let now = match taken {
                        Ok(slot) => return Poll::Ready(Ok(Permit::new(core, key, slot, None))),
                        Err(now) => now,
                    };
                    match start::slow(&core, &entry, now, || core.label(key, None)) {
                        Started::Granted(slot, in_flight_slot) => {
                            return Poll::Ready(Ok(Permit::new(core, key, slot, in_flight_slot)));
                        }
                        Started::Limited(limited) => return Poll::Ready(Err(limited)),
                        Started::Waiting(waiter) => self.0 = Step::Waiting(waiter),
                    }
                }
                Step::Waiting(waiter) => {
                    let polled = Pin::new(&mut **waiter).poll(cx);
                    if polled.is_ready() {
                        self.0 = Step::Done;
                    }
                    return polled;
                }
                Step::Done => panic!("an Acquire future was polled after it was ready"),
            }
        }
    }
}
