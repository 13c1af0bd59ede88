//! Limits that the upstream states, for the keys whose responses state them.
//!
//! Each call to the store states the limits of its key: it *asserts* them. Stated limits are
//! asserted like configured ones. So they apply to all processes at once. They no longer apply when
//! no process has asserted them for two of their windows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::quota_match::counts;
use crate::clock;
use crate::limit::LimitSpec;
use crate::quota::{Limit, Quota, Slacks};
use crate::signal::{ObservedQuota, Signal};

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

/// Stated limits, each with a name and window of its own.
pub(super) type Limits = SmallVec<[StatedLimit; 1]>;

/// The limits that the upstream stated for one key.
pub(super) struct StatedLimits {
    /// The limits of the key: the stated limits and those of the configured ones that still apply.
    spec: Arc<LimitSpec>,
    limits: Limits,
    changes: Changes,
}

/// When the stated limits of a key last changed, the latest change at the end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Changes([Option<Instant>; MOST_CHANGES]);

/// The most stated limits of one key. Further ones are ignored.
const MOST: usize = 4;

/// How often the stated limits may change within the time for which the store keeps a limit that is
/// no longer asserted. Without this bound, an upstream that states other limits in each response
/// would leave hundreds of limits in the store.
const MOST_CHANGES: usize = 6;

impl StatedLimit {
    /// Returns the limit that a quota states, if it counts what the limits of `spec` count and is valid
    /// as a limit.
    fn of(quota: &ObservedQuota, spec: &LimitSpec, now: Instant) -> Option<StatedLimit> {
        let (count, window) = (u32::try_from(quota.limit()?).ok()?, quota.window()?);
        let limit = Limit::Sliding { count, window };
        let slacks = Slacks {
            transit: spec.transit_slack(),
            boundary: spec.boundary_guard(),
            rate_loss: Slacks::RATE_LOSS,
        };
        let makes_sense =
            counts(quota, spec.quota().unit()) && Quota::new(count, window).check(slacks).is_ok();
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
    /// Makes the limits that result from the `configured` ones and the stated `limits`. Returns `None` if
    /// nothing is stated.
    pub(super) fn new(
        trust: HeaderTrust,
        configured: &LimitSpec,
        limits: Limits,
        changes: Changes,
    ) -> Option<Self> {
        if limits.is_empty() {
            return None;
        }
        let quota = configured.quota();
        let base = if trust == HeaderTrust::Stricter {
            Some(*quota)
        } else {
            None
        };
        let room = Quota::MOST_LIMITS - base.map_or(0, |base| base.limits().len());
        let stated = limits.iter().take(room).map(|stated| stated.limit);
        let stated = stated.map(|limit| {
            let stated = Quota::new(limit.count(), limit.window());
            quota.unit().map_or(stated, |unit| stated.of(unit))
        });
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
        Some(StatedLimits {
            spec: Arc::new(spec.with_life(configured.life())),
            limits,
            changes,
        })
    }

    /// Returns the limits of the key.
    pub(super) fn spec(&self) -> Arc<LimitSpec> {
        self.spec.clone()
    }

    /// Returns the limits that the upstream has stated.
    pub(super) fn limits(&self) -> &[StatedLimit] {
        &self.limits
    }

    /// Returns when the stated limits changed.
    pub(super) fn changes(&self) -> Changes {
        self.changes
    }

    /// Returns until when a stated limit applies.
    pub(super) fn until(&self) -> Option<Instant> {
        self.limits.iter().map(|stated| stated.until).max()
    }

    /// Returns whether a stated limit no longer applies.
    pub(super) fn has_expired(&self, now: Instant) -> bool {
        self.limits.iter().any(|stated| stated.until <= now)
    }

    /// Replaces the stated limits by the same limits, stated again.
    pub(super) fn renew(&mut self, limits: Limits) {
        self.limits = limits;
    }
}

impl Changes {
    /// Returns whether the limits have changed too often to change again now. `longest` is the
    /// longest window of the new limits.
    pub(super) fn are_too_many(&self, longest: Duration, now: Instant) -> bool {
        let kept = longest.saturating_mul(5) / 2 + Duration::from_secs(1);
        self.0[0].is_some_and(|earliest| clock::after(earliest, kept) > now)
    }

    /// Returns these changes and one more, without the earliest.
    pub(super) fn and(mut self, now: Instant) -> Self {
        self.0.rotate_left(1);
        self.0[MOST_CHANGES - 1] = Some(now);
        self
    }
}

/// Returns those of the stated limits that apply now.
pub(super) fn valid(limits: &[StatedLimit], now: Instant) -> Limits {
    limits
        .iter()
        .filter(|stated| stated.until > now)
        .cloned()
        .collect()
}

/// Returns the stated limits after a response, which follow those `before` it. Limits that the
/// `configured` ones imply are left out, unless stated limits replace the configured ones.
pub(super) fn updated(
    before: &[StatedLimit],
    trust: HeaderTrust,
    configured: &LimitSpec,
    signal: &Signal,
    now: Instant,
) -> Limits {
    let mut limits = valid(before, now);
    let stated = signal
        .quotas()
        .iter()
        .filter_map(|quota| StatedLimit::of(quota, configured, now));
    for stated in stated {
        if trust == HeaderTrust::Replace || !stated.is_implied_by(configured.quota()) {
            add(&mut limits, stated);
        }
    }
    limits
}

/// Adds a stated limit. It replaces the one of the same name and window. If there are too many, it
/// is ignored.
fn add(limits: &mut Limits, stated: StatedLimit) {
    let is_same = |other: &StatedLimit| {
        other.name == stated.name && other.limit.window() == stated.limit.window()
    };
    match limits.iter().position(is_same) {
        Some(known) => limits[known] = stated,
        None if limits.len() < MOST => limits.push(stated),
        None => {}
    }
}
