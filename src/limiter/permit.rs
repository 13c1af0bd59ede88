//! The right to send one request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::StatusCode;

use super::admission::Entry;
use super::engine::{Core, CoreId};
use super::hosts::host_hold;
use super::in_flight_slot::InFlightSlot;
use super::key_state::is_any_uncertain;
use super::reservation::Reservation;
use super::responses::AnsweredCall;
use crate::clock;
use crate::error::{Facts, Limited, LimitedInfo, StoreError};
use crate::events;
use crate::key::{Key, Label};
use crate::signal::Signal;

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it. A permit ends exactly once:
///
/// - [`answered`](Permit::answered) takes the response, so that a 429 puts the key on hold.
/// - [`give_back`](Permit::give_back) is for a request that was certainly not sent.
/// - If the permit is dropped, it counts as used, because the request may have left.
///
/// If calls in flight are limited ([`Quota::in_flight`](crate::Quota::in_flight)), the call is in
/// flight until its permit ends. Keep the permit until the response has arrived.
#[must_use = "a permit that is dropped counts as used"]
pub struct Permit {
    core: Arc<Core>,
    key: Key,
    /// `None` if the request costs nothing, or if rates are not limited.
    slot: Option<Reservation>,
    /// `None` if calls in flight are not limited, or could not be counted.
    in_flight_slot: Option<InFlightSlot>,
    /// `None` if the request did not wait.
    wait: Option<Box<PastWait>>,
}

/// The wait of a request that did not get its permit at once, for errors.
#[derive(Debug)]
pub(super) struct PastWait {
    /// The name of the key.
    pub(super) label: Label,
    pub(super) waited: Duration,
    /// How often the request got a slot.
    pub(super) turns: u32,
    /// The key of its host, if the host matters: see [`Entry::host`].
    pub(super) host: Option<Key>,
}

impl Permit {
    #[inline]
    pub(super) fn new(
        core: Arc<Core>,
        key: Key,
        slot: Option<Reservation>,
        in_flight_slot: Option<InFlightSlot>,
    ) -> Self {
        Permit {
            core,
            key,
            slot,
            in_flight_slot,
            wait: None,
        }
    }

    /// Adds how the request waited.
    pub(super) fn after(self, wait: PastWait) -> Self {
        Permit {
            wait: Some(Box::new(wait)),
            ..self
        }
    }

    /// Returns the key of the request.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Returns the moment by which the request must have left, 10 to 50 ms after its slot. `None`
    /// if the request costs nothing, or if rates are not limited.
    ///
    /// If the permit is used later, the upstream may see more requests than its limit allows. Give
    /// the permit back and acquire another one.
    pub fn deadline(&self) -> Option<Instant> {
        self.slot.map(|slot| slot.until)
    }

    /// Returns whether the request may still be sent: whether the deadline has not passed.
    pub fn is_valid(&self) -> bool {
        self.slot.is_none_or(|slot| clock::now() < slot.until)
    }

    /// Waits until this call must be cancelled, and returns the reason.
    ///
    /// A call must be cancelled if this process has lost contact with the store for longer than
    /// [`in_flight_ttl`](crate::RateLimitBuilder::in_flight_ttl). The store may then have granted
    /// the call's in-flight slot to another process.
    ///
    /// The future is never ready if calls in flight are not limited, if they are counted in memory,
    /// or with [`OnStoreError::FailOpen`](crate::OnStoreError::FailOpen).
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn revoked(&self) -> StoreError {
        poll_fn(|cx| match &self.in_flight_slot {
            Some(in_flight_slot) => in_flight_slot.poll_lost(cx),
            None => Poll::Pending,
        })
        .await
    }

    /// Returns how long the request waited for this permit.
    pub fn waited(&self) -> Duration {
        self.wait
            .as_ref()
            .map_or(Duration::ZERO, |wait| wait.waited)
    }

    /// Ends the permit of a request that was sent, with what the response states about limits.
    ///
    /// A refusal puts the key on [hold](crate::RateLimitBuilder::max_hold). Returns
    /// [`Limited::Upstream`] if the response is a refusal, for callers that want an error; else
    /// `None`.
    #[inline]
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.sent().answered(signal).1
    }

    /// Marks the request as sent.
    pub(crate) fn sent(self) -> Sent {
        let Permit {
            core,
            key,
            slot,
            in_flight_slot,
            wait,
        } = self;
        let (cost, at) = slot.map_or_else(|| (0, clock::now()), |slot| (slot.cost, slot.at));
        let host = wait.as_ref().and_then(|wait| wait.host);
        let more = (in_flight_slot.is_some() || wait.is_some()).then(|| {
            Box::new(More {
                in_flight_slot,
                wait,
            })
        });
        Sent {
            core: core.id,
            cost,
            key,
            host,
            at,
            more,
        }
    }

    /// Takes the permit apart: its slot, and its in-flight slot.
    pub(super) fn into_parts(self) -> (Option<Reservation>, Option<InFlightSlot>) {
        (self.slot, self.in_flight_slot)
    }

    /// Ends the permit of a request that was certainly not sent. Its slot goes to the next waiter,
    /// or else back to the store.
    pub fn give_back(self) {
        if let Some(slot) = self.slot {
            self.core.give_back(self.key, slot);
        }
    }
}

/// A request that was sent and not yet answered. Its permit is spent. The fast path of the layers
/// makes it without a [`Permit`].
///
/// Each response future holds one, so it has to be small. Unlike a [`Permit`], it holds a
/// [`CoreId`] instead of an `Arc<Core>`. What only few requests need is in a box.
pub(crate) struct Sent {
    core: CoreId,
    cost: u32,
    key: Key,
    /// The key of its host, if the host matters: see [`Entry::host`].
    host: Option<Key>,
    /// When the request was sent, or a little before.
    at: Instant,
    more: Option<Box<More>>,
}

/// What only few requests have on their way.
#[derive(Default)]
struct More {
    in_flight_slot: Option<InFlightSlot>,
    wait: Option<Box<PastWait>>,
}

impl Sent {
    /// Makes the value for a request that got its permit at once.
    #[inline]
    pub(crate) fn at_once(core: CoreId, entry: &Entry, at: Instant) -> Self {
        let &Entry {
            key, cost, host, ..
        } = entry;
        Sent {
            core,
            cost,
            key,
            host,
            at,
            more: None,
        }
    }

    /// Adds the name of the key, for the error of a refusal, if the caller wants one.
    #[cold]
    pub(crate) fn named(mut self, label: Label) -> Self {
        let wait = PastWait {
            label,
            waited: Duration::ZERO,
            turns: 0,
            host: None,
        };
        self.more.get_or_insert_default().wait = Some(Box::new(wait));
        self
    }

    /// Adds the in-flight slot of the call, if calls in flight are limited.
    pub(crate) fn in_flight(mut self, in_flight_slot: Option<InFlightSlot>) -> Self {
        if in_flight_slot.is_some() {
            self.more.get_or_insert_default().in_flight_slot = in_flight_slot;
        }
        self
    }

    pub(crate) fn key(&self) -> Key {
        self.key
    }

    /// Returns the key of its host, if the host matters: see [`Entry::host`].
    pub(crate) fn host(&self) -> Option<Key> {
        self.host
    }

    /// Returns whether a response may end the probation of a key. Then it matters even if it states
    /// nothing about limits.
    #[inline]
    pub(crate) fn may_end_probation(&self) -> bool {
        is_any_uncertain()
    }

    /// Ends the request after a response that states nothing about limits. Its call is in flight
    /// until the in-flight slot is dropped.
    #[inline]
    pub(crate) fn into_in_flight_slot(self) -> Option<InFlightSlot> {
        self.more?.in_flight_slot
    }

    /// Ends the request with what its response states. Returns the error of a response that is a
    /// refusal. The call is in flight until the in-flight slot is dropped.
    pub(crate) fn answered(mut self, signal: &Signal) -> (Option<InFlightSlot>, Option<Limited>) {
        let Sent {
            key,
            host,
            cost,
            at,
            ..
        } = self;
        let hold = host_hold(key, host).unwrap_or(key);
        AnsweredCall {
            key,
            hold,
            cost,
            sent: at,
        }
        .observe(self.core, signal);
        let limited = signal
            .refusal()
            .map(|status| self.upstream_limited(status, signal));
        (self.into_in_flight_slot(), limited)
    }

    /// Ready with an error if the call has to end, because it may no longer be counted as in
    /// flight.
    #[inline]
    pub(crate) fn poll_lost(&self, cx: &Context<'_>) -> Poll<Limited> {
        let in_flight_slot = self
            .more
            .as_ref()
            .and_then(|more| more.in_flight_slot.as_ref());
        in_flight_slot.map_or(Poll::Pending, |in_flight_slot| {
            in_flight_slot.poll_limited(cx)
        })
    }

    #[cold]
    fn upstream_limited(&mut self, status: StatusCode, signal: &Signal) -> Limited {
        let PastWait {
            label,
            waited,
            turns,
            ..
        } = match self.more.as_mut().and_then(|more| more.wait.take()) {
            Some(wait) => *wait,
            None => PastWait {
                label: self.core.label(self.key),
                waited: Duration::ZERO,
                turns: 0,
                host: None,
            },
        };
        let retry_after = signal.retry_after();
        events::upstream_limited(&label, status, retry_after);
        let at = clock::wall(clock::now());
        let report = LimitedInfo::new(Facts {
            key: label,
            limit: None,
            retry_after,
            at,
            waited,
            turns,
        });
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Each response future holds one.
    #[test]
    fn requests_on_their_way_are_small() {
        assert!(size_of::<Sent>() <= 72, "{} bytes", size_of::<Sent>());
    }
}
