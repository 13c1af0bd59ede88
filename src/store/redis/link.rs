//! The link to one server. It makes a connection when one is first needed, and another one when the
//! connection breaks. While a broken connection is replaced, callers get an error at once.
//!
//! One connection serves all keys. Commands of the same moment are sent together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::{RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{timeout, timeout_at};

use super::connection::{Connection, Factory, ServerRequest};
use super::failure::{FailureKind, RedisFailure, of_server};
use super::stats::StoreTally;
use crate::clock;
use crate::error::{BoxError, StoreError};
use crate::events;
use crate::locks::lock;
use crate::rng::Backoff;

/// The longest time that making a connection may take. Name resolution and certificates take longer
/// than a call.
pub(super) const LONGEST_CONNECTING: Duration = Duration::from_secs(5);

/// A PING is sent after this time without a command. Some networks (NAT, a load balancer) forget
/// idle connections, usually after a minute or more. The PING keeps the connection in use. If the
/// network has forgotten it, the PING finds that out before a request does.
const QUIET: Duration = Duration::from_secs(30);

/// The state that all links of a store share.
#[derive(Clone)]
pub(super) struct Links {
    /// The longest time that one call may take.
    pub(super) store_timeout: Duration,
    /// The counts of the store.
    pub(super) tally: Arc<StoreTally>,
    /// Counts the connections that were made.
    made: watch::Sender<u64>,
    /// Notified when a link breaks.
    pub(super) broke: Arc<Notify>,
}

impl Links {
    pub(super) fn new(store_timeout: Duration, tally: Arc<StoreTally>) -> Self {
        Links {
            store_timeout,
            tally,
            made: watch::Sender::new(0),
            broke: Arc::default(),
        }
    }

    pub(super) fn connections(&self) -> Connections {
        Connections(self.made.subscribe())
    }

    /// Returns the deadline of an operation that begins now.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline_of(clock::now())
    }

    /// Returns the deadline of an operation that began at `start`.
    pub(super) fn deadline_of(&self, start: Instant) -> Instant {
        clock::after(start, self.store_timeout)
    }

    fn count(&self) -> u64 {
        self.tally.connected();
        self.made.send_modify(|made| *made += 1);
        *self.made.borrow()
    }
}

/// A subscription to new connections.
pub(super) struct Connections(watch::Receiver<u64>);

impl Connections {
    /// Completes when there is a new connection. The future may be dropped at any time.
    pub(super) async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// The link to one server.
pub(super) struct Link {
    links: Links,
    /// Host and port, which errors name. `None` if there is only one server.
    server: Option<Arc<str>>,
    factory: Factory,
    state: watch::Sender<LinkState>,
    /// Whether there has been a connection. Until then, none was lost.
    was_up: AtomicBool,
    /// When a command was last sent.
    used_at: Mutex<Instant>,
    /// Whether a call has succeeded on the present connection.
    has_worked: AtomicBool,
}

/// Whether there is a connection.
enum LinkState {
    /// The first attempt to connect is under way, or no caller needed a connection yet.
    New,
    /// The connection, and its number.
    Up(Connection, u64),
    /// Why there is no connection. Callers receive this error until an attempt to connect succeeds.
    Down(StoreError),
}

impl Link {
    pub(super) fn new(server: Option<String>, factory: Factory, links: Links) -> Self {
        let (state, _) = watch::channel(LinkState::New);
        Link {
            links,
            server: server.map(Arc::from),
            factory,
            state,
            was_up: AtomicBool::new(false),
            used_at: Mutex::new(clock::now()),
            has_worked: AtomicBool::new(false),
        }
    }

    /// Keeps a connection open while it is polled.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut backoff = Backoff::new();
        loop {
            match self.connect().await {
                Ok(connection) => {
                    self.has_worked.store(false, Ordering::Relaxed);
                    self.was_up.store(true, Ordering::Relaxed);
                    *lock(&self.used_at) = clock::now();
                    self.state
                        .send_replace(LinkState::Up(connection.clone(), self.links.count()));
                    events::store_connected(self.server.as_deref());
                    // The information about the server is optional, and some servers forbid `INFO`.
                    tokio::spawn(async move {
                        let info = timeout(
                            LONGEST_CONNECTING,
                            connection.send(redis::cmd("INFO").into()),
                        );
                        if let Ok(Ok(info)) = info.await {
                            warn_of_eviction(&info);
                        }
                    });
                    self.until_broken().await;
                    // A server that is read-only or still loads accepts connections, and answers each
                    // PING. Only a call that succeeds shows that the server is back.
                    if self.has_worked.load(Ordering::Relaxed) {
                        backoff = Backoff::new();
                    }
                }
                Err(error) => {
                    self.report(&error);
                    self.state.send_replace(LinkState::Down(error));
                    self.links.broke.notify_one();
                }
            }
            clock::sleep(backoff.pause()).await;
        }
    }

    /// Waits until the connection breaks, and sends a PING when the connection is idle.
    async fn until_broken(self: &Arc<Self>) {
        loop {
            tokio::select! {
                () = self.until_down() => return,
                () = clock::sleep_until(self.quiet_at()) => {}
            }
            if clock::now() >= self.quiet_at() {
                let _ = self.ping().await;
            }
        }
    }

    /// Sends a PING, which finds out whether the connection works. It is sent even if the handle is dropped.
    pub(super) fn ping(self: &Arc<Self>) -> JoinHandle<()> {
        let link = self.clone();
        tokio::spawn(async move {
            let _ = link
                .send(redis::cmd("PING").into(), link.links.deadline())
                .await;
        })
    }

    fn quiet_at(&self) -> Instant {
        clock::after(*lock(&self.used_at), QUIET)
    }

    async fn connect(self: &Arc<Self>) -> Result<Connection, StoreError> {
        let link = self.clone();
        // In a task of its own, so that a panic of a factory does not end `keep`.
        let mut connecting = JoinSet::new();
        connecting.spawn(async move {
            let connection = (link.factory)().await?;
            // A server that replies later than to a call is of no use yet: each caller would wait in vain. It is asked
            // again on the same connection. To make another one costs an overloaded server more.
            loop {
                let sent = clock::now();
                connection.send(redis::cmd("PING").into()).await?;
                if clock::now() <= link.links.deadline_of(sent) {
                    return Ok::<_, RedisError>(connection);
                }
            }
        });
        let soon = self.links.store_timeout.min(LONGEST_CONNECTING);
        let mut made = timeout(soon, connecting.join_next()).await;
        if made.is_err() {
            // From now on callers need not wait for the end of the first attempt.
            self.give_up(|state| matches!(state, LinkState::New), &self.silent(soon));
            made = timeout(LONGEST_CONNECTING - soon, connecting.join_next()).await;
        }
        match made {
            Ok(Some(Ok(Ok(connection)))) => Ok(connection),
            Ok(Some(Ok(Err(error)))) => Err(self.away(error)),
            Ok(Some(Err(panicked))) => Err(self.away(panicked)),
            Ok(None) | Err(_) => {
                let store_timeout = self.links.store_timeout;
                Err(self.away(format!(
                    "no connection within {LONGEST_CONNECTING:?} that replies within {store_timeout:?}"
                )))
            }
        }
    }

    /// Returns why there is no connection, if it broke or an attempt to make one has failed.
    pub(super) fn down(&self) -> Option<StoreError> {
        match &*self.state.borrow() {
            LinkState::Down(error) => Some(error.clone()),
            LinkState::New | LinkState::Up(..) => None,
        }
    }

    /// Returns whether there is a connection. `None` if none was tried yet.
    pub(super) fn is_up(&self) -> Option<bool> {
        match &*self.state.borrow() {
            LinkState::New => None,
            LinkState::Up(..) => Some(true),
            LinkState::Down(_) => Some(false),
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_up() == Some(true)
    }

    /// Completes when calls fail at once because there is no connection.
    pub(super) async fn until_down(&self) {
        // The link has the sender, so the channel is not closed.
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| matches!(state, LinkState::Down(_)))
            .await;
    }

    /// Sends one command and waits for its reply, until `deadline` at most. It is never sent
    /// twice. Gives the connection up if it is of no more use.
    ///
    /// A command may have little time left, because its caller waited for the connection, or for another server. Then a
    /// reply that does not come in time proves nothing about this server.
    pub(super) async fn send(
        &self,
        request: ServerRequest,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        let is_call = request.is_call;
        let (connection, number) = self.connection(deadline).await?;
        let sent = clock::now();
        *lock(&self.used_at) = sent;
        let reply = timeout_at(deadline.into(), connection.send(request)).await;
        let failure = match reply {
            Ok(Ok(value)) => {
                if is_call {
                    self.has_worked.store(true, Ordering::Relaxed);
                }
                return Ok(value);
            }
            Ok(Err(error)) => self.failure(FailureKind::Error(error)),
            Err(_) => self.silent(self.links.store_timeout),
        };
        let had_time = deadline.saturating_duration_since(sent) >= self.links.store_timeout / 2;
        if failure.breaks() && (had_time || !failure.is_silent()) {
            self.give_up(
                |state| matches!(state, LinkState::Up(_, up) if *up == number),
                &failure,
            );
        }
        Err(failure)
    }

    /// Returns the database of the connection. Waits for a connection until `deadline` at most.
    pub(super) async fn database(&self, deadline: Instant) -> Result<i64, RedisFailure> {
        let (connection, _) = self.connection(deadline).await?;
        Ok(connection.database)
    }

    /// Returns the connection and its number. Waits for the first connection until `deadline` at
    /// most.
    async fn connection(&self, deadline: Instant) -> Result<(Connection, u64), RedisFailure> {
        let mut states = self.state.subscribe();
        let tried = states.wait_for(|state| !matches!(state, LinkState::New));
        let state = timeout_at(deadline.into(), tried).await;
        match state.ok().and_then(Result::ok).as_deref() {
            Some(LinkState::Up(connection, number)) => Ok((connection.clone(), *number)),
            Some(LinkState::Down(error)) => Err(self.failure(FailureKind::Down(error.clone()))),
            Some(LinkState::New) | None => Err(self.silent(self.links.store_timeout)),
        }
    }

    /// If `condition` holds for the state, marks the link as down. Calls then fail at once, until
    /// there is a new connection.
    fn give_up(&self, condition: impl Fn(&LinkState) -> bool, failure: &RedisFailure) {
        let error = failure.to_error();
        let gave_up = self.state.send_if_modified(|state| {
            let breaks = condition(state);
            if breaks {
                *state = LinkState::Down(error.clone());
            }
            breaks
        });
        if gave_up {
            self.links.broke.notify_one();
            self.report(&error);
        }
    }

    /// Reports that there is no connection.
    fn report(&self, error: &StoreError) {
        if self.was_up.load(Ordering::Relaxed) {
            events::store_lost(error);
        } else {
            events::store_not_reached(error);
        }
    }

    fn failure(&self, why: FailureKind) -> RedisFailure {
        RedisFailure {
            why,
            server: self.server.clone(),
        }
    }

    fn silent(&self, after: Duration) -> RedisFailure {
        self.failure(FailureKind::Silent(after))
    }

    fn away(&self, error: impl Into<BoxError>) -> StoreError {
        StoreError::away(of_server(self.server.as_ref(), error.into()))
    }
}

/// Reports an eviction policy of the server, because the state of evicted keys is lost.
fn warn_of_eviction(info: &Value) {
    let text = match info {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::VerbatimString { text, .. } => text.clone(),
        _ => return,
    };
    let policy = text
        .lines()
        .find_map(|line| line.strip_prefix("maxmemory_policy:"));
    if let Some(policy) = policy
        .map(str::trim)
        .filter(|policy| *policy != "noeviction")
    {
        events::store_may_evict(policy);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(250);

    /// A server behind a network that forgets a connection after a minute without traffic, or at
    /// once. What is sent on a forgotten connection gets no reply.
    #[derive(Default)]
    struct Network {
        connections: AtomicUsize,
        forgets_all: AtomicBool,
    }

    impl Network {
        fn connect(self: &Arc<Self>) -> Connection {
            let number = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
            let (network, used_at) = (self.clone(), Arc::new(Mutex::new(clock::now())));
            let send = Arc::new(move |_| {
                let last = std::mem::replace(&mut *used_at.lock().unwrap(), clock::now());
                let idle = clock::now().saturating_duration_since(last);
                let newest = number == network.connections.load(Ordering::Relaxed);
                let forgets_all = newest && network.forgets_all.swap(false, Ordering::Relaxed);
                Box::pin(async move {
                    if idle > Duration::from_secs(60) || forgets_all {
                        std::future::pending::<()>().await;
                    }
                    Ok(Value::Okay)
                }) as _
            });
            Connection { send, database: 0 }
        }

        fn link(self: &Arc<Self>) -> Arc<Link> {
            let network = self.clone();
            let factory =
                Arc::new(move || Box::pin(std::future::ready(Ok(network.connect()))) as _);
            let link = Arc::new(Link::new(
                None,
                factory,
                Links::new(TIMEOUT, Arc::new(StoreTally::new("test"))),
            ));
            tokio::spawn(link.clone().keep());
            link
        }
    }

    async fn replies(link: &Link) -> bool {
        link.send(
            ServerRequest::call(redis::cmd("GET")),
            clock::after(clock::now(), TIMEOUT),
        )
        .await
        .is_ok()
    }

    /// Collects the texts of events.
    #[cfg(feature = "tracing")]
    #[derive(Clone, Default)]
    struct Texts {
        texts: Arc<Mutex<Vec<String>>>,
        /// Whether to panic when a connection is lost.
        panics: bool,
    }

    #[cfg(feature = "tracing")]
    impl tracing::field::Visit for Texts {
        fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" {
                let text = format!("{value:?}");
                assert!(!self.panics || !text.contains("lost"), "panics");
                self.texts.lock().unwrap().push(text);
            }
        }
    }

    #[cfg(feature = "tracing")]
    impl tracing::Subscriber for Texts {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn event(&self, event: &tracing::Event<'_>) {
            event.record(&mut self.clone());
        }

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[cfg(feature = "tracing")]
    #[tokio::test(start_paused = true)]
    async fn only_a_connection_that_was_made_is_lost() {
        let texts = Texts::default();
        let _collects = tracing::subscriber::set_default(texts.clone());
        // With one subscriber in the process, `tracing` asks the thread that first meets an event, which may be one of
        // another test and have none. With two, it asks both.
        let _other = tracing::Dispatch::new(texts.clone());
        let network = Arc::new(Network::default());
        let (is_reachable, server) = (Arc::new(AtomicBool::new(false)), network.clone());
        let reachable = is_reachable.clone();
        let factory = Arc::new(move || {
            let connected = match reachable.load(Ordering::Relaxed) {
                true => Ok(server.connect()),
                false => Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()),
            };
            Box::pin(std::future::ready(connected)) as _
        });
        let links = Links::new(TIMEOUT, Arc::new(StoreTally::new("test")));
        let link = Arc::new(Link::new(None, factory, links));
        tokio::spawn(link.clone().keep());
        assert!(!replies(&link).await);
        is_reachable.store(true, Ordering::Relaxed);
        clock::sleep(Duration::from_secs(60)).await;
        network.forgets_all.store(true, Ordering::Relaxed);
        assert!(!replies(&link).await);
        let mut texts = std::mem::take(&mut *texts.texts.lock().unwrap());
        texts.dedup();
        let expected = [
            "the store cannot be reached yet; trying again",
            "connected to the store",
            "connection to the store lost; reconnecting",
        ];
        assert_eq!(texts, expected);
    }

    /// Each call would wait for `store_timeout`, and be executed for nobody.
    #[tokio::test(start_paused = true)]
    async fn a_server_slower_than_a_call_is_not_back() {
        let connections = Arc::new(AtomicUsize::new(0));
        let made = connections.clone();
        let factory: Factory = Arc::new(move || {
            made.fetch_add(1, Ordering::Relaxed);
            let send = Arc::new(move |_| {
                let late = clock::sleep(2 * TIMEOUT);
                Box::pin(async {
                    late.await;
                    Ok(Value::Okay)
                }) as _
            });
            Box::pin(std::future::ready(Ok(Connection { send, database: 0 }))) as _
        });
        let tally = Arc::new(StoreTally::new("test"));
        let link = Arc::new(Link::new(None, factory, Links::new(TIMEOUT, tally)));
        tokio::spawn(link.clone().keep());
        let start = clock::now();
        for _ in 0..600 {
            assert!(!replies(&link).await);
            clock::sleep(Duration::from_millis(100)).await;
        }
        assert!(connections.load(Ordering::Relaxed) < 20);
        let waited = clock::now() - start - Duration::from_secs(60);
        assert!(waited < TIMEOUT + Duration::from_secs(1), "{waited:?}");
    }

    #[cfg(feature = "tracing")]
    #[tokio::test(start_paused = true)]
    async fn subscribers_that_panic_prevent_no_new_connection() {
        let texts = Texts {
            panics: true,
            ..Texts::default()
        };
        let _panics = tracing::subscriber::set_default(texts.clone());
        let _other = tracing::Dispatch::new(texts);
        let network = Arc::new(Network::default());
        let link = network.link();
        assert!(replies(&link).await);
        network.forgets_all.store(true, Ordering::Relaxed);
        let call = link.clone();
        let panicked = tokio::spawn(async move { replies(&call).await }).await;
        assert!(panicked.is_err());
        clock::sleep(Duration::from_secs(10)).await;
        assert!(replies(&link).await);
    }

    #[tokio::test(start_paused = true)]
    async fn quiet_connections_are_not_forgotten_by_the_network() {
        let network = Arc::new(Network::default());
        let link = network.link();
        for _ in 0..3 {
            assert!(replies(&link).await);
            clock::sleep(Duration::from_secs(600)).await;
        }
        assert_eq!(network.connections.load(Ordering::Relaxed), 1);
    }

    /// A replica after a failover: it accepts connections, answers each PING, and refuses to write.
    #[tokio::test(start_paused = true)]
    async fn read_only_server_has_few_connections() {
        let connections = Arc::new(AtomicUsize::new(0));
        let made = connections.clone();
        let factory: Factory = Arc::new(move || {
            made.fetch_add(1, Ordering::Relaxed);
            let is_first = AtomicBool::new(true);
            let send = Arc::new(move |_| {
                // The first command of a connection is the PING that tries it.
                let reply = if is_first.swap(false, Ordering::Relaxed) {
                    Ok(Value::Okay)
                } else {
                    let read_only = redis::ErrorKind::Server(redis::ServerErrorKind::ReadOnly);
                    Err(RedisError::from((read_only, "read only")))
                };
                Box::pin(std::future::ready(reply)) as _
            });
            Box::pin(std::future::ready(Ok(Connection { send, database: 0 }))) as _
        });
        let tally = Arc::new(StoreTally::new("test"));
        let link = Arc::new(Link::new(None, factory, Links::new(TIMEOUT, tally)));
        tokio::spawn(link.clone().keep());
        for _ in 0..400 {
            assert!(!replies(&link).await);
            clock::sleep(Duration::from_millis(10)).await;
        }
        let connections = connections.load(Ordering::Relaxed);
        assert!((3..=12).contains(&connections), "{connections}");
    }

    #[tokio::test(start_paused = true)]
    async fn pings_find_forgotten_connections_before_requests_do() {
        let network = Arc::new(Network::default());
        let link = network.link();
        assert!(replies(&link).await);
        network.forgets_all.store(true, Ordering::Relaxed);
        clock::sleep(QUIET + TIMEOUT + Duration::from_secs(2)).await;
        assert!(replies(&link).await);
        assert_eq!(network.connections.load(Ordering::Relaxed), 2);
    }
}
