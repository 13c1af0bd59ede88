//! One call at a time: `SET key NX PX interval`. A caller that finds the key set asks `PTTL` and
//! sleeps for that time.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use super::{Failure, Gate, Limit, connect};

/// The state of one process.
#[derive(Clone)]
pub(crate) struct Spacing {
    redis: MultiplexedConnection,
    interval: u64,
}

impl Spacing {
    /// The interval is in whole milliseconds, as the lock is: the limit is at most 1000 a second.
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        let interval = limit.window.as_millis() as u64 / u64::from(limit.count);
        Ok(Spacing {
            redis: connect(url).await?,
            interval: interval.max(1),
        })
    }
}

impl Gate for Spacing {
    async fn pass(&self) -> Result<(), Failure> {
        let mut redis = self.redis.clone();
        loop {
            let mut set = redis::cmd("SET");
            set.arg("rate:lock")
                .arg(1)
                .arg("NX")
                .arg("PX")
                .arg(self.interval);
            if set
                .query_async::<Option<String>>(&mut redis)
                .await?
                .is_some()
            {
                return Ok(());
            }
            let left: i64 = redis::cmd("PTTL")
                .arg("rate:lock")
                .query_async(&mut redis)
                .await?;
            // The key has expired, or has less than a millisecond left: the next try is at once.
            if left > 0 {
                sleep(Duration::from_millis(left.unsigned_abs())).await;
            }
        }
    }
}
