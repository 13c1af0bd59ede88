//! A connection to one server, of any kind, and how connections are made.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, RedisResult, Value};

/// Makes a connection with each call.
pub(super) type Factory = Arc<dyn Fn() -> ConnectionFuture + Send + Sync>;
pub(super) type ConnectionFuture = Pin<Box<dyn Future<Output = RedisResult<Connection>> + Send>>;

/// A connection of any kind. Clones share it.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) send: Arc<dyn Fn(ServerRequest) -> ServerReply + Send + Sync>,
    /// The database that the connection states it uses.
    pub(super) database: i64,
}

impl Connection {
    /// Sends a command. The future completes with the reply of the server.
    ///
    /// This runs code of the user if the user made the connection, and that may panic. So each caller is in
    /// a task of its own, whose end harms one call at most.
    pub(super) fn send(&self, request: ServerRequest) -> ServerReply {
        (self.send)(request)
    }
}

pub(super) type ServerReply = Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>;

/// A command to a server. Clones share the command.
#[derive(Clone)]
pub(super) struct ServerRequest {
    pub(super) command: Arc<Cmd>,
    /// Whether the key of the command is being moved to this server of a cluster.
    pub(super) asking: bool,
    /// Whether it is a call of a limiter or throttle, which a server that is read-only or still loads refuses.
    pub(super) is_call: bool,
}

impl ServerRequest {
    /// Makes the request of a call of a limiter or throttle.
    pub(super) fn call(command: Cmd) -> Self {
        ServerRequest {
            is_call: true,
            ..command.into()
        }
    }
}

impl From<Cmd> for ServerRequest {
    fn from(command: Cmd) -> Self {
        ServerRequest {
            command: Arc::new(command),
            asking: false,
            is_call: false,
        }
    }
}

/// Wraps a connection of any kind.
pub(super) fn connection<C>(connection: C) -> Connection
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    let database = connection.get_db();
    let send = Arc::new(move |request: ServerRequest| {
        let mut connection = connection.clone();
        Box::pin(async move {
            let ServerRequest {
                command, asking, ..
            } = request;
            if !asking {
                return connection
                    .req_packed_command(&command)
                    .await?
                    .extract_error();
            }
            // `ASKING` counts for the next command on the connection, so both are sent together.
            let mut both = redis::pipe();
            both.cmd("ASKING").add_command((*command).clone());
            let replies = connection.req_packed_commands(&both, 1, 1).await?;
            replies
                .into_iter()
                .next()
                .unwrap_or(Value::Nil)
                .extract_error()
        }) as _
    });
    Connection { send, database }
}

/// Returns a factory of connections to the server of `client`.
pub(super) fn factory_of(client: Client) -> Factory {
    Arc::new(move || {
        let client = client.clone();
        Box::pin(async move { connect(&client).await })
    })
}

/// Makes a connection to the server of `client`.
pub(super) async fn connect(client: &Client) -> RedisResult<Connection> {
    // The link sets one deadline for the whole of each operation.
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None);
    let made: MultiplexedConnection = client
        .get_multiplexed_async_connection_with_config(&config)
        .await?;
    Ok(connection(made))
}
