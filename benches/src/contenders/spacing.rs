//! One call at a time: `SET key NX PX interval`. One that finds it set asks `PTTL` and sleeps for that long.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use super::{Failure, Gate, Limit, connect};

/// One process's way to it.
#[derive(Clone)]
pub(crate) struct Spacing {
    redis: MultiplexedConnection,
    interval: u64,
}

impl Spacing {
    /// The interval is in whole milliseconds, as the lock is: not for more than 1000 a second.
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        let interval = limit.window.as_millis() as u64 / u64::from(limit.count);
        Ok(Spacing { redis: connect(url).await?, interval: interval.max(1) })
    }
}

impl Gate for Spacing {
    async fn pass(&self) -> Result<(), Failure> {
        let mut redis = self.redis.clone();
        loop {
            let mut set = redis::cmd("SET");
            set.arg("rate:lock").arg(1).arg("NX").arg("PX").arg(self.interval);
            if set.query_async::<Option<String>>(&mut redis).await?.is_some() {
                return Ok(());
            }
            let left: i64 = redis::cmd("PTTL").arg("rate:lock").query_async(&mut redis).await?;
            // It is gone already, or has less than a millisecond: at once again.
            if left > 0 {
                sleep(Duration::from_millis(left.unsigned_abs())).await;
            }
        }
    }
}
