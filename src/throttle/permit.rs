//! The right to send one request, and the wait for it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use http::StatusCode;

use super::counting;
use super::engine::ThrottleCore;
use super::paced_queue::Flight;
use super::waiters::{Ended, TurnAnswer, TurnTooLate, Waiters};
use crate::admission::Admission;
use crate::clock;
use crate::error::{Limited, Reason};
use crate::events::{self, WaitSpan};
use crate::guarded;
use crate::key::{Key, Label};
use crate::limiter::Because;
use crate::refused::RefusedRequest;
use crate::signal::Signal;
use crate::stats::{Cause, Gate, OpenRequest, Outcome};
use crate::store::Refusal;
use crate::wait_queue::{Number, WaitBound};
use crate::wakers::Wakers;

/// The right to send one request at the pace that the throttle has learned.
///
/// [`Throttle::acquire`](crate::Throttle::acquire) returns it. A permit ends exactly once:
///
/// - [`answered`](ThrottlePermit::answered) takes the response, from which the pace learns.
/// - [`give_back`](ThrottlePermit::give_back) is for a request that was certainly not sent.
/// - If the permit is dropped, its request counts as sent, without a response.
///
/// Until the permit ends, the request is in flight. A permit does not expire.
#[must_use = "a permit that is dropped counts as used"]
pub struct ThrottlePermit {
    request: PacedRequest,
    /// The request in flight; `None` once the permit has ended.
    flight: Option<Flight>,
}

/// What a throttle reads from a request that arrives.
#[derive(Clone, Copy)]
pub(crate) struct PaceEntry {
    pub(crate) key: Key,
    /// The kind of the request, if it is read.
    pub(crate) kind: Option<Key>,
    /// The key of its host, if another host than that of its key may answer.
    pub(crate) host: Option<Key>,
    pub(crate) deadline: Option<Instant>,
}

impl PaceEntry {
    /// A request of which only the key is known.
    pub(crate) fn new(key: Key) -> Self {
        PaceEntry {
            key,
            kind: None,
            host: None,
            deadline: None,
        }
    }
}

/// A request that has arrived, while it waits and while it is in flight.
pub(super) struct PacedRequest {
    core: Arc<ThrottleCore>,
    entry: PaceEntry,
    /// How long it may wait for a turn, also for another one.
    bound: WaitBound,
    /// How the request has waited, and its label, if either is known.
    waited: Option<Box<TurnWaited>>,
}

/// What is known of a request that waits for its turn, or has waited.
struct TurnWaited {
    label: Label,
    /// When it began to wait.
    start: Instant,
    /// How long it had waited when its turn came.
    span: Duration,
    /// How often it waited for its turn.
    turns: u32,
    /// The status with which the upstream refused the last attempt, if there was one. A wait that ends
    /// without a turn ends with it.
    refused: Option<StatusCode>,
    /// The wait that has not ended. `None` if the request has left.
    open: Option<OpenTurn>,
}

/// A wait that has not ended, as stats and traces see it.
struct OpenTurn {
    /// Counts the request when it leaves.
    request: OpenRequest<ThrottleCore>,
    span: WaitSpan,
}

impl OpenTurn {
    fn new(request: OpenRequest<ThrottleCore>, label: &Label) -> Self {
        let span = WaitSpan::begin(label, Because::Pace.name(), None, None);
        OpenTurn { request, span }
    }
}

impl TurnWaited {
    /// Makes the value for a request that left `at` this moment without a wait.
    fn at_once(label: Label, at: Instant) -> Box<Self> {
        Box::new(TurnWaited {
            label,
            start: at,
            span: Duration::ZERO,
            turns: 0,
            refused: None,
            open: None,
        })
    }
}

impl PacedRequest {
    pub(super) fn new(core: Arc<ThrottleCore>, entry: PaceEntry, bound: WaitBound) -> Self {
        PacedRequest {
            core,
            entry,
            bound,
            waited: None,
        }
    }

    /// Takes the request out of a wait or a permit that has ended.
    fn take(&mut self) -> Self {
        PacedRequest {
            waited: self.waited.take(),
            ..PacedRequest::new(self.core.clone(), self.entry, self.bound)
        }
    }

    /// Makes the permit of the request, whose turn has come.
    pub(super) fn leaves(self, flight: Flight) -> ThrottlePermit {
        ThrottlePermit {
            request: self,
            flight: Some(flight),
        }
    }

    /// Makes the wait of the request, which arrives `now`, behind `queued` requests with itself.
    pub(super) fn waits(
        mut self,
        number: Number,
        label: Label,
        queued: usize,
        now: Instant,
    ) -> Box<PaceWait> {
        let open = OpenRequest::begin(self.core.clone(), self.entry.key, now, &label, queued);
        let mut waited = TurnWaited::at_once(label, now);
        waited.turns = 1;
        waited.open = Some(OpenTurn::new(open, &waited.label));
        self.waited = Some(waited);
        Box::new(PaceWait {
            request: self,
            number: Some(number),
        })
    }

    /// Makes the wait of the request, which is back in its old place.
    fn waits_again(mut self, number: Number) -> Box<PaceWait> {
        if let Some(waited) = &mut self.waited {
            waited.turns += 1;
            waited.open.get_or_insert_with(|| {
                let open = OpenRequest::new(self.core.clone(), self.entry.key, waited.start);
                OpenTurn::new(open.sent_again(), &waited.label)
            });
        }
        Box::new(PaceWait {
            request: self,
            number: Some(number),
        })
    }

    fn label(&self) -> Label {
        match &self.waited {
            Some(waited) => waited.label.clone(),
            None => self.core.label(self.entry.key, None),
        }
    }

    /// Returns what is known of the wait. Of a request that did not wait, `at` is when it left.
    fn waited_or_left(&mut self, at: Instant) -> &mut TurnWaited {
        let PacedRequest { core, entry, .. } = self;
        self.waited
            .get_or_insert_with(|| TurnWaited::at_once(core.label(entry.key, None), at))
    }

    /// Ends the request, which waits no longer and was not sent. Returns its error: that of the upstream, if it has refused an
    /// attempt before.
    fn refuse(&mut self, reason: Reason, refusal: Refusal, now: Instant) -> Limited {
        let waited = self.waited_or_left(now);
        let span = now.saturating_duration_since(waited.start);
        let request = RefusedRequest::of_pace(waited.label.clone(), span, waited.turns);
        let (refused, mut open) = (waited.refused, waited.open.take());
        let limited = match (refused, &mut open) {
            (Some(status), _) => {
                let limited = request.refused_upstream(status, refusal.wait, now);
                events::limited(self.core.tally(), &limited);
                limited
            }
            (None, Some(open)) => open.request.refuse(request.refuse(reason, refusal, now)),
            (None, None) => request.refuse(reason, refusal, now),
        };
        if let Some(open) = &mut open {
            open.span.refused(&limited);
        }
        limited
    }
}

impl ThrottlePermit {
    /// Sets the label of the permit's key, for the error that a refusal makes.
    pub(crate) fn named(mut self, label: Label) -> Self {
        self.request.waited = Some(TurnWaited::at_once(label, clock::now()));
        self
    }

    pub(crate) fn key(&self) -> Key {
        self.request.entry.key
    }

    /// Returns the key of its host: see [`PaceEntry::host`].
    pub(crate) fn host(&self) -> Option<Key> {
        self.request.entry.host
    }

    /// Returns how long the request waited for the permit.
    pub fn waited(&self) -> Duration {
        let waited = self.request.waited.as_ref();
        waited.map_or(Duration::ZERO, |waited| waited.span)
    }

    /// Returns the label of the permit's key.
    pub(crate) fn label(&self) -> Label {
        self.request.label()
    }

    /// Ends the permit with what the response states. If the upstream refused the request, returns
    /// the error for it, which the caller may ignore.
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.answered_at(signal, None, clock::now())
    }

    /// Ends the permit as [`answered`](ThrottlePermit::answered) does, with a response that arrived
    /// at `now`. `status` is that of the response, if it has one.
    pub(crate) fn answered_at(
        mut self,
        signal: &Signal,
        status: Option<StatusCode>,
        now: Instant,
    ) -> Option<Limited> {
        self.end(signal, status, None, now).err()
    }

    /// Ends the permit as [`answered_at`](ThrottlePermit::answered_at) does. If the upstream refused the request, and it
    /// can be sent again in time, returns its wait in its old place.
    ///
    /// # Errors
    ///
    /// That of the refusal, if the request has no time to wait, or may not be sent again.
    pub(crate) fn answered_or_back(
        mut self,
        signal: &Signal,
        status: Option<StatusCode>,
        now: Instant,
    ) -> Result<Option<Box<PaceWait>>, Limited> {
        let latest = self.request.bound.latest;
        self.end(signal, status, Some(latest), now)
    }

    /// Ends the request in flight. A drain may wait for that.
    fn ends<R>(&self, end: impl FnOnce(&mut Waiters, &mut Wakers) -> R) -> Option<R> {
        let core = &self.request.core;
        let ended = core.at(self.key(), end);
        core.tally().call_ended();
        ended
    }

    fn end(
        &mut self,
        signal: &Signal,
        status: Option<StatusCode>,
        back_until: Option<Instant>,
        now: Instant,
    ) -> Result<Option<Box<PaceWait>>, Limited> {
        let key = self.key();
        if let Some(flight) = &self.flight
            && let status = status.or(signal.refusal())
            && guarded::may_be_bad(status)
            && let (Some(status), Some(guard)) = (status, &self.request.core.settings.guard)
            && guard.is_bad(status, signal)
        {
            let gate = self.request.core.clone();
            guard.clone().answered(gate, key, flight.sent());
        }
        // The functions of the user that the guard calls may panic: then the request ends with the permit.
        let Some(flight) = self.flight.take() else {
            return Ok(None);
        };
        let core = self.request.core.clone();
        let back_until = back_until.filter(|_| !core.tally().is_draining());
        let waited = self.request.waited.as_ref();
        let answer = TurnAnswer {
            signal,
            kind: self.request.entry.kind,
            max_hold: core.settings.max_hold,
            back_until,
            was_refused: waited.is_some_and(|waited| waited.refused.is_some()),
        };
        let answered = self.ends(|waiters, wakers| {
            let held_before = waiters.queue.held_until();
            let ended = waiters.answered(flight, &answer, now, wakers);
            let held = waiters.queue.held_until();
            (ended, held.filter(|_| held > held_before))
        });
        let (ended, held) = answered.unwrap_or_default();
        let held = held.and_then(|until| until.checked_duration_since(now));
        let Some(status) = signal.refusal() else {
            if let Some(left) = held {
                counting::held_by(&core, key, signal, left);
            }
            return Ok(None);
        };
        let waited = self.request.waited_or_left(now);
        waited.refused = Some(status);
        let label = waited.label.clone();
        // Before the events: a function of the user that takes one may panic, and then the request leaves its place.
        let back = match ended {
            Ended::IsBack(number) => Ok(Some(self.request.take().waits_again(number))),
            Ended::Done | Ended::KindHeld(_) => {
                let request = RefusedRequest::of_pace(label.clone(), waited.span, waited.turns);
                Err(request.refused_upstream(status, signal.retry_after(), now))
            }
        };
        if let Ended::KindHeld(left) = ended {
            core.report_hold(key, left, Cause::Kind);
        }
        if let Some(left) = held {
            counting::held_by(&core, key, signal, left);
        }
        events::upstream_limited(Some(core.tally()), &label, status, signal.retry_after());
        back
    }

    /// Lets a request that has waited leave some time after its turn, and counts it. During a hold it gives up its turn and returns to
    /// its old place. It is refused if its deadline or that of a drain has passed.
    pub(crate) fn leave(mut self) -> Admission<Self, Box<PaceWait>> {
        let now = clock::now();
        let core = self.request.core.clone();
        let PacedRequest { entry, waited, .. } = &self.request;
        let open = waited.as_ref().and_then(|waited| waited.open.as_ref());
        let reason = if entry.deadline.is_some_and(|deadline| deadline < now) {
            Some(Reason::Deadline)
        } else if open.is_some_and(|open| open.request.is_drained()) {
            Some(Reason::Draining)
        } else {
            None
        };
        let held = core.find(self.key(), |waiters| waiters.held(now)).flatten();
        let Some(flight) = self.flight.take_if(|_| held.is_some() || reason.is_some()) else {
            let waited = self.request.waited.as_mut();
            if let Some(mut open) = waited.and_then(|waited| waited.open.take()) {
                open.request.left(Outcome::Waited);
            }
            return Admission::Go(self);
        };
        core.tally().give_back(1);
        let (number, latest) = (flight.number, self.request.bound.latest);
        self.ends(|waiters, wakers| match reason {
            Some(_) => waiters.unsent(flight, now, wakers),
            None => waiters.wait_again(flight, latest, now, wakers),
        });
        match reason {
            Some(reason) => Admission::No(self.request.refuse(reason, Refusal::NEVER, now)),
            None => Admission::Wait(self.request.take().waits_again(number)),
        }
    }

    /// Ends the permit of a request that was certainly not sent. The next request may leave in its
    /// place.
    pub fn give_back(mut self) {
        if let Some(flight) = self.flight.take() {
            let now = clock::now();
            self.request.core.tally().give_back(1);
            self.ends(|waiters, wakers| waiters.unsent(flight, now, wakers));
        }
    }
}

impl Drop for ThrottlePermit {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            let now = clock::now();
            self.ends(|waiters, wakers| waiters.lost(flight, now, wakers));
        }
    }
}

impl fmt::Debug for ThrottlePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottlePermit")
            .field("key", &self.key())
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}

/// Waits for a permit. Dropping the wait gives up the request's place in the queue.
pub(crate) struct PaceWait {
    request: PacedRequest,
    /// The request's number in the queue; `None` once the wait has ended.
    number: Option<Number>,
}

impl PaceWait {
    /// Returns whether the key is on hold for longer than the throttle is drained.
    fn is_held_beyond_drain(&self) -> bool {
        let PacedRequest { core, entry, .. } = &self.request;
        let Some(by) = core.tally().drained_by() else {
            return false;
        };
        let held_until = core.find(entry.key, |waiters| waiters.queue.held_until());
        held_until.flatten().is_some_and(|until| until > by)
    }

    /// Gives up the place in the queue.
    fn leave(&mut self, now: Instant) {
        if let Some(number) = self.number.take() {
            let PacedRequest { core, entry, .. } = &self.request;
            core.at(entry.key, |waiters, wakers| {
                waiters.leave(number, now, wakers)
            });
        }
    }
}

impl Future for PaceWait {
    type Output = Result<ThrottlePermit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let ended = "a future is not polled after it was ready";
        let number = self.number.expect(ended);
        let waited = self.request.waited.as_mut().expect(ended);
        let open = waited.open.as_mut();
        let is_drained = open.is_some_and(|open| open.request.poll_drained(cx).is_ready());
        let done = if is_drained || self.is_held_beyond_drain() {
            self.leave(now);
            Err(TurnTooLate {
                reason: None,
                retry_at: None,
            })
        } else {
            let PacedRequest { core, entry, .. } = &self.request;
            let polled = core.at(entry.key, |waiters, wakers| {
                let polled = waiters.poll(number, now, cx, wakers);
                if let Poll::Ready(Ok(_)) = &polled {
                    waiters.counts.add_units(1);
                }
                polled
            });
            ready!(polled.expect("a key with a waiter stays in use"))
        };
        self.number = None;
        let mut request = self.request.take();
        Poll::Ready(match done {
            Ok(flight) => {
                let mut permit = request.leaves(flight);
                let waited = permit.request.waited_or_left(now);
                waited.span = now.saturating_duration_since(waited.start);
                events::waited(&waited.label, waited.span, waited.turns);
                Ok(permit)
            }
            Err(late) => {
                let (reason, refusal) = late.refused(request.bound, now);
                Err(request.refuse(reason, refusal, now))
            }
        })
    }
}

impl Drop for PaceWait {
    fn drop(&mut self) {
        if self.number.is_some() {
            self.leave(clock::now());
        }
    }
}
