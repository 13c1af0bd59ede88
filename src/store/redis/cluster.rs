//! A connection to a cluster: each call goes to the server that has the key.
//!
//! The client underneath repeats nothing. Where a server says that another one has the key, it has done nothing: then that
//! one is asked, once.

use std::sync::Arc;

use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, aio::ConnectionLike};

use super::link::Connection;

pub(super) fn connection(cluster: ClusterConnection) -> Connection {
    Arc::new(move |command: Cmd| {
        let mut cluster = cluster.clone();
        Box::pin(async move {
            if is_for_anyone(&command) {
                let anyone = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
                return cluster.route_command(command, anyone).await?.extract_error();
            }
            let answer = cluster.req_packed_command(&command).await.and_then(Value::extract_error);
            let Some((error, there)) = answer.as_ref().err().and_then(|error| Some((error, there(error)?)))
            else {
                return answer;
            };
            if error.kind() == ErrorKind::Server(ServerErrorKind::Ask) {
                return asking(&mut cluster, command, there).await;
            }
            let told = cluster.route_command(command.clone(), RoutingInfo::SingleNode(there)).await;
            match told.and_then(Value::extract_error) {
                // It is not connected to that one yet: nothing was sent, and what it knows of the cluster is being renewed.
                Err(error) if error.kind() == ErrorKind::ClusterConnectionNotFound => {
                    cluster.req_packed_command(&command).await?.extract_error()
                }
                told => told,
            }
        })
    })
}

/// Whether it asks if anybody is there, or about the settings that all of them should have: one that is away is of no
/// concern to the keys of the others.
fn is_for_anyone(command: &Cmd) -> bool {
    let name = command.args_iter().next();
    matches!(name, Some(redis::Arg::Simple(b"PING" | b"INFO")))
}

/// Who has the key, as the error says.
fn there(error: &RedisError) -> Option<SingleNodeRoutingInfo> {
    let (address, _) = error.redirect_node()?;
    let (host, port) = address.rsplit_once(':')?;
    Some(SingleNodeRoutingInfo::ByAddress { host: host.to_owned(), port: port.parse().ok()? })
}

/// A key that is just being moved: the server that is to have it answers when that is said, in one go.
async fn asking(
    cluster: &mut ClusterConnection,
    command: Cmd,
    there: SingleNodeRoutingInfo,
) -> RedisResult<Value> {
    let mut both = redis::pipe();
    both.cmd("ASKING").add_command(command);
    let answers = cluster.route_pipeline(both, 1, 1, there).await?;
    answers.into_iter().next().unwrap_or(Value::Nil).extract_error()
}
