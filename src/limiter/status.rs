//! The state of a key, as operators and tests see it.

use std::sync::Arc;
use std::time::Duration;

use super::cores::Cores;
use super::engine::Core;
use super::key_state::StatedLimit;
use super::quotas::{QuotaId, Quotas};
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::store::{LimitUsage, SetQuota, Usage};

/// The state of a key, as [`Limiter::peek`](crate::Limiter::peek) returns it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyStatus {
    /// Where the quota of the key comes from.
    pub quota_source: QuotaSource,
    /// Each limit that applies to the key, and how much of it is used. Of a [divided](crate::guide::classes) quota, it is the sum
    /// of all parts. Used units are named by [`unit`](LimitUsage::unit).
    pub limits: Vec<LimitUsage>,
    /// Units that are free now, including the permits that this process has prefetched. Zero while
    /// the key is on hold. If the quota [counts](crate::Quota::of) several units, these are requests,
    /// or else units of its first limit.
    ///
    /// Of a full bucket or burst, the last units may leave some milliseconds later: see
    /// [`Quota::bucket`](crate::Quota::bucket).
    pub free: u64,
    /// How long until one unit is free, of each kind. Zero if that is so now.
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
    /// The limits that the upstream has stated to this process, and that apply. Other processes may have
    /// learned more: [`quota_source`](Self::quota_source). Empty unless
    /// [`trust_headers`](crate::RateLimitBuilder::trust_headers) is
    /// [`Stricter`](crate::HeaderTrust::Stricter) or [`Replace`](crate::HeaderTrust::Replace).
    pub learned: Vec<StatedLimit>,
    /// Whether the store is unreachable and this process uses its share of the limits, which
    /// `limits` then has. Only with
    /// [`OnStoreError::FallbackShare`](crate::OnStoreError::FallbackShare).
    pub degraded: bool,
}

/// Where the quota of a key comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaSource {
    /// From the builder.
    Builder,
    /// From the requests of the key: [`quota`](crate::RateLimitBuilder::quota).
    Request,
    /// From the [route](crate::RateLimitBuilder::routes) that the requests of the key take.
    Route,
    /// The upstream has stated limits: [`trust_headers`](crate::RateLimitBuilder::trust_headers).
    Upstream {
        /// How long they apply if no response states them again.
        left: Duration,
    },
    /// An operator has [set](crate::Limiter::set_quota) it.
    Set {
        /// How long it applies if the key is not used.
        left: Duration,
    },
}

impl QuotaSource {
    /// Returns where the quota of a key comes from, for which a quota may be `set`, and requests may have
    /// `stated` one of `quotas`.
    pub(super) fn of(set: Option<&SetQuota>, stated: Option<QuotaId>, quotas: &Quotas) -> Self {
        match set.filter(|set| set.quota.is_some()) {
            Some(set) if set.is_learned() => QuotaSource::Upstream { left: set.left },
            Some(set) => QuotaSource::Set { left: set.left },
            _ => match stated {
                Some(id) if quotas.route(id).is_some() => QuotaSource::Route,
                Some(_) => QuotaSource::Request,
                None => QuotaSource::Builder,
            },
        }
    }
}

/// Reads the state of `key`, and consumes nothing.
pub(super) async fn read(cores: &Cores, key: Key) -> Result<KeyStatus, StoreError> {
    let mut all = read_parts(&cores.first, key).await?;
    for core in cores.all().skip(1) {
        let KeyStatus {
            limits,
            free: _,
            next_slot,
            waiting,
            held,
            learned,
            degraded,
            quota_source: _,
        } = read_parts(core, key).await?;
        all.limits.extend(limits);
        all.next_slot = all.next_slot.max(next_slot);
        all.waiting = all.waiting.max(waiting);
        all.held = all.held.max(held);
        all.learned.extend(learned);
        all.degraded |= degraded;
    }
    if all.held.is_some() {
        all.free = 0;
    }
    Ok(all)
}

/// Reads the state of `key` under the limits of one unit. If its quota is divided, adds up the parts.
async fn read_parts(core: &Arc<Core>, key: Key) -> Result<KeyStatus, StoreError> {
    let key = core.key_of(key);
    let mut all = read_one(core, key).await?;
    for (part, key) in core.all_parts(key).skip(1) {
        let of_part = read_one(&part, key).await?;
        for (sum, usage) in all.limits.iter_mut().zip(of_part.limits) {
            if let Some(limit) = sum.limit.plus(usage.limit) {
                sum.limit = limit;
                sum.used += usage.used;
                sum.free += usage.free;
                sum.wait = sum.wait.min(usage.wait);
            }
        }
        all.free += of_part.free;
        all.next_slot = all.next_slot.min(of_part.next_slot);
        all.waiting += of_part.waiting;
        all.held = all.held.max(of_part.held);
    }
    // The parts have the calls in flight in common.
    all.free = all.free.min(free_in_flight(&all.limits));
    Ok(all)
}

/// Returns how many calls more may be in flight.
fn free_in_flight(limits: &[LimitUsage]) -> u64 {
    let in_flight = limits.iter().find(|usage| usage.is_in_flight());
    in_flight.map_or(u64::MAX, |usage| usage.free)
}

/// Reads the state of `key` under the limits of one unit, or of a part of them.
async fn read_one(core: &Core, key: Key) -> Result<KeyStatus, StoreError> {
    let request = core.peek_request(key, &core.terms(key));
    let answer = core.settings.store.peek(request);
    let Usage {
        mut limits,
        free,
        next_slot,
        hold,
        degraded,
        set_quota,
        ..
    } = answer.arrives().await?;
    let unit = core.unit_name();
    limits.iter_mut().for_each(|usage| usage.unit = unit);
    let now = clock::now();
    let mut status = KeyStatus {
        quota_source: QuotaSource::Builder,
        limits,
        free,
        next_slot,
        waiting: core.settings.tally.waiting_of(key).0,
        held: Some(hold.remaining).filter(|left| !left.is_zero()),
        learned: Vec::new(),
        degraded,
    };
    let stated = core.states.read(key, |state| {
        status.free = free.saturating_add(u64::from(state.at_hand(now)));
        status.held = status.held.max(state.hold.left(now));
        status.learned = state.limits.learned(now);
        state.limits.quota_id()
    });
    let quotas = &core.settings.quotas;
    status.quota_source = QuotaSource::of(set_quota.as_deref(), stated, quotas);
    status.free = status.free.min(free_in_flight(&status.limits));
    if status.free > 0 {
        status.next_slot = Duration::ZERO;
    }
    if let Some(held) = status.held {
        status.free = 0;
        status.next_slot = status.next_slot.max(held);
    }
    Ok(status)
}
