//! The right to send one request, and the wait for it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use http::StatusCode;

use super::engine::ThrottleCore;
use super::paced_queue::Flight;
use super::waiters::{Ended, TurnAnswer, TurnTooLate, Waiters};
use crate::clock;
use crate::error::{Limited, Reason};
use crate::events::{self, WaitSpan};
use crate::guarded;
use crate::key::{Key, Label};
use crate::limiter::Because;
use crate::refused::RefusedRequest;
use crate::signal::Signal;
use crate::stats::{Engine, OpenRequest, Outcome};
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
    /// How the request has waited, and its label, if either is known.
    waited: Option<Box<TurnWaited>>,
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
#[derive(Clone)]
pub(super) struct PacedRequest {
    core: Arc<ThrottleCore>,
    entry: PaceEntry,
    /// How long it may wait for a turn, also for another one.
    bound: WaitBound,
}

/// How a request has waited for its turns, and its label.
#[derive(Clone)]
struct TurnWaited {
    label: Label,
    /// When it began to wait.
    start: Instant,
    /// How long it had waited when its last turn came.
    span: Duration,
    /// How often it waited for its turn.
    turns: u32,
    /// The status with which the upstream refused the last attempt, if there was one. A wait that ends
    /// without a turn ends with it.
    refused: Option<StatusCode>,
}

impl TurnWaited {
    /// Makes the value for a request that left `at` this moment without a wait.
    fn at_once(label: Label, at: Instant) -> Self {
        TurnWaited {
            label,
            start: at,
            span: Duration::ZERO,
            turns: 0,
            refused: None,
        }
    }

    /// Returns the request for its error, if it has waited for `span`.
    fn as_refused(&self, span: Duration) -> RefusedRequest {
        RefusedRequest::of_pace(self.label.clone(), span, self.turns)
    }
}

impl PacedRequest {
    pub(super) fn new(core: Arc<ThrottleCore>, entry: PaceEntry, bound: WaitBound) -> Self {
        PacedRequest { core, entry, bound }
    }

    /// Makes the permit of the request, which leaves without a wait.
    pub(super) fn leaves(self, flight: Flight) -> ThrottlePermit {
        ThrottlePermit {
            request: self,
            waited: None,
            flight: Some(flight),
        }
    }

    /// Makes the wait of the request, which arrives `now`, behind `queued` requests with itself.
    pub(super) fn waits(
        self,
        number: Number,
        label: Label,
        queued: usize,
        now: Instant,
    ) -> Box<PaceWait> {
        let span = WaitSpan::begin(&label, Because::Pace.name(), None, None);
        let (core, key) = (self.core.clone(), self.entry.key);
        Box::new(PaceWait {
            request: self,
            open: OpenRequest::begin(core, key, now, &label, queued, span),
            waited: TurnWaited {
                turns: 1,
                ..TurnWaited::at_once(label, now)
            },
            number: Some(number),
        })
    }

    /// Makes the wait of the request to be sent again, which has `waited` before.
    fn waits_again(&self, number: Number, waited: TurnWaited) -> Box<PaceWait> {
        let span = WaitSpan::begin(&waited.label, Because::Pace.name(), None, None);
        let (core, key) = (self.core.clone(), self.entry.key);
        Box::new(PaceWait {
            request: self.clone(),
            open: OpenRequest::counted_elsewhere(core, key, waited.start, span),
            waited: TurnWaited {
                turns: waited.turns + 1,
                ..waited
            },
            number: Some(number),
        })
    }

    /// Ends the request in flight. A drain may wait for that.
    fn ends<R>(&self, end: impl FnOnce(&mut Waiters, &mut Wakers) -> R) -> Option<R> {
        let ended = self.core.at(self.entry.key, end);
        self.core.tally().call_ended();
        ended
    }

    /// Ends a request in flight that was certainly not sent, as `end` says.
    fn not_sent(&self, end: impl FnOnce(&mut Waiters, &mut Wakers)) {
        self.core.give_back_units(self.entry.key, 1);
        self.ends(end);
    }

    /// Ends a request in flight that was certainly not sent. The next request may leave in its place.
    fn give_back(&self, flight: Flight) {
        self.not_sent(|waiters, wakers| waiters.unsent(flight, clock::now(), wakers));
    }
}

impl ThrottlePermit {
    /// Sets the label of the permit's key, for the error that a refusal makes.
    pub(crate) fn named(mut self, label: Label) -> Self {
        self.waited = Some(Box::new(TurnWaited::at_once(label, clock::now())));
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
        self.waited
            .as_ref()
            .map_or(Duration::ZERO, |waited| waited.span)
    }

    pub(crate) fn label(&self) -> Label {
        match &self.waited {
            Some(waited) => waited.label.clone(),
            None => self.request.core.label(self.key(), None),
        }
    }

    /// Ends the permit with what the response states. If the upstream refused the request, returns
    /// the error for it, which the caller may ignore.
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.end(signal, None, false, clock::now()).err()
    }

    /// Ends the permit as [`answered`](ThrottlePermit::answered) does, with a response that arrived at `now`. `status` is
    /// that of the response, if it has one. If the request `may_be_back`, the upstream refused it, and it can be sent again
    /// in time, returns its wait in its old place.
    ///
    /// # Errors
    ///
    /// That of the refusal, if the request has no time to wait, or may not be sent again.
    pub(crate) fn end(
        mut self,
        signal: &Signal,
        status: Option<StatusCode>,
        may_be_back: bool,
        now: Instant,
    ) -> Result<Option<Box<PaceWait>>, Limited> {
        let key = self.key();
        if let Some(flight) = &self.flight
            && let Some(status) = guarded::bad_status(status, signal)
            && let Some(guard) = &self.request.core.settings.guard
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
        let waited = self.waited.as_ref();
        let answer = TurnAnswer {
            signal,
            kind: self.request.entry.kind,
            max_hold: core.settings.max_hold,
            back_within: Some(self.request.bound)
                .filter(|_| may_be_back && !core.tally().is_draining()),
            was_refused: waited.is_some_and(|waited| waited.refused.is_some()),
        };
        let ended = self
            .request
            .ends(|waiters, wakers| waiters.answered(flight, &answer, now, wakers));
        let Ended { back, held } = ended.unwrap_or_default();
        let retry_after = signal.retry_after();
        let refused = signal.refusal().map(|status| {
            let mut waited = match self.waited.take() {
                Some(waited) => *waited,
                None => TurnWaited::at_once(core.label(key, None), now),
            };
            waited.refused = Some(status);
            // The time of the server is no wait.
            waited.start = clock::before(now, waited.span);
            // Before the events: a function of the user that takes one may panic, and then the request leaves its place.
            let wait = back.map(|number| self.request.waits_again(number, waited.clone()));
            (status, waited, wait)
        });
        if let Some((left, cause)) = held {
            core.report_hold(key, left, cause);
        }
        let Some((status, waited, wait)) = refused else {
            return Ok(None);
        };
        events::upstream_limited(Some(core.tally()), &waited.label, status, retry_after);
        if wait.is_some() {
            return Ok(wait);
        }
        let request = waited.as_refused(waited.span);
        Err(request.refused_upstream(status, retry_after, now))
    }

    /// Ends the permit of a request that was certainly not sent. The next request may leave in its
    /// place.
    pub fn give_back(mut self) {
        if let Some(flight) = self.flight.take() {
            self.request.give_back(flight);
        }
    }
}

impl Drop for ThrottlePermit {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            let now = clock::now();
            self.request
                .ends(|waiters, wakers| waiters.lost(flight, now, wakers));
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

/// The turn of a request that waited and is not sent yet. If it is dropped, the next request has the turn.
pub(crate) struct Turn {
    request: PacedRequest,
    flight: Option<Flight>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.request.give_back(flight);
        }
    }
}

/// A request that waits for its turn. Dropping it gives up its place in the queue.
///
/// The request counts as refused when this returns an error. If its turn has come, the owner calls
/// [`leave`](PaceWait::leave).
pub(crate) struct PaceWait {
    request: PacedRequest,
    waited: TurnWaited,
    /// Counts the request when it leaves.
    open: OpenRequest<ThrottleCore>,
    /// The request's number in the queue; `None` while it has its turn, and once the wait has ended.
    number: Option<Number>,
}

impl PaceWait {
    pub(crate) async fn permit(mut self: Box<Self>) -> Result<ThrottlePermit, Limited> {
        loop {
            let turn = (&mut self).await?;
            // The key may have been put on hold since its turn.
            if let Some(permit) = self.leave(turn)? {
                return Ok(permit);
            }
        }
    }

    /// Lets the request leave some time after its turn, and counts it. Returns `None` if a hold has begun, or if the
    /// throttle is drained: then the request waits again, in its old place.
    ///
    /// # Errors
    ///
    /// If the deadline of the request has passed. Then the wait has ended.
    pub(crate) fn leave(&mut self, mut turn: Turn) -> Result<Option<ThrottlePermit>, Limited> {
        let now = clock::now();
        let PacedRequest { core, entry, bound } = &self.request;
        if bound.has_passed(now) {
            drop(turn);
            return Err(self.refuse(Reason::Deadline, Refusal::NEVER, now));
        }
        let held = core.find(entry.key, |waiters| waiters.held(now)).flatten();
        let stays = held.is_some() || self.open.is_drained();
        let Some(flight) = turn.flight.take_if(|_| stays) else {
            self.open.left(Outcome::Waited);
            return Ok(Some(ThrottlePermit {
                request: self.request.clone(),
                waited: Some(Box::new(self.waited.clone())),
                flight: turn.flight.take(),
            }));
        };
        self.number = Some(flight.number);
        self.waited.turns += 1;
        self.request
            .not_sent(|waiters, wakers| waiters.wait_again(flight, *bound, now, wakers));
        Ok(None)
    }

    /// Returns whether the key is on hold for longer than the throttle is drained.
    fn is_held_beyond_drain(&self) -> bool {
        let PacedRequest { core, entry, .. } = &self.request;
        let Some(by) = core.tally().drained_by() else {
            return false;
        };
        let held_until = core.find(entry.key, |waiters| waiters.queue.held_until());
        held_until.flatten().is_some_and(|until| until > by)
    }

    fn give_place_up(&mut self, now: Instant) {
        if let Some(number) = self.number.take() {
            let PacedRequest { core, entry, .. } = &self.request;
            core.at(entry.key, |waiters, wakers| {
                waiters.leave(number, now, wakers)
            });
        }
    }

    /// Refuses the request, which has no place any more, and counts it. Returns its error: that of the upstream, if it has
    /// refused an attempt before.
    fn refuse(&mut self, reason: Reason, refusal: Refusal, now: Instant) -> Limited {
        let waited = &self.waited;
        let request = waited.as_refused(now.saturating_duration_since(waited.start));
        let Some(status) = waited.refused else {
            return self.open.refuse(request.refuse(reason, refusal, now));
        };
        // It counted when it left for the first time.
        let limited = request.refused_upstream(status, refusal.wait, now);
        let limited = self.open.refuse(limited);
        events::limited(self.request.core.tally(), &limited);
        limited
    }

    /// Gives the request its turn, which comes now.
    fn has_turn(&mut self, flight: Flight, now: Instant) -> Turn {
        self.number = None;
        let waited = &mut self.waited;
        waited.span = now.saturating_duration_since(waited.start);
        events::waited(&waited.label, waited.span, waited.turns);
        Turn {
            request: self.request.clone(),
            flight: Some(flight),
        }
    }
}

impl Future for PaceWait {
    type Output = Result<Turn, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let number = self
            .number
            .expect("a future is not polled after it was ready");
        let late = if self.open.poll_drained(cx).is_ready() || self.is_held_beyond_drain() {
            self.give_place_up(now);
            TurnTooLate {
                reason: None,
                retry_at: None,
            }
        } else {
            let PacedRequest { core, entry, .. } = &self.request;
            let polled = core.at(entry.key, |waiters, wakers| {
                let polled = waiters.poll(number, now, cx, wakers);
                if let Poll::Ready(Ok(_)) = &polled {
                    waiters.counts.add_units(1);
                }
                polled
            });
            match ready!(polled.expect("a key with a waiter stays in use")) {
                Ok(flight) => return Poll::Ready(Ok(self.has_turn(flight, now))),
                Err(late) => late,
            }
        };
        self.number = None;
        let (reason, refusal) = late.refused(self.request.bound, now);
        Poll::Ready(Err(self.refuse(reason, refusal, now)))
    }
}

impl Drop for PaceWait {
    fn drop(&mut self) {
        self.give_place_up(clock::now());
    }
}
