//! Histories with a name: what random histories of laws before this one have found, step by step.

use super::features::{Feature, Features};
use super::plan::{
    Answer, History, LimiterPlan, OnAway, Part, Patience, Rate, Request, Step, StorePlan, Then, Via,
};
use super::run;

/// A request that is settled: when it starts, its estimate, its true cost, and how long after it was sent
/// that is stated.
type Settled = (u64, u32, u32, u64);

/// Makes the history of requests of one process under 100 units in a window of so many seconds.
fn settled(window: u64, calls: &[Settled]) -> History {
    let mut features = Features::default();
    features.add(Feature::Settle);
    let mut calls = calls.to_vec();
    calls.sort_unstable();
    let mut before = 0;
    let steps = calls.iter().map(|&(starts, cost, actual, after)| {
        let pause = starts - std::mem::replace(&mut before, starts);
        (pause, Step::Request(request(cost, actual, after)))
    });
    History {
        features,
        dice: 0,
        limiters: vec![LimiterPlan {
            rates: vec![Rate::Sliding {
                count: 100,
                window: window * 1000,
            }],
            tokens: None,
            in_flight: None,
            keys: 0,
            max_wait: window * 2000,
            max_hold: 60_000,
            max_queue: 1000,
            max_keys: 1000,
            settles: true,
            counted_within: 0,
            is_divided: false,
            lends: 97,
            guard: None,
        }],
        steps: steps.collect(),
        store: StorePlan {
            trip: None,
            lost: (0, 0),
            has_sessions: false,
            has_background: false,
        },
        on_store_error: OnAway::FailClosed,
        releases: vec![vec![]],
        processes: vec![0],
    }
}

fn request(cost: u32, actual: u32, after: u64) -> Request {
    Request {
        process: 0,
        parts: vec![Part {
            limiter: 0,
            key: 0,
            cost,
            tokens: 0,
        }],
        class: None,
        deadline: None,
        via: Via::Acquire,
        patience: Patience::Endless,
        transit: 0,
        takes: 1,
        then: Then::Use {
            after: 0,
            answer: Answer::Ok,
        },
        actual: Some((actual * 100 / cost, after)),
    }
}

fn check(history: &History) {
    let wrong = run::play(history).wrong;
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", history.list());
}

/// Costs that are far above their estimates are charged at once, and the next requests wait.
#[test]
fn underestimates_that_are_settled_at_once_delay_the_next_requests() {
    check(&settled(
        10,
        &[
            (2994, 1, 18, 0),
            (8435, 8, 32, 0),
            (5175, 21, 21, 0),
            (0, 9, 9, 0),
            (0, 9, 9, 0),
            (0, 12, 12, 0),
        ],
    ));
}

/// Charges that come late count from when their requests were sent.
#[test]
fn underestimates_that_are_settled_late_exceed_the_limit_by_themselves_only() {
    check(&settled(
        3600,
        &[
            (0, 1, 27, 0),
            (16_693, 1, 23, 17_790),
            (9275, 1, 14, 25_208),
            (34_483, 25, 0, 0),
            (9445, 1, 42, 25_029),
            (0, 1, 0, 0),
        ],
    ));
}
