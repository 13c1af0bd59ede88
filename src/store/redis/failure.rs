//! Why a command to a server has no reply.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::{BoxError, StoreError};

/// Why a command has no result.
pub(super) struct RedisFailure {
    pub(super) why: FailureKind,
    /// The server of the command, if it is one of several.
    pub(super) server: Option<Arc<str>>,
}

pub(super) enum FailureKind {
    /// There is no connection.
    Down(StoreError),
    /// The server replied with an error, or the connection broke.
    Error(RedisError),
    /// No reply arrived in time.
    Silent(Duration),
}

impl RedisFailure {
    /// Makes the failure of a command for which there is no server.
    pub(super) fn down(error: StoreError) -> Self {
        RedisFailure {
            why: FailureKind::Down(error),
            server: None,
        }
    }

    /// Makes the failure of a command without a reply within `after`.
    pub(super) fn silent(after: Duration) -> Self {
        RedisFailure {
            why: FailureKind::Silent(after),
            server: None,
        }
    }

    /// Returns whether the server does not have the script. Then it did nothing.
    pub(super) fn is_no_script(&self) -> bool {
        matches!(&self.why, FailureKind::Error(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
    }

    /// Returns whether the server did not reply in time.
    pub(super) fn is_silent(&self) -> bool {
        matches!(self.why, FailureKind::Silent(_))
    }

    /// Returns the error of the server or the connection, if there was one.
    pub(super) fn error(&self) -> Option<&RedisError> {
        match &self.why {
            FailureKind::Error(error) => Some(error),
            FailureKind::Down(_) | FailureKind::Silent(_) => None,
        }
    }

    /// Returns whether `error` concerns only this call, so that the server would execute the next
    /// one.
    fn is_reply(error: &RedisError) -> bool {
        match error.kind() {
            ErrorKind::Server(
                ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::TryAgain,
            ) => false,
            // Before Redis 7, an error of a command in a script stands in the text of another one.
            ErrorKind::Server(ServerErrorKind::ResponseError) => {
                !error.detail().is_some_and(|text| {
                    ["-READONLY ", "-NOREPLICAS "]
                        .iter()
                        .any(|code| text.contains(code))
                })
            }
            ErrorKind::Server(_) => true,
            ErrorKind::Extension => {
                !matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOREPLICAS"))
            }
            _ => false,
        }
    }

    /// Returns whether the connection is of no more use.
    pub(super) fn breaks(&self) -> bool {
        match &self.why {
            FailureKind::Down(_) => false,
            FailureKind::Error(error) => !RedisFailure::is_reply(error),
            FailureKind::Silent(_) => true,
        }
    }

    /// Returns the error for the caller of the store.
    pub(super) fn to_error(&self) -> StoreError {
        let error = match &self.why {
            FailureKind::Down(error) => return error.clone(),
            FailureKind::Error(error) => error.clone().into(),
            FailureKind::Silent(after) => format!("no answer within {after:?}").into(),
        };
        let error = of_server(self.server.as_ref(), error);
        if self.breaks() {
            StoreError::away(error)
        } else {
            StoreError::failed(error)
        }
    }
}

impl From<RedisFailure> for StoreError {
    fn from(failure: RedisFailure) -> Self {
        failure.to_error()
    }
}

/// Names the server that failed, if it is one of several.
pub(super) fn of_server(server: Option<&Arc<str>>, error: BoxError) -> BoxError {
    match server {
        Some(server) => Box::new(OfServer {
            server: server.clone(),
            error,
        }),
        None => error,
    }
}

/// What went wrong at one server of several.
#[derive(Debug)]
struct OfServer {
    server: Arc<str>,
    error: BoxError,
}

impl fmt::Display for OfServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.server, self.error)
    }
}

impl StdError for OfServer {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(self.error.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Redis 6.2 states the error of a command of a script in the text of an error of its own.
    #[test]
    fn read_only_servers_break_their_connection_before_redis_7() {
        let of_script = |text: &str| {
            let text = format!("Error running script (call to f_1): @user_script:9: {text}");
            let error = (
                ErrorKind::Server(ServerErrorKind::ResponseError),
                "ERR",
                text,
            );
            !RedisFailure::is_reply(&RedisError::from(error))
        };
        assert!(of_script(
            "-READONLY You can't write against a read only replica."
        ));
        assert!(of_script("-NOREPLICAS Not enough good replicas to write."));
        assert!(!of_script("-WRONGTYPE Operation against a key"));
    }
}
