//! How long a request can wait.

use std::time::{Duration, Instant};

use crate::clock;
use crate::error::Reason;

/// How long a request can wait for a slot, and whether its deadline or `max_wait` decides that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitBound {
    /// The latest slot that the request can wait for.
    pub(crate) latest: Instant,
    /// Whether the deadline of the request decides. Otherwise `max_wait` does.
    pub(crate) by_deadline: bool,
    /// Whether `max_wait` is zero, so that no request waits for a slot.
    pub(crate) is_none: bool,
    /// Whether no request waits because it is made inside of a call of the same limiter: see
    /// `limiter/around.rs`.
    pub(crate) is_nested: bool,
}

impl WaitBound {
    /// Takes the earlier of a request's `deadline` and `max_wait` after `now`.
    pub(crate) fn new(deadline: Option<Instant>, now: Instant, max_wait: Duration) -> Self {
        let longest = clock::after(now, max_wait);
        let deadline = deadline.filter(|deadline| *deadline < longest);
        WaitBound {
            latest: deadline.unwrap_or(longest),
            by_deadline: deadline.is_some(),
            is_none: max_wait.is_zero(),
            is_nested: false,
        }
    }

    /// Lets the request not wait at all if it `is_nested`.
    pub(crate) fn nested_if(self, is_nested: bool, now: Instant) -> Self {
        if is_nested && self.latest > now {
            WaitBound {
                latest: now,
                by_deadline: false,
                is_none: true,
                is_nested: true,
            }
        } else {
            self
        }
    }

    /// Returns whether the request cannot wait for `span`.
    pub(crate) fn is_too_long(&self, span: Duration, now: Instant) -> bool {
        clock::after(now, span) > self.latest
    }

    /// Returns the reason of a refusal because the slot would be too late.
    pub(crate) fn reason(&self, max_wait: Duration) -> Reason {
        if self.is_nested {
            Reason::Nested
        } else if self.by_deadline {
            Reason::Deadline
        } else {
            Reason::MaxWait(max_wait)
        }
    }
}
