//! The logical time of a state in Redis: the server's clock and an offset that the state keeps.
//!
//! This is the model of the Lua, for tests only. The store in memory needs no logical time, because
//! its clock is never set.
//!
//! Logical time never goes back. A caller that remembers a reply states the time that it expects.
//! If logical time is later than that, either the server's clock was set forward, or the call is
//! late: it is executed late, or its process was suspended. One call alone cannot tell, so it never
//! makes logical time earlier. `time.lua` has all cases.
//!
//! Twin: `store/redis/lua/time.lua`, and abridged in `short.lua`.
//! After a change: `cargo test --all-features --lib differential`

use crate::limit::Micros;

/// How far the clock may be from what the caller expects: 250 ms. A thousandth of the age of the
/// reply that the caller remembers is added.
const CLOCK_TOLERANCE: Micros = 250_000;

/// What a caller expects, because it remembers a reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// The logical time.
    pub(crate) time: Micros,
    /// The age of the reply.
    pub(crate) age: Micros,
    /// How long that reply and this call may have been on their way.
    pub(crate) on_way: Micros,
    /// What the caller expects of the server's clock, if an earlier reply was unsure and stated
    /// that clock.
    pub(crate) server_time: Option<Micros>,
}

impl Expected {
    /// Returns how far the clock may be from what is expected.
    fn tolerance(&self) -> Micros {
        CLOCK_TOLERANCE + self.age / 1000
    }
}

/// Returns the logical time of a call, or `None` if the call must be sent again with the server's
/// clock.
///
/// `clock` is the server's clock plus the offset of the state.
pub(crate) fn logical_time(
    server_time: Micros,
    clock: Micros,
    last_write: Micros,
    expected: Option<Expected>,
) -> Option<Micros> {
    let Some(expected) = expected else {
        return Some(clock.max(last_write));
    };
    let tolerance = expected.tolerance();
    // A state that was written at a later time than the caller expects is newer than what the
    // caller knows.
    let is_state_later = last_write > expected.time + tolerance;
    let was_set_back = clock + tolerance < expected.time;
    let is_ahead = clock > expected.time + tolerance + expected.on_way;
    if !was_set_back && (!is_ahead || is_state_later) {
        return Some(clock.max(last_write));
    }
    if is_ahead {
        // Either this call is late, or the server's clock was set forward. If it has advanced since
        // the unsure reply as the caller's clock has, it was set before that reply.
        let jump = server_time.cast_signed() - expected.server_time?.cast_signed();
        let is_steady =
            -tolerance.cast_signed() <= jump && jump <= (tolerance + expected.on_way).cast_signed();
        if !is_steady {
            return None;
        }
    }
    Some(expected.time.max(last_write))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: Micros = 1_700_000_000_000_000;

    fn near(at: Micros) -> impl Strategy<Value = Micros> {
        prop_oneof![
            2 => Just(at),
            4 => at - 400_000..at + 400_000,
            1 => at - 90_000_000..at + 90_000_000,
        ]
    }

    fn expected() -> impl Strategy<Value = Expected> {
        let server_time = prop::option::of(near(NOW));
        (near(NOW), 0u64..100_000_000, 0u64..250_000, server_time).prop_map(
            |(time, age, on_way, server_time)| Expected {
                time,
                age,
                on_way,
                server_time,
            },
        )
    }

    proptest! {
        #![proptest_config(histories::config(64))]

        #[test]
        fn time_never_goes_back(clock in near(NOW), last in near(NOW), expected in prop::option::of(expected())) {
            if let Some(now) = logical_time(NOW, clock, last, expected) {
                prop_assert!(now >= last);
            }
        }

        #[test]
        fn time_is_of_the_clock_or_the_caller(clock in near(NOW), last in near(NOW), expected in expected()) {
            if let Some(now) = logical_time(NOW, clock, last, Some(expected)) {
                prop_assert!(now == last || now == clock || now == expected.time);
            }
        }

        #[test]
        fn callers_without_memory_follow_the_clock(clock in near(NOW), last in near(NOW)) {
            prop_assert_eq!(logical_time(NOW, clock, last, None), Some(clock.max(last)));
        }

        /// A late call expects too early a time: without the server's clock it decides nothing, or
        /// takes no time back.
        #[test]
        fn late_calls_turn_no_time_back(clock in near(NOW), last in near(NOW), expected in expected()) {
            let late = Expected { server_time: None, ..expected };
            if let Some(now) = logical_time(NOW, clock, last, Some(late)) {
                prop_assert!(now >= clock);
            }
        }

        #[test]
        fn clocks_set_forward_count_for_nothing(last in NOW - 1000..NOW, ahead in 1_000_000u64..90_000_000) {
            let expected = Expected { time: NOW, age: 0, on_way: 0, server_time: Some(NOW + ahead) };
            prop_assert_eq!(logical_time(NOW + ahead, NOW + ahead, last, Some(expected)), Some(NOW));
            let first = Expected { server_time: None, ..expected };
            prop_assert_eq!(logical_time(NOW + ahead, NOW + ahead, last, Some(first)), None);
        }

        #[test]
        fn clocks_set_back_count_for_nothing(last in NOW - 1000..NOW, behind in 1_000_000u64..90_000_000) {
            let expected = Expected { time: NOW, age: 0, on_way: 0, server_time: None };
            prop_assert_eq!(logical_time(NOW - behind, NOW - behind, last, Some(expected)), Some(NOW));
        }
    }
}
