//! Those that share a limit over Redis: one file each.
//!
//! tollgate is the crate itself. The others are ports of what libraries and blogs do: the same commands in the same
//! steps, one script or transaction for each try, asynchronous, over one multiplexed connection a process, and each waits
//! as it is usual with it. All run in the same harness; nothing of theirs is made slower than it is.
//!
//! limitador is not among them: it adds 87 crates to the workspace, a second `redis` and a CEL interpreter among them,
//! and its algorithm, a counter with an expiry, is here as [`counter`].

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

/// What a caller passes through before each call.
pub(crate) trait Gate: Clone + Send + Sync + 'static {
    /// Returns when the call may be sent; an error is counted, and the caller tries again.
    fn pass(&self) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The same for another key. Only tollgate is asked for more than one.
    fn keyed(&self, _number: u64) -> Self {
        self.clone()
    }
}

/// What went wrong.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// Who takes part.
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
    /// Those that are compared.
    pub(crate) const ALL: [Contender; 6] = [
        Contender::Tollgate,
        Contender::Gcra,
        Contender::Counter,
        Contender::Windows,
        Contender::Log,
        Contender::Spacing,
    ];

    /// For a table.
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

    /// For a command line.
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

    /// The one of that word.
    pub(crate) fn of(word: &str) -> Option<Contender> {
        Contender::ALL.into_iter().chain([Contender::Nothing]).find(|contender| contender.word() == word)
    }

    /// The commands that go over the wire as a call of their own: what is inside of a script or a transaction is not one.
    pub(crate) fn calls(self) -> &'static [&'static str] {
        match self {
            Contender::Tollgate | Contender::Windows | Contender::Gcra => &["eval", "evalsha"],
            Contender::Log | Contender::Counter => &["exec"],
            Contender::Spacing => &["set", "pttl"],
            Contender::Nothing => &[],
        }
    }
}

/// So many calls a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) count: u32,
    pub(crate) window: Duration,
}

/// The connection of a process, set up as tollgate's: it sends at once, and waits as long as it takes.
async fn connect(url: &str) -> Result<MultiplexedConnection, Failure> {
    let info = url.into_connection_info()?.set_tcp_settings(TcpSettings::default().set_nodelay(true));
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    Ok(redis::Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await?)
}
