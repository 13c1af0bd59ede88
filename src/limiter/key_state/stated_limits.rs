//! Limits that the upstream states, for the keys whose responses state them.
//!
//! The key gets them as a *learned quota*: a set quota, in place of the quota that it has otherwise. So
//! they apply to all processes at once, until no response has stated them for some time. This file
//! decides which quota is learned, and when it has to be learned again.

use std::time::{Duration, Instant};

use super::quota_match::counts;
use crate::clock;
use crate::limit::LimitSpec;
use crate::quota::{Limit, Quota};
use crate::signal::{ObservedQuota, Signal};
use crate::tuning::ANSWER;

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
    /// Nothing but refusals takes effect. If other processes of the fleet have learned stated limits of a key,
    /// they end when this process uses it.
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
pub(super) type Limits = Vec<StatedLimit>;

/// The limits that the upstream stated for one key.
#[derive(Default)]
pub(super) struct StatedLimits {
    limits: Limits,
    /// When this process last learned other limits for the key, the latest moment at the end.
    changes: [Option<Instant>; MOST_CHANGES],
    /// The quota that this process is learning, and since when.
    learning: Option<(Quota, Instant)>,
}

/// A quota that the store has to learn.
pub(in crate::limiter) struct LearnedQuota {
    pub(in crate::limiter) spec: LimitSpec,
    /// For how long it applies, unless it is learned again.
    pub(in crate::limiter) life: Duration,
}

/// The most stated limits of one key. Further ones are ignored.
const MOST: usize = 4;

/// The longest window of a stated limit that is taken in, and how many times as long as the longest window
/// of the key's quota it may be. A longer one would be a mistake, or meant to stop the client.
const LONGEST_WINDOW: Duration = Duration::from_secs(86_400);
const LONGER: u32 = 10;

/// How often the learned quota may change within the time for which the store keeps a limit that no
/// longer applies. Without this bound, an upstream that states other limits in each response would
/// leave hundreds of limits in the store.
const MOST_CHANGES: usize = 6;

impl StatedLimit {
    /// Returns the limit that a quota states, if it counts what the limits of `spec` count and is valid
    /// as a limit.
    fn of(quota: &ObservedQuota, spec: &LimitSpec, now: Instant) -> Option<StatedLimit> {
        let (count, window) = (u32::try_from(quota.limit()?).ok()?, quota.window()?);
        let limit = Limit::Sliding { count, window };
        let longest = spec.quota().limits().iter().map(Limit::window).max();
        let longest = longest.unwrap_or_default().saturating_mul(LONGER);
        let makes_sense = window <= longest.max(LONGEST_WINDOW)
            && counts(quota, spec.quota().unit())
            && Quota::new(count, window).check(spec.slacks()).is_ok();
        let until = clock::after(now, life(window));
        makes_sense.then(|| StatedLimit {
            limit,
            name: quota.name().map(Box::from),
            until,
        })
    }

    /// Returns whether this limit is stated in place of an `earlier` one: it has its name and its window.
    fn replaces(&self, earlier: &StatedLimit) -> bool {
        earlier.name == self.name && earlier.limit.window() == self.limit.window()
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
    /// Returns the stated limits that have not expired.
    pub(super) fn limits(&self, now: Instant) -> impl Iterator<Item = &StatedLimit> {
        self.limits.iter().filter(move |stated| stated.until > now)
    }

    /// Returns until when a stated limit applies.
    pub(super) fn until(&self) -> Option<Instant> {
        self.limits.iter().map(|stated| stated.until).max()
    }

    /// Returns whether a response states limits of a key with the quota `own`.
    pub(super) fn are_any(signal: &Signal, own: &LimitSpec, now: Instant) -> bool {
        let mut quotas = signal.quotas().iter();
        quotas.any(|quota| StatedLimit::of(quota, own, now).is_some())
    }

    /// Takes in what a response states. Adds each limit that was not stated before to `learned`.
    ///
    /// Limits that the quota `own` implies are left out, unless stated limits replace those of `own`.
    pub(super) fn state(
        &mut self,
        trust: HeaderTrust,
        own: &LimitSpec,
        signal: &Signal,
        now: Instant,
        learned: &mut Vec<StatedLimit>,
    ) {
        self.limits.retain(|stated| stated.until > now);
        let quotas = signal.quotas().iter();
        for stated in quotas.filter_map(|quota| StatedLimit::of(quota, own, now)) {
            let known = self.limits.iter().position(|other| stated.replaces(other));
            if trust != HeaderTrust::Replace && stated.is_implied_by(own.quota()) {
                // The upstream allows more than before, so that this limit matters no more.
                known.map(|known| self.limits.remove(known));
                continue;
            }
            if known.is_none() && self.limits.len() >= MOST {
                continue;
            }
            if known.is_none_or(|known| self.limits[known].limit != stated.limit) {
                learned.push(stated.clone());
            }
            match known {
                Some(known) => self.limits[known] = stated,
                None => self.limits.push(stated),
            }
        }
    }

    /// Returns the quota that the store has to learn now, so that the stated limits apply besides or
    /// instead of those of the quota `own`. `None` if there is nothing to learn. `learned` is the
    /// learned quota that applies, and for how long it still does.
    pub(super) fn start_learning(
        &mut self,
        trust: HeaderTrust,
        own: &LimitSpec,
        learned: Option<(&Quota, Duration)>,
        now: Instant,
    ) -> Option<LearnedQuota> {
        let had_any = !self.limits.is_empty();
        self.limits.retain(|stated| stated.until > now);
        // If all that this process was told has expired, the other processes learn what they are told.
        if self.limits.is_empty() && (had_any || learned.is_none()) {
            return None;
        }
        let quota = self.quota(trust, own.quota());
        let windows = self.limits.iter().map(|stated| stated.limit.window());
        let longest = windows.max().unwrap_or_default();
        let life = life(longest);
        let is_known = learned.is_some_and(|(known, _)| is_same(known, &quota));
        let is_due = learned.is_none_or(|(_, left)| left < life / 2) && !self.limits.is_empty();
        let is_under_way = self.learning.as_ref().is_some_and(|(learning, since)| {
            is_same(learning, &quota) && now.saturating_duration_since(*since) < ANSWER
        });
        if (is_known && !is_due) || is_under_way {
            return None;
        }
        if !is_known {
            let kept = longest.saturating_mul(5) / 2 + Duration::from_secs(1);
            if self.changes[0].is_some_and(|earliest| clock::after(earliest, kept) > now) {
                return None;
            }
            self.changes.rotate_left(1);
            self.changes[MOST_CHANGES - 1] = Some(now);
        }
        self.learning = Some((quota, now));
        let spec = LimitSpec::new(quota, own.transit_slack(), own.boundary_guard());
        Some(LearnedQuota {
            spec: spec.with_life(own.life()),
            life,
        })
    }

    /// Returns the quota that results from the stated limits and the quota `own` of the key.
    fn quota(&self, trust: HeaderTrust, own: &Quota) -> Quota {
        let base = Some(*own).filter(|_| trust == HeaderTrust::Stricter || self.limits.is_empty());
        let room = Quota::MOST_LIMITS - base.map_or(0, |base| base.limits().len());
        let mut limits: Vec<Limit> = Vec::new();
        for stated in &self.limits {
            if !limits.contains(&stated.limit) {
                limits.push(stated.limit);
            }
        }
        let stated = limits.iter().take(room).map(|limit| {
            let stated = Quota::new(limit.count(), limit.window());
            own.unit().map_or(stated, |unit| stated.of(unit))
        });
        let rates = base.into_iter().chain(stated).reduce(Quota::and);
        match (rates, own.most_in_flight()) {
            (Some(rates), Some(most)) if base.is_none() => rates.and(Quota::in_flight(most)),
            (rates, _) => rates.unwrap_or(*own),
        }
    }
}

/// Returns for how long limits apply after a response has stated them, the longest of which has this
/// window.
fn life(window: Duration) -> Duration {
    let shortest = Duration::from_secs(60);
    let longest = Duration::from_secs(3600);
    window.saturating_mul(10).clamp(shortest, longest)
}

/// Returns whether two quotas have the same limits.
fn is_same(one: &Quota, other: &Quota) -> bool {
    let (ones, others) = (one.limits(), other.limits());
    ones.iter().all(|limit| others.contains(limit))
        && others.iter().all(|limit| ones.contains(limit))
        && one.most_in_flight() == other.most_in_flight()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_find_no_room_are_not_learned() {
        let margin = Duration::from_millis(10);
        let own = LimitSpec::new(Quota::per_minute(300), margin, margin);
        let quotas = (1..=6).map(|limit| {
            ObservedQuota::new()
                .with_name(&format!("quota {limit}"))
                .with_limit(limit)
                .with_window(Duration::from_secs(60))
        });
        let signal = quotas.fold(Signal::default(), Signal::with_quota);
        let (mut stated, mut learned) = (StatedLimits::default(), Vec::new());
        for _ in 0..2 {
            let trust = HeaderTrust::Stricter;
            stated.state(trust, &own, &signal, clock::now(), &mut learned);
            assert_eq!(learned.len(), MOST);
        }
    }
}
