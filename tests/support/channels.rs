//! An upstream whose requests name a channel, as those of a chat bot do: what it logs.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::counted::largest_count;

/// When the upstream got a request of which channel. Clones are the same log.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<(Instant, String)>>>);

impl Log {
    /// Logs a request that arrives now. A path without a channel is of the channel "".
    pub(crate) fn add(&self, path: &str) {
        let channel = channel(path).unwrap_or_default().to_owned();
        self.0.lock().unwrap().push((Instant::now(), channel));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Returns the most requests of a channel, or of all, in any window.
    pub(crate) fn most(&self, window: Duration, which: Option<&str>) -> usize {
        let log = self.0.lock().unwrap();
        let of_channel = log
            .iter()
            .filter(|(_, channel)| which.is_none_or(|which| which == channel));
        let times: Vec<Instant> = of_channel.map(|(at, _)| *at).collect();
        largest_count(&times, window)
    }

    pub(crate) fn channels(&self) -> Vec<String> {
        let log = self.0.lock().unwrap();
        let mut all: Vec<String> = log.iter().map(|(_, channel)| channel.clone()).collect();
        all.sort();
        all.dedup();
        all
    }
}

/// Returns the channel of a path such as `/channels/17/messages`.
pub(crate) fn channel(path: &str) -> Option<&str> {
    path.strip_prefix("/channels/")?.split('/').next()
}
