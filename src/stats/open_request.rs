//! A request that waits, until its outcome is known.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::drain::DrainedAs;
use super::registry::Engine;
use super::values::Outcome;
use crate::clock::{self, Timer};
use crate::error::{Limited, Reason};
use crate::events::{self, WaitSpan};
use crate::key::{Key, Label};

/// A request that waits at a gate. It counts once: when it leaves, when it is refused, or as cancelled
/// when this is dropped before.
pub(crate) struct OpenRequest<G: Engine> {
    gate: Arc<G>,
    key: Key,
    since: Instant,
    /// The number under which it waits. `None` once its outcome is known.
    number: Option<u64>,
    /// Whether it counts. A request that is sent again has counted before, and one of several keys counts at the first.
    counts: bool,
    /// Fires at the deadline of the drain, if the gate is drained.
    drain: Timer,
    /// The wait as traces see it.
    span: WaitSpan,
}

impl<G: Engine> OpenRequest<G> {
    fn new(gate: Arc<G>, key: Key, since: Instant, span: WaitSpan) -> Self {
        let number = Some(gate.tally().open(key, since));
        OpenRequest {
            gate,
            key,
            since,
            number,
            counts: true,
            drain: Timer::at(since),
            span,
        }
    }

    /// Makes the request of `key` that begins to wait, behind `queued` requests with itself, and reports it. `label` is
    /// the name of the key.
    pub(crate) fn begin(
        gate: Arc<G>,
        key: Key,
        since: Instant,
        label: &Label,
        queued: usize,
        span: WaitSpan,
    ) -> Self {
        events::waiting(label, queued);
        gate.note_label(key, label);
        OpenRequest::new(gate, key, since, span)
    }

    /// Makes the request of `key` that waits since `since`, and counts elsewhere: it is sent again and has counted before, or
    /// has another key.
    pub(crate) fn counted_elsewhere(
        gate: Arc<G>,
        key: Key,
        since: Instant,
        span: WaitSpan,
    ) -> Self {
        let mut open = OpenRequest::new(gate, key, since, span);
        open.counts = false;
        open
    }

    /// Polls the drain of the gate. Ready if the request may leave no more. Otherwise its task is woken
    /// when that changes.
    pub(crate) fn poll_drained(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let tally = self.gate.tally();
        // The task is registered before the drain is looked at, so that it is not missed.
        if let Some(number) = self.number {
            tally.register(number, cx.waker());
        }
        let Some(by) = tally.drained_by() else {
            return Poll::Pending;
        };
        if by <= clock::now() {
            return Poll::Ready(());
        }
        self.drain.set(by);
        self.drain.poll(cx)
    }

    /// Returns whether the gate is drained and its deadline has passed.
    pub(crate) fn is_drained(&self) -> bool {
        let by = self.gate.tally().drained_by();
        by.is_some_and(|by| by <= clock::now())
    }

    /// Returns the error of a request that waits, as the error of a gate that is drained.
    fn as_drained(&self, limited: Limited) -> Limited {
        match limited {
            Limited::Local {
                reason:
                    Reason::MaxWait(_)
                    | Reason::Deadline
                    | Reason::Held
                    | Reason::HeldKind
                    | Reason::UsedUp { .. },
                report,
            } if self.gate.tally().is_draining() => Limited::Local {
                reason: Reason::Draining,
                report: report.without_retry(),
            },
            limited => limited,
        }
    }

    /// Ends the wait. `drained` is how a drain counts it. Returns whether the request has waited until now.
    fn close(&mut self, drained: Option<DrainedAs>) -> bool {
        let number = self.number.take();
        if let Some(number) = number {
            let drained = drained.filter(|_| self.counts);
            self.gate.tally().close(number, drained);
        }
        number.is_some()
    }

    /// Notes a hold that has begun while the request waits.
    pub(crate) fn held(&self, reason: &str, hold: Duration) {
        self.span.held(reason, hold);
    }

    /// Counts a request that leaves now as `outcome`.
    pub(crate) fn left(&mut self, outcome: Outcome) {
        self.span.end();
        if !self.close(Some(DrainedAs::Left)) || !self.counts {
            return;
        }
        if outcome == Outcome::Waited {
            let waited = clock::now().saturating_duration_since(self.since);
            self.gate.tally().waited(waited);
        }
        self.gate.count(self.key, outcome);
    }

    /// Counts a request that is refused. Returns its error.
    pub(crate) fn refuse(&mut self, limited: Limited) -> Limited {
        let limited = self.as_drained(limited);
        if self.close(Some(DrainedAs::Refused)) && self.counts {
            self.gate.refused(Some(self.key), &limited);
        }
        self.span.refused(&limited);
        limited
    }
}

impl<G: Engine> Drop for OpenRequest<G> {
    fn drop(&mut self) {
        if self.close(None) && self.counts {
            self.gate.count(self.key, Outcome::Cancelled);
        }
    }
}

impl<G: Engine> std::fmt::Debug for OpenRequest<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenRequest")
            .field("since", &self.since)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}
