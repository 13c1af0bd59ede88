//! Holds of keys: after a refusal by the upstream, or on an operator's demand, a key sends nothing
//! until the hold ends.
//!
//! A hold counts in this process at once, and in all processes that share the store. This file sets
//! and ends holds, takes in those of other processes, lets requests wait for their end, and lets one
//! request leave first as a probe. The state of one key's hold is in `key_state/key_hold.rs`.

use std::mem;
use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use super::engine::{Core, CoreId};
use super::key_state::{HoldSource, KeyContext, KeyState};
use super::own_quota;
use super::queue::Number;
use super::reservation::ProbeNumber;
use super::settings::Settings;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::stats::{Cause, Engine};
use crate::store::{Change, HoldState, InForce, StoreReply};

/// The longest hold: 366 days. Longer ones are cut to this.
const LONGEST_HOLD: Duration = Duration::from_secs(366 * 86_400);

/// Holds `key` for `span`, here and in all processes that share the store.
pub(super) async fn hold_for(core: &Arc<Core>, key: Key, span: Duration) -> Result<(), StoreError> {
    let in_force = begin(core, key, span, false, Cause::Operator)
        .arrives()
        .await?;
    // Another process may have released the key before, and this process did not know.
    adopt_published(core, key, in_force.hold);
    Ok(())
}

/// Holds `key` for `span` in this process, and sends the hold to the store. It takes effect there even
/// if the reply is dropped. If it is `cut`, one request leaves first at its end.
pub(super) fn begin(
    core: &Arc<Core>,
    key: Key,
    span: Duration,
    cut: bool,
    cause: Cause,
) -> StoreReply<InForce> {
    let now = clock::now();
    let releases = core.states.find(key, |state| state.hold.releases());
    let held = HoldState {
        remaining: span.min(LONGEST_HOLD),
        releases: releases.unwrap_or(0),
        cut,
    };
    adopt_seen(core, key, held, now);
    if releases.is_none() && cause == Cause::Guard {
        // The hold was counted when the key got its state.
        tell(core, key, key, held.remaining, cause);
    } else {
        report(core, key, key, held.remaining, cause);
    }
    let Settings { store, .. } = &core.settings;
    let change = Change::Hold {
        hold: held,
        remaining: None,
    };
    store.change(key, &core.terms(key), change)
}

/// Ends the hold of `key`, here and in all processes that share the store.
pub(super) async fn release(core: &Arc<Core>, key: Key) -> Result<(), StoreError> {
    let kinds = core.states.read(key, |state| state.hold.kinds());
    let of_kinds = kinds.into_iter().map(|kind| key.of_kind(kind));
    for held in std::iter::once(key).chain(of_kinds) {
        let Settings { store, .. } = &core.settings;
        let released = store.change(held, &core.terms(held), Change::Release);
        let in_force = released.arrives().await?;
        adopt_seen(core, held, in_force.hold, clock::now());
        // The message of the release may have come first, and looks like that of an accepted request.
        core.states
            .find(held, |state| state.hold.forget_suspicion());
    }
    own_quota::forget_learned(core, key).await?;
    events::released(&core.settings.tally, &core.label(key, None));
    match &core.settings.guard {
        Some(guard) => guard.clone().release(key).await,
        None => Ok(()),
    }
}

/// Counts, notes and reports that `key` is on hold. It is called as `named`: another key if the hold is that of one kind of
/// its requests.
pub(super) fn report(core: &Core, key: Key, named: Key, left: Duration, cause: Cause) {
    core.tally().held(cause);
    tell(core, key, named, left, cause);
}

/// Notes and reports that `key` is on hold.
fn tell(core: &Core, key: Key, named: Key, left: Duration, cause: Cause) {
    let now = clock::now();
    core.states
        .find(key, |state| state.hold.note_cause(cause, left, now));
    core.tell_hold(named, left, cause);
}

/// Takes in a hold of `key` that this process has seen itself.
pub(super) fn adopt_seen(core: &Arc<Core>, key: Key, held: HoldState, now: Instant) {
    // If there is no room for one more key, the next call learns of the hold from the store.
    let _ = core.with_new_state(key, now, |state, ctx| {
        state.adopt_hold(ctx, held, HoldSource::Seen)
    });
}

/// Takes in that another process has held or released `key`.
///
/// If the key has no state here, no request waits, and the first request learns of the hold from
/// the store. State is made only if the requests of the key do not ask the store. This is so if no
/// rate is limited, or if each host has holds of its own.
pub(super) fn adopt_published(core: &Arc<Core>, key: Key, held: HoldState) {
    adopt_elsewhere(core, key, held, false);
    if core.class().is_some() {
        // A process without shares knows no classes: it holds and releases the whole key.
        adopt_elsewhere(core, core.part_of(key), held, true);
    }
}

/// Does what [`adopt_published`] does. `of_whole` states that the hold is that of the key of which `key`
/// is a part.
fn adopt_elsewhere(core: &Arc<Core>, key: Key, held: HoldState, of_whole: bool) {
    let now = clock::now();
    // Returns how long the key stays on hold, if it was not on hold before. A store in memory also
    // notifies the limiter that sends the hold.
    let take_in = |state: &mut KeyState, ctx: &mut KeyContext<'_>| {
        let before = state.hold.left(now);
        let was_sent = state.hold.was_sent_at(now);
        let was_held = before.is_some() || was_sent;
        if of_whole {
            state.follow_whole(ctx, held);
        } else {
            state.adopt_hold(ctx, held, HoldSource::Published);
        }
        if let Some(left) = state
            .hold
            .left(now)
            .filter(|left| !was_sent && Some(*left) > before)
        {
            state.hold.note_cause(Cause::Elsewhere, left, now);
        }
        state.hold.left(now).filter(|_| !was_held)
    };
    let requests_ask = core.has_rates() && !core.hosts.are_any();
    let begun = if requests_ask || of_whole || held.remaining.is_zero() {
        core.with_state(key, now, take_in)
    } else {
        core.with_new_state(key, now, take_in).ok()
    };
    if let Some(Some(left)) = begun {
        report(core, key, key, left, Cause::Elsewhere);
    }
}

/// Lets a request of `key` pass, unless a hold or a probe stops it. If the key is on probation, the request
/// leaves as the probe that this returns.
///
/// # Errors
///
/// How long requests of the key may not leave.
pub(super) fn pass(core: &Core, key: Key, now: Instant) -> Result<Option<Probe>, Duration> {
    let max_hold = core.settings.max_hold;
    let passed = core
        .states
        .find(key, |state| state.hold.pass(max_hold, now))
        .unwrap_or(Ok(None))?;
    Ok(passed.map(|number| Probe::new(core.id, key, number)))
}

/// Returns for how long a hold or a probe of `key` stops all requests, if one does. `None` if this process has no state of
/// the key.
pub(super) fn blocked(core: &Arc<Core>, key: Key, now: Instant) -> Option<Option<Duration>> {
    let max_hold = core.settings.max_hold;
    let blocked = core
        .states
        .find(key, |state| state.hold.blocked_for(max_hold, now));
    match blocked? {
        None => Some(None),
        Some(_) => still_blocked(core, key, now),
    }
}

/// Looks again, in visits of the state of `key`, whether a hold or a probe stops all requests. The first one looks whether
/// the machine has slept, and may ask the store for the right to probe: one in this process answers before the second.
fn still_blocked(core: &Arc<Core>, key: Key, now: Instant) -> Option<Option<Duration>> {
    let max_hold = core.settings.max_hold;
    core.with_state(key, now, |state, ctx| state.share_probe(ctx, true));
    core.with_state(key, now, |state, _| state.hold.blocked_for(max_hold, now))
}

/// The same for the waiter `number`, whose task is woken when the answer changes. It becomes no probe, because it waits
/// for other things too. If it `keeps` the state of the key, the state is made if there is none.
pub(super) fn watch(
    core: &Arc<Core>,
    key: Key,
    number: Number,
    keeps: bool,
    now: Instant,
    cx: &Context<'_>,
) -> Option<Duration> {
    let max_hold = core.settings.max_hold;
    let watch = |state: &mut KeyState| state.hold.watch(number, max_hold, now, cx);
    if keeps {
        // If there is no room for one more key, the next call for the request is refused.
        core.with_new_state(key, now, |state, _| watch(state))
            .ok()??;
    } else {
        core.states.find(key, watch)??;
    }
    // The visits see that a request waits for the end of the hold.
    still_blocked(core, key, now)?
}

/// Returns how many requests watch the hold of `key`, because they wait for its end or for something else.
pub(super) fn waiting(core: &Core, key: Key) -> usize {
    core.states.read(key, |state| state.hold.waiting())
}

/// Asks the store for a release of `key` that may have been missed, if nobody has asked just now. The request
/// that asks does not wait for the answer of a store that answers later.
pub(super) fn confirm(core: &Arc<Core>, key: Key, now: Instant) {
    core.with_state(key, now, |state, ctx| {
        if state.hold.take_inquiry(now) {
            state.confirm(ctx);
        }
    });
}

/// Forgets the waiter `number`, which no longer waits for the hold of `key`.
pub(super) fn leave(core: &Core, key: Key, number: Number) {
    core.states.find(key, |state| state.hold.unwatch(number));
}

/// Asks the store about a hold of `key`, for which this process has no state. The request that asks
/// does not wait for the answer of a store that answers later.
pub(super) fn inquire(core: &Arc<Core>, key: Key, now: Instant) {
    // If there is no room for one more key, the request goes on without an answer.
    let _ = core.with_new_state(key, now, KeyState::inquire);
}

/// What a request has that leaves as the probe of a key, until its response.
///
/// No other request is the probe meanwhile. If it is dropped, the request was not sent, or its call was cancelled.
/// Then the next request can be the probe.
#[derive(Debug)]
#[must_use = "dropping a probe lets another request be the probe"]
pub(super) struct Probe {
    core: CoreId,
    /// The key of the hold: that of the request, or of its host.
    key: Key,
    number: ProbeNumber,
}

impl Probe {
    pub(super) fn new(core: CoreId, key: Key, number: ProbeNumber) -> Self {
        Probe { core, key, number }
    }

    /// Returns whether it is the probe of `key`.
    pub(super) fn is_of(&self, core: CoreId, key: Key) -> bool {
        self.core == core && self.key == key
    }

    pub(super) fn number(&self) -> ProbeNumber {
        self.number
    }

    /// Ends the probe, whose response has arrived.
    pub(super) fn answered(self) {
        mem::forget(self);
    }

    /// Returns the number, for the state of its key.
    pub(super) fn into_number(self) -> ProbeNumber {
        let number = self.number;
        mem::forget(self);
        number
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // A limiter that was dropped has no requests that wait.
        if let Some(core) = self.core.find() {
            core.with_state(self.key, clock::now(), |state, ctx| {
                state.probe_not_sent(ctx, self.number);
            });
        }
    }
}
