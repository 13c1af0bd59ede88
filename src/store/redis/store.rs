//! The store in Redis, as a limiter calls it: it packs each call, and reads the reply.

use std::future::Future;
use std::sync::{Arc, Mutex, Weak};

use redis::RedisError;
use redis::aio::ConnectionLike;
use tokio::task::JoinSet;

use super::backend::TO_ALL;
use super::builder::RedisStoreBuilder;
use super::client::Client;
use super::codec::{self, MOST_RETURNS};
use super::endpoint::{self, Connecting};
use super::script::Argument;
use super::stats::{CallKind, StoreStats};
use super::worker::WorkerOrder;
use super::{connection, registers, sealed_key};
use crate::config_error::ConfigError;
use crate::key::{Key, Label};
use crate::locks::lock;
use crate::rng::dice;
use crate::store::event::notify;
use crate::store::{
    Background, Change, Claim, Demand, InForce, Lease, LeaseRequest, LimitSpec, PeekRequest,
    Register, RegisterRequest, Store, StoreError, StoreEvent, StoreListener, StoreReply, Task,
    UnusedPermits, Usage,
};

/// Counts permits in Redis, for many processes.
///
/// The page [many processes](crate::guide::many_processes) describes what is shared, what Redis
/// must be, and what happens when Redis is unreachable.
///
/// ```no_run
/// use std::sync::Arc;
/// use tollgate::{Key, Quota, RateLimitLayer, store::RedisStore};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Arc::new(RedisStore::new("redis://127.0.0.1:6379/")?);
/// let limit = RateLimitLayer::builder(Quota::per_second(50))
///     .key(|_| Key::new("api.example.com"))
///     .store(store)
///     .build()?;
/// # Ok(())
/// # }
/// ```
///
/// It sends calls to Redis on one connection and listens on another, both from a thread of its own.
/// So it serves callers of any runtime, and permits that are dropped with a runtime are still given
/// back. When the store is dropped, the thread sends the permits that were given back and ends. At
/// the end of a program, [`Limiter::shutdown`](crate::Limiter::shutdown) waits for that.
pub struct RedisStore {
    pub(super) prefix: String,
    pub(super) client: Arc<Client>,
    /// The tasks of limiters, which end with the store.
    pub(super) tasks: Mutex<JoinSet<()>>,
}

impl RedisStore {
    /// Makes a store at `url`, such as `redis://127.0.0.1:6379/`, with the default settings.
    ///
    /// Nothing is connected yet: see [`connect`](RedisStore::connect).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the URL is invalid.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        RedisStore::builder(url).build()
    }

    /// Returns a builder of a store at `url`, to change the defaults.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::store::RedisStore;
    ///
    /// let store = RedisStore::builder("redis://127.0.0.1:6379/")
    ///     .prefix("billing")
    ///     .secret("only we know")
    ///     .store_timeout(Duration::from_millis(100))
    ///     .build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn builder(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder::of(endpoint::server(url))
    }

    /// Returns a builder of a store in a cluster that the servers at `urls` belong to. Name several
    /// servers, so that one may be down.
    ///
    /// Each limit of a key is one key of the cluster, so limits spread over its servers. The store
    /// has a connection to each server that it needs, so a server that hangs or is down fails its
    /// own keys only. A call that may have been executed is never repeated. If a server replies
    /// that another one has the key, the call is sent to that one, once.
    ///
    /// All URLs need the same scheme, user, password and database.
    ///
    /// ```
    /// use tollgate::store::RedisStore;
    ///
    /// let nodes = ["redis://10.0.0.1:6379/", "redis://10.0.0.2:6379/", "redis://10.0.0.3:6379/"];
    /// let store = RedisStore::cluster(nodes).build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    pub fn cluster<S: AsRef<str>>(urls: impl IntoIterator<Item = S>) -> RedisStoreBuilder {
        RedisStoreBuilder::of(endpoint::cluster(urls))
    }

    /// Returns a builder of a store on a master that Sentinels watch. For each new connection, the
    /// store requests the master's address from them. So a failover needs no restart.
    ///
    /// `sentinels` are the URLs of some Sentinels, with their own credentials if they need any.
    /// `master` is a URL of the master. Its host is the name by which the Sentinels know the
    /// master. Its user, password, database and `rediss://` are for the master.
    ///
    /// ```
    /// use tollgate::store::RedisStore;
    ///
    /// let sentinels = ["redis://10.0.0.1:26379/", "redis://10.0.0.2:26379/", "redis://10.0.0.3:26379/"];
    /// let store = RedisStore::sentinel(sentinels, "redis://user:password@mymaster/").build()?;
    /// # Ok::<(), tollgate::ConfigError>(())
    /// ```
    #[cfg(feature = "redis-sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-sentinel")))]
    pub fn sentinel<S: AsRef<str>>(
        sentinels: impl IntoIterator<Item = S>,
        master: &str,
    ) -> RedisStoreBuilder {
        RedisStoreBuilder::of(endpoint::sentinel(sentinels, master))
    }

    /// Returns a builder of a store over a connection of your own: a `ConnectionManager`, a
    /// `ClusterConnection`, or anything else that is `ConnectionLike`.
    ///
    /// When the connection breaks, the store tries it again from time to time. So pass one that
    /// reconnects by itself, or a [factory](RedisStore::with_factory).
    ///
    /// The store publishes holds and paces to the stores of the database that the connection names
    /// ([`get_db`](ConnectionLike::get_db)), and listens to none: requests that wait for the end of a hold wait for all of
    /// it, even if another process releases the key.
    pub fn with_connection<C>(connection: C) -> RedisStoreBuilder
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        RedisStore::with_factory(move || std::future::ready(Ok(connection.clone())))
    }

    /// Returns a builder of a store over connections that `factory` makes: one when the store first
    /// needs it, and another whenever that breaks. Use it for Sentinel, for credentials that
    /// change, or for settings that a URL cannot express.
    ///
    /// The factory runs on the store's own thread, in a Tokio runtime. The store publishes to the
    /// stores of the database that the connection names ([`get_db`](ConnectionLike::get_db)), and
    /// listens to none.
    ///
    /// ```
    /// use tollgate::store::RedisStore;
    ///
    /// let client = redis::Client::open("redis://127.0.0.1:6379/")?;
    /// let store = RedisStore::with_factory(move || {
    ///     let client = client.clone();
    ///     async move { client.get_multiplexed_async_connection().await }
    /// })
    /// .build()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_factory<F, Fut, C>(factory: F) -> RedisStoreBuilder
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<C, RedisError>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let factory = Arc::new(move || {
            let making = factory();
            Box::pin(async move { Ok(connection::connection(making.await?)) }) as _
        });
        RedisStoreBuilder::of(Ok(Connecting::Server {
            factory,
            find_server: None,
        }))
    }

    /// Waits until Redis replies, for programs that should not start without it.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis does not reply within `store_timeout`.
    pub async fn connect(&self) -> Result<(), StoreError> {
        self.client.ping().await
    }

    /// Returns what this store has done: its calls to Redis by kind and result, how long they took, and
    /// whether it reaches Redis now. Calls nothing.
    pub fn stats(&self) -> StoreStats {
        let backend = &self.client.backend;
        backend.links.tally.stats(backend.is_up())
    }

    /// Returns the name of `key` in Redis. It is a digest, so no text of a user gets into Redis.
    pub(super) fn name(&self, key: Key) -> String {
        let digest = match self.client.secret {
            Some(secret) => key.sealed(secret),
            None => key,
        };
        format!("{}:{{{}}}", self.prefix, digest.hex())
    }

    /// Returns the name of the in-flight slots of `key`, which has the same cluster slot.
    fn in_flight_name(&self, key: Key) -> String {
        format!("{}:seats", self.name(key))
    }
}

impl Store for RedisStore {
    fn lease(&self, mut request: LeaseRequest<'_>) -> StoreReply<Lease> {
        // One call takes back a limited number of permits. The others follow in calls of their own.
        let (others, returns) = request
            .returns
            .split_at(request.returns.len().saturating_sub(MOST_RETURNS));
        request.returns = returns;
        if !others.is_empty() {
            self.give_back(request.key, request.spec, others);
        }
        let (key, call) = (self.name(request.key), codec::lease(&request, dice()));
        let is_urgent = request.remaining.is_some_and(|left| left.urgent);
        let is_of_one = matches!(request.demands, [Demand { count: 1, .. }]);
        if let Some(joint) = request.joint.filter(|_| is_of_one && !is_urgent) {
            return StoreReply::Pending(self.client.call_jointly(
                joint,
                key,
                call,
                codec::read_lease,
            ));
        }
        let mut call = vec![Argument::Is(call)];
        // If the state was lost, the call may set the quota anew.
        if is_urgent || request.spec.quota_version() > 0 {
            let token = sealed_key::of(request.key, self.client.secret, dice());
            call.extend([Argument::Channel(TO_ALL.into()), Argument::Is(token)]);
        }
        StoreReply::Pending(
            self.client
                .call(CallKind::Permits, key, call, codec::read_lease),
        )
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        self.client.give_back(self.name(key), spec, unused);
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        let (key, spec) = (request.key, &request.spec);
        let call = vec![Argument::Is(codec::peek(&request, dice()))];
        let rates = self
            .client
            .call(CallKind::Permits, self.name(key), call, codec::read_peek);
        let Some(most) = spec.quota().most_in_flight() else {
            return StoreReply::Pending(rates);
        };
        let call = vec![Argument::Is(codec::peek_in_flight(most, dice()))];
        let slots = self.client.call(
            CallKind::InFlight,
            self.in_flight_name(request.in_flight_key),
            call,
            codec::read_peek_in_flight,
        );
        StoreReply::Pending(Box::pin(async move {
            let rates = rates.await?;
            let (used, free) = slots.await?;
            Ok(rates.in_flight(most, used, free))
        }))
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        if let Err(unsupported) = change.check(spec) {
            return StoreReply::Ready(Err(unsupported));
        }
        let call = codec::change(spec, change, dice());
        let token = sealed_key::of(key, self.client.secret, dice());
        let reply = self.client.announce(self.name(key), call, token);
        StoreReply::Pending(Box::pin(async move {
            let lease = codec::read_lease(&reply.await?);
            let Lease {
                hold, set_quota, ..
            } = lease.map_err(StoreError::failed)?;
            Ok(InForce::new(hold, set_quota.map(|quota| *quota)))
        }))
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        self.client.listeners.add(listener);
    }

    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        let (kind, name) = (
            change.kind,
            format!("{}:register:{}", self.name(change.key), change.kind),
        );
        let call = registers::call(&change, self.client.secret);
        StoreReply::Pending(
            self.client
                .call(CallKind::Register, name, call, move |reply| {
                    registers::read(reply, kind)
                }),
        )
    }

    fn address(&self) -> u64 {
        self.client.instance
    }

    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        let name = self.in_flight_name(claim.key);
        let order = WorkerOrder::Claim {
            name,
            claim,
            listener: listener.clone(),
        };
        if let Err(error) = self.client.order(CallKind::InFlight, order) {
            let failed = StoreEvent::Failed(error);
            notify(listener.clone(), claim.key, claim.holder, failed);
        }
    }

    /// Returns the first eight digits of the key's name in Redis if there is a secret. Otherwise
    /// returns the label that the key has in this process.
    fn label(&self, key: Key) -> Label {
        self.client
            .secret
            .map_or_else(|| key.process_label(), |secret| key.digits(secret))
    }

    fn background(&self) -> Option<&dyn Background> {
        Some(self)
    }

    fn flush(&self) -> StoreReply<()> {
        StoreReply::Pending(self.client.flush())
    }
}

impl Background for RedisStore {
    fn spawn(&self, task: Task) {
        // If the thread cannot be started, the task is dropped.
        if let Ok(runtime) = self.client.runtime() {
            let mut tasks = lock(&self.tasks);
            while tasks.try_join_next().is_some() {}
            tasks.spawn_on(task, runtime);
        }
    }
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.prefix)
            .field("store_timeout", &self.client.backend.links.store_timeout)
            .finish_non_exhaustive()
    }
}
