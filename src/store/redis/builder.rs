//! The settings of a store in Redis.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::RedisStore;
use super::backend::Backend;
use super::client::Client;
use super::endpoint::Connecting;
use super::stats::StoreTally;
use crate::config_error::ConfigError;
use crate::key::Key;
use crate::rng::dice;
use crate::tuning::STORE_TIMEOUT;

/// Sets up a [`RedisStore`].
#[must_use = "a builder does nothing until build"]
pub struct RedisStoreBuilder {
    connecting: Result<Connecting, ConfigError>,
    prefix: String,
    secret: Option<Key>,
    store_timeout: Duration,
}

impl RedisStoreBuilder {
    const LONGEST_TIMEOUT: Duration = Duration::from_secs(60);
    const LONGEST_PREFIX: usize = 64;

    pub(super) fn of(connecting: Result<Connecting, ConfigError>) -> Self {
        RedisStoreBuilder {
            connecting,
            prefix: "tollgate".into(),
            secret: None,
            store_timeout: STORE_TIMEOUT,
        }
    }

    /// Sets the beginning of all key names. Default: `tollgate`. At most 64 bytes, without braces
    /// and spaces.
    ///
    /// Processes share a limit if their layers give the same [`Key`], and their stores use the same
    /// prefix in the same database of one Redis.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets a secret that goes into the names of keys. Default: no secret.
    ///
    /// Redis has only digests of keys. Without a secret, a reader of Redis who guesses an id (a
    /// host, an e-mail address) can check whether it is there. With a secret, this check is
    /// impossible. All processes that share limits need the same secret.
    ///
    /// With a secret, a key has the same label in the errors and events of all processes. The label
    /// is the first eight digits of its name in Redis. Without a secret, each process has labels of
    /// its own.
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secret = Some(Key::new(secret));
        self
    }

    /// Sets the longest time that one call may take, which includes making a connection. Default:
    /// 250 ms. From 1 ms to 60 s.
    ///
    /// After that time the outcome of the call is unknown. The call is not repeated, and permits
    /// that it may have granted count as used. With more than a second, requests that wait do not
    /// wait for the end of a call: after a second another one asks for them.
    pub fn store_timeout(mut self, store_timeout: Duration) -> Self {
        self.store_timeout = store_timeout;
        self
    }

    /// Checks all settings and makes the store. The store connects when it is first called.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first setting that is invalid, and the remedy.
    pub fn build(self) -> Result<RedisStore, ConfigError> {
        let RedisStoreBuilder {
            connecting,
            prefix,
            secret,
            store_timeout,
        } = self;
        let connecting = connecting?;
        let lengths = 1..=RedisStoreBuilder::LONGEST_PREFIX;
        let is_unfit = |letter: char| !letter.is_ascii_graphic() || "{}".contains(letter);
        ConfigError::unless(
            lengths.contains(&prefix.len()) && !prefix.contains(is_unfit),
            "prefix",
            format_args!("{prefix:?}"),
            "1 to 64 printable ASCII characters, without braces and spaces",
        )?;
        let timeouts = Duration::from_millis(1)..=RedisStoreBuilder::LONGEST_TIMEOUT;
        ConfigError::unless(
            timeouts.contains(&store_timeout),
            "store_timeout",
            format_args!("{store_timeout:?}"),
            "from 1 ms to 60 s",
        )?;
        let decides_jointly = connecting.is_one_server();
        let (channels, tally) = (format!("{prefix}:told:"), StoreTally::new(&prefix));
        let backend = Backend::new(connecting, store_timeout, &channels, Arc::new(tally));
        let client = Client::new(backend, dice() >> 11, secret, decides_jointly);
        let client = Arc::new(client);
        #[cfg(feature = "metrics")]
        super::stats::stores::register(&client);
        Ok(RedisStore {
            prefix,
            client,
            tasks: Mutex::default(),
        })
    }
}

impl std::fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .field("store_timeout", &self.store_timeout)
            .finish_non_exhaustive()
    }
}
