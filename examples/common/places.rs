//! The Redis and the service that an example uses: started by the example, or given by the user.

use redis_server::RedisServer;
use tollgate::error::BoxError;
use tollgate::store::RedisStore;
use upstream::Upstream;

use super::options::{Options, Usage};

/// The Redis and the service. Servers that the example started are stopped when this is dropped.
#[derive(Debug)]
pub(crate) struct Places {
    /// The URL of the Redis.
    pub(crate) redis: String,
    /// The URL of the service.
    pub(crate) api: String,
    /// The Redis, if the example started it.
    pub(crate) server: Option<RedisServer>,
    /// The service, if the example started it.
    pub(crate) upstream: Option<Upstream>,
}

impl Places {
    /// Reads `--redis` and `--api`; starts nothing yet.
    pub(crate) fn given(options: &mut Options) -> Result<Self, Usage> {
        let (redis, api) = (options.text("--redis", SPAWN), options.text("--api", SPAWN));
        if redis != SPAWN {
            RedisStore::new(&redis).map_err(|error| {
                Usage::new(format!("--redis takes a URL or {SPAWN:?}: {error}"))
            })?;
        }
        if api != SPAWN && reqwest::Url::parse(&api).is_err() {
            return Err(Usage::new(format!(
                "--api takes a URL or {SPAWN:?}, not {api:?}"
            )));
        }
        Ok(Places {
            redis,
            api,
            server: None,
            upstream: None,
        })
    }

    /// Starts the servers that were not given. A given Redis must respond: without it there is
    /// nothing to show.
    pub(crate) async fn start(
        &mut self,
        upstream: impl FnOnce() -> Upstream,
    ) -> Result<(), BoxError> {
        if self.redis == SPAWN {
            let server = RedisServer::start()?;
            self.redis = server.url();
            self.server = Some(server);
        }
        RedisStore::builder(&self.redis)
            .store_timeout(std::time::Duration::from_secs(2)) // a machine that starts much is busy
            .build()?
            .connect()
            .await?;
        if self.api == SPAWN {
            let upstream = upstream();
            self.api = upstream.url();
            self.upstream = Some(upstream);
        }
        Ok(())
    }

    /// Returns how many scripts the Redis of this example has run. `None` if the Redis was given.
    pub(crate) fn script_calls(&self) -> Option<u64> {
        let info: String = self.server.as_ref()?.command(&["INFO", "commandstats"]);
        let calls = |line: &str| {
            let numbers = line.strip_prefix("cmdstat_eval")?.split_once(":calls=")?.1;
            numbers.split(',').next()?.parse::<u64>().ok()
        };
        Some(info.lines().filter_map(calls).sum())
    }

    /// Returns the words that pass the URLs to a child process.
    pub(crate) fn words(&self) -> Vec<String> {
        ["--redis", &self.redis, "--api", &self.api]
            .map(str::to_owned)
            .to_vec()
    }

    /// Checks that both URLs are given: a child process uses the servers of its parent and starts
    /// none.
    pub(crate) fn must_be_given(&self) -> Result<(), Usage> {
        if self.redis == SPAWN || self.api == SPAWN {
            return Err(Usage::new(
                "a process with a --role needs --redis <url> and --api <url>",
            ));
        }
        Ok(())
    }
}

const SPAWN: &str = "spawn";
