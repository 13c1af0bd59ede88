//! What the caller reads of a request that ends without a permit.
//!
//! A line, a hold or a limit of calls in flight stops a request with a [`Stopped`]. Here it becomes the caller's error, with
//! the names of key and limit. Only here is it decided why a slot comes too late: the key may be on hold by now, or the quota
//! may never allow the cost.

use std::time::{Duration, Instant};

use super::Request;
use crate::clock;
use crate::error::{Limited, Reason, StoreError};
use crate::events;
use crate::key::{Key, Label};
use crate::limiter::engine::Core;
use crate::limiter::part::{self, Part};
use crate::limiter::reservation::{NoSlot, Stopped};
use crate::limiter::settings::Settings;
use crate::refused::RefusedRequest;
use crate::store::Refusal;

impl Request {
    /// Returns the error of the request. `first` is the name of its first key. It has waited for `waited`, if it was not
    /// stopped when it entered.
    pub(in crate::limiter) fn error_of(
        &self,
        stopped: Stopped,
        first: &Label,
        waited: Option<Duration>,
        now: Instant,
    ) -> Limited {
        let part = stopped.part;
        let request = RefusedRequest {
            label: self.label_of(part, first),
            limit: self.parts()[part].limit_name(),
            waited: waited.unwrap_or_default(),
            turns: waited.map_or(0, |_| self.turns),
        };
        match self.reason_of(stopped) {
            Ok((reason, refusal)) => request.refuse(reason, refusal, now),
            Err(source) => request.fail(source, now),
        }
    }

    /// Returns why the request is refused, and what is known about a later attempt.
    ///
    /// # Errors
    ///
    /// That of the store, if the request fails with it.
    pub(in crate::limiter) fn reason_of(
        &self,
        Stopped { part, no_slot }: Stopped,
    ) -> Result<(Reason, Refusal), StoreError> {
        match no_slot {
            NoSlot::TooLate(refusal) => Ok(self.too_late(part, refusal)),
            NoSlot::Refused(reason, refusal) => Ok((reason, refusal)),
            // A process without room for one more key is no failure of the store.
            NoSlot::Failed(StoreError::Full { max_keys }) => {
                Ok((Reason::TooManyKeys(max_keys), Refusal::NEVER))
            }
            NoSlot::Failed(error) | NoSlot::Uncounted(error, _) => Err(error),
        }
    }

    /// Returns why a part has no slot in time: its quota never allows the cost, the key is on hold, or else the bound on the
    /// wait. If the store has named no limit, the wait is known, and the key has only one limit, the refusal names that one.
    fn too_late(&self, part: usize, refusal: Refusal) -> (Reason, Refusal) {
        let Part { core, key, .. } = &self.parts()[part];
        // The time is read here: an answer that arrived since the request was polled may end a hold that is over at a moment
        // which lies ahead of an earlier reading.
        let held = core.stated_hold(*key, clock::now());
        let is_held = held.is_some();
        // A hold may refuse the request before the store knows that its cost is never allowed.
        if (is_held || refusal.wait.is_none())
            && let Some(reason) =
                cost_above_limit(core, self.place.costs[part], core.largest_cost(*key))
        {
            return (reason, Refusal::NEVER);
        }
        if is_held {
            let wait = held.max(refusal.wait);
            let reason = core.hold_reason(*key, clock::now());
            return (reason, Refusal { wait, limit: None });
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
        (self.place.bound.reason(), Refusal { limit, ..refusal })
    }

    /// Reports that the request leaves uncounted, because the store of a part failed.
    pub(in crate::limiter) fn report_uncounted(
        &self,
        part: usize,
        cause: &StoreError,
        first: &Label,
    ) {
        let tally = &self.parts()[part].core.settings.tally;
        events::passed(tally, &self.label_of(part, first), cause);
    }

    /// Returns the name of the key of a part. `first` is that of the first part.
    fn label_of(&self, part: usize, first: &Label) -> Label {
        let parts = self.parts();
        match part::labelled(part, |part| parts[part].core.settings.is_further_unit) {
            0 => first.clone(),
            of_key => parts[of_key].core.label(parts[of_key].key, None),
        }
    }
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
    let is_own = core
        .states
        .find(key, |state| state.limits.set_spec().is_none());
    match is_own {
        Some(true) => Err(above),
        _ => Ok(cost),
    }
}

/// Returns why a quota whose `largest` cost this is never allows a request of `cost`, if that is so.
pub(in crate::limiter) fn cost_above_limit(core: &Core, cost: u32, largest: u32) -> Option<Reason> {
    (cost > largest).then(|| Reason::CostAboveLimit {
        cost,
        largest,
        unit: core.unit_name(),
    })
}
