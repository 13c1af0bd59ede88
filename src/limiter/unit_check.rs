//! Whether requests state the units that are limited.
//!
//! A name may be mistyped, and then a limit counts nothing. An event reports the first request that lacks a unit or states
//! an unknown one. If no request ever states a unit, requests are refused: the limit would only seem to be kept.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// After so many requests without a unit, it is likely that no request will state it.
const MOST_WITHOUT: u32 = 100;

/// Stands in place of the number once a request has stated the unit.
const STATED: u32 = u32::MAX;

/// What is known of the costs that a limit has seen.
#[derive(Debug, Default)]
pub(super) struct UnitCheck {
    /// How many requests came without the unit, up to [`MOST_WITHOUT`], or [`STATED`].
    without: AtomicU32,
    is_reported: AtomicBool,
}

impl UnitCheck {
    /// Notes whether a request states the unit. Returns whether it is to be refused.
    #[inline]
    pub(super) fn is_uncharged(&self, states: bool) -> bool {
        let before = self.without.load(Ordering::Relaxed);
        if before == STATED {
            return false;
        }
        if states {
            self.without.store(STATED, Ordering::Relaxed);
            return false;
        }
        if before >= MOST_WITHOUT {
            return true;
        }
        // Another thread may have stated the unit meanwhile, or counted.
        let (without, counted) = (&self.without, before + 1);
        let _ = without.compare_exchange(before, counted, Ordering::Relaxed, Ordering::Relaxed);
        false
    }

    /// Returns whether a difference is still to be reported. It is reported once.
    #[inline]
    pub(super) fn is_unreported(&self) -> bool {
        !self.is_reported.load(Ordering::Relaxed)
    }

    /// Notes that a difference is reported now. Returns whether it is the first.
    pub(super) fn report(&self) -> bool {
        !self.is_reported.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_refused_only_if_none_states_the_unit() {
        let check = UnitCheck::default();
        let refused = (0..150).filter(|_| check.is_uncharged(false));
        assert_eq!(refused.count(), 50);
        assert!(!check.is_uncharged(true));
        assert!(!(0..150).any(|_| check.is_uncharged(false)));
    }
}
