//! Permits that were given back. They are gathered for a moment, so that many of them make one call.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::client::Client;
use super::codec::{self, MOST_RETURNS};
use super::script::Argument;
use crate::error::StoreError;
use crate::limit::{LimitSpec, UnusedPermits};
use crate::rng::dice;

/// How long permits that are given back are gathered before they are sent.
pub(super) const GATHERING: Duration = Duration::from_millis(2);

/// The permits that were given back to a store.
#[derive(Default)]
pub(super) struct ReturnedPermits {
    /// Those that were not sent yet, by the name of their key.
    gathered: HashMap<String, Vec<OfIncarnation>>,
    /// The calls that return permits and have no reply yet.
    sent: JoinSet<Arrived>,
    /// Why some of them did not arrive. The next flush returns it.
    lost: Option<StoreError>,
    /// The result of the last flush, once it is complete. Later flushes wait for it, because it has taken the calls
    /// that were sent before it.
    flushed: Option<watch::Receiver<Option<Arrived>>>,
}

/// Whether permits have arrived.
type Arrived = Result<(), StoreError>;

/// Permits of one key that one incarnation of its state granted.
type OfIncarnation = (Arc<LimitSpec>, Vec<UnusedPermits>);

impl ReturnedPermits {
    /// Adds permits. Returns whether they are the first ones that are gathered.
    pub(super) fn gather(
        &mut self,
        key: String,
        spec: &Arc<LimitSpec>,
        unused: &[UnusedPermits],
    ) -> bool {
        let is_first = self.gathered.is_empty();
        let of_key = self.gathered.entry(key).or_default();
        for &unused in unused {
            let same =
                |(_, granted): &&mut OfIncarnation| granted[0].incarnation == unused.incarnation;
            match of_key.iter_mut().find(same) {
                Some((_, granted)) => granted.push(unused),
                None => of_key.push((spec.clone(), vec![unused])),
            }
        }
        is_first
    }

    /// Sends the permits of `key`, if some were gathered. A call for the key that is sent next arrives after
    /// them.
    pub(super) fn send_of(&mut self, key: &str, client: &Arc<Client>) {
        if let Some((key, of_key)) = self.gathered.remove_entry(key) {
            self.send(&key, of_key, client);
        }
    }

    /// Sends all permits that were gathered. If they do not arrive, they expire.
    pub(super) fn send_all(&mut self, client: &Arc<Client>) {
        for (key, of_key) in std::mem::take(&mut self.gathered) {
            self.send(&key, of_key, client);
        }
    }

    fn send(&mut self, key: &str, of_key: Vec<OfIncarnation>, client: &Arc<Client>) {
        while let Some(sent) = self.sent.try_join_next() {
            self.lost = self.lost.take().or(error_of(sent));
        }
        let Ok(runtime) = client.runtime() else {
            return;
        };
        for (spec, granted) in of_key {
            for unused in granted.chunks(MOST_RETURNS) {
                let (client, spec, unused) = (client.clone(), spec.clone(), unused.to_vec());
                let keys = [key.to_owned()];
                // Packed in the task, because callers may wait for the lock.
                let sending = async move {
                    let call = [Argument::Is(codec::give_back(&spec, &unused, dice()))];
                    client.run_once(&keys, &call).await.map(drop)
                };
                self.sent.spawn_on(sending, runtime);
            }
        }
    }

    /// Returns a future that completes when all permits that were sent have arrived, also those that an earlier
    /// flush still waits for.
    pub(super) fn arrive(&mut self) -> impl Future<Output = Arrived> + Send + use<> {
        let (mut sent, mut lost) = (std::mem::take(&mut self.sent), self.lost.take());
        let (done, flushed) = watch::channel(None);
        let earlier = self.flushed.replace(flushed);
        let under_way = earlier.filter(|flushed| flushed.borrow().is_none());
        async move {
            if let Some(mut flushed) = under_way
                && let Ok(result) = flushed.wait_for(Option::is_some).await
            {
                lost = lost.or(result.clone().and_then(Result::err));
            }
            while let Some(sent) = sent.join_next().await {
                lost = lost.or(error_of(sent));
            }
            let result = lost.map_or(Ok(()), Err);
            done.send_replace(Some(result.clone()));
            result
        }
    }
}

/// Returns why permits did not arrive.
fn error_of(sent: Result<Arrived, JoinError>) -> Option<StoreError> {
    sent.unwrap_or(Err(StoreError::Lost)).err()
}
