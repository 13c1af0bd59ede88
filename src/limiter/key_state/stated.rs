//! Limits that the upstream states, for the keys whose answers state them.
//!
//! They are asserted to the store like those that are configured: so they hold for all processes at once, and until they were
//! not asserted for two of their windows.

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

/// How far the limiter follows what the upstream states about its quotas.
///
/// ```
/// use tollgate::{HeaderTrust, Quota, RateLimitLayer};
///
/// // The upstream may lower its limit: `RateLimit-Policy: "default";q=100;w=60`.
/// let limit = RateLimitLayer::builder(Quota::per_minute(300)).trust_headers(HeaderTrust::Stricter).build()?;
/// # Ok::<(), tollgate::ConfigError>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeaderTrust {
    /// Not at all. A refusal still puts the key on hold.
    Ignore,
    /// The limiter leaves other clients what they use of a configured limit, such as clients that share the credential.
    ///
    /// A quota is taken for the limit if its window is the same, or if it states no window and the count is the same. Units that are used
    /// of it and were not granted to this fleet were used by other clients, and refused units as well. That many are reserved for them
    /// until the reset and in the window after. [Buckets](Quota::bucket) reserve nothing; they lose the units that are used.
    #[default]
    Usage,
    /// As `Usage`, and stated limits with a window apply besides the configured ones: the strictest decides.
    Stricter,
    /// As `Usage`, and stated limits with a window replace the configured ones, even if they allow more.
    ///
    /// Then the upstream decides how much is sent, and so does any server that can respond in its place.
    Replace,
}

/// A limit that the upstream has stated.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatedLimit {
    /// The limit.
    pub limit: Limit,
    /// The name of the quota that states it, if it has one.
    pub name: Option<Box<str>>,
    until: Instant,
}

/// The limits that the upstream stated for one key.
pub(super) struct StatedLimits {
    pub(super) spec: Arc<LimitSpec>,
    learned: SmallVec<[StatedLimit; 1]>,
    /// When they changed last, and the times before.
    changed: [Option<Instant>; MOST_CHANGES],
}

/// The most stated limits of one key. Further ones are ignored.
const MOST: usize = 4;

/// How often the stated limits may change within the time for which the store keeps a limit that is no longer asserted. So an
/// upstream that states other limits in each response does not leave hundreds of limits in the store.
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
        let makes_sense = quota.unit() == "requests" && Quota::new(count, window).check(slacks).is_ok();
        // It holds while the upstream states it again within this time.
        let lasts = window.saturating_mul(10).clamp(Duration::from_secs(60), Duration::from_secs(3600));
        let until = clock::after(now, lasts);
        makes_sense.then(|| StatedLimit { limit, name: quota.name().map(Box::from), until })
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

impl KeyState {
    /// Returns the terms with the limits that the upstream stated lately, if there are any.
    pub(in crate::limiter) fn learned_terms(
        &mut self,
        learn: HeaderTrust,
        configured: &Arc<LimitSpec>,
        now: Instant,
    ) -> Option<Arc<LimitSpec>> {
        let lesson = self.stated.as_ref()?;
        if lesson.learned.iter().any(|learned| learned.until <= now) {
            let mut learned = lesson.learned.clone();
            learned.retain(|learned| learned.until > now);
            self.set_learned(learn, configured, learned);
        }
        self.stated.as_ref().map(|lesson| lesson.spec.clone())
    }

    /// What the upstream has stated.
    pub(in crate::limiter) fn learned(&self) -> Vec<StatedLimit> {
        self.stated.as_ref().map_or_else(Vec::new, |lesson| lesson.learned.to_vec())
    }

    /// Until when that holds.
    pub(super) fn learned_until(&self) -> Option<Instant> {
        self.stated.as_ref()?.learned.iter().map(|learned| learned.until).max()
    }

    /// An answer has come: what it states holds from now on, besides or instead of what is `configured`.
    pub(in crate::limiter) fn learn(
        &mut self,
        learn: HeaderTrust,
        configured: &Arc<LimitSpec>,
        signal: &Signal,
        ctx: &KeyContext<'_>,
    ) {
        let quota = configured.quota();
        if !matches!(learn, HeaderTrust::Stricter | HeaderTrust::Replace) || quota.limits().is_empty() {
            return;
        }
        let mut learned = self.stated.as_ref().map(|lesson| lesson.learned.clone()).unwrap_or_default();
        learned.retain(|learned| learned.until > ctx.now);
        let stated = signal.quotas().iter().filter_map(|quota| StatedLimit::of(quota, configured, ctx.now));
        for stated in stated.filter(|stated| learn == HeaderTrust::Replace || !stated.is_implied_by(quota)) {
            let same = |other: &StatedLimit| {
                other.name == stated.name && other.limit.window() == stated.limit.window()
            };
            match learned.iter().position(same) {
                Some(known) => learned[known] = stated,
                None if learned.len() < MOST => learned.push(stated),
                None => {}
            }
        }
        let limits = |learned: &[StatedLimit]| -> SmallVec<[Limit; MOST]> {
            learned.iter().map(|learned| learned.limit).collect()
        };
        let known = self.stated.as_ref().map(|lesson| limits(&lesson.learned)).unwrap_or_default();
        if limits(&learned) == known {
            if let Some(lesson) = &mut self.stated {
                lesson.learned = learned;
            }
            return;
        }
        let changed = self.stated.as_ref().map(|lesson| lesson.changed).unwrap_or_default();
        let longest = learned.iter().map(|learned| learned.limit.window()).max().unwrap_or_default();
        let kept = longest.saturating_mul(5) / 2 + Duration::from_secs(1);
        if changed[0].is_some_and(|earliest| clock::after(earliest, kept) > ctx.now) {
            return;
        }
        for new in learned.iter().filter(|learned| !known.contains(&learned.limit)) {
            events::learned(&label(&**ctx.store, ctx.key, None), new.limit, new.name.as_deref());
        }
        self.set_learned(learn, configured, learned);
        if let Some(lesson) = &mut self.stated {
            lesson.changed = changed;
            lesson.changed.rotate_left(1);
            lesson.changed[MOST_CHANGES - 1] = Some(ctx.now);
        }
    }

    fn set_learned(
        &mut self,
        learn: HeaderTrust,
        configured: &LimitSpec,
        learned: SmallVec<[StatedLimit; 1]>,
    ) {
        let quota = configured.quota();
        // Statements about other limits are repeated by later responses.
        self.remaining = None;
        self.stated = (!learned.is_empty()).then(|| {
            let base = if learn == HeaderTrust::Stricter { Some(*quota) } else { None };
            let room = Quota::MOST_LIMITS - base.map_or(0, |base| base.limits().len());
            let stated = learned.iter().take(room).map(|learned| learned.limit);
            let stated = stated.map(|limit| Quota::new(limit.count(), limit.window()));
            let allowed = base.into_iter().chain(stated).reduce(Quota::and).unwrap_or(*quota);
            let in_flight = quota.most_in_flight().map(Quota::in_flight);
            let allowed = in_flight.map_or(allowed, |in_flight| allowed.and(in_flight));
            let spec = LimitSpec::new(allowed, configured.transit_slack(), configured.boundary_guard());
            let spec = spec.with_life(configured.life());
            Box::new(StatedLimits { spec: Arc::new(spec), learned, changed: Default::default() })
        });
    }
}
