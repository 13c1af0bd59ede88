//! Requests that wait for a whole limit, because they are estimated to cost more than it.
//!
//! The first estimate of a limit may be far too high. While a request waits for it, others end, and show what requests cost.
//! So each settlement wakes these requests, and the layer estimates them anew. Otherwise ten requests with a wrong first
//! estimate would take ten windows.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::task::{Context, Waker};

use super::queue::Number;
use crate::locks::lock;

/// The requests of a limiter that wait for a whole limit, with their tasks.
#[derive(Debug, Default)]
pub(super) struct WholeLimit(Mutex<BTreeMap<Number, Waker>>);

impl WholeLimit {
    /// Wakes the task of a request at the next settlement. Returns whether its task was not to be woken
    /// yet: at the first call, and after each settlement.
    pub(super) fn watch(&self, number: Number, cx: &Context<'_>) -> bool {
        let waker = cx.waker().clone();
        lock(&self.0).insert(number, waker).is_none()
    }

    /// Forgets a request that waits no longer.
    pub(super) fn forget(&self, number: Number) {
        lock(&self.0).remove(&number);
    }

    /// Wakes all of them, because a request was settled.
    pub(super) fn settled(&self) {
        let waiting = std::mem::take(&mut *lock(&self.0));
        waiting.into_values().for_each(Waker::wake);
    }
}
