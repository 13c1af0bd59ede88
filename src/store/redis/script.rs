//! The scripts. `script/seats.lua` decides about calls in flight, `script/register.lua` about registers; the other, about rates, is in pieces: `script/call.lua` reads the call, `short.lua` decides what most calls ask for, and the others
//! decide everything: one file for each rule, the twin of its file in `src/limit`, with `main.lua` in the end.

use redis::Value;
use tokio::sync::Mutex;
use tokio::time::timeout_at;

use super::link::{Link, RedisFailure};
use super::wire::Garbled;
use crate::error::StoreError;

/// About calls in flight.
pub(super) const SEATS: &str = include_str!("script/seats.lua");

/// About registers.
pub(super) const REGISTER: &str = include_str!("script/register.lua");

/// About rates.
pub(super) const TEXT: &str = concat!(
    include_str!("script/call.lua"),
    include_str!("script/short.lua"),
    include_str!("script/state.lua"),
    include_str!("script/window.lua"),
    include_str!("script/bucket.lua"),
    include_str!("script/fixed.lua"),
    include_str!("script/ledger.lua"),
    include_str!("script/main.lua"),
);

pub(super) struct Script {
    text: &'static str,
    hash: String,
    /// How often the text was sent. Held by who does: the others then find the script there.
    loads: Mutex<u64>,
}

impl Script {
    pub(super) fn new(text: &'static str) -> Self {
        Script { text, hash: redis::Script::new(text).get_hash().to_owned(), loads: Mutex::new(0) }
    }

    /// Runs it once. A server that does not have it has done nothing: then its text is sent instead of its hash.
    pub(super) async fn run(&self, link: &Link, key: &str, call: &[&[u8]]) -> Result<Vec<u8>, StoreError> {
        let deadline = link.deadline();
        let command = |name: &str, script: &str| {
            let mut command = redis::cmd(name);
            command.arg(script).arg(1).arg(key).arg(call);
            command
        };
        let late = || StoreError::away("the script was not loaded in time");
        let loads = *timeout_at(deadline.into(), self.loads.lock()).await.map_err(|_| late())?;
        let mut answer = link.ask(command("EVALSHA", &self.hash), deadline).await;
        if answer.as_ref().is_err_and(RedisFailure::is_no_script) {
            let mut now = timeout_at(deadline.into(), self.loads.lock()).await.map_err(|_| late())?;
            answer = if *now == loads {
                let answer = link.ask(command("EVAL", self.text), deadline).await;
                *now += u64::from(answer.is_ok());
                answer
            } else {
                drop(now);
                link.ask(command("EVALSHA", &self.hash), deadline).await
            };
            // Of a cluster, another server may have got it.
            if answer.as_ref().is_err_and(RedisFailure::is_no_script) {
                answer = link.ask(command("EVAL", self.text), deadline).await;
            }
        }
        match answer {
            Ok(Value::BulkString(answer)) => Ok(answer),
            Ok(_) => Err(StoreError::failed(Garbled)),
            Err(failure) => Err(failure.to_error()),
        }
    }
}
