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
use crate::events;
use crate::guarded;
use crate::key::{Key, Label};
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
    core: Arc<ThrottleCore>,
    key: Key,
    /// The request in flight; `None` once the permit has ended.
    flight: Option<Flight>,
    /// How the request has waited, and its label, if either is known.
    waited: Option<Box<TurnWaited>>,
    /// How long the request may wait for another turn.
    bound: WaitBound,
    /// The kind of the request, if it is known.
    kind: Option<Key>,
}

/// What is known of a request that waits for its turn, or has waited.
#[derive(Debug)]
pub(super) struct TurnWaited {
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
    /// Counts the request when it leaves. `None` if it has counted.
    open: Option<OpenRequest<ThrottleCore>>,
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

    /// Ends a request that waits no longer, and was not sent. Returns its error: that of the upstream, if it has refused
    /// an attempt before.
    fn end(
        &mut self,
        core: &ThrottleCore,
        reason: Reason,
        refusal: Refusal,
        now: Instant,
    ) -> Limited {
        let request = RefusedRequest::of_pace(self.label.clone(), self.start, self.turns);
        if let Some(status) = self.refused {
            let limited = request.refused_upstream(status, refusal.wait, now);
            events::limited(core.tally(), &limited);
            return limited;
        }
        let limited = request.refuse(reason, refusal, now);
        match &mut self.open {
            Some(open) => open.refuse(limited),
            None => limited,
        }
    }
}

impl ThrottlePermit {
    pub(super) fn new(
        core: Arc<ThrottleCore>,
        key: Key,
        flight: Flight,
        waited: Option<Box<TurnWaited>>,
        bound: WaitBound,
    ) -> Self {
        ThrottlePermit {
            core,
            key,
            flight: Some(flight),
            waited,
            bound,
            kind: None,
        }
    }

    /// Sets the kind of the request, if it is known.
    pub(super) fn of_kind(mut self, kind: Option<Key>) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the label of the permit's key, for the error that a refusal makes.
    pub(crate) fn named(mut self, label: Label) -> Self {
        self.waited = Some(TurnWaited::at_once(label, clock::now()));
        self
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// Returns how long the request waited for the permit.
    pub fn waited(&self) -> Duration {
        self.waited
            .as_ref()
            .map_or(Duration::ZERO, |waited| waited.span)
    }

    /// Returns the label of the permit's key.
    pub(crate) fn label(&self) -> Label {
        match &self.waited {
            Some(waited) => waited.label.clone(),
            None => self.core.label(self.key, None),
        }
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
        let latest = self.bound.latest;
        self.end(signal, status, Some(latest), now)
    }

    /// Ends the request in flight. A drain may wait for that.
    fn ends<R>(&self, end: impl FnOnce(&mut Waiters, &mut Wakers) -> R) -> Option<R> {
        let ended = self.core.at(self.key, end);
        self.core.tally().call_ended();
        ended
    }

    /// Takes what is known of the wait. Of a request that did not wait, `at` is when it left.
    fn take_waited(&mut self, at: Instant) -> Box<TurnWaited> {
        let waited = self.waited.take();
        waited.unwrap_or_else(|| TurnWaited::at_once(self.core.label(self.key, None), at))
    }

    /// Makes the wait of a request that is back in its old place.
    fn waits_again(&self, number: Number, mut waited: Box<TurnWaited>) -> Box<PaceWait> {
        waited.turns += 1;
        waited.open.get_or_insert_with(|| {
            OpenRequest::new(self.core.clone(), self.key, waited.start).sent_again()
        });
        Box::new(PaceWait {
            core: self.core.clone(),
            key: self.key,
            number: Some(number),
            waited: Some(waited),
            bound: self.bound,
            kind: self.kind,
        })
    }

    fn end(
        &mut self,
        signal: &Signal,
        status: Option<StatusCode>,
        back_until: Option<Instant>,
        now: Instant,
    ) -> Result<Option<Box<PaceWait>>, Limited> {
        let Some(sent) = self.flight.as_ref().map(Flight::sent) else {
            return Ok(None);
        };
        let status = status.or(signal.refusal());
        if guarded::may_be_bad(status)
            && let (Some(status), Some(guard)) = (status, &self.core.settings.guard)
            && guard.is_bad(status, signal)
        {
            let gate = self.core.clone();
            guard.clone().answered(gate, self.key, sent);
        }
        // The functions of the user that the guard calls may panic: then the request ends with the permit.
        let Some(flight) = self.flight.take() else {
            return Ok(None);
        };
        let back_until = back_until.filter(|_| !self.core.tally().is_draining());
        let waited = self.waited.as_ref();
        let answer = TurnAnswer {
            signal,
            kind: self.kind,
            max_hold: self.core.settings.max_hold,
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
        if let Ended::KindHeld(left) = ended {
            self.core.report_hold(self.key, left, Cause::Kind);
        }
        let refused = signal.refusal().map(|status| {
            let mut waited = self.take_waited(now);
            let (label, span, turns) = (waited.label.clone(), waited.span, waited.turns);
            waited.refused = Some(status);
            let back = match ended {
                Ended::IsBack(number) => Some(self.waits_again(number, waited)),
                Ended::Done | Ended::KindHeld(_) => None,
            };
            (status, label, span, turns, back)
        });
        if let Some(left) = held.and_then(|until| until.checked_duration_since(now)) {
            counting::held_by(&self.core, self.key, signal, left);
        }
        let Some((status, label, span, turns, back)) = refused else {
            return Ok(None);
        };
        events::upstream_limited(
            Some(self.core.tally()),
            &label,
            status,
            signal.retry_after(),
        );
        if back.is_some() {
            return Ok(back);
        }
        let since = now.checked_sub(span).unwrap_or(now);
        let request = RefusedRequest::of_pace(label, since, turns);
        Err(request.refused_upstream(status, signal.retry_after(), now))
    }

    /// Counts the request, which leaves now.
    pub(crate) fn left(&mut self) {
        if let Some(waited) = &mut self.waited
            && let Some(mut open) = waited.open.take()
        {
            open.left(Outcome::Waited);
        }
    }

    /// Looks whether the request may still leave, some time after its turn. During a hold it gives up its turn
    /// and returns to its old place. It ends if its `deadline` or that of a drain has passed.
    pub(crate) fn leave_or_wait(
        mut self,
        deadline: Option<Instant>,
    ) -> Admission<Self, Box<PaceWait>> {
        let now = clock::now();
        let has_passed = |by: Option<Instant>| by.is_some_and(|by| by < now);
        let reason = if has_passed(deadline) {
            Some(Reason::Deadline)
        } else if has_passed(self.core.tally().drained_by()) {
            Some(Reason::Draining)
        } else {
            None
        };
        let held = self.core.find(self.key, |waiters| waiters.held(now));
        let is_held = held.flatten().is_some();
        let Some(flight) = self.flight.take_if(|_| is_held || reason.is_some()) else {
            return Admission::Go(self);
        };
        self.core.tally().give_back(1);
        let (number, latest) = (flight.number, self.bound.latest);
        let arrived = flight.sent();
        self.ends(|waiters, wakers| match reason {
            Some(_) => waiters.unsent(flight, now, wakers),
            None => waiters.wait_again(flight, latest, now, wakers),
        });
        let mut waited = self.take_waited(arrived);
        match reason {
            Some(reason) => Admission::No(waited.end(&self.core, reason, Refusal::NEVER, now)),
            None => Admission::Wait(self.waits_again(number, waited)),
        }
    }

    /// Ends the permit of a request that was certainly not sent. The next request may leave in its
    /// place.
    pub fn give_back(mut self) {
        if let Some(flight) = self.flight.take() {
            let now = clock::now();
            self.core.tally().give_back(1);
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
            .field("key", &self.key)
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}

/// Waits for a permit. Dropping the wait gives up the request's place in the queue.
pub(crate) struct PaceWait {
    core: Arc<ThrottleCore>,
    key: Key,
    /// The request's number in the queue; `None` once the wait has ended.
    number: Option<Number>,
    /// `None` once the request has its turn.
    waited: Option<Box<TurnWaited>>,
    bound: WaitBound,
    /// The kind of the request, if it is known.
    kind: Option<Key>,
}

impl PaceWait {
    /// Makes the wait of a request that has not waited before.
    pub(super) fn new(
        open: OpenRequest<ThrottleCore>,
        core: Arc<ThrottleCore>,
        key: Key,
        number: Number,
        label: Label,
        start: Instant,
        bound: WaitBound,
    ) -> Self {
        let mut waited = TurnWaited::at_once(label, start);
        waited.turns = 1;
        waited.open = Some(open);
        PaceWait {
            core,
            key,
            number: Some(number),
            waited: Some(waited),
            bound,
            kind: None,
        }
    }

    /// Sets the kind of the request, if it is known.
    pub(super) fn of_kind(mut self, kind: Option<Key>) -> Self {
        self.kind = kind;
        self
    }

    /// Returns the label of the key of the request.
    pub(crate) fn label(&self) -> Label {
        match &self.waited {
            Some(waited) => waited.label.clone(),
            None => self.core.label(self.key, None),
        }
    }

    /// Returns whether the key is on hold for longer than the throttle is drained.
    fn is_held_beyond_drain(&self) -> bool {
        let Some(by) = self.core.tally().drained_by() else {
            return false;
        };
        let held_until = self
            .core
            .find(self.key, |waiters| waiters.queue.held_until());
        held_until.flatten().is_some_and(|until| until > by)
    }
}

impl Future for PaceWait {
    type Output = Result<ThrottlePermit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let ended = "a future is not polled after it was ready";
        let number = self.number.expect(ended);
        let open = self.waited.as_mut().expect(ended).open.as_mut();
        let is_drained = open.is_some_and(|open| open.poll_drained(cx).is_ready());
        let done = if is_drained || self.is_held_beyond_drain() {
            self.core.at(self.key, |waiters, wakers| {
                waiters.leave(number, now, wakers)
            });
            Err(TurnTooLate {
                reason: None,
                retry_at: None,
            })
        } else {
            let polled = self.core.at(self.key, |waiters, wakers| {
                waiters.poll(number, now, cx, wakers)
            });
            ready!(polled.expect("a key with a waiter stays in use"))
        };
        self.number = None;
        let mut waited = self.waited.take().expect(ended);
        let core = self.core.clone();
        Poll::Ready(match done {
            Ok(flight) => {
                waited.span = now.saturating_duration_since(waited.start);
                events::waited(&waited.label, waited.span, waited.turns);
                core.add_units(self.key, 1);
                let waited = Some(waited);
                let permit = ThrottlePermit::new(core, self.key, flight, waited, self.bound);
                Ok(permit.of_kind(self.kind))
            }
            Err(late) => {
                let (reason, refusal) = late.refused(self.bound, now);
                Err(waited.end(&core, reason, refusal, now))
            }
        })
    }
}

impl Drop for PaceWait {
    fn drop(&mut self) {
        if let Some(number) = self.number.take() {
            let now = clock::now();
            self.core.at(self.key, |waiters, wakers| {
                waiters.leave(number, now, wakers)
            });
        }
    }
}
