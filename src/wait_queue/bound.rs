//! How long a request can wait.

use std::time::{Duration, Instant};

use crate::blocking;
use crate::clock;
use crate::error::Reason;

/// How long a request can wait for a slot, and whether its deadline or `max_wait` decides that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitBound {
    /// The latest moment that the request can wait for: a slot, or the end of a hold.
    pub(crate) latest: Instant,
    /// Until when it can wait for what has no known moment: an in-flight slot, or the response to a probe.
    pub(crate) patient_until: Instant,
    /// How long after it came `latest` is, if its deadline is no earlier: the span that [`Reason::MaxWait`] states.
    pub(crate) longest: Duration,
    /// Whether the deadline of the request decides. Otherwise `max_wait` does.
    pub(crate) by_deadline: bool,
    /// Whether `max_wait` is zero, so that the request waits for the margin of its quota at most.
    pub(crate) is_none: bool,
    /// Whether no request waits because it is made inside of a call of the same limiter: see
    /// `limiter/around.rs`.
    pub(crate) is_nested: bool,
}

impl WaitBound {
    /// Takes the earlier of a request's `deadline` and `max_wait` after `now`. Without a deadline, it waits for
    /// `least_wait` in any case, but for a program that never waits and has no timers.
    pub(crate) fn new(
        deadline: Option<Instant>,
        now: Instant,
        max_wait: Duration,
        least_wait: Duration,
    ) -> Self {
        let longest = if least_wait > max_wait && blocking::runtime_for_tasks().is_some() {
            least_wait
        } else {
            max_wait
        };
        let latest = clock::after(now, longest);
        let deadline = deadline.filter(|deadline| *deadline < latest);
        WaitBound {
            latest: deadline.unwrap_or(latest),
            patient_until: deadline.unwrap_or_else(|| clock::after(now, max_wait)),
            longest,
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
                patient_until: now,
                longest: Duration::ZERO,
                by_deadline: false,
                is_none: true,
                is_nested: true,
            }
        } else {
            self
        }
    }

    /// Returns whether the request cannot wait for a hold or a pause that ends after `span`.
    pub(crate) fn is_too_long(&self, span: Duration, now: Instant) -> bool {
        clock::after(now, span) > self.latest
    }

    /// Returns the reason of a refusal because the slot would be too late.
    pub(crate) fn reason(&self) -> Reason {
        if self.is_nested {
            Reason::Nested
        } else if self.by_deadline {
            Reason::Deadline
        } else {
            Reason::MaxWait(self.longest)
        }
    }
}
