//! The scripts. `script/in_flight.lua` decides about calls in flight, `script/register.lua` about registers; the other, about rates, is in pieces: `script/call.lua` reads the call, `short.lua` decides what most calls ask for, and the others
//! decide everything: one file for each rule, the twin of its file in `src/limit`, with `main.lua` in the end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use redis::Value;
use tokio::sync::Mutex;
use tokio::time::timeout_at;

use super::backend::Backend;
use super::codec::{self, Call, Garbled};
use super::connection::RedisFailure;
use crate::clock;
use crate::error::StoreError;

/// About calls in flight.
pub(super) const SEATS: &str = include_str!("lua/in_flight.lua");

/// About registers.
pub(super) const REGISTER: &str = include_str!("lua/register.lua");

/// About rates.
pub(super) const TEXT: &str = concat!(
    include_str!("lua/call.lua"),
    include_str!("lua/short.lua"),
    include_str!("lua/state.lua"),
    include_str!("lua/window.lua"),
    include_str!("lua/bucket.lua"),
    include_str!("lua/fixed.lua"),
    include_str!("lua/ledger.lua"),
    include_str!("lua/main.lua"),
);

/// An argument of a script.
pub(super) enum Argument {
    Is(Vec<u8>),
    /// The name of a channel, which has the database in it.
    Channel(String),
}

pub(super) struct Script {
    text: &'static str,
    hash: String,
    /// How often the text was sent.
    loads: AtomicU64,
    /// Held by the call that sends the text: the others then find the script there.
    loading: Mutex<()>,
}

impl Script {
    pub(super) fn new(text: &'static str) -> Self {
        Script {
            text,
            hash: redis::Script::new(text).get_hash().to_owned(),
            loads: AtomicU64::new(0),
            loading: Mutex::new(()),
        }
    }

    /// Runs a script that takes the caller's memory of the time, packed at `packed` in the first argument. If the server's
    /// clock is further than that says, the script does nothing and tells the server's time: then it is run once more with
    /// that.
    pub(super) async fn run_by_memory(
        &self,
        backend: &Backend,
        key: &str,
        mut call: Vec<Argument>,
        packed: Instant,
    ) -> Result<Vec<u8>, StoreError> {
        let answer = self.run(backend, key, &call).await?;
        let Some(server_seen) = codec::read_unsure(&answer) else { return Ok(answer) };
        let later = clock::now().saturating_duration_since(packed);
        if let Some(Argument::Is(call)) = call.first_mut() {
            Call::ask_again(call, later, server_seen);
        }
        let answer = self.run(backend, key, &call).await?;
        match codec::read_unsure(&answer) {
            None => Ok(answer),
            Some(_) => Err(StoreError::failed("its clock does not go on evenly")),
        }
    }

    /// Runs it once. A server that does not have it has done nothing: then its text is sent instead of its hash.
    pub(super) async fn run(
        &self,
        backend: &Backend,
        key: &str,
        call: &[Argument],
    ) -> Result<Vec<u8>, StoreError> {
        let deadline = backend.deadline();
        let names_channel = call.iter().any(|argument| matches!(argument, Argument::Channel(_)));
        let database = match names_channel {
            true => backend.database(deadline).await.map_err(|failure| failure.to_error())?,
            false => 0,
        };
        let command = |name: &str, script: &str| {
            let mut command = redis::cmd(name);
            command.arg(script).arg(1).arg(key);
            for argument in call {
                match argument {
                    Argument::Is(bytes) => command.arg(bytes),
                    Argument::Channel(channel) => command.arg(backend.channel(database, channel)),
                };
            }
            command
        };
        let late = || StoreError::away("the script was not loaded in time");
        let loads = self.loads.load(Ordering::Relaxed);
        let mut answer = backend.ask(key, command("EVALSHA", &self.hash), deadline).await;
        if answer.as_ref().is_err_and(RedisFailure::is_no_script) {
            let loading = timeout_at(deadline.into(), self.loading.lock()).await.map_err(|_| late())?;
            answer = if self.loads.load(Ordering::Relaxed) == loads {
                let answer = backend.ask(key, command("EVAL", self.text), deadline).await;
                self.loads.fetch_add(u64::from(answer.is_ok()), Ordering::Relaxed);
                answer
            } else {
                drop(loading);
                backend.ask(key, command("EVALSHA", &self.hash), deadline).await
            };
            // Of a cluster, another server may have got it.
            if answer.as_ref().is_err_and(RedisFailure::is_no_script) {
                answer = backend.ask(key, command("EVAL", self.text), deadline).await;
            }
        }
        match answer {
            Ok(Value::BulkString(answer)) => Ok(answer),
            Ok(_) => Err(StoreError::failed(Garbled)),
            Err(failure) => Err(failure.to_error()),
        }
    }
}
