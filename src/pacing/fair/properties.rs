//! Properties that hold for all answers, true or not, at any time.

use std::time::Duration;

use http::StatusCode;
use proptest::prelude::*;

use super::estimate::{FIRST_GUESS, FIRST_LOOK, GROWTH, REFUSED};
use super::*;
use crate::signal::{ObservedQuota, Signal};

/// An answer: what it states, the time since the answer before, and its transit time.
#[derive(Clone, Debug)]
struct Answer {
    after: Duration,
    trip: Duration,
    refused: bool,
    remaining: Option<u64>,
    limit: Option<u64>,
    window: Option<Duration>,
    reset: Option<Duration>,
    retry_after: Option<Duration>,
}

impl Answer {
    /// An answer that states nothing, `after` milliseconds after the one before. The round trip takes `trip` milliseconds.
    fn quiet(after: u64, trip: u64) -> Self {
        Answer {
            after: Duration::from_millis(after),
            trip: Duration::from_millis(trip),
            refused: false,
            remaining: None,
            limit: None,
            window: None,
            reset: None,
            retry_after: None,
        }
    }

    fn signal(&self) -> Signal {
        let mut quota = ObservedQuota::new();
        quota = self
            .remaining
            .map_or(quota.clone(), |remaining| quota.with_remaining(remaining));
        quota = self
            .limit
            .map_or(quota.clone(), |limit| quota.with_limit(limit));
        quota = self
            .window
            .map_or(quota.clone(), |window| quota.with_window(window));
        quota = self
            .reset
            .map_or(quota.clone(), |reset| quota.with_reset_after(reset));
        let refused = self.refused.then_some(StatusCode::TOO_MANY_REQUESTS);
        Signal::default()
            .with_quota(quota)
            .with_refusal(refused)
            .with_retry_after(self.retry_after)
    }
}

/// Numbers, both small and huge.
fn count() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..20, 0_u64..5000, any::<u64>()]
}

fn span() -> impl Strategy<Value = Duration> {
    let millis = prop_oneof![0_u64..50, 0_u64..5000, 0_u64..10_000_000, any::<u64>()];
    millis.prop_map(|millis| Duration::from_millis(millis % 40_000_000_000))
}

fn answer() -> impl Strategy<Value = Answer> {
    let said = (
        proptest::option::of(count()),
        proptest::option::of(count()),
        proptest::option::weighted(0.2, span()),
        proptest::option::of(span()),
        proptest::option::weighted(0.2, span()),
    );
    let time = (0_u64..20_000).prop_map(Duration::from_millis);
    let trip = (0_u64..5000).prop_map(Duration::from_millis);
    (time, trip, any::<bool>(), said).prop_map(|(after, trip, refused, said)| {
        let (remaining, limit, window, reset, retry_after) = said;
        Answer {
            after,
            trip,
            refused,
            remaining,
            limit,
            window,
            reset,
            retry_after,
        }
    })
}

/// A number that a faulty process may have written.
fn wild() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f64>(),
        -10.0..10.0_f64,
        Just(0.0),
        Just(f64::MAX),
        Just(f64::NAN),
        -1e6..1e6_f64
    ]
}

fn pace() -> impl Strategy<Value = Fair> {
    let hint = proptest::option::of((1_u32..10_000, 1_u64..1_000_000_000));
    (hint, any::<bool>()).prop_map(|(hint, is_sole_client)| {
        let pace = match hint {
            Some((limit, millis)) => Fair::new().limit(limit, Duration::from_millis(millis)),
            None => Fair::new(),
        };
        match is_sole_client {
            true => pace.sole_client(),
            false => pace,
        }
    })
}

/// Passes the answers to `pace` one after another. `each` sees the pace before and after, and the
/// pause.
fn replay(
    mut pace: Fair,
    answers: &[Answer],
    mut each: impl FnMut(&Fair, &Fair, &Answer, Option<Pause>) -> Result<(), TestCaseError>,
) -> Result<Fair, TestCaseError> {
    let (mut now, mut dice, mut call) =
        (crate::clock::now(), Dice::seeded(1), CallState::default());
    pace.arrived(&mut call, &Traffic::at(now), &mut dice);
    for answer in answers {
        now += answer.after;
        let before = pace.clone();
        pace.sent(&Traffic {
            last_sent: before.last_sent,
            ..Traffic::at(now)
        });
        let sent = now;
        now += answer.trip;
        let traffic = Traffic {
            waiting: 1,
            last_sent: Some(sent),
            ..Traffic::at(now)
        };
        let signal = answer.signal();
        let mut reply = Reply::new(&signal, sent, &mut call);
        let pause = if answer.refused {
            Some(pace.refused(&mut reply, &traffic, &mut dice))
        } else {
            pace.passed(&mut reply, &traffic, &mut dice);
            None
        };
        each(&before, &pace, answer, pause)?;
    }
    Ok(pace)
}

#[test]
fn late_response_can_only_lower_the_level() {
    let mut pace = Fair::new().limit(100, Duration::from_secs(100));
    let (start, mut dice, mut call) = (crate::clock::now(), Dice::seeded(1), CallState::default());
    let mut tell = |remaining: u64, at: u64| {
        let signal = Signal::default().with_quota(ObservedQuota::new().with_remaining(remaining));
        let traffic = Traffic::at(start + Duration::from_millis(at));
        pace.passed(
            &mut Reply::new(&signal, start, &mut call),
            &traffic,
            &mut dice,
        );
        (pace.level, pace.last_answer)
    };
    let last = Some(start + Duration::from_millis(500));
    assert_eq!(tell(50, 500), (Some(50.0), last));
    assert_eq!(tell(70, 400), (Some(50.0), last));
    assert_eq!(tell(30, 450), (Some(30.0), last));
    assert_eq!(tell(40, 600).0, Some(40.0));
}

/// A reset of a day, such as that of a lockout, and then minutes of 100 requests, of which ten are used in each.
#[test]
fn one_far_reset_is_forgotten() {
    let states = |remaining, reset| Answer {
        remaining: Some(remaining),
        limit: Some(100),
        reset: Some(Duration::from_secs(reset)),
        ..Answer::quiet(5900, 100)
    };
    let mut answers = vec![states(99, 86_400); 5];
    for request in 0..100 {
        let place = request % 10;
        answers.push(states(99 - place, 60 - 6 * place));
    }
    let pace = replay(Fair::new(), &answers, |_, _, _, _| Ok(())).unwrap();
    let token_time = pace.scale.token_time;
    assert!(token_time < 5.0, "{token_time}");
}

/// A server states the scarcest of its quotas. What one quota leaves out is not taken from another one.
#[test]
fn quotas_of_one_server_are_not_mixed() {
    let states = |limit, window: Option<u64>, remaining| Answer {
        limit,
        window: window.map(Duration::from_secs),
        remaining: Some(remaining),
        ..Answer::quiet(1000, 100)
    };
    let after = |answers: &[Answer]| replay(Fair::new(), answers, |_, _, _, _| Ok(())).unwrap();
    let day = states(Some(100_000), Some(86_400), 98_000);
    let burst = states(Some(2000), None, 1000);
    for answers in [
        vec![day.clone(), burst.clone()],
        vec![burst.clone(), day.clone(), burst],
    ] {
        let scale = after(&answers).scale;
        assert_eq!(scale.limit(), 2000.0);
        assert!(scale.token_time < 1.0, "{}", scale.token_time);
    }
    let scale = after(&[states(Some(20), Some(10), 15), states(None, Some(60), 0)]).scale;
    assert_eq!((scale.limit(), scale.is_short()), (f64::INFINITY, false));
    // What is stated of one quota at different times belongs together.
    let scale = after(&[
        day.clone(),
        states(None, None, 90_000),
        states(Some(100_000), None, 90_000),
    ])
    .scale;
    assert_eq!(scale.token_time, 0.864);
}

/// Headers on refusals alone state what is left at that moment, which says nothing of what follows.
#[test]
fn search_goes_on_if_only_refusals_state_what_is_left() {
    let refusal = Answer {
        refused: true,
        remaining: Some(0),
        limit: Some(50),
        ..Answer::quiet(20, 5)
    };
    let mut answers = vec![Answer::quiet(20, 5); 20];
    answers[3] = refusal.clone();
    answers[15] = refusal;
    let pace = replay(Fair::new().sole_client(), &answers, |_, _, _, _| Ok(())).unwrap();
    assert!(pace.is_searching(), "{pace:?}");
}

#[test]
fn search_ends_when_a_window_no_longer_slides() {
    let stated = |left| Answer {
        remaining: Some(left),
        limit: Some(10),
        window: Some(Duration::from_secs(1)),
        ..Answer::quiet(90, 10)
    };
    let sliding = (0..20).map(|look| stated(4 + look % 2));
    let fixed = (0..80).map(|look| stated(9 - look % 10));
    let pace = Fair::new().sole_client();
    let sliding: Vec<_> = sliding.collect();
    let slides = replay(pace.clone(), &sliding, |_, _, _, _| Ok(())).unwrap();
    assert!(slides.is_searching(), "{slides:?}");
    let both: Vec<_> = sliding.into_iter().chain(fixed).collect();
    let fixed = replay(pace, &both, |_, _, _, _| Ok(())).unwrap();
    assert!(!fixed.is_searching(), "{fixed:?}");
}

#[test]
fn refusal_in_a_search_starts_the_count_of_passed_requests_anew() {
    let mut answers = vec![Answer::quiet(20, 5); 10];
    answers[8].refused = true;
    let pace = replay(Fair::new().sole_client(), &answers, |_, _, _, _| Ok(())).unwrap();
    assert!(pace.is_searching());
    assert_eq!((pace.passed_since_refusal, pace.has_met_limit), (1, true));
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn every_number_stays_in_its_bounds(pace in pace(), answers in prop::collection::vec(answer(), 1..40)) {
        replay(pace, &answers, |_, pace, _, _| {
            let most = (LONGEST / pace.scale.token_time).max(1.0);
            prop_assert!((1.0..=most * (1.0 + 1e-9)).contains(&pace.estimate.n), "n {} of {most}", pace.estimate.n);
            prop_assert!((0.0..=most * (1.0 + 1e-9)).contains(&pace.estimate.m), "m {}", pace.estimate.m);
            prop_assert!((1.0..1e9).contains(&pace.estimate.drain), "drain {}", pace.estimate.drain);
            prop_assert!(pace.scale.token_time > 0.0 && pace.scale.token_time <= LONGEST);
            for in_flight in [0, 1, 1000] {
                prop_assert!((0.0..=LONGEST).contains(&pace.pace(in_flight)));
            }
            let now = pace.last_answer.unwrap();
            let traffic = Traffic { last_sent: Some(now), waiting: 1, ..Traffic::at(now) };
            prop_assert!(pace.slot(&traffic).unwrap() <= now + Duration::from_secs(900));
            Ok(())
        })?;
    }

    #[test]
    fn shared_notes_are_read_within_bounds(
        pace in pace(),
        before in prop::collection::vec(answer(), 0..20),
        spoilt in prop::collection::vec((any::<prop::sample::Index>(), wild()), 1..20),
        processes in 1..100_000_u32,
        after in prop::collection::vec(answer(), 1..20),
    ) {
        let mut pace = replay(pace, &before, |_, _, _, _| Ok(()))?;
        let now = crate::clock::now();
        let mut written = StateCodec::write(now, |codec| assert!(pace.share(codec)));
        for (index, number) in spoilt {
            let at = 8 * index.index(written.len() / 8);
            written[at..at + 8].copy_from_slice(&f64::to_le_bytes(number));
        }
        StateCodec::read(&written, now, |codec| assert!(pace.share(codec)));
        for divided in [false, true] {
            let mut pace = pace.clone();
            if divided {
                pace.divide(processes);
            }
            for last_sent in [None, Some(now)] {
                let traffic = Traffic { last_sent, waiting: 1, ..Traffic::at(now) };
                let most = now + Duration::from_secs(900);
                prop_assert!(pace.slot(&traffic).is_none_or(|slot| slot <= most), "{pace:?}");
            }
            replay(pace, &after, |_, pace, _, _| {
                prop_assert!(pace.estimate.n >= 1.0 && pace.estimate.n.is_finite() && pace.estimate.m.is_finite(), "{pace:?}");
                prop_assert!((1.0..1e9).contains(&pace.estimate.drain), "drain {}", pace.estimate.drain);
                prop_assert!((0.0..=LONGEST).contains(&pace.pace(1)), "{pace:?}");
                Ok(())
            })?;
        }
    }

    #[test]
    fn one_response_moves_the_estimate_by_a_bounded_factor(
        pace in pace(),
        answers in prop::collection::vec(answer(), 1..40),
    ) {
        replay(pace, &answers, |before, after, answer, _| {
            // The first answer may show the `n` of the other clients.
            if before.last_answer.is_none() && !answer.refused {
                prop_assert!(after.estimate.n <= FIRST_LOOK * GROWTH.exp());
                return Ok(());
            }
            // If Remaining appears for the first time, `n` becomes what `m` or the search has learned.
            let searched = if before.is_searching() { before.search.reached() / before.scale.token_time } else { 0.0 };
            let n = if before.level.is_none() { before.estimate.n.max(before.estimate.m).max(searched) } else { before.estimate.n };
            // A better guess of the token time changes the unit, not the interval. The guess after a refusal
            // is in the new unit.
            let unit = if after.scale.is_guess { before.scale.token_time / after.scale.token_time } else { 1.0 };
            let n = n * unit;
            let most = if answer.refused { (n * REFUSED).max(FIRST_GUESS) } else { n * GROWTH.exp() };
            prop_assert!(after.estimate.n <= most.max(1.0) * (1.0 + 1e-9), "{} -> {}", before.estimate.n, after.estimate.n);
            Ok(())
        })?;
    }

    #[test]
    fn refusal_pause_stays_between_its_bounds(
        pace in pace(),
        answers in prop::collection::vec(answer(), 1..40),
    ) {
        replay(pace, &answers, |_, after, answer, pause| {
            let Some(pause) = pause else { return Ok(()) };
            prop_assert_eq!(pause.call, Duration::ZERO);
            let stated = wait_said(&answer.signal());
            if let Some(least) = stated
                // A wait of zero is a part of a second that was rounded down: the pause is the pace's own.
                && !least.is_zero()
                && after.scale.is_guess
            {
                prop_assert!(pause.all >= least && pause.all <= least.mul_f64(1.1 + 1e-9), "{pause:?}");
                return Ok(());
            }
            if after.is_searching() {
                let least = stated.unwrap_or_default();
                // The numbers are floats.
                prop_assert!(pause.all >= least && pause.all <= least + Duration::from_millis(900_001), "{pause:?}");
                return Ok(());
            }
            let most = after.scale.token_time * (PAUSE * after.estimate.n).max(after.estimate.m);
            // The pause grows while the server is out.
            let in_row = after.refused_in_row.saturating_sub(OUTAGE);
            let most = match after.level {
                Some(_) => most,
                None => (most * LONGER_OUTAGE.powf(f64::from(in_row))).min(most.max(LONGEST_PAUSE)),
            };
            let most = most.min(LONGEST);
            let said = stated.map(|said| said.as_secs_f64());
            let told = QuotaNumbers::of(&answer.signal());
            let least = said.or_else(|| after.scale.empty_until_reset(&told, after.last_answer?));
            let pause = pause.all.as_secs_f64();
            let bounds = least.map_or(most / 2.0..=most, |least| least..=least + most);
            prop_assert!(pause >= bounds.start() - 1e-6 && pause <= bounds.end() + 1e-6, "{pause} in {bounds:?}");
            Ok(())
        })?;
    }

    #[test]
    fn requests_above_the_others_use_are_not_delayed(
        limit in 1_u32..10_000,
        n in 1.0_f64..1000.0,
        drain in 1.0_f64..500.0,
        in_flight in 0_usize..100,
        more in 0.001_f64..100.0,
        is_below in any::<bool>(),
    ) {
        let mut pace = Fair::new().limit(limit, Duration::from_secs(3600));
        (pace.estimate.n, pace.estimate.drain) = (n, drain);
        let enough = pace.scale.set_point() + (n / SHORTAGE + in_flight as f64).max(drain);
        pace.level = Some(enough + more);
        prop_assert_eq!(pace.pace(in_flight), 0.0);
        // Below that, a request is delayed, unless the drain matters more.
        pace.level = Some(pace.scale.set_point() + n / SHORTAGE + in_flight as f64 - more);
        pace.scale.is_below = is_below;
        prop_assert!(pace.pace(in_flight) > 0.0);
    }

    #[test]
    fn requests_without_headers_and_refusals_are_never_delayed(
        pace in pace(),
        steps in prop::collection::vec((0_u64..20_000, 0_u64..5000), 1..60),
    ) {
        let quiet = |(after, trip)| Answer::quiet(after, trip);
        let answers: Vec<Answer> = steps.into_iter().map(quiet).collect();
        replay(pace, &answers, |_, pace, _, _| {
            prop_assert_eq!(pace.pace(0), 0.0);
            Ok(())
        })?;
    }

    #[test]
    fn one_response_per_round_trip_raises_the_estimate(
        answers in prop::collection::vec((any::<bool>(), 0_u64..30), 1..30),
        n in 1.0_f64..100.0,
        m in 0.0_f64..10.0,
    ) {
        let mut pace = Fair::new().limit(100, Duration::from_secs(100));
        let (sent, mut dice, mut call) = (crate::clock::now(), Dice::seeded(1), CallState::default());
        pace.arrived(&mut call, &Traffic::at(sent), &mut dice);
        (pace.estimate.n, pace.estimate.m, pace.level, pace.last_answer) = (n, m, Some(5.0), Some(sent));
        let mut steps = 0;
        for (index, (refused, left)) in answers.into_iter().enumerate() {
            let now = sent + Duration::from_millis(100 + index as u64);
            let traffic = Traffic { waiting: 1, last_sent: Some(sent), ..Traffic::at(now) };
            let before = (pace.estimate.n, pace.estimate.m);
            // The value changes each time, or it would be ignored as constant.
            let quota = ObservedQuota::new().with_remaining(2 * left + index as u64 % 2);
            let limited = refused.then_some(StatusCode::TOO_MANY_REQUESTS);
            let signal = Signal::default().with_quota(quota).with_refusal(limited);
            let mut reply = Reply::new(&signal, sent, &mut call);
            if refused {
                pace.refused(&mut reply, &traffic, &mut dice);
            } else {
                pace.passed(&mut reply, &traffic, &mut dice);
            }
            steps += usize::from(pace.estimate.n > before.0 || pace.estimate.m > before.1);
        }
        prop_assert!(steps <= 1, "{steps} steps");
    }

    #[test]
    fn refusals_bring_no_request_forward(pace in pace(), answers in prop::collection::vec(answer(), 1..40)) {
        let mut now = crate::clock::now();
        replay(pace, &answers, |before, after, answer, pause| {
            now = after.last_answer.unwrap();
            let Some(pause) = pause else { return Ok(()) };
            let sent = now - answer.trip;
            let traffic = Traffic { last_sent: Some(sent), ..Traffic::at(now) };
            let mut before = before.clone();
            before.sent(&traffic);
            // A search waits for the answer of a request in an outage. That is no slot.
            let in_flight = usize::from(!after.is_searching());
            let slot = before.slot(&Traffic { in_flight, ..traffic });
            let after = after.slot(&traffic).max(Some(now + pause.all));
            prop_assert!(after >= slot, "{after:?} and not {slot:?}");
            Ok(())
        })?;
    }

    #[test]
    fn implausible_remaining_counts_as_missing(
        answers in prop::collection::vec(answer(), 1..40),
        limit in 1_u32..10_000,
        over in 2_u64..1000,
    ) {
        let pace = Fair::new().limit(limit, Duration::from_secs(3600));
        let said = |remaining: fn(u64, u64) -> Option<u64>| {
            let most = u64::from(limit) + u64::from(limit) / 100;
            let lies = answers.iter().enumerate().map(|(index, answer)| Answer {
                limit: None,
                remaining: if index % 2 == 0 { remaining(most, over) } else { answer.remaining.map(|left| left % most) },
                ..answer.clone()
            });
            lies.collect::<Vec<_>>()
        };
        // More than is refilled between any two answers.
        let lied = replay(pace.clone(), &said(|most, over| Some((most + over) << 32)), |_, _, _, _| Ok(()))?;
        let silent = replay(pace, &said(|_, _| None), |_, _, _, _| Ok(()))?;
        prop_assert_eq!((lied.estimate.n, lied.estimate.m, lied.estimate.drain, lied.level), (silent.estimate.n, silent.estimate.m, silent.estimate.drain, silent.level));
        prop_assert_eq!(lied.interval(3), silent.interval(3));
    }

    #[test]
    fn one_refusal_per_round_trip_counts(count in 1_usize..20, left in 0_u64..3) {
        let mut pace = Fair::new().limit(100, Duration::from_secs(100));
        let (sent, mut dice, mut call) = (crate::clock::now(), Dice::seeded(1), CallState::default());
        pace.arrived(&mut call, &Traffic::at(sent), &mut dice);
        pace.estimate.n = 7.0;
        let signal = Signal::default()
            .with_refusal(StatusCode::TOO_MANY_REQUESTS)
            .with_quota(ObservedQuota::new().with_remaining(left));
        for index in 0..count {
            let now = sent + Duration::from_millis(100 + index as u64);
            let traffic = Traffic { waiting: 1, last_sent: Some(sent), ..Traffic::at(now) };
            pace.refused(&mut Reply::new(&signal, sent, &mut call), &traffic, &mut dice);
        }
        prop_assert!((pace.estimate.n - 14.0).abs() < 0.1, "{}", pace.estimate.n);
    }
}
