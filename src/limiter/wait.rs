//! The slow path: a request gets its permit at once, or a future that waits for it, or an error. [`Wait`] is the only future
//! that waits, whether the request has one key or several.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use smallvec::SmallVec;

use super::around;
use super::counting;
use super::engine::Core;
use super::explanation::Because;
use super::own_quota;
use super::part::{Part, PartRef};
use super::request::{Leaving, Request, Suspect};
use super::reservation::{NoSlot, Stopped};
use super::sent::PastWait;
use super::taken::Taken;
use super::waited::Waited;
use crate::admission::Admission;
use crate::clock;
use crate::error::{Limited, Reason};
use crate::events::{self, WaitSpan};
use crate::key::Label;
use crate::stats::{Engine, OpenRequest, Outcome};
use crate::store::Refusal;
use crate::wait_queue::WaitBound;

/// A request that waits. Dropping it frees its places.
///
/// The request counts as refused when this returns an error. If it may leave, the owner calls
/// [`leave`](Wait::leave): what it has may expire before.
#[derive(Debug)]
pub(crate) struct Wait {
    request: Request,
    /// At the limiter of its first key, where it counts, and at those of its other keys. The drains of all wait for it, and
    /// end its wait.
    gates: SmallVec<[OpenRequest<Core>; 1]>,
    /// When the wait began.
    since: Instant,
    /// The name of its first key in errors and events.
    label: Label,
    /// What it waits for: what it found when it came, or a hold since.
    because: Because,
}

impl Wait {
    /// Begins the wait of a request, which has entered at `since`.
    pub(super) fn begin(request: Request, since: Instant, label: Label) -> Box<Self> {
        let Part { core, key, .. } = &request.parts()[0];
        let (because, hold) = request.because(since);
        let span = WaitSpan::begin(&label, because.name(), because.limit(), hold);
        let queued = request.queued();
        let first = OpenRequest::begin(core.clone(), *key, since, &label, queued, span);
        let mut gates = SmallVec::from_buf([first]);
        for Part { core, key, .. } in &request.parts()[1..] {
            if !core.settings.is_further_unit {
                let span = WaitSpan::none();
                gates.push(OpenRequest::counted_elsewhere(
                    core.clone(),
                    *key,
                    since,
                    span,
                ));
            }
        }
        Box::new(Wait {
            request,
            gates,
            since,
            label,
            because,
        })
    }

    /// Lets the request leave with what it has, and counts it. Returns `None` if that has expired or is lost, if a hold has
    /// begun, or if a limiter is drained: then the request waits again, in its old place. The owner may have taken any time
    /// meanwhile, so the request looks at holds and at its deadline once more.
    ///
    /// # Errors
    ///
    /// If the deadline of the request has passed. Then the wait has ended.
    pub(crate) fn leave(&mut self, taken: Taken) -> Result<Option<Taken>, Limited> {
        let now = clock::now();
        if self.request.bound().has_passed(now) {
            return Err(self.refuse(Reason::Deadline));
        }
        let is_expired = taken.deadline().is_some_and(|until| until <= now);
        let is_held = self.request.held(now).is_some();
        let is_stopped = is_expired || is_held || self.gates.iter().any(OpenRequest::is_drained);
        if !is_stopped && !taken.has_lost_slot(now) {
            for gate in &mut self.gates {
                gate.left(taken.outcome());
            }
            return Ok(Some(taken));
        }
        self.request.wait_again(taken);
        Ok(None)
    }

    /// Polls until the request leaves.
    pub(super) fn poll_left(&mut self, cx: &mut Context<'_>) -> Poll<Result<Taken, Limited>> {
        loop {
            let taken = ready!(Pin::new(&mut *self).poll(cx))?;
            if let Some(taken) = self.leave(taken)? {
                return Poll::Ready(Ok(taken));
            }
        }
    }

    /// Estimates the cost of the request anew if it waits for a whole limit, and a request was settled since the last
    /// time: `parts` has its keys with their new costs. Returns whether one is lower.
    pub(crate) fn estimate_anew<'a>(
        &mut self,
        cx: &Context<'_>,
        parts: impl FnOnce() -> SmallVec<[PartRef<'a>; 4]>,
    ) -> bool {
        self.request.watch_settlements(cx) && {
            let parts = parts();
            let costs = parts.iter().map(|part| part.entry.cost);
            self.request.lower_costs(costs)
        }
    }

    /// Notes a hold that has begun while the request waits.
    fn look_for_hold(&mut self) {
        if self.because != Because::Held
            && let Some(hold) = self.request.held(clock::now())
        {
            self.because = Because::Held;
            self.gates[0].held(self.because.name(), hold);
        }
    }

    /// Refuses the request, which waits no longer, and counts it.
    #[cold]
    pub(crate) fn refuse(&mut self, reason: Reason) -> Limited {
        let stopped = NoSlot::Refused(reason, Refusal::NEVER).for_part(0);
        self.end(stopped, clock::now())
    }

    /// Ends the wait with an error, and counts it.
    fn end(&mut self, stopped: Stopped, now: Instant) -> Limited {
        let waited = now.saturating_duration_since(self.since);
        let limited = self
            .request
            .error_of(stopped, &self.label, Some(waited), now);
        self.gates.truncate(1);
        self.gates[0].refuse(limited)
    }

    /// Ends the wait of a request that may leave.
    fn leaves(&self, leaving: Leaving, now: Instant) -> Taken {
        let mut taken = leaving.taken;
        let is_uncounted = leaving.uncounted.is_some();
        if let Some((part, cause)) = &leaving.uncounted {
            self.request.report_uncounted(*part, cause, &self.label);
        }
        let waited = now.saturating_duration_since(self.since);
        let turns = self.request.turns;
        events::waited(&self.label, waited, turns);
        taken.count_units();
        let seen = (!leaving.is_at_once).then(|| {
            let limit = self.request.parts()[leaving.last].limit_name();
            Waited::new(waited, self.because, self.label.clone(), limit.name)
        });
        taken.after(PastWait {
            label: self.label.clone(),
            waited,
            turns,
            is_uncounted,
            seen,
        })
    }
}

impl Future for Wait {
    type Output = Result<Taken, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut is_drained = false;
        // Each of them notes the task.
        for gate in &mut this.gates {
            is_drained |= gate.poll_drained(cx).is_ready();
        }
        if is_drained {
            return Poll::Ready(Err(self.refuse(Reason::Draining)));
        }
        let result = match self.request.poll(cx) {
            Poll::Ready(result) => result,
            Poll::Pending => {
                self.look_for_hold();
                return Poll::Pending;
            }
        };
        let now = clock::now();
        Poll::Ready(match result {
            Ok(leaving) => Ok(self.leaves(leaving, now)),
            Err(stopped) => Err(self.end(stopped, now)),
        })
    }
}

/// Returns how long a request that enters at `now` can wait: as long as all of its limiters allow.
pub(super) fn bound_of(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    now: Instant,
) -> WaitBound {
    let max_wait = parts.iter().map(|part| part.core.settings.max_wait).min();
    let least_wait = parts.iter().map(|part| part.core.settings.least_wait).min();
    let bound = WaitBound::new(
        deadline,
        now,
        max_wait.unwrap_or_default(),
        least_wait.unwrap_or_default(),
    );
    bound.nested_if(around::is_nested(parts), now)
}

/// Enters a request for which no permits are at hand, a `suspect` if a key of it is under suspicion. `label` returns the
/// name of its first key. The parts of a request have the deadline in common.
#[cold]
pub(crate) fn slow(
    parts: &[PartRef<'_>],
    deadline: Option<Instant>,
    suspect: Option<Box<Suspect>>,
    label: &dyn Fn() -> Label,
) -> Admission<Taken, Box<Wait>> {
    let now = clock::now();
    let mut request = Request::new(parts, bound_of(parts, deadline, now), suspect);
    let entered = match request.check(parts, now) {
        Err(stopped) => Poll::Ready(Err(stopped)),
        Ok(()) => {
            for PartRef { core, entry } in parts {
                own_quota::choose(core, entry.key, entry.quota, now);
            }
            request.enter(now)
        }
    };
    let PartRef { core, entry } = &parts[0];
    match entered {
        Poll::Ready(Ok(leaving)) => {
            let mut taken = leaving.taken;
            if let Some((part, cause)) = &leaving.uncounted {
                request.report_uncounted(*part, cause, &label());
                core.count(entry.key, Outcome::Uncounted);
            } else {
                counting::passed(core, entry.key, taken.units());
                taken.first_is_counted();
            }
            taken.count_units();
            Admission::Go(taken)
        }
        Poll::Ready(Err(stopped)) => {
            let label = label();
            let limited = request.error_of(stopped, &label, None, now);
            // The error may name another key.
            core.note_label(entry.key, &label);
            core.refused(Some(entry.key), &limited);
            Admission::No(limited)
        }
        Poll::Pending => Admission::Wait(Wait::begin(request, now, label())),
    }
}
