//! The Redis in which the processes share their count: given or started, and its own figures of what it spent.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, RedisError};
use redis_server::RedisServer;
use tokio::time::timeout;

use crate::args::Where;

/// A Redis that responds.
pub(crate) struct Redis {
    pub(crate) url: String,
    /// The prefix of all keys of this run, so that it shares nothing with other runs.
    pub(crate) prefix: String,
    connection: MultiplexedConnection,
    /// The server, if the example started it; killed when it is dropped.
    _ours: Option<RedisServer>,
}

/// What Redis has spent since it started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    /// Store calls: the scripts that Redis ran.
    pub(crate) calls: u64,
    /// Processor time.
    pub(crate) cpu: Duration,
}

impl Redis {
    /// Starts a Redis, or checks within a second that the given one responds.
    pub(crate) async fn reach(place: &Where) -> Result<Redis, String> {
        let (url, ours) = match place {
            Where::At(url) => (url.clone(), None),
            Where::Spawn => {
                let server = RedisServer::start().map_err(|error| error.to_string())?;
                (server.url(), Some(server))
            }
        };
        let client = Client::open(url.as_str()).map_err(|error| format!("--redis: {error}"))?;
        // The address without user and password.
        let away = |why: String| {
            let why = why.split_whitespace().collect::<Vec<_>>().join(" "); // some errors have many lines
            format!("no Redis at {}: {why}", client.get_connection_info().addr())
        };
        let connection = match timeout(PATIENCE, connect(&client)).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return Err(away(error.to_string())),
            Err(_) => return Err(away(format!("no answer within {PATIENCE:?}"))),
        };
        let prefix = format!("fleet-{}-{:08x}", std::process::id(), random());
        Ok(Redis { url, prefix, connection, _ours: ours })
    }

    /// Returns what Redis has spent up to now, by its own figures.
    pub(crate) async fn spent(&self) -> Result<Spent, RedisError> {
        let mut connection = self.connection.clone();
        let mut info = redis::cmd("INFO");
        let books: String = info.arg("commandstats").arg("cpu").query_async(&mut connection).await?;
        Ok(Spent { calls: calls(&books), cpu: cpu(&books) })
    }
}

impl Spent {
    /// Returns what was spent from `before` until now.
    pub(crate) fn since(self, before: Spent) -> Spent {
        Spent { calls: self.calls.saturating_sub(before.calls), cpu: self.cpu.saturating_sub(before.cpu) }
    }
}

async fn connect(client: &Client) -> Result<MultiplexedConnection, RedisError> {
    let mut connection = client.get_multiplexed_async_connection().await?;
    redis::cmd("PING").exec_async(&mut connection).await?;
    Ok(connection)
}

/// Parses lines such as `cmdstat_evalsha:calls=12,usec=345,...`.
fn calls(books: &str) -> u64 {
    let scripts = ["cmdstat_evalsha", "cmdstat_eval"];
    let of = |line: &str| {
        let (_, numbers) = line.split_once(':').filter(|(name, _)| scripts.contains(name))?;
        numbers.strip_prefix("calls=")?.split(',').next()?.parse::<u64>().ok()
    };
    books.lines().filter_map(of).sum()
}

/// Parses lines such as `used_cpu_user:1.234567`, in seconds.
fn cpu(books: &str) -> Duration {
    let kinds = ["used_cpu_sys", "used_cpu_user"];
    let of = |line: &str| {
        let (_, seconds) = line.split_once(':').filter(|(name, _)| kinds.contains(name))?;
        Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()
    };
    books.lines().filter_map(of).sum()
}

/// Each hasher of the standard library has its own seed.
fn random() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as u32
}

/// How long a Redis may take to respond.
const PATIENCE: Duration = Duration::from_secs(1);
