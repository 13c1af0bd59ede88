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
use super::start::Started;
use super::waiter::Waiter;
use crate::error::Limited;

/// The future of a [`Permit`].
///
/// [`Limiter::acquire`](crate::Limiter::acquire) makes it, and describes its errors and cancel safety.
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Acquire(Step);

// New => Waiting | Done
// Waiting => Done
#[derive(Debug)]
enum Step {
    New(Arc<Core>, Entry),
    Waiting(Box<Waiter>),
    Done,
}

impl Acquire {
    pub(super) fn new(core: Arc<Core>, entry: Entry) -> Self {
        Acquire(Step::New(core, entry))
    }

    /// Sets how many units the request takes. Default: 1. A request of cost 0 passes at once.
    ///
    /// Has no effect once the future was polled.
    pub fn cost(mut self, cost: u32) -> Self {
        if let Step::New(_, entry) = &mut self.0 {
            entry.cost = cost;
        }
        self
    }

    /// Sets the moment by which the request must leave. Default: none. `max_wait` limits the wait as well.
    ///
    /// Has no effect once the future was polled.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        if let Step::New(_, entry) = &mut self.0 {
            entry.deadline = Some(deadline);
        }
        self
    }
}

impl Future for Acquire {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                Step::New(core, entry) => {
                    let started = core.start(entry, || core.label(entry.key, None));
                    let Step::New(core, entry) = mem::replace(&mut self.0, Step::Done) else { continue };
                    match started {
                        Started::Granted(slot, in_flight_slot) => {
                            return Poll::Ready(Ok(Permit::new(core, entry.key, slot, in_flight_slot)));
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
