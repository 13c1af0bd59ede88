//! Whether an accepted request would change what any key knows of its upstream.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::clock;

/// Until when an accepted request may change what a key of the process knows of its upstream: it is under suspicion, waits
/// for the response to a probe, or was refused. Until then, all responses are read.
pub(crate) static UNCERTAIN_UNTIL: LatestMoment = LatestMoment::new();

/// Returns whether responses other than refusals matter to any key.
#[inline]
pub(crate) fn is_any_uncertain() -> bool {
    UNCERTAIN_UNTIL.is_ahead()
}

/// Until when something may be so for any key of the process, in milliseconds from [`BASE`]. Zero if it is so for none.
/// Tried: to count the keys. A key that is refused once and never used again then keeps all requests of the process from
/// the fast path.
#[derive(Debug)]
pub(crate) struct LatestMoment(AtomicU64);

/// By the clock of the machine: the paused clocks of tests differ within a process. They run faster, if at all.
static BASE: LazyLock<Instant> = LazyLock::new(clock::of_machine);

fn millis_since_base(moment: Instant) -> u64 {
    let millis = moment.saturating_duration_since(*BASE).as_millis();
    u64::try_from(millis).unwrap_or(u64::MAX)
}

impl LatestMoment {
    pub(crate) const fn new() -> Self {
        LatestMoment(AtomicU64::new(0))
    }

    /// Notes that it may be so until `until`, as of `now`.
    pub(crate) fn note(&self, until: Instant, now: Instant) {
        let left = until.saturating_duration_since(now);
        let until = millis_since_base(clock::after(clock::of_machine(), left));
        self.0.fetch_max(until.saturating_add(1), Ordering::Relaxed);
    }

    /// Returns whether it may be so for any key. While it is so for none, this costs a load.
    #[inline]
    pub(crate) fn is_ahead(&self) -> bool {
        let until = self.0.load(Ordering::Relaxed);
        until != 0 && self.is_before(until)
    }

    #[inline(never)]
    fn is_before(&self, until: u64) -> bool {
        let is_before = millis_since_base(clock::of_machine()) < until;
        if !is_before {
            // If it is a later one by now, it stays.
            let order = Ordering::Relaxed;
            _ = self.0.compare_exchange(until, 0, order, order);
        }
        is_before
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn moments_that_are_over_can_be_put_off() {
        let (moment, now) = (LatestMoment::new(), clock::of_machine());
        assert!(!moment.is_ahead());
        moment.note(now, now);
        // A millisecond passes.
        while moment.is_ahead() {}
        moment.note(now + Duration::from_secs(3600), now);
        moment.note(now, now);
        assert!(moment.is_ahead());
    }
}
