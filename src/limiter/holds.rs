//! Holds of keys: after a refusal by the upstream, or on an operator's demand, a key sends nothing
//! until the hold ends.
//!
//! A hold counts in this process at once, and in all processes that share the store. This file sets
//! and ends holds, takes in those of other processes, and lets requests wait for their end. The
//! state of one key's hold is in `key_state/key_hold.rs`.

use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use super::engine::Core;
use super::hosts::host_hold;
use super::key_state::{HoldSource, KeyContext, KeyState};
use super::queue::Number;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::store::HoldState;

/// The longest hold: 366 days. Longer ones are cut to this.
const LONGEST_HOLD: Duration = Duration::from_secs(366 * 86_400);

impl Core {
    /// Holds `key` for `span`, here and in all processes that share the store.
    pub(super) async fn hold_for(
        self: &Arc<Self>,
        key: Key,
        span: Duration,
    ) -> Result<(), StoreError> {
        let now = clock::now();
        let releases = self
            .states
            .find(key, |state| state.hold.releases())
            .unwrap_or(0);
        let held = HoldState {
            remaining: span.min(LONGEST_HOLD),
            releases,
            cut: false,
        };
        self.set_hold(key, held, now);
        let held = self
            .settings
            .store
            .hold(key, &self.terms(key), held, None)
            .arrives()
            .await?;
        // Another process may have released the key before, and this process did not know.
        self.hold_heard(key, held);
        Ok(())
    }

    /// Ends the hold of `key`, here and in all processes that share the store.
    pub(super) async fn release(self: &Arc<Self>, key: Key) -> Result<(), StoreError> {
        let held = self
            .settings
            .store
            .release(key, &self.terms(key))
            .arrives()
            .await?;
        self.set_hold(key, held, clock::now());
        Ok(())
    }

    /// Takes in a hold of `key` that this process has seen itself.
    pub(super) fn set_hold(self: &Arc<Self>, key: Key, held: HoldState, now: Instant) {
        // If there is no room for one more key, the next call learns of the hold from the store.
        let _ = self.with_new_state(key, now, |state, ctx| {
            state.adopt_hold(ctx, held, HoldSource::Seen)
        });
    }

    /// Takes in that another process has held or released `key`.
    ///
    /// If the key has no state here, no request waits, and the first request learns of the hold
    /// from the store. State is made only if the requests of the key do not ask the store. This is
    /// so if no rate is limited, or if holds go by host.
    pub(super) fn hold_heard(self: &Arc<Self>, key: Key, held: HoldState) {
        let now = clock::now();
        let hear = |state: &mut KeyState, ctx: &mut KeyContext<'_>| {
            state.adopt_hold(ctx, held, HoldSource::Published)
        };
        let requests_ask = !self.settings.spec.quota().limits().is_empty() && !self.hosts.are_any();
        if requests_ask || held.remaining.is_zero() {
            self.with_state(key, now, hear);
        } else {
            let _ = self.with_new_state(key, now, hear);
        }
    }

    /// Takes in that the upstream stated to another process that less is left of a limit. `writes`
    /// is how often the state in the store had been written then.
    pub(super) fn less_heard(self: &Arc<Self>, key: Key, writes: u64) {
        self.with_state(key, clock::now(), |state, ctx| {
            state.remaining_fell(ctx, writes)
        });
    }

    /// Takes in that this process may have missed events of the store. So it asks the store again
    /// about holds. If the store was `reconnected`, it may also have lost its state. Then this
    /// process asks about bookings as well.
    pub(super) fn events_missed(self: &Arc<Self>, reconnected: bool, now: Instant) {
        let mut keys = Vec::new();
        self.states.for_each(|key, state| {
            state.doubt();
            if state.hold.left(now).is_some() || (reconnected && state.is_booked()) {
                keys.push(key);
            }
        });
        for key in keys {
            self.with_state(key, now, KeyState::confirm);
        }
    }

    /// Returns for how long requests of `key` may not leave, because of a hold or a probe. If the
    /// key is on probation and a request may leave, that request becomes the probe.
    pub(super) fn blocked(&self, key: Key, now: Instant) -> Option<Duration> {
        let max_hold = self.settings.max_hold;
        self.states
            .find(key, |state| state.hold.pass(max_hold, now).err())
            .flatten()
    }

    /// The same as [`blocked`](Core::blocked) for the waiter `number`, whose task is woken when the
    /// answer changes.
    pub(super) fn poll_hold(
        &self,
        key: Key,
        number: Number,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let max_hold = self.settings.max_hold;
        self.states
            .find(key, |state| {
                state.hold.poll_pass(number, max_hold, now, cx).err()
            })
            .flatten()
    }

    /// Returns how long the waiter `number` waits for the end of a host's hold, if at all. The
    /// waiter becomes no probe, because it waits for other things too. Its task is woken when the
    /// answer changes.
    pub(super) fn poll_host_hold(
        &self,
        hold: Key,
        number: Number,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let max_hold = self.settings.max_hold;
        self.states
            .find(hold, |state| state.hold.watch(number, max_hold, now, cx))
            .flatten()
    }

    /// Forgets the waiter `number`, which no longer waits for the hold of `key`.
    pub(super) fn leave_hold(&self, key: Key, number: Number) {
        self.states.find(key, |state| state.hold.unwatch(number));
    }

    /// Returns whether `host` is known to be neither on hold nor on probation. Always true if holds
    /// under `key` do not go by host.
    #[inline]
    pub(super) fn is_host_clear(&self, key: Key, host: Option<Key>, now: Instant) -> bool {
        let Some((hold, host)) = host_hold(key, host).zip(host) else {
            return true;
        };
        let first = self.hosts.notice(host);
        if first.is_some_and(|first| first.is_clear()) {
            return true;
        }
        let max_hold = self.settings.max_hold;
        let look = |state: &mut Box<KeyState>| {
            let is_clear = state.hold.is_clear(max_hold, now);
            if let Some(first) = first {
                first.set_clear(is_clear);
            }
            is_clear
        };
        self.states.find(hold, look).unwrap_or(false)
    }

    /// Asks the store about a hold of `key`, for which this process has no state. If the store does
    /// not answer at once, the answer comes too late for the request that asks.
    pub(super) fn inquire(self: &Arc<Self>, key: Key, now: Instant) {
        // If there is no room for one more key, the request goes on without an answer.
        let _ = self.with_new_state(key, now, KeyState::inquire);
    }
}
