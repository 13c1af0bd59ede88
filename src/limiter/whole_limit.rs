//! Requests that wait for a whole limit, because they are estimated to cost more than it.
//!
//! The first estimate of a limit may be far too high. While a request waits for it, others end, and show what requests cost.
//! So each settlement wakes these requests, and the layer estimates them anew. Otherwise ten requests with a wrong first
//! estimate would take ten windows.

use std::sync::{Mutex, PoisonError};
use std::task::{Context, Waker};

use super::queue::Number;

/// The requests of a limiter that wait for a whole limit, with their tasks.
#[derive(Debug, Default)]
pub(super) struct WholeLimit(Mutex<Vec<(Number, Waker)>>);

impl WholeLimit {
    /// Wakes the task of a request at the next settlement.
    pub(super) fn watch(&self, number: Number, cx: &Context<'_>) {
        self.change(|waiting| {
            waiting.retain(|(other, _)| *other != number);
            waiting.push((number, cx.waker().clone()));
        });
    }

    /// Forgets a request that waits no longer.
    pub(super) fn forget(&self, number: Number) {
        self.change(|waiting| waiting.retain(|(other, _)| *other != number));
    }

    /// Wakes all of them, because a request was settled.
    pub(super) fn settled(&self) {
        let waiting = self.change(std::mem::take);
        waiting.into_iter().for_each(|(_, waker)| waker.wake());
    }

    fn change<T>(&self, act: impl FnOnce(&mut Vec<(Number, Waker)>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
