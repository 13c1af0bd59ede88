//! The words a user says about a limit that is not known.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;

use super::builder::at_most;
use super::extractors::Extractors;
use crate::config_error::ConfigError;
use crate::error::Limited;
use crate::key::{Key, RequestInfo};
use crate::pace::{Fair, Pace};
use crate::rng::{Dice, dice};
use crate::signal::{AsResponseInfo, Signal};
use crate::store::Store;
pub(crate) use crate::throttle::Begun;
use crate::throttle::{Throttle, ThrottlePermit, ThrottleSettings};

/// Finds the pace that a server allows, where its limit is unknown or moves, and is fair to every other client without
/// talking to them. Clones share what they learn.
///
/// It learns from what answers say: refusals, what is left, when to come back. How it does so is its
/// [pace](crate::pace): by default [`Fair`], with next to no refusals and even shares for all. Where the limit is known,
/// [`RateLimitLayer`](super::RateLimitLayer) is exact. If you want both, put the throttle outside.
///
/// It is a `tower_layer::Layer` over the same services as [`RateLimitLayer`](super::RateLimitLayer), and a
/// `reqwest_middleware::Middleware` (feature `reqwest-middleware`). Without HTTP, take its
/// [`throttle`](AdaptiveThrottleLayer::throttle).
///
/// ```
/// use http::{Request, Response};
/// use tollgate::{AdaptiveThrottleLayer, by_host};
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let client = service_fn(|_: Request<String>| async { Ok::<_, BoxError>(Response::new("hello")) });
/// let throttle = AdaptiveThrottleLayer::builder().key(by_host).build()?;
/// let mut service = ServiceBuilder::new().layer(throttle).service(client);
///
/// let request = Request::get("https://api.example.com/users").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// # assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
///
/// # What happens to a request
///
/// It joins the line of its key, first come, first served. Before the first answer one request is out alone, for at most a
/// second; after that, the pace says when the next may leave. A refusal holds the line for as long as the server said, up to
/// [`max_hold`](AdaptiveThrottleBuilder::max_hold), or for as long as the pace finds right.
///
/// A refusal passes as a response. With [`retrying`](AdaptiveThrottleLayer::retrying) the call takes its old place in the
/// line instead, before all others, and is sent again.
///
/// # What it does not do
///
/// It counts nothing: a server's limit may be hit once in a while, and is found again. Each process learns for itself, and
/// nothing is lost when it ends; a fleet of many shares what it learns through a [store](AdaptiveThrottleBuilder::store).
#[derive(Clone, Debug)]
pub struct AdaptiveThrottleLayer {
    throttle: Throttle,
    extractors: Arc<Extractors>,
}

impl AdaptiveThrottleLayer {
    /// A layer that learns one pace for everything that passes it, and knows nothing yet. Waits up to 15 s.
    #[expect(clippy::new_without_default, reason = "a layer is made on purpose: each counts for itself")]
    pub fn new() -> Self {
        AdaptiveThrottleLayer::builder().build().expect("the defaults make sense")
    }

    /// A builder, to change the defaults.
    pub fn builder() -> AdaptiveThrottleBuilder {
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

    /// The gate behind this layer, for what is not HTTP. It shares what the layer learns.
    pub fn throttle(&self) -> Throttle {
        self.throttle.clone()
    }

    /// The same layer, which sends refused requests again.
    pub fn retrying(self) -> RetryingThrottleLayer {
        RetryingThrottleLayer { layer: self }
    }

    /// A request enters the gate.
    pub(crate) fn enter(&self, request: &RequestInfo<'_>) -> Begun {
        let Some(entry) = self.extractors.entry(request) else {
            return Begun::Limited(self.throttle.no_key());
        };
        let label = || self.throttle.label(entry.key, Some(request));
        match self.throttle.begin(entry.key, entry.deadline, label) {
            Begun::Leaves(permit) if self.error_on_limit() => Begun::Leaves(permit.named(label())),
            begun => begun,
        }
    }

    /// What `response` says to a request to `host` under `key`.
    pub(crate) fn signal(&self, key: Key, host: Option<Key>, response: &impl AsResponseInfo) -> Signal {
        self.extractors.policy.signal(key, host, response)
    }

    /// Whether a refusal by the upstream is an error.
    pub(crate) fn error_on_limit(&self) -> bool {
        self.extractors.policy.error_on_limit()
    }

    /// The response to a request leaves the gate: an error where it is a refusal, and refusals are errors.
    pub(crate) fn leave(&self, permit: ThrottlePermit, signal: &Signal) -> Result<(), Limited> {
        match permit.answered(signal) {
            Some(limited) if self.error_on_limit() => Err(limited),
            _ => Ok(()),
        }
    }
}

/// An [`AdaptiveThrottleLayer`] that sends refused requests again, each in its old place in the line, for as long as
/// `max_wait` from its arrival. Made by [`retrying`](AdaptiveThrottleLayer::retrying).
///
/// A refusal that says that the request would have to wait for longer passes as a response. Any other is dropped before
/// the wait, so that it holds neither its connection nor, with
/// [`hold_until_body_end`](crate::RateLimitLayer::hold_until_body_end), its place in flight. If the request then gets no
/// turn in time, it ends with [`Limited::Upstream`], which has the status of the last refusal.
///
/// A request has to be one that can be sent twice ([`CloneRequest`](crate::CloneRequest)); one that cannot be cloned, such as
/// one with a streaming body, is sent once. So mind requests that do something each time they arrive: a server that refuses a
/// request has, as a rule, not acted on it.
///
/// ```
/// use http::{Request, Response};
/// use tollgate::AdaptiveThrottleLayer;
/// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), BoxError> {
/// # let mut refusals = 2;
/// let client = service_fn(move |_: Request<String>| {
///     let status = if refusals > 0 { 429 } else { 200 };
///     refusals -= 1;
///     async move { Response::builder().status(status).header("retry-after", 1).body("hello") }
/// });
/// # let client = { let client = std::sync::Arc::new(std::sync::Mutex::new(client)); service_fn(move |request: Request<String>| client.lock().unwrap().call(request)) };
/// let mut service = ServiceBuilder::new().layer(AdaptiveThrottleLayer::new().retrying()).service(client);
///
/// let request = Request::get("https://api.example.com/users").body(String::new())?;
/// let response = service.ready().await?.call(request).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryingThrottleLayer {
    pub(crate) layer: AdaptiveThrottleLayer,
}

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
