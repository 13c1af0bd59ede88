//! GCRA in a script, with a burst as large as the limit: what `redis_rate` (Go), `redis-cell` and
//! many others run. The script has the commands of the script of `redis_rate`. A refused caller
//! waits for the `retry_after` that the script returned, and tries again.

use std::time::Duration;

use redis::Script;
use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use super::{Failure, Gate, Limit, connect};

/// KEYS: the key. ARGV: burst, rate, period in seconds, cost.
///
/// Returns whether the call is allowed, what remains, and in seconds: when to try again, and when
/// the whole burst is free again.
const SCRIPT: &str = r#"
local burst, rate, period, cost = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local interval = period / rate
local increment = interval * cost
local offset = interval * burst
local time = redis.call('TIME')
local now = (time[1] - 1483228800) + time[2] / 1000000
local full = redis.call('GET', KEYS[1])
if full then full = tonumber(full) else full = now end
full = math.max(full, now)
local next_full = full + increment
local ahead = now - (next_full - offset)
local remaining = ahead / interval
if remaining < 0 then
  return {0, 0, tostring(-ahead), tostring(full - now)}
end
local reset_after = next_full - now
if reset_after > 0 then
  redis.call('SET', KEYS[1], next_full, 'EX', math.ceil(reset_after))
end
return {cost, remaining, tostring(-1), tostring(reset_after)}
"#;

/// The state of one process.
#[derive(Clone)]
pub(crate) struct Gcra {
    redis: MultiplexedConnection,
    script: Script,
    limit: Limit,
}

impl Gcra {
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        Ok(Gcra {
            redis: connect(url).await?,
            script: Script::new(SCRIPT),
            limit,
        })
    }
}

impl Gate for Gcra {
    async fn pass(&self) -> Result<(), Failure> {
        let Limit { count, window } = self.limit;
        let mut redis = self.redis.clone();
        loop {
            let mut call = self.script.key("rate:gcra");
            call.arg(count).arg(count).arg(window.as_secs_f64()).arg(1);
            let (allowed, _, retry_after, _): (u32, u32, f64, f64) =
                call.invoke_async(&mut redis).await?;
            if allowed > 0 {
                return Ok(());
            }
            sleep(Duration::try_from_secs_f64(retry_after)?).await;
        }
    }
}
