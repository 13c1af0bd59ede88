//! The gate that learns its pace, for many keys.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::pace_state::Course;
use super::paced_queue::{Flight, Line, Number};
use super::permit::{ThrottlePermit, Wait};
use super::sync_task::{Shared, Teller};
use super::waiters::{Joined, Over, Station};
use crate::clock;
use crate::config_error::ConfigError;
use crate::error::{Facts, Limited, Reason, Report};
use crate::events;
use crate::key::{Key, RequestInfo};
use crate::key_map::{Full, Keyed};
use crate::pace::Pace;
use crate::rng::{Dice, dice};
use crate::store::{self, Listener, Store};
use crate::wakers::Wakers;

/// The gate behind an [`AdaptiveThrottleLayer`](crate::AdaptiveThrottleLayer), for what is not HTTP. Clones share
/// what they learn.
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tollgate::Limited> {
/// use std::time::Duration;
/// use tollgate::{AdaptiveThrottleLayer, Key, Signal};
///
/// let throttle = AdaptiveThrottleLayer::new().throttle();
/// let permit = throttle.acquire(Key::new("search")).await?;
/// // ... the call ...
/// permit.answered(&Signal::default().with_limited(http::StatusCode::TOO_MANY_REQUESTS));
///
/// // The next one waits, and longer than it would have.
/// let start = tokio::time::Instant::now();
/// let permit = throttle.acquire(Key::new("search")).await?;
/// assert!(start.elapsed() > Duration::from_millis(500));
/// # permit.give_back();
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Throttle(pub(super) Arc<Inner>);

pub(super) struct Inner {
    settings: ThrottleSettings,
    pub(super) stations: Keyed<Station>,
    /// Where the lines are shared.
    pub(super) shared: Option<Shared>,
}

pub(crate) struct ThrottleSettings {
    pub(crate) pace: Box<dyn Fn() -> Box<dyn Pace> + Send + Sync>,
    /// The dice of each key.
    pub(crate) dice: Box<dyn Fn() -> Dice + Send + Sync>,
    pub(crate) max_wait: Duration,
    pub(crate) max_waiting: usize,
    pub(crate) max_keys: usize,
    pub(crate) max_hold: Duration,
    /// Through which the lines are shared.
    pub(crate) store: Option<Arc<dyn Store>>,
}

/// How a call arrives at the gate.
pub(crate) enum Begun {
    Leaves(ThrottlePermit),
    Waits(Wait),
    Limited(Limited),
}

impl Throttle {
    pub(crate) fn new(settings: ThrottleSettings) -> Result<Self, ConfigError> {
        let stations = Keyed::new(settings.max_keys);
        let shared = match &settings.store {
            Some(store) => {
                let kind = Course::new((settings.pace)(), settings.max_hold, clock::now()).kind();
                let kind = kind.ok_or(ConfigError::PaceNotShared)?;
                Some(Shared { store: store.clone(), id: dice() >> 11, kind })
            }
            None => None,
        };
        let inner = Arc::new(Inner { settings, stations, shared });
        if let Some(Shared { store, .. }) = &inner.shared {
            let listener: Weak<dyn Listener> = Arc::downgrade(&inner) as _;
            store.listen(listener);
        }
        Ok(Throttle(inner))
    }

    /// Waits until a request for `key` may leave, first come, first served, for as long as `max_wait`.
    ///
    /// The first request for a key that was not asked for lately leaves alone; the others follow its answer, or a second
    /// later.
    ///
    /// # Errors
    ///
    /// [`Limited::Local`], when it cannot leave in time.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any time: its place is given up, and a turn it had is the next one's.
    pub async fn acquire(&self, key: Key) -> Result<ThrottlePermit, Limited> {
        match self.begin(key, None, || self.label(key, None)) {
            Begun::Leaves(permit) => Ok(permit),
            Begun::Waits(wait) => wait.await,
            Begun::Limited(limited) => Err(limited),
        }
    }

    /// Returns what errors and events call `key`, which came with `request`.
    pub(crate) fn label(&self, key: Key, request: Option<&RequestInfo<'_>>) -> Box<str> {
        match &self.0.settings.store {
            Some(store) => store::label(&**store, key, request),
            None => key.own_label(request),
        }
    }

    /// How many wait for `key` here.
    pub fn waiting(&self, key: Key) -> usize {
        self.0.stations.find(key, |station| station.waiting()).unwrap_or(0)
    }

    /// How many requests for `key` are on their way from here.
    pub fn in_flight(&self, key: Key) -> usize {
        self.0.stations.find(key, |station| station.in_flight()).unwrap_or(0)
    }

    /// A call arrives.
    pub(crate) fn begin(
        &self,
        key: Key,
        deadline: Option<Instant>,
        label: impl FnOnce() -> Box<str>,
    ) -> Begun {
        let now = clock::now();
        let by_wait = clock::after(now, self.0.settings.max_wait);
        let latest = deadline.map_or(by_wait, |deadline| deadline.min(by_wait));
        let most = self.0.settings.max_waiting;
        let joined = self.open(key, now, |station, wakers| station.join(latest, most, now, wakers));
        let (reason, retry_at) = match joined {
            Ok(Joined::Leaves(flight)) => {
                return Begun::Leaves(ThrottlePermit::new(self.clone(), key, flight, None, latest));
            }
            Ok(Joined::Waits(number)) => {
                let label = label();
                events::waiting(&label, self.waiting(key));
                return Begun::Waits(Wait::new(self.clone(), key, number, label, now, latest));
            }
            Ok(Joined::Over(over)) => (self.why(over, latest < by_wait), over.retry_at),
            Ok(Joined::Full) => (Reason::LineFull(most), None),
            Err(Full) => (Reason::TooManyKeys(self.0.settings.max_keys), None),
        };
        Begun::Limited(refused(reason, label(), retry_at, Since { start: now, now, turns: 0 }))
    }

    pub(super) fn why(&self, over: Over, by_deadline: bool) -> Reason {
        match over.is_held {
            true => Reason::Held,
            false if by_deadline => Reason::Deadline,
            false => Reason::MaxWait(self.0.settings.max_wait),
        }
    }

    pub(super) fn max_wait(&self) -> Duration {
        self.0.settings.max_wait
    }

    pub(super) fn max_keys(&self) -> usize {
        self.0.settings.max_keys
    }

    /// Does something at the station of `key`, which is made first if there is none.
    pub(super) fn open<R>(
        &self,
        key: Key,
        now: Instant,
        with: impl FnOnce(&mut Station, &mut Wakers) -> R,
    ) -> Result<R, Full> {
        let make = || {
            let ThrottleSettings { pace, dice, max_hold, .. } = &self.0.settings;
            let mut line = Line::new(pace(), dice(), *max_hold, now);
            if let Some(Shared { store, id, .. }) = &self.0.shared {
                line.share(*id, store.address(), now);
            }
            Station::new(line, now)
        };
        let forgotten = |_, station| drop(station);
        let (mut wakers, mut teller) = (Wakers::default(), None);
        let opened = self.0.stations.enter(key, now, make, forgotten, |station| {
            let done = with(station, &mut wakers);
            teller = self.0.shared.as_ref().and_then(|_| station.needs_teller(clock::now(), &mut wakers));
            done
        });
        self.finish(key, teller, wakers);
        opened
    }

    /// Does something at the station of `key`, which is there as long as anybody waits or is on the way.
    pub(super) fn at<R>(&self, key: Key, with: impl FnOnce(&mut Station, &mut Wakers) -> R) -> Option<R> {
        let (mut wakers, mut teller) = (Wakers::default(), None);
        let done = self.0.stations.find(key, |station| {
            let done = with(station, &mut wakers);
            teller = self.0.shared.as_ref().and_then(|_| station.needs_teller(clock::now(), &mut wakers));
            done
        });
        self.finish(key, teller, wakers);
        done
    }

    /// Does what is left to be done without the lock.
    fn finish(&self, key: Key, teller: Option<u64>, wakers: Wakers) {
        wakers.wake();
        if let (Some(number), Some(shared)) = (teller, &self.0.shared) {
            Teller::start(self, shared, key, number);
        }
    }

    pub(super) fn leave(&self, key: Key, number: Number) {
        let now = clock::now();
        self.at(key, |station, wakers| station.leave(number, now, wakers));
    }

    pub(super) fn lost(&self, key: Key, flight: Flight) {
        let now = clock::now();
        self.at(key, |station, wakers| station.lost(flight, now, wakers));
    }

    /// The error of a request without a key.
    pub(crate) fn no_key(&self) -> Limited {
        let now = clock::now();
        refused(Reason::NoKey, "none".into(), None, Since { start: now, now, turns: 0 })
    }
}

/// Since when one waited, until now, and how often it was its turn.
pub(super) struct Since {
    pub(super) start: Instant,
    pub(super) now: Instant,
    pub(super) turns: u32,
}

pub(super) fn report(key: Box<str>, retry_after: Option<Duration>, since: &Since) -> Report {
    let waited = since.now.saturating_duration_since(since.start);
    let (at, turns) = (clock::wall(since.now), since.turns);
    Report::new(Facts { key, limit: None, retry_after, at, waited, turns })
}

pub(super) fn refused(reason: Reason, key: Box<str>, retry_at: Option<Instant>, since: Since) -> Limited {
    let retry_after = retry_at.map(|at| at.saturating_duration_since(since.now));
    let limited = Limited::Local { reason, report: report(key, retry_after, &since) };
    events::limited(&limited);
    limited
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ThrottleSettings { max_wait, max_waiting, max_keys, max_hold, .. } = &self.0.settings;
        f.debug_struct("Throttle")
            .field("max_wait", max_wait)
            .field("max_waiting", max_waiting)
            .field("max_keys", max_keys)
            .field("max_hold", max_hold)
            .finish_non_exhaustive()
    }
}
