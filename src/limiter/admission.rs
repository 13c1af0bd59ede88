//! The way of a request to its permit, and the outcome of each step.
//!
//! A request passes up to three stages, in this order:
//!
//! 1. If each host has holds of its own, it waits until its host is not on hold.
//! 2. If calls in flight are limited, it gets an in-flight slot of its key.
//! 3. If rates are limited, it gets a slot. Else it waits until its key is not on hold.
//!
//! [`enter`], [`enter_past_host`] and [`enter_with_in_flight_slot`] enter a request at the first,
//! second and third stage. Each goes on to the next stage, until the request has to wait. When the
//! wait of a stage ends, the waiting future calls the function of the next stage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Core;
use super::entry::Entry;
use super::holds;
use super::in_flight_slot::{self, InFlightSlot};
use super::key_state::{KeyState, Ticket};
use super::probe::Probe;
use super::queue::{Number, next_number};
use super::reservation::{Reservation, Settled, WaitBound};
use super::settings::Settings;
use super::taken::{OfKey, Taken};
use crate::clock;
use crate::error::{Reason, StoreError};
use crate::key::Key;
use crate::key_map::Full;
use crate::store::Refusal;

/// How far a request has come.
///
/// The stage that decides makes it, and the waiting future receives it unchanged. Three other types
/// are similar:
///
/// - [`Settled`] is the result of one queue. A queue knows neither the other stages nor the reason
///   of a refusal.
/// - `Started` is what the layers get from the limiter. Its future and its error each cost an
///   allocation, which this type does not need.
/// - The `Admission` in `layer/seam.rs` is what a service gets from any layer.
pub(super) enum Admission {
    /// The request may leave now with what it has. It has no slot if the store failed, with this error, and the
    /// limiter fails open.
    Granted(Taken, Option<StoreError>),
    /// The request waits, and keeps its `in_flight_slot` meanwhile.
    Waits {
        wait: WaitFor,
        in_flight_slot: Option<InFlightSlot>,
    },
    /// The request is refused by this process.
    Refused(Reason, Refusal),
    /// The request is refused because the store failed.
    Failed(StoreError),
}

/// What a request waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum WaitFor {
    /// The end of its host's hold, expected at this moment.
    HostHold(Instant),
    /// An in-flight slot, under this number.
    InFlightSlot(Number),
    /// A slot, under this number.
    Slot(Number),
    /// The end of its key's hold, expected at this moment.
    Hold(Instant),
}

impl WaitFor {
    /// Returns how many requests of `key` wait for the same, the request itself included.
    pub(super) fn queued(self, core: &Core, key: Key) -> usize {
        match self {
            WaitFor::HostHold(_) | WaitFor::Hold(_) => 1,
            WaitFor::InFlightSlot(_) => core
                .in_flight
                .as_ref()
                .map_or(0, |calls| calls.waiting(core.whole(key))),
            WaitFor::Slot(_) => core.states.find(key, |state| state.waiting()).unwrap_or(1),
        }
    }
}

impl Admission {
    fn waits(wait: WaitFor, in_flight_slot: Option<InFlightSlot>) -> Self {
        Admission::Waits {
            wait,
            in_flight_slot,
        }
    }

    /// Fails the request if the claim of this process expired while it waited with an in-flight slot.
    pub(super) fn unless_lost(self, now: Instant) -> Self {
        match self {
            Admission::Granted(taken, _) if taken.is_lost(now) => {
                Admission::Failed(StoreError::InFlightSlotLost)
            }
            admission => admission,
        }
    }

    /// Refuses a request because of a hold that ends after `left`.
    pub(super) fn held(left: Duration) -> Self {
        Admission::Refused(
            Reason::Held,
            Refusal {
                wait: Some(left),
                limit: None,
            },
        )
    }
}

/// Enters a request at the first stage.
pub(super) fn enter(core: &Arc<Core>, entry: &Entry, bound: WaitBound, now: Instant) -> Admission {
    match stopped_by_host(core, entry, bound, now) {
        Some(stopped) => stopped,
        None => enter_past_host(core, entry, None, bound, now),
    }
}

/// Returns what stops a request because its host is on hold.
fn stopped_by_host(
    core: &Arc<Core>,
    entry: &Entry,
    bound: WaitBound,
    now: Instant,
) -> Option<Admission> {
    let hold = core.hosts.hold_of(entry.key, entry.host)?;
    core.hosts.notice(entry.host?);
    let Settings {
        max_hold,
        max_queue,
        ..
    } = core.settings;
    let look = || {
        core.states.find(hold, |state| {
            (state.hold.blocked_for(max_hold, now), state.hold.waiting())
        })
    };
    let (left, waiting) = look().or_else(|| {
        // Another process may know of a hold.
        holds::inquire(core, hold, now);
        look()
    })?;
    let left = left?;
    let until = clock::after(now, left);
    if until > bound.latest {
        core.with_state(hold, now, |state, ctx| {
            if state.hold.take_inquiry(now) {
                state.confirm(ctx);
            }
        });
        return Some(Admission::held(left));
    }
    if waiting >= max_queue {
        return Some(Admission::Refused(
            Reason::QueueFull(max_queue),
            Refusal::NEVER,
        ));
    }
    Some(Admission::waits(WaitFor::HostHold(until), None))
}

/// Enters a request at the second stage. `number` is its number in the queue, if it has waited
/// before.
pub(super) fn enter_past_host(
    core: &Arc<Core>,
    entry: &Entry,
    number: Option<Number>,
    bound: WaitBound,
    now: Instant,
) -> Admission {
    match take_in_flight_slot(core, entry.key, bound, now) {
        Ok(in_flight_slot) => {
            enter_with_in_flight_slot(core, entry, in_flight_slot, number, bound, now)
        }
        Err(stopped) => stopped,
    }
}

/// Takes an in-flight slot of `key`, if calls in flight are limited. Returns what stops the request
/// if there is none, such as the wait for one.
#[expect(
    clippy::result_large_err,
    reason = "what stops a request is returned as it is"
)]
fn take_in_flight_slot(
    core: &Arc<Core>,
    key: Key,
    bound: WaitBound,
    now: Instant,
) -> Result<Option<InFlightSlot>, Admission> {
    if core.in_flight.is_none() {
        return Ok(None);
    }
    let number = next_number();
    let max_queue = core.settings.max_queue;
    match in_flight_slot::enter(core, key, number, bound.latest <= now, max_queue, now) {
        Ok(None) => Err(Admission::waits(WaitFor::InFlightSlot(number), None)),
        Ok(Some(settled)) => in_flight_slot_settled(core, key, bound, settled),
        Err(Full) => {
            let reason = Reason::TooManyKeys(core.settings.max_keys);
            Err(Admission::Refused(reason, Refusal::NEVER))
        }
    }
}

/// Returns the in-flight slot that a request got, or what stops the request. Returns `Ok(None)` if
/// the store failed and the limiter fails open.
#[expect(
    clippy::result_large_err,
    reason = "what stops a request is returned as it is"
)]
pub(super) fn in_flight_slot_settled(
    core: &Arc<Core>,
    key: Key,
    bound: WaitBound,
    settled: Settled<Number>,
) -> Result<Option<InFlightSlot>, Admission> {
    let Settings {
        max_wait,
        max_queue,
        ..
    } = core.settings;
    match settled {
        Settled::Granted(number) => Ok(Some(InFlightSlot::new(core.clone(), key, number))),
        Settled::Failed(source) if core.fails_open_on(&source) => Ok(None),
        Settled::Failed(source) | Settled::Uncounted(source, _) => Err(Admission::Failed(source)),
        Settled::Refused(_) => Err(Admission::Refused(
            bound.reason(max_wait),
            in_flight_slot::refusal(core, key),
        )),
        Settled::QueueFull => Err(Admission::Refused(
            Reason::QueueFull(max_queue),
            in_flight_slot::refusal(core, key),
        )),
    }
}

/// Enters a request at the third stage. `number` is its number in the queue, if it has waited
/// before.
pub(super) fn enter_with_in_flight_slot(
    core: &Arc<Core>,
    entry: &Entry,
    in_flight_slot: Option<InFlightSlot>,
    number: Option<Number>,
    bound: WaitBound,
    now: Instant,
) -> Admission {
    if core.settings.spec.quota().limits().is_empty() {
        return enter_without_rates(core, entry, in_flight_slot, bound, now);
    }
    let number = number.unwrap_or_else(next_number);
    let ticket = Ticket::new(number, entry.cost, bound);
    let entered = core.with_new_state(entry.key, now, |state, ctx| ticket.enter(state, ctx));
    let settled = match entered {
        Ok(None) => return Admission::waits(WaitFor::Slot(number), in_flight_slot),
        Ok(Some(settled)) => settled,
        Err(Full) => Settled::Failed(StoreError::Full {
            max_keys: core.settings.max_keys,
        }),
    };
    if let Settled::Failed(StoreError::Full { max_keys }) = settled {
        // This process has no room for one more key. That is no failure of the store.
        return Admission::Refused(Reason::TooManyKeys(max_keys), Refusal::NEVER);
    }
    slot_settled(core, entry, bound, settled, in_flight_slot, now)
}

/// Enters a request whose key has no limits of rates: only a hold stops it.
fn enter_without_rates(
    core: &Arc<Core>,
    entry: &Entry,
    in_flight_slot: Option<InFlightSlot>,
    bound: WaitBound,
    now: Instant,
) -> Admission {
    let key = entry.key;
    // The requests of this key do not ask the store for slots, so the first one asks for a hold.
    if core.states.find(key, |_| ()).is_none() {
        holds::inquire(core, key, now);
    }
    let left = match holds::pass(core, key, now) {
        Ok(probe) => {
            let taken = taken(core, entry, None, in_flight_slot, probe);
            return Admission::Granted(taken, None);
        }
        Err(left) => left,
    };
    let until = clock::after(now, left);
    if until <= bound.latest {
        Admission::waits(WaitFor::Hold(until), in_flight_slot)
    } else {
        Admission::held(until.saturating_duration_since(now))
    }
}

/// Returns what follows from the end of a request's wait for a slot, or from an attempt without a
/// wait.
pub(super) fn slot_settled(
    core: &Arc<Core>,
    entry: &Entry,
    bound: WaitBound,
    settled: Settled,
    in_flight_slot: Option<InFlightSlot>,
    now: Instant,
) -> Admission {
    match settled {
        Settled::Granted(slot) => {
            Admission::Granted(taken(core, entry, Some(slot), in_flight_slot, None), None)
        }
        Settled::Refused(refusal) => refused(core, entry, bound, refusal, now),
        Settled::QueueFull => {
            Admission::Refused(Reason::QueueFull(core.settings.max_queue), Refusal::NEVER)
        }
        Settled::Uncounted(cause, probe) => {
            let probe = probe.map(|number| Probe::new(core.id, entry.key, number));
            Admission::Granted(taken(core, entry, None, in_flight_slot, probe), Some(cause))
        }
        Settled::Failed(source) => Admission::Failed(source),
    }
}

/// Makes the record of what the request of `entry` has.
pub(super) fn taken(
    core: &Arc<Core>,
    entry: &Entry,
    slot: Option<Reservation>,
    in_flight_slot: Option<InFlightSlot>,
    probe: Option<Probe>,
) -> Taken {
    let of_key = OfKey::new(core.clone(), entry.key, entry.host, slot, in_flight_slot);
    Taken::of_one(of_key, probe.into_iter().collect())
}

/// Finds the reason of a refusal: a cost that the quota never allows, a hold of the key, else the bound
/// on the wait. If the store has named no limit, the wait is known, and the key has only one limit, the
/// refusal names that one.
fn refused(
    core: &Core,
    entry: &Entry,
    bound: WaitBound,
    refusal: Refusal,
    now: Instant,
) -> Admission {
    let is_held = core.held(entry.key, now).is_some();
    // A hold may refuse the request before the store knows that its cost is never allowed.
    if (is_held || refusal.wait.is_none())
        && let Some(reason) = cost_above_limit(core, entry.key, entry.cost)
    {
        return Admission::Refused(reason, Refusal::NEVER);
    }
    if is_held {
        return Admission::Refused(
            Reason::Held,
            Refusal {
                limit: None,
                ..refusal
            },
        );
    }
    let Settings { spec, quotas, .. } = &core.settings;
    // What a store says of a part of a divided quota may be its pace. The part itself is what a caller knows.
    let stated = refusal.limit.filter(|_| !core.is_divided());
    let limit = match spec.quota().limits() {
        // If other processes limit the key by another quota, it may be theirs.
        [only] if refusal.wait.is_some() && !quotas.is_any() => {
            stated.or_else(|| (!core.has_warned()).then_some(*only))
        }
        _ => refusal.limit,
    };
    let refusal = Refusal { limit, ..refusal };
    Admission::Refused(bound.reason(core.settings.max_wait), refusal)
}

/// Returns why the quota of `key` never allows a request of `cost`, if this process knows that before
/// it asks the store. Of a key without a state, only the store knows whether a quota was set for it. A quota
/// that was set may have been raised since, in a message that this process has missed.
pub(super) fn known_above_limit(core: &Core, key: Key, cost: u32) -> Option<Reason> {
    let above = cost_above_limit(core, key, cost)?;
    let is_own = |state: &mut KeyState| state.limits.set_spec().is_none();
    (core.states.find(key, is_own) == Some(true)).then_some(above)
}

/// Returns why the quota of `key` never allows a request of `cost`, if that is so.
pub(super) fn cost_above_limit(core: &Core, key: Key, cost: u32) -> Option<Reason> {
    let largest = core.quota_of(key).quota().largest_cost();
    (cost > largest).then(|| Reason::CostAboveLimit {
        cost,
        largest,
        unit: core.unit_name(),
    })
}
