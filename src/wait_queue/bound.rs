//! How long a request can wait.

use std::time::{Duration, Instant};

use crate::blocking;
use crate::clock;
use crate::error::Reason;
use crate::tuning::ANSWER;

/// How long a request can wait for a slot: until its deadline, and for `max_wait`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitBound {
    /// The latest moment that the request can wait for: a slot, or the end of a hold.
    pub(crate) latest: Instant,
    /// Until when it can wait for what has no known moment: an in-flight slot, or the response to a probe.
    pub(crate) patient_until: Instant,
    /// How long after it came `latest` is, if its deadline is no earlier: the span that [`Reason::MaxWait`] states.
    pub(crate) longest: Duration,
    /// The deadline of the request: it waits for nothing beyond it.
    pub(crate) deadline: Option<Instant>,
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
        let bound = WaitBound {
            latest: clock::after(now, longest),
            patient_until: clock::after(now, max_wait),
            longest,
            deadline,
            is_none: max_wait.is_zero(),
            is_nested: false,
        };
        WaitBound {
            latest: bound.cap(bound.latest),
            patient_until: bound.cap(bound.patient_until),
            ..bound
        }
    }

    /// Returns whether the deadline has passed, so that the request may not be sent any more.
    pub(crate) fn has_passed(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline < now)
    }

    /// Returns whether the deadline decides for how long the request waits for its slot. Otherwise `max_wait` does.
    pub(crate) fn is_by_deadline(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= self.latest)
    }

    /// Returns until when the request waits for the answer of a store that decides on its slot: [`ANSWER`] at least, as that
    /// time does not count against `max_wait`.
    pub(crate) fn decided_by(&self, now: Instant) -> Instant {
        self.cap(self.latest.max(clock::after(now, ANSWER)))
    }

    /// Returns until when the request waits for what has no known moment. Only one that can wait for nothing gets time for the
    /// answer of a store: a short wait is what its caller wants.
    pub(crate) fn answered_by(&self, now: Instant) -> Instant {
        self.patience_ends(now)
            .unwrap_or_else(|| self.cap(clock::after(now, ANSWER)))
    }

    /// Returns until when the request waits for what has no known moment, if it does now.
    pub(crate) fn patience_ends(&self, now: Instant) -> Option<Instant> {
        Some(self.patient_until).filter(|until| *until > now)
    }

    /// Lets the request wait until `latest` at least, but not beyond its deadline.
    pub(crate) fn extend_to(&mut self, latest: Instant) {
        self.latest = self.cap(self.latest.max(latest));
    }

    /// Lets the request wait for `span` longer, but not beyond its deadline.
    pub(crate) fn extend_by(&mut self, span: Duration) {
        self.latest = self.cap(clock::after(self.latest, span));
        self.patient_until = self.cap(clock::after(self.patient_until, span));
    }

    /// Sets an earlier deadline.
    pub(crate) fn end_by(&mut self, by: Instant) {
        self.deadline = Some(self.cap(by));
        self.latest = self.latest.min(by);
        self.patient_until = self.patient_until.min(by);
    }

    /// Returns the deadline, if it is earlier than `moment`.
    fn cap(&self, moment: Instant) -> Instant {
        self.deadline
            .map_or(moment, |deadline| deadline.min(moment))
    }

    /// Lets the request not wait at all if it `is_nested`.
    pub(crate) fn nested_if(self, is_nested: bool, now: Instant) -> Self {
        if is_nested && self.latest > now {
            WaitBound {
                latest: now,
                patient_until: now,
                longest: Duration::ZERO,
                is_none: true,
                is_nested: true,
                ..self
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
        } else if self.is_by_deadline() {
            Reason::Deadline
        } else {
            Reason::MaxWait(self.longest)
        }
    }
}
