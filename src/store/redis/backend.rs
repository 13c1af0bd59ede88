//! Where calls go: to the one server, or to the server of a cluster that has the key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};

#[cfg(feature = "redis-cluster")]
use super::cluster::Cluster;
use super::endpoint::{Connecting, Ears};
use super::failure::RedisFailure;
use super::link::{Connections, Link, Links};
use crate::clock;
use crate::error::StoreError;

/// The channel of all stores with the same prefix and database; the others have the number of one
/// store.
pub(super) const TO_ALL: &str = "all";

/// Clones share the connections.
#[derive(Clone)]
pub(super) struct Backend {
    /// What the names of channels begin with.
    channels: Arc<str>,
    links: Links,
    servers: Servers,
}

#[derive(Clone)]
enum Servers {
    One(Arc<Link>, Option<Ears>),
    #[cfg(feature = "redis-cluster")]
    Cluster(Arc<Cluster>),
}

impl Backend {
    pub(super) fn new(connecting: Connecting, store_timeout: Duration, channels: &str) -> Self {
        let links = Links::new(store_timeout);
        let servers = match connecting {
            Connecting::Server { factory, ears } => {
                Servers::One(Arc::new(Link::new(None, factory, links.clone())), ears)
            }
            #[cfg(feature = "redis-cluster")]
            Connecting::Cluster(seeds) => Servers::Cluster(Arc::new(Cluster::new(seeds, links.clone()))),
        };
        Backend { channels: channels.into(), links, servers }
    }

    /// Keeps the connections open while it is polled.
    pub(super) async fn keep(self) {
        match self.servers {
            Servers::One(link, _) => link.keep().await,
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.keep().await,
        }
    }

    /// Returns a subscription to new connections.
    pub(super) fn connections(&self) -> Connections {
        self.links.connections()
    }

    /// Until when an operation that begins now must have ended.
    pub(super) fn deadline(&self) -> Instant {
        clock::after(clock::now(), self.links.store_timeout)
    }

    /// Why a call about `key` would fail now, if that is known without asking.
    pub(super) fn down(&self, key: &str) -> Option<StoreError> {
        #[cfg(not(feature = "redis-cluster"))]
        let _ = key;
        match &self.servers {
            Servers::One(link, _) => link.down(),
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.down(key),
        }
    }

    /// The name of a channel. What is published on it reaches the stores with the same prefix and
    /// database: channels of Redis know no databases, so the name has it.
    pub(super) fn channel(&self, database: i64, channel: &str) -> String {
        format!("{}{database}:{channel}", self.channels)
    }

    /// The database of the connection. Waits for a connection until `deadline` at most, as a
    /// factory may choose any.
    pub(super) async fn database(&self, deadline: Instant) -> Result<i64, RedisFailure> {
        match &self.servers {
            Servers::One(link, _) => link.database(deadline).await,
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => Ok(cluster.database()),
        }
    }

    /// Sends a command about `key` and waits for its answer, until `deadline` at most. A command
    /// that may have been executed is never sent again.
    pub(super) async fn ask(
        &self,
        key: &str,
        command: Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        #[cfg(not(feature = "redis-cluster"))]
        let _ = key;
        match &self.servers {
            Servers::One(link, _) => link.ask(command.into(), deadline).await,
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.ask(key, command.into(), deadline).await,
        }
    }

    /// The same with a command that any server can execute.
    pub(super) async fn ask_any(&self, command: Cmd, deadline: Instant) -> Result<Value, RedisFailure> {
        match &self.servers {
            Servers::One(link, _) => link.ask(command.into(), deadline).await,
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => cluster.ask_any(command.into(), deadline).await,
        }
    }

    /// Finds a server to listen to, if that is possible.
    pub(super) fn ears(&self) -> Option<Ears> {
        match &self.servers {
            Servers::One(_, ears) => ears.clone(),
            #[cfg(feature = "redis-cluster")]
            Servers::Cluster(cluster) => Some(cluster.clone().ears()),
        }
    }
}
