//! What the upstream stated about one key: its limits, and how much of them is left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::KeyContext;
use super::quota_match::quota_about;
use super::remaining_tracker::RemainingTracker;
use super::stated_limits::{
    Changes, HeaderTrust, Limits, StatedLimit, StatedLimits, updated, valid,
};
use crate::events;
use crate::limit::LimitSpec;
use crate::signal::Signal;
use crate::store::{UpstreamRemaining, label};

/// What the upstream stated about one key.
#[derive(Default)]
pub(in crate::limiter) struct UpstreamView {
    /// The limits that it stated.
    limits: Option<Box<StatedLimits>>,
    /// What it stated is left of each limit of the key.
    pub(super) remaining: Option<Box<RemainingTracker>>,
}

/// Units that could be sent before the next call to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sendable {
    /// Units that this process has at hand.
    pub(super) at_hand: u64,
    /// Units that this process or another one could send.
    pub(super) in_all: u64,
}

impl UpstreamView {
    /// Returns the limits of the key, if the upstream has stated some lately.
    pub(in crate::limiter) fn spec(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        now: Instant,
    ) -> Option<Arc<LimitSpec>> {
        let stated = self.limits.as_ref()?;
        if stated.has_expired(now) {
            let limits = valid(stated.limits(), now);
            self.set_limits(trust, configured, limits, Changes::default());
        }
        self.limits.as_ref().map(|stated| stated.spec())
    }

    /// Returns the limits that the upstream has stated.
    pub(in crate::limiter) fn limits(&self) -> &[StatedLimit] {
        self.limits.as_ref().map_or(&[], |stated| stated.limits())
    }

    /// Returns until when a stated limit applies.
    pub(super) fn limits_until(&self) -> Option<Instant> {
        self.limits.as_ref()?.until()
    }

    /// Takes in the limits that a response states. From now on they apply besides or instead of the
    /// `configured` ones.
    pub(in crate::limiter) fn take_in_limits(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        signal: &Signal,
        ctx: &KeyContext<'_>,
    ) {
        if !matches!(trust, HeaderTrust::Stricter | HeaderTrust::Replace)
            || configured.quota().limits().is_empty()
        {
            return;
        }
        let before = self.limits();
        let limits = updated(before, trust, configured, signal, ctx.now);
        let is_known =
            |stated: &StatedLimit| before.iter().any(|known| known.limit == stated.limit);
        let is_same = limits
            .iter()
            .map(|new| new.limit)
            .eq(before.iter().map(|old| old.limit));
        if is_same {
            if let Some(stated) = &mut self.limits {
                stated.renew(limits);
            }
            return;
        }
        let changes = self
            .limits
            .as_ref()
            .map(|stated| stated.changes())
            .unwrap_or_default();
        let longest = limits.iter().map(|stated| stated.limit.window()).max();
        if changes.are_too_many(longest.unwrap_or_default(), ctx.now) {
            return;
        }
        for new in limits.iter().filter(|stated| !is_known(stated)) {
            let label = label(&**ctx.store, ctx.key, None);
            events::learned(&label, new.limit, new.name.as_deref());
        }
        self.set_limits(trust, configured, limits, changes.and(ctx.now));
    }

    fn set_limits(
        &mut self,
        trust: HeaderTrust,
        configured: &LimitSpec,
        limits: Limits,
        changes: Changes,
    ) {
        // What is left was stated about the limits before. Later responses state it anew.
        self.remaining = None;
        self.limits = if limits.is_empty() {
            None
        } else {
            Some(Box::new(StatedLimits::new(
                trust, configured, limits, changes,
            )))
        };
    }

    /// Takes in how much the response to a request that was sent at `sent` states is left. The
    /// upstream refused `refused` units. Returns whether less is left than could be sent before the
    /// next call.
    pub(super) fn observe_remaining(
        &mut self,
        spec: &LimitSpec,
        signal: &Signal,
        refused: u32,
        sent: Instant,
        sendable: Sendable,
        now: Instant,
    ) -> bool {
        let mut is_less = false;
        for (index, limit) in spec.quota().limits().iter().enumerate() {
            let Some(quota) = quota_about(*limit, signal, spec) else {
                continue;
            };
            let headers = self.remaining.get_or_insert_default().limit(index);
            headers.observe(*limit, quota, refused, sent);
            if let Some(left) = headers
                .bound(*limit, now)
                .filter(|left| *left < sendable.in_all)
            {
                is_less |= headers.notify_less(left, now) || left < sendable.at_hand;
            }
        }
        is_less
    }

    /// Takes what a call to the store states is left. One call carries the statement about one
    /// limit.
    pub(in crate::limiter) fn take_remaining(
        &mut self,
        spec: &LimitSpec,
        max_hold: Duration,
        now: Instant,
    ) -> Option<UpstreamRemaining> {
        self.remaining.as_mut()?.take_due(spec, max_hold, now)
    }
}
