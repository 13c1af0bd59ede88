//! The gate with a quota.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::events;
use super::line::{Call, Desk, Entered, Line, Place};
use super::permit::{Permit, Wait};
use super::queue::{Settled, Slot, Wakers};
use crate::clock;
use crate::error::{Facts, Limited, Reason, Report, StoreError};
use crate::key::Key;
use crate::keyed::Keyed;
use crate::limit::Terms;
use crate::store::{Answer, Lease, LimitUsage, Refusal, Store, Usage};

/// The gate, without HTTP: for job workers, gRPC, anything. Clones share one count.
///
/// Made by [`RateLimitLayer::limiter`](crate::RateLimitLayer::limiter).
///
/// ```
/// use tollgate::{Key, Quota, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
///
/// let permit = limiter.acquire(Key::new("customer 17")).await?;
/// // ... send the request ...
/// drop(permit);
///
/// assert_eq!(limiter.peek(Key::new("customer 17")).await?.limits[0].used, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Limiter(Arc<Gate>);

struct Gate {
    lines: Keyed<Line>,
    settings: Settings,
}

/// What a gate is built from, checked.
pub(crate) struct Settings {
    pub(crate) terms: Arc<Terms>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: usize,
    pub(crate) max_keys: usize,
}

/// One who enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) cost: u32,
    pub(crate) deadline: Option<Instant>,
}

/// What came of entering.
pub(crate) enum Started {
    Granted(Permit),
    Waiting(Waiter),
    Limited(Limited),
}

/// The state of a key, as [`Limiter::peek`] tells it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Peek {
    /// Each limit with the units used of it.
    pub limits: Vec<LimitUsage>,
    /// How many units could go now, those this process has at hand included.
    pub free: u64,
    /// Until one unit could go: zero when `free` is not 0.
    pub next_slot: Duration,
    /// How many wait in this process.
    pub waiting: usize,
}

impl Limiter {
    pub(crate) fn new(settings: Settings) -> Self {
        Limiter(Arc::new(Gate { lines: Keyed::new(settings.max_keys), settings }))
    }

    /// A permit for one request of `key`, at once or after a wait of at most `max_wait`.
    ///
    /// A request enters the line when the future is first polled.
    ///
    /// # Errors
    ///
    /// [`Limited::Local`] when its slot lies further away than `max_wait` or its deadline, the line is full, or its
    /// cost is above the limit; [`Limited::Store`] when the store could not be asked.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future at any time gives up the place in the line, and its slot goes to the next.
    ///
    /// # Panics
    ///
    /// When it has to wait and is polled outside of a Tokio runtime with timers.
    pub fn acquire(&self, key: Key) -> Acquire {
        Acquire(Step::New(self.clone(), Entry { key, cost: 1, deadline: None }))
    }

    /// The state of `key`: limits, used, free, waiting. Consumes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the store could not be asked.
    pub async fn peek(&self, key: Key) -> Result<Peek, StoreError> {
        let answer = self.0.settings.store.peek(key, &self.0.settings.terms);
        let Usage { limits, free, next_slot, .. } = match answer {
            Answer::Now(usage) => usage?,
            Answer::Later(usage) => usage.await?,
        };
        let now = clock::now();
        let (waiting, at_hand) =
            self.0.lines.find(key, |line| (line.waiting(), line.at_hand(now))).unwrap_or_default();
        let free = free + u64::from(at_hand);
        let next_slot = if free > 0 { Duration::ZERO } else { next_slot };
        Ok(Peek { limits, free, next_slot, waiting })
    }

    /// Enters the gate. `label` names the key in errors; it is asked for on the slow path only.
    #[inline]
    pub(crate) fn start(&self, entry: Entry, label: impl FnOnce() -> Box<str>) -> Started {
        if entry.cost == 0 {
            return Started::Granted(Permit::new(self.clone(), entry.key, None));
        }
        let now = clock::now();
        let lines = &self.0.lines;
        if entry.deadline.is_none_or(|deadline| now <= deadline)
            && let Some(Some(slot)) = lines.find(entry.key, |line| line.take(entry.cost, now))
        {
            return Started::Granted(Permit::new(self.clone(), entry.key, Some(slot)));
        }
        self.start_slow(entry, now, label)
    }

    #[cold]
    fn start_slow(&self, entry: Entry, now: Instant, label: impl FnOnce() -> Box<str>) -> Started {
        let settings = &self.0.settings;
        let patience = Patience::new(entry.deadline, now, settings.max_wait);
        let refused = |reason, refusal: Refusal, label: Box<str>| {
            let report = report(label, self.which(refusal), now, now, 0);
            Started::Limited(told(Limited::Local { reason, report }))
        };
        let largest = settings.terms.quota().largest_cost();
        if entry.cost > largest {
            return refused(Reason::CostAboveLimit { cost: entry.cost, largest }, NOTHING, label());
        }
        if patience.latest < now {
            return refused(Reason::Deadline, NOTHING, label());
        }
        let mut wakers = Wakers::default();
        let desk = self.desk(entry.key, now);
        let entered = self.0.lines.enter(
            entry.key,
            now,
            || Line::new(now),
            |line| {
                let (entered, call) = line.enter(&desk, entry.cost, patience.latest, &mut wakers);
                (entered, call, line.waiting())
            },
        );
        wakers.wake();
        let Ok((entered, call, in_line)) = entered else {
            return refused(Reason::TooManyKeys(settings.max_keys), NOTHING, label());
        };
        if let Some(call) = call {
            self.run(entry.key, call);
        }
        match entered {
            Entered::Granted(slot) => Started::Granted(Permit::new(self.clone(), entry.key, Some(slot))),
            Entered::Refused(refusal) => refused(patience.reason(settings.max_wait), refusal, label()),
            Entered::LineFull => refused(Reason::LineFull(settings.max_waiting), NOTHING, label()),
            Entered::Failed(source) => {
                let report = report(label(), NOTHING, now, now, 0);
                Started::Limited(told(Limited::Store { source, report }))
            }
            Entered::Waiting(number) => {
                let label = label();
                events::waiting(&label, in_line);
                let place = Place { number, cost: entry.cost, latest: patience.latest, turns: 1 };
                Started::Waiting(Waiter {
                    limiter: self.clone(),
                    key: entry.key,
                    place,
                    waits: true,
                    patience,
                    since: now,
                    label,
                })
            }
        }
    }

    fn desk(&self, key: Key, now: Instant) -> Desk<'_> {
        let Settings { terms, store, max_waiting, .. } = &self.0.settings;
        Desk { key, store, terms, now, max_waiting: *max_waiting }
    }

    /// Where a quota has one limit, that is the one which refused.
    fn which(&self, refusal: Refusal) -> Refusal {
        match self.0.settings.terms.quota().limits() {
            [only] => Refusal { limit: Some(*only), ..refusal },
            _ => refusal,
        }
    }

    /// The error of a request in which the key function found no key.
    #[cold]
    pub(crate) fn no_key(&self) -> Limited {
        let now = clock::now();
        told(Limited::Local { reason: Reason::NoKey, report: report("none".into(), NOTHING, now, now, 0) })
    }

    pub(super) fn give_back(&self, key: Key, slot: Slot) {
        let now = clock::now();
        let desk = self.desk(key, now);
        let mut wakers = Wakers::default();
        let found = self.0.lines.find(key, |line| line.give_back(&desk, slot, &mut wakers));
        match found {
            Some(call) => self.finish(key, call, wakers),
            None => desk.store.give_back(key, desk.terms, &[slot.unused()]),
        }
    }

    /// Does what a line left to be done without its lock.
    fn finish(&self, key: Key, call: Option<Call>, wakers: Wakers) {
        wakers.wake();
        if let Some(call) = call {
            self.run(key, call);
        }
    }

    /// Runs a store call to its end, whoever of those who wait for it gives up meanwhile.
    fn run(&self, key: Key, call: Call) {
        let mut pending = PendingCall { limiter: self.clone(), key, sent: clock::now(), open: true };
        // Without a runtime there is nobody to run it: dropped, it ends as an outcome that is not known.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let answer = call.await;
                pending.end(answer);
            });
        }
    }
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Settings { terms, max_wait, max_waiting, max_keys, .. } = &self.0.settings;
        f.debug_struct("Limiter")
            .field("quota", terms.quota())
            .field("max_wait", max_wait)
            .field("max_waiting", max_waiting)
            .field("max_keys", max_keys)
            .finish_non_exhaustive()
    }
}

/// A store call under way. It ends exactly once; dropped with its runtime, it ends as lost.
struct PendingCall {
    limiter: Limiter,
    key: Key,
    sent: Instant,
    open: bool,
}

impl PendingCall {
    fn end(&mut self, answer: Result<Lease, StoreError>) {
        self.open = false;
        let desk = self.limiter.desk(self.key, clock::now());
        let mut wakers = Wakers::default();
        let call = self
            .limiter
            .0
            .lines
            .find(self.key, |line| line.call_answered(&desk, answer, self.sent, &mut wakers))
            .flatten();
        self.limiter.finish(self.key, call, wakers);
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if self.open {
            self.end(Err(StoreError::Lost));
        }
    }
}

/// How long one waits, and which bound that is.
#[derive(Clone, Copy, Debug)]
struct Patience {
    latest: Instant,
    by_deadline: bool,
}

impl Patience {
    fn new(deadline: Option<Instant>, now: Instant, max_wait: Duration) -> Self {
        let latest = clock::after(now, max_wait);
        match deadline {
            Some(deadline) if deadline < latest => Patience { latest: deadline, by_deadline: true },
            _ => Patience { latest, by_deadline: false },
        }
    }

    fn reason(&self, max_wait: Duration) -> Reason {
        if self.by_deadline { Reason::Deadline } else { Reason::MaxWait(max_wait) }
    }
}

/// A refusal that no wait would end.
const NOTHING: Refusal = Refusal { wait: None, limit: None };

fn report(key: Box<str>, refusal: Refusal, since: Instant, now: Instant, turns: u32) -> Report {
    let Refusal { wait, limit } = refusal;
    let waited = now.saturating_duration_since(since);
    Report::new(Facts { key, limit, retry_after: wait, at: clock::wall(now), waited, turns })
}

fn told(limited: Limited) -> Limited {
    events::limited(&limited);
    limited
}

/// A place in the line. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Waiter {
    limiter: Limiter,
    key: Key,
    place: Place,
    /// Whether it is in the line now.
    waits: bool,
    patience: Patience,
    since: Instant,
    label: Box<str>,
}

impl Waiter {
    /// Its permit died before it could be used: it waits in its old place.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        let Some(slot) = permit.into_slot() else { return };
        self.waits = true;
        let mut wakers = Wakers::default();
        let now = clock::now();
        let desk = self.limiter.desk(self.key, now);
        let place = &mut self.place;
        let entered = self.limiter.0.lines.enter(
            self.key,
            now,
            || Line::new(now),
            |line| line.return_late(&desk, place, slot, &mut wakers),
        );
        // Without room for the line, the next poll finds none and ends the wait.
        self.limiter.finish(self.key, entered.ok().flatten(), wakers);
    }

    fn settled(&mut self, settled: Settled, now: Instant) -> Result<Permit, Limited> {
        self.waits = false;
        let turns = self.place.turns;
        let label = self.label.clone();
        match settled {
            Settled::Granted(slot) => {
                let waited = now.saturating_duration_since(self.since);
                events::waited(&label, waited, turns);
                let permit = Permit::new(self.limiter.clone(), self.key, Some(slot));
                Ok(permit.after(Wait { label, waited, turns }))
            }
            Settled::Refused(refusal) => {
                let reason = self.patience.reason(self.limiter.0.settings.max_wait);
                let report = report(label, self.limiter.which(refusal), self.since, now, turns);
                Err(told(Limited::Local { reason, report }))
            }
            Settled::Failed(source) => {
                let report = report(label, NOTHING, self.since, now, turns);
                Err(told(Limited::Store { source, report }))
            }
        }
    }
}

impl Future for Waiter {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = clock::now();
        let waiter = &mut *self;
        let desk = waiter.limiter.desk(waiter.key, now);
        let mut wakers = Wakers::default();
        let place = &mut waiter.place;
        let found = waiter.limiter.0.lines.find(waiter.key, |line| line.poll(&desk, place, cx, &mut wakers));
        let (polled, call) = found.unwrap_or((Poll::Ready(Settled::Refused(NOTHING)), None));
        waiter.limiter.finish(waiter.key, call, wakers);
        polled.map(|settled| waiter.settled(settled, now))
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if self.waits {
            let place = &self.place;
            let desk = self.limiter.desk(self.key, clock::now());
            let mut wakers = Wakers::default();
            let call =
                self.limiter.0.lines.find(self.key, |line| line.leave(&desk, place, &mut wakers)).flatten();
            self.limiter.finish(self.key, call, wakers);
        }
    }
}

/// The future of a [`Permit`]; made by [`Limiter::acquire`], which tells its errors and cancel safety.
#[must_use = "futures do nothing unless polled"]
#[derive(Debug)]
pub struct Acquire(Step);

// New => Waiting | done
// Waiting => done
#[derive(Debug)]
enum Step {
    New(Limiter, Entry),
    Waiting(Waiter),
    Done,
}

impl Acquire {
    /// The units it takes. Default: 1. A cost of 0 passes at once.
    ///
    /// Has no effect once the future was polled; nor has [`deadline`](Acquire::deadline).
    pub fn cost(mut self, cost: u32) -> Self {
        if let Step::New(_, entry) = &mut self.0 {
            entry.cost = cost;
        }
        self
    }

    /// The moment by which the request must leave; `max_wait` holds besides. Default: none.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        if let Step::New(_, entry) = &mut self.0 {
            entry.deadline = Some(deadline);
        }
        self
    }
}

impl Future for Acquire {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                Step::New(limiter, entry) => {
                    let started = limiter.start(*entry, || entry.key.label(None));
                    self.0 = Step::Done;
                    match started {
                        Started::Granted(permit) => return Poll::Ready(Ok(permit)),
                        Started::Limited(limited) => return Poll::Ready(Err(limited)),
                        Started::Waiting(waiter) => self.0 = Step::Waiting(waiter),
                    }
                }
                Step::Waiting(waiter) => {
                    let polled = Pin::new(waiter).poll(cx);
                    if polled.is_ready() {
                        self.0 = Step::Done;
                    }
                    return polled;
                }
                Step::Done => panic!("an Acquire future was polled after it was ready"),
            }
        }
    }
}
