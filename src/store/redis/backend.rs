//! The servers: one server, or the servers of a cluster. In a cluster, each call goes to the server
//! that has its key.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value};

use super::cluster::Cluster;
use super::connection::ServerRequest;
use super::endpoint::{Connecting, FindServer};
use super::failure::RedisFailure;
use super::link::{Link, Links};
use super::stats::StoreTally;
use crate::error::StoreError;

/// The channel of all stores with the same prefix and database. The channel of one store has its
/// number instead.
pub(super) const TO_ALL: &str = "all";

/// The connections to the servers. Clones share them.
#[derive(Clone)]
pub(super) struct Backend {
    /// The beginning of all channel names.
    channels: Arc<str>,
    /// What the connections share.
    pub(super) links: Links,
    servers: Servers,
}

#[derive(Clone)]
enum Servers {
    One(Arc<Link>, Option<FindServer>),
    Cluster(Arc<Cluster>),
}

impl Backend {
    pub(super) fn new(
        connecting: Connecting,
        store_timeout: Duration,
        channels: &str,
        tally: Arc<StoreTally>,
    ) -> Self {
        let links = Links::new(store_timeout, tally);
        let servers = match connecting {
            Connecting::Server {
                factory,
                find_server,
            } => Servers::One(
                Arc::new(Link::new(None, factory, links.clone())),
                find_server,
            ),
            Connecting::Cluster(seeds) => {
                Servers::Cluster(Arc::new(Cluster::new(seeds, links.clone())))
            }
        };
        Backend {
            channels: channels.into(),
            links,
            servers,
        }
    }

    /// Keeps the connections open while it is polled.
    pub(super) async fn keep(self) {
        match self.servers {
            Servers::One(link, _) => link.keep().await,
            Servers::Cluster(cluster) => cluster.keep().await,
        }
    }

    /// Returns whether all connections are there. `None` if none was tried.
    pub(super) fn is_up(&self) -> Option<bool> {
        match &self.servers {
            Servers::One(link, _) => link.is_up(),
            Servers::Cluster(cluster) => cluster.is_up(),
        }
    }

    /// Returns why a call about `key` would fail now, if that is known without a call.
    pub(super) fn down(&self, key: &str) -> Option<StoreError> {
        match &self.servers {
            Servers::One(link, _) => link.down(),
            Servers::Cluster(cluster) => cluster.down(key),
        }
    }

    /// Returns the name of a channel of the stores with the same prefix and database. Channels of
    /// Redis belong to no database, so the name states it.
    pub(super) fn channel(&self, database: i64, channel: &str) -> String {
        format!("{}{database}:{channel}", self.channels)
    }

    /// Returns the database of the connection, which a factory may choose. Waits for a connection
    /// until `deadline` at most.
    pub(super) async fn database(&self, deadline: Instant) -> Result<i64, RedisFailure> {
        match &self.servers {
            Servers::One(link, _) => link.database(deadline).await,
            Servers::Cluster(cluster) => Ok(cluster.database()),
        }
    }

    /// Sends a command about `key` and waits for its reply, until `deadline` at most. A command
    /// that may have been executed is never sent again.
    pub(super) async fn send(
        &self,
        key: &str,
        command: Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        match &self.servers {
            Servers::One(link, _) => link.send(ServerRequest::call(command), deadline).await,
            Servers::Cluster(cluster) => {
                let call = ServerRequest::call(command);
                cluster.send(key, call, deadline).await
            }
        }
    }

    /// Sends a command that any server can execute, and waits for its reply.
    pub(super) async fn send_any(
        &self,
        command: Cmd,
        deadline: Instant,
    ) -> Result<Value, RedisFailure> {
        match &self.servers {
            Servers::One(link, _) => link.send(command.into(), deadline).await,
            Servers::Cluster(cluster) => cluster.send_any(command.into(), deadline).await,
        }
    }

    /// Returns how to find a server for a subscription, if there is a way.
    pub(super) fn find_server(&self) -> Option<FindServer> {
        match &self.servers {
            Servers::One(_, find_server) => find_server.clone(),
            Servers::Cluster(cluster) => Some(cluster.clone().find_server()),
        }
    }
}
