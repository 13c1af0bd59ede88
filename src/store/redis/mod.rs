//! Counts shared by many processes.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use redis::RedisError;
use redis::aio::ConnectionLike;

use super::{Answer, Ask, Lease, Store, StoreError, Terms, Unused, Usage};
use crate::error::{BoxError, ConfigError};
use crate::key::Key;

/// Counts permits in Redis, for many processes.
pub struct RedisStore {}

impl RedisStore {
    /// A store at `url`.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        RedisStore::builder(url).build()
    }

    /// A builder of a store at `url`.
    pub fn builder(_url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder {}
    }

    /// A builder of a store over a connection of your own.
    pub fn with_connection<C>(_connection: C) -> RedisStoreBuilder
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        RedisStoreBuilder {}
    }

    /// A builder of a store over connections that `factory` makes.
    pub fn with_factory<F, Fut, C>(_factory: F) -> RedisStoreBuilder
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<C, RedisError>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        RedisStoreBuilder {}
    }

    /// Connects now.
    pub async fn connect(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Sets up a [`RedisStore`].
pub struct RedisStoreBuilder {}

impl RedisStoreBuilder {
    /// What the names of all keys begin with. Default: `tollgate`.
    pub fn prefix(self, _prefix: impl Into<String>) -> Self {
        self
    }

    /// A secret with which keys are hashed before they are sent. Default: none.
    pub fn secret(self, _secret: impl AsRef<[u8]>) -> Self {
        self
    }

    /// The longest that a call to Redis may take. Default: 250 ms.
    pub fn store_timeout(self, _store_timeout: Duration) -> Self {
        self
    }

    /// Checks everything and makes the store.
    pub fn build(self) -> Result<RedisStore, ConfigError> {
        Ok(RedisStore {})
    }
}

fn away<T>() -> Answer<T> {
    let error: Arc<dyn std::error::Error + Send + Sync> = Arc::from(BoxError::from("not built yet"));
    Answer::Now(Err(StoreError::Away(error)))
}

impl Store for RedisStore {
    fn lease(&self, _: Ask<'_>) -> Answer<Lease> {
        away()
    }

    fn give_back(&self, _: Key, _: &Arc<Terms>, _: &[Unused]) {}

    fn peek(&self, _: Key, _: &Arc<Terms>) -> Answer<Usage> {
        away()
    }
}
