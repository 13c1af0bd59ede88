//! The connection: made when it is first needed, made anew when it breaks, and known to be broken meanwhile, so that
//! nobody waits for what will not come.
//!
//! One connection for all keys: what is asked at the same time travels together.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::sync::{Notify, watch};
use tokio::time::{timeout, timeout_at};

use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::jitter::jittered;

/// Makes connections.
pub(super) type Factory = Box<dyn Fn() -> Connecting + Send + Sync>;
pub(super) type Connecting = Pin<Box<dyn Future<Output = RedisResult<Connection>> + Send>>;

/// A connection of any kind. Clones share it.
pub(super) type Connection = Arc<dyn Fn(Cmd) -> Answering + Send + Sync>;
type Answering = Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>;

/// Hides what kind of connection it is.
pub(super) fn connection<C>(connection: C) -> Connection
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    Arc::new(move |command: Cmd| {
        let mut connection = connection.clone();
        Box::pin(async move { connection.req_packed_command(&command).await?.extract_error() })
    })
}

/// Makes connections to the server that `client` knows.
pub(super) fn factory_of(client: Client) -> Factory {
    Box::new(move || {
        let client = client.clone();
        Box::pin(async move { connect(&client).await })
    })
}

/// A connection to the server that `client` knows.
pub(super) async fn connect(client: &Client) -> RedisResult<Connection> {
    // The deadlines are ours: one for the whole of each operation.
    let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let made: MultiplexedConnection = client.get_multiplexed_async_connection_with_config(&config).await?;
    Ok(connection(made))
}

/// How long making a connection may take: names and certificates need longer than a call.
const LONGEST_CONNECTING: Duration = Duration::from_secs(5);

/// Between two tries to connect; jittered, and doubled up to the longest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Link {
    factory: Factory,
    state: watch::Sender<State>,
    broken: Notify,
    store_timeout: Duration,
}

enum State {
    /// Nobody asked yet, or the first try is under way.
    New,
    /// The connection, and which one it is.
    Up(Connection, u64),
    /// Why, told to everybody until a try succeeds.
    Down(StoreError),
}

/// The connections that are made.
pub(super) struct Connections(watch::Receiver<State>);

impl Connections {
    /// Ends when there is a new one. May be dropped at any time.
    pub(super) async fn next(&mut self) {
        while self.0.changed().await.is_ok() {
            if matches!(*self.0.borrow_and_update(), State::Up(..)) {
                return;
            }
        }
        std::future::pending().await
    }
}

impl Link {
    pub(super) fn new(factory: Factory, store_timeout: Duration) -> Self {
        let (state, _) = watch::channel(State::New);
        Link { factory, state, broken: Notify::new(), store_timeout }
    }

    /// Keeps a connection, for as long as it is polled.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut pause = SHORTEST_PAUSE;
        for number in 0.. {
            match self.connect().await {
                Ok(connection) => {
                    pause = SHORTEST_PAUSE;
                    self.state.send_replace(State::Up(connection.clone(), number));
                    events::store_connected();
                    // What the server tells of itself is nice to know, and some forbid to ask.
                    let info = timeout(LONGEST_CONNECTING, connection(redis::cmd("INFO")));
                    tokio::spawn(async move {
                        if let Ok(Ok(info)) = info.await {
                            warn_of_eviction(&info);
                        }
                    });
                    self.broken.notified().await;
                }
                Err(error) => {
                    events::store_away(&error);
                    self.state.send_replace(State::Down(error));
                }
            }
            clock::sleep_until(clock::after(clock::now(), jittered(pause))).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn connect(self: &Arc<Self>) -> Result<Connection, StoreError> {
        let link = self.clone();
        // A task of its own: a factory that panics must not take the keeper along.
        let mut connecting = tokio::spawn(async move {
            let connection = (link.factory)().await?;
            connection(redis::cmd("PING")).await?;
            Ok::<_, RedisError>(connection)
        });
        match timeout(LONGEST_CONNECTING, &mut connecting).await {
            Ok(Ok(Ok(connection))) => Ok(connection),
            Ok(Ok(Err(error))) => Err(StoreError::away(error)),
            Ok(Err(panicked)) => Err(StoreError::away(panicked)),
            Err(_) => {
                connecting.abort();
                Err(StoreError::away(format!("no connection within {LONGEST_CONNECTING:?}")))
            }
        }
    }

    /// Tells of each new connection from now on.
    pub(super) fn connections(&self) -> Connections {
        Connections(self.state.subscribe())
    }

    /// Why there is no connection, if there is none and was one, or a try to make one has failed.
    pub(super) fn down(&self) -> Option<StoreError> {
        match &*self.state.borrow() {
            State::Down(error) => Some(error.clone()),
            State::New | State::Up(..) => None,
        }
    }

    /// Until when an operation that begins now must have ended.
    pub(super) fn deadline(&self) -> Instant {
        clock::after(clock::now(), self.store_timeout)
    }

    /// Sends one command and waits for its answer, until `deadline` at most. It is never sent twice.
    pub(super) async fn ask(&self, command: Cmd, deadline: Instant) -> Result<Value, RedisFailure> {
        let silent = |_| RedisFailure::Silent(self.store_timeout);
        let (connection, number) = timeout_at(deadline.into(), self.connection()).await.map_err(silent)??;
        let answer = timeout_at(deadline.into(), connection(command)).await.map_err(silent);
        let failure = match answer {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => RedisFailure::Said(error),
            Err(silent) => silent,
        };
        if failure.breaks() {
            self.break_off(number, &failure);
        }
        Err(failure)
    }

    async fn connection(&self) -> Result<(Connection, u64), RedisFailure> {
        let mut states = self.state.subscribe();
        loop {
            match &*states.borrow_and_update() {
                State::Up(connection, number) => return Ok((connection.clone(), *number)),
                State::Down(error) => return Err(RedisFailure::Down(error.clone())),
                State::New => {}
            }
            // The sender is ours.
            let _ = states.changed().await;
        }
    }

    /// Connection `number` is of no more use: from now on calls fail at once, until there is a new one.
    fn break_off(&self, number: u64, failure: &RedisFailure) {
        let was_up = self.state.send_if_modified(|state| {
            let up = matches!(state, State::Up(_, up) if *up == number);
            if up {
                *state = State::Down(failure.to_error());
            }
            up
        });
        if was_up {
            events::store_away(&failure.to_error());
            self.broken.notify_one();
        }
    }
}

/// Keys that are evicted are lost.
fn warn_of_eviction(info: &Value) {
    let text = match info {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::VerbatimString { text, .. } => text.clone(),
        _ => return,
    };
    let policy = text.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"));
    if let Some(policy) = policy.map(str::trim).filter(|policy| *policy != "noeviction") {
        events::store_may_evict(policy);
    }
}

/// Why a command has no answer.
pub(super) enum RedisFailure {
    /// There is no connection.
    Down(StoreError),
    /// The server said no, or the connection broke.
    Said(RedisError),
    /// Nothing came back in time.
    Silent(Duration),
}

impl RedisFailure {
    /// Whether the server does not have the script: then it did nothing.
    pub(super) fn is_no_script(&self) -> bool {
        matches!(self, RedisFailure::Said(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
    }

    /// Whether it says that the server would answer the next call: what it said concerns this one.
    fn is_answer(error: &RedisError) -> bool {
        match error.kind() {
            ErrorKind::Server(
                ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::TryAgain,
            ) => false,
            ErrorKind::Server(_) => true,
            ErrorKind::Extension => !matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOREPLICAS")),
            _ => false,
        }
    }

    fn breaks(&self) -> bool {
        match self {
            RedisFailure::Down(_) => false,
            RedisFailure::Said(error) => !RedisFailure::is_answer(error),
            RedisFailure::Silent(_) => true,
        }
    }

    pub(super) fn to_error(&self) -> StoreError {
        match self {
            RedisFailure::Down(error) => error.clone(),
            RedisFailure::Said(error) if RedisFailure::is_answer(error) => StoreError::failed(error.clone()),
            RedisFailure::Said(error) => StoreError::away(error.clone()),
            RedisFailure::Silent(after) => StoreError::away(format!("no answer within {after:?}")),
        }
    }
}
