//! Why a request of a throttle would wait now: situations with their exact text, and random histories.

use crate::support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use http::StatusCode;
use proptest::prelude::*;
use support::{Upstream, get, ms, now, pass, settle, value};
use tollgate::__lab::{Dice, Pace, Pause, Reply, Traffic};
use tollgate::limiter::{Because, Verdict};
use tollgate::store::MemoryStore;
use tollgate::{
    AdaptiveThrottleBuilder, AdaptiveThrottleLayer, Guard, Key, Quota, Reason, Signal, Throttle,
};
use tower::{Layer, ServiceExt};

/// One request per this many milliseconds, whatever happens.
#[derive(Debug)]
struct Every(u64);

impl Pace for Every {
    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        Some(traffic.last_sent? + ms(self.0))
    }

    fn refused(&mut self, _: &mut Reply<'_>, _: &Traffic, _: &mut Dice) -> Pause {
        Pause::of_all(ms(self.0))
    }
}

fn every(millis: u64) -> AdaptiveThrottleBuilder {
    AdaptiveThrottleLayer::builder()
        .name("search")
        .pace(move || Every(millis))
}

fn throttle(builder: AdaptiveThrottleBuilder) -> Throttle {
    builder.build().unwrap().throttle()
}

/// Sends a request that is accepted.
async fn accepted(throttle: &Throttle) {
    let permit = throttle.acquire(Key::ALL).await.unwrap();
    permit.answered(&Signal::default());
}

/// Checks the text about a request of `Key::ALL`.
fn is_told(throttle: &Throttle, expected: &str) {
    let text = throttle.explain(Key::ALL).to_string();
    let mut lines = expected
        .trim()
        .lines()
        .map(|line| line.strip_prefix("        ").unwrap_or(line));
    assert!(text.lines().eq(lines.by_ref()), "the text is\n{text}\n");
}

fn unauthorized() -> Result<http::Response<String>, &'static str> {
    let response = http::Response::builder().status(401);
    Ok(response.body(String::new()).unwrap())
}

/// A key without state has no room, or is held as soon as it has state.
#[tokio::test(start_paused = true)]
async fn a_key_without_state_is_told_what_its_first_request_finds() {
    let throttle = throttle(every(1000).max_keys(1));
    let permit = throttle.acquire(Key::new("in use")).await.unwrap();
    let verdict = throttle.explain(Key::ALL).verdict;
    let reason = Reason::TooManyKeys(1);
    assert!(matches!(verdict, Verdict::Refused { reason: told, .. } if told == reason));
    let happened = throttle.acquire(Key::ALL).await.unwrap_err();
    assert_eq!(happened.reason(), Some(reason));
    drop(permit);

    let guard =
        Guard::new(Quota::new(1, Duration::from_secs(3600))).key(|_| Key::new("our address"));
    let layer = every(1000).max_wait(ms(5000)).guard(guard);
    let layer = layer
        .key(|request| Key::new(request.path()))
        .build()
        .unwrap();
    let service = layer.layer(Upstream::answering((0..3).map(|_| unauthorized())));
    while service.clone().oneshot(get("/a")).await.is_ok() {}
    let explanation = layer.throttle().explain(Key::new("/b"));
    let is_held = |reason: &Reason| *reason == Reason::Held;
    assert!(
        matches!(&explanation.verdict, Verdict::Refused { reason, .. } if is_held(reason)),
        "{explanation}"
    );
    let happened = layer.throttle().acquire(Key::new("/b")).await.unwrap_err();
    assert_eq!(happened.reason(), Some(Reason::Held));
}

#[tokio::test(start_paused = true)]
async fn the_pace_and_the_queue_are_told() {
    let throttle = throttle(every(1000));
    is_told(
        &throttle,
        "
        search, key all: a request now would leave at once
          pace       no delay between requests; the next now
          hold       none
          waiting    0 here
          in flight  0 here
        ",
    );
    accepted(&throttle).await;
    pass(ms(200)).await;
    is_told(&throttle, "
        search, key all: a request now would wait 800ms, because the pace lets the next request leave later
          pace       one request every 1s; the next in 800ms
          hold       none
          waiting    0 here
          in flight  0 here
        ");
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let throttle = throttle.clone();
            tokio::spawn(async move { throttle.acquire(Key::ALL).await.map(drop) })
        })
        .collect();
    settle().await;
    pass(ms(300)).await;
    is_told(
        &throttle,
        "
        search, key all: a request now would wait 3.5s, because 3 requests leave before it
          pace       one request every 1s; the next in 500ms
          hold       none
          waiting    3 here, the first for 300ms
          in flight  0 here
        ",
    );
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn the_first_request_of_a_key_is_told() {
    let throttle = throttle(AdaptiveThrottleLayer::builder().name("search"));
    let first = throttle.acquire(Key::ALL).await.unwrap();
    is_told(&throttle, "
        search, key all: a request now would wait for an unknown time, because a probe tests whether the upstream accepts requests
          pace       no delay between requests; the next in 1s
          hold       none
          waiting    0 here
          in flight  1 here
        ");
    first.answered(&Signal::default());
    assert_eq!(throttle.explain(Key::ALL).verdict, Verdict::Goes);
}

#[tokio::test(start_paused = true)]
async fn holds_of_a_throttle_are_told_with_their_cause() {
    let throttle = throttle(every(100).max_wait(ms(60_000)));
    let permit = throttle.acquire(Key::ALL).await.unwrap();
    let refusal = Signal::default().with_refusal(StatusCode::TOO_MANY_REQUESTS);
    permit.answered(&refusal.with_retry_after(ms(20_000)));
    pass(ms(5000)).await;
    is_told(
        &throttle,
        "
        search, key all: a request now would wait 15s, because the upstream has put its key on hold
          pace       one request every 100ms; the next in 15s
          hold       15s left, since 5s: the upstream refused a request of this process
          waiting    0 here
          in flight  0 here
        ",
    );
    // One that ends earlier changes nothing.
    throttle.hold_for(Key::ALL, ms(1000)).await.unwrap();
    let text = throttle.explain(Key::ALL).to_string();
    let cause = "15s left, since 5s: the upstream refused a request of this process";
    assert!(text.contains(cause), "{text}");
    throttle.hold_for(Key::ALL, ms(90_000)).await.unwrap();
    is_told(&throttle, "
        search, key all: a request now would be refused, because hold_for has put its key on hold; retry in 90s
          pace       one request every 100ms; the next in 90s
          hold       90s left, since 0ms: hold_for of this process
          waiting    0 here
          in flight  0 here
        ");
    throttle.release(Key::ALL).await.unwrap();
    let text = throttle.explain(Key::ALL).to_string();
    assert!(text.contains("hold       none"), "{text}");
    let _ = throttle.drain(Duration::ZERO).await.unwrap();
    let explanation = throttle.explain(Key::ALL);
    let refused = Verdict::Refused {
        reason: Reason::Draining,
        retry_after: None,
        because: None,
    };
    assert_eq!(explanation.verdict, refused);
}

#[tokio::test(start_paused = true)]
async fn the_processes_that_share_a_pace_are_told() {
    let store = Arc::new(MemoryStore::default());
    let [ours, theirs] = [(); 2].map(|()| {
        let builder = AdaptiveThrottleLayer::builder().name("search");
        throttle(builder.store(store.clone()).max_wait(ms(60_000)))
    });
    let call = theirs.acquire(Key::ALL).await.unwrap();
    accepted(&ours).await;
    pass(ms(3000)).await;
    accepted(&ours).await;
    pass(ms(200)).await;
    let text = ours.explain(Key::ALL).to_string();
    assert!(
        text.contains("2 processes,") && text.ends_with(", 1 in flight"),
        "{text}"
    );
    theirs.hold_for(Key::ALL, ms(50_000)).await.unwrap();
    settle().await;
    let held = ours.explain(Key::ALL);
    assert!(
        matches!(
            held.verdict,
            Verdict::Waits {
                wait: Some(_),
                because: Because::Held
            }
        ),
        "{held}"
    );
    assert!(held.to_string().contains("known from the store"), "{held}");
    drop(call);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Pass(u64),
    /// A request that cannot wait is explained, and then arrives.
    Now,
    /// A request is explained, and then waits for its turn.
    Wait,
    /// Requests arrive that wait.
    Enter,
    /// The oldest request in flight is answered.
    Answer {
        refused: bool,
    },
    Hold(u64),
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0_u64..1500).prop_map(Step::Pass),
        3 => Just(Step::Now),
        2 => Just(Step::Wait),
        2 => Just(Step::Enter),
        2 => any::<bool>().prop_map(|refused| Step::Answer { refused }),
        1 => (1_u64..3000).prop_map(Step::Hold),
        1 => Just(Step::Release),
    ]
}

async fn wrong(interval: u64, steps: &[Step]) -> Option<String> {
    let throttle = throttle(every(interval).max_wait(Duration::from_secs(3600)));
    accepted(&throttle).await;
    let (mut in_flight, mut waiting) = (Vec::new(), Vec::new());
    for (number, step) in steps.iter().enumerate() {
        match *step {
            Step::Pass(span) => pass(ms(span)).await,
            Step::Enter => {
                let throttle = throttle.clone();
                waiting.push(tokio::spawn(async move {
                    let permit = throttle.acquire(Key::ALL).await.unwrap();
                    permit.answered(&Signal::default());
                }));
            }
            Step::Answer { refused } if !in_flight.is_empty() => {
                let permit: tollgate::ThrottlePermit = in_flight.remove(0);
                let signal = Signal::default();
                permit.answered(&match refused {
                    true => signal.with_refusal(StatusCode::TOO_MANY_REQUESTS),
                    false => signal,
                });
            }
            Step::Answer { .. } => {}
            Step::Hold(span) => throttle.hold_for(Key::ALL, ms(span)).await.unwrap(),
            Step::Release => throttle.release(Key::ALL).await.unwrap(),
            Step::Now => {
                let explanation = throttle.explain(Key::ALL);
                let left = throttle.acquire(Key::ALL).now_or_never();
                if (explanation.verdict == Verdict::Goes) != left.is_some() {
                    return Some(format!("step {number}: {explanation}\nbut {left:?}"));
                }
                in_flight.extend(left.and_then(Result::ok));
            }
            Step::Wait => {
                let explanation = throttle.explain(Key::ALL);
                let waiting = throttle.waiting(Key::ALL);
                let stated = match explanation.verdict {
                    Verdict::Goes => Duration::ZERO,
                    Verdict::Waits { wait, .. } => wait.unwrap_or_default(),
                    _ => return Some(format!("step {number}: {explanation}")),
                };
                let since = now();
                let permit = throttle.acquire(Key::ALL).await.unwrap();
                let waited = now() - since;
                // Timers have a resolution of a millisecond, for each turn.
                let timers = ms(2 + waiting as u64);
                if stated.abs_diff(waited) > timers {
                    return Some(format!("step {number}: {explanation}\nbut {waited:?}"));
                }
                in_flight.push(permit);
            }
        }
        settle().await;
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        max_shrink_time: 15_000,
        ..histories::config(64)
    })]

    #[test]
    fn requests_take_the_turns_that_explain_says(
        interval in 10_u64..500,
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let runtime = crate::support::paused_runtime();
        let wrong = runtime.block_on(wrong(interval, &steps));
        prop_assert!(wrong.is_none(), "{}", wrong.unwrap_or_default());
    }
}

#[tokio::test(start_paused = true)]
async fn stats_have_the_pace_of_the_only_key() {
    let throttle = throttle(every(250));
    assert_eq!(value(&throttle.stats(), "pace_per_second"), None);
    accepted(&throttle).await;
    let stats = throttle.stats();
    assert_eq!(value(&stats, "pace_per_second"), Some(4.0));
    assert_eq!(value(&stats, "pace_processes"), Some(1.0));
    drop(throttle.acquire(Key::new("two")).await.unwrap());
    assert_eq!(value(&throttle.stats(), "pace_per_second"), None);
}
