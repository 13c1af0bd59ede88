//! The right to send one request.

use std::time::{Duration, Instant};

use http::StatusCode;

use super::limiter::Limiter;
use super::slot::Slot;
use crate::clock;
use crate::error::{Facts, Limited, Report};
use crate::events;
use crate::key::Key;
use crate::signal::Signal;

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// It ends exactly once: [`answered`](Permit::answered), or [`give_back`](Permit::give_back), which is only for a
/// request that was surely not sent. Dropped, it counts as spent: nobody knows whether the request had left.
#[must_use = "a permit that is dropped counts as spent"]
pub struct Permit {
    limiter: Limiter,
    key: Key,
    /// `None` for a request that costs nothing.
    slot: Option<Slot>,
    /// How the request waited for it.
    wait: Option<Box<Wait>>,
}

/// The wait of a request that did not get its permit at once.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) label: Box<str>,
    pub(super) waited: Duration,
    pub(super) turns: u32,
}

impl Permit {
    #[inline]
    pub(super) fn new(limiter: Limiter, key: Key, slot: Option<Slot>) -> Self {
        Permit { limiter, key, slot, wait: None }
    }

    pub(super) fn after(self, wait: Wait) -> Self {
        Permit { wait: Some(Box::new(wait)), ..self }
    }

    /// The key it is for.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Until when the request must have left. `None` when it costs nothing.
    ///
    /// A permit that is used later may put the upstream over its limit: give it back and acquire anew.
    pub fn deadline(&self) -> Option<Instant> {
        self.slot.map(|slot| slot.until)
    }

    /// Whether its deadline still lies ahead.
    pub fn is_alive(&self) -> bool {
        self.slot.is_none_or(|slot| clock::now() < slot.until)
    }

    /// How long the request waited for it.
    pub fn waited(&self) -> Duration {
        self.wait.as_ref().map_or(Duration::ZERO, |wait| wait.waited)
    }

    /// The request was sent and this came back. Answers the error that a refusal by the upstream makes, for callers
    /// that want one.
    #[inline]
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.sent().answered(signal)
    }

    /// The request leaves now.
    pub(crate) fn sent(self) -> Sent {
        Sent { key: self.key, wait: self.wait }
    }

    pub(super) fn into_slot(self) -> Option<Slot> {
        self.slot
    }

    /// The request was surely not sent: the next in line gets the slot, or the store.
    pub fn give_back(self) {
        if let Some(slot) = self.slot {
            self.limiter.give_back(self.key, slot);
        }
    }
}

/// A request on its way: its permit is spent, its answer is to come.
pub(crate) struct Sent {
    key: Key,
    wait: Option<Box<Wait>>,
}

impl Sent {
    /// One that got its permit at once.
    #[inline]
    pub(crate) fn at_once(key: Key) -> Self {
        Sent { key, wait: None }
    }

    /// One that got its permit at once and keeps the name of its key.
    pub(crate) fn named(key: Key, label: Box<str>) -> Self {
        Sent { key, wait: Some(Box::new(Wait { label, waited: Duration::ZERO, turns: 0 })) }
    }

    /// See [`Permit::answered`].
    #[inline]
    pub(crate) fn answered(self, signal: &Signal) -> Option<Limited> {
        signal.limited().map(|status| self.upstream_limited(status, signal))
    }

    #[cold]
    fn upstream_limited(self, status: StatusCode, signal: &Signal) -> Limited {
        let Wait { label, waited, turns } = match self.wait {
            Some(wait) => *wait,
            None => Wait { label: self.key.label(None), waited: Duration::ZERO, turns: 0 },
        };
        let retry_after = signal.retry_after();
        events::upstream_limited(&label, status, retry_after);
        let at = clock::wall(clock::now());
        let report = Report::new(Facts { key: label, limit: None, retry_after, at, waited, turns });
        Limited::Upstream { status, report }
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit")
            .field("key", &self.key)
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}
