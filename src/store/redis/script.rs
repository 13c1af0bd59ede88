//! The Lua scripts, and how they are run.
//!
//! Each script is several files of `lua/`, one after the other. A file may use the locals of the
//! files before it. Its heading lists those that it needs. `layout.lua` has the bytes of all
//! records and all numbers that Rust and Lua share; those of calls in flight are in
//! `layout_in_flight.lua`.
//!
//! There are four scripts. [`RATES`] decides about permits. In it, `short.lua` decides most calls,
//! and the files after it can decide all calls, with one file for each kind of limit. [`joint`]
//! decides about permits of several keys. [`IN_FLIGHT`] decides about calls in flight, and
//! [`REGISTER`] about registers.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::Value;
use tokio::sync::Mutex;
use tokio::time::timeout_at;

use super::backend::Backend;
use super::codec::{self, Garbled};
use super::failure::RedisFailure;
use super::stats::CallKind;
use crate::clock;
use crate::error::StoreError;

/// The script about calls in flight.
pub(super) const IN_FLIGHT: &str = concat!(
    include_str!("lua/layout.lua"),
    include_str!("lua/layout_in_flight.lua"),
    include_str!("lua/server_time.lua"),
    include_str!("lua/time.lua"),
    include_str!("lua/in_flight.lua"),
);

/// The script about registers.
pub(super) const REGISTER: &str = concat!(
    include_str!("lua/layout.lua"),
    include_str!("lua/server_time.lua"),
    include_str!("lua/register.lua"),
);

/// The script about rates.
pub(super) const RATES: &str = concat!(
    include_str!("lua/layout.lua"),
    include_str!("lua/server_time.lua"),
    include_str!("lua/one_key.lua"),
    include_str!("lua/call.lua"),
    include_str!("lua/short.lua"),
    include_str!("lua/time.lua"),
    include_str!("lua/state.lua"),
    include_str!("lua/window.lua"),
    include_str!("lua/bucket.lua"),
    include_str!("lua/fixed.lua"),
    include_str!("lua/external.lua"),
    include_str!("lua/ledger.lua"),
    include_str!("lua/advance.lua"),
    include_str!("lua/set_quota.lua"),
    include_str!("lua/main.lua"),
);

/// Returns the script about joint requests: the script about rates as a function, and `joint.lua`,
/// which calls it for each key. Both parts need the layout. The parameters of the function replace
/// the files that read the clock and the arguments of the script.
pub(super) fn joint() -> String {
    let server_time = include_str!("lua/server_time.lua");
    let one_key = concat!(
        include_str!("lua/server_time.lua"),
        include_str!("lua/one_key.lua"),
    );
    let (layout, decides) = RATES.split_once(one_key).expect("RATES has these files");
    [
        "local function decide(key, call, server_time, redis_write, moment, channel, token)\n",
        layout,
        decides,
        "end\n",
        layout,
        server_time,
        include_str!("lua/joint.lua"),
    ]
    .concat()
}

/// A script as it is sent to the server, with inlined constants. It is made once in a process: that
/// takes a debug build tens of milliseconds.
struct Inlined {
    text: String,
    /// The digest by which the server finds it.
    hash: String,
}

impl Inlined {
    fn new(text: &str) -> Self {
        let text = with_inlined_constants(text);
        Inlined {
            hash: redis::Script::new(&text).get_hash().to_owned(),
            text,
        }
    }
}

static INLINED_RATES: LazyLock<Inlined> = LazyLock::new(|| Inlined::new(RATES));
static INLINED_JOINT: LazyLock<Inlined> = LazyLock::new(|| Inlined::new(&joint()));
static INLINED_IN_FLIGHT: LazyLock<Inlined> = LazyLock::new(|| Inlined::new(IN_FLIGHT));
static INLINED_REGISTER: LazyLock<Inlined> = LazyLock::new(|| Inlined::new(REGISTER));

/// Returns a script with its named constants replaced by their values.
///
/// A constant is a line `local NAME = value` whose name is in capitals. A client may also send the
/// text as it is in the files: it decides the same.
///
/// Values make the script faster. For each call, Redis makes the function of a script anew, and
/// each function in it. Each of these functions has a reference to every constant that it uses.
/// With names instead of values, `short.lua` took 0.8 % longer, and the other files 8 % to 28 %.
pub(super) fn with_inlined_constants(text: &str) -> String {
    let constants: BTreeMap<&str, &str> = text.lines().filter_map(constant).collect();
    let mut inlined = String::with_capacity(text.len());
    for line in text.lines() {
        // A line with a comment or a constant becomes an empty line, because errors of Redis name
        // line numbers.
        if constant(line).is_none() && !line.trim_start().starts_with("--") {
            for word in line.split_inclusive(|c: char| !is_of_name(c)) {
                let name = word.trim_end_matches(|c: char| !is_of_name(c));
                inlined.push_str(constants.get(name).unwrap_or(&name));
                inlined.push_str(&word[name.len()..]);
            }
        }
        inlined.push('\n');
    }
    inlined
}

/// Returns the name and the value of a constant, or `None` if the line has none.
pub(super) fn constant(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line
        .trim_start()
        .strip_prefix("local ")?
        .split_once(" = ")?;
    let is_literal = value.parse::<u64>().is_ok() || value.starts_with("'<");
    let is_in_capitals = name
        .chars()
        .all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    (is_literal && is_in_capitals).then_some((name, value))
}

/// Returns whether names of Lua may have this character.
fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

pub(super) enum Argument {
    /// Bytes as they are.
    Is(Vec<u8>),
    /// The last part of a channel's name. The prefix and the database precede it.
    Channel(String),
}

/// The most runs of one call that were not [`LATE`].
const MOST_PROMPT_RUNS: u32 = 3;

/// A run that was on its way for longer than this may just have been executed late.
const LATE: Duration = Duration::from_micros(CLOCK_TOLERANCE);

/// By how many microseconds, at least, a script lets a call be late: that of `lua/layout.lua`.
const CLOCK_TOLERANCE: u64 = 250_000;

/// A script, and whether the server has it.
pub(super) struct Script {
    sent: &'static Inlined,
    /// What its runs are counted as.
    kind: CallKind,
    /// How often the text was sent successfully.
    loads: AtomicU64,
    /// Locked by the call that sends the text. The calls that wait for the lock then find the
    /// script on the server.
    loading: Mutex<()>,
}

impl Script {
    /// Makes the script for calls of this kind. The first one in the process takes some time, which is not that of a
    /// call: a store makes its scripts when it is built.
    pub(super) fn new(kind: CallKind) -> Self {
        Script {
            sent: match kind {
                CallKind::Permits => &INLINED_RATES,
                CallKind::Joint => &INLINED_JOINT,
                CallKind::InFlight => &INLINED_IN_FLIGHT,
                CallKind::Register => &INLINED_REGISTER,
            },
            kind,
            loads: AtomicU64::new(0),
            loading: Mutex::new(()),
        }
    }

    /// Runs a script whose first argument states the time that the caller expects, by the last
    /// reply that it remembers. The call was packed at `packed`.
    ///
    /// If the server's clock is too far ahead of that time, the script does nothing and returns the
    /// server's clock. Then it is run again with that clock. Runs may be late, so this goes on until the
    /// `store_timeout` is over, but for no more than [`MOST_PROMPT_RUNS`].
    ///
    /// # Errors
    ///
    /// Fails if the script still does nothing, because the server's clock does not advance evenly, or because
    /// each run is late. Fails also as [`run`](Script::run) does.
    pub(super) async fn run_by_memory(
        &self,
        backend: &Backend,
        keys: &[impl AsRef<str>],
        mut call: Vec<Argument>,
        mut packed: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        let deadline = backend.links.deadline_of(packed);
        let mut prompt_runs = 0;
        loop {
            let reply = self.run(backend, keys, &call, deadline).await?;
            let Some(server_seen) = codec::read_unsure(&reply) else {
                return Ok(reply);
            };
            let now = clock::now();
            let later = now.saturating_duration_since(packed);
            prompt_runs += u32::from(later <= LATE);
            let why = if prompt_runs == MOST_PROMPT_RUNS {
                "its clock does not advance evenly"
            } else if now + later > deadline {
                "each run of the call was late"
            } else {
                ""
            };
            if !why.is_empty() {
                backend.links.tally.of_no_use(self.kind);
                return Err(StoreError::failed(why));
            }
            // The first arguments are the calls, one for each key.
            for argument in call.iter_mut().take(keys.len()) {
                if let Argument::Is(call) = argument {
                    codec::set_server_time(call, later, server_seen);
                }
            }
            packed = now;
        }
    }

    /// Runs the script once, until `deadline` at most, and counts that. Sends its hash (`EVALSHA`). If the server does not have the script, it
    /// has done nothing. Then the text is sent instead (`EVAL`).
    ///
    /// # Errors
    ///
    /// Fails if the server cannot be reached, does not reply in time, or replies with an error.
    pub(super) async fn run(
        &self,
        backend: &Backend,
        keys: &[impl AsRef<str>],
        call: &[Argument],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        let start = clock::now();
        let ran = self.send(backend, keys, call, deadline).await;
        let took = clock::now().saturating_duration_since(start);
        backend.links.tally.count(self.kind, took, &ran);
        ran
    }

    async fn send(
        &self,
        backend: &Backend,
        keys: &[impl AsRef<str>],
        call: &[Argument],
        deadline: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        // All keys are on the server of the first.
        let key = keys.first().map_or("", AsRef::as_ref);
        let names_channel = call
            .iter()
            .any(|argument| matches!(argument, Argument::Channel(_)));
        let database = if names_channel {
            backend.database(deadline).await?
        } else {
            0
        };
        let send = |name: &str, script: &str| {
            let mut command = redis::cmd(name);
            command.arg(script).arg(keys.len());
            for key in keys {
                command.arg(key.as_ref());
            }
            for argument in call {
                match argument {
                    Argument::Is(bytes) => command.arg(bytes),
                    Argument::Channel(channel) => command.arg(backend.channel(database, channel)),
                };
            }
            backend.send(key, command, deadline)
        };
        let Inlined { hash, text } = self.sent;
        let loads = self.loads.load(Ordering::Relaxed);
        let mut reply = send("EVALSHA", hash).await;
        if reply.as_ref().is_err_and(RedisFailure::is_no_script) {
            let loading = timeout_at(deadline.into(), self.loading.lock())
                .await
                .map_err(|_| StoreError::away("the script was not loaded in time"))?;
            reply = if self.loads.load(Ordering::Relaxed) == loads {
                let reply = send("EVAL", text).await;
                let loaded = u64::from(reply.is_ok());
                self.loads.fetch_add(loaded, Ordering::Relaxed);
                reply
            } else {
                drop(loading);
                send("EVALSHA", hash).await
            };
            // In a cluster, the other call may have sent it to another server.
            if reply.as_ref().is_err_and(RedisFailure::is_no_script) {
                reply = send("EVAL", text).await;
            }
        }
        match reply? {
            Value::BulkString(reply) => Ok(reply),
            _ => Err(StoreError::failed(Garbled)),
        }
    }
}
