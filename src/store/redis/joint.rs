//! The call of a joint request: one script decides about all of its keys.

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::backend::Backend;
use super::codec;
use super::script::{Argument, Script};
use crate::error::StoreError;
use crate::store::KeyCall;

/// Runs the calls of a joint request as one, and replies to each.
///
/// If the keys are on several servers of a cluster, the first server does nothing and replies with
/// an error. Then each call is run alone, and `decides_jointly` is unset for the calls of later
/// requests. The store does not know of the cluster if the user makes the connections.
pub(super) async fn run(
    (joint, alone): (Arc<Script>, Arc<Script>),
    backend: Backend,
    decides_jointly: Arc<AtomicBool>,
    calls: Vec<KeyCall>,
) {
    let keys: Vec<String> = calls.iter().map(|call| call.key.clone()).collect();
    let arguments = |calls: &[KeyCall]| {
        let arguments = calls.iter().map(|call| Argument::Is(call.call.clone()));
        arguments.collect()
    };
    let Some(packed) = calls.first().map(|call| call.packed) else {
        return;
    };
    let ran = joint.run_by_memory(&backend, &keys, arguments(&calls), packed);
    let ran = ran
        .await
        .and_then(|reply| codec::read_joint(&reply, keys.len()).map_err(StoreError::failed));
    if ran.as_ref().is_err_and(is_about_several_servers) {
        decides_jointly.store(false, Ordering::Relaxed);
        for call in calls {
            let ran = alone.run_by_memory(
                &backend,
                std::slice::from_ref(&call.key),
                arguments(std::slice::from_ref(&call)),
                call.packed,
            );
            let _ = call.reply.send(ran.await);
        }
        return;
    }
    match ran {
        Ok(replies) => {
            for (call, reply) in calls.into_iter().zip(replies) {
                let _ = call.reply.send(reply.map_err(StoreError::failed));
            }
        }
        Err(error) => {
            for call in calls {
                let _ = call.reply.send(Err(error.clone()));
            }
        }
    }
}

/// Returns whether the server did nothing because the keys are on several servers.
fn is_about_several_servers(error: &StoreError) -> bool {
    let causes = std::iter::successors(error.source(), |error| (*error).source());
    causes
        .filter_map(|error| error.downcast_ref::<RedisError>())
        .any(|error| error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot))
}
