//! The builder of a [`RateLimitLayer`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;

use super::RateLimitLayer;
use super::extractors::Extractors;
use crate::config_error::ConfigError;
use crate::key::{Key, RequestInfo};
use crate::limit::Terms;
use crate::limiter::{Learn, Limiter, OnScope, OnStoreError, Settings};
use crate::quota::{Quota, Slacks};
use crate::signal::Signal;
use crate::store::{FallbackStore, MemoryStore, Share, Store};

/// Sets up a [`RateLimitLayer`].
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Key, Quota, RateLimitLayer};
///
/// let limit = RateLimitLayer::builder(Quota::per_second(50).burst(10))
///     .key(|request| request.header("x-tenant").map(Key::new))
///     .cost(|request| if request.path() == "/export" { 5 } else { 1 })
///     .max_wait(Duration::from_secs(5))
///     .build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
#[must_use = "a builder does nothing until build"]
pub struct RateLimitBuilder {
    quota: Quota,
    extractors: Extractors,
    store: Option<Arc<dyn Store>>,
    on_store_error: OnStoreError,
    fallback_share: Option<f64>,
    max_wait: Duration,
    max_waiting: usize,
    max_keys: usize,
    transit_slack: Duration,
    boundary_slack: Duration,
    rate_loss: u32,
    in_flight_life: Duration,
    max_hold: Duration,
    learn: Learn,
    on_scope: Option<OnScope>,
}

impl RateLimitBuilder {
    const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(15);
    const LONGEST_WAIT: Duration = Duration::from_secs(86_400);
    const LONGEST_SLACK: Duration = Duration::from_secs(60);
    const SHORTEST_LIFE: Duration = Duration::from_millis(300);
    const LONGEST_LIFE: Duration = Duration::from_secs(3600);
    const LARGEST_RATE_LOSS: u32 = 50;

    pub(super) fn new(quota: Quota) -> Self {
        RateLimitBuilder {
            quota,
            extractors: Extractors::default(),
            store: None,
            on_store_error: OnStoreError::default(),
            fallback_share: None,
            max_wait: RateLimitBuilder::DEFAULT_MAX_WAIT,
            max_waiting: 10_000,
            max_keys: MemoryStore::DEFAULT_MAX_KEYS,
            transit_slack: Duration::from_millis(10),
            boundary_slack: Duration::from_millis(100),
            rate_loss: Slacks::RATE_LOSS,
            in_flight_life: Duration::from_secs(10),
            max_hold: Duration::from_secs(60),
            learn: Learn::default(),
            on_scope: None,
        }
    }

    /// The key of a request: [`by_host`](crate::by_host), [`by_header`](crate::by_header), or a closure that returns a
    /// [`Key`] or an `Option<Key>`. Default: one key for everything ([`Key::ALL`]): one count, and
    /// [holds](Self::max_hold) by host.
    ///
    /// A request for which it returns `None` is refused ([`Reason::NoKey`](crate::Reason::NoKey)). A [`Key`] in the
    /// request's extensions goes first.
    pub fn key<F, K>(mut self, key: F) -> Self
    where
        F: Fn(&RequestInfo<'_>) -> K + Send + Sync + 'static,
        K: Into<Option<Key>>,
    {
        self.extractors.key = Some(Box::new(move |request| key(request).into()));
        self
    }

    /// How many units a request takes. Default: 1. A [`Cost`](crate::Cost) in the request's extensions goes first.
    pub fn cost(mut self, cost: impl Fn(&RequestInfo<'_>) -> u32 + Send + Sync + 'static) -> Self {
        self.extractors.cost = Some(Box::new(cost));
        self
    }

    /// The moment by which a request must leave; a slot beyond is refused at once. Default: none. A
    /// [`Deadline`](crate::Deadline) in the request's extensions goes first; `max_wait` holds besides.
    pub fn deadline<F>(mut self, deadline: F) -> Self
    where
        F: Fn(&RequestInfo<'_>) -> Option<Instant> + Send + Sync + 'static,
    {
        self.extractors.deadline = Some(Box::new(deadline));
        self
    }

    /// The longest a request may wait at the gate. Default: 15 s; at most a day.
    ///
    /// A request whose slot lies further away is refused at once, before it costs anything, and the error tells when
    /// it could have been. `Duration::ZERO` means: never wait.
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.max_wait = max_wait;
        self
    }

    /// How many may wait for one key in this process; the next is refused. Default: 10,000; at least 1.
    pub fn max_waiting(mut self, max_waiting: usize) -> Self {
        self.max_waiting = max_waiting;
        self
    }

    /// How many keys may be in use at once in this process, and in the default store. Default: 100,000; at least 1.
    ///
    /// Keys that are not in use cost nothing and do not count. Beyond, a request with a new key is refused. Without a
    /// [key function](Self::key), each host that is held counts as a key, and is not held if there is no room.
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// Where permits are counted. Default: a [`MemoryStore`] of its own.
    ///
    /// Layers that share a store share the counts of equal keys.
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// What becomes of a request when the store cannot be asked. Default: [`OnStoreError::FailClosed`].
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.on_store_error = on_store_error;
        self
    }

    /// The share of the limit with which a process goes on while the store is away that was granted nothing in the last
    /// window before; with [`OnStoreError::FallbackShare`] only. Default: none, such a process is refused. Above 0 and at
    /// most 1: one divided by the number of processes.
    ///
    /// A share of less than one unit is one unit in a longer time.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tollgate::{OnStoreError, Quota, RateLimitLayer, store::MemoryStore};
    ///
    /// # let store = Arc::new(MemoryStore::default());
    /// let limit = RateLimitLayer::builder(Quota::per_second(50))
    ///     .store(store)
    ///     .on_store_error(OnStoreError::FallbackShare)
    ///     .fallback_share(1.0 / 8.0) // we are eight
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn fallback_share(mut self, share: f64) -> Self {
        self.fallback_share = Some(share);
        self
    }

    /// By how much the time that a request takes to the upstream may vary. Default: 10 ms; at most 60 s, else
    /// [`build`](Self::build) fails.
    ///
    /// Opening a connection is part of that time: where the first request on a connection takes 150 ms longer than the
    /// next, 10 ms of slack let the upstream see up to twice the limit at the start.
    ///
    /// Together with the life of a permit it is the margin by which every window is longer than the quota says. A permit lives
    /// for a fiftieth of the window divided by the count, at least 10 ms and at most 50 ms: the margin costs 2 % of the rate at 50
    /// per second, and 3 % at one per second. Permits that a key in heavy use fetches ahead live for up to a two-hundredth of
    /// the window: at 100 per minute, at most 0.5 % besides.
    pub fn transit_slack(mut self, transit_slack: Duration) -> Self {
        self.transit_slack = transit_slack;
        self
    }

    /// The most of the rate, in per cent, that the margin of permits may cost under a fine spacing. Default: 10; at most 50.
    ///
    /// Requests of a burst or of [`Quota::every`] leave farther apart than the limit says if its spacing is short against the
    /// margin: the life of a permit and [`transit_slack`](Self::transit_slack). If that costs too much, permits live shorter,
    /// down to 2 ms. If it still does, [`build`](Self::build) fails and says how much would be lost; this accepts the loss.
    /// Sliding and fixed windows do not need it.
    ///
    /// A permit that lives for 2 ms often ends before it is used on a busy machine. Over a store with a trip, permits live for
    /// at least twice the trip and 5 ms.
    ///
    /// # Errors
    ///
    /// [`build`](Self::build) fails with [`ConfigError::TooFine`] if more would be lost, and with
    /// [`ConfigError::OutOfRange`] above 50.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Quota, RateLimitLayer};
    ///
    /// // A server that refuses whatever comes within 20 ms of the request before, on the same network.
    /// let limit = RateLimitLayer::builder(Quota::every(Duration::from_millis(20)))
    ///     .transit_slack(Duration::from_millis(1))
    ///     .max_rate_loss(14)
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn max_rate_loss(mut self, percent: u32) -> Self {
        self.rate_loss = percent;
        self
    }

    /// How long before and after the boundary of a [fixed](Quota::fixed) window nothing is sent: the way to the upstream
    /// and the difference of the clocks. Default: 100 ms; at most a quarter of the window.
    pub fn boundary_slack(mut self, boundary_slack: Duration) -> Self {
        self.boundary_slack = boundary_slack;
        self
    }

    /// For how long the calls [in flight](Quota::in_flight) of a process stay counted that can no longer say that they are
    /// there. Default: 10 s; from 300 ms to an hour.
    ///
    /// A process that dies leaves its places to others after so long. One that lives says every third of it that its calls
    /// are there, and gives them up, with [`StoreError::SeatLost`](crate::store::StoreError::SeatLost), when it could not
    /// for all of it: so a store may be away for so long before calls in flight are harmed. Of no use in memory.
    pub fn in_flight_life(mut self, in_flight_life: Duration) -> Self {
        self.in_flight_life = in_flight_life;
        self
    }

    /// The longest that a refusal by the upstream holds a key. Default: 60 s, so that one wrong response costs about a minute;
    /// at most a day, else [`build`](Self::build) fails. `Duration::ZERO`: a refusal holds nothing.
    ///
    /// If the upstream says for how long, the key is held for that, cut to `max_hold`. If it does not, the key is held for about a
    /// second, and twice as long each time it is refused again. If it refuses again when the time that it named is over, the key is
    /// held for at least 0.4 s, and twice that each time.
    ///
    /// A hold that was cut ends with one request, the probe: the others leave when it has passed. If it has no response, another
    /// one follows after 5 s, and all may leave a minute after the hold, or `max_hold` if that is shorter.
    ///
    /// What is [learned](Self::learn) of others from one response is reserved for a minute, or `max_hold` if that is shorter.
    ///
    /// Without a [key function](Self::key), a refusal holds the requests to its host
    /// ([`Key::host_hold`]) and no others; a request without a host is held with all. With one, it holds the key of the
    /// request, whatever its host. A refusal by another host, to which reqwest followed a redirect, holds nothing.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = max_hold;
        self
    }

    /// What is made of what the upstream says about its quotas. Default: [`Learn::Remaining`].
    ///
    /// Nothing is learned of requests to several hosts without a [key function](Self::key): each host has quotas of its own.
    ///
    /// [`Limiter::peek`](crate::Limiter::peek) tells what was learned.
    pub fn learn(mut self, learn: Learn) -> Self {
        self.learn = learn;
        self
    }

    /// The key that a refusal holds, where the upstream names the limiter that refused ([`Signal::scope`]); `None` for none.
    /// Default: the key of the call, or of its host: see [`max_hold`](Self::max_hold).
    ///
    /// If one limiter counts each route and another the whole account, on one store, a refusal is of one of them. Their permits
    /// are taken [by hand](crate::Limiter#two-limits-with-different-keys), and both are told the
    /// [answer](crate::Permit::answered); a layer around the other would not keep its limit.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tollgate::{Key, Quota, RateLimitLayer, store::MemoryStore};
    ///
    /// let (store, account) = (Arc::new(MemoryStore::default()), Key::new("our account"));
    /// let global = move |key, scope: &str| Some(if scope == "global" { account } else { key });
    /// let routes = RateLimitLayer::builder(Quota::per_second(5))
    ///     .key(|request| Key::new(request.path()))
    ///     .on_scope(global)
    ///     .store(store.clone())
    ///     .build()?
    ///     .limiter();
    /// let all = RateLimitLayer::builder(Quota::per_second(50))
    ///     .key(move |_| account)
    ///     .on_scope(move |key, scope| (scope == "global").then_some(key))
    ///     .store(store)
    ///     .build()?
    ///     .limiter();
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn on_scope<F>(mut self, on_scope: F) -> Self
    where
        F: Fn(Key, &str) -> Option<Key> + Send + Sync + 'static,
    {
        self.on_scope = Some(Box::new(on_scope));
        self
    }

    /// Turns a refusal by the upstream into [`Limited::Upstream`](crate::Limited::Upstream). Default: it passes as a response.
    ///
    /// [`Signal::limited`] says what is a refusal: a 429, and others such as a 503 that say when to come back.
    ///
    /// The body of the response is dropped then.
    pub fn error_on_upstream_limit(mut self) -> Self {
        self.extractors.policy.set_error_on_limit();
        self
    }

    /// Reads what the upstream says in a way of its own. `dialect` is told the key of the request, the headers of the answer,
    /// and the [`Signal`] that was read; what it returns counts. Default: none.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::{HeaderMap, StatusCode};
    /// use tollgate::{Key, Quota, RateLimitLayer, Signal, by_host};
    ///
    /// // One of the servers says `X-Pause: 3` where others say `429` and `Retry-After: 3`.
    /// let theirs = Key::host("api.example.com");
    /// let pause = move |key, headers: &HeaderMap, signal: Signal| {
    ///     let seconds = headers.get("x-pause").and_then(|value| value.to_str().ok()?.parse().ok());
    ///     match seconds {
    ///         Some(seconds) if key == theirs => signal
    ///             .with_limited(StatusCode::TOO_MANY_REQUESTS)
    ///             .with_retry_after(Duration::from_secs(seconds)),
    ///         _ => signal,
    ///     }
    /// };
    /// let limit = RateLimitLayer::builder(Quota::per_second(50)).key(by_host).dialect(pause).build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
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
    pub fn build(self) -> Result<RateLimitLayer, ConfigError> {
        at_most("max_wait", self.max_wait, RateLimitBuilder::LONGEST_WAIT, "at most a day")?;
        at_most("transit_slack", self.transit_slack, RateLimitBuilder::LONGEST_SLACK, "at most 60 s")?;
        at_most("max_hold", self.max_hold, RateLimitBuilder::LONGEST_WAIT, "at most a day")?;
        if !(RateLimitBuilder::SHORTEST_LIFE..=RateLimitBuilder::LONGEST_LIFE).contains(&self.in_flight_life)
        {
            let value = format!("{:?}", self.in_flight_life);
            let allowed = "from 300 ms to an hour";
            return Err(ConfigError::OutOfRange { setting: "in_flight_life", value, allowed });
        }
        if self.max_waiting == 0 {
            let allowed = "at least 1; to refuse at once instead of waiting, set max_wait to zero";
            return Err(ConfigError::OutOfRange { setting: "max_waiting", value: "0".into(), allowed });
        }
        if self.max_keys == 0 {
            return Err(ConfigError::OutOfRange {
                setting: "max_keys",
                value: "0".into(),
                allowed: "at least 1",
            });
        }
        if self.rate_loss > RateLimitBuilder::LARGEST_RATE_LOSS {
            let (setting, value) = ("max_rate_loss", self.rate_loss.to_string());
            return Err(ConfigError::OutOfRange { setting, value, allowed: "at most 50" });
        }
        let (transit, boundary) = (self.transit_slack, self.boundary_slack);
        let life = self.quota.check(Slacks { transit, boundary, rate_loss: self.rate_loss })?;
        let share = self.share()?;
        let mut store = self.store.unwrap_or_else(|| Arc::new(MemoryStore::new(self.max_keys)));
        if self.on_store_error == OnStoreError::FallbackShare {
            store = Arc::new(FallbackStore::new(store, share, self.max_keys));
        }
        let limiter = Limiter::new(Settings {
            terms: Arc::new(Terms::new(self.quota, transit, boundary).with_life(life)),
            store,
            max_wait: self.max_wait,
            max_waiting: self.max_waiting,
            max_keys: self.max_keys,
            in_flight_life: self.in_flight_life,
            max_hold: self.max_hold,
            learn: self.learn,
            on_scope: self.on_scope,
            on_store_error: self.on_store_error,
        });
        Ok(RateLimitLayer { limiter, extractors: Arc::new(self.extractors) })
    }

    fn share(&self) -> Result<Option<Share>, ConfigError> {
        let falls_back = self.on_store_error == OnStoreError::FallbackShare;
        if falls_back && self.quota.limits().is_empty() {
            let allowed =
                "FailClosed or FailOpen where only calls in flight are limited: they have no shares";
            let value = "FallbackShare".into();
            return Err(ConfigError::OutOfRange { setting: "on_store_error", value, allowed });
        }
        let Some(share) = self.fallback_share else { return Ok(None) };
        let out_of_range = |allowed| {
            let value = format!("{share:?}");
            ConfigError::OutOfRange { setting: "fallback_share", value, allowed }
        };
        if !falls_back {
            return Err(out_of_range("left out, or go with on_store_error(OnStoreError::FallbackShare)"));
        }
        let allowed = "above 0 and at most 1, such as 1.0 / 8.0 for eight processes";
        Share::new(share).map(Some).ok_or_else(|| out_of_range(allowed))
    }
}

impl std::fmt::Debug for RateLimitBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimitBuilder")
            .field("quota", &self.quota)
            .field("extractors", &self.extractors)
            .field("max_wait", &self.max_wait)
            .finish_non_exhaustive()
    }
}

pub(super) fn at_most(
    setting: &'static str,
    value: Duration,
    most: Duration,
    allowed: &'static str,
) -> Result<(), ConfigError> {
    if value <= most {
        return Ok(());
    }
    Err(ConfigError::OutOfRange { setting, value: format!("{value:?}"), allowed })
}
