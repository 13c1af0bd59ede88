//! The call of a joint request: one script decides about all of its keys.

use std::error::Error as StdError;
use std::slice::from_ref;
use std::sync::atomic::Ordering;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::client::Client;
use super::codec;
use super::script::Argument;
use super::stats::CallKind;
use crate::error::StoreError;
use crate::store::KeyCall;

/// Runs the calls of a joint request as one, and replies to each. A call whose caller was dropped is not
/// needed.
///
/// If the keys are on several servers of a cluster, the first server does nothing and replies with
/// an error. Then each call is run alone, and `decides_jointly` is unset for the calls of later
/// requests. The store does not know of the cluster if the user makes the connections.
pub(super) async fn run(client: &Client, mut calls: Vec<KeyCall>) {
    calls.retain(|call| !call.reply.is_closed());
    if calls.len() > 1 && client.decides_jointly.load(Ordering::Relaxed) {
        let keys = calls.len();
        let ran = run_script(client, CallKind::Joint, &calls).await;
        let ran = ran.and_then(|reply| {
            let replies = codec::read_joint(&reply, keys);
            let are_read = replies
                .as_ref()
                .is_ok_and(|replies| replies.iter().all(Result::is_ok));
            if !are_read {
                client.backend.links.tally.of_no_use(CallKind::Joint);
            }
            replies.map_err(StoreError::failed)
        });
        match ran {
            Ok(replies) => {
                for (call, reply) in calls.into_iter().zip(replies) {
                    let _ = call.reply.send(reply.map_err(StoreError::failed));
                }
                return;
            }
            Err(error) if is_about_several_servers(&error) => {
                client.decides_jointly.store(false, Ordering::Relaxed);
            }
            Err(error) => {
                for call in calls {
                    let _ = call.reply.send(Err(error.clone()));
                }
                return;
            }
        }
    }
    for call in calls {
        let ran = run_script(client, CallKind::Permits, from_ref(&call)).await;
        let _ = call.reply.send(ran);
    }
}

/// Runs the script for calls of this kind, which were packed at the same moment.
async fn run_script(
    client: &Client,
    kind: CallKind,
    calls: &[KeyCall],
) -> Result<Vec<u8>, StoreError> {
    let Some(KeyCall { packed, .. }) = calls.first() else {
        return Err(StoreError::Lost);
    };
    let keys: Vec<&str> = calls.iter().map(|call| call.key.as_str()).collect();
    let arguments = calls.iter().map(|call| Argument::Is(call.call.clone()));
    let script = client.script(kind);
    script
        .run_by_memory(&client.backend, &keys, arguments.collect(), *packed)
        .await
}

/// Returns whether the server did nothing because the keys are on several servers.
fn is_about_several_servers(error: &StoreError) -> bool {
    let causes = std::iter::successors(error.source(), |error| (*error).source());
    causes
        .filter_map(|error| error.downcast_ref::<RedisError>())
        .any(|error| error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot))
}
