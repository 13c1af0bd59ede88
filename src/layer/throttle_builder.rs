//! The builder of an [`AdaptiveThrottleLayer`].

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;

use super::AdaptiveThrottleLayer;
use super::extractors::Extractors;
use super::rate_limit_builder::at_most;
use crate::config_error::ConfigError;
#[cfg(doc)]
use crate::error::Limited;
use crate::key::{Key, RequestInfo};
use crate::pace::{Fair, Pace};
use crate::rng::{Dice, dice};
use crate::signal::Signal;
use crate::store::Store;
use crate::throttle::{Throttle, ThrottleSettings};

/// Sets up an [`AdaptiveThrottleLayer`].
///
/// ```
/// use std::time::Duration;
/// use tollgate::pace::Fair;
/// use tollgate::{AdaptiveThrottleLayer, by_host};
///
/// // It is known that about 4500 requests an hour are allowed: that makes it quicker.
/// let throttle = AdaptiveThrottleLayer::builder()
///     .key(by_host)
///     .pace(|| Fair::new().limit(4500, Duration::from_secs(3600)))
///     .max_wait(Duration::from_secs(60))
///     .build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
#[must_use = "a builder does nothing until build"]
pub struct AdaptiveThrottleBuilder {
    extractors: Extractors,
    pace: Box<dyn Fn() -> Box<dyn Pace> + Send + Sync>,
    max_wait: Duration,
    max_waiting: usize,
    max_keys: usize,
    max_hold: Duration,
    store: Option<Arc<dyn Store>>,
}

impl AdaptiveThrottleBuilder {
    const LONGEST: Duration = Duration::from_secs(86_400);

    pub(super) fn new() -> Self {
        AdaptiveThrottleBuilder {
            extractors: Extractors::default(),
            pace: Box::new(|| Box::new(Fair::new())),
            max_wait: Duration::from_secs(15),
            max_waiting: 10_000,
            max_keys: 100_000,
            max_hold: Duration::from_secs(3600),
            store: None,
        }
    }

    /// The key of a request, as in [`RateLimitBuilder::key`](super::RateLimitBuilder::key). Default: one key for everything.
    /// What is learned is learned for a key, and a refusal holds its key: without a key function, the requests to all hosts.
    pub fn key<F, K>(mut self, key: F) -> Self
    where
        F: Fn(&RequestInfo<'_>) -> K + Send + Sync + 'static,
        K: Into<Option<Key>>,
    {
        self.extractors.key = Some(Box::new(move |request| key(request).into()));
        self
    }

    /// The moment by which a request must leave. Default: none. A [`Deadline`](crate::Deadline) in the request's extensions
    /// goes first; `max_wait` holds besides.
    pub fn deadline<F>(mut self, deadline: F) -> Self
    where
        F: Fn(&RequestInfo<'_>) -> Option<Instant> + Send + Sync + 'static,
    {
        self.extractors.deadline = Some(Box::new(deadline));
        self
    }

    /// How the speed for one key answers to signals; `pace` is asked for each key. Default: [`Fair::new`].
    ///
    /// A pace is told what happens under a lock, so it should be quick.
    pub fn pace<P: Pace + 'static>(mut self, pace: impl Fn() -> P + Send + Sync + 'static) -> Self {
        self.pace = Box::new(move || Box::new(pace()));
        self
    }

    /// The store through which all processes share what they learn of a key, and wait in one queue for it. Default: none,
    /// each process learns for itself.
    ///
    /// It is decisive for fleets of more than about 30 processes: nobody has to find out how many there are. A request
    /// costs [two to five calls](crate::guide::pace#a-fleet-that-shares-its-pace) of the store then, more in fleets of
    /// hundreds, and where nothing is scarce none that it waits for. While the store is away each process goes on by
    /// itself, at its part of the speed.
    ///
    /// All of them need the same pace, and one that can be [shared](Pace::share): [`Fair`] and [`Aimd`](crate::pace::Aimd) can.
    /// A store without [registers](Store::compare_and_set) is as one that is away; with one that [tells](Store::listen)
    /// nobody, as a `RedisStore` over a connection of your own, little of a scarce limit is used.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// The longest a request may wait at the gate, all its attempts together. Default: 15 s; at most a day.
    ///
    /// Nobody knows before how long a wait will be, so a request waits for so long before it is refused; but where the
    /// server has said that it will be longer, it is refused at once. `Duration::ZERO` means: never wait.
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.max_wait = max_wait;
        self
    }

    /// How many may wait for one key in this process; the next is refused. Default: 10,000; at least 1.
    pub fn max_waiting(mut self, max_waiting: usize) -> Self {
        self.max_waiting = max_waiting;
        self
    }

    /// How many keys may be in use at once. Default: 100,000; at least 1.
    ///
    /// What was learned for a key is kept for an hour after its last call, or as long as there is room.
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// The longest that what the server says of waiting holds a key. Default: an hour; at most a day, else
    /// [`build`](AdaptiveThrottleBuilder::build) fails. `Duration::ZERO`: what it says holds nothing.
    ///
    /// If the server says for longer, the hold is cut to `max_hold`. The pace may add a wait of its own, which is not cut.
    ///
    /// A refusal by another host, to which reqwest followed a redirect, holds nothing.
    ///
    /// A hold outlives a restart if the processes share a [store](AdaptiveThrottleBuilder::store). [`Throttle::release`] ends
    /// it.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = max_hold;
        self
    }

    /// Turns a refusal by the upstream into [`Limited::Upstream`]. Default: it passes as a response.
    pub fn error_on_upstream_limit(mut self) -> Self {
        self.extractors.policy.set_error_on_limit();
        self
    }

    /// Reads what the upstream says in a way of its own, as in [`RateLimitBuilder::dialect`](super::RateLimitBuilder::dialect).
    pub fn dialect<F>(mut self, dialect: F) -> Self
    where
        F: Fn(Key, &HeaderMap, Signal) -> Signal + Send + Sync + 'static,
    {
        self.extractors.policy.set_dialect(Arc::new(dialect));
        self
    }

    /// Checks everything and makes the layer.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first setting that makes no sense, and says what to change.
    pub fn build(self) -> Result<AdaptiveThrottleLayer, ConfigError> {
        at_most("max_wait", self.max_wait, Self::LONGEST, "at most a day")?;
        at_most("max_hold", self.max_hold, Self::LONGEST, "at most a day")?;
        for (setting, value) in [("max_waiting", self.max_waiting), ("max_keys", self.max_keys)] {
            if value == 0 {
                return Err(ConfigError::OutOfRange { setting, value: "0".into(), allowed: "at least 1" });
            }
        }
        let throttle = Throttle::new(ThrottleSettings {
            pace: self.pace,
            dice: Box::new(|| Dice::seeded(dice())),
            max_wait: self.max_wait,
            max_waiting: self.max_waiting,
            max_keys: self.max_keys,
            max_hold: self.max_hold,
            store: self.store,
        })?;
        Ok(AdaptiveThrottleLayer { throttle, extractors: Arc::new(self.extractors) })
    }
}

impl fmt::Debug for AdaptiveThrottleBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdaptiveThrottleBuilder")
            .field("extractors", &self.extractors)
            .field("max_wait", &self.max_wait)
            .finish_non_exhaustive()
    }
}
