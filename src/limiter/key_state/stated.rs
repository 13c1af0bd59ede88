//! Limits that the upstream states, for the keys whose responses state them.
//!
//! Each call to the store states the limits of its key: it *asserts* them. Stated limits are
//! asserted like configured ones. So they apply to all processes at once. They no longer apply when
//! no process has asserted them for two of their windows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::KeyState;
use super::context::KeyContext;
use crate::clock;
use crate::events;
use crate::limit::LimitSpec;
use crate::quota::{Limit, Quota, Slacks};
use crate::signal::{ObservedQuota, Signal};
use crate::store::label;

/// How much of what responses state about limits takes effect. Default:
/// [`Usage`](HeaderTrust::Usage). Refusals put the key on hold in all cases.
///
/// The page [`guide::learning`](crate::guide::learning) has the details.
///
/// ```
/// use tollgate::{HeaderTrust, Quota, RateLimitLayer};
///
/// // The upstream may lower its limit: `RateLimit-Policy: "default";q=100;w=60`.
/// let limit = RateLimitLayer::builder(Quota::per_minute(300))
///     .trust_headers(HeaderTrust::Stricter)
///     .build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeaderTrust {
    /// Nothing but refusals takes effect.
    Ignore,
    /// The store reserves what other clients use of a configured limit, such as clients with the
    /// same credential.
    ///
    /// A quota that a response states is about the configured limit with the same window. If the
    /// quota states no window, it is about the limit with the same count. The units that the quota
    /// counts as used, and that were not granted to this fleet, were used by other clients. So were
    /// refused units. The store reserves as many units for them, until the reset and in the window
    /// after it. A [bucket](Quota::bucket) reserves nothing: the used units leave it.
    #[default]
    Usage,
    /// As `Usage`. Stated limits with a window apply besides the configured ones, so the strictest
    /// decides.
    Stricter,
    /// As `Usage`. Stated limits with a window replace the configured ones, even if they allow
    /// more.
    ///
    /// Then the upstream decides how much is sent, and so does each server that can respond in its
    /// place.
    Replace,
}

/// A limit that the upstream has stated.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatedLimit {
    /// The limit, a sliding window.
    pub limit: Limit,
    /// The name of the quota in the response that states it. `None` if the quota has no name.
    pub name: Option<Box<str>>,
    /// Until when it applies, unless it is stated again.
    until: Instant,
}

/// The limits that the upstream stated for one key.
pub(super) struct StatedLimits {
    /// The limits of the key: the stated limits and those of the configured ones that still apply.
    spec: Arc<LimitSpec>,
    limits: SmallVec<[StatedLimit; 1]>,
    /// When they last changed, the latest change at the end.
    changes: [Option<Instant>; MOST_CHANGES],
}

/// The most stated limits of one key. Further ones are ignored.
const MOST: usize = 4;

/// How often the stated limits may change within the time for which the store keeps a limit that is
/// no longer asserted. Without this bound, an upstream that states other limits in each response
/// would leave hundreds of limits in the store.
const MOST_CHANGES: usize = 6;

impl StatedLimit {
    /// Returns the limit that a quota states, if it counts requests and is valid as a limit.
    fn of(quota: &ObservedQuota, spec: &LimitSpec, now: Instant) -> Option<StatedLimit> {
        let (count, window) = (u32::try_from(quota.limit()?).ok()?, quota.window()?);
        let limit = Limit::Sliding { count, window };
        let slacks = Slacks {
            transit: spec.transit_slack(),
            boundary: spec.boundary_guard(),
            rate_loss: Slacks::RATE_LOSS,
        };
        let makes_sense =
            quota.unit() == "requests" && Quota::new(count, window).check(slacks).is_ok();
        // It applies for as long as the upstream states it again within this time.
        let lasts = window
            .saturating_mul(10)
            .clamp(Duration::from_secs(60), Duration::from_secs(3600));
        let until = clock::after(now, lasts);
        makes_sense.then(|| StatedLimit {
            limit,
            name: quota.name().map(Box::from),
            until,
        })
    }

    /// Returns whether the configured `quota` allows no more than this limit.
    fn is_implied_by(&self, quota: &Quota) -> bool {
        let rate = |limit: &Limit| f64::from(limit.count()) / limit.window().as_secs_f64();
        quota.limits().iter().any(|limit| match limit {
            Limit::Bucket { capacity, .. } => {
                *capacity <= self.limit.count() && rate(limit) <= rate(&self.limit)
            }
            _ => limit.window() == self.limit.window() && limit.count() <= self.limit.count(),
        })
    }
}

impl StatedLimits {
    /// Returns the limits that result from the `configured` ones and the stated `limits`.
    fn new(
        trust: HeaderTrust,
        configured: &LimitSpec,
        limits: SmallVec<[StatedLimit; 1]>,
    ) -> Box<Self> {
        let quota = configured.quota();
        let base = if trust == HeaderTrust::Stricter {
            Some(*quota)
        } else {
            None
        };
        let room = Quota::MOST_LIMITS - base.map_or(0, |base| base.limits().len());
        let stated = limits.iter().take(room).map(|stated| stated.limit);
        let stated = stated.map(|limit| Quota::new(limit.count(), limit.window()));
        let rates = base
            .into_iter()
            .chain(stated)
            .reduce(Quota::and)
            .unwrap_or(*quota);
        let allowed = match quota.most_in_flight() {
            Some(most) => rates.and(Quota::in_flight(most)),
            None => rates,
        };
        let spec = LimitSpec::new(
            allowed,
            configured.transit_slack(),
            configured.boundary_guard(),
        );
        let spec = Arc::new(spec.with_life(configured.life()));
        Box::new(StatedLimits {
            spec,
            limits,
            changes: Default::default(),
        })
    }

    /// Returns whether the limits have changed too often to change again now. `longest` is the
    /// longest window of the new limits.
    fn changes_too_often(&self, longest: Duration, now: Instant) -> bool {
        let kept = longest.saturating_mul(5) / 2 + Duration::from_secs(1);
        self.changes[0].is_some_and(|earliest| clock::after(earliest, kept) > now)
    }
}

impl KeyState {
    /// Returns the limits of the key, if the upstream has stated some lately.
    pub(in crate::limiter) fn stated_spec(
        &mut self,
        trust: HeaderTrust,
        configured: &Arc<LimitSpec>,
        now: Instant,
    ) -> Option<Arc<LimitSpec>> {
        let stated = self.stated.as_ref()?;
        if stated.limits.iter().any(|limit| limit.until <= now) {
            let mut limits = stated.limits.clone();
            limits.retain(|limit| limit.until > now);
            self.set_stated(trust, configured, limits);
        }
        self.stated.as_ref().map(|stated| stated.spec.clone())
    }

    /// Returns the limits that the upstream has stated.
    pub(in crate::limiter) fn stated_limits(&self) -> Vec<StatedLimit> {
        self.stated
            .as_ref()
            .map_or_else(Vec::new, |stated| stated.limits.to_vec())
    }

    /// Returns until when a stated limit applies.
    pub(super) fn stated_until(&self) -> Option<Instant> {
        self.stated
            .as_ref()?
            .limits
            .iter()
            .map(|limit| limit.until)
            .max()
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
        let quota = configured.quota();
        if !matches!(trust, HeaderTrust::Stricter | HeaderTrust::Replace)
            || quota.limits().is_empty()
        {
            return;
        }
        let before: SmallVec<[StatedLimit; 1]> = self
            .stated
            .as_ref()
            .map(|stated| stated.limits.clone())
            .unwrap_or_default();
        let mut limits = before.clone();
        limits.retain(|limit| limit.until > ctx.now);
        let stated = signal
            .quotas()
            .iter()
            .filter_map(|quota| StatedLimit::of(quota, configured, ctx.now));
        for stated in
            stated.filter(|stated| trust == HeaderTrust::Replace || !stated.is_implied_by(quota))
        {
            add(&mut limits, stated);
        }
        if limits
            .iter()
            .map(|new| new.limit)
            .eq(before.iter().map(|old| old.limit))
        {
            if let Some(stated) = &mut self.stated {
                stated.limits = limits;
            }
            return;
        }
        let longest = limits
            .iter()
            .map(|limit| limit.limit.window())
            .max()
            .unwrap_or_default();
        if self
            .stated
            .as_ref()
            .is_some_and(|stated| stated.changes_too_often(longest, ctx.now))
        {
            return;
        }
        let is_new = |stated: &&StatedLimit| !before.iter().any(|old| old.limit == stated.limit);
        for new in limits.iter().filter(is_new) {
            events::learned(
                &label(&**ctx.store, ctx.key, None),
                new.limit,
                new.name.as_deref(),
            );
        }
        let mut changes = self
            .stated
            .as_ref()
            .map(|stated| stated.changes)
            .unwrap_or_default();
        changes.rotate_left(1);
        changes[MOST_CHANGES - 1] = Some(ctx.now);
        self.set_stated(trust, configured, limits);
        if let Some(stated) = &mut self.stated {
            stated.changes = changes;
        }
    }

    fn set_stated(
        &mut self,
        trust: HeaderTrust,
        configured: &LimitSpec,
        limits: SmallVec<[StatedLimit; 1]>,
    ) {
        // What is left was stated about the limits before. Later responses state it anew.
        self.remaining = None;
        self.stated = if limits.is_empty() {
            None
        } else {
            Some(StatedLimits::new(trust, configured, limits))
        };
    }
}

/// Adds a stated limit. It replaces the one of the same name and window. If there are too many, it
/// is ignored.
fn add(limits: &mut SmallVec<[StatedLimit; 1]>, stated: StatedLimit) {
    let is_same = |other: &StatedLimit| {
        other.name == stated.name && other.limit.window() == stated.limit.window()
    };
    match limits.iter().position(is_same) {
        Some(known) => limits[known] = stated,
        None if limits.len() < MOST => limits.push(stated),
        None => {}
    }
}
