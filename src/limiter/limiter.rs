//! The public face of the limiter.
//!
//! [`Limiter`] stands near the end of the table in `limiter/mod.rs`: of this folder, only `guarding`
//! imports it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::acquire::Acquire;
use super::admitted::Admitted;
use super::at_once;
use super::cores::Cores;
use super::counting;
use super::engine::{Core, CoreId};
use super::explanation::Explanation;
use super::holds;
use super::own_quota::{self, QuotaError};
use super::part::{Entry, PartRef};
use super::quotas::QuotaId;
use super::settings::Settings;
use super::status::{self, KeyStatus};
use crate::clock::{self, Moment};
use crate::config_error::ConfigError;
use crate::cost::RequestCost;
use crate::error::{LimitName, Limited, Reason, StoreError};
use crate::events;
use crate::key::{HostKey, Key, Label, RequestInfo, RequestRef};
use crate::quota::Quota;
use crate::refused::RefusedRequest;
use crate::stats::{Drained, Engine, KeyStats, Stats, drain_gates};
use crate::store::Refusal;

/// A rate limiter without HTTP: for job workers, gRPC, or anything else. Clones share one count.
///
/// [`RateLimitLayer::limiter`](crate::RateLimitLayer::limiter) returns it. There is no other
/// constructor: the settings are those of the layer.
///
/// ```
/// use tollgate::{Key, Quota, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
///
/// let sent = limiter.acquire(Key::new("customer 17")).await?.begin()?;
/// // ... send the request ...
/// drop(sent); // ends the call
///
/// assert_eq!(limiter.peek(Key::new("customer 17")).await?.limits[0].used, 1);
/// # Ok(())
/// # }
/// ```
///
/// # Two limits with different keys
///
/// A server may allow one message per second to each channel, and 30 per minute in all. To acquire
/// one permit of both limits, or of none, join the futures of two limiters with
/// [`Acquire::and`]:
///
/// ```
/// use tollgate::{Key, Quota, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let all = RateLimitLayer::new(Quota::per_minute(30))?.limiter();
/// let channels = RateLimitLayer::new(Quota::per_second(1))?.limiter();
///
/// # let start = tokio::time::Instant::now();
/// # for _ in 0..2 {
/// let both = all.acquire(Key::ALL).and(channels.acquire(Key::new("general")));
/// let sent = both.await?.begin()?;
/// // ... send the request ...
/// drop(sent);
/// # }
/// # assert!(start.elapsed() > std::time::Duration::from_secs(1));
/// # assert_eq!(all.peek(Key::ALL).await?.limits[0].used, 2);
/// # Ok(())
/// # }
/// ```
///
/// Do not acquire two permits one after the other. A permit is valid for 10 to 50 ms, so the first
/// one can expire during the wait for the second.
#[derive(Clone)]
#[doc(alias = "throttle")]
pub struct Limiter(pub(super) Cores, Option<Classes>);

/// The limiters of the classes that have a share of the quota.
type Classes = Arc<[(&'static str, Limiter)]>;

impl Limiter {
    /// Acquires a permit for one request of `key`, at once or after a wait of at most
    /// [`max_wait`](crate::RateLimitBuilder::max_wait).
    ///
    /// [`Acquire`] has setters for the cost of the request (1 by default) and its deadline (none by
    /// default). The request enters the queue when the future is first polled.
    ///
    /// # Errors
    ///
    /// - [`Limited::Local`] if the slot, or the end of the key's hold, is later than `max_wait` or
    ///   the deadline allows. Also if the queue is full, if the cost is above the limit, or if
    ///   `max_keys` keys are in use. Its [`Reason`] states which.
    /// - [`Limited::Store`] if the store failed, unless
    ///   [`on_store_error`](crate::RateLimitBuilder::on_store_error) says otherwise.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. This frees the request's place in the queue, and its
    /// slot goes to the next waiter.
    ///
    /// # Panics
    ///
    /// If the request has to wait and the future is polled outside of a Tokio runtime with timers.
    pub fn acquire(&self, key: Key) -> Acquire {
        Acquire::new(&self.0, key)
    }

    /// Reads the state of `key`: its limits, what is used and free of them, its hold, and how many
    /// requests wait. Takes no permit and changes nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store could not be asked.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn peek(&self, key: Key) -> Result<KeyStatus, StoreError> {
        status::read(&self.0, key).await
    }

    /// Explains what would happen to a request of `key` that enters now: whether it would leave at
    /// once, wait or be refused, for how long, and why. Takes no permit and changes nothing.
    ///
    /// The request costs 1, and may wait for
    /// [`max_wait`](crate::RateLimitBuilder::max_wait). For another cost, for a deadline, or for
    /// several keys, build it with [`acquire`](Limiter::acquire) and call
    /// [`Acquire::explain`](crate::limiter::Acquire::explain). The `Display` of the
    /// [`Explanation`](crate::limiter::Explanation) is a text for a person.
    ///
    /// ```
    /// use tollgate::limiter::{Because, Verdict};
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::per_second(1))?.limiter();
    /// drop(limiter.acquire(Key::ALL).await?);
    ///
    /// let explanation = limiter.explain(Key::ALL).await?;
    /// println!("{explanation}");
    /// if let Verdict::Waits { wait: Some(wait), because: Because::Limit(limit), .. } = explanation.verdict {
    ///     println!("{limit} is used up for {wait:?}");
    /// }
    /// # assert!(matches!(explanation.verdict, Verdict::Waits { .. }));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// What other processes do meanwhile is not known, nor what requests will cost less than their
    /// estimate. A request of several keys waits for a moment that all of them allow, which may be
    /// later than stated. As with [`peek`](Limiter::peek), a hold of one host among requests without a
    /// key is under [`Key::host_hold`].
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the request would fail with it.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn explain(&self, key: Key) -> Result<Explanation, StoreError> {
        self.acquire(key).explain().await
    }

    /// Returns what this limiter has done, and its state now. Calls no store, and visits the state of
    /// each key.
    ///
    /// The counts are those of this process. A request of [several
    /// limits](crate::guide::several_limits) counts at the limiter of the first one. If the quota
    /// [counts](crate::Quota::of) several units, these are the stats of the first of them, and
    /// [`stats::all`](crate::stats::all) has those of the others.
    pub fn stats(&self) -> Stats {
        self.0.first.stats()
    }

    /// Returns the stats of up to `most` keys: those with the most requests that wait, then those with
    /// the most units since their state was made. At most 1000 are returned.
    pub fn busiest(&self, most: usize) -> Vec<KeyStats> {
        let most = most.min(1000);
        let parts = self.0.first.all_parts(Key::ALL);
        let mut all: Vec<KeyStats> = parts
            .flat_map(|(core, _)| core.busiest_stats(most))
            .collect();
        if self.is_divided() {
            all.sort_by_key(|stats| std::cmp::Reverse((stats.waiting, stats.units())));
            all.truncate(most);
        }
        all
    }

    /// Returns what tells the limiter from others of this process.
    pub(crate) fn id(&self) -> CoreId {
        self.0.first.id
    }

    /// Counts a request that is sent for the `attempt`th time, and reports it if that is due.
    pub(crate) fn sent_again(&self, attempt: u32, is_reported: bool, label: &dyn Fn() -> Label) {
        let tally = &self.0.first.settings.tally;
        tally.count_sent_again();
        if is_reported {
            events::sent_again(tally, &label(), attempt);
        }
    }

    /// Names `key` in [`KeyStats`], for requests that come without a layer. At most 64 bytes of `name`
    /// are kept, and control characters become `?`. The name is forgotten with the state of the key,
    /// when the key is idle and its place is needed.
    pub fn name_key(&self, key: Key, name: &str) {
        counting::name_key(&self.0.first, self.0.first.key_of(key), name);
    }

    /// Puts `key` on hold for `span`, at most 366 days: no process that shares the store sends a
    /// request of this key.
    ///
    /// The limiter does the same when the upstream responds with 429. A later hold can extend this
    /// one, but not shorten it. [`release`](Limiter::release) ends it. Requests that cannot wait
    /// until the end of the hold are refused at once, with [`Reason::Held`].
    /// [`max_hold`](crate::RateLimitBuilder::max_hold) limits only holds that responses cause.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
    /// limiter.hold_for(Key::ALL, Duration::from_secs(60)).await?;
    /// let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    /// assert!(refused.retry_after() > Some(Duration::from_secs(59)));
    ///
    /// limiter.release(Key::ALL).await?;
    /// assert!(limiter.acquire(Key::ALL).await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of the hold. It applies in this process.
    ///
    /// # Cancel safety
    ///
    /// The hold applies in this process once the future was polled.
    pub async fn hold_for(&self, key: Key, span: Duration) -> Result<(), StoreError> {
        let hold = async |core: Arc<Core>, key| holds::hold_for(&core, key, span).await;
        self.0.for_each(key, hold).await
    }

    /// Ends [all that responses did](crate::guide::guarantees#a-server-that-lies) to `key`, and holds by
    /// hand, for all processes that share the store: the hold and its probation, the stop of a guard, limits that
    /// the upstream has stated, and what is [reserved for other clients](crate::guide::learning). A quota that
    /// was [set](Limiter::set_quota) stays. For a minute, no limits are learned.
    ///
    /// The holds of [kinds](crate::guide::refusals#one-kind-of-requests) end that this process knows. Other processes forget
    /// which kinds were refused, and let them pass. When the upstream refuses a request of the key again, a hold that only they
    /// knew stops its kind until it ends.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if some of that may not have ended, here or in other processes. Releasing the key again ends the rest.
    ///
    /// # Cancel safety
    ///
    /// The hold ends in this process when the future is ready. If the future is dropped before, the
    /// other processes may have ended the hold.
    pub async fn release(&self, key: Key) -> Result<(), StoreError> {
        let release = async |core: Arc<Core>, key| holds::release(&core, key).await;
        self.0.for_each(key, release).await
    }

    /// Sets the quota of `key`, for all processes that share the store, as an upgrade of a tenant needs
    /// it. It applies in place of the quotas of layers and requests, and of limits that the upstream has
    /// stated. It is kept for 30 days after its last use: [`set_quota_for`](Limiter::set_quota_for) sets
    /// another time.
    ///
    /// Units that were used stay used. All other processes get a message. One that misses it learns of the
    /// quota with its next call to the store, and uses slots that it has booked before for at most 15 s. A
    /// restart of the store or of processes changes nothing. If the store loses its state, the next process
    /// that uses the key restores the quota.
    ///
    /// The quota has the same units as that of the builder, and limits calls in flight only if that does.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tenants = RateLimitLayer::new(Quota::per_minute(60))?.limiter();
    /// let tenant = Key::new("tenant 17");
    /// tenants.set_quota(tenant, Quota::per_minute(600)).await?;
    /// assert_eq!(tenants.peek(tenant).await?.free, 600);
    ///
    /// tenants.unset_quota(tenant).await?;
    /// # assert_eq!(tenants.peek(tenant).await?.free, 60);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`QuotaError::Config`] if the quota is out of range or of another kind.
    /// [`QuotaError::Store`] if other processes may not know of it. This process has the old quota then.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the quota may have been set or not.
    pub async fn set_quota(&self, key: Key, quota: Quota) -> Result<(), QuotaError> {
        self.set_quota_for(key, quota, Limiter::QUOTA_LIFE).await
    }

    /// Sets the quota of `key`, as [`set_quota`](Limiter::set_quota) does. It is kept for `life` after its
    /// last use, at most 366 days.
    ///
    /// A key with a set quota stays in the store for that time, in about 500 bytes.
    ///
    /// # Errors
    ///
    /// Those of [`set_quota`](Limiter::set_quota).
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the quota may have been set or not.
    pub async fn set_quota_for(
        &self,
        key: Key,
        quota: Quota,
        life: Duration,
    ) -> Result<(), QuotaError> {
        own_quota::set(&self.0, key, quota, life).await
    }

    /// Ends the quota that was set for `key`, or that was [learned](crate::guide::learning), for all
    /// processes that share the store. The quotas of layers and requests apply again at once, and the
    /// limits of the set quota besides them for two of their windows and up to a second.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if other processes may not know of it. In this process the quota has not ended then.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the quota may have ended or not.
    pub async fn unset_quota(&self, key: Key) -> Result<(), StoreError> {
        own_quota::unset(&self.0, key, Limiter::QUOTA_LIFE).await
    }

    /// For how long after its last use a set quota is kept by default.
    const QUOTA_LIFE: Duration = Duration::from_secs(30 * 86_400);

    /// Gives back the permits that this process has
    /// [prefetched](crate::guide::many_processes#what-a-lease-is), and waits until the store has
    /// received all permits that were given back.
    ///
    /// Call it at the end of a program if other processes share its store. Without it, the other
    /// processes cannot use these permits until the permits expire, at most a window later. The
    /// limiter can be used again afterwards.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store may not have received all of them.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. The store still receives the permits that were sent
    /// to it.
    pub async fn shutdown(&self) -> Result<(), StoreError> {
        let shutdown = async |core: Arc<Core>, _| core.shutdown().await;
        self.0.for_each(Key::ALL, shutdown).await
    }
}

/// The end of the process.
impl Limiter {
    /// Ends the use of this limiter, for the shutdown of a process: lets the requests leave that wait
    /// and whose slots come `within` this time, and refuses all others.
    ///
    /// From the first poll on:
    ///
    /// - A request that enters is refused with [`Reason::Draining`].
    /// - A request that waits keeps its place. If its slot comes later than `within`, it is refused as
    ///   soon as that is known. With `Duration::ZERO`, all are refused at once.
    /// - The permits at hand go back to the store, and none are prefetched. Other processes can use
    ///   them at once.
    /// - Calls in flight are waited for, also `within` this time, if the limiter limits their number.
    ///
    /// This is for good, and for the layer and all clones of the limiter. To give back what is at hand
    /// and go on, call [`shutdown`](Limiter::shutdown). If it is called twice, both calls wait, and the
    /// earlier end counts. [`tollgate::drain_all`](crate::drain_all) drains all limiters and throttles of the
    /// process.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Key, Quota, RateLimitLayer, Reason};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
    /// // At SIGTERM, after the server accepts no more connections, and before it is awaited:
    /// let drained = limiter.drain(Duration::from_secs(20)).await?;
    /// println!("{drained}"); // 14 left in time, 3 refused, 120 permits given back in 2.1s
    ///
    /// let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    /// assert_eq!(refused.reason(), Some(Reason::Draining));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the store may not have received what was given back. It expires by itself. The
    /// limiter is drained all the same.
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time. The limiter stays drained.
    ///
    /// # Panics
    ///
    /// If requests wait and the future is polled outside of a Tokio runtime with timers.
    pub async fn drain(&self, within: Duration) -> Result<Drained, StoreError> {
        let all = self.0.everywhere(Key::ALL);
        let gates = all.map(|(core, _)| core as Arc<dyn Engine>);
        drain_gates(gates.collect(), within).await
    }
}

/// What the layers use.
impl Limiter {
    /// Makes a limiter with the settings for each unit that its quota counts, at least one.
    pub(crate) fn new(first: Settings, others: impl IntoIterator<Item = Settings>) -> Self {
        let others = others.into_iter().map(Core::new).collect();
        Limiter(Cores::new(Core::new(first), others), None)
    }

    /// Makes a limiter whose quota is divided: `rest` is that of the requests of no class.
    pub(crate) fn divided(rest: Limiter, classes: Vec<(&'static str, Limiter)>) -> Self {
        for (unit, core) in rest.0.all().enumerate() {
            let mut parts = vec![core.clone()];
            for (_, limiter) in &classes {
                parts.extend(limiter.0.all().nth(unit).cloned());
            }
            for part in &parts {
                part.note_parts(&parts);
            }
        }
        Limiter(rest.0, Some(classes.into()))
    }

    /// Returns whether the quota is divided among classes.
    #[inline]
    pub(crate) fn is_divided(&self) -> bool {
        self.1.is_some()
    }

    /// Returns the limiter of a class, or of the rest if the class has no share.
    #[inline]
    pub(crate) fn of_class(&self, class: Option<&str>) -> &Limiter {
        match (&self.1, class) {
            (Some(classes), Some(class)) => match classes.iter().find(|(name, _)| *name == class) {
                Some((_, limiter)) => limiter,
                None => {
                    self.unknown_class(class);
                    self
                }
            },
            _ => self,
        }
    }

    /// Notes a class that has no share, and reports it once.
    pub(crate) fn unknown_class(&self, class: &str) {
        counting::unknown_class(&self.0.first, class);
    }

    /// Notes whether a request of a layer without a class function has a class. Reports it once if none
    /// has.
    #[inline]
    pub(crate) fn note_class(&self, has_class: bool) {
        counting::note_class(&self.0.first, has_class);
    }

    /// Returns the key under which requests with `key` are counted here, if only requests are counted.
    #[inline]
    pub(crate) fn key_of(&self, key: Key) -> Key {
        self.0.first.part_of(key)
    }

    /// Returns whether the quota counts other units than requests. Then each request is a joint one.
    #[inline]
    pub(crate) fn counts_units(&self) -> bool {
        self.0.count_units()
    }

    /// Returns how many keys a request has: one for each unit.
    pub(crate) fn units(&self) -> usize {
        self.0.all().count()
    }

    /// Returns whether one of the limits counts `unit`.
    pub(crate) fn counts(&self, unit: &str) -> bool {
        self.0.count(unit)
    }

    /// Compares the units of `cost` with those that are counted: see [`Cores::check_units`].
    pub(crate) fn check_units(
        &self,
        cost: &RequestCost,
        is_unknown: impl Fn(&str) -> bool,
    ) -> Option<Reason> {
        self.0.check_units(cost, is_unknown)
    }

    /// Returns the key of the host of a request, if the host matters: see [`Entry::host`]. `key` is
    /// the key of the request.
    #[inline]
    pub(crate) fn host_of(
        &self,
        key: Key,
        host: &mut HostKey<'_, impl RequestInfo>,
    ) -> Option<Key> {
        if key == Key::ALL {
            host.get_by(|request| self.0.first.hosts.key_of(request))
        } else {
            host.get_if_redirected()
        }
    }

    /// Notes the host of a request that has `key` and keys of other limiters.
    #[inline]
    pub(crate) fn note_host(&self, key: Key, host: Option<Key>) {
        self.0
            .all()
            .for_each(|core| core.note_host(core.key_of(key), host));
    }

    /// Takes a permit at hand for a request that the caller sends at once. Returns the time, or `None` if
    /// there is no permit at hand.
    #[inline]
    pub(crate) fn send_at_once(&self, entry: &Entry) -> Option<Moment> {
        at_once::send_at_once(&self.0.first, entry)
    }

    /// The same for a request under [`Key::ALL`] that costs 1 and has no quota of its own, without a visit of the
    /// state of the key.
    #[inline]
    pub(crate) fn send_one_unlocked(&self, entry: &Entry) -> Option<Moment> {
        at_once::send_one_unlocked(&self.0.first, entry)
    }

    /// Returns the name of `key`, which came with `request`, for errors and events.
    pub(crate) fn label(&self, key: Key, request: Option<&RequestRef<'_>>) -> Label {
        self.0.first.label(key, request)
    }

    /// Returns the part of a request that this limiter counts, if it counts only requests. `host` is the key of its host,
    /// if the host matters.
    #[inline]
    pub(crate) fn part(
        &self,
        key: Key,
        cost: u32,
        quota: QuotaId,
        host: Option<Key>,
    ) -> PartRef<'_> {
        let entry = Entry {
            host,
            quota,
            ..Entry::new(self.key_of(key), cost)
        };
        PartRef::new(&self.0.first, entry)
    }

    /// Returns the parts of a request that this limiter counts, one for each unit.
    pub(crate) fn parts<'a>(
        &'a self,
        key: Key,
        cost: &RequestCost,
        quota: QuotaId,
        host: Option<Key>,
    ) -> impl Iterator<Item = PartRef<'a>> {
        self.0.all().map(move |core| {
            let entry = Entry {
                host,
                quota,
                ..Entry::new(core.key_of(key), cost.under(core.unit()))
            };
            PartRef::new(core, entry)
        })
    }

    /// Returns the name of the limit, if it has one.
    pub(crate) fn name(&self) -> Option<&'static str> {
        self.0.first.settings.name
    }

    /// Makes the value for the request of `entry`, which got its permit `at` this moment.
    #[inline]
    pub(crate) fn admitted(&self, entry: &Entry, at: Moment) -> Admitted {
        Admitted::new(self.0.first.id, entry, at)
    }

    /// Returns the number of a quota that a request states for its key.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the key cannot have this quota.
    pub(crate) fn quota_id(&self, quota: &Quota) -> Result<QuotaId, ConfigError> {
        self.0.first.settings.quotas.id(quota)
    }

    /// Returns a number for the quota of a route, whose `pattern` stands in errors.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the keys of this limiter cannot have this quota.
    pub(crate) fn quota_id_of_route(
        &self,
        quota: &Quota,
        pattern: &str,
    ) -> Result<QuotaId, ConfigError> {
        self.0.first.settings.quotas.id_of_route(quota, pattern)
    }

    /// Returns the error of a request that states no key of this limit, or no valid quota. The request
    /// counts at the limiter `first`.
    #[cold]
    pub(crate) fn unreadable(&self, reason: Reason, first: &Limiter) -> Limited {
        let now = clock::now();
        let limit = LimitName {
            name: self.name(),
            route: None,
            unit: self.0.first.unit(),
            class: None,
        };
        let request = RefusedRequest::new("none".into(), limit);
        let limited = request.refuse(reason, Refusal::NEVER, now);
        first.0.first.refused(None, &limited);
        limited
    }

    /// Returns whether `key` has no name that the user has given.
    pub(crate) fn is_unnamed(&self, key: Key) -> bool {
        let core = &self.0.first;
        core.is_unnamed(core.key_of(key))
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.first.fmt(f)
    }
}
