//! Property tests of the state of a key, under any order of callers, effects and time. Each wait
//! ends, in order, because its task is woken. No limit is exceeded, and no booked permit is lost.

mod request;
mod wire;
mod world;

use proptest::prelude::*;

use super::charges::{DELAY, RETRY};
use super::{Effect, HoldSource, KeyHold, KeyState};
use crate::clock;
use crate::key::Key;
use crate::quota::Quota;
use crate::store::{HoldState, Register};
use request::{Pending, Stage};
use world::{LONGEST, World, ms};

#[derive(Clone, Debug)]
enum Step {
    /// A request arrives that can wait for `wait` milliseconds, by a deadline or by a bound of the
    /// limiter.
    Enter {
        cost: u32,
        wait: u64,
        by_deadline: bool,
    },
    /// A request is polled, whether it was woken or not.
    Poll(usize),
    Leave(usize),
    /// A request uses its permit, or waits again because the permit has expired.
    Use(usize),
    GiveBack(usize),
    /// An effect is run, if it is due.
    Effect(usize),
    /// An effect is dropped with its runtime.
    EffectLost(usize),
    /// The key is put on hold for this many milliseconds. The flag states whether the hold was cut.
    Hold(u64, bool),
    Release,
    /// A message may have been missed.
    Doubt,
    /// The store becomes unreachable (`true`) or reachable again.
    Away(bool),
    /// This number of milliseconds passes.
    Passes(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0usize..64;
    let wait = prop_oneof![1 => Just(0u64), 1 => 1u64..2000, 4 => Just(LONGEST)];
    let span = prop_oneof![6 => 0u64..5, 3 => 5u64..60, 1 => 60u64..1500];
    prop_oneof![
        10 => (prop_oneof![4 => Just(1u32), 1 => 2u32..4], wait, prop::bool::weighted(0.3))
            .prop_map(|(cost, wait, by_deadline)| Step::Enter { cost, wait, by_deadline }),
        12 => which().prop_map(Step::Poll),
        3 => which().prop_map(Step::Leave),
        6 => which().prop_map(Step::Use),
        2 => which().prop_map(Step::GiveBack),
        12 => which().prop_map(Step::Effect),
        1 => which().prop_map(Step::EffectLost),
        1 => (1u64..3000, prop::bool::weighted(0.3)).prop_map(|(span, cut)| Step::Hold(span, cut)),
        1 => Just(Step::Release),
        1 => Just(Step::Doubt),
        1 => any::<bool>().prop_map(Step::Away),
        6 => span.prop_map(Step::Passes),
    ]
}

/// Runs the steps. Then the remaining requests go on, or leave if `quits`.
async fn run(count: u32, later: bool, faults: bool, quits: bool, steps: &[Step]) {
    let mut world = World::new(Quota::per_second(count), later, faults);
    // Half of the runs with faults fail open.
    world.fails_open = faults && count.is_multiple_of(2);
    for step in steps {
        world.step(step).await;
    }
    if quits {
        for index in 0..world.requests.len() {
            world.leave(index);
            world.give_back(index);
        }
    }
    let held = world.state.hold.left(clock::now()).unwrap_or_default();
    let left = world
        .requests
        .iter()
        .filter(|request| !matches!(request.stage, Stage::Ended));
    let units: u32 = left.map(|request| request.place.cost).sum();
    let took = world.run_until_idle().await;
    assert_eq!(world.state.waiting(), 0);
    assert!(world.state.queue.is_none(), "an empty queue is dropped");
    let most = world.most_used(ms(1000));
    assert!(
        most <= count,
        "{most} units within a second; at most {count} are allowed"
    );
    if !world.answer_lost {
        // A cost of 3 may leave 2 units of a window.
        let windows = units / (count - 2) + 2;
        assert!(
            took <= held + ms(1050) * windows + ms(1000),
            "{took:?} for {units} units, held for {held:?}"
        );
        world.assert_nothing_is_lost();
    }
}

/// All waiters leave during the batching delay of the next call, which would have returned their
/// permits.
#[tokio::test(start_paused = true)]
async fn permits_of_waiters_that_leave_early_go_back() {
    let mut world = World::new(Quota::per_second(5), true, false);
    for _ in 0..5 {
        world.enter(1, LONGEST, false);
    }
    world.run_until_idle().await;
    world.enter(1, LONGEST, false);
    while let Some(index) = world
        .pending
        .iter()
        .position(|effect| effect.due() <= clock::now())
    {
        world.run(index);
    }
    let booked = world
        .state
        .queue
        .as_ref()
        .and_then(|queue| queue.last_booked());
    assert!(booked.is_some(), "it has a slot");
    world.enter(1, LONGEST, false);
    for index in [5, 6] {
        world.leave(index);
    }
    world.run_until_idle().await;
    world.assert_nothing_is_lost();
}

/// The last waiter has its permit when the key is put on hold for longer than it can wait.
#[tokio::test(start_paused = true)]
async fn permits_of_waiters_held_too_long_go_back() {
    let mut world = World::new(Quota::per_second(5), false, false);
    for _ in 0..5 {
        world.enter(1, LONGEST, false);
    }
    world.run_until_idle().await;
    world.enter(1, 2000, false);
    // Another request hands the permit out, and the key is held before the waiter is polled.
    tokio::time::advance(ms(1025)).await;
    world.act(|state, ctx, _| state.step(ctx, None));
    assert_eq!(world.state.waiting(), 0, "the permit was handed out");
    world.hold(HoldState {
        remaining: ms(5000),
        ..HoldState::default()
    });
    world.poll(5);
    assert!(
        matches!(world.requests[5].stage, Stage::Ended),
        "it is refused"
    );
    world.assert_nothing_is_lost();
}

/// Short spans pass while a call is under way. Together they outlast the validity of a permit, so
/// the answer arrives too late.
#[tokio::test(start_paused = true)]
async fn answers_that_come_too_late_go_back() {
    let enter = |wait| Step::Enter {
        cost: 1,
        wait,
        by_deadline: false,
    };
    let steps = [
        Step::Hold(6, false),
        enter(6),
        enter(6),
        enter(6),
        Step::Release,
        Step::Passes(20),
        Step::Poll(28),
        Step::Poll(3),
        Step::Effect(0),
        enter(0),
        Step::Passes(15),
        Step::Passes(1),
        enter(0),
        Step::Passes(16),
        enter(0),
        Step::Poll(56),
        Step::Passes(18),
        enter(0),
    ];
    run(5, true, false, true, &steps).await;
}

/// A permit that is given back is taken for the probe's. The probe is accepted, and the others
/// leave then, not 5 s later.
#[tokio::test(start_paused = true)]
async fn a_probe_that_passes_ends_the_probation() {
    let enter = |cost, wait| Step::Enter {
        cost,
        wait,
        by_deadline: false,
    };
    let steps = [
        enter(1, 60_000),
        enter(1, 0),
        enter(1, 0),
        Step::Poll(0),
        enter(1, 60_000),
        enter(1, 60_000),
        enter(1, 60_000),
        Step::Release,
        enter(1, 0),
        Step::Leave(51),
        Step::Effect(0),
        Step::Effect(0),
        Step::Effect(0),
        Step::Hold(1, true),
        Step::Passes(10),
        enter(1, 0),
        Step::Effect(0),
        Step::Effect(0),
        Step::Poll(23),
        enter(1, 0),
        Step::GiveBack(43),
        enter(1, 60_000),
        enter(1, 60_000),
        Step::Leave(17),
        enter(3, 60_000),
    ];
    run(8, true, false, false, &steps).await;
}

proptest! {
    #![proptest_config(histories::config(125))]

    #[test]
    fn waits_end_in_order_and_no_permit_is_lost(
        count in prop_oneof![3 => 5u32..12, 1 => 100u32..300],
        (later, faults, quits) in any::<(bool, bool, bool)>(),
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run(count, later, faults, quits, &steps));
    }
}

/// Three waiters are polled a second after they were given their permits. Then others are due, too, and may leave first.
#[tokio::test(start_paused = true)]
async fn waiters_that_come_late_may_be_overtaken() {
    let enter = |cost, wait| Step::Enter {
        cost,
        wait,
        by_deadline: false,
    };
    let steps = [
        enter(3, 0),
        Step::Use(0),
        enter(3, 0),
        enter(1, 1020),
        enter(1, 1020),
        enter(1, 60_000),
        Step::GiveBack(36),
        enter(1, 60_000),
        enter(1, 60_000),
        Step::Poll(16),
        enter(1, 0),
        enter(1, 1327),
        enter(2, 60_000),
        enter(1, 1327),
        enter(1, 60_000),
        Step::Hold(1, false),
        Step::Passes(1020),
    ];
    run(6, false, false, false, &steps).await;
}

/// The permit of the probe expires before its waiter wakes. The next call to the store does not
/// wait for a probe that never left.
#[tokio::test(start_paused = true)]
async fn an_expired_probe_delays_no_call() {
    let enter = |cost, wait| Step::Enter {
        cost,
        wait,
        by_deadline: false,
    };
    let steps = [
        enter(1, 0),
        enter(1, 0),
        Step::Poll(0),
        Step::Poll(0),
        Step::Hold(1, true),
        Step::Poll(0),
        Step::Passes(1),
        enter(1, 0),
        enter(1, 0),
        enter(1, 60000),
        enter(1, 60000),
        enter(1, 0),
        enter(1, 60000),
        enter(1, 60000),
        Step::Poll(0),
        enter(1, 0),
        Step::Poll(0),
        enter(1, 0),
        enter(1, 60000),
        Step::Leave(13),
        Step::Leave(45),
        enter(1, 60000),
        enter(1, 60000),
        enter(3, 60000),
        Step::Leave(47),
        Step::Use(0),
        Step::Effect(0),
        Step::Passes(9),
    ];
    run(9, true, false, false, &steps).await;
}

/// A call was put off until the probe is accepted, for at most 5 s. A new hold that is not cut ends
/// the probation, so the call is sent when this hold ends.
#[tokio::test(start_paused = true)]
async fn a_short_hold_ends_the_wait_for_a_probe() {
    let enter = |wait| Step::Enter {
        cost: 1,
        wait,
        by_deadline: false,
    };
    let steps = [
        Step::Hold(1, true),
        Step::Passes(1),
        enter(0),
        enter(0),
        Step::Effect(0),
        Step::Poll(0),
        enter(60_000),
        Step::Passes(1),
        Step::GiveBack(0),
        Step::Hold(1, false),
    ];
    run(100, true, false, false, &steps).await;
}

/// A request asks whether the hold was released, and finds no room in the queue.
#[tokio::test(start_paused = true)]
async fn requests_without_room_ask_for_a_release() {
    let mut world = World::new(Quota::per_second(5), true, false);
    world.hold(HoldState::new(ms(5000), 0));
    for _ in 0..30 {
        world.enter(1, LONGEST, false);
    }
    world.state.doubt();
    world.enter(1, 0, false);
    let mut pending = world.pending.iter();
    assert!(pending.any(|pending| matches!(pending, Pending::Call(..))));
}

#[tokio::test(start_paused = true)]
async fn effects_that_call_no_store_begin_no_call() {
    let mut world = World::new(Quota::per_second(5), true, false);
    world.act(|_, ctx, _| {
        ctx.work.effects.push(Effect::LimitInFlight(None));
        assert!(!ctx.work.has_begun_call());
    });
}

/// Returns what a process has written, `age` ago, that was told to wait for an hour. It is on hold for the first minute.
fn written_ban(age: u64) -> Register {
    let (mut theirs, now, max_hold) = (KeyHold::default(), clock::now(), ms(60_000));
    let new = theirs.refused_upstream(Some(ms(3_600_000)), max_hold, now, now);
    theirs.adopt(new.unwrap().held, HoldSource::Seen, now);
    let call = theirs.fleet_call(Key::ALL, false, max_hold, now).unwrap();
    Register {
        version: 7,
        value: call.request.value.unwrap(),
        age: ms(age),
        ..Register::default()
    }
}

/// This process asks for its turn, and reads in the answer that the key is on hold.
#[tokio::test(start_paused = true)]
async fn answers_about_turns_bring_holds() {
    let mut world = World::new(Quota::per_second(5), false, false);
    for _ in 0..6 {
        world.enter(1, 2000, false);
    }
    assert_eq!(world.state.waiting(), 1);
    world.act(|state, ctx, _| state.fleet_answered(ctx, Some(&written_ban(0)), Some(1)));
    assert_eq!(world.state.waiting(), 0, "it cannot wait for a minute");
}

/// The hold of a ban that this process learns of is over, and one request of the fleet leaves first.
#[tokio::test(start_paused = true)]
async fn bans_leave_no_permits_at_hand() {
    let mut world = World::new(Quota::per_second(300), true, false);
    for _ in 0..20 {
        world.enter(1, LONGEST, false);
        world.run_until_idle().await;
    }
    assert!(world.state.at_hand(clock::now()) > 0);
    world.act(|state, ctx, _| state.learn_fleet(ctx, &written_ban(61_000)));
    assert_eq!(world.state.at_hand(clock::now()), 0);
}

/// Units that were used without a permit wait for a call that carries them, and for a longer one if it fails.
#[tokio::test(start_paused = true)]
async fn charges_get_a_call_of_their_own_once() {
    let mut world = World::new(Quota::per_second(5), true, true);
    let now = clock::now();
    world.enter(1, LONGEST, false);
    world.run_until_idle().await;
    assert_eq!(world.state.passes_on_at(), None);
    for after in [0, 50] {
        let sent_at = now + ms(after);
        world.act(|state, ctx, _| state.charge(ctx, 1, sent_at, None));
        assert_eq!(world.state.passes_on_at(), Some(now + DELAY));
        tokio::time::advance(ms(50)).await;
    }
    world.act(|state, ctx, _| state.on_time(ctx));
    assert_eq!(world.state.passes_on_at(), None);
    let is_call = |pending: &Pending| matches!(pending, Pending::Call(..));
    let call = world.pending.iter().position(is_call).unwrap();
    world.lose(call);
    assert_eq!(world.state.passes_on_at(), Some(clock::now() + RETRY));
}

/// A limiter keeps the state of each of many keys.
#[test]
fn states_of_keys_are_small() {
    assert!(
        size_of::<KeyState>() <= 96,
        "{} bytes",
        size_of::<KeyState>()
    );
}
