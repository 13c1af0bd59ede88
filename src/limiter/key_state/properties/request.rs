//! A request, its task, and the effects that are still to be run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::time::Instant;

use tokio::sync::Notify;

use super::super::{LeaseFuture, SentCall, Ticket};
use crate::limiter::reservation::Reservation;

/// The task of a request that waits.
#[derive(Default)]
pub(super) struct Task {
    pub(super) woken: AtomicBool,
    pub(super) any_woken: Arc<Notify>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Relaxed);
        self.any_woken.notify_one();
    }
}

pub(super) struct Request {
    pub(super) place: Ticket,
    pub(super) task: Arc<Task>,
    pub(super) stage: Stage,
    /// Whether another request was before it in the queue when its wait ended.
    pub(super) overtakes: bool,
}

// Waiting => Has | Ended
// Has => Ended | Waiting, if its permit expired
pub(super) enum Stage {
    Waiting,
    Has(Reservation),
    Ended,
}

/// An effect that is still to be run.
pub(super) enum Pending {
    Call(SentCall, LeaseFuture),
    /// A task visits the key at this moment.
    Visit(Instant),
}

impl Pending {
    pub(super) fn due(&self) -> Instant {
        match *self {
            Pending::Call(call, _) => call.sent,
            Pending::Visit(due) => due,
        }
    }
}
