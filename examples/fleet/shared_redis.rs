//! The Redis in which the processes share their count, given by the user or started here, and what
//! it costs.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, RedisError};
use redis_server::RedisServer;
use tokio::time::timeout;

use crate::args::Where;

/// A Redis that responds.
pub(crate) struct Redis {
    /// The URL, with the password if it has one.
    pub(crate) url: String,
    /// The prefix of all keys of this run, so that it shares nothing with other runs.
    pub(crate) prefix: String,
    connection: MultiplexedConnection,
    /// The server, if the example started it. It is killed when this is dropped.
    _server: Option<RedisServer>,
}

/// What Redis has spent since it started, by its own figures.
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
        let (url, server) = match place {
            Where::At(url) => (url.clone(), None),
            Where::Spawn => {
                let server = RedisServer::start().map_err(|error| error.to_string())?;
                (server.url(), Some(server))
            }
        };
        let client = Client::open(url.as_str()).map_err(|error| format!("--redis: {error}"))?;
        // The address has no user and no password.
        let unreachable = |why: String| {
            let why = why.split_whitespace().collect::<Vec<_>>().join(" "); // some errors have many lines
            format!("no Redis at {}: {why}", client.get_connection_info().addr())
        };
        let connection = match timeout(TIMEOUT, connect(&client)).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return Err(unreachable(error.to_string())),
            Err(_) => return Err(unreachable(format!("no answer within {TIMEOUT:?}"))),
        };
        let prefix = format!("fleet-{}-{:08x}", std::process::id(), random());
        Ok(Redis {
            url,
            prefix,
            connection,
            _server: server,
        })
    }

    /// Returns what Redis has spent up to now.
    pub(crate) async fn spent(&self) -> Result<Spent, RedisError> {
        let mut connection = self.connection.clone();
        let mut command = redis::cmd("INFO");
        let info: String = command
            .arg("commandstats")
            .arg("cpu")
            .query_async(&mut connection)
            .await?;
        Ok(Spent {
            calls: calls(&info),
            cpu: cpu(&info),
        })
    }
}

impl Spent {
    /// Returns what was spent from `before` until now.
    pub(crate) fn since(self, before: Spent) -> Spent {
        Spent {
            calls: self.calls.saturating_sub(before.calls),
            cpu: self.cpu.saturating_sub(before.cpu),
        }
    }
}

async fn connect(client: &Client) -> Result<MultiplexedConnection, RedisError> {
    let mut connection = client.get_multiplexed_async_connection().await?;
    redis::cmd("PING").exec_async(&mut connection).await?;
    Ok(connection)
}

/// Sums the calls in lines such as `cmdstat_evalsha:calls=12,usec=345,...`.
fn calls(info: &str) -> u64 {
    let scripts = ["cmdstat_evalsha", "cmdstat_eval"];
    let of = |line: &str| {
        let (_, numbers) = line
            .split_once(':')
            .filter(|(name, _)| scripts.contains(name))?;
        numbers
            .strip_prefix("calls=")?
            .split(',')
            .next()?
            .parse::<u64>()
            .ok()
    };
    info.lines().filter_map(of).sum()
}

/// Sums the seconds in lines such as `used_cpu_user:1.234567`.
fn cpu(info: &str) -> Duration {
    let kinds = ["used_cpu_sys", "used_cpu_user"];
    let of = |line: &str| {
        let (_, seconds) = line
            .split_once(':')
            .filter(|(name, _)| kinds.contains(name))?;
        Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()
    };
    info.lines().filter_map(of).sum()
}

/// Returns a random number: each hasher of the standard library has its own seed.
fn random() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as u32
}

/// How long a Redis may take to respond.
const TIMEOUT: Duration = Duration::from_secs(1);
