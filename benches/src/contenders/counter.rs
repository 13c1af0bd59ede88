//! A counter for each second, as in the documentation of Redis under `INCR` ("rate limiter 1"):
//! `INCR` and `EXPIRE` in a transaction, with the second in the name of the key. A refused caller
//! waits for the next second.

use std::time::{Duration, SystemTime};

use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use super::{Failure, Gate, Limit, connect};

/// The state of one process.
#[derive(Clone)]
pub(crate) struct Counter {
    redis: MultiplexedConnection,
    limit: Limit,
}

impl Counter {
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        Ok(Counter {
            redis: connect(url).await?,
            limit,
        })
    }
}

impl Gate for Counter {
    async fn pass(&self) -> Result<(), Failure> {
        let window = self.limit.window.as_nanos();
        let mut redis = self.redis.clone();
        loop {
            let now = SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)?
                .as_nanos();
            let key = format!("rate:{}", now / window);
            let mut transaction = redis::pipe();
            transaction.atomic().incr(&key, 1).expire(&key, 10).ignore();
            let (count,): (u64,) = transaction.query_async(&mut redis).await?;
            if count <= u64::from(self.limit.count) {
                return Ok(());
            }
            let left = window - now % window;
            sleep(Duration::from_nanos(u64::try_from(left)?)).await;
        }
    }
}
