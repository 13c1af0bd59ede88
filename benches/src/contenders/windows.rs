//! Two sliding windows as two ZSETs in one script, as widely blogged: a second, and a minute of
//! sixty times as many. This is the careful variant: it checks both windows before it writes to
//! either, and does not log a refusal. A refused caller gets the time at which the oldest entry
//! leaves, and waits for it.

use std::time::Duration;

use redis::Script;
use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use super::{Failure, Gate, Limit, connect};

/// KEYS: a ZSET for each window. ARGV: the member, then for each window its limit and its length in
/// microseconds.
///
/// Returns the wait in microseconds; 0 if the call is granted.
const SCRIPT: &str = r#"
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local wait = 0
for i, key in ipairs(KEYS) do
  local limit, window = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  redis.call('ZREMRANGEBYSCORE', key, 0, now - window)
  if redis.call('ZCARD', key) >= limit then
    local oldest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    wait = math.max(wait, oldest[2] + window - now)
  end
end
if wait > 0 then return wait end
for i, key in ipairs(KEYS) do
  redis.call('ZADD', key, now, ARGV[1])
  redis.call('PEXPIRE', key, math.ceil(ARGV[2 * i + 1] / 1000))
end
return 0
"#;

/// The state of one process.
#[derive(Clone)]
pub(crate) struct Windows {
    redis: MultiplexedConnection,
    script: Script,
    limit: Limit,
}

impl Windows {
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        Ok(Windows {
            redis: connect(url).await?,
            script: Script::new(SCRIPT),
            limit,
        })
    }
}

impl Gate for Windows {
    async fn pass(&self) -> Result<(), Failure> {
        let Limit { count, window } = self.limit;
        let mut redis = self.redis.clone();
        loop {
            let mut call = self.script.key("rate:short");
            call.key("rate:long")
                .arg(format!("{:016x}", fastrand::u64(..)));
            call.arg(count).arg(window.as_micros() as u64);
            call.arg(60 * u64::from(count))
                .arg(60 * window.as_micros() as u64);
            let wait: u64 = call.invoke_async(&mut redis).await?;
            if wait == 0 {
                return Ok(());
            }
            sleep(Duration::from_micros(wait)).await;
        }
    }
}
