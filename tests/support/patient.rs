//! Stores in Redis with a generous timeout, for tests that judge what Redis replies and not how
//! soon: a machine under test may stall for longer than the default `store_timeout`.

use std::sync::Arc;
use std::time::Duration;

use tollgate::store::{RedisStore, RedisStoreBuilder};

/// Longer than any stall seen on a test machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn builder(url: &str) -> RedisStoreBuilder {
    RedisStore::builder(url).store_timeout(TIMEOUT)
}

pub(crate) fn store(url: &str) -> Arc<RedisStore> {
    of(RedisStore::builder(url))
}

pub(crate) fn of(builder: RedisStoreBuilder) -> Arc<RedisStore> {
    Arc::new(builder.store_timeout(TIMEOUT).build().unwrap())
}
