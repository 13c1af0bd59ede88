//! The quota of a key, if a request states one.

use std::sync::Arc;
use std::time::Instant;

use super::engine::Core;
use super::in_flight_slot;
use super::key_state::{KeyContext, KeyState};
use super::quotas::QuotaId;
use super::settings::Settings;
use crate::key::Key;

/// Gives `key` the quota that a request states, from the next call to the store on.
pub(super) fn choose(core: &Arc<Core>, key: Key, quota: QuotaId, now: Instant) {
    if quota == QuotaId::NONE {
        return;
    }
    let known = core.states.find(key, |state| state.limits.has_quota(quota));
    if known.unwrap_or(quota == QuotaId::CONFIGURED) {
        return;
    }
    let Settings {
        quotas,
        spec: configured,
        learn,
        ..
    } = &core.settings;
    let spec = quotas.spec(quota, core.unit());
    let limits = spec.as_ref().unwrap_or(configured).quota();
    in_flight_slot::set_limit(core, key, limits.most_in_flight(), now);
    let set = |state: &mut KeyState, _: &mut KeyContext<'_>| {
        state.set_quota(quota, spec, configured, *learn);
    };
    // If there is no room for the key, its request is refused.
    if core.with_new_state(key, now, set).is_ok() && known.is_some() {
        core.with_state(key, now, KeyState::tighten);
    }
}
