//! The connection on which this process receives messages of other processes. It subscribes to the
//! channel of its store, and to the channel of all stores.

use std::pin::{Pin, pin};
use std::time::Duration;

use futures_core::Stream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::backend::{Backend, TO_ALL};
use super::endpoint::{FindServer, PubSubServer};
use super::link::LONGEST_CONNECTING;
use crate::clock;
use crate::error::StoreError;
use crate::rng::{Backoff, jittered};

/// What arrives on the subscription.
pub(super) enum Incoming {
    /// From now on no message is missed. A message was received on the subscription.
    Subscribed,
    /// From now on all messages are missed.
    Disconnected,
    /// A message to this store.
    Message(Vec<u8>),
    /// A message to all stores.
    MessageToAll(Vec<u8>),
}

/// After this time without a message, the process publishes an empty message to its own channel. A
/// connection may be lost without notice, and a Redis user may be allowed to subscribe but not to
/// publish.
const QUIET: Duration = Duration::from_secs(5);

/// How long an empty message may take to arrive, and how many are published before the connection
/// counts as lost.
const ECHO: Duration = Duration::from_millis(500);
const MOST_ECHOES: u32 = 3;

/// The pause before the next attempt, if the server allows the subscription, answers when a message
/// is published, and no message arrives.
const FORBIDDEN_PAUSE: Duration = Duration::from_secs(30);

/// Subscribes and forwards messages to `incoming`, while it is polled.
///
/// A subscription that is confirmed may still receive nothing. So the process publishes empty messages to its
/// own channel: one at once, because the first message that arrives shows that none is missed from then on, and
/// one whenever the channel was quiet. If [`MOST_ECHOES`] of them in a row do not come back, the connection
/// counts as lost.
pub(super) async fn listen(
    find_server: FindServer,
    instance: u64,
    backend: Backend,
    incoming: mpsc::UnboundedSender<Incoming>,
) {
    let mut backoff = Backoff::new();
    loop {
        let subscribing = async {
            let PubSubServer { client, away } = find_server().await?;
            let database = client.get_connection_info().redis_settings().db();
            let channels =
                [instance.to_string().as_str(), TO_ALL].map(|name| backend.channel(database, name));
            let mut pubsub = client.get_async_pubsub().await.map_err(StoreError::away)?;
            for channel in &channels {
                pubsub.subscribe(channel).await.map_err(StoreError::away)?;
            }
            Ok::<_, StoreError>((pubsub, channels, away))
        };
        if let Ok(Ok((pubsub, [ours, all], mut away))) =
            timeout(LONGEST_CONNECTING, subscribing).await
        {
            let mut messages = pin!(pubsub.into_on_message());
            let (mut open, mut echoes, mut is_forbidden) = (false, 0, false);
            loop {
                let quiet = match (open, echoes) {
                    (true, 0) => QUIET,
                    (false, 0) => Duration::ZERO,
                    _ => ECHO,
                };
                let message_or_quiet = async {
                    tokio::select! {
                        message = timeout(quiet, next(messages.as_mut())) => message,
                        // Handled like a closed connection.
                        () = &mut away => Ok(None),
                    }
                };
                match message_or_quiet.await {
                    Ok(Some(message)) => {
                        if !std::mem::replace(&mut open, true) {
                            let _ = incoming.send(Incoming::Subscribed);
                        }
                        echoes = 0;
                        let payload = message.get_payload_bytes().to_vec();
                        let _ = match message.get_channel_name() == all {
                            true => incoming.send(Incoming::MessageToAll(payload)),
                            false if payload.is_empty() => Ok(()),
                            false => incoming.send(Incoming::Message(payload)),
                        };
                    }
                    Ok(None) => break,
                    Err(_) if echoes == MOST_ECHOES => {
                        is_forbidden = !open && publish_empty(backend.clone(), &ours).await;
                        break;
                    }
                    Err(_) => {
                        echoes += 1;
                        drop(publish_empty(backend.clone(), &ours));
                    }
                }
            }
            let _ = incoming.send(Incoming::Disconnected);
            if open {
                backoff = Backoff::new();
            }
            if is_forbidden {
                clock::sleep(jittered(FORBIDDEN_PAUSE)).await;
            }
        }
        clock::sleep(backoff.pause()).await;
    }
}

/// Publishes an empty message to `channel`. The subscription receives it if both connections work.
/// The future returns whether the server has answered. The message is published even if the future
/// is dropped.
fn publish_empty(backend: Backend, channel: &str) -> impl Future<Output = bool> {
    let mut command = redis::cmd("PUBLISH");
    command.arg(channel).arg("");
    let published = tokio::spawn(async move {
        match backend.send_any(command, backend.links.deadline()).await {
            Ok(_) => true,
            Err(failure) => matches!(failure.to_error(), StoreError::Failed(_)),
        }
    });
    async move { published.await.unwrap_or(false) }
}

async fn next<S: Stream>(mut stream: Pin<&mut S>) -> Option<S::Item> {
    std::future::poll_fn(|cx| stream.as_mut().poll_next(cx)).await
}
