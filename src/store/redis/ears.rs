//! A connection on which this process is told what others do: a subscription to the channel of its store, and to that of
//! all.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::link::Link;
use super::place::Ears;
use crate::clock;
use crate::jitter::jittered;

/// How long making the connection may take.
const LONGEST_CONNECTING: Duration = Duration::from_secs(5);

/// Between two tries; jittered, and doubled up to the longest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What comes in.
pub(super) enum Heard {
    /// From now on nothing is missed: a word that was said has come back.
    Open,
    /// From now on all is.
    Deaf,
    /// To this store.
    Message(Vec<u8>),
    /// To all.
    MessageToAll(Vec<u8>),
}

/// The channels it listens on.
pub(super) struct Channels {
    pub(super) ours: String,
    pub(super) all: String,
}

/// After so long without a word one is said to oneself: a connection may be cut without a sign, and who may listen may
/// not be allowed to speak.
const QUIET: Duration = Duration::from_secs(5);

/// How long a word to oneself may take, and how often it is said before the connection counts as cut.
const ECHO: Duration = Duration::from_millis(500);
const MOST_ECHOES: u32 = 3;

/// Before the next try, where the server lets us listen and nothing arrives.
const FORBIDDEN: Duration = Duration::from_secs(30);

/// Listens for as long as it is polled.
pub(super) async fn listen(
    ears: Ears,
    channels: Channels,
    link: Arc<Link>,
    heard: mpsc::UnboundedSender<Heard>,
) {
    let mut pause = SHORTEST_PAUSE;
    loop {
        let subscribing = async {
            let mut pubsub = ears().await?.get_async_pubsub().await?;
            pubsub.subscribe(&channels.ours).await?;
            pubsub.subscribe(&channels.all).await?;
            Ok::<_, redis::RedisError>(pubsub)
        };
        if let Ok(Ok(pubsub)) = timeout(LONGEST_CONNECTING, subscribing).await {
            let mut messages = pin!(pubsub.into_on_message());
            let (mut open, mut echoes) = (false, 0);
            loop {
                let quiet = match (open, echoes) {
                    (true, 0) => QUIET,
                    (false, 0) => Duration::ZERO,
                    _ => ECHO,
                };
                match timeout(quiet, next(messages.as_mut())).await {
                    Ok(Some(message)) => {
                        if !std::mem::replace(&mut open, true) {
                            let _ = heard.send(Heard::Open);
                        }
                        echoes = 0;
                        let payload = message.get_payload_bytes().to_vec();
                        let _ = match message.get_channel_name() == channels.all {
                            true => heard.send(Heard::MessageToAll(payload)),
                            false if payload.is_empty() => Ok(()),
                            false => heard.send(Heard::Message(payload)),
                        };
                    }
                    Ok(None) => break,
                    Err(_) if echoes == MOST_ECHOES => break,
                    Err(_) => {
                        echoes += 1;
                        say(link.clone(), &channels.ours);
                    }
                }
            }
            pause = if open { SHORTEST_PAUSE } else { FORBIDDEN };
            let _ = heard.send(Heard::Deaf);
        }
        clock::sleep_until(clock::after(clock::now(), jittered(pause))).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Says a word without content, which comes back if all is well.
fn say(link: Arc<Link>, channel: &str) {
    let mut command = redis::cmd("PUBLISH");
    command.arg(channel).arg("");
    tokio::spawn(async move {
        let deadline = link.deadline();
        let _ = link.ask(command, deadline).await;
    });
}

async fn next<S: Stream>(mut stream: Pin<&mut S>) -> Option<S::Item> {
    std::future::poll_fn(|cx| stream.as_mut().poll_next(cx)).await
}
