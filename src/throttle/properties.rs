//! Properties of the paced queue and of the throttle, for random sequences of events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::StatusCode;
use proptest::prelude::*;

use super::paced_queue::*;
use super::{PaceEntry, Throttle, ThrottleSettings};
use crate::admission::Admission;
use crate::clock;
use crate::key::Key;
use crate::pacing::{Dice, Fair, Pace, Pause, Reply, Traffic};
use crate::signal::{ObservedQuota, Signal};
use crate::stats::Tally;

const MAX_HOLD: Duration = Duration::from_secs(60);

/// The next event.
#[derive(Clone, Debug)]
enum Step {
    Join,
    Pass(u64),
    /// Passes the answer to the `n`-th request in flight: whether it is refused, what is left, and
    /// how long to wait.
    Answer(usize, bool, u64, Option<u64>),
    /// Ends the `n`-th request in flight without an answer.
    Lose(usize),
    /// Removes the `n`-th waiter.
    Leave(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let wait = proptest::option::weighted(0.3, 0_u64..100);
    prop_oneof![
        3 => Just(Step::Join),
        4 => (0_u64..5000).prop_map(Step::Pass),
        4 => (any::<usize>(), any::<bool>(), 0_u64..50, wait).prop_map(|(n, ok, left, wait)| Step::Answer(n, ok, left, wait)),
        1 => any::<usize>().prop_map(Step::Lose),
        1 => any::<usize>().prop_map(Step::Leave),
    ]
}

fn signal(refused: bool, left: u64, wait: Option<u64>) -> Signal {
    Signal::default()
        .with_refusal(refused.then_some(StatusCode::TOO_MANY_REQUESTS))
        .with_retry_after(wait.map(Duration::from_secs))
        .with_quota(ObservedQuota::new().with_remaining(left))
}

/// Runs the steps and checks the queue after each. Returns which request left when, in order.
fn replay(
    pace: Box<dyn Pace>,
    seed: u64,
    steps: &[Step],
) -> Result<Vec<(u64, Duration)>, TestCaseError> {
    let start = clock::now();
    let mut now = start;
    let mut queue = PacedQueue::new(pace, Dice::seeded(seed), MAX_HOLD, now);
    let (mut waiting, mut flying, mut left) = (Vec::new(), Vec::<Flight>::new(), Vec::new());
    let mut is_answered = false;
    let mut probe = None;
    for step in steps {
        let held = queue.held_until();
        // Before the first answer the other requests wait for the probe.
        let slot = queue.slot().filter(|_| is_answered);
        match *step {
            Step::Join => waiting.push(queue.arrived(now)),
            Step::Pass(millis) => now += Duration::from_millis(millis),
            Step::Answer(n, refused, remaining, wait) if !flying.is_empty() => {
                let flight = flying.remove(n % flying.len());
                let number = flight.number;
                let signal = signal(refused, remaining, wait);
                is_answered = true;
                match queue.answered(flight, &signal, now) {
                    Some(again) => {
                        let said = Duration::from_secs(wait.unwrap_or(0)).min(MAX_HOLD);
                        prop_assert!(said.is_zero() || queue.held_until() >= Some(now + said));
                        prop_assert!(queue.slot() >= slot, "a refusal brings no request forward");
                        queue.back(again, now);
                        waiting.push(number);
                        waiting.sort();
                    }
                    None => prop_assert!(!refused),
                }
            }
            Step::Lose(n) if !flying.is_empty() => queue.lost(flying.remove(n % flying.len()), now),
            Step::Leave(n) if !waiting.is_empty() => {
                let number = waiting.remove(n % waiting.len());
                prop_assert!(queue.leave(number));
                prop_assert!(!queue.leave(number));
            }
            _ => {}
        }
        prop_assert!(
            queue.held_until() >= held,
            "a hold never moves to an earlier moment"
        );
        while let Some(flight) = queue.depart(now) {
            prop_assert!(queue.held_until().is_none_or(|until| until <= now));
            prop_assert_eq!(flight.number, waiting.remove(0), "first come, first served");
            if !is_answered {
                let alone =
                    flying.is_empty() || probe.is_some_and(|at| now >= at + Duration::from_secs(1));
                prop_assert!(
                    alone,
                    "before the first answer one probe is out, for a second"
                );
                probe = Some(now);
            }
            left.push((flight.number, now - start));
            flying.push(flight);
        }
        prop_assert_eq!(queue.in_flight(), flying.len());
        prop_assert_eq!(queue.waiting(), waiting.len());
        if let Some(at) = queue.look_at() {
            prop_assert!(at > now, "who may leave has left");
        } else {
            prop_assert!(waiting.is_empty());
        }
    }
    // Every waiter leaves at some time, at the moment that the queue returned.
    for _ in 0..waiting.len() {
        let at = queue.look_at().expect("somebody waits");
        prop_assert!(at <= now + Duration::from_secs(1800));
        now = now.max(at);
        let flight = queue.depart(now).expect("it was the moment to look again");
        prop_assert_eq!(
            queue
                .answered(flight, &signal(false, 10, None), now)
                .is_none(),
            true
        );
    }
    prop_assert_eq!(queue.waiting(), 0);
    Ok(left)
}

proptest! {
    #![proptest_config(histories::config(64))]

    #[test]
    fn queue_is_fifo_and_loses_no_request(steps in prop::collection::vec(step(), 1..80)) {
        replay(Box::new(Fair::new()), 1, &steps)?;
        replay(Box::new(Fair::new().limit(100, Duration::from_secs(60))), 1, &steps)?;
    }

    #[test]
    fn queue_repeats_with_the_same_seed(steps in prop::collection::vec(step(), 1..80), seed in any::<u64>()) {
        let one = replay(Box::new(Fair::new()), seed, &steps)?;
        let other = replay(Box::new(Fair::new()), seed, &steps)?;
        prop_assert_eq!(one, other);
    }
}

/// A pace whose refused requests sleep by themselves, for 0.8 s.
#[derive(Debug)]
struct Sleeps;

impl Pace for Sleeps {
    fn refused(&mut self, _: &mut Reply<'_>, _: &Traffic, _: &mut Dice) -> Pause {
        Pause::of_call(Duration::from_millis(800))
    }

    fn is_careful(&self) -> bool {
        false
    }
}

#[test]
fn sleeping_request_does_not_block_others() {
    let start = clock::now();
    let after = |millis| start + Duration::from_millis(millis);
    let mut queue = PacedQueue::new(Box::new(Sleeps), Dice::seeded(1), MAX_HOLD, start);
    let unlucky = queue.arrived(start);
    let flight = queue.depart(start).unwrap();
    let refused = queue
        .answered(flight, &signal(true, 0, Some(50)), after(100))
        .unwrap();
    queue.back(refused, after(100));
    let other = queue.arrived(after(200));
    assert_eq!(queue.depart(after(200)).unwrap().number, other);
    assert!(queue.depart(after(899)).is_none());
    assert_eq!(queue.depart(after(900)).unwrap().number, unlucky);
}

#[test]
fn max_hold_bounds_the_wait_a_server_requests() {
    let start = clock::now();
    let mut queue = PacedQueue::new(Box::new(Fair::new()), Dice::seeded(1), MAX_HOLD, start);
    queue.arrived(start);
    let flight = queue.depart(start).unwrap();
    let _refused = queue.answered(flight, &signal(true, 0, Some(86_400)), start);
    let held = queue.held_until().unwrap() - start;
    assert!(
        held >= MAX_HOLD && held < MAX_HOLD + Duration::from_secs(10),
        "{held:?}"
    );
}

/// A caller of the throttle, in milliseconds from the start: when it arrives, how long its requests
/// take, and when it is cancelled.
#[derive(Clone, Debug)]
struct Caller {
    comes: u64,
    takes: u64,
    given_up: Option<u64>,
    /// Its answers: whether it is refused, what is left, and how long to wait. The last one
    /// repeats, but is not refused.
    answers: Vec<(bool, u64, Option<u64>)>,
}

fn caller() -> impl Strategy<Value = Caller> {
    let wait = proptest::option::weighted(0.3, 0_u64..20);
    let answers = prop::collection::vec((any::<bool>(), 0_u64..50, wait), 1..4);
    // Often at the same moment, so that some are cancelled between their turn and their next poll.
    let given_up = proptest::option::weighted(0.5, prop_oneof![0_u64..10, 0_u64..100]);
    (
        prop_oneof![0_u64..4, 0_u64..60],
        1_u64..6,
        given_up,
        answers,
    )
        .prop_map(|(comes, takes, given_up, answers)| {
            let given_up = given_up.map(|after| (comes + after) * 300);
            Caller {
                comes: comes * 300,
                takes: takes * 300,
                given_up,
                answers,
            }
        })
}

/// One wait: the caller's rank in the order of arrival, begin and end, and whether the request left
/// or was cancelled.
#[derive(Clone, Debug, PartialEq)]
struct Stay {
    number: u64,
    from: Instant,
    until: Instant,
    left: bool,
}

/// Records a wait, even if its task is dropped.
struct Waiting<'a> {
    stay: Stay,
    stays: &'a Mutex<Vec<Stay>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.stay.until = clock::now();
        self.stays.lock().unwrap().push(self.stay.clone());
    }
}

/// Runs one call from its arrival to its end. It may be dropped at any await.
async fn call(
    throttle: Throttle,
    caller: Caller,
    come: Arc<AtomicU64>,
    stays: Arc<Mutex<Vec<Stay>>>,
) {
    let key = Key::new("law");
    let mut number = come.fetch_add(1, Ordering::Relaxed);
    let waiting = |number| {
        let now = clock::now();
        Waiting {
            stay: Stay {
                number,
                from: now,
                until: now,
                left: false,
            },
            stays: &stays,
        }
    };
    let mut waits = waiting(number);
    let mut permit = match throttle.begin(PaceEntry::new(key), || "law".into()) {
        Admission::Go(permit) => permit,
        Admission::Wait(wait) => wait.permit().await.expect("it can wait for long"),
        Admission::No(limited) => panic!("{limited}"),
    };
    for attempt in 0.. {
        waits.stay.left = true;
        drop(waits);
        clock::sleep_until(clock::now() + Duration::from_millis(caller.takes)).await;
        let (refused, left, wait) = caller.answers[attempt.min(caller.answers.len() - 1)];
        let signal = signal(refused && attempt < caller.answers.len(), left, wait);
        match permit.end(&signal, None, true, clock::now()) {
            Ok(Some(wait)) => {
                if attempt > 0 {
                    // After its second refusal it goes behind the others.
                    number = come.fetch_add(1, Ordering::Relaxed);
                }
                waits = waiting(number);
                permit = wait.permit().await.expect("it can wait for long");
            }
            Ok(None) => return,
            Err(limited) => panic!("{limited}"),
        }
    }
}

/// Runs all callers on one throttle with these dice under a paused clock. Returns all waits.
fn at_the_gate(callers: &[Caller], seed: u64) -> Vec<(u64, Duration, Duration, bool)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.unwrap().block_on(async {
        let throttle = Throttle::new(ThrottleSettings {
            pace: Box::new(|| Box::new(Fair::new().limit(100, Duration::from_secs(60)))),
            dice: Box::new(move || Dice::seeded(seed)),
            max_wait: Duration::from_secs(86_400),
            max_queue: 1000,
            max_keys: 10,
            max_hold: MAX_HOLD,
            store: None,
            guard: None,
            tally: Tally::new("throttle", None),
        })
        .unwrap();
        let (start, come) = (clock::now(), Arc::new(AtomicU64::new(0)));
        let stays = Arc::new(Mutex::new(Vec::new()));
        let at = |millis| clock::sleep_until(start + Duration::from_millis(millis));
        let mut tasks = Vec::new();
        for caller in callers.iter().cloned() {
            let (comes, given_up) = (at(caller.comes), caller.given_up.map(at));
            let call = call(throttle.clone(), caller, come.clone(), stays.clone());
            let task = tokio::spawn(async move {
                comes.await;
                call.await;
            });
            if let Some(given_up) = given_up {
                let task = task.abort_handle();
                tokio::spawn(async move {
                    given_up.await;
                    task.abort();
                });
            }
            tasks.push(task);
        }
        for task in tasks {
            if let Err(failed) = task.await {
                assert!(failed.is_cancelled(), "{failed}");
            }
        }
        let key = Key::new("law");
        assert_eq!(
            (throttle.waiting(key), throttle.in_flight(key)),
            (0, 0),
            "whoever is dropped leaves nothing behind"
        );
        throttle.acquire(key).await.unwrap().give_back();
        let stays = std::mem::take(&mut *stays.lock().unwrap());
        let since = |at: Instant| at.saturating_duration_since(start);
        stays
            .into_iter()
            .map(|stay| (stay.number, since(stay.from), since(stay.until), stay.left))
            .collect()
    })
}

proptest! {
    #![proptest_config(histories::config(32))]

    #[test]
    fn throttle_is_fifo_when_requests_are_cancelled_anywhere(
        callers in prop::collection::vec(caller(), 1..25),
        seed in any::<u64>(),
    ) {
        let stays = at_the_gate(&callers, seed);
        for (number, from, until, left) in &stays {
            prop_assert!(from <= until);
            let earlier = stays.iter().filter(|(other, ..)| other < number);
            for (other, waits, goes, _) in earlier.filter(|_| *left) {
                prop_assert!(!(waits < until && until < goes), "{number} left before {other}, who came first");
            }
        }
        let ended = callers.iter().filter(|caller| caller.given_up.is_none()).count();
        prop_assert!(stays.iter().filter(|(.., left)| *left).count() >= ended);
    }

    #[test]
    fn throttle_repeats_with_the_same_seed(
        callers in prop::collection::vec(caller(), 1..25),
        seed in any::<u64>(),
    ) {
        prop_assert_eq!(at_the_gate(&callers, seed), at_the_gate(&callers, seed));
    }
}
