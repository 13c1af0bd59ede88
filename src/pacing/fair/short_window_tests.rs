//! Tests of short windows.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::reading::{QuotaAnswer, QuotaNumbers};
use super::super::seconds;
use super::short_window::{Seen, ShortWindow};
use crate::clock;

/// A limit, and a client that looks at it.
struct Watcher {
    window: ShortWindow,
    start: Instant,
    limit: f64,
    stated: Option<f64>,
    /// The round trip, in seconds. The server judges half-way.
    trip: f64,
}

impl Watcher {
    fn new(limit: f64, stated: Option<f64>) -> Self {
        Watcher {
            window: ShortWindow::default(),
            start: clock::now(),
            limit,
            stated,
            trip: 0.0,
        }
    }

    fn at(&self, seconds: f64) -> Instant {
        // The first request leaves before the server judges it.
        self.start + Duration::from_secs(1).mul_f64(1.0 + seconds)
    }

    /// The server judges a request at `at` seconds: `remaining` are left, and the reset is `reset`
    /// away.
    fn look(&mut self, at: f64, remaining: f64, reset: f64) -> Option<Seen> {
        self.window.look(&QuotaAnswer {
            told: QuotaNumbers {
                remaining: Some(remaining),
                limit: Some(self.limit),
                window: self.stated,
                reset: Some(reset.ceil()),
            },
            passed: true,
            sent: self.at(at - self.trip / 2.0),
            now: self.at(at + self.trip / 2.0),
        })
    }
}

/// All clients together use the limit evenly, and one of them looks `often` times a window.
fn follows_one_line(
    (limit, window): (u32, u32),
    often: f64,
    phase: f64,
    trip: f64,
    is_stated: bool,
) -> Result<(), TestCaseError> {
    let (limit, window) = (f64::from(limit), f64::from(window));
    let mut watcher = Watcher::new(limit, is_stated.then_some(window));
    watcher.trip = trip * window / often;
    for look in 1..=(20.0 * often) as u32 {
        let at = window * (phase + f64::from(look) / often);
        let left = window - at % window;
        let remaining = (limit * left / window - 1.0).max(0.0).floor();
        let seen = watcher.look(at, remaining, left);
        if at < 12.0 * window {
            continue;
        }
        let seen = seen.expect("a window");
        if is_stated {
            prop_assert!((seen.token_time * limit - window).abs() < 1e-9);
            prop_assert!(!watcher.window.slides());
            let ends = watcher.window.ends().expect("a fixed window");
            let late = seconds(watcher.at(at + left), ends) / window;
            let early = seconds(ends, watcher.at(at + left)) / window;
            prop_assert!(early < 1e-6 && late <= 1.1 / often + trip / often, "{late}");
            // Within the bounds of the end, an even use is recognised.
            let spare = seen.spare.expect("a fixed window");
            prop_assert!(spare.abs() <= 2.0, "{spare} at {at}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn rare_and_frequent_looks_follow_one_line(
        limit in 20_u32..1000,
        window in 1_u32..=10,
        often in 2.5_f64..50.0,
        phase in 0.0_f64..1.0,
        trip in 0.0_f64..0.9,
        is_stated in any::<bool>(),
    ) {
        follows_one_line((limit, window), often, phase, trip, is_stated)?;
    }

    #[test]
    fn buckets_slide(
        limit in 20_u32..1000,
        window in 1_u32..=10,
        rate in 0.4_f64..0.8,
    ) {
        let (limit, window) = (f64::from(limit), f64::from(window));
        let mut watcher = Watcher::new(limit, Some(window));
        // Requests at a part of the rate at which the bucket is filled, after it was empty.
        for request in 0..(2.0 * limit * rate) as u32 {
            let at = f64::from(request) * window / (limit * rate);
            let left = (at * limit * (1.0 - rate) / window).min(limit - 1.0).floor();
            watcher.look(at, left, (limit - left) * window / limit);
        }
        prop_assert!(watcher.window.slides());
    }
}

#[test]
fn first_look_does_not_place_a_window() {
    let mut watcher = Watcher::new(100.0, Some(1.0));
    let seen = watcher.look(0.0, 40.0, 1.0).expect("a short window");
    assert_eq!(seen.spare, Some(0.0));
    // Nothing is left until the latest moment at which the window can end.
    assert_eq!(watcher.window.exhausted_until(39), None);
    let ends = Some(watcher.at(1.0));
    assert_eq!(watcher.window.exhausted_until(40), ends);
}

#[test]
fn rise_places_a_window() {
    let mut watcher = Watcher::new(100.0, None);
    watcher.look(0.8, 12.0, 1.0);
    let seen = watcher.look(1.1, 95.0, 1.0).expect("a short window");
    assert!((seen.token_time - 0.01).abs() < 1e-9);
    // The window began 0 to 0.3 s ago, and five are used.
    assert_eq!(seen.spare, Some(0.0));
    assert!(seen.token_time < seen.paced_time && seen.paced_time < 0.0105);
    assert_eq!(watcher.window.ends(), Some(watcher.at(2.1)));
}

/// The reset is stated as up to two seconds too late.
#[test]
fn too_late_reset_does_not_lengthen_a_window() {
    let mut watcher = Watcher::new(50.0, None);
    for look in 0..60 {
        let at = f64::from(look) * 0.083;
        let left = 1.0 - at % 1.0;
        watcher.look(at, (50.0 * left - 1.0).max(0.0).floor(), left + 2.0);
    }
    let seen = watcher.look(5.0, 49.0, 3.0).expect("a short window");
    assert!((seen.token_time - 0.02).abs() < 0.004, "{seen:?}");
}

/// Requests at nine tenths of the limit: Remaining falls for a window, and then stays.
#[test]
fn steady_remaining_shows_that_a_window_slides() {
    let (limit, length) = (100.0, 2.0);
    let mut watcher = Watcher::new(limit, None);
    let mut accepted = VecDeque::new();
    for request in 0..450 {
        let at = f64::from(request) / 45.0;
        accepted.push_back(at);
        accepted.retain(|then| then + length > at);
        let reset = accepted[0] + length - at;
        watcher.look(at, limit - accepted.len() as f64, reset);
    }
    assert_eq!(watcher.window.sliding_window(), Some(length));
}

/// A window begins with the first request after the window before.
#[test]
fn windows_that_begin_with_a_request_do_not_slide() {
    let (limit, length) = (40.0, 2.0);
    let mut watcher = Watcher::new(limit, Some(length));
    let (mut ends, mut used) = (0.0, 0.0);
    for request in 0..400 {
        let at = f64::from(request) * 0.0513;
        if at >= ends {
            (ends, used) = (at + length, 0.0);
        }
        used += 1.0;
        watcher.look(at, limit - used, ends - at);
        assert!(!watcher.window.slides(), "{at}");
    }
}

/// A client that sends nothing for hours finds the window where it is.
#[test]
fn windows_go_on_during_a_long_rest() {
    let (limit, length) = (20.0, 10.0);
    let mut watcher = Watcher::new(limit, Some(length));
    let before = (0..50).map(f64::from);
    for at in before.chain((1853..2003).map(f64::from)) {
        let left = length - at % length;
        let seen = watcher.look(at, 2.0 * left - 1.0, left);
        if at < 20.0 {
            continue;
        }
        let ends = watcher.window.ends().expect("a fixed window");
        let (early, late) = (
            seconds(ends, watcher.at(at + left)),
            seconds(watcher.at(at + left), ends),
        );
        assert!(early < 1e-6 && late <= 2.0, "{early} or {late} at {at}");
        let spare = seen.and_then(|seen| seen.spare).expect("a fixed window");
        assert!(spare.abs() <= 2.0, "{spare} at {at}");
    }
}

#[test]
fn long_windows_are_not_short() {
    let mut watcher = Watcher::new(5.0, Some(10.5));
    assert!(watcher.look(0.0, 4.0, 10.5).is_none() && !watcher.window.is_known());
}
