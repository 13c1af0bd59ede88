//! The endpoint: one server, a master that Sentinels know, or a cluster.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use redis::ConnectionAddr;
use redis::io::tcp::TcpSettings;
use redis::{Client, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};
#[cfg(feature = "redis-sentinel")]
use redis::{
    TlsMode,
    sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType},
};

use super::cluster::{Address, Seeds};
use super::connection::{self, Factory};
#[cfg(feature = "redis-tls-rustls")]
use super::tls;
use crate::config_error::ConfigError;
use crate::error::StoreError;

/// How to connect to Redis.
#[derive(Clone)]
pub(super) enum Connecting {
    /// One server at a time.
    Server {
        /// Makes connections for commands.
        factory: Factory,
        /// Finds the server for a subscription. `None` if the user makes the connections, because
        /// these are for commands.
        find_server: Option<FindServer>,
    },
    /// A cluster.
    Cluster(Arc<Seeds>),
}

impl Connecting {
    /// Returns whether all keys are on one server, as far as is known.
    pub(super) fn is_one_server(&self) -> bool {
        matches!(self, Connecting::Server { .. })
    }
}

/// Finds the server for a subscription, each time anew.
pub(super) type FindServer = Arc<
    dyn Fn() -> Pin<Box<dyn Future<Output = Result<PubSubServer, StoreError>> + Send>>
        + Send
        + Sync,
>;

/// A server for a subscription.
pub(super) struct PubSubServer {
    pub(super) client: Client,
    /// Completes when the server is found to be unreachable. It may never complete.
    pub(super) away: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl PubSubServer {
    fn to(client: Client) -> Self {
        PubSubServer {
            client,
            away: Box::pin(std::future::pending()),
        }
    }
}

/// Returns how to connect to the server at `url`.
pub(super) fn server(url: &str) -> Result<Connecting, ConfigError> {
    let client = Client::open(info(url)?).map_err(refused)?;
    let pubsub = client.clone();
    let find_server: FindServer =
        Arc::new(move || Box::pin(std::future::ready(Ok(PubSubServer::to(pubsub.clone())))));
    Ok(Connecting::Server {
        factory: connection::factory_of(client),
        find_server: Some(find_server),
    })
}

/// Returns how to connect to a master. The Sentinels at `sentinels` know it by the name that is the
/// host of `master`.
#[cfg(feature = "redis-sentinel")]
pub(super) fn sentinel<S: AsRef<str>>(
    sentinels: impl IntoIterator<Item = S>,
    master: &str,
) -> Result<Connecting, ConfigError> {
    let sentinels: Vec<_> = sentinels
        .into_iter()
        .map(|url| info(url.as_ref()))
        .collect::<Result<_, _>>()?;
    let master = info(master)?;
    let (name, tls) = match master.addr() {
        ConnectionAddr::Tcp(name, _) => (name.clone(), None),
        ConnectionAddr::TcpTls { host, insecure, .. } => (
            host.clone(),
            Some(if *insecure {
                TlsMode::Insecure
            } else {
                TlsMode::Secure
            }),
        ),
        _ => (String::new(), None),
    };
    if sentinels.is_empty() || name.is_empty() {
        let reason = "the URLs of Sentinels, and redis://name-of-the-master, are needed";
        return Err(refused(reason));
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
        // Each call requests the master from the Sentinels anew, because a failover changes it.
        async move { known?.async_get_client().await }
    };
    let found = find.clone();
    let factory = Arc::new(move || {
        let finding = find();
        Box::pin(async move { connection::connect(&finding.await?).await }) as _
    });
    let find_server: FindServer = Arc::new(move || {
        let finding = found();
        Box::pin(async move { Ok(PubSubServer::to(finding.await.map_err(StoreError::away)?)) })
    });
    Ok(Connecting::Server {
        factory,
        find_server: Some(find_server),
    })
}

/// Returns how to connect to the cluster of the servers at `nodes`.
pub(super) fn cluster<S: AsRef<str>>(
    nodes: impl IntoIterator<Item = S>,
) -> Result<Connecting, ConfigError> {
    let nodes: Vec<_> = nodes
        .into_iter()
        .map(|url| info(url.as_ref()))
        .collect::<Result<_, _>>()?;
    let Some(settings) = nodes.first().cloned() else {
        return Err(refused(
            "a cluster needs the URL of at least one of its servers",
        ));
    };
    if !nodes.iter().all(|node| is_alike(node, &settings)) {
        return Err(refused(
            "all URLs of a cluster need the same scheme, user, password and database",
        ));
    }
    let servers: Option<Vec<_>> = nodes.iter().map(address_of).collect();
    let servers = servers.ok_or_else(|| refused("a cluster needs hosts and ports, not sockets"))?;
    Ok(Connecting::Cluster(Arc::new(Seeds { servers, settings })))
}

/// Returns the host and the port of a server. `None` if it is a socket.
fn address_of(node: &ConnectionInfo) -> Option<Address> {
    match node.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some(Address {
                host: host.as_str().into(),
                port: *port,
            })
        }
        _ => None,
    }
}

/// Returns whether two servers need the same settings, apart from their addresses.
fn is_alike(one: &ConnectionInfo, other: &ConnectionInfo) -> bool {
    let (ones, others) = (one.redis_settings(), other.redis_settings());
    is_insecure_tls(one) == is_insecure_tls(other)
        && ones.username() == others.username()
        && ones.password() == others.password()
        && ones.db() == others.db()
}

/// Returns whether TLS checks no certificates. `None` without TLS.
fn is_insecure_tls(info: &ConnectionInfo) -> Option<bool> {
    match info.addr() {
        ConnectionAddr::TcpTls { insecure, .. } => Some(*insecure),
        _ => None,
    }
}

/// Returns the settings of TCP. Without `nodelay`, a call may wait for the acknowledgement of the
/// call before.
fn tcp() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

/// Reads a URL. Its text may have a password, so no error shows it.
///
/// The store always speaks RESP2. RESP3 logs in with `HELLO`, and a server that does not know the command repeats the
/// password in its reply. The errors of the store would show that.
fn info(url: &str) -> Result<ConnectionInfo, ConfigError> {
    // As the parser of URLs reads it.
    let scheme = url.trim_start().split_once("://");
    let scheme = scheme.map(|(scheme, _)| scheme.to_ascii_lowercase());
    if matches!(scheme.as_deref(), Some("rediss" | "valkeys")) {
        tls_is_there()?;
    }
    let info = url.into_connection_info().map_err(refused)?;
    let settings = info.redis_settings().clone();
    Ok(info
        .set_tcp_settings(tcp())
        .set_redis_settings(settings.set_protocol(ProtocolVersion::RESP2)))
}

#[cfg(feature = "redis-tls-rustls")]
fn tls_is_there() -> Result<(), ConfigError> {
    // rustls would panic later, when the store connects.
    if tls::has_provider() {
        Ok(())
    } else {
        Err(ConfigError::new(
            "rediss:// needs a TLS provider, and this process has none or a choice of two: write \
             rustls::crypto::ring::default_provider().install_default() at the start of main, or aws_lc_rs instead of \
             ring, and add rustls with that feature to Cargo.toml",
        ))
    }
}

#[cfg(not(feature = "redis-tls-rustls"))]
fn tls_is_there() -> Result<(), ConfigError> {
    Err(refused(
        "rediss:// needs the feature redis-tls-rustls of tollgate",
    ))
}

/// The error never contains the URL, because a URL may contain a password.
fn refused(reason: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!(
        "the URL of Redis: {reason}; write redis://[user:password@]host[:port]/[database], such as \
         redis://127.0.0.1:6379/, and rediss:// for TLS"
    ))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// A server that knows no `HELLO`, as its operator may have renamed it, replies with all of the command.
    #[tokio::test]
    async fn replies_to_the_login_show_no_password() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let sent = client.read(&mut [0; 1000]).unwrap();
            assert!(sent > 0);
            let reply = "-ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' 'geheim'\r\n";
            client.write_all(reply.as_bytes()).unwrap();
            // The next commands were sent along.
            client.write_all(b"+OK\r\n+OK\r\n").unwrap();
            let _ = client.read(&mut [0; 1000]);
        });
        let url = format!("redis://:geheim@127.0.0.1:{port}/?protocol=resp3");
        let Ok(Connecting::Server { factory, .. }) = server(&url) else {
            panic!("the URL is right");
        };
        let error = factory().await.map(|_| ()).unwrap_err();
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("geheim"), "{shown}");
    }

    #[cfg(not(feature = "redis-tls-rustls"))]
    #[test]
    fn missing_tls_is_an_error_naming_the_feature() {
        for url in [
            "rediss://:geheim@127.0.0.1/",
            "valkeys://127.0.0.1/",
            " REDISS://127.0.0.1/",
        ] {
            let error = server(url).map(|_| ()).unwrap_err().to_string();
            assert!(
                error.contains("redis-tls-rustls") && !error.contains("geheim"),
                "{error}"
            );
        }
    }
}
