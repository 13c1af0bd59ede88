//! The limits of a key, if they are not the configured ones.

use std::sync::Arc;
use std::time::Instant;

use super::context::KeyContext;
use super::stated_limits::{
    Changes, HeaderTrust, Limits, StatedLimit, StatedLimits, updated, valid,
};
use crate::events;
use crate::limit::LimitSpec;
use crate::limiter::quotas::QuotaId;
use crate::signal::Signal;
use crate::store::label;

/// The limits of a key, if they are not the configured ones. Most keys have none.
#[derive(Default)]
pub(in crate::limiter) struct KeyLimits(Option<Box<OwnLimits>>);

#[derive(Default)]
struct OwnLimits {
    /// The quota that requests have stated. `None` for the configured one.
    quota: Option<(QuotaId, Arc<LimitSpec>)>,
    /// The limits that the upstream has stated.
    learned: Option<StatedLimits>,
}

impl KeyLimits {
    /// Returns the limits of the key. `None` if they are the `configured` ones.
    pub(in crate::limiter) fn spec(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        now: Instant,
    ) -> Option<Arc<LimitSpec>> {
        let own = self.0.as_mut()?;
        if let Some(learned) = own
            .learned
            .as_ref()
            .filter(|learned| learned.has_expired(now))
        {
            let limits = valid(learned.limits(), now);
            let quota = own.quota_or(configured).clone();
            own.learned = StatedLimits::new(trust, &quota, limits, Changes::default());
        }
        match &own.learned {
            Some(learned) => Some(learned.spec()),
            None => self.quota().cloned(),
        }
    }

    /// Returns whether a request that states this quota need not change that of the key.
    #[inline]
    pub(in crate::limiter) fn has_quota(&self, id: QuotaId) -> bool {
        let own = self.0.as_ref().and_then(|own| own.quota.as_ref());
        id == QuotaId::NONE || id == own.map_or(QuotaId::CONFIGURED, |(own, _)| *own)
    }

    /// Returns the limits of the quota that requests have stated.
    pub(in crate::limiter) fn quota(&self) -> Option<&Arc<LimitSpec>> {
        let own = self.0.as_ref()?.quota.as_ref();
        own.map(|(_, spec)| spec)
    }

    /// Sets the quota that requests have stated. Its limits are `spec`, or the `configured` ones.
    pub(super) fn set_quota(
        &mut self,
        id: QuotaId,
        spec: Option<Arc<LimitSpec>>,
        configured: &Arc<LimitSpec>,
        trust: HeaderTrust,
    ) {
        let own = self.0.get_or_insert_default();
        own.quota = spec.map(|spec| (id, spec));
        if let Some(learned) = own.learned.take() {
            let limits = learned.limits().iter().cloned().collect();
            let quota = own.quota_or(configured).clone();
            own.learned = StatedLimits::new(trust, &quota, limits, learned.changes());
        }
        self.tidy();
    }

    /// Returns the limits that the upstream has stated.
    pub(in crate::limiter) fn learned(&self) -> &[StatedLimit] {
        let learned = self.0.as_ref().and_then(|own| own.learned.as_ref());
        learned.map_or(&[], |learned| learned.limits())
    }

    /// Returns until when a learned limit applies.
    pub(super) fn learned_until(&self) -> Option<Instant> {
        self.0.as_ref()?.learned.as_ref()?.until()
    }

    /// Takes in the limits that a response states. From now on they apply besides or instead of the
    /// quota of the key. Returns whether the limits of the key have changed.
    pub(super) fn learn(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        signal: &Signal,
        ctx: &KeyContext<'_>,
    ) -> bool {
        let quota = self.quota().unwrap_or(configured).clone();
        if !matches!(trust, HeaderTrust::Stricter | HeaderTrust::Replace)
            || quota.quota().limits().is_empty()
        {
            return false;
        }
        let before = self.learned();
        let limits = updated(before, trust, &quota, signal, ctx.now);
        let is_known =
            |stated: &StatedLimit| before.iter().any(|known| known.limit == stated.limit);
        let is_same = limits
            .iter()
            .map(|new| new.limit)
            .eq(before.iter().map(|old| old.limit));
        if is_same {
            self.renew(limits);
            return false;
        }
        let learned = self.0.as_ref().and_then(|own| own.learned.as_ref());
        let changes = learned.map_or_else(Changes::default, StatedLimits::changes);
        let longest = limits.iter().map(|stated| stated.limit.window()).max();
        if changes.are_too_many(longest.unwrap_or_default(), ctx.now) {
            return false;
        }
        for new in limits.iter().filter(|stated| !is_known(stated)) {
            let label = label(&**ctx.store, ctx.key, None);
            events::learned(&label, new.limit, new.name.as_deref());
        }
        let own = self.0.get_or_insert_default();
        own.learned = StatedLimits::new(trust, &quota, limits, changes.and(ctx.now));
        self.tidy();
        true
    }

    /// Keeps the same limits, stated again.
    fn renew(&mut self, limits: Limits) {
        let own = self.0.as_mut();
        if let Some(learned) = own.and_then(|own| own.learned.as_mut()) {
            learned.renew(limits);
        }
    }

    fn tidy(&mut self) {
        let is_empty = |own: &mut Box<OwnLimits>| own.quota.is_none() && own.learned.is_none();
        self.0.take_if(is_empty);
    }
}

impl OwnLimits {
    fn quota_or<'a>(&'a self, configured: &'a Arc<LimitSpec>) -> &'a Arc<LimitSpec> {
        self.quota.as_ref().map_or(configured, |(_, spec)| spec)
    }
}
