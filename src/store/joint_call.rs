//! The calls of a joint request to one store, gathered so that the store can send them as one.

#[cfg(feature = "redis")]
use std::sync::Mutex;
#[cfg(feature = "redis")]
use std::time::Instant;

#[cfg(feature = "redis")]
use tokio::sync::oneshot;

#[cfg(feature = "redis")]
use super::StoreError;
#[cfg(feature = "redis")]
use crate::locks::lock;

/// Gathers the calls of a joint request to one store.
///
/// The limiter passes it with the request for each key
/// ([`LeaseRequest::joint`](super::LeaseRequest)). A store that can decide about several keys in
/// one step puts its call here instead of sending it, and replies later. When the limiter has made
/// all requests, it [sends](JointCall::send) what was put here. A call that arrives later is sent
/// alone.
///
/// A store decorator passes it on without knowing it. A store that does not know it ignores it.
#[derive(Default)]
pub struct JointCall {
    #[cfg(feature = "redis")]
    gathered: Mutex<Gathered>,
}

#[cfg(feature = "redis")]
#[derive(Default)]
struct Gathered {
    calls: Vec<KeyCall>,
    /// Sends the calls to the store. `None` if there are none.
    send: Option<Box<dyn FnOnce(Vec<KeyCall>) + Send>>,
    /// The number of that store.
    store: u64,
    is_sent: bool,
}

/// One call about one key, packed.
#[cfg(feature = "redis")]
pub(crate) struct KeyCall {
    /// The name of the key in the store.
    pub(crate) key: String,
    pub(crate) call: Vec<u8>,
    /// When the call was packed.
    pub(crate) packed: Instant,
    /// The sender of the packed reply.
    pub(crate) reply: oneshot::Sender<Result<Vec<u8>, StoreError>>,
}

impl std::fmt::Debug for JointCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JointCall").finish_non_exhaustive()
    }
}

#[cfg(feature = "redis")]
impl JointCall {
    /// Puts a call to the others. `send` sends all of them to `store`.
    ///
    /// # Errors
    ///
    /// Returns the call if the others are of another store, if one of them is about the same key,
    /// or if they were sent already. Then the store sends it alone.
    pub(crate) fn put(
        &self,
        store: u64,
        call: KeyCall,
        send: impl FnOnce(Vec<KeyCall>) + Send + 'static,
    ) -> Result<(), KeyCall> {
        let mut gathered = lock(&self.gathered);
        let is_other = !gathered.calls.is_empty() && gathered.store != store;
        let is_same_key = gathered.calls.iter().any(|other| other.key == call.key);
        if gathered.is_sent || is_other || is_same_key {
            return Err(call);
        }
        gathered.store = store;
        gathered.calls.push(call);
        gathered.send.get_or_insert_with(|| Box::new(send));
        Ok(())
    }

    /// Returns whether a store has put a call here.
    pub fn is_used(&self) -> bool {
        let gathered = lock(&self.gathered);
        !gathered.calls.is_empty()
    }

    /// Sends the calls.
    pub fn send(&self) {
        let mut gathered = lock(&self.gathered);
        gathered.is_sent = true;
        let (calls, send) = (std::mem::take(&mut gathered.calls), gathered.send.take());
        drop(gathered);
        if let Some(send) = send {
            send(calls);
        }
    }
}

#[cfg(not(feature = "redis"))]
impl JointCall {
    /// Returns whether a store has put a call here. No other store than that in Redis does.
    pub fn is_used(&self) -> bool {
        false
    }

    /// Sends the calls.
    pub fn send(&self) {}
}
