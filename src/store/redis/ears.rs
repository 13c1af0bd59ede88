//! A connection on which this process is told what others do: a subscription to the channel of its store, and to that of
//! all.

use std::pin::{Pin, pin};
use std::time::Duration;

use futures_core::Stream;
use redis::Client;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::clock;
use crate::jitter::jittered;

/// How long making the connection may take.
const LONGEST_CONNECTING: Duration = Duration::from_secs(5);

/// Between two tries; jittered, and doubled up to the longest.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What comes in.
pub(super) enum Heard {
    /// From now on nothing is missed.
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

/// Listens for as long as it is polled.
pub(super) async fn listen(client: Client, channels: Channels, heard: mpsc::UnboundedSender<Heard>) {
    let mut pause = SHORTEST_PAUSE;
    loop {
        let subscribing = async {
            let mut pubsub = client.get_async_pubsub().await?;
            pubsub.subscribe(&channels.ours).await?;
            pubsub.subscribe(&channels.all).await?;
            Ok::<_, redis::RedisError>(pubsub)
        };
        if let Ok(Ok(pubsub)) = timeout(LONGEST_CONNECTING, subscribing).await {
            pause = SHORTEST_PAUSE;
            let _ = heard.send(Heard::Open);
            let mut messages = pin!(pubsub.into_on_message());
            while let Some(message) = next(messages.as_mut()).await {
                let payload = message.get_payload_bytes().to_vec();
                let to_all = message.get_channel_name() == channels.all;
                let message = if to_all { Heard::MessageToAll(payload) } else { Heard::Message(payload) };
                let _ = heard.send(message);
            }
            let _ = heard.send(Heard::Deaf);
        }
        clock::sleep_until(clock::after(clock::now(), jittered(pause))).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn next<S: Stream>(mut stream: Pin<&mut S>) -> Option<S::Item> {
    std::future::poll_fn(|cx| stream.as_mut().poll_next(cx)).await
}
