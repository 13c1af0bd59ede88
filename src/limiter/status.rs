//! The state of a key, as operators and tests see it.

use std::time::Duration;

use super::engine::Core;
use super::key_state::StatedLimit;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::quota::Limit;
use crate::store::{LimitUsage, Usage};

/// The state of a key, as [`Limiter::peek`](crate::Limiter::peek) returns it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyStatus {
    /// Each limit that applies to the key, with the units that are used of it.
    pub limits: Vec<LimitUsage>,
    /// Units that are free now, including the permits that this process has prefetched. Zero while
    /// the key is on hold.
    ///
    /// Of a full bucket or burst, the last units may leave some milliseconds later: see
    /// [`Quota::bucket`](crate::Quota::bucket).
    pub free: u64,
    /// How long until one unit is free. Zero if `free` is not 0.
    ///
    /// Rates and holds are taken into account, but not calls in flight: their end is not known.
    pub next_slot: Duration,
    /// How many requests of the key wait in this process.
    pub waiting: usize,
    /// How long the key stays on hold. `None` if it is not on hold.
    ///
    /// A refusal by the upstream or an operator puts a key on hold. No request of the key is sent
    /// until the hold ends.
    pub held: Option<Duration>,
    /// The limits that the upstream has stated to this process, and that apply. Empty unless
    /// [`trust_headers`](crate::RateLimitBuilder::trust_headers) is
    /// [`Stricter`](crate::HeaderTrust::Stricter) or [`Replace`](crate::HeaderTrust::Replace).
    pub learned: Vec<StatedLimit>,
    /// Whether the store is unreachable and this process uses its share of the limits, which
    /// `limits` then has. Only with
    /// [`OnStoreError::FallbackShare`](crate::OnStoreError::FallbackShare).
    pub degraded: bool,
}

/// Reads the state of `key`, and consumes nothing.
pub(super) async fn read(core: &Core, key: Key) -> Result<KeyStatus, StoreError> {
    let answer = core.settings.store.peek(key, &core.terms(key));
    let Usage {
        limits,
        free: free_in_store,
        next_slot,
        hold,
        degraded,
    } = answer.arrives().await?;
    let now = clock::now();
    let local = core.states.find(key, |state| Local {
        queued: state.waiting(),
        prefetched: state.at_hand(now),
        held: state.hold.left(now),
        learned: state.upstream.limits().to_vec(),
    });
    let Local {
        queued,
        prefetched,
        held: held_here,
        learned,
    } = local.unwrap_or_default();
    let held = held_here.max(Some(hold.remaining).filter(|left| !left.is_zero()));
    let in_flight = limits
        .iter()
        .filter(|usage| matches!(usage.limit, Limit::InFlight { .. }));
    let rates_allow = free_in_store.saturating_add(u64::from(prefetched));
    let limits_allow = in_flight.fold(rates_allow, |free, usage| free.min(usage.free));
    let until_free = if limits_allow > 0 {
        Duration::ZERO
    } else {
        next_slot
    };
    Ok(KeyStatus {
        free: if held.is_some() { 0 } else { limits_allow },
        next_slot: until_free.max(held.unwrap_or_default()),
        waiting: queued
            + core
                .in_flight
                .as_ref()
                .map_or(0, |calls| calls.waiting(key)),
        limits,
        held,
        learned,
        degraded,
    })
}

/// What this process alone knows of a key.
#[derive(Default)]
struct Local {
    /// Requests that wait for a slot.
    queued: usize,
    /// Units that were fetched ahead.
    prefetched: u32,
    held: Option<Duration>,
    learned: Vec<StatedLimit>,
}
