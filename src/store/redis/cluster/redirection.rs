//! Replies of a server that another server has the key.

use redis::{ErrorKind, ServerErrorKind};

use super::Address;
use crate::store::redis::failure::RedisFailure;

/// The server that has a key, as another server replied. That other server has not executed the
/// call.
pub(super) struct Redirection {
    pub(super) to: Address,
    /// Whether the key is being moved there, so that only this call is sent there.
    pub(super) asking: bool,
}

/// Returns the redirection that `by` replied, if the failure is one.
pub(super) fn redirection(failure: &RedisFailure, by: &Address) -> Option<Redirection> {
    let error = failure.error()?;
    let (address, _) = error.redirect_node()?;
    let asking = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
    Some(Redirection {
        to: Address::read(address, by)?,
        asking,
    })
}
