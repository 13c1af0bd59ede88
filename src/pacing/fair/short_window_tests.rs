//! Tests of short windows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::span;
use super::short_window::{ShortWindow, WindowAnswer};
use crate::clock;

/// A limit, and a client that looks at it.
struct Watcher {
    window: ShortWindow,
    start: Instant,
    limit: f64,
    stated: Option<f64>,
    is_counted: bool,
}

impl Watcher {
    fn new(limit: f64, stated: Option<f64>) -> Self {
        Watcher {
            window: ShortWindow::default(),
            start: clock::now(),
            limit,
            stated,
            is_counted: false,
        }
    }

    /// Looks at `at` seconds, at once: `remaining` are left, and the reset is `reset` away.
    fn look(&mut self, at: f64, remaining: f64, reset: f64) -> Option<(f64, f64)> {
        let now = self.start + span(at);
        self.window.look(&WindowAnswer {
            limit: self.limit,
            remaining,
            window: self.stated,
            reset: Some(reset.ceil()),
            is_counted: self.is_counted,
            sent: now,
            now,
        })
    }
}

/// All clients together use the limit evenly, and one of them looks `often` times a window.
fn follows_one_line(
    (limit, window): (u32, u32),
    often: f64,
    phase: f64,
    is_stated: bool,
) -> Result<(), TestCaseError> {
    let (limit, window) = (f64::from(limit), f64::from(window));
    let mut watcher = Watcher::new(limit, is_stated.then_some(window));
    let looks = (12.0 * often) as u32;
    for look in 1..=looks {
        let at = window * (phase + f64::from(look) / often);
        let left = window - at % window;
        let remaining = (limit * left / window - 1.0).max(0.0).floor();
        let seen = watcher.look(at, remaining, left);
        if at < 4.0 * window {
            continue;
        }
        let (token_time, spare) = seen.expect("a window");
        let length = token_time * limit;
        if !is_stated {
            // A client that asks rarely sees no reset of a whole window.
            prop_assert!(
                (length - window).abs() <= window / often + 0.1 * window,
                "{length}"
            );
        } else {
            prop_assert!((length - window).abs() < 1e-9, "{length}");
            // A client whose first look is at an unused window may use half of the limit at once. The
            // others have used all of it by the end, so each window leaves this client only the part
            // of that burst that its last look sees: at most 0.4 of it. Of 500, eight windows leave 0.3.
            if at >= 8.0 * window {
                prop_assert!((-1.5..=2.5).contains(&spare), "{spare} at {at}");
            }
        }
    }
    Ok(())
}

/// The first look is at an unused window, so there is a burst that ends only after four windows.
#[test]
fn burst_of_an_unused_window_ends() -> Result<(), TestCaseError> {
    follows_one_line((332, 1), 2.883977130686581, 0.6542300174777609, true)
}

/// All looks are in the same three places of the windows, and the longest reset that they see is five
/// seconds.
#[test]
fn looks_in_the_same_places_learn_the_length() -> Result<(), TestCaseError> {
    follows_one_line((198, 7), 3.0036367090335125, 0.32642196890099, false)
}

proptest! {
    #![proptest_config(histories::config(64))]

    /// All clients together use the limit evenly.
    fn rare_and_frequent_looks_follow_one_line(
        limit in 20_u32..1000,
        window in 1_u32..=10,
        often in 2.5_f64..50.0,
        phase in 0.0_f64..1.0,
        is_stated in any::<bool>(),
    ) {
        follows_one_line((limit, window), often, phase, is_stated)?;
    }

    #[test]
    fn buckets_do_not_count_as_windows(
        limit in 20_u32..1000,
        window in 1_u32..=10,
        rate in 0.4_f64..0.8,
    ) {
        let (limit, window) = (f64::from(limit), f64::from(window));
        let mut watcher = Watcher::new(limit, Some(window));
        let mut seen = None;
        // Requests at a part of the rate at which the bucket is filled, after it was empty.
        for request in 0..(2.0 * limit * rate) as u32 {
            let at = f64::from(request) * window / (limit * rate);
            let left = (at * limit * (1.0 - rate) / window).min(limit - 1.0).floor();
            seen = watcher.look(at, left, (limit - left) * window / limit);
        }
        prop_assert_eq!(seen, None);
    }
}

#[test]
fn two_beginnings_teach_the_length() {
    let mut watcher = Watcher::new(100.0, None);
    assert_eq!(watcher.look(0.0, 40.0, 1.0), None);
    assert_eq!(watcher.look(0.3, 10.0, 1.0), None);
    assert_eq!(watcher.look(0.5, 97.0, 2.0), None);
    assert_eq!(watcher.look(2.4, 3.0, 1.0), None);
    let (token_time, spare) = watcher.look(2.5, 99.0, 2.0).expect("a window");
    assert!(
        (token_time - 0.02).abs() < 1e-9 && (0.0..=1.0).contains(&spare),
        "{spare}"
    );
    assert_eq!(watcher.window.exhausted_until(98), None);
    let ends = watcher.start + Duration::from_millis(4500);
    assert_eq!(watcher.window.exhausted_until(99), Some(ends));
}

/// Requests at nine tenths of the limit: Remaining falls for a window, and then stays. The reset is
/// stated as up to two seconds too late.
#[test]
fn steady_remaining_shows_a_sole_client_that_a_window_slides() {
    let (limit, length) = (100.0, 2.0);
    for (is_counted, late, runs) in [
        (false, 0.0, 2),
        (true, 0.0, 2),
        (true, 0.0, 1),
        (true, 1.0, 1),
        (true, 1.9, 1),
    ] {
        let mut watcher = Watcher::new(limit, None);
        watcher.is_counted = is_counted;
        let mut accepted = VecDeque::new();
        for run in 0..runs {
            for request in 0..135 {
                let at = f64::from(6 * run) + f64::from(request) / 45.0;
                accepted.push_back(at);
                accepted.retain(|then| then + length > at);
                let reset = accepted[0] + length - at + late;
                watcher.look(at, limit - accepted.len() as f64, reset);
            }
        }
        let slides = is_counted.then_some(length);
        assert_eq!(watcher.window.sliding_window(), slides, "{late}");
    }
}

#[test]
fn unmoved_reset_shows_a_window_before_its_end() {
    let mut watcher = Watcher::new(5.0, None);
    assert_eq!(watcher.look(0.0, 4.0, 10.0), None);
    assert_eq!(watcher.look(0.1, 3.0, 9.9), None);
    let (token_time, _) = watcher.look(0.2, 2.0, 9.8).expect("a window");
    assert!((token_time - 2.0).abs() < 1e-9);
    // The reset of a bucket becomes longer.
    let mut watcher = Watcher::new(5.0, None);
    let looks = [
        (0.0, 4.0, 2.0),
        (0.1, 3.0, 3.9),
        (0.2, 2.0, 5.8),
        (0.3, 1.0, 7.7),
    ];
    assert!(
        looks
            .iter()
            .all(|(at, left, reset)| watcher.look(*at, *left, *reset).is_none())
    );
}

#[test]
fn late_reset_shows_a_window_of_ten_seconds() {
    for late in [0.6, 1.6, 2.6] {
        let mut watcher = Watcher::new(5.0, None);
        assert_eq!(watcher.look(0.0, 4.0, 10.0 + late), None);
        assert_eq!(watcher.look(0.1, 3.0, 9.9 + late), None);
        let (token_time, _) = watcher.look(0.2, 2.0, 9.8 + late).expect("a window");
        assert!((token_time - 2.0).abs() < 1e-9, "{late}");
    }
}

#[test]
fn long_windows_are_not_short() {
    let mut watcher = Watcher::new(5.0, Some(10.5));
    assert_eq!(watcher.look(0.0, 4.0, 10.5), None);
}
