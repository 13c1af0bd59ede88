//! The right to send one request, and the wait for it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::StatusCode;

use super::engine::{Since, Throttle, refused, report};
use super::paced_queue::{Flight, Number};
use crate::clock;
use crate::error::Limited;
use crate::events;
use crate::key::Key;
use crate::signal::Signal;

/// The right to send one request, at the pace that was learned.
///
/// It ends exactly once: [`answered`](ThrottlePermit::answered), from which the pace learns, or
/// [`give_back`](ThrottlePermit::give_back), for a request that was surely not sent. Dropped, its request counts as sent and
/// without an answer. Until then it is in flight.
#[must_use = "a permit that is dropped counts as spent"]
pub struct ThrottlePermit {
    throttle: Throttle,
    key: Key,
    /// Gone once the permit has ended.
    flight: Option<Flight>,
    /// How the request waited, if it did not get its permit at once.
    waited: Option<Box<Waited>>,
    latest: Instant,
}

/// The wait of a request that did not get its permit at once.
#[derive(Debug)]
pub(super) struct Waited {
    label: Box<str>,
    start: Instant,
    span: Duration,
    turns: u32,
}

/// What becomes of a refused call.
pub(crate) enum Back {
    /// It waits in its old place.
    Waits(Box<Wait>),
    /// It cannot wait so long, or may not be sent again.
    Ended(Limited),
}

impl ThrottlePermit {
    pub(super) fn new(
        throttle: Throttle,
        key: Key,
        flight: Flight,
        waited: Option<Box<Waited>>,
        latest: Instant,
    ) -> Self {
        ThrottlePermit { throttle, key, flight: Some(flight), waited, latest }
    }

    /// The same, and it keeps the name of its key.
    pub(crate) fn named(mut self, label: Box<str>) -> Self {
        let start = clock::now();
        self.waited = Some(Box::new(Waited { label, start, span: Duration::ZERO, turns: 0 }));
        self
    }

    /// The key it is for.
    pub fn key(&self) -> Key {
        self.key
    }

    /// How long the request waited for it.
    pub fn waited(&self) -> Duration {
        self.waited.as_ref().map_or(Duration::ZERO, |waited| waited.span)
    }

    /// The request was sent and this came back. Answers the error that a refusal by the upstream makes, for callers that
    /// want one.
    pub fn answered(mut self, signal: &Signal) -> Option<Limited> {
        match self.end(signal, None) {
            Some(Back::Ended(limited)) => Some(limited),
            _ => None,
        }
    }

    /// The same; a refused call waits in its old place, if it can wait so long.
    pub(crate) fn answered_or_back(mut self, signal: &Signal) -> Option<Back> {
        let latest = self.latest;
        self.end(signal, Some(latest))
    }

    fn end(&mut self, signal: &Signal, back_until: Option<Instant>) -> Option<Back> {
        let now = clock::now();
        let flight = self.flight.take()?;
        let number = flight.number;
        let answer = |waiters: &mut super::waiters::Waiters, wakers: &mut _| {
            waiters.answered(flight, signal, back_until, now, wakers)
        };
        let is_back = self.throttle.at(self.key, answer).unwrap_or(false);
        let status = signal.limited()?;
        let Waited { label, start, span, turns } = match self.waited.take() {
            Some(waited) => *waited,
            None => Waited {
                label: self.throttle.label(self.key, None),
                start: now,
                span: Duration::ZERO,
                turns: 0,
            },
        };
        events::upstream_limited(&label, status, signal.retry_after());
        if is_back {
            let mut wait = Wait::new(self.throttle.clone(), self.key, number, label, start, self.latest);
            wait.turns = turns + 1;
            wait.refused = Some(status);
            return Some(Back::Waits(Box::new(wait)));
        }
        let since = Since { start: now.checked_sub(span).unwrap_or(now), now, turns };
        let report = report(label, signal.retry_after(), &since);
        Some(Back::Ended(Limited::Upstream { status, report }))
    }

    /// The request was surely not sent: the next in line may leave in its place.
    pub fn give_back(mut self) {
        if let Some(flight) = self.flight.take() {
            let now = clock::now();
            self.throttle.at(self.key, |waiters, wakers| waiters.unsent(flight, now, wakers));
        }
    }
}

impl Drop for ThrottlePermit {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.throttle.lost(self.key, flight);
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

/// Waits in line. Dropped, it gives up its place.
pub(crate) struct Wait {
    throttle: Throttle,
    key: Key,
    /// Gone once the wait has ended.
    number: Option<Number>,
    label: Box<str>,
    start: Instant,
    latest: Instant,
    turns: u32,
    /// With what the upstream refused the attempt before, if there was one: the error of a wait that ends without a turn.
    refused: Option<StatusCode>,
}

impl Wait {
    pub(super) fn new(
        throttle: Throttle,
        key: Key,
        number: Number,
        label: Box<str>,
        start: Instant,
        latest: Instant,
    ) -> Self {
        Wait { throttle, key, number: Some(number), label, start, latest, turns: 1, refused: None }
    }
}

impl Future for Wait {
    type Output = Result<ThrottlePermit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let number = self.number.expect("a future is not polled after it was ready");
        let polled = self.throttle.at(self.key, |waiters, wakers| waiters.poll(number, now, cx, wakers));
        let done = match polled.expect("a station stays while somebody waits") {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(done) => done,
        };
        self.number = None;
        let (label, turns) = (std::mem::take(&mut self.label), self.turns);
        let span = now.saturating_duration_since(self.start);
        Poll::Ready(match done {
            Ok(flight) => {
                events::waited(&label, span, turns);
                let waited = Box::new(Waited { label, start: self.start, span, turns });
                let (throttle, latest) = (self.throttle.clone(), self.latest);
                Ok(ThrottlePermit::new(throttle, self.key, flight, Some(waited), latest))
            }
            Err(over) => {
                let by_deadline = self.latest < clock::after(self.start, self.throttle.max_wait());
                let reason = self.throttle.why(over, by_deadline);
                let since = Since { start: self.start, now, turns };
                Err(match self.refused {
                    None => refused(reason, label, over.retry_at, since),
                    Some(status) => {
                        let retry_after = over.retry_at.map(|at| at.saturating_duration_since(now));
                        let report = report(label, retry_after, &since);
                        let limited = Limited::Upstream { status, report };
                        events::limited(&limited);
                        limited
                    }
                })
            }
        })
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(number) = self.number.take() {
            self.throttle.leave(self.key, number);
        }
    }
}
