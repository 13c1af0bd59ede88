//! A flush: it completes when the store has confirmed the claims that were present when it began.

use std::collections::HashMap;

use tokio::sync::oneshot;

use super::holder::Holder;
use crate::error::StoreError;

/// A caller that waits until the store has confirmed all claims.
pub(super) struct Flush {
    /// The holders whose claims are not confirmed yet, and their last claim when the flush began.
    /// The reply to a later claim is enough, so that a busy holder does not delay the flush.
    unconfirmed: HashMap<u64, u64>,
    /// The error of the first holder whose last claim failed.
    result: Result<(), StoreError>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

impl Flush {
    /// Begins a flush of the present claims.
    pub(super) fn new(
        holders: &HashMap<u64, Holder>,
        done: oneshot::Sender<Result<(), StoreError>>,
    ) -> Self {
        let unconfirmed = holders.iter().filter(|(_, holder)| !holder.is_settled());
        Flush {
            unconfirmed: unconfirmed
                .map(|(id, holder)| (*id, holder.claim.number))
                .collect(),
            result: Ok(()),
            done,
        }
    }

    /// Takes in that the last claim of a holder that leaves has failed.
    pub(super) fn on_error(&mut self, id: u64, error: &StoreError) {
        if self.unconfirmed.contains_key(&id) {
            self.result = Err(error.clone());
        }
    }

    /// Drops the holders that are settled. Returns whether the flush is complete or has failed.
    pub(super) fn update(&mut self, holders: &HashMap<u64, Holder>) -> bool {
        self.unconfirmed.retain(|id, number| {
            holders
                .get(id)
                .is_some_and(|holder| !holder.is_settled() && holder.confirmed <= *number)
        });
        self.unconfirmed.is_empty() || self.result.is_err()
    }

    /// Completes the caller's flush.
    pub(super) fn complete(self) {
        let _ = self.done.send(self.result);
    }
}
