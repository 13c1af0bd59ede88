//! One quota as a response states it.

use std::fmt;
use std::time::Duration;

use super::generic::words;
use super::parse::number::LARGEST;
use super::parse::text::{Bounded, Text};
use super::parse::time::LONGEST;

/// One quota as a response states it. A value that the response does not state is `None`.
///
/// Counts are whole numbers up to 2^53 - 1. Durations are whole milliseconds up to 366 days.
///
/// ```
/// use std::time::Duration;
/// use tollgate::signal::ObservedQuota;
///
/// let quota = ObservedQuota::new()
///     .with_name("minute")
///     .with_limit(100)
///     .with_window(Duration::from_secs(60));
/// assert_eq!((quota.name(), quota.limit()), (Some("minute"), Some(100)));
/// assert_eq!(quota.remaining(), None);
/// ```
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ObservedQuota {
    pub(super) name: Option<Box<str>>,
    /// `None` if it is not stated: requests. Until the quota is [finished](Self::finish), the unit in its name.
    pub(super) unit: Option<Box<str>>,
    pub(super) limit: Option<u64>,
    pub(super) remaining: Option<u64>,
    pub(super) used: Option<u64>,
    /// In milliseconds, as the next one.
    pub(super) window: Option<u64>,
    pub(super) reset_after: Option<u64>,
}

/// The quotas of a response while it is read.
pub(super) type Drafts = Bounded<ObservedQuota, 32>;

/// The unit of a part of a limit.
const PERCENT: &str = "percent";

impl ObservedQuota {
    /// The unit if none is stated.
    pub(crate) const REQUESTS: &str = "requests";

    /// Creates a quota without any values.
    pub fn new() -> Self {
        ObservedQuota::default()
    }

    /// Returns the name of the quota, at most 95 bytes.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the unit that is counted: `requests` if no unit is stated, or `tokens`,
    /// `complexity`, `bytes`, `credits`, `weight`, `orders`, `percent`, `errors`, `seconds`,
    /// `concurrent-requests`, or the server's own unit.
    pub fn unit(&self) -> &str {
        self.unit.as_deref().unwrap_or(Self::REQUESTS)
    }

    /// Returns how many units the quota has in all.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Returns how many units are left.
    pub fn remaining(&self) -> Option<u64> {
        self.remaining
    }

    /// Returns how many units are used.
    pub fn used(&self) -> Option<u64> {
        self.used
    }

    /// Returns the length of the window.
    pub fn window(&self) -> Option<Duration> {
        self.window.map(Duration::from_millis)
    }

    /// Returns the time from the arrival of the response until the quota has units again.
    pub fn reset_after(&self) -> Option<Duration> {
        self.reset_after.map(Duration::from_millis)
    }

    /// Returns whether nothing is left of the quota.
    pub(crate) fn is_used_up(&self) -> bool {
        self.remaining() == Some(0)
    }

    /// Returns whether the quota is for all calls, as far as its name states.
    pub(crate) fn is_of_all_calls(&self) -> bool {
        self.name().is_none_or(words::is_plain)
    }

    /// Sets the name; it is cut after 95 bytes.
    pub fn with_name(mut self, name: &str) -> Self {
        self.name = Some(Text::of(&[name]).into());
        self
    }

    /// Sets the unit; it is cut after 95 bytes.
    pub fn with_unit(mut self, unit: &str) -> Self {
        let unit = Text::of(&[unit]);
        self.unit = (unit.as_str() != Self::REQUESTS).then(|| unit.into());
        self
    }

    /// Sets how many units the quota has in all.
    pub fn with_limit(mut self, limit: u64) -> Self {
        self.limit = Some(limit.min(LARGEST));
        self
    }

    /// Sets how many units are left.
    pub fn with_remaining(mut self, remaining: u64) -> Self {
        self.remaining = Some(remaining.min(LARGEST));
        self
    }

    /// Sets how many units are used.
    pub fn with_used(mut self, used: u64) -> Self {
        self.used = Some(used.min(LARGEST));
        self
    }

    /// Sets the length of the window, rounded up to whole milliseconds and cut to 366 days.
    pub fn with_window(mut self, window: Duration) -> Self {
        self.window = Some(millis(window));
        self
    }

    /// Sets the time until the quota has units again, rounded up to whole milliseconds and cut to
    /// 366 days.
    pub fn with_reset_after(mut self, reset_after: Duration) -> Self {
        self.reset_after = Some(millis(reset_after));
        self
    }
}

/// How a quota is made of headers and bodies.
impl ObservedQuota {
    /// Makes a quota with this name, if it is not empty.
    pub(super) fn named(name: &str) -> Self {
        ObservedQuota {
            name: Text::boxed(name),
            ..ObservedQuota::default()
        }
    }

    /// Sets the percentage that is used.
    pub(super) fn percent(self, used: u64) -> Self {
        let remaining = Some(100u64.saturating_sub(used));
        ObservedQuota {
            unit: Text::boxed(PERCENT),
            limit: Some(100),
            used: Some(used),
            remaining,
            ..self
        }
    }

    /// Fills the missing fields from another description of the same quota.
    pub(super) fn fill(&mut self, other: ObservedQuota) {
        self.name = self.name.take().or(other.name);
        self.limit = self.limit.or(other.limit);
        self.remaining = self.remaining.or(other.remaining);
        self.used = self.used.or(other.used);
        self.window = self.window.or(other.window);
        self.reset_after = self.reset_after.or(other.reset_after);
    }

    /// Returns whether headers describe a quota. What is used is not enough: it may be the cost of
    /// this request. Headers without a word for a limit have to state more than what is left.
    pub(super) fn is_believable(&self, is_marked: bool, is_loose: bool) -> bool {
        let used = self.used.filter(|_| self.limit.or(self.window).is_some());
        if !is_loose {
            return self
                .limit
                .or(self.remaining)
                .or(self.reset_after)
                .or(used)
                .is_some();
        }
        let other = self.limit.or(self.reset_after).or(self.used);
        let is_less = self.limit.is_none_or(|limit| self.remaining <= Some(limit));
        let is_left = self.remaining.is_some() && (is_marked || other.is_some());
        is_less && (is_left || used.is_some())
    }

    /// Derives fields from the others. Returns whether the quota states anything.
    pub(super) fn finish(&mut self) -> bool {
        if let (Some(limit), None, Some(used)) = (self.limit, self.remaining, self.used) {
            self.remaining = Some(limit.saturating_sub(used));
        }
        // Some servers state as used what the one request has cost.
        if let (Some(limit), Some(remaining), Some(used)) = (self.limit, self.remaining, self.used)
            && used.saturating_add(remaining) < limit
            && self.unit.as_deref() != Some(PERCENT)
        {
            self.used = None;
        }
        if let (None, Some(remaining), Some(used)) = (self.limit, self.remaining, self.used) {
            self.limit = Some((used + remaining).min(LARGEST));
        }
        let name = self.name.as_deref().unwrap_or_default();
        let unit = self
            .unit
            .take()
            .or_else(|| words::unit_of(name).map(Box::from));
        self.unit = unit.filter(|unit| **unit != *ObservedQuota::REQUESTS);
        let states = self
            .limit
            .or(self.remaining)
            .or(self.used)
            .or(self.reset_after);
        states.is_some()
    }
}

impl fmt::Debug for ObservedQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservedQuota")
            .field("name", &self.name())
            .field("unit", &self.unit())
            .field("limit", &self.limit())
            .field("remaining", &self.remaining())
            .field("used", &self.used())
            .field("window", &self.window())
            .field("reset_after", &self.reset_after())
            .finish()
    }
}

/// Returns the whole milliseconds, rounded up, at most 366 days.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000))
        .unwrap_or(u64::MAX)
        .min(LONGEST)
}
