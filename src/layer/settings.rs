//! The settings that both builders have.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::extractors::Extractors;
use crate::config_error::ConfigError;
use crate::guard::Guard;
use crate::stats::{Handler, Tally, is_series_name};
use crate::store::{MemoryStore, Store};

/// The settings that both builders have. [`common_setters!`] makes their setters.
pub(super) struct Common {
    pub(super) name: Option<&'static str>,
    pub(super) extractors: Extractors,
    /// `None`: each builder has a default of its own.
    pub(super) store: Option<Arc<dyn Store>>,
    pub(super) max_wait: Duration,
    /// Waiters per key.
    pub(super) max_queue: usize,
    pub(super) max_keys: usize,
    pub(super) max_hold: Duration,
    pub(super) on_event: Option<Arc<Handler>>,
    #[cfg(feature = "metrics")]
    pub(super) metrics_keys: usize,
    pub(super) guard: Option<Guard>,
}

const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(15);
const DEFAULT_MAX_QUEUE: usize = 10_000;
#[cfg(feature = "metrics")]
const MOST_METRICS_KEYS: usize = 1000;
const DAY: Duration = Duration::from_secs(86_400);

impl Common {
    /// Creates the defaults, with the builder's own `max_hold`.
    pub(super) fn new(max_hold: Duration) -> Self {
        Common {
            name: None,
            extractors: Extractors::default(),
            store: None,
            max_wait: DEFAULT_MAX_WAIT,
            max_queue: DEFAULT_MAX_QUEUE,
            max_keys: MemoryStore::DEFAULT_MAX_KEYS,
            max_hold,
            on_event: None,
            #[cfg(feature = "metrics")]
            metrics_keys: 0,
            guard: None,
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name.unwrap_or(Tally::DEFAULT_NAME)
    }

    /// Returns the store that was set, or one of the layer's own.
    pub(super) fn store_or_memory(&self) -> Arc<dyn Store> {
        let store = self.store.clone();
        store.unwrap_or_else(|| Arc::new(MemoryStore::new(self.max_keys)))
    }

    /// Makes the counts of a gate that is called `name`.
    pub(super) fn tally(&self, name: &str) -> Tally {
        let tally = Tally::new(name, self.on_event.clone());
        #[cfg(feature = "metrics")]
        tally.label_keys(self.metrics_keys);
        tally
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        at_most("max_wait", self.max_wait, DAY, "at most a day")?;
        at_most("max_hold", self.max_hold, DAY, "at most a day")?;
        let no_wait = "at least 1; to refuse at once instead of waiting, set max_wait to zero";
        ConfigError::unless(self.max_queue >= 1, "max_queue", self.max_queue, no_wait)?;
        ConfigError::unless(self.max_keys >= 1, "max_keys", self.max_keys, "at least 1")?;
        #[cfg(feature = "metrics")]
        ConfigError::unless(
            self.metrics_keys <= MOST_METRICS_KEYS,
            "metrics_keys",
            self.metrics_keys,
            "at most 1000",
        )?;
        if let Some(guard) = &self.guard {
            guard.check()?;
        }
        check_name("name", self.name())
    }

    pub(super) fn debug(&self, shown: &mut fmt::DebugStruct<'_, '_>) {
        shown
            .field("extractors", &self.extractors)
            .field("max_wait", &self.max_wait);
    }
}

/// Returns an error if `name` cannot be a part of the name of a series in stats.
pub(super) fn check_name(setting: &'static str, name: &str) -> Result<(), ConfigError> {
    ConfigError::unless(
        is_series_name(name),
        setting,
        format_args!("{name:?}"),
        "1 to 64 of the letters a to z and A to Z, digits, spaces and `_.-/:`",
    )
}

pub(super) fn at_most(
    setting: &'static str,
    value: Duration,
    most: Duration,
    allowed: &'static str,
) -> Result<(), ConfigError> {
    ConfigError::unless(value <= most, setting, format_args!("{value:?}"), allowed)
}

/// Defines the setters of [`Common`] for a builder with a field `common`.
///
/// A setter's doc starts with what is true of both builders. What is true of one builder is passed
/// in before the name of the setter.
macro_rules! common_setters {
    (
        $(#[$key:meta])* key;
        $(#[$max_wait:meta])* max_wait;
        $(#[$max_keys:meta])* max_keys;
        $(#[$max_hold:meta])* max_hold;
        $(#[$store:meta])* store;
        $(#[$dialect:meta])* dialect;
        $(#[$name:meta])* name;
    ) => {
        /// Sets how the key of a request is found: [`by_host`](crate::by_host),
        /// [`by_header`](crate::by_header), or a closure that returns a [`Key`](crate::Key) or an
        /// `Option<Key>`. Default: one key for all requests ([`Key::ALL`](crate::Key::ALL)).
        ///
        /// If the function returns `None`, the request is refused
        /// ([`Reason::NoKey`](crate::Reason::NoKey)). A [`Key`](crate::Key) in the extensions of
        /// the request takes precedence over the function.
        ///
        $(#[$key])*
        pub fn key<F, K>(mut self, key: F) -> Self
        where
            F: Fn(&$crate::RequestRef<'_>) -> K + Send + Sync + 'static,
            K: Into<Option<$crate::Key>>,
        {
            self.common.extractors.set_key(key);
            self
        }

        /// Sets how the deadline of a request is found: the moment by which it must be sent.
        /// Default: none.
        ///
        /// If its slot is later than the deadline, the request is refused. A
        /// [`Deadline`](crate::Deadline) in the extensions of the request takes precedence over the
        /// function. [`max_wait`](Self::max_wait) limits the wait as well.
        pub fn deadline<F>(mut self, deadline: F) -> Self
        where
            F: Fn(&$crate::RequestRef<'_>) -> Option<std::time::Instant> + Send + Sync + 'static,
        {
            self.common.extractors.deadline = Some(std::sync::Arc::new(deadline));
            self
        }

        /// Sets the kind of a request, for refusals that are about one kind of requests. Default: its method, the first
        /// segment of its path (after segments such as `api` and `v1`), its cost as a power of two, and its class.
        ///
        /// A server may refuse some requests always, such as those that name a model which was retired. Their first
        /// refusal [holds](Self::max_hold) the key, as any. A later one holds this kind of requests instead, if the server
        /// accepted at least three requests of other kinds since, and none of this kind. So the requests of one kind have in
        /// common what a server may refuse them for. Those for which the function returns `None` are of one kind.
        ///
        /// ```
        /// use tollgate::{Key, Quota, RateLimitLayer};
        ///
        /// let layer = RateLimitLayer::builder(Quota::per_second(50))
        ///     .kind(|request| request.header("x-model").map(Key::new))
        ///     .build()?;
        /// # Ok::<(), tollgate::ConfigError>(())
        /// ```
        ///
        /// The function is called only for some time after a refusal (with `retrying`, for each request).
        pub fn kind<F, K>(mut self, kind: F) -> Self
        where
            F: Fn(&$crate::RequestRef<'_>) -> K + Send + Sync + 'static,
            K: Into<Option<$crate::Key>>,
        {
            self.common.extractors.kind =
                Some(std::sync::Arc::new(move |request| kind(request).into()));
            self
        }

        /// Sets the longest time for which a request may wait for its permit. Default: 15 s; at
        /// most a day.
        ///
        /// With `Duration::ZERO`, requests do not wait. An outer timeout should be longer than
        /// `max_wait`: see [retry and timeout](crate::guide::retry_and_timeout).
        ///
        $(#[$max_wait])*
        pub fn max_wait(mut self, max_wait: std::time::Duration) -> Self {
            self.common.max_wait = max_wait;
            self
        }

        /// Sets how many requests of one key may wait in this process. Default: 10,000; at least 1.
        ///
        /// Further requests of the key are refused
        /// ([`Reason::QueueFull`](crate::Reason::QueueFull)). A request of several keys counts for the one that it waits
        /// for.
        pub fn max_queue(mut self, max_queue: usize) -> Self {
            self.common.max_queue = max_queue;
            self
        }

        /// Sets how many keys may be in use at once in this process. Default: 100,000; at least 1.
        ///
        /// If all of them are in use, requests with a new key are refused
        /// ([`Reason::TooManyKeys`](crate::Reason::TooManyKeys)).
        ///
        $(#[$max_keys])*
        pub fn max_keys(mut self, max_keys: usize) -> Self {
            self.common.max_keys = max_keys;
            self
        }

        /// Sets for how long a response of the upstream may stop all requests of a key: a key on hold.
        ///
        $(#[$max_hold])*
        ///
        /// If reqwest followed a redirect to another host, a refusal by that host holds nothing.
        pub fn max_hold(mut self, max_hold: std::time::Duration) -> Self {
            self.common.max_hold = max_hold;
            self
        }

        $(#[$store])*
        pub fn store(mut self, store: impl Into<$crate::store::SharedStore>) -> Self {
            self.common.store = Some(store.into().0);
            self
        }

        /// Sets how a key is named in [`KeyStats`](crate::stats::KeyStats), from a request of the key.
        /// Default: the host, if that is the key, else eight hex digits.
        ///
        /// A key that has no name is asked for one when a request finds no permit at hand. At most 64
        /// bytes of the name are kept, and control characters become `?`. Do not return a secret:
        /// names are shown as they are.
        ///
        /// ```
        /// use tollgate::{Key, Quota, RateLimitLayer};
        ///
        /// let limit = RateLimitLayer::builder(Quota::per_second(50))
        ///     .key(|request| request.header("x-tenant").map(Key::new))
        ///     .key_name(|request| {
        ///         let tenant = request.header("x-tenant")?;
        ///         Some(String::from_utf8_lossy(tenant).into_owned())
        ///     })
        ///     .build()?;
        /// # Ok::<(), tollgate::ConfigError>(())
        /// ```
        pub fn key_name<F, N>(mut self, name: F) -> Self
        where
            F: Fn(&$crate::RequestRef<'_>) -> Option<N> + Send + Sync + 'static,
            N: Into<String>,
        {
            self.common.extractors.key_name =
                Some(std::sync::Arc::new(move |request| name(request).map(N::into)));
            self
        }

        /// Sets how many keys have [metrics](crate::metrics) of their own. Default: 0; at most 1000.
        ///
        /// `tollgate_requests_total` and `tollgate_units_total` then have the label `key`, with the name
        /// that [`key_name`](Self::key_name) returns. The busiest keys of the first publish have it, and
        /// later keys as long as there are places. A key without requests for an hour frees its place, until
        /// 10,000 keys have had one. Keys without a place are counted under `other`, as is what a key did before it got one.
        /// The sum over all keys is the whole.
        #[cfg(feature = "metrics")]
        #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
        pub fn metrics_keys(mut self, most: usize) -> Self {
            self.common.metrics_keys = most;
            self
        }

        /// Sets a closure that is called with each [`Event`](crate::stats::Event): holds, refusals,
        /// failures of the store. Default: none. The feature `tracing` reports the same events, and some
        /// more.
        ///
        /// The closure runs in the task that causes the event, never for a request that passes. It must
        /// not block.
        ///
        /// ```
        /// use tollgate::stats::Event;
        /// use tollgate::{Quota, RateLimitLayer};
        ///
        /// let limit = RateLimitLayer::builder(Quota::per_second(50))
        ///     .on_event(|event| {
        ///         if let Event::Held { .. } = event {
        ///             eprintln!("{event}");
        ///         }
        ///     })
        ///     .build()?;
        /// # Ok::<(), tollgate::ConfigError>(())
        /// ```
        pub fn on_event(
            mut self,
            handler: impl Fn(&$crate::stats::Event<'_>) + Send + Sync + 'static,
        ) -> Self {
            self.common.on_event = Some(std::sync::Arc::new(handler));
            self
        }

        /// Sets a guard that stops requests before the server bans the program for too many bad answers,
        /// such as 401 or 429. Default: none.
        ///
        /// The bad answers of all processes that share the store count together. [`Guard`](crate::Guard)
        /// has an example.
        ///
        /// # Errors
        ///
        /// [`build`](Self::build) fails if a setting of the guard is out of range.
        pub fn guard(mut self, guard: $crate::Guard) -> Self {
            self.common.guard = Some(guard);
            self
        }

        /// Turns a response that is a refusal into an error,
        /// [`Limited::Upstream`](crate::Limited::Upstream). The body of the response is dropped.
        /// Default: a refusal passes as a response.
        ///
        /// [`Signal::refusal`](crate::Signal::refusal) states which responses are refusals: a 429,
        /// a 503 with `Retry-After`, and some others.
        ///
        /// Set it at the outermost layer. A layer around this one sees the error as a request without a response, and
        /// learns nothing of the refusal.
        pub fn error_on_upstream_limit(mut self) -> Self {
            self.common.extractors.policy.change().error_on_limit = true;
            self
        }

        /// Sets a function that changes how responses are read, for a server with headers of its
        /// own. Default: none.
        ///
        /// `dialect` takes the key of the request, the headers of the response, and the
        /// [`Signal`](crate::Signal) that was read from them. The signal that it returns takes
        /// effect.
        ///
        $(#[$dialect])*
        pub fn dialect<F>(mut self, dialect: F) -> Self
        where
            F: Fn($crate::Key, &http::HeaderMap, $crate::Signal) -> $crate::Signal + Send + Sync + 'static,
        {
            self.common.extractors.policy.change().dialect = Some(std::sync::Arc::new(dialect));
            self
        }

        /// Names the layer in its [stats](crate::stats). Default: no name; the stats have `default`.
        ///
        /// A name has 1 to 64 of the letters a to z and A to Z, digits, spaces and `_.-/:`.
        $(#[$name])*
        ///
        /// # Errors
        ///
        /// [`build`](Self::build) fails if the name has other characters or another length.
        pub fn name(mut self, name: &'static str) -> Self {
            self.common.name = Some(name);
            self
        }
    };
}

pub(super) use common_setters;
