//! An in-flight slot of a key, held from the permit to the end of the call.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::engine::Core;
use super::in_flight::KeyCalls;
use super::limited::Request;
use super::reservation::Settled;
use super::settings::OnStoreError;
use crate::clock;
use crate::error::{Limited, StoreError};
use crate::key::Key;
use crate::key_map::Full;
use crate::quota::Limit;
use crate::store::{Claim, Refusal, StoreEvent, StoreListener};
use crate::wait_queue::Number;
use crate::wakers::Wakers;

/// A call in flight. Dropping it ends the call.
///
/// Boxed, so that calls without a limit in flight stay small.
#[derive(Debug)]
pub(crate) struct InFlightSlot(Box<Taken>);

#[derive(Debug)]
struct Taken {
    core: Arc<Core>,
    key: Key,
    /// The number under which the key's calls in flight know it.
    number: Number,
}

impl InFlightSlot {
    pub(super) fn new(core: Arc<Core>, key: Key, number: Number) -> Self {
        InFlightSlot(Box::new(Taken { core, key, number }))
    }

    /// Returns whether the store may have granted the slot to another call. Always `false` with
    /// [`OnStoreError::FailOpen`].
    pub(super) fn is_lost(&self, now: Instant) -> bool {
        let Taken { core, key, number } = &*self.0;
        core.at_guarded_flight(*key, |calls| calls.is_lost(*number, now))
            .unwrap_or(false)
    }

    /// Ready when the store may have granted the slot to another call: then this call has to end.
    /// Never ready with [`OnStoreError::FailOpen`].
    pub(crate) fn poll_lost(&self, cx: &Context<'_>) -> Poll<StoreError> {
        let Taken { core, key, number } = &*self.0;
        let lost = core.at_guarded_flight(*key, |calls| calls.poll_lost(*number, cx));
        lost.unwrap_or(Poll::Pending)
            .map(|()| StoreError::InFlightSlotLost)
    }

    /// The same as [`poll_lost`](InFlightSlot::poll_lost), with the error of the call.
    pub(crate) fn poll_limited(&self, cx: &Context<'_>) -> Poll<Limited> {
        self.poll_lost(cx).map(|source| {
            let now = clock::now();
            Request::new(self.0.core.label(self.0.key, None), now).fail(source, now)
        })
    }
}

impl Drop for InFlightSlot {
    fn drop(&mut self) {
        let now = clock::now();
        let Taken { core, key, number } = &*self.0;
        core.at_flight(*key, |calls, wakers| calls.end(*number, now, wakers));
    }
}

impl Core {
    /// Asks for an in-flight slot of `key`, under `number`. Returns `None` if the request waits. An
    /// `impatient` request cannot wait: it is refused if the answer of the store grants it no slot.
    ///
    /// # Errors
    ///
    /// [`Full`] if there is no room for one more key.
    pub(super) fn enter_flight(
        self: &Arc<Self>,
        key: Key,
        number: Number,
        impatient: bool,
        now: Instant,
    ) -> Result<Option<Settled<Number>>, Full> {
        let Some(in_flight) = &self.in_flight else {
            return Ok(None);
        };
        let max_queue = self.settings.max_queue;
        let entered = in_flight.with_new(key, now, |calls| {
            if calls.waiting() >= max_queue {
                return false;
            }
            calls.enter(number, impatient, now);
            true
        })?;
        if !entered.done {
            return Ok(Some(Settled::QueueFull));
        }
        self.send(entered.claim);
        Ok(in_flight
            .with(key, |calls| calls.collect(number, now))
            .flatten())
    }

    /// Polls the wait of `number` for an in-flight slot of `key`. It ends at `until` at the latest.
    pub(super) fn poll_flight(
        self: &Arc<Self>,
        key: Key,
        number: Number,
        until: Instant,
        now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Settled<Number>> {
        let polled = self.at_flight(key, |calls, wakers| {
            calls.poll(number, until, now, cx, wakers)
        });
        polled.unwrap_or(Poll::Ready(Settled::Refused(Refusal::NEVER)))
    }

    /// Ends the wait of `number` for an in-flight slot of `key`.
    pub(super) fn leave_flight(self: &Arc<Self>, key: Key, number: Number) {
        let now = clock::now();
        self.at_flight(key, |calls, wakers| calls.leave(number, now, wakers));
    }

    /// Takes in what the store states about the claims of `holder` for `key`.
    pub(super) fn in_flight_heard(self: &Arc<Self>, key: Key, holder: u64, event: StoreEvent) {
        let now = clock::now();
        self.at_flight(key, |calls, wakers| {
            if calls.holder() == holder {
                calls.on_event(event, now, wakers);
            }
        });
    }

    /// Returns the refusal of a request that got no in-flight slot. It states no time to retry,
    /// because it is unknown when a call will end.
    pub(super) fn flight_refusal(&self) -> Refusal {
        let limit = self.in_flight.as_ref().map(|calls| Limit::InFlight {
            count: calls.limit(),
        });
        Refusal { wait: None, limit }
    }

    /// Runs `act` on the calls in flight of `key`, wakes tasks, and sends the claim that follows.
    fn at_flight<R>(
        self: &Arc<Self>,
        key: Key,
        act: impl FnOnce(&mut KeyCalls, &mut Wakers) -> R,
    ) -> Option<R> {
        let mut wakers = Wakers::default();
        let acted = self
            .in_flight
            .as_ref()?
            .act(key, |calls| act(calls, &mut wakers))?;
        wakers.wake();
        self.send(acted.claim);
        Some(acted.done)
    }

    /// Runs `act` on the calls in flight of `key`. Does nothing with [`OnStoreError::FailOpen`]:
    /// then calls go on even if the store can no longer count them.
    fn at_guarded_flight<R>(&self, key: Key, act: impl FnOnce(&mut KeyCalls) -> R) -> Option<R> {
        if self.settings.on_store_error == OnStoreError::FailOpen {
            return None;
        }
        self.in_flight.as_ref()?.with(key, act)
    }

    fn send(self: &Arc<Self>, claim: Option<Claim>) {
        if let Some(claim) = claim {
            let listener: Arc<dyn StoreListener> = self.clone();
            self.settings.store.claim(claim, &listener);
        }
    }
}
