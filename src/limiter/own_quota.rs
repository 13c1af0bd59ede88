//! The quota of a key: a request states one, or an operator sets one for the whole fleet.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cores::Cores;
use super::engine::Core;
use super::key_state::HeaderTrust;
use super::quotas::{QuotaId, spec_of};
use super::settings::Settings;
use crate::clock;
use crate::config_error::ConfigError;
use crate::error::StoreError;
use crate::join::join_all;
use crate::key::Key;
use crate::limit::{ChangeKind, LimitSpec, is_learned};
use crate::quota::Quota;
use crate::signal::Signal;
use crate::store::{Change, InForce, SetQuota, StoreReply};

/// The longest life of a set quota: 366 days. Longer ones are cut to this.
const LONGEST_KEPT: Duration = Duration::from_secs(366 * 86_400);

/// Why a quota was not set.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum QuotaError {
    /// The quota is out of range, or it is of another kind than that of the limiter.
    Config(ConfigError),
    /// The store failed. Other processes may not know of the change.
    Store(StoreError),
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QuotaError::Config(_) => f.write_str("the quota cannot be set"),
            QuotaError::Store(_) => {
                f.write_str("the quota may not be set, because the store failed")
            }
        }
    }
}

impl std::error::Error for QuotaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            QuotaError::Config(error) => Some(error),
            QuotaError::Store(error) => Some(error),
        }
    }
}

/// Gives `key` the quota that a request states, from the next call to the store on.
pub(super) fn choose(core: &Arc<Core>, key: Key, quota: QuotaId, now: Instant) {
    if core.choose_quota(key, quota, now) {
        // Limits that the upstream states apply besides the quota of the key.
        learn(core, key, None, now);
    }
}

/// Takes in the limits of `key` that a response states, if there is one. The store learns them, so
/// that they apply to all processes.
pub(super) fn learn(core: &Arc<Core>, key: Key, signal: Option<&Signal>, now: Instant) {
    let Settings {
        learn, spec, store, ..
    } = &core.settings;
    if !matches!(learn, HeaderTrust::Stricter | HeaderTrust::Replace) {
        return;
    }
    let learned = core.with_state(key, now, |state, ctx| {
        if let Some(signal) = signal {
            state.limits.state(*learn, spec, signal, ctx);
        }
        state.limits.start_learning(*learn, spec, ctx.now)
    });
    let Some(learned) = learned.flatten() else {
        return;
    };
    let change = Change::Quota {
        kind: ChangeKind::Learn,
        life: learned.life,
    };
    // If it fails, the next response that states the limits is another attempt.
    match store.change(key, &Arc::new(learned.spec), change) {
        StoreReply::Ready(reply) => drop(take_in_reply(core, key, reply)),
        StoreReply::Pending(reply) => {
            let learning = core.clone();
            core.spawn(async move { drop(take_in_reply(&learning, key, reply.await)) });
        }
    }
}

/// Takes in that a quota was set for `key`, or has ended. A process that ignores headers takes in no learned
/// quota. Its next call ends it: see `store/unlearning.rs`.
pub(super) fn take_in(core: &Arc<Core>, key: Key, set: &SetQuota) {
    if core.settings.learn == HeaderTrust::Ignore && set.is_learned() {
        return;
    }
    core.with_state(key, clock::now(), |state, ctx| {
        state.take_in_set_quota(ctx, set);
    });
}

/// Sets the quota of `key` for all processes that share the store.
pub(super) async fn set(
    cores: &Cores,
    key: Key,
    quota: Quota,
    life: Duration,
) -> Result<(), QuotaError> {
    let life = life.min(LONGEST_KEPT);
    let quotas = &cores.first.settings.quotas;
    let specs = quotas.specs(&quota).map_err(QuotaError::Config)?;
    let set = cores.everywhere(key).filter_map(|(core, key)| {
        let spec = spec_of(specs.get(core.part_index())?, core.unit())?;
        Some(async move {
            let spec = LimitSpec::clone(&spec).with_quota_version(known_version(&core, key), life);
            change(&core, key, spec, ChangeKind::Set).await
        })
    });
    let done: Result<(), StoreError> = join_all(set).await.into_iter().collect();
    done.map_err(QuotaError::Store)
}

/// Ends the set quota of `key`, also one that was learned.
pub(super) async fn unset(cores: &Cores, key: Key, life: Duration) -> Result<(), StoreError> {
    let unset = async |core: Arc<Core>, key| {
        let known = known_version(&core, key);
        // With the version of a learned quota, the store would end no other one.
        let above = known + u32::from(is_learned(known));
        end(&core, key, above, life).await
    };
    cores.for_each(key, unset).await
}

/// Ends the limits that the upstream has stated for `key`, in all processes, whether this process knows of them or
/// not. A quota that an operator has set stays.
pub(super) async fn forget_learned(core: &Arc<Core>, key: Key) -> Result<(), StoreError> {
    let mut learned = core.states.read(key, |state| {
        let life = state.limits.learned_life(clock::now())?;
        Some((state.limits.set_quota_version(), life))
    });
    if learned.is_none() {
        let request = core.peek_request(key, &core.terms(key));
        // The store of a process that ignores headers leaves learned quotas out.
        let store = &core.settings.shared_store;
        let usage = store.peek(request).arrives().await?;
        let set = usage.set_quota.filter(|set| set.is_learned());
        learned = set.map(|set| (set.version, set.life));
    }
    match learned {
        Some((version, life)) => end(core, key, version, life).await,
        None => Ok(()),
    }
}

/// Ends the set quota of `key`. Its end is newer than the version `above`. If that is the version of a learned
/// quota, a quota that an operator has set stays.
async fn end(core: &Arc<Core>, key: Key, above: u32, life: Duration) -> Result<(), StoreError> {
    // An operator need not know what the requests of the key state, so the end states no limits.
    let limits = LimitSpec::none().with_quota_version(above, life);
    change(core, key, limits, ChangeKind::End).await
}

/// Changes the set quota of `key` for the life that `spec` states.
async fn change(
    core: &Arc<Core>,
    key: Key,
    spec: LimitSpec,
    kind: ChangeKind,
) -> Result<(), StoreError> {
    let life = spec.quota_life();
    let store = &core.settings.store;
    let reply = store.change(key, &Arc::new(spec), Change::Quota { kind, life });
    take_in_reply(core, key, reply.arrives().await)
}

/// Takes in the set quota that a store states after a change.
fn take_in_reply(
    core: &Arc<Core>,
    key: Key,
    reply: Result<InForce, StoreError>,
) -> Result<(), StoreError> {
    let set = reply.and_then(InForce::changed_quota)?;
    take_in(core, key, &set);
    Ok(())
}

/// Returns the version of the set quota of `key` that this process knows of. 0 if it knows of none.
fn known_version(core: &Core, key: Key) -> u32 {
    core.states
        .read(key, |state| state.limits.set_quota_version())
}
