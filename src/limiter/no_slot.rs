//! Why a request is refused that gets no slot.

use super::engine::Core;
use super::key_state::KeyState;
use super::limited::Why;
use super::part::Part;
use super::settings::Settings;
use crate::clock;
use crate::error::Reason;
use crate::key::Key;
use crate::store::Refusal;

/// Finds the reason of a refusal: a cost that the quota never allows, a hold of the key, else the bound
/// on the wait, as `too_long` states it. If the store has named no limit, the wait is known, and the key has only one
/// limit, the refusal names that one.
pub(super) fn refused(part: &Part, cost: u32, too_long: Reason, refusal: Refusal) -> Why {
    let Part { core, key, .. } = part;
    // The time is read here: an answer that arrived since the request was polled may end a hold that is over at a moment
    // which lies ahead of an earlier reading.
    let held = core.stated_hold(*key, clock::now());
    let is_held = held.is_some();
    // A hold may refuse the request before the store knows that its cost is never allowed.
    if (is_held || refusal.wait.is_none())
        && let Some(reason) = cost_above_limit(core, cost, core.largest_cost(*key))
    {
        return Why::Refused(reason, Refusal::NEVER);
    }
    if is_held {
        let wait = held.max(refusal.wait);
        let reason = core.hold_reason(*key, clock::now());
        return Why::Refused(reason, Refusal { wait, limit: None });
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
    Why::Refused(too_long, Refusal { limit, ..refusal })
}

/// Returns the cost that a request of `cost` has to wait for: if the cost may be an estimate, at most the whole limit. The
/// settlement charges what is missing.
///
/// # Errors
///
/// Why the quota of `key` never allows the request, if this process knows that before it asks the store. Of a key without
/// a state, only the store knows whether a quota was set for it. A quota that was set may have been raised since, in a
/// message that this process has missed.
pub(super) fn awaited_cost(core: &Core, key: Key, cost: u32) -> Result<u32, Reason> {
    let largest = core.largest_cost(key);
    let Some(above) = cost_above_limit(core, cost, largest) else {
        return Ok(cost);
    };
    if core.settings.waits_above_limit {
        return Ok(largest);
    }
    let is_own = |state: &mut KeyState| state.limits.set_spec().is_none();
    match core.states.find(key, is_own) {
        Some(true) => Err(above),
        _ => Ok(cost),
    }
}

/// Returns why a quota whose `largest` cost this is never allows a request of `cost`, if that is so.
pub(super) fn cost_above_limit(core: &Core, cost: u32, largest: u32) -> Option<Reason> {
    (cost > largest).then(|| Reason::CostAboveLimit {
        cost,
        largest,
        unit: core.unit_name(),
    })
}
