//! The limits of a key, if they are not the configured ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::KeyContext;
use super::loans::Loans;
use super::stated_limits::{HeaderTrust, LearnedQuota, StatedLimit, StatedLimits};
use super::stated_parts::StatedParts;
use crate::clock;
use crate::limit::{Lending, LimitSpec, is_learned};
use crate::limiter::quotas::QuotaId;
use crate::quota::Quota;
use crate::signal::Signal;
use crate::store::SetQuota;

/// For how long nothing is learned after a learned quota was ended by a release, or by a process that trusts no
/// headers.
const UNLEARNED: Duration = Duration::from_secs(60);

/// The limits of a key, if they are not the configured ones. Most keys have none.
#[derive(Default)]
pub(in crate::limiter) struct KeyLimits(Option<Box<OwnLimits>>);

#[derive(Default)]
struct OwnLimits {
    /// The quota that requests have stated. `None` for the configured one.
    quota: Option<(QuotaId, Arc<LimitSpec>)>,
    /// The limits that the upstream has stated to this process.
    stated: Option<Box<StatedLimits>>,
    /// The quota that was set for the key, or its end.
    set: Option<KnownSetQuota>,
    /// Until when nothing is learned, because a learned quota was ended before its time.
    unlearned_until: Option<Instant>,
    /// What is known of slots that other parts lend, if the quota is divided.
    loans: Loans,
    /// What was stated of the other parts, if the quota is divided.
    stated_parts: StatedParts,
    /// Whether the limits have changed since the last visit.
    has_changed: bool,
    /// How often they have changed.
    changes: u32,
    /// Whether the set quota has ended by itself since the last visit.
    has_expired: bool,
}

/// A quota that was set for a key, or its end, as this process knows it.
struct KnownSetQuota {
    version: u32,
    /// The limits. `None` if the quota has ended.
    spec: Option<Arc<LimitSpec>>,
    life: Duration,
    /// Until when this process knows it. After that, it asks the store as if it knew of none.
    until: Instant,
    /// After the end: the limits that apply, and the same limits stated with the version of the end.
    after_end: Option<(Arc<LimitSpec>, Arc<LimitSpec>)>,
}

impl KeyLimits {
    /// Returns the limits of the key. `None` if they are the `configured` ones.
    pub(in crate::limiter) fn spec(
        &mut self,
        configured: &Arc<LimitSpec>,
        now: Instant,
    ) -> Option<Arc<LimitSpec>> {
        let own = self.0.as_mut()?;
        let expired = own.set.take_if(|set| set.until <= now);
        if expired.is_some_and(|set| set.spec.is_some()) {
            own.has_expired = true;
            own.changes = own.changes.wrapping_add(1);
        }
        let set = own.set.as_ref().and_then(|set| set.spec.clone());
        if set.is_some() {
            return set;
        }
        let applies = own.quota.as_ref().map(|(_, spec)| spec.clone());
        match &mut own.set {
            Some(ended) => Some(ended.after_end(applies.unwrap_or_else(|| configured.clone()))),
            None => applies,
        }
    }

    /// Takes in a set quota, or its end. `like` are other limits of the key. Returns whether it is new to
    /// this process.
    pub(super) fn take_in_set_quota(
        &mut self,
        new: &SetQuota,
        like: &LimitSpec,
        now: Instant,
    ) -> bool {
        let was_set = self.set_spec().is_some();
        let was_learned = self.learned_life(now).is_some();
        let own = self.0.get_or_insert_default();
        let until = clock::after(now, new.left);
        match &mut own.set {
            Some(known) if known.version > new.version => return false,
            Some(known) if known.version == new.version => {
                known.until = known.until.max(until);
                return false;
            }
            _ => {}
        }
        // The end of a quota that this process did not obey changes none of its limits.
        if was_set || new.quota.is_some() {
            own.note_change();
        }
        if new.quota.is_none() {
            // What the upstream has stated until then has ended, too.
            own.stated = None;
            if was_learned {
                own.unlearned_until = Some(clock::after(now, UNLEARNED));
            }
        }
        own.set = Some(KnownSetQuota {
            version: new.version,
            spec: new.quota.map(|quota| Arc::new(set_spec(quota, new, like))),
            life: new.life,
            until,
            after_end: None,
        });
        true
    }

    /// Returns the set quota of the key that this process knows of, or its end.
    pub(in crate::limiter) fn set_quota_version(&self) -> u32 {
        let set = self.0.as_ref().and_then(|own| own.set.as_ref());
        set.map_or(0, |set| set.version)
    }

    /// Returns for how long a learned quota applies after it was learned, if one applies.
    pub(in crate::limiter) fn learned_life(&self, now: Instant) -> Option<Duration> {
        let set = self.0.as_ref()?.set.as_ref()?;
        let applies = set.spec.is_some() && set.until > now && is_learned(set.version);
        applies.then_some(set.life)
    }

    /// Returns whether a quota applies that an operator has set.
    pub(in crate::limiter) fn is_set_by_operator(&self) -> bool {
        self.set_spec().is_some() && !is_learned(self.set_quota_version())
    }

    /// Returns what is known of slots that other parts lend, if anything is.
    pub(super) fn loans(&self) -> Option<&Loans> {
        self.0.as_ref().map(|own| &own.loans)
    }

    /// Returns what is known of slots that other parts lend, to change it.
    pub(super) fn loans_mut(&mut self) -> &mut Loans {
        &mut self.0.get_or_insert_default().loans
    }

    /// Returns what was stated of the other parts, if anything was.
    pub(super) fn stated_parts(&self) -> Option<&StatedParts> {
        self.0.as_ref().map(|own| &own.stated_parts)
    }

    /// Returns what was stated of the other parts, to change it.
    pub(super) fn stated_parts_mut(&mut self) -> &mut StatedParts {
        &mut self.0.get_or_insert_default().stated_parts
    }

    /// Returns the limits of the set quota, if one applies.
    pub(in crate::limiter) fn set_spec(&self) -> Option<&Arc<LimitSpec>> {
        self.0.as_ref()?.set.as_ref()?.spec.as_ref()
    }

    /// Returns whether the limits have changed since this was last called.
    pub(in crate::limiter) fn take_change(&mut self) -> bool {
        let own = self.0.as_mut();
        own.is_some_and(|own| std::mem::take(&mut own.has_changed))
    }

    /// Returns how often the limits have changed.
    pub(in crate::limiter) fn changes(&self) -> u32 {
        self.0.as_ref().map_or(0, |own| own.changes)
    }

    /// Returns whether the set quota has ended by itself since this was last called.
    pub(in crate::limiter) fn take_expiry(&mut self) -> bool {
        let own = self.0.as_mut();
        own.is_some_and(|own| std::mem::take(&mut own.has_expired))
    }

    /// Returns whether a request that states this quota need not change that of the key.
    #[inline]
    pub(in crate::limiter) fn has_quota(&self, id: QuotaId) -> bool {
        id == QuotaId::NONE || id == self.quota_id().unwrap_or(QuotaId::CONFIGURED)
    }

    /// Returns the quota that requests have stated.
    pub(in crate::limiter) fn quota_id(&self) -> Option<QuotaId> {
        let own = self.0.as_ref()?.quota.as_ref();
        own.map(|(id, _)| *id)
    }

    /// Returns the limits of the set quota, or else of the quota that requests have stated.
    pub(in crate::limiter) fn quota(&self) -> Option<&Arc<LimitSpec>> {
        self.set_spec().or_else(|| self.stated_quota())
    }

    /// Returns the limits of the quota that requests have stated.
    pub(in crate::limiter) fn stated_quota(&self) -> Option<&Arc<LimitSpec>> {
        let own = self.0.as_ref()?.quota.as_ref();
        own.map(|(_, spec)| spec)
    }

    /// Takes in the quota that a request states. `spec` are its limits, or `None` if they are the
    /// configured ones.
    pub(in crate::limiter) fn choose(&mut self, id: QuotaId, spec: Option<Arc<LimitSpec>>) {
        let own = self.0.get_or_insert_default();
        own.note_change();
        own.quota = spec.map(|spec| (id, spec));
    }

    /// Returns the limits that the upstream has stated to this process, and that apply.
    pub(in crate::limiter) fn learned(&self, now: Instant) -> Vec<StatedLimit> {
        let own = self.0.as_ref().filter(|_| !self.is_set_by_operator());
        let stated = own.and_then(|own| own.stated.as_ref());
        let (Some(stated), Some(spec)) = (stated, self.set_spec()) else {
            return Vec::new();
        };
        let applied = spec.quota().limits();
        let stated = stated.limits(now);
        let stated = stated.filter(|stated| applied.contains(&stated.limit));
        stated.cloned().collect()
    }

    /// Returns until when a limit applies that the upstream has stated to this process.
    pub(super) fn stated_until(&self) -> Option<Instant> {
        self.0.as_ref()?.stated.as_ref()?.until()
    }

    /// Takes in the limits that a response states.
    pub(in crate::limiter) fn state(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        signal: &Signal,
        ctx: &mut KeyContext<'_>,
    ) {
        let quota = self.stated_quota().unwrap_or(configured).clone();
        if quota.quota().limits().is_empty() || !StatedLimits::are_any(signal, &quota, ctx.now) {
            return;
        }
        let unlearned_until = self.0.as_ref().and_then(|own| own.unlearned_until);
        if unlearned_until.is_some_and(|until| until > ctx.now) {
            return;
        }
        let stated = self
            .0
            .get_or_insert_default()
            .stated
            .get_or_insert_default();
        stated.state(trust, &quota, signal, ctx.now, &mut ctx.work.learned);
    }

    /// Returns the quota that the store has to learn now, so that the stated limits apply besides or
    /// instead of the quota of the key. `None` if there is nothing to learn.
    pub(in crate::limiter) fn start_learning(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        now: Instant,
    ) -> Option<LearnedQuota> {
        if self.is_set_by_operator() {
            return None;
        }
        let version = self.set_quota_version();
        let own = self.0.as_mut()?;
        let stated = own.stated.as_mut()?;
        let quota = own.quota.as_ref().map_or(configured, |(_, spec)| spec);
        let learned = own.set.as_ref().and_then(|set| {
            let left = set.until.saturating_duration_since(now);
            Some((set.spec.as_ref()?.quota(), left))
        });
        let LearnedQuota { spec, life } = stated.start_learning(trust, quota, learned, now)?;
        let spec = spec.with_quota_version(version, life);
        Some(LearnedQuota { spec, life })
    }
}

impl OwnLimits {
    fn note_change(&mut self) {
        self.has_changed = true;
        self.changes = self.changes.wrapping_add(1);
    }
}

impl KnownSetQuota {
    /// Returns the limits `applies`, stated with the version of the end.
    fn after_end(&mut self, applies: Arc<LimitSpec>) -> Arc<LimitSpec> {
        if let Some((of, made)) = &self.after_end
            && Arc::ptr_eq(of, &applies)
        {
            return made.clone();
        }
        let made = (*applies)
            .clone()
            .with_quota_version(self.version, self.life);
        let made = Arc::new(made);
        self.after_end = Some((applies, made.clone()));
        made
    }
}

/// Makes the limits of a quota that was set, with the slacks and the unit of other limits of the key.
fn set_spec(quota: Quota, set: &SetQuota, like: &LimitSpec) -> LimitSpec {
    let quota = match like.lending() {
        Some(_) => Lending::without_pace(quota),
        None => quota,
    };
    let quota = like.quota().unit().map_or(quota, |unit| quota.of(unit));
    let spec = LimitSpec::new(quota, like.transit_slack(), like.boundary_guard());
    // Another process has set it, which may allow for other slacks.
    let life = quota.check(like.slacks()).unwrap_or(spec.life());
    let spec = spec
        .with_life(life)
        .with_quota_version(set.version, set.life);
    match like.lending() {
        Some(lending) => spec.with_lending(lending.percent()),
        None => spec,
    }
}
