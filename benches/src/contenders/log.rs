//! A log of all tries in a ZSET, in a transaction, as in `rolling-rate-limiter` (Node): it removes
//! old entries, adds the try and reads all entries. A refused try stays in the log. A refused
//! caller waits until the log that it read has room.

use std::time::{Duration, SystemTime};

use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use super::{Failure, Gate, Limit, connect};

/// The state of one process.
#[derive(Clone)]
pub(crate) struct Log {
    redis: MultiplexedConnection,
    limit: Limit,
}

impl Log {
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        Ok(Log {
            redis: connect(url).await?,
            limit,
        })
    }
}

impl Gate for Log {
    async fn pass(&self) -> Result<(), Failure> {
        let (window, most) = (
            self.limit.window.as_micros() as f64,
            self.limit.count as usize,
        );
        let mut redis = self.redis.clone();
        loop {
            let now = SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)?
                .as_micros() as f64;
            let member = format!("{:016x}", fastrand::u64(..));
            let mut transaction = redis::pipe();
            transaction
                .atomic()
                .zrembyscore("rate:log", 0, now - window)
                .ignore();
            transaction.zadd("rate:log", member, now).ignore();
            transaction.zrange_withscores("rate:log", 0, -1);
            transaction
                .expire("rate:log", self.limit.window.as_secs().max(1) as i64)
                .ignore();
            let (entries,): (Vec<(String, f64)>,) = transaction.query_async(&mut redis).await?;
            if entries.len() <= most {
                return Ok(());
            }
            // When this entry has expired, there is room for another.
            let (_, blocking) = entries[entries.len() - most];
            let wait = (blocking + window - now).max(0.0);
            sleep(Duration::from_micros(wait as u64)).await;
        }
    }
}
