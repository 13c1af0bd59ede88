//! The limiters that are compared over Redis: one file each.
//!
//! tollgate is the crate itself. The others are ports of what libraries and blogs do. They run the
//! same commands in the same steps, with one script or transaction for each try, asynchronously,
//! over one multiplexed connection a process. Each waits as the original does. All run in the same
//! harness, and no port is slowed down.
//!
//! limitador is not compared: it adds 87 crates to the workspace, among them a second `redis` and a
//! CEL interpreter. Its algorithm, a counter with an expiry, is here as [`counter`].

pub(crate) mod counter;
pub(crate) mod gcra;
pub(crate) mod log;
pub(crate) mod none;
pub(crate) mod spacing;
pub(crate) mod tollgate;
pub(crate) mod windows;

use std::error::Error;
use std::future::Future;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, IntoConnectionInfo};

/// The gate that a caller passes before each call.
pub(crate) trait Gate: Clone + Send + Sync + 'static {
    /// Returns when the call may be sent. An error is counted, and the caller tries again.
    fn pass(&self) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Does the same for another key. Only tollgate is run with more than one key.
    fn keyed(&self, _number: u64) -> Self {
        self.clone()
    }
}

/// The error of a gate.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// The limiters that are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    Tollgate,
    Spacing,
    Windows,
    Log,
    Counter,
    Gcra,
    /// No limiter at all.
    Nothing,
}

impl Contender {
    /// The limiters that are compared.
    pub(crate) const ALL: [Contender; 6] = [
        Contender::Tollgate,
        Contender::Gcra,
        Contender::Counter,
        Contender::Windows,
        Contender::Log,
        Contender::Spacing,
    ];

    /// Returns the name for a table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::Tollgate => "tollgate",
            Contender::Spacing => "lock: `SET NX PX`, poll `PTTL`",
            Contender::Windows => "two ZSETs in a script",
            Contender::Log => "ZSET log in `MULTI`",
            Contender::Counter => "`INCR` for each second",
            Contender::Gcra => "GCRA, burst = limit",
            Contender::Nothing => "nothing",
        }
    }

    /// Returns the word for a command line.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Contender::Tollgate => "tollgate",
            Contender::Spacing => "spacing",
            Contender::Windows => "windows",
            Contender::Log => "log",
            Contender::Counter => "counter",
            Contender::Gcra => "gcra",
            Contender::Nothing => "nothing",
        }
    }

    /// Returns the contender of that word.
    pub(crate) fn of(word: &str) -> Option<Contender> {
        Contender::ALL
            .into_iter()
            .chain([Contender::Nothing])
            .find(|contender| contender.word() == word)
    }

    /// Returns the commands that count as calls to the server. Commands within a script or a
    /// transaction do not count.
    pub(crate) fn calls(self) -> &'static [&'static str] {
        match self {
            Contender::Tollgate | Contender::Windows | Contender::Gcra => &["eval", "evalsha"],
            Contender::Log | Contender::Counter => &["exec"],
            Contender::Spacing => &["set", "pttl"],
            Contender::Nothing => &[],
        }
    }
}

/// A limit: `count` calls a `window`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) count: u32,
    pub(crate) window: Duration,
}

/// Opens the connection of a process, with the settings of tollgate's: it sends at once, and has no
/// response timeout.
async fn connect(url: &str) -> Result<MultiplexedConnection, Failure> {
    let info = url
        .into_connection_info()?
        .set_tcp_settings(TcpSettings::default().set_nodelay(true));
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    Ok(redis::Client::open(info)?
        .get_multiplexed_async_connection_with_config(&config)
        .await?)
}
