//! Recovery of a store that lost the state of a key: for how long it grants nothing.
//!
//! Permits that were granted before the loss may still be used, and the new state does not know
//! them. A process uses such a permit only within its *trust* after the last reply of the store.
//! The trust is a quarter of the longest window, at least 1.5 s and at most 15 s. So the store
//! grants nothing for the trust and a window after it made the new state. If a limit remembers
//! permits for longer than a minute, the store waits for a minute instead of the window. It then
//! charges the limit with the units that the caller was granted.
//!
//! This is the model of the Lua, for tests only. A store in this process never loses its state
//! alone.
//!
//! Twin: `recover` in `store/redis/lua/ledger.lua`, and step 2 of `in_flight.lua`.
//! After a change: `cargo test --all-features --lib differential`

use crate::limit::{Micros, micros_up};
use crate::quota::Limit;

/// The longest time for which a store grants nothing: 60 s. The trust is added.
const LONGEST_RECOVERY: Micros = 60_000_000;

/// The shortest trust: 1.5 s. A process uses permits for the trust after the last reply.
const SHORTEST_TRUST: Micros = 1_500_000;

/// A holder of calls in flight sends a claim every third of its time to live. The claim arrives at
/// most this much later: a second.
const LONGEST_CLAIM_DELAY: Micros = 1_000_000;

/// What a caller remembers of a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownState {
    pub(crate) incarnation: u64,
    pub(crate) writes: u64,
}

/// Returns whether the caller knows of a state that is lost, or of a later one than this.
///
/// Of the calls about rates, only those that also state a time count. A call that only returns
/// permits states none.
pub(crate) fn is_lost(known: KnownState, incarnation: u64, writes: u64) -> bool {
    known.incarnation != 0 && (known.incarnation != incarnation || known.writes > writes)
}

/// Returns for how long a permit counts in a limit.
pub(crate) fn remembered(limit: Limit) -> Micros {
    let window = micros_up(limit.window());
    match limit {
        // Lua calculates with doubles, in this order.
        Limit::Bucket {
            capacity, count, ..
        } if capacity > count => {
            (window as f64 / f64::from(count) * f64::from(capacity)).ceil() as Micros
        }
        _ => window,
    }
}

/// Returns whether recovery charges a limit with the units that the caller was granted.
pub(crate) fn is_charged(limit: Limit) -> bool {
    remembered(limit) > LONGEST_RECOVERY
}

/// Returns until when a state that was made at `made_at` grants nothing, under the limits that the
/// caller states. The moment is even, because its last bit has another meaning in the state.
pub(crate) fn recovering_until(made_at: Micros, limits: &[Limit]) -> Micros {
    let longest = limits
        .iter()
        .map(|limit| remembered(*limit))
        .max()
        .unwrap_or(0)
        .min(LONGEST_RECOVERY);
    let until = made_at + longest + longest.div_ceil(4).max(SHORTEST_TRUST);
    until + until % 2
}

/// Returns the same for calls in flight, whose claims have this time to live.
pub(crate) fn in_flight_recovering_until(made_at: Micros, time_to_live: Micros) -> Micros {
    made_at + time_to_live / 3 + LONGEST_CLAIM_DELAY
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::store::trust;

    const MADE: Micros = 1_700_000_000_000_000;

    fn limit() -> impl Strategy<Value = Limit> {
        let window = (1u64..7_200_000).prop_map(Duration::from_millis);
        (0..3, 1u32..100_000, 1u32..100_000, window).prop_map(|(kind, count, capacity, window)| {
            match kind {
                0 => Limit::Sliding { count, window },
                1 => Limit::Bucket {
                    capacity,
                    count,
                    window,
                },
                _ => Limit::Fixed { count, window },
            }
        })
    }

    proptest! {
        #![proptest_config(histories::config(64))]

        /// The process that got the last permit of the lost state uses it within its trust after
        /// the loss.
        #[test]
        fn lost_permits_are_a_window_old_before_the_next(limit in limit()) {
            let window = remembered(limit).min(LONGEST_RECOVERY);
            let last_use = MADE + micros_up(trust(Duration::from_micros(window)));
            prop_assert!(recovering_until(MADE, &[limit]) >= last_use + window);
        }

        #[test]
        fn limits_that_remember_longer_are_charged(limit in limit()) {
            let recovery = recovering_until(MADE, &[limit]) - MADE;
            prop_assert!(is_charged(limit) || recovery >= remembered(limit));
        }

        #[test]
        fn recovery_ends_after_75_seconds(limits in prop::collection::vec(limit(), 0..4)) {
            prop_assert!(recovering_until(MADE, &limits) <= MADE + 75_000_000);
        }

        #[test]
        fn another_limit_never_shortens_recovery(limits in prop::collection::vec(limit(), 1..4)) {
            prop_assert!(recovering_until(MADE, &limits) >= recovering_until(MADE, &limits[1..]));
        }

        /// Each holder claims within a third of its time to live, so all of them are known again.
        #[test]
        fn holders_claim_before_slots_are_granted(time_to_live in 0u64..3_600_000_000) {
            prop_assert!(in_flight_recovering_until(MADE, time_to_live) > MADE + time_to_live / 3);
        }
    }

    #[test]
    fn callers_that_know_more_have_lost_a_state() {
        let known = KnownState {
            incarnation: 5,
            writes: 9,
        };
        assert!(!is_lost(known, 5, 9) && !is_lost(known, 5, 10));
        assert!(is_lost(known, 5, 8) && is_lost(known, 6, 9));
        assert!(
            !is_lost(
                KnownState {
                    incarnation: 0,
                    writes: 9
                },
                5,
                8
            ),
            "the caller knows nothing"
        );
    }
}
