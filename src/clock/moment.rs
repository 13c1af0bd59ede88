//! Moments that requests with a permit at hand compare.

use std::time::{Duration, Instant};

use super::anchor;

/// A moment of the monotonic time, in nanoseconds since an hour before the clock was first asked. It takes half
/// the room of an [`Instant`], and is compared in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

/// An hour, in nanoseconds. A clock that stands still, as in tests, may show earlier moments than when the clock was
/// first asked.
const BEFORE: u64 = 3600 * 1_000_000_000;

impl Moment {
    /// Returns the moment of `instant`, or the first moment if that is later.
    pub(crate) fn of(instant: Instant) -> Self {
        let (asked, _) = anchor();
        Moment(match instant.checked_duration_since(asked) {
            Some(since) => BEFORE.saturating_add(nanos(since)),
            None => BEFORE.saturating_sub(nanos(asked - instant)),
        })
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

    #[inline]
    pub(crate) fn instant(self) -> Instant {
        let (asked, _) = anchor();
        match self.0.checked_sub(BEFORE) {
            Some(since) => asked + Duration::from_nanos(since),
            None => asked - Duration::from_nanos(BEFORE - self.0),
        }
    }
}

/// Returns the nanoseconds of `span`, at most 584 years.
fn nanos(span: Duration) -> u64 {
    let seconds = span.as_secs().saturating_mul(1_000_000_000);
    seconds.saturating_add(u64::from(span.subsec_nanos()))
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
        assert_eq!(Moment::of(before).instant(), before);
    }
}
