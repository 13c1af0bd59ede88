//! The servers of a cluster that were named, and how to connect to any server of it.

use redis::{Client, ConnectionAddr, ConnectionInfo};

use super::Address;

/// The servers that were named, of which at least one has to be reachable.
pub(in crate::store::redis) struct Seeds {
    pub(in crate::store::redis) servers: Vec<Address>,
    /// How to connect to any server of the cluster: everything but its address.
    pub(in crate::store::redis) settings: ConnectionInfo,
}

impl Seeds {
    /// Returns a client of `server`, with the settings of the seeds.
    pub(super) fn client(&self, server: &Address) -> redis::RedisResult<Client> {
        let (host, port) = (server.host.to_string(), server.port);
        let address = match *self.settings.addr() {
            ConnectionAddr::TcpTls {
                insecure,
                ref tls_params,
                ..
            } => ConnectionAddr::TcpTls {
                host,
                port,
                insecure,
                tls_params: tls_params.clone(),
            },
            _ => ConnectionAddr::Tcp(host, port),
        };
        Client::open(self.settings.clone().set_addr(address))
    }
}
