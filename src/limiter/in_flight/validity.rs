//! Whether the slots of a process still count at the store.

use std::collections::BTreeMap;
use std::mem;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::limiter::queue::next_number;
use crate::wait_queue::Number;
use crate::wakers::Wakers;

/// Until when the slots of a process count, and which of them are lost.
///
/// A claim that is not repeated expires at the store, which then grants its slots to other
/// processes.
#[derive(Debug, Default)]
pub(super) struct Validity {
    /// When the last confirmed claim expires. `None` if the store sets no end.
    pub(super) until: Option<Instant>,
    /// Slots with a smaller number are lost: their claim has expired.
    lost_before: Number,
    /// The tasks to wake when their slot is lost.
    calls: BTreeMap<Number, Waker>,
}

impl Validity {
    /// Returns whether the slots surely belong to this process.
    pub(super) fn is_valid(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }

    /// Returns whether `slot` may belong to another process.
    pub(super) fn is_lost(&self, slot: Number, now: Instant) -> bool {
        slot < self.lost_before || !self.is_valid(now)
    }

    /// Ready if `slot` is lost. Else the task is woken when it is.
    pub(super) fn poll_lost(&mut self, slot: Number, cx: &Context<'_>) -> Poll<()> {
        if slot < self.lost_before {
            return Poll::Ready(());
        }
        self.calls.insert(slot, cx.waker().clone());
        Poll::Pending
    }

    /// Forgets the task of a call that has ended.
    pub(super) fn end(&mut self, slot: Number) {
        self.calls.remove(&slot);
    }

    /// Notes that all slots that the process has now are lost.
    pub(super) fn lose_all(&mut self, wakers: &mut Wakers) {
        self.lost_before = next_number();
        wakers.add(mem::take(&mut self.calls).into_values());
    }
}
