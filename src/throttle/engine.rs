//! The gate that learns its pace, for many keys.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::pace_state::PaceState;
use super::paced_queue::{Flight, Number, PacedQueue};
use super::permit::{ThrottlePermit, Wait};
use super::sync_task::{SharedPace, SyncTask};
use super::waiters::{Arrival, TooLate, Waiters};
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
pub struct Throttle(pub(super) Arc<Core>);

pub(super) struct Core {
    settings: ThrottleSettings,
    pub(super) keys: Keyed<Waiters>,
    /// Where the lines are shared.
    pub(super) shared: Option<SharedPace>,
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
        let keys = Keyed::new(settings.max_keys);
        let shared = match &settings.store {
            Some(store) => {
                let kind = PaceState::new((settings.pace)(), settings.max_hold, clock::now()).kind();
                let kind = kind.ok_or(ConfigError::PaceNotShared)?;
                Some(SharedPace { store: store.clone(), id: dice() >> 11, kind })
            }
            None => None,
        };
        let inner = Arc::new(Core { settings, keys, shared });
        if let Some(SharedPace { store, .. }) = &inner.shared {
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
        self.0.keys.find(key, |waiters| waiters.waiting()).unwrap_or(0)
    }

    /// How many requests for `key` are on their way from here.
    pub fn in_flight(&self, key: Key) -> usize {
        self.0.keys.find(key, |waiters| waiters.in_flight()).unwrap_or(0)
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
        let joined = self.open(key, now, |waiters, wakers| waiters.arrived(latest, most, now, wakers));
        let (reason, retry_at) = match joined {
            Ok(Arrival::Leaves(flight)) => {
                return Begun::Leaves(ThrottlePermit::new(self.clone(), key, flight, None, latest));
            }
            Ok(Arrival::Waits(number)) => {
                let label = label();
                events::waiting(&label, self.waiting(key));
                return Begun::Waits(Wait::new(self.clone(), key, number, label, now, latest));
            }
            Ok(Arrival::TooLate(over)) => (self.why(over, latest < by_wait), over.retry_at),
            Ok(Arrival::Full) => (Reason::LineFull(most), None),
            Err(Full) => (Reason::TooManyKeys(self.0.settings.max_keys), None),
        };
        Begun::Limited(refused(reason, label(), retry_at, Since { start: now, now, turns: 0 }))
    }

    pub(super) fn why(&self, over: TooLate, by_deadline: bool) -> Reason {
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
        with: impl FnOnce(&mut Waiters, &mut Wakers) -> R,
    ) -> Result<R, Full> {
        let make = || {
            let ThrottleSettings { pace, dice, max_hold, .. } = &self.0.settings;
            let mut queue = PacedQueue::new(pace(), dice(), *max_hold, now);
            if let Some(SharedPace { store, id, .. }) = &self.0.shared {
                queue.share(*id, store.address(), now);
            }
            Waiters::new(queue, now)
        };
        let forgotten = |_, waiters| drop(waiters);
        let (mut wakers, mut sync_task) = (Wakers::default(), None);
        let opened = self.0.keys.enter(key, now, make, forgotten, |waiters| {
            let done = with(waiters, &mut wakers);
            sync_task =
                self.0.shared.as_ref().and_then(|_| waiters.needs_sync_task(clock::now(), &mut wakers));
            done
        });
        self.finish(key, sync_task, wakers);
        opened
    }

    /// Does something at the station of `key`, which is there as long as anybody waits or is on the way.
    pub(super) fn at<R>(&self, key: Key, with: impl FnOnce(&mut Waiters, &mut Wakers) -> R) -> Option<R> {
        let (mut wakers, mut sync_task) = (Wakers::default(), None);
        let done = self.0.keys.find(key, |waiters| {
            let done = with(waiters, &mut wakers);
            sync_task =
                self.0.shared.as_ref().and_then(|_| waiters.needs_sync_task(clock::now(), &mut wakers));
            done
        });
        self.finish(key, sync_task, wakers);
        done
    }

    /// Does what is left to be done without the lock.
    fn finish(&self, key: Key, sync_task: Option<u64>, wakers: Wakers) {
        wakers.wake();
        if let (Some(number), Some(shared)) = (sync_task, &self.0.shared) {
            SyncTask::start(self, shared, key, number);
        }
    }

    pub(super) fn leave(&self, key: Key, number: Number) {
        let now = clock::now();
        self.at(key, |waiters, wakers| waiters.leave(number, now, wakers));
    }

    pub(super) fn lost(&self, key: Key, flight: Flight) {
        let now = clock::now();
        self.at(key, |waiters, wakers| waiters.lost(flight, now, wakers));
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
