//! tollgate itself: the gate of a layer over a `RedisStore`, with the default settings.

use std::sync::Arc;

use tollgate::store::RedisStore;
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

use super::{Failure, Gate, Limit};

/// The gate, and the key it is passed with.
#[derive(Clone)]
pub(crate) struct Tollgate {
    limiter: Limiter,
    key: Key,
}

impl Tollgate {
    /// Connects to the server at once.
    pub(crate) async fn new(url: &str, limit: Limit) -> Result<Self, Failure> {
        let store = RedisStore::new(url)?;
        store.connect().await?;
        let quota = Quota::new(limit.count, limit.window);
        let limiter = RateLimitLayer::builder(quota)
            .store(Arc::new(store))
            .build()?
            .limiter();
        limiter.peek(Key::ALL).await?;
        Ok(Tollgate {
            limiter,
            key: Key::ALL,
        })
    }
}

impl Gate for Tollgate {
    async fn pass(&self) -> Result<(), Failure> {
        drop(self.limiter.acquire(self.key).await?);
        Ok(())
    }

    fn keyed(&self, number: u64) -> Self {
        Tollgate {
            limiter: self.limiter.clone(),
            key: Key::new(number.to_le_bytes()),
        }
    }
}
