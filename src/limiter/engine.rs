//! The gate with a quota.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::acquire::{Acquire, Waiter};
use super::holds::GateId;
use super::hosts::Hosts;
use super::key_state::{Desk, Entered, Errand, Line, next_number};
use super::queue::Number;
use super::reservation::{Patience, Slot};
use super::seat::{Flights, Seat, Sitting};
use super::settings::{OnStoreError, Settings};
use crate::clock;
use crate::error::{Facts, Limited, Reason, Report, StoreError};
use crate::events;
use crate::key::{Key, RequestInfo};
use crate::key_map::{Full, Keyed};
use crate::limit::Terms;
use crate::store::{self, Refusal};
use crate::wakers::Wakers;

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
///
/// # Two limits with different keys
///
/// A server may allow one message per second to each channel, and 30 per minute in all. A permit is valid for some
/// milliseconds only, so the wait for the second permit can outlast the first one. Then give the first one back and ask for
/// it again, until both are valid:
///
/// ```
/// use std::{mem::swap, time::{Duration, Instant}};
/// use tollgate::{Key, Limited, Limiter, Permit, Quota, RateLimitLayer};
///
/// async fn both(
///     mut first: (&Limiter, Key),
///     mut second: (&Limiter, Key),
///     deadline: Instant,
/// ) -> Result<[Permit; 2], Limited> {
///     let mut held = first.0.acquire(first.1).deadline(deadline).await?;
///     loop {
///         let next = match second.0.acquire(second.1).deadline(deadline).await {
///             Ok(next) => next,
///             Err(limited) => {
///                 held.give_back();
///                 return Err(limited);
///             }
///         };
///         if held.is_alive() {
///             return Ok([held, next]);
///         }
///         held.give_back();
///         held = next;
///         swap(&mut first, &mut second);
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let channels = RateLimitLayer::new(Quota::per_second(1))?.limiter();
/// let all = RateLimitLayer::new(Quota::per_minute(30))?.limiter();
///
/// # let start = tokio::time::Instant::now();
/// # for _ in 0..2 {
/// let deadline = Instant::now() + Duration::from_secs(10);
/// # let deadline = tokio::time::Instant::now().into_std() + Duration::from_secs(10);
/// let permits = both((&channels, Key::new("general")), (&all, Key::ALL), deadline).await?;
/// // ... send the request ...
/// drop(permits);
/// # }
/// # assert!(start.elapsed() > Duration::from_secs(1));
/// # assert_eq!(all.peek(Key::ALL).await?.limits[0].used, 2);
/// # Ok(())
/// # }
/// ```
///
/// The limiter that usually makes requests wait longer comes first. Two [layers](crate::RateLimitLayer#two-layers) around
/// each other do not do this.
///
/// # Cancel safety
///
/// If that future is dropped while it waits, the permit it holds counts as spent, and its place in the line is given up.
#[derive(Clone)]
pub struct Limiter(pub(super) Arc<Gate>);

pub(super) struct Gate {
    pub(super) id: GateId,
    pub(super) lines: Keyed<Line>,
    /// Only where calls in flight are limited.
    pub(super) flights: Option<Flights>,
    pub(super) settings: Settings,
    /// Whether it was told that other processes assert other limits.
    pub(super) warned: AtomicBool,
    /// The hosts of requests under [`Key::ALL`].
    pub(super) hosts: Hosts,
}

/// One who enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) cost: u32,
    pub(crate) deadline: Option<Instant>,
    /// The key of its host, if it matters which host answers.
    pub(crate) host: Option<Key>,
}

/// What came of entering.
pub(crate) enum Started {
    /// With a slot that is due, or none for what costs nothing; and with a seat, where those are limited.
    Granted(Option<Slot>, Option<Seat>),
    Waiting(Box<Waiter>),
    Limited(Limited),
}

/// How far one got that came to the gate.
pub(super) enum Reached {
    /// A slot that is due, or that rates are not limited.
    Slot(Option<Slot>),
    /// A place in the line.
    Place(Number),
    /// Nothing but to wait until then.
    Later(Instant),
    Refused(Reason, Refusal),
    Failed(StoreError),
}

impl Limiter {
    pub(crate) fn new(settings: Settings) -> Self {
        let gate = Arc::new(Gate {
            id: GateId::next(),
            lines: Keyed::new(settings.max_keys),
            flights: Flights::new(&settings),
            settings,
            warned: AtomicBool::new(false),
            hosts: Hosts::default(),
        });
        gate.listen();
        Limiter(gate)
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
        Acquire::new(self.clone(), Entry { key, cost: 1, deadline: None, host: None })
    }

    /// Gives back what this process has at hand, and answers when the store has all that was given back.
    ///
    /// For the end of a program whose other processes go on: without it, what is left here is lost to them until it
    /// runs out, a window later at most. The limiter can be used again afterwards.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the store may not have it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves what is on its way on its way.
    pub async fn shutdown(&self) -> Result<(), StoreError> {
        let Settings { store, terms, .. } = &self.0.settings;
        let now = clock::now();
        self.0.lines.for_each(|key, line| {
            if let Some(unused) = line.clear() {
                store.give_back(key, self.learned(line, now).as_ref().unwrap_or(terms), &[unused]);
            }
        });
        store.flush().arrives().await
    }

    /// Enters the gate if a permit is at hand, which `pick` takes; else answers when that was.
    #[inline]
    fn take<R>(
        &self,
        entry: &Entry,
        pick: impl FnOnce(&mut Line, u32, Instant) -> Option<R>,
    ) -> Result<(Option<R>, Instant), Instant> {
        let now = clock::now();
        if entry.cost == 0 {
            return Ok((None, now));
        }
        if self.0.flights.is_some() {
            return Err(now);
        }
        if !self.is_clear(entry, now) {
            return Err(now);
        }
        if entry.deadline.is_some_and(|deadline| deadline < now) {
            return Err(now);
        }
        let taken = self.0.lines.find(entry.key, |line| pick(line, entry.cost, now)).flatten();
        taken.map(|taken| (Some(taken), now)).ok_or(now)
    }

    /// Sends a request if a permit is at hand. Answers when that was, or was not, for [`start_slow`](Limiter::start_slow).
    #[inline]
    pub(crate) fn send_at_once(&self, entry: &Entry) -> Result<Instant, Instant> {
        self.take(entry, |line, cost, now| line.spend(cost, now).then_some(())).map(|(_, now)| now)
    }

    /// Enters the gate. `label` names the key in errors; it is asked for on the slow path only.
    #[inline]
    pub(crate) fn start(&self, entry: &Entry, label: impl FnOnce() -> Box<str>) -> Started {
        match self.take(entry, Line::take) {
            Ok((slot, _)) => Started::Granted(slot, None),
            Err(now) => self.start_slow(entry, now, label),
        }
    }

    #[cold]
    pub(crate) fn start_slow(
        &self,
        entry: &Entry,
        now: Instant,
        label: impl FnOnce() -> Box<str>,
    ) -> Started {
        let settings = &self.0.settings;
        let patience = Patience::new(entry.deadline, now, settings.max_wait);
        let largest = settings.terms.quota().largest_cost();
        let reason = if entry.cost > largest {
            Some(Reason::CostAboveLimit { cost: entry.cost, largest })
        } else {
            (patience.latest < now).then_some(Reason::Deadline)
        };
        if let Some(reason) = reason {
            return Started::Limited(refused(reason, report(label(), Refusal::NEVER, now, now, 0)));
        }
        match self.held_apart(entry, patience, now) {
            None => {}
            Some(Reached::Later(until)) => {
                let label = label();
                events::waiting(&label, 1);
                let waiter = Waiter::new(self.clone(), entry, patience, now, label);
                return Started::Waiting(Box::new(waiter.held_apart(until)));
            }
            Some(reached) => return self.started(reached, None, entry, patience, now, label),
        }
        let sitting = match &self.0.flights {
            Some(flights) => self.sit(flights, entry.key, patience, now),
            None => Sitting::Sits(None),
        };
        let (reached, seat) = match sitting {
            Sitting::Sits(seat) => (self.line_up(entry, None, patience, now), seat),
            Sitting::Waits(number) => {
                let label = label();
                events::waiting(&label, self.waiting_for_seats(entry.key));
                let waiter = Waiter::new(self.clone(), entry, patience, now, label);
                return Started::Waiting(Box::new(waiter.for_seat(number)));
            }
            Sitting::Ended(reached) => (reached, None),
        };
        self.started(reached, seat, entry, patience, now, label)
    }

    fn started(
        &self,
        reached: Reached,
        seat: Option<Seat>,
        entry: &Entry,
        patience: Patience,
        now: Instant,
        label: impl FnOnce() -> Box<str>,
    ) -> Started {
        match reached {
            Reached::Slot(slot) => match entry.apart().and_then(|hold| self.leaves_apart(hold, now)) {
                None => Started::Granted(slot, seat),
                Some(left) => {
                    // Another request has become the probe of its host meanwhile.
                    slot.into_iter().for_each(|slot| self.give_back(entry.key, slot));
                    let waiter = Waiter::new(self.clone(), entry, patience, now, label());
                    Started::Waiting(Box::new(waiter.held_apart(clock::after(now, left))))
                }
            },
            Reached::Place(number) => {
                let label = label();
                events::waiting(&label, self.0.lines.find(entry.key, |line| line.waiting()).unwrap_or(1));
                let waiter = Waiter::new(self.clone(), entry, patience, now, label);
                Started::Waiting(Box::new(waiter.in_line(number, seat)))
            }
            Reached::Later(until) => {
                let label = label();
                events::waiting(&label, 1);
                let waiter = Waiter::new(self.clone(), entry, patience, now, label);
                Started::Waiting(Box::new(waiter.held_until(until, seat)))
            }
            Reached::Refused(reason, refusal) => {
                Started::Limited(refused(reason, report(label(), refusal, now, now, 0)))
            }
            Reached::Failed(source) if self.passes(&source) => {
                events::passed(&label(), &source);
                Started::Granted(None, seat)
            }
            Reached::Failed(source) => {
                let report = report(label(), Refusal::NEVER, now, now, 0);
                Started::Limited(told(Limited::Store { source, report }))
            }
        }
    }

    /// One enters the line of its key, if rates are limited; with a number, in the place of that.
    pub(super) fn line_up(
        &self,
        entry: &Entry,
        number: Option<Number>,
        patience: Patience,
        now: Instant,
    ) -> Reached {
        let settings = &self.0.settings;
        if settings.terms.quota().limits().is_empty() {
            // Only a hold can be in its way: whether there is one is asked once, since nothing else is.
            if self.0.lines.find(entry.key, |_| ()).is_none() {
                let asks =
                    |line: &mut Line, desk: &Desk<'_>, wakers: &mut Wakers| ((), line.inquire(desk, wakers));
                let _ = self.open_line(entry.key, now, asks);
            }
            let max_hold = settings.max_hold;
            let blocked = self.0.lines.find(entry.key, |line| line.blocked(max_hold, now)).flatten();
            let until = blocked.map(|left| clock::after(now, left));
            return match until {
                None => Reached::Slot(None),
                Some(until) if until <= patience.latest => Reached::Later(until),
                Some(until) => {
                    let wait = Some(until.saturating_duration_since(now));
                    Reached::Refused(Reason::Held, Refusal { wait, limit: None })
                }
            };
        }

        let number = number.unwrap_or_else(next_number);
        let entered = self.open_line(entry.key, now, |line, desk, wakers| {
            line.enter(desk, entry.cost, patience, number, wakers)
        });
        match entered {
            Ok(Entered::Granted(slot)) => Reached::Slot(Some(slot)),
            Ok(Entered::Waiting(number)) => Reached::Place(number),
            Ok(Entered::Refused(refusal)) => {
                let (reason, refusal) = self.why(entry.key, patience, refusal, now);
                Reached::Refused(reason, refusal)
            }
            Ok(Entered::LineFull) => Reached::Refused(Reason::LineFull(settings.max_waiting), Refusal::NEVER),
            // The embedded store is not away when it is full.
            Ok(Entered::Failed(StoreError::Full { max_keys })) => {
                Reached::Refused(Reason::TooManyKeys(max_keys), Refusal::NEVER)
            }
            Ok(Entered::Failed(source)) => match self.held(entry.key, now).filter(|_| self.passes(&source)) {
                // Nobody passes uncounted while the key is held.
                Some(left) => Reached::Refused(Reason::Held, Refusal { wait: Some(left), limit: None }),
                None => Reached::Failed(source),
            },
            Err(Full) => Reached::Refused(Reason::TooManyKeys(settings.max_keys), Refusal::NEVER),
        }
    }

    /// A desk for the line of `key`, with what that has `learned`.
    fn desk<'a>(&'a self, key: Key, now: Instant, learned: Option<&'a Arc<Terms>>) -> Desk<'a> {
        let &Settings { ref terms, ref store, max_waiting, on_store_error, max_hold, .. } = &self.0.settings;
        let (terms, fails_open) = (learned.unwrap_or(terms), on_store_error == OnStoreError::FailOpen);
        Desk { key, store, terms, now, max_waiting, fails_open, max_hold }
    }

    /// What is allowed at a line, where that was learned.
    pub(super) fn learned(&self, line: &mut Line, now: Instant) -> Option<Arc<Terms>> {
        let Settings { terms, learn, .. } = &self.0.settings;
        line.learned_terms(*learn, terms, now)
    }

    /// What is allowed for `key`: what is configured, or what was learned.
    pub(super) fn terms(&self, key: Key) -> Arc<Terms> {
        let learned = self.0.lines.find(key, |line| self.learned(line, clock::now())).flatten();
        learned.unwrap_or_else(|| self.0.settings.terms.clone())
    }

    /// Does something at the line of `key`, if there is one, and then what that left to be done without its lock.
    pub(super) fn at_line<R>(
        &self,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut Line, &Desk<'_>, &mut Wakers) -> (R, Option<Errand>),
    ) -> Option<R> {
        let mut wakers = Wakers::default();
        let (done, errand) = self.0.lines.find(key, |line| {
            self.0.hosts.touch(key);
            let learned = self.learned(line, now);
            act(line, &self.desk(key, now, learned.as_ref()), &mut wakers)
        })?;
        self.finish(key, now, errand, wakers);
        Some(done)
    }

    /// The same at a line that is opened where there is none.
    pub(super) fn open_line<R>(
        &self,
        key: Key,
        now: Instant,
        act: impl FnOnce(&mut Line, &Desk<'_>, &mut Wakers) -> (R, Option<Errand>),
    ) -> Result<R, Full> {
        let mut wakers = Wakers::default();
        let open = || Line::new(self.0.settings.terms.life(), now);
        let forgotten = |key, mut line: Line| {
            let learned = self.learned(&mut line, now);
            line.forgotten(&self.desk(key, now, learned.as_ref()));
        };
        let at_line = |line: &mut Line| {
            self.0.hosts.touch(key);
            let learned = self.learned(line, now);
            act(line, &self.desk(key, now, learned.as_ref()), &mut wakers)
        };
        let (done, errand) = self.0.lines.enter(key, now, open, forgotten, at_line)?;
        self.finish(key, now, errand, wakers);
        Ok(done)
    }

    /// Returns what errors and events call `key`, which came with `request`.
    pub(crate) fn label(&self, key: Key, request: Option<&RequestInfo<'_>>) -> Box<str> {
        store::label(&*self.0.settings.store, key, request)
    }

    #[inline]
    pub(crate) fn id(&self) -> GateId {
        self.0.id
    }

    pub(super) fn max_wait(&self) -> Duration {
        self.0.settings.max_wait
    }

    /// Why one is refused: the key is held; else the limit that allows it so late. Where a quota has one, it is that.
    pub(super) fn why(
        &self,
        key: Key,
        patience: Patience,
        refusal: Refusal,
        now: Instant,
    ) -> (Reason, Refusal) {
        if self.held(key, now).is_some() {
            return (Reason::Held, Refusal { limit: None, ..refusal });
        }
        let refusal = match self.0.settings.terms.quota().limits() {
            [only] if refusal.wait.is_some() => Refusal { limit: Some(*only), ..refusal },
            _ => refusal,
        };
        (patience.reason(self.max_wait()), refusal)
    }

    /// The error of a request in which the key function found no key.
    #[cold]
    pub(crate) fn no_key(&self) -> Limited {
        let now = clock::now();
        refused(Reason::NoKey, report("none".into(), Refusal::NEVER, now, now, 0))
    }

    pub(super) fn give_back(&self, key: Key, slot: Slot) {
        let now = clock::now();
        let found = self.at_line(key, now, |line, desk, wakers| ((), line.give_back(desk, slot, wakers)));
        if found.is_none() {
            let Settings { store, terms, .. } = &self.0.settings;
            store.give_back(key, terms, &[slot.unused()]);
        }
    }

    /// Whether a request passes that could not be counted because of `error`.
    pub(super) fn passes(&self, error: &StoreError) -> bool {
        self.0.settings.on_store_error == OnStoreError::FailOpen && !matches!(error, StoreError::Full { .. })
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

/// The shortest time after which a refused request is told to come back.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

pub(super) fn report(key: Box<str>, refusal: Refusal, since: Instant, now: Instant, turns: u32) -> Report {
    let Refusal { wait, limit } = refusal;
    let waited = now.saturating_duration_since(since);
    // A request that comes back at once would come back for ever.
    let wait = wait.map(|wait| wait.max(SHORTEST_WAIT));
    Report::new(Facts { key, limit, retry_after: wait, at: clock::wall(now), waited, turns })
}

pub(super) fn refused(reason: Reason, report: Report) -> Limited {
    told(Limited::Local { reason, report })
}

pub(super) fn told(limited: Limited) -> Limited {
    events::limited(&limited);
    limited
}
