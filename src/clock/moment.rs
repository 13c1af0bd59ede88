//! Moments that requests with a permit at hand compare.

use std::time::{Duration, Instant};

use super::anchor;

/// A moment of the monotonic time, in nanoseconds since the clock was first asked. It takes half the room of
/// an [`Instant`], and is compared in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    /// Returns the moment of `instant`. If that was before the clock was first asked, returns the first moment.
    pub(crate) fn of(instant: Instant) -> Self {
        let (first, _) = anchor();
        let since = instant.saturating_duration_since(first);
        // Overflows after 584 years.
        let nanos = since.as_secs().saturating_mul(1_000_000_000);
        Moment(nanos.saturating_add(u64::from(since.subsec_nanos())))
    }

    /// Makes the moment that is `nanos` after the first one.
    #[inline]
    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Moment(nanos)
    }

    /// Returns the nanoseconds since the first moment.
    #[inline]
    pub(crate) const fn nanos(self) -> u64 {
        self.0
    }

    /// Returns the moment as an [`Instant`].
    #[inline]
    pub(crate) fn instant(self) -> Instant {
        let (first, _) = anchor();
        first + Duration::from_nanos(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn a_moment_is_its_instant() {
        let now = clock::now();
        for later in [0, 1, 999_999_999, 1_000_000_000, 86_400_000_000_123] {
            let instant = now + Duration::from_nanos(later);
            let moment = Moment::of(instant);
            assert_eq!(moment.instant(), instant);
            assert_eq!(moment.nanos(), Moment::of(now).nanos() + later);
        }
        let before = anchor().0 - Duration::from_secs(1);
        assert_eq!(Moment::of(before), Moment::from_nanos(0));
    }
}
