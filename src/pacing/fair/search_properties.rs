//! Laws of the search: what it reaches with simple servers.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::{Dice, seconds, span};
use super::curve::Curve;
use super::search::Search;
use crate::clock;

/// A server of which the client knows nothing. Times are in seconds.
#[derive(Clone, Debug)]
enum Server {
    Bucket {
        size: f64,
        rate: f64,
        tokens: f64,
        at: f64,
    },
    /// A window begins with the first request after the window before.
    Window {
        limit: f64,
        length: f64,
        used: f64,
        end: f64,
    },
}

impl Server {
    fn bucket(size: u32, rate: u32) -> Self {
        Server::Bucket {
            size: size.into(),
            rate: rate.into(),
            tokens: size.into(),
            at: 0.0,
        }
    }

    fn window(limit: u32, length: f64) -> Self {
        Server::Window {
            limit: limit.into(),
            length,
            used: 0.0,
            end: 0.0,
        }
    }

    fn rate(&self) -> f64 {
        match self {
            Server::Bucket { rate, .. } => *rate,
            Server::Window { limit, length, .. } => limit / length,
        }
    }

    fn accepts(&mut self, now: f64) -> bool {
        match self {
            Server::Bucket {
                size,
                rate,
                tokens,
                at,
            } => {
                *tokens = (*tokens + (now - *at) * *rate).min(*size);
                *at = now;
                let is_free = *tokens >= 1.0;
                *tokens -= f64::from(u8::from(is_free));
                is_free
            }
            Server::Window {
                limit,
                length,
                used,
                end,
            } => {
                if now >= *end {
                    (*used, *end) = (0.0, now + *length);
                }
                let is_free = *used < *limit;
                *used += f64::from(u8::from(is_free));
                is_free
            }
        }
    }
}

/// What came of a run: the shares of the limit that were used, and of the requests that were refused.
#[derive(Debug)]
struct Outcome {
    used: f64,
    refused: f64,
}

/// Lets 20 callers call `server` for `end` seconds, one request each at a time. A round trip takes
/// 2 ms. The second half counts.
fn run(mut server: Server, end: f64, seed: u64) -> Outcome {
    let trip = Duration::from_millis(2);
    let start = clock::now();
    let (mut search, mut dice) = (Search::default(), Dice::seeded(seed));
    let mut in_flight = VecDeque::new();
    let (mut last, mut held) = (None::<Instant>, start);
    let (mut passed, mut refused) = (0.0, 0.0);
    loop {
        let slot = match last {
            Some(last) => (last + span(search.slot(in_flight.len()))).max(held),
            None => start,
        };
        let answer = in_flight.front().map(|sent| *sent + trip);
        let is_free = in_flight.len() < 20;
        if is_free && answer.is_none_or(|answer| slot < answer) {
            let now = last.map_or(slot, |last| slot.max(last + Duration::from_micros(10)));
            search.sent(last, in_flight.len(), now);
            last = Some(now);
            in_flight.push_back(now);
            continue;
        }
        let Some(sent) = in_flight.pop_front() else {
            unreachable!("a caller is free or waits for an answer");
        };
        let now = sent + trip;
        let at = seconds(start, now);
        if at > end {
            let half = end / 2.0;
            return Outcome {
                used: passed / (server.rate() * half),
                refused: refused / (passed + refused),
            };
        }
        let counts = f64::from(u8::from(at > end / 2.0));
        if server.accepts(at) {
            passed += counts;
            search.passed(sent, now, false, true);
        } else {
            refused += counts;
            held = held.max(now + span(search.refused(sent, now, &mut dice)));
        }
    }
}

proptest! {
    #![proptest_config(histories::config(16))]

    #[test]
    fn search_uses_what_a_bucket_allows(
        size in 1_u32..100,
        rate in 5_u32..300,
        seed in any::<u64>(),
    ) {
        let end = 120.0 + 4000.0 / f64::from(rate);
        let outcome = run(Server::bucket(size, rate), end, seed);
        prop_assert!(outcome.used >= 0.85 && outcome.refused <= 0.02, "{outcome:?}");
    }

    #[test]
    fn search_uses_what_a_window_allows(
        limit in 20_u32..1000,
        length in 1.0_f64..20.0,
        seed in any::<u64>(),
    ) {
        let outcome = run(Server::window(limit, length), 24.0 * length, seed);
        // All of 6000 used 97 % or more, and had 7 % refused or less.
        prop_assert!(outcome.used >= 0.9 && outcome.refused <= 0.1, "{outcome:?}");
    }

    #[test]
    fn pauses_grow_with_refusals_in_a_row(seed in any::<u64>(), count in 4_usize..17) {
        let (mut search, mut dice, mut now) = (Search::default(), Dice::seeded(seed), clock::now());
        search.sent(None, 0, now);
        let mut pauses = Vec::new();
        for _ in 0..count {
            let sent = now;
            now += Duration::from_millis(1);
            let pause = search.refused(sent, now, &mut dice);
            now += span(pause);
            pauses.push(pause);
        }
        for pair in pauses.windows(3) {
            prop_assert!(pair[2] > pair[0], "{pauses:?}");
        }
    }
}

#[test]
fn steep_curve_ends_at_the_refused_rate() {
    let (mut curve, refused) = (Curve::between(0.0, 0.7, 0.0, 1.0), 0.4);
    for _ in 0..200 {
        curve.advance();
        curve.slow_down_above(refused);
    }
    let rate = curve.rate();
    assert!((refused..refused + 0.1).contains(&rate), "{rate}");
}

#[test]
fn refusals_of_one_round_trip_count_once() {
    let (mut search, mut dice, sent) = (Search::default(), Dice::seeded(1), clock::now());
    search.sent(None, 0, sent);
    let now = sent + Duration::from_millis(1);
    assert!(search.refused(sent, now, &mut dice) > 0.0);
    let later = now + Duration::from_millis(1);
    assert!(search.refused(sent, later, &mut dice) == 0.0);
}
