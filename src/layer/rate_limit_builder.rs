//! The builder of a [`RateLimitLayer`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::extractors::Extractors;
use super::guard;
use super::rate_limit::{LimitOfLayer, RateLimitLayer};
use super::routes::{RouteTable, Routes};
use super::settings::{Common, at_most, check_name, common_setters};
use crate::config_error::ConfigError;
use crate::cost::Cost;
use crate::guarded::Watch;
use crate::key::{Key, RequestRef};
use crate::limiter::{
    CountedLate, HeaderTrust, Limiter, MOST_PARTS, OnScope, OnStoreError, PartOfQuota, Quotas,
    Settings,
};
use crate::quota::{ClassShare, Division, Quota, Slacks};
use crate::signal::ResponseRef;
#[cfg(doc)]
use crate::store::MemoryStore;
use crate::store::{FallbackStore, Share, Store, UnlearningStore};
#[cfg(doc)]
use crate::{error::Reason, limiter::Settlement, signal::Signal};

/// Configures a [`RateLimitLayer`].
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
    common: Common,
    on_store_error: OnStoreError,
    /// Between 0 and 1; see [`RateLimitBuilder::fallback_share`].
    fallback_share: Option<f64>,
    slacks: Slacks,
    in_flight_ttl: Duration,
    late: CountedLate,
    /// Whether the program itself states what requests cost.
    charged_by_hand: bool,
    /// `None`: only if the layer settles.
    wait_above_limit: Option<bool>,
    learn: HeaderTrust,
    on_scope: Option<OnScope>,
    /// The classes among which the quota of the first limit is divided.
    shares: Vec<ClassShare>,
    /// A class without a share for which `lends` was called.
    lends_unknown: Option<&'static str>,
    /// The limits besides the first.
    further: Vec<Further>,
    /// Routes whose quotas apply in place of the first limit.
    instead: Vec<Routes>,
}

/// A limit that [`RateLimitBuilder::and_per`] or [`RateLimitBuilder::routes`] adds.
struct Further {
    name: &'static str,
    quota: Quota,
    extractors: Extractors,
    /// The routes that this limit is for, if it is for some.
    routes: Option<Routes>,
}

/// Returns the units of a quota besides requests.
fn units_of(quota: &Quota) -> impl Iterator<Item = &'static str> {
    quota.units().filter(|unit| *unit != Cost::REQUESTS)
}

const DEFAULT_MAX_HOLD: Duration = Duration::from_secs(60);
const DEFAULT_IN_FLIGHT_TTL: Duration = Duration::from_secs(10);
const SHORTEST_IN_FLIGHT_TTL: Duration = Duration::from_millis(300);
const LONGEST_SLACK: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

impl RateLimitBuilder {
    pub(super) fn new(quota: Quota) -> Self {
        RateLimitBuilder {
            quota,
            common: Common::new(DEFAULT_MAX_HOLD),
            on_store_error: OnStoreError::default(),
            fallback_share: None,
            slacks: Slacks::DEFAULT,
            in_flight_ttl: DEFAULT_IN_FLIGHT_TTL,
            late: CountedLate::default(),
            charged_by_hand: false,
            wait_above_limit: None,
            learn: HeaderTrust::default(),
            on_scope: None,
            shares: Vec::new(),
            lends_unknown: None,
            further: Vec::new(),
            instead: Vec::new(),
        }
    }

    common_setters! {
        /// Without a key function, all requests are counted together, but a refusal
        /// [holds](Self::max_hold) only the requests to the host that refused.
        key;
        /// If its slot is further away, the request is refused at once and takes no units. The
        /// error states when to try again. A request waits for the next window only if `max_wait`
        /// is longer than the window and its [margin](crate::guide::choosing_a_quota#the-margin).
        ///
        /// Even if `max_wait` is shorter, also if it is zero, a request waits for a slot that is at most the margin and
        /// 10 ms away, if the slots of the quota are further apart than that: sliding windows of few requests, and
        /// [`Quota::every`]. Otherwise [a caller at exactly the
        /// rate](crate::guide::choosing_a_quota#a-caller-at-exactly-the-rate) would be refused each second time. A
        /// request waits no longer than its deadline, and not at all outside of a Tokio runtime. In a runtime without
        /// timers that wait panics, as any.
        max_wait;
        /// The default store has room for the same number of keys. Keys that are not in use need no
        /// memory and do not count. Without a [key function](Self::key), each host on hold counts
        /// as a key, and if there is no room, a refusal holds nothing.
        max_keys;
        /// Default: 60 s, so that one wrong response costs about a minute; at most a day. With
        /// `Duration::ZERO`, a refusal holds nothing.
        ///
        /// If the upstream states a time, the key is on hold until then. If that is longer than `max_hold`, one request
        /// of the fleet is sent as a probe after `max_hold`, and when it has passed, the others follow. If the probe is
        /// refused, the next is sent after half of what is left, and then none for an hour, or until the stated time.
        ///
        /// If the upstream states no time, the key is on hold for about a second, and for twice as long after each
        /// further refusal, up to `max_hold`. The page [refusals](crate::guide::refusals#refused-by-the-server) has all
        /// rules.
        ///
        /// Units that a response shows to be used by [other clients](Self::trust_headers) are
        /// reserved for them for a minute, or for `max_hold` if that is shorter.
        ///
        /// Without a [key function](Self::key), a refusal holds the requests to its host
        /// ([`Key::host_hold`]) and no others. If the request has no host, its refusal holds all
        /// requests. With a key function, a refusal holds the key of the request, whatever its
        /// host.
        max_hold;
        /// Sets the store in which permits are counted. Default: a [`MemoryStore`] of the layer's
        /// own.
        ///
        /// Layers with the same store share the counts of equal keys. For many processes, use a
        /// `RedisStore` (feature `redis`): see [many processes](crate::guide::many_processes).
        store;
        /// ```
        /// use std::time::Duration;
        /// use http::{HeaderMap, StatusCode};
        /// use tollgate::{Key, Quota, RateLimitLayer, Signal, by_host};
        ///
        /// // One of the servers sends `X-Pause: 3` where others send `429` and `Retry-After: 3`.
        /// let theirs = Key::host("api.example.com");
        /// let pause = move |key, headers: &HeaderMap, signal: Signal| {
        ///     let seconds = headers.get("x-pause").and_then(|value| value.to_str().ok());
        ///     match seconds.and_then(|seconds| seconds.parse().ok()) {
        ///         Some(seconds) if key == theirs => signal
        ///             .with_refusal(StatusCode::TOO_MANY_REQUESTS)
        ///             .with_retry_after(Duration::from_secs(seconds)),
        ///         _ => signal,
        ///     }
        /// };
        /// let limit = RateLimitLayer::builder(Quota::per_second(50))
        ///     .key(by_host)
        ///     .dialect(pause)
        ///     .build()?;
        /// # Ok::<(), tollgate::ConfigError>(())
        /// ```
        dialect;
        ///
        /// It is also the name of the first limit of the layer. It stands in errors
        /// ([`LimitedInfo::name`](crate::error::LimitedInfo::name)), and a refusal whose
        /// [scope](crate::Signal::scope) is this name holds the key of this limit. A limit of
        /// [`and_per`](Self::and_per) has a series of its own in the stats, such as `github search`.
        name;
    }

    /// Sets how the cost of a request is found: a number of requests, or a [`Cost`] with units of
    /// other kinds. Default: one request.
    ///
    /// A [`Cost`] in the extensions of the request takes precedence over the function. If the quota limits
    /// [units](Quota::of) that no request states, requests are refused after the first 100
    /// ([`Reason::NotCharged`]). The function sees the body of the request if it is in memory
    /// ([`RequestRef::body`]).
    ///
    /// # Errors
    ///
    /// [`build`](Self::build) fails if the quota limits other units than requests, and neither this nor
    /// [`settle`](Self::settle), [`settle_by_hand`](Self::settle_by_hand) or
    /// [`charged_by_hand`](Self::charged_by_hand) is set: nothing would be charged.
    ///
    /// ```
    /// use tollgate::{Cost, Quota, RateLimitLayer};
    ///
    /// let quota: Quota = "500/min, 200000 tokens/min".parse()?;
    /// let limit = RateLimitLayer::builder(quota)
    ///     .cost(|request| Cost::of("tokens", if request.path() == "/long" { 4000 } else { 500 }))
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn cost<F, C>(mut self, cost: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> C + Send + Sync + 'static,
        C: Into<Cost>,
    {
        self.common.extractors.cost = Some(Arc::new(move |request| cost(request).into()));
        self
    }

    /// States that the program itself charges the [units](Quota::of) of the quota, with a [`Cost`] in the extensions of
    /// requests or by [`Acquire::cost`](crate::limiter::Acquire::cost). Default: off.
    ///
    /// A request that states no cost then takes one request and no other units.
    pub fn charged_by_hand(mut self) -> Self {
        self.charged_by_hand = true;
        self
    }

    /// Sets whether a request that costs more than a limit allows at once waits until the whole limit is free, and takes
    /// all of it. Default: yes if the layer settles ([`settle`](Self::settle), [`settle_by_hand`](Self::settle_by_hand)),
    /// because a cost is then an estimate, and is corrected after the response; else no.
    ///
    /// If it does not wait, the request is refused ([`Reason::CostAboveLimit`]), and so is each later one of that cost.
    /// What a request did cost above the limit is charged by its settlement.
    pub fn wait_above_limit(mut self, waits: bool) -> Self {
        self.wait_above_limit = Some(waits);
        self
    }

    /// Sets the quota of the key of a request, for tenants with plans or tokens of several sizes. If the
    /// function returns `None`, the quota of the builder applies. Default: that quota for all keys.
    ///
    /// A [`Quota`] in the extensions of the request takes precedence over the function.
    ///
    /// The quota belongs to the key, so all requests of a key should state the same one. If a request
    /// states another one than the request before it, the key has the new quota from then on, and used
    /// units stay used. The limits of the old quota apply, too, for two of their windows and up to a
    /// second: an upgrade takes effect later than a downgrade.
    ///
    /// It has the same units as the quota of the builder, and limits calls in flight only if that does.
    /// A limiter keeps up to 10 000 different quotas. If a quota is out of range, the request is refused
    /// with [`Reason::InvalidQuota`].
    ///
    /// Limits of [`and_per`](Self::and_per) keep their own quota.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// let limit = RateLimitLayer::builder(Quota::per_minute(60))
    ///     .key(|request| request.header("x-tenant").map(Key::new))
    ///     .quota(|request| match request.header("x-plan") {
    ///         Some(b"gold") => Some(Quota::per_minute(600)),
    ///         _ => None,
    ///     })
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn quota<F>(mut self, quota: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> Option<Quota> + Send + Sync + 'static,
    {
        self.common.extractors.quota = Some(Arc::new(quota));
        self
    }

    /// Guarantees a class of requests a share of the quota, in per cent, whatever other requests do.
    /// Default: no shares, and all requests wait in one line.
    ///
    /// What a class leaves unused is [lent](Self::lends) to the others as it arises. Requests without a
    /// class, and those of classes without a share, have together what the shares leave.
    /// [`class`](Self::class) says which class a request has. Without it, only requests that bring their
    /// class have one: a layer whose requests bring none has the rest, and says so
    /// ([`Event::NoClass`](crate::stats::Event::NoClass)). Each class waits in a line of its own, of up
    /// to [`max_queue`](Self::max_queue) requests.
    ///
    /// With `share("web", 100)`, web goes first: all others live on what web does not use. To keep a line
    /// moving, they have one per cent of the quota, and at least one unit.
    ///
    /// A share is a part of each limit of a rate, rounded down to whole units. Of a limit of [calls in
    /// flight](Quota::in_flight), a class below its share gets the next free slot. The limits of
    /// [`and_per`](Self::and_per) are not divided. The page [`guide::classes`](crate::guide::classes) has
    /// what is guaranteed, and what to do when shares change.
    ///
    /// [`build`](Self::build) fails if a share is not from 1 to 100, if the shares are more than 100 per
    /// cent together, if there are more than seven, if the quota has eight limits, if a share of a rate is less than one
    /// unit, or if a class has other characters than a [name](Self::name) ([`ConfigError`]).
    ///
    /// ```
    /// use tollgate::{Quota, RateLimitLayer};
    ///
    /// let limit = RateLimitLayer::builder(Quota::per_second(50))
    ///     .share("web", 50)
    ///     .share("jobs", 30) // 20 % are for all others
    ///     .class(|request| request.path().starts_with("/batch").then_some("jobs").or(Some("web")))
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn share(mut self, class: &'static str, percent: u8) -> Self {
        self.shares.push(ClassShare {
            class,
            percent,
            lends: ClassShare::LENDS,
        });
        self
    }

    /// Sets how much of the share of a class others may borrow while the class does not use it, in per cent,
    /// from 0 to 100. Default: 97. Set it after [`share`](Self::share).
    ///
    /// What is not lent is free at once when requests of the class arrive together: a lower value shortens
    /// the waits after an idle time, and leaves more of the quota unused. [`build`](Self::build) fails if
    /// the class has no share, or if `percent` is above 100.
    pub fn lends(mut self, class: &'static str, percent: u8) -> Self {
        match self.shares.iter_mut().find(|share| share.class == class) {
            Some(share) => share.lends = percent,
            None => self.lends_unknown = Some(class),
        }
        self
    }

    /// Sets how the class of a request is found. Default: only a [`Class`](crate::Class) in its extensions,
    /// which takes precedence over the function, or [`Acquire::class`](crate::limiter::Acquire::class) gives
    /// it one.
    ///
    /// A request whose class has no [share](Self::share) counts among the others.
    /// [`Event::UnknownClass`](crate::stats::Event::UnknownClass) names such a class once, and
    /// [`Event::NoClass`](crate::stats::Event::NoClass) says if no request of the layer has a class.
    ///
    /// # Errors
    ///
    /// [`build`](Self::build) fails if no class has a share.
    pub fn class<F>(mut self, class: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> Option<&'static str> + Send + Sync + 'static,
    {
        self.common.extractors.class = Some(Arc::new(class));
        self
    }

    /// Sets how the true cost of a request is read from its response. Default: a request counts with
    /// its [`cost`](Self::cost).
    ///
    /// Use it if the cost is known only after the request: `cost` then states an estimate. If the
    /// request cost less, the rest goes back to the store. If it cost more, the rest is charged, even
    /// beyond the limit, and the next requests wait for it. [`Settlement::settle`] has the details.
    /// If the function returns `None`, the estimate counts. A unit that its result does not state goes
    /// on to count with the estimate, too.
    ///
    /// The closer the estimate, the better the limit is used. An estimate that is never below the
    /// true cost never exceeds the limit.
    ///
    /// ```
    /// use tollgate::{Quota, RateLimitLayer};
    ///
    /// let limit = RateLimitLayer::builder(Quota::per_minute(80_000))
    ///     .cost(|_| 4000)
    ///     .settle(|response| response.number("x-tokens-used"))
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn settle<F, C>(mut self, settle: F) -> Self
    where
        F: Fn(&ResponseRef<'_>) -> Option<C> + Send + Sync + 'static,
        C: Into<Cost>,
    {
        self.common.extractors.policy.change().settle =
            Some(Arc::new(move |response| settle(response).map(Into::into)));
        self
    }

    /// Puts a [`Settlement`] into the extensions of each response, for a true cost that is known only
    /// after the body was read. Default: off.
    ///
    /// Without a call of [`Settlement::settle`], the request counts with its [`cost`](Self::cost).
    pub fn settle_by_hand(mut self) -> Self {
        self.common.extractors.policy.change().settles_by_hand = true;
        self
    }

    /// States that the upstream counts a request late: up to `span` after it was sent. Default: zero,
    /// for an upstream that counts a request when it arrives; at most an hour.
    ///
    /// Use it if the upstream counts units as it produces them, such as the output tokens of a long
    /// response. Then `span` is the time of the longest response.
    ///
    /// Without it, long responses followed by short ones can exceed the limit up to twice, even with
    /// exact estimates. With it, each window of all limits of this layer is longer by `span`, so less of
    /// them is used: two thirds, for 30 s and a limit per minute.
    ///
    /// A settlement states that the upstream has counted the request. From then on, the request counts
    /// for one window, so four fifths or more of a sliding window are used: settle when the response has
    /// ended. If only some limits are counted late, put them into a layer of their own, build both with
    /// [`settle_by_hand`](Self::settle_by_hand), and join them with [`and`](RateLimitLayer::and). In a layer for [language
    /// models](crate::guide::llm_apis), only output tokens are counted late.
    pub fn counted_within(mut self, span: Duration) -> Self {
        self.late.within = span;
        self
    }

    /// Lets [`counted_within`](Self::counted_within) apply to `unit` alone, and sets its default.
    #[cfg(feature = "llm")]
    pub(super) fn late_unit(mut self, unit: &'static str, default: Option<Duration>) -> Self {
        self.late.unit = Some(unit);
        if self.late.within.is_zero() {
            self.late.within = default.unwrap_or_default();
        }
        self
    }

    /// Returns whether a function finds the cost of a request.
    #[cfg(feature = "llm")]
    pub(super) fn has_cost(&self) -> bool {
        self.common.extractors.cost.is_some()
    }

    /// Returns whether a function reads the true cost from a response.
    #[cfg(feature = "llm")]
    pub(super) fn has_settle(&self) -> bool {
        self.common.extractors.policy.has_settle()
    }

    /// Returns the units besides requests of all quotas.
    #[cfg(feature = "llm")]
    pub(super) fn units(&self) -> Vec<&'static str> {
        let further = self.further.iter().map(|limit| &limit.quota);
        let quotas = std::iter::once(&self.quota).chain(further);
        quotas.flat_map(units_of).collect()
    }

    /// Adds a limit with a key of its own: each request also takes a permit of `quota` under the key
    /// that `key` returns. If it returns `None`, this limit does not see the request. A layer has
    /// up to eight limits.
    ///
    /// A request takes a permit of all its limits or of none, and waits once. While it waits for
    /// one limit, it takes nothing from the others. All settings of the layer apply to this limit
    /// too, and [`cost`](Self::cost) applies to all limits.
    ///
    /// `name` stands in errors ([`LimitedInfo::name`](crate::error::LimitedInfo::name)). It also
    /// keeps the keys of two limits apart: the key in the store is `key.and(name)` ([`Key::and`]).
    /// To [`peek`](crate::Limiter::peek) at it, use that key, and the limiter that
    /// [`limiter_of`](RateLimitLayer::limiter_of) returns.
    ///
    /// If a response is a refusal that names a [scope](crate::Signal::scope), it holds the key of
    /// the limit with that name. Otherwise it holds the key whose limit the response states as used
    /// up, or else the key of the last limit. So the narrowest limit should be the last.
    ///
    /// The page [several limits](crate::guide::several_limits) has more.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// // 30 messages per minute in all, one per second to each channel.
    /// let limit = RateLimitLayer::builder(Quota::per_minute(30))
    ///     .and_per("channel", Quota::per_second(1), |request| {
    ///         let channel = request.path().strip_prefix("/channels/")?;
    ///         channel.split('/').next().map(Key::new)
    ///     })
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`build`](Self::build) fails if the quota is out of range, if the name is used twice or would be no name of
    /// the [layer](Self::name), or if there are more than eight limits.
    pub fn and_per<F, K>(mut self, name: &'static str, quota: Quota, key: F) -> Self
    where
        F: Fn(&RequestRef<'_>) -> K + Send + Sync + 'static,
        K: Into<Option<Key>>,
    {
        let mut extractors = Extractors::default();
        // The key in the extensions of a request is that of the first limit.
        extractors.set_own_key(key);
        self.further.push(Further {
            name,
            quota,
            extractors,
            routes: None,
        });
        self
    }

    /// Adds quotas of routes: methods and path patterns. Each request that takes a route also takes a
    /// permit of the quota of this route. Other requests are not affected. [`Routes`] describes the
    /// patterns, and which of them a request takes.
    ///
    /// The routes are a limit of the layer, as [`and_per`](Self::and_per) adds them, with the
    /// [name](Routes::name) `route`. The key of a request is the key of the layer's first limit, then
    /// the pattern, then the values of `{name}`. So each token or host has routes of its own if the
    /// layer has a [key function](Self::key) for it. If a response is a refusal that names no limit, it
    /// holds the key of the last limit, so call this after `and_per`.
    ///
    /// With [`Routes::instead`], the quota of a route applies in place of the quota of the builder. A
    /// layer may have both: one table that applies instead, and others.
    ///
    /// All quotas of a table have the same units, and limit calls in flight or do not. With `instead`,
    /// the quota of the builder is one of them.
    ///
    /// ```
    /// use tollgate::{Quota, RateLimitLayer, Routes};
    ///
    /// let routes = Routes::new([
    ///     ("GET /search/*", Quota::per_minute(30)),
    ///     ("POST /channels/{channel}/messages", "5/5s".parse()?),
    /// ])?;
    /// let limit = RateLimitLayer::builder(Quota::per_hour(5000)).routes(routes).build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`build`](Self::build) fails with [`ConfigError`] if a quota is out of range, or differs in
    /// its kind from the others. Also if two tables apply instead, and in the cases of `and_per`.
    pub fn routes(mut self, routes: Routes) -> Self {
        if routes.is_instead() {
            self.instead.push(routes);
        } else if let Some(quota) = routes.first_quota() {
            self.further.push(Further {
                name: routes.limit_name(),
                quota,
                extractors: Extractors::default(),
                routes: Some(routes),
            });
        }
        self
    }

    /// Sets what happens to a request if the store fails. Default: [`OnStoreError::FailClosed`],
    /// because only this keeps the limit in all cases.
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.on_store_error = on_store_error;
        self
    }

    /// Sets the fraction of the limit that this process may use while the store is unreachable. It
    /// applies only if the store granted the process nothing in one of the last windows before, or if the process has
    /// not seen a whole window yet. Only with [`OnStoreError::FallbackShare`]. Default: none, and such a process sends
    /// nothing.
    ///
    /// The fraction is above 0 and at most 1. A good value is one divided by the number of
    /// processes. If the fraction of the limit is less than one unit, the process may use one unit
    /// in a longer window.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tollgate::{OnStoreError, Quota, RateLimitLayer, store::MemoryStore};
    ///
    /// # let store = Arc::new(MemoryStore::default());
    /// let limit = RateLimitLayer::builder(Quota::per_second(50))
    ///     .store(store)
    ///     .on_store_error(OnStoreError::FallbackShare)
    ///     .fallback_share(1.0 / 8.0) // eight processes
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn fallback_share(mut self, share: f64) -> Self {
        self.fallback_share = Some(share);
        self
    }

    /// Sets the transit slack: how much longer one request may take to the upstream than another.
    /// Default: 10 ms; at most 60 s.
    ///
    /// Opening a connection is part of that time. Suppose that the first request on a connection
    /// takes 150 ms longer than the next. Then with a slack of 10 ms, the upstream may see up to
    /// twice the limit at the start.
    ///
    /// Each window is longer than the quota says, by the
    /// [margin](crate::guide::choosing_a_quota#the-margin): the transit slack and the time for
    /// which a permit is valid. At 50 requests per second, the margin costs 2 % of the rate.
    pub fn transit_slack(mut self, transit_slack: Duration) -> Self {
        self.slacks.transit = transit_slack;
        self
    }

    /// Sets how many per cent of the rate the margin of permits may cost under a fine spacing.
    /// Default: 10; at most 50.
    ///
    /// The [margin](crate::guide::choosing_a_quota#the-margin) is the time for which a permit is
    /// valid, plus [`transit_slack`](Self::transit_slack). If the spacing of a burst or of
    /// [`Quota::every`] is short against the margin, requests are sent farther apart than the limit
    /// says. If that costs more than `percent` of the rate, permits are valid for a shorter time,
    /// down to 2 ms. If that still costs more, [`build`](Self::build) fails and states how much
    /// would be lost. A higher `percent` accepts the loss. Sliding and fixed windows do not need
    /// it.
    ///
    /// On a busy machine, a permit that is valid for 2 ms often expires before it is used. If the
    /// store is remote, permits are valid for at least twice the round trip and 5 ms.
    ///
    /// # Errors
    ///
    /// [`build`](Self::build) fails if more would be lost, and above 50.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Quota, RateLimitLayer};
    ///
    /// // A server that refuses a request within 20 ms of the one before, on the same network.
    /// let limit = RateLimitLayer::builder(Quota::every(Duration::from_millis(20)))
    ///     .transit_slack(Duration::from_millis(1))
    ///     .max_rate_loss(14)
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn max_rate_loss(mut self, percent: u32) -> Self {
        self.slacks.rate_loss = percent;
        self
    }

    /// Sets for how long before and after the boundary of a [fixed](Quota::fixed) window no request
    /// is sent. Default: 100 ms; at most a quarter of the window.
    ///
    /// It covers the time that a request takes to the upstream. It also covers how far the clock of
    /// this process (or of Redis) and the clock of the upstream differ.
    pub fn boundary_guard(mut self, boundary_guard: Duration) -> Self {
        self.slacks.boundary = boundary_guard;
        self
    }

    /// Sets how long the calls [in flight](Quota::in_flight) of a crashed process keep counting
    /// against the limit. Default: 10 s; from 300 ms to an hour.
    ///
    /// A running process reports its calls to the store every third of this time. If it cannot
    /// reach the store for all of this time, it cancels its calls with
    /// [`StoreError::InFlightSlotLost`](crate::store::StoreError::InFlightSlotLost). So calls in
    /// flight survive a shorter outage of the store. With a store in memory, the setting has no
    /// effect.
    pub fn in_flight_ttl(mut self, in_flight_ttl: Duration) -> Self {
        self.in_flight_ttl = in_flight_ttl;
        self
    }

    /// Sets how much of what responses state about limits takes effect. Default:
    /// [`HeaderTrust::Usage`]: if other clients use a part of the limit, the layer slows down.
    ///
    /// Without a [key function](Self::key), nothing is learned from requests to several hosts: each
    /// host has quotas of its own.
    ///
    /// [`Limiter::peek`](crate::Limiter::peek) shows what was learned. The page
    /// [`guide::learning`](crate::guide::learning) has the rules.
    pub fn trust_headers(mut self, learn: HeaderTrust) -> Self {
        self.learn = learn;
        self
    }

    /// Sets the key that a refusal holds if the response names the limit that was exceeded
    /// ([`Signal::scope`]). The function takes the key of the request and the scope. If it returns
    /// `None`, the refusal holds nothing. Default: the key of the request, or of its host: see
    /// [`max_hold`](Self::max_hold).
    ///
    /// A layer with [several limits](crate::guide::several_limits) needs it only if the scope is not
    /// the [name](Self::and_per) of a limit. The function then gets the key of the first limit, and
    /// decides for all limits.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// // A refusal with `X-RateLimit-Scope: shared` is about requests of other clients.
    /// let routes = RateLimitLayer::builder(Quota::per_second(5))
    ///     .key(|request| Key::new(request.path()))
    ///     .on_scope(|key, scope| (scope != "shared").then_some(key))
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn on_scope<F>(mut self, on_scope: F) -> Self
    where
        F: Fn(Key, &str) -> Option<Key> + Send + Sync + 'static,
    {
        self.on_scope = Some(Arc::new(on_scope));
        self
    }

    /// Checks the settings and builds the layer.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first setting or limit that is out of range, and what to change.
    pub fn build(mut self) -> Result<RateLimitLayer, ConfigError> {
        self.check()?;
        let store = self.common.store_or_memory();
        let guard = guard::build(&self.common, &store)?;
        let watch = guard.clone().map(|guard| guard as Arc<dyn Watch>);
        let limiter = self.limiter(self.quota, self.common.name, &store, &watch)?;
        let mut gates: Vec<_> = limiter.guarded().collect();
        let mut further = Vec::new();
        for limit in std::mem::take(&mut self.further) {
            let Further {
                name,
                quota,
                mut extractors,
                routes,
            } = limit;
            extractors.cost.clone_from(&self.common.extractors.cost);
            if let Some(routes) = &routes {
                routes.check(self.slacks)?;
            }
            let limiter = self.limiter(quota, Some(name), &store, &watch)?;
            gates.extend(limiter.guarded());
            if let Some(routes) = routes {
                extractors.set_own_routes(RouteTable::new(routes, &limiter)?);
            }
            further.push(LimitOfLayer {
                name: Some(name),
                limiter,
                extractors: Arc::new(extractors),
            });
        }
        if let Some(guard) = guard {
            guard.guard(gates, &*store);
        }
        if let Some(routes) = self.instead.pop() {
            self.common.extractors.routes = Some(RouteTable::new(routes, &limiter)?);
        }
        let first = LimitOfLayer {
            name: None,
            limiter,
            extractors: Arc::new(self.common.extractors),
        };
        RateLimitLayer::join(first, further.into()).ok_or(ConfigError::out_of_range(
            "and_per",
            "more than eight limits",
            "at most eight limits, where each unit of a quota is one",
        ))
    }

    /// Makes the limiter of one limit of the layer. The first limit has the name of the layer.
    fn limiter(
        &self,
        quota: Quota,
        name: Option<&'static str>,
        store: &Arc<dyn Store>,
        guard: &Option<Arc<dyn Watch>>,
    ) -> Result<Limiter, ConfigError> {
        quota.check(self.slacks)?;
        self.check_charged(&quota)?;
        let is_first = name == self.common.name;
        // Only the first limit of the layer is divided.
        let is_divided = is_first && !self.shares.is_empty();
        let division = is_divided.then(|| Division::new(&self.shares));
        let quotas = Quotas::new(quota, division.transpose()?, self.slacks, self.late);
        let quotas = Arc::new(quotas);
        let (mut rest, mut classes) = (None, Vec::new());
        for (index, part) in quotas.parts(&quota)?.into_iter().enumerate() {
            let class = index.checked_sub(1).map(|share| self.shares[share].class);
            let place = is_divided.then_some(PartOfQuota { index, class });
            let units = part.by_unit();
            let first = units.first().copied().unwrap_or(part);
            let first = Settings {
                on_scope: self.on_scope.clone().filter(|_| is_first),
                guard: guard.clone(),
                reports_guard: is_first && index == 0,
                ..self.settings(first, &quotas, place, name, store)?
            };
            let mut others = Vec::new();
            for unit in units.into_iter().skip(1) {
                others.push(Settings {
                    is_further_unit: true,
                    ..self.settings(unit, &quotas, place, name, store)?
                });
            }
            let limiter = Limiter::new(first, others);
            match class {
                Some(class) => classes.push((class, limiter)),
                None => rest = Some(limiter),
            }
        }
        let rest = rest.expect("the first part is that of requests without a class");
        Ok(match is_divided {
            true => Limiter::divided(rest, classes),
            false => rest,
        })
    }

    /// Returns the name of a limit in stats: that of the layer, that of the limit if it is a further one,
    /// what it counts if that is not requests, and the class if it has a share.
    fn series(&self, name: Option<&str>, unit: Option<&str>, part: Option<PartOfQuota>) -> String {
        let layer = self.common.name();
        let further = name.filter(|name| self.common.name != Some(name));
        let class = part.and_then(|part| part.class);
        let parts = [Some(layer), further, unit, class].into_iter().flatten();
        parts.collect::<Vec<&str>>().join(" ")
    }

    /// Makes the settings of the limits of one unit.
    fn settings(
        &self,
        quota: Quota,
        quotas: &Arc<Quotas>,
        part: Option<PartOfQuota>,
        name: Option<&'static str>,
        shared_store: &Arc<dyn Store>,
    ) -> Result<Settings, ConfigError> {
        let common = &self.common;
        let settles = common.extractors.policy.settles();
        let deciding: Arc<dyn Store> = match self.learn {
            HeaderTrust::Ignore => Arc::new(UnlearningStore::new(shared_store.clone())),
            _ => shared_store.clone(),
        };
        let falls_back = self.falls_back() && !quota.limits().is_empty();
        let fallback = falls_back.then(|| {
            let share = self.fallback_share.and_then(Share::new);
            Arc::new(FallbackStore::new(deciding.clone(), share, common.max_keys))
        });
        let store = match &fallback {
            Some(fallback) => fallback.clone() as Arc<dyn Store>,
            None => deciding,
        };
        Ok(Settings {
            spec: Arc::new(quotas.limits(quota, part.map_or(0, |part| part.index))?),
            quotas: quotas.clone(),
            is_further_unit: false,
            part,
            name,
            store,
            shared_store: shared_store.clone(),
            fallback,
            max_wait: common.max_wait,
            least_wait: quota.least_wait(self.slacks)?,
            max_queue: common.max_queue,
            max_keys: common.max_keys,
            in_flight_ttl: self.in_flight_ttl,
            max_hold: common.max_hold,
            learn: self.learn,
            on_scope: None,
            guard: None,
            reports_guard: false,
            on_store_error: self.on_store_error,
            settles,
            needs_cost: !settles && !self.charged_by_hand,
            waits_above_limit: self.wait_above_limit.unwrap_or(settles),
            counted_within: quotas.moved_within(&quota),
            tally: common.tally(&self.series(name, quota.unit(), part)),
        })
    }

    /// Checks that each unit of a quota can be charged.
    fn check_charged(&self, quota: &Quota) -> Result<(), ConfigError> {
        let Extractors { cost, policy, .. } = &self.common.extractors;
        let is_charged = cost.is_some() || policy.settles() || self.charged_by_hand;
        if let Some(unit) = units_of(quota).next() {
            ConfigError::unless(
                is_charged,
                "cost",
                format_args!("not set, and the quota counts {unit}, which nothing charges"),
                "set, such as .cost(|request| Cost::of(\"tokens\", 500)); for LLM APIs, use build_llm \
                 instead; if requests have a Cost in their extensions, call .charged_by_hand()",
            )?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.common.check()?;
        let transit = self.slacks.transit;
        at_most("transit_slack", transit, LONGEST_SLACK, "at most 60 s")?;
        at_most("counted_within", self.late.within, HOUR, "at most an hour")?;
        ConfigError::unless(
            (SHORTEST_IN_FLIGHT_TTL..=HOUR).contains(&self.in_flight_ttl),
            "in_flight_ttl",
            format_args!("{:?}", self.in_flight_ttl),
            "from 300 ms to an hour",
        )?;
        ConfigError::unless(
            self.slacks.rate_loss <= Slacks::LARGEST_RATE_LOSS,
            "max_rate_loss",
            self.slacks.rate_loss,
            "at most 50",
        )?;
        if let Some(class) = self.lends_unknown {
            let class = format!("{class:?}");
            let allowed = "a class with a share: call share first";
            return Err(ConfigError::out_of_range("lends", class, allowed));
        }
        for ClassShare { class, lends, .. } in &self.shares {
            check_name("share", class)?;
            // Before Rust 1.89, a `format_args!` lives no longer than its statement.
            let value = format!("{lends} % for {class:?}");
            ConfigError::unless(*lends <= 100, "lends", value, "at most 100 per cent")?;
        }
        self.check_fallback()?;
        ConfigError::unless(
            self.common.extractors.class.is_none() || !self.shares.is_empty(),
            "class",
            "set without shares",
            "left out, or go with a share for each class: .share(\"web\", 50)",
        )?;
        ConfigError::unless(
            self.further.len() < MOST_PARTS,
            "and_per",
            format_args!("{} limits besides the first", self.further.len()),
            "at most seven",
        )?;
        ConfigError::unless(
            self.instead.len() <= 1,
            "routes",
            "two tables of Routes::instead",
            "at most one of them; put all these routes into one table",
        )?;
        let mut taken = Vec::from_iter(self.common.name);
        for Further { name, routes, .. } in &self.further {
            let setting = match routes {
                Some(_) => "routes",
                None => "and_per",
            };
            check_name(setting, name)?;
            ConfigError::unless(
                !taken.contains(name),
                setting,
                format_args!("{name:?}"),
                "a name that no other limit of the layer has",
            )?;
            taken.push(name);
        }
        Ok(())
    }

    /// Returns whether the process goes on with a share of the limit if the store fails.
    fn falls_back(&self) -> bool {
        self.on_store_error == OnStoreError::FallbackShare
    }

    /// Checks the share of the limits during an outage of the store.
    fn check_fallback(&self) -> Result<(), ConfigError> {
        let further = self.further.iter().map(|limit| &limit.quota);
        let mut quotas = std::iter::once(&self.quota).chain(further);
        ConfigError::unless(
            !self.falls_back() || quotas.any(|quota| !quota.limits().is_empty()),
            "on_store_error",
            "FallbackShare",
            "FailClosed or FailOpen if only calls in flight are limited: they have no shares",
        )?;
        let Some(share) = self.fallback_share else {
            return Ok(());
        };
        ConfigError::unless(
            self.falls_back(),
            "fallback_share",
            format_args!("{share:?}"),
            "left out, or go with on_store_error(OnStoreError::FallbackShare)",
        )?;
        ConfigError::unless(
            Share::new(share).is_some(),
            "fallback_share",
            format_args!("{share:?}"),
            "above 0 and at most 1, such as 1.0 / 8.0 for eight processes",
        )
    }
}

impl fmt::Debug for RateLimitBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RateLimitBuilder");
        shown.field("quota", &self.quota);
        self.common.debug(&mut shown);
        shown.finish_non_exhaustive()
    }
}
