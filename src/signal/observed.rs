//! One quota as a response states it.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use super::parse::number::LARGEST;
use super::parse::text::Text;
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
    pub(super) unit: Option<Box<str>>,
    pub(super) limit: Small,
    pub(super) remaining: Small,
    pub(super) used: Small,
    pub(super) window: Small,
    pub(super) reset_after: Small,
}

/// An optional number below `u64::MAX`, in eight bytes: it is stored plus one.
type Small = Option<NonZeroU64>;

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
        out(self.limit)
    }

    /// Returns how many units are left.
    pub fn remaining(&self) -> Option<u64> {
        out(self.remaining)
    }

    /// Returns how many units are used.
    pub fn used(&self) -> Option<u64> {
        out(self.used)
    }

    /// Returns the length of the window.
    pub fn window(&self) -> Option<Duration> {
        out(self.window).map(Duration::from_millis)
    }

    /// Returns the time from the arrival of the response until the quota has units again.
    pub fn reset_after(&self) -> Option<Duration> {
        out(self.reset_after).map(Duration::from_millis)
    }

    /// Returns whether nothing is left of the quota.
    pub(crate) fn is_used_up(&self) -> bool {
        self.remaining() == Some(0)
    }

    /// Returns whether the quota is for all calls, as far as its name states.
    pub(crate) fn is_of_all_calls(&self) -> bool {
        self.name().is_none_or(super::generic::words::is_plain)
    }

    /// Sets the name; it is cut after 95 bytes.
    pub fn with_name(self, name: &str) -> Self {
        ObservedQuota {
            name: Some(Text::of(&[name]).into()),
            ..self
        }
    }

    /// Sets the unit; it is cut after 95 bytes.
    pub fn with_unit(self, unit: &str) -> Self {
        let unit = Text::of(&[unit]);
        ObservedQuota {
            unit: (unit.as_str() != Self::REQUESTS).then(|| unit.into()),
            ..self
        }
    }

    /// Sets how many units the quota has in all.
    pub fn with_limit(self, limit: u64) -> Self {
        ObservedQuota {
            limit: small(limit.min(LARGEST)),
            ..self
        }
    }

    /// Sets how many units are left.
    pub fn with_remaining(self, remaining: u64) -> Self {
        ObservedQuota {
            remaining: small(remaining.min(LARGEST)),
            ..self
        }
    }

    /// Sets how many units are used.
    pub fn with_used(self, used: u64) -> Self {
        ObservedQuota {
            used: small(used.min(LARGEST)),
            ..self
        }
    }

    /// Sets the length of the window, rounded up to whole milliseconds and cut to 366 days.
    pub fn with_window(self, window: Duration) -> Self {
        ObservedQuota {
            window: small(millis(window)),
            ..self
        }
    }

    /// Sets the time until the quota has units again, rounded up to whole milliseconds and cut to
    /// 366 days.
    pub fn with_reset_after(self, reset_after: Duration) -> Self {
        ObservedQuota {
            reset_after: small(millis(reset_after)),
            ..self
        }
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

pub(super) fn small(number: u64) -> Small {
    NonZeroU64::MIN.checked_add(number)
}

fn out(small: Small) -> Option<u64> {
    Some(small?.get() - 1)
}

/// Returns the whole milliseconds, rounded up, at most 366 days.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000))
        .unwrap_or(u64::MAX)
        .min(LONGEST)
}
