//! Where Redis is: one server, a master that Sentinels know, or a cluster.

use std::future::Future;
use std::pin::Pin;
#[cfg(feature = "redis-cluster")]
use std::sync::atomic::{AtomicUsize, Ordering};
#[cfg(feature = "redis-cluster")]
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{Client, ConnectionInfo, IntoConnectionInfo, RedisError, RedisResult};
#[cfg(feature = "redis-sentinel")]
use redis::{
    ConnectionAddr, TlsMode,
    sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType},
};

#[cfg(feature = "redis-cluster")]
use super::cluster;
use super::link::{self, Factory};
use crate::error::ConfigError;

/// How to get to Redis.
pub(super) struct Connecting {
    pub(super) factory: Factory,
    /// Where to listen to what other processes do; a connection of the user's is for commands.
    pub(super) ears: Option<Ears>,
}

/// Tells which server to listen to, each time anew.
pub(super) type Ears =
    Box<dyn Fn() -> Pin<Box<dyn Future<Output = RedisResult<Client>> + Send>> + Send + Sync>;

/// One server.
pub(super) fn server(url: &str) -> Result<Connecting, ConfigError> {
    let client = Client::open(info(url)?).map_err(|error| no_url(&error))?;
    let heard = client.clone();
    let ears: Ears = Box::new(move || Box::pin(std::future::ready(Ok(heard.clone()))));
    Ok(Connecting { factory: link::factory_of(client), ears: Some(ears) })
}

/// The master that the Sentinels at `sentinels` know by the name that is the host of `master`.
#[cfg(feature = "redis-sentinel")]
pub(super) fn sentinel<S: AsRef<str>>(
    sentinels: impl IntoIterator<Item = S>,
    master: &str,
) -> Result<Connecting, ConfigError> {
    let sentinels: Vec<_> = sentinels.into_iter().map(|url| info(url.as_ref())).collect::<Result<_, _>>()?;
    let master = info(master)?;
    let (name, tls) = match master.addr() {
        ConnectionAddr::Tcp(name, _) => (name.clone(), None),
        ConnectionAddr::TcpTls { host, insecure, .. } => {
            (host.clone(), Some(if *insecure { TlsMode::Insecure } else { TlsMode::Secure }))
        }
        _ => (String::new(), None),
    };
    if sentinels.is_empty() || name.is_empty() {
        let reason = "the URLs of Sentinels, and redis://name-of-the-master, are needed";
        return Err(ConfigError::RedisUrl { reason: reason.into() });
    }
    let node = SentinelNodeConnectionInfo::default()
        .set_redis_connection_info(master.redis_settings().clone())
        .set_tcp_settings(master.tcp_settings().clone());
    let node = tls.map_or(node.clone(), |tls| node.set_tls_mode(tls));
    let find = move || {
        let known = SentinelClient::build(
            sentinels.clone(),
            name.clone(),
            Some(node.clone()),
            SentinelServerType::Master,
        );
        // Asked each time: after a failover it is another one.
        async move { known?.async_get_client().await }
    };
    let found = find.clone();
    let factory = Box::new(move || {
        let finding = find();
        Box::pin(async move { link::connect(&finding.await?).await }) as _
    });
    Ok(Connecting { factory, ears: Some(Box::new(move || Box::pin(found()))) })
}

/// The cluster that the servers at `nodes` belong to.
#[cfg(feature = "redis-cluster")]
pub(super) fn cluster<S: AsRef<str>>(nodes: impl IntoIterator<Item = S>) -> Result<Connecting, ConfigError> {
    let nodes: Vec<_> = nodes.into_iter().map(|url| info(url.as_ref())).collect::<Result<_, _>>()?;
    let clients: Vec<_> = nodes
        .iter()
        .cloned()
        .map(Client::open)
        .collect::<RedisResult<_>>()
        .map_err(|error| no_url(&error))?;
    let client = redis::cluster::ClusterClientBuilder::new(nodes)
        // Never: what was sent may have been done. What was surely not done is asked again in `cluster`.
        .retries(0)
        .connection_timeout(Duration::from_secs(1))
        .tcp_settings(tcp())
        .build()
        .map_err(|error| no_url(&error))?;
    let factory = Box::new(move || {
        let client = client.clone();
        Box::pin(async move { Ok(cluster::connection(client.get_async_connection().await?)) }) as _
    });
    // What one server is told, all are; one that is away is passed over at the next try.
    let turn = AtomicUsize::new(0);
    let ears: Ears = Box::new(move || {
        let turn = turn.fetch_add(1, Ordering::Relaxed) % clients.len();
        Box::pin(std::future::ready(Ok(clients[turn].clone())))
    });
    Ok(Connecting { factory, ears: Some(ears) })
}

/// Without it, a call may wait for the acknowledgement of the one before.
fn tcp() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

/// The text of a URL may hold a password, so no error shows it.
fn info(url: &str) -> Result<ConnectionInfo, ConfigError> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    if matches!(scheme, Some("rediss" | "valkeys")) {
        tls_is_there()?;
    }
    let info = url.into_connection_info().map_err(|error| no_url(&error))?;
    Ok(info.set_tcp_settings(tcp()))
}

/// rustls takes what encrypts from the process, and panics where there is none.
#[cfg(feature = "redis-tls-rustls")]
fn tls_is_there() -> Result<(), ConfigError> {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have been faster: then there is one.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    Ok(())
}

#[cfg(not(feature = "redis-tls-rustls"))]
fn tls_is_there() -> Result<(), ConfigError> {
    let reason = "rediss:// needs the feature redis-tls-rustls of tollgate";
    Err(ConfigError::RedisUrl { reason: reason.into() })
}

fn no_url(error: &RedisError) -> ConfigError {
    ConfigError::RedisUrl { reason: error.to_string() }
}

#[cfg(all(test, not(feature = "redis-tls-rustls")))]
mod tests {
    use super::*;

    #[test]
    fn tls_that_is_not_there_is_an_error_that_names_the_feature() {
        for url in ["rediss://:geheim@127.0.0.1/", "valkeys://127.0.0.1/"] {
            let error = server(url).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("redis-tls-rustls") && !error.contains("geheim"), "{error}");
        }
    }
}
