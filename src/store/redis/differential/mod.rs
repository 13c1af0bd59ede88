//! Compares the rules of `src/limit` with their twins in Lua: the same history gets the same
//! grants, to the microsecond.
//!
//! The scripts run in a real server, at the time that the test states.

mod history;
mod in_flight;
mod joint;
mod late;
mod layout;
mod logical_clock;
mod model;
mod recovery;
mod set_quota;
mod twins;
mod unknown_formats;
mod world;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use redis_server::RedisServer;

use super::codec;
use super::script::{self, RATES};
use crate::key::Key;
use crate::limit::{ChangeKind, Charge, LimitSpec, Micros, UnusedPermits, UpstreamRemaining};
use crate::quota::Quota;
use crate::store::memory::book;
use crate::store::{ClientSession, Demand, Grant, HoldState, Lease, LeaseRequest, Refusal};
use history::{Mix, Step, quota, step};
use world::World;

const START: Micros = 1_700_000_000_000_000;

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// Lines of a script that read the server's clock.
const READS_CLOCK: &str = "local server_time = redis.call('TIME')\nserver_time = server_time[1] * 1000000 + server_time[2]\n";

/// Returns a script that takes the server's clock from argument `argument`. Nothing else of it
/// changes.
fn at_time_of_argument(text: &str, argument: impl Display) -> String {
    assert_eq!(
        text.matches(READS_CLOCK).count(),
        1,
        "a script reads the clock once"
    );
    text.replace(
        READS_CLOCK,
        &format!("local server_time = tonumber(ARGV[{argument}])\n"),
    )
}

/// Returns the value of a constant of `lua/layout.lua`, as it stands there.
fn literal(name: &str) -> &'static str {
    let lines = script::RATES.lines().chain(script::IN_FLIGHT.lines());
    let mut constants = lines.filter_map(script::constant);
    constants
        .find(|(other, _)| *other == name)
        .map(|(_, value)| value)
        .expect("a constant of the layout")
}

/// Returns a request for `demands` now, without a session.
fn lease_request<'a>(spec: &'a Arc<LimitSpec>, demands: &'a [Demand]) -> LeaseRequest<'a> {
    LeaseRequest {
        validity: millis(10),
        prefetch_validity: millis(10),
        ..LeaseRequest::new(Key::ALL, spec, demands)
    }
}

/// What a lease decides.
type Decided = (
    Vec<Grant>,
    Option<Grant>,
    Option<Refusal>,
    bool,
    u64,
    HoldState,
    bool,
);

fn decided(lease: &Lease) -> Decided {
    (
        lease.grants.to_vec(),
        lease.prefetched,
        lease.refused,
        lease.external_usage,
        lease.free,
        lease.hold,
        lease.foreign.is_some(),
    )
}

fn same_grants(world: &mut World, quotas: [Quota; 2], steps: &[Step]) -> Result<(), TestCaseError> {
    let spec = quotas.map(|quota| Arc::new(LimitSpec::new(quota, millis(10), millis(2))));
    same_grants_of(world, spec, steps)
}

fn same_grants_of(
    world: &mut World,
    spec: [Arc<LimitSpec>; 2],
    steps: &[Step],
) -> Result<(), TestCaseError> {
    world.begin();
    let limits: usize = spec.iter().map(|spec| spec.limits().len()).sum();
    for (number, step) in steps.iter().enumerate() {
        world.now += step.wait;
        let spec = &spec[usize::from(step.uses_second_spec)];
        let returns = world.take_returns(step);
        let (ours, theirs) = world.lease(spec, step, &returns);
        prop_assert_eq!(decided(&ours), decided(&theirs), "step {}", number);
        // Times to live follow the real clock of the server, which this test does not set.
        let is_set = steps[..=number].iter().any(|step| step.clock != 0);
        if number % 3 == 0 && theirs.incarnation != 0 && !is_set {
            let ttl = world.ttl;
            let remember = i64::try_from(theirs.session_ttl.as_millis()).unwrap();
            prop_assert!(
                ttl == 0 || ttl >= remember,
                "remembered for {} ms, kept for {} ms",
                remember,
                ttl
            );
        }
        world.keep(&ours);
        world.forget_what_redis_does_not_keep();
        if number % 5 == 4 {
            let (ours, theirs) = world.peek(spec, step);
            prop_assert_eq!(ours, theirs, "peek at step {}", number);
        }
    }
    let size: usize = redis::cmd("STRLEN")
        .arg(&world.key)
        .query(&mut world.redis)
        .unwrap();
    prop_assert!(size <= 4096 * (1 + limits), "{} bytes", size);
    prop_assert!(
        world.ttl > 0 || size == 0,
        "a state of {} bytes without a time to live",
        size
    );
    Ok(())
}

fn check(cases: u32, mix: Mix, length: usize) {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(cases)
    };
    let histories = (
        [quota(mix), quota(mix)],
        prop::collection::vec(step(mix), 1..length),
    );
    TestRunner::new(config)
        .run(&histories, |(quotas, steps)| {
            same_grants(&mut world.borrow_mut(), quotas, &steps)
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_and_redis_grant_the_same_to_the_microsecond() {
    check(300, Mix::Any, 40);
}

#[test]
fn memory_and_redis_grant_the_same_in_long_lines() {
    check(63, Mix::LongLines, 80);
}

#[test]
fn memory_and_redis_grant_later_use_the_same() {
    check(75, Mix::LaterUse, 150);
}

/// The part of a class: owners and borrowers call, and callers that know of no classes.
fn check_parts(cases: u32, mix: Mix, length: usize) {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(cases)
    };
    let roles = (prop::bool::weighted(0.4), prop::bool::weighted(0.05));
    let steps = (step(mix), roles).prop_map(|(step, (borrows, uses_second_spec))| Step {
        borrows,
        uses_second_spec,
        prefetch: if borrows { 0 } else { step.prefetch },
        ..step
    });
    let percent = select(vec![100u8, 97, 97, 75, 50, 0]);
    let histories = (quota(mix), percent, prop::collection::vec(steps, 1..length));
    TestRunner::new(config)
        .run(&histories, |(quota, percent, steps)| {
            let plain = LimitSpec::new(quota, millis(10), millis(2));
            let part = plain.clone().with_lending(percent);
            let specs = [Arc::new(part), Arc::new(plain)];
            same_grants_of(&mut world.borrow_mut(), specs, &steps)
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_and_redis_lend_the_same() {
    check_parts(100, Mix::Any, 40);
    check_parts(15, Mix::LongLines, 60);
    check_parts(25, Mix::LaterUse, 100);
}

#[test]
fn memory_and_redis_lend_the_same_in_plain_calls() {
    check_parts(50, Mix::Plain, 150);
}

/// A key of several hundred advance bookings joins them.
#[test]
fn memory_and_redis_join_the_same_bookings() {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let second = Duration::from_secs(1);
    let window = Quota::new(5, second);
    let quotas = select(vec![
        window,
        Quota::new(50, second),
        Quota::bucket(4).refill(4, second),
        Quota::fixed(5, second),
        window.and(Quota::fixed(200, Duration::from_secs(60))),
    ]);
    let step = (
        0..300_000u64,
        0..200_000u64,
        10..30usize,
        1..3u32,
        0..4usize,
        any::<bool>(),
    );
    let step = step.prop_map(|(earliest, wait, demands, cost, returns, newest)| Step {
        wait,
        demands: vec![(cost, 1); demands],
        earliest: millis(earliest),
        latest: millis(1_000_000),
        life: millis(10),
        returns,
        newest,
        ..Step::idle()
    });
    let histories = (quotas, prop::collection::vec(step, 30..40));
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(3)
    };
    TestRunner::new(config)
        .run(&histories, |(quota, steps)| {
            same_grants(&mut world.borrow_mut(), [quota, quota], &steps)
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_and_redis_grant_plain_calls_the_same() {
    check(100, Mix::Plain, 200);
}

/// Units share a chunk up to a quarter of the window, in each of the ways through the script.
#[test]
fn chunks_end_at_the_same_gap() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    // Its chunks have ten units.
    let spec = Arc::new(LimitSpec::new(
        Quota::per_second(1000),
        millis(10),
        millis(2),
    ));
    for (gap, shares) in [(250_000, true), (250_001, false)] {
        for demands in [vec![(1, 4)], vec![(1, 2), (2, 1)]] {
            world.begin();
            let mut lease = |demands: &[(u32, u32)], wait: u64| {
                world.now += wait;
                let step = Step {
                    demands: demands.to_vec(),
                    latest: millis(10_000),
                    life: millis(10),
                    ..Step::idle()
                };
                let (ours, theirs) = world.lease(&spec, &step, &[]);
                assert_eq!(decided(&ours), decided(&theirs), "{gap} {demands:?}");
                theirs.grants
            };
            lease(&[(1, 10)], 0);
            let first = lease(&demands, 1)[0].stamp;
            let last = lease(&demands, gap)[0].stamp;
            // The units that are free, those of the first chunk, and one more.
            let slot = lease(&[(1, 982 + 10 + 1)], 0)
                .last()
                .map(|grant| grant.slot);
            let leaves = if shares { last } else { first };
            assert_eq!(slot, Some(leaves + 1_000_000), "{gap} {demands:?}");
        }
    }
}

/// A call that only returns permits does not know the time, so it does not change the clock. If it
/// stopped the clock, permits that are booked ahead would be valid too early.
#[test]
fn returns_do_not_stop_the_clock() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = Arc::new(LimitSpec::new(Quota::per_second(10), millis(10), millis(2)));
    let step = Step {
        demands: vec![(1, 2)],
        life: millis(10),
        ..Step::idle()
    };
    for _ in 0..4 {
        // `World::lease` asserts that the time is the server's.
        let (ours, theirs) = world.lease(&spec, &step, &[]);
        assert_eq!(decided(&ours), decided(&theirs));
        world.now += 100_000;
        let Grant { slot, stamp, .. } = theirs.grants[0];
        let unused = UnusedPermits {
            slot,
            stamp,
            units: 1,
            incarnation: theirs.incarnation,
        };
        world.run(&codec::give_back(&spec, &[unused], 7));
        if let Some(ledger) = &mut world.ledger {
            ledger.advance(&spec, world.now);
            ledger.take_back(unused);
        }
        world.now += 100_000;
    }
}

/// If all waiters have given up, in any order, the next request leaves at once. If one is left, the next
/// request gets the first slot before it.
#[test]
fn returned_slots_are_kept_before_a_booking_alone() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let window = millis(10_000);
    for quota in [
        Quota::new(1, window),
        Quota::bucket(1).refill(1, window),
        Quota::bucket(2).refill(2, window),
        Quota::new(1, window).and(Quota::bucket(2).refill(2, window)),
    ] {
        let spec = Arc::new(LimitSpec::new(quota, millis(10), millis(2)));
        let step = |count| Step {
            demands: vec![(1, count)],
            latest: millis(1_000_000),
            life: millis(10),
            ..Step::idle()
        };
        for stays in [false, true] {
            for order in [
                [0, 1, 2],
                [0, 2, 1],
                [1, 0, 2],
                [1, 2, 0],
                [2, 0, 1],
                [2, 1, 0],
            ] {
                world.begin();
                let lease = |world: &mut World, step: &Step, returns: &[UnusedPermits]| {
                    let (ours, theirs) = world.lease(&spec, step, returns);
                    assert_eq!(decided(&ours), decided(&theirs), "{quota} {order:?}");
                    theirs
                };
                lease(&mut world, &step(quota.largest_cost()), &[]);
                let waiters: Vec<UnusedPermits> = (0..3)
                    .map(|_| {
                        let lease = lease(&mut world, &step(1), &[]);
                        let Grant { slot, stamp, .. } = lease.grants[0];
                        UnusedPermits::new(slot, stamp, 1, lease.incarnation)
                    })
                    .collect();
                if stays {
                    lease(&mut world, &step(1), &[]);
                }
                world.now += 1_000_000;
                for waiter in order {
                    lease(&mut world, &Step::idle(), &waiters[waiter..=waiter]);
                }
                let returned: u64 = world.ledger(&spec).returned_units();
                assert_eq!(returned, if stays { 3 } else { 0 }, "{quota} {order:?}");
                world.now += 12_000_000;
                let next = lease(&mut world, &step(1), &[]).grants[0].slot;
                let ahead = |waiter: &&UnusedPermits| waiter.slot >= world.now;
                let expected = match waiters.iter().find(ahead) {
                    Some(waiter) if stays => waiter.slot,
                    _ => world.now,
                };
                assert_eq!(next, expected, "{quota} {order:?}");
            }
        }
    }
}

/// Of many windows that are booked ahead, the first ones close. A slot there that comes back goes to the
/// next request all the same.
#[test]
fn returned_slots_of_closed_windows_are_kept() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let quota = Quota::fixed(5, millis(1000)).and(Quota::fixed(4, millis(200)));
    let spec = Arc::new(LimitSpec::new(quota, millis(10), millis(2)));
    let step = |count| Step {
        demands: vec![(1, count)],
        latest: millis(60_000),
        life: millis(10),
        ..Step::idle()
    };
    let mut lease = |step: &Step, returns: &[UnusedPermits]| {
        let (ours, theirs) = world.lease(&spec, step, returns);
        assert_eq!(decided(&ours), decided(&theirs));
        theirs
    };
    let booked = lease(&step(200), &[]);
    let Grant { slot, stamp, .. } = booked.grants[2];
    let unused = UnusedPermits::new(slot, stamp, 1, booked.incarnation);
    let next = lease(&step(1), &[unused]);
    assert_eq!(next.grants[0].slot, slot);
}

/// A process states the limits of parts that it does not use. Both keep such a part as long as its limits
/// apply.
#[test]
fn limits_of_unused_parts_are_kept() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let part = |count| {
        let spec = LimitSpec::new(Quota::per_second(count), millis(10), millis(2));
        Arc::new(spec.with_lending(97))
    };
    let (_, theirs) = world.lease(&part(3), &Step::idle(), &[]);
    assert!(theirs.session_ttl >= millis(3000), "{theirs:?}");
    assert!(world.ttl >= 3000, "{}", world.ttl);
    let now = world.now;
    assert!(world.ledger(&part(3)).fresh_from() >= now + 3_000_000);

    world.now += 2_900_000;
    let five = Step {
        demands: vec![(1, 5)],
        life: millis(10),
        ..Step::idle()
    };
    let (ours, theirs) = world.lease(&part(30), &five, &[]);
    assert_eq!(decided(&ours), decided(&theirs));
    assert_eq!(
        theirs.grants.iter().map(|grant| grant.count).sum::<u32>(),
        3
    );
    assert!(ours.foreign.is_some() && theirs.foreign.is_some());
}

/// Each process of a large fleet may state another limit. Their calls go on, and each stays within
/// its own limit.
#[test]
fn memory_and_redis_forget_the_same_excess_limits() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    for call in 0..120 {
        let number = call * 7 % 40;
        let quota = Quota::new(10 + number, millis(1000 + 100 * u64::from(number % 3)));
        let quota = if number % 5 == 0 {
            quota.and(Quota::bucket(10 + number).refill(3, millis(900)))
        } else {
            quota
        };
        let spec = Arc::new(LimitSpec::new(quota, millis(10), millis(2)));
        world.now += 17_000;
        let demands = [Demand::new(1, 1)];
        let request = LeaseRequest {
            session: world.memory(),
            ..lease_request(&spec, &demands)
        };
        let theirs = codec::read_lease(&world.run_by_memory(codec::lease(&request, 7))).unwrap();
        (world.incarnation, world.writes, world.seen) =
            (theirs.incarnation, theirs.writes, theirs.now);
        let now = world.now;
        let ours = book(world.ledger(&spec), now, &request);
        assert_eq!(decided(&ours), decided(&theirs), "call {call}");
        let (ours, theirs) = world.peek(&spec, &Step::idle());
        assert_eq!(ours, theirs, "peek after call {call}");
        assert!(ours.limits.len() <= 32, "{} limits", ours.limits.len());
        let own = quota
            .limits()
            .iter()
            .all(|own| ours.limits.iter().any(|usage| usage.limit == *own));
        assert!(own, "the limits of the caller hold");
    }
}

/// A window that is over stays in the state in Redis until a call writes the state. If the clock is
/// set meanwhile, its units do not come back.
#[test]
fn windows_that_are_over_stay_forgotten_after_clock_steps() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let mut steps: Vec<_> = (0..30).map(|_| Step::idle()).collect();
    steps[2].prefetch = 5;
    steps[3].clock = -900_000;
    steps[9].wait = 6_000_000;
    steps[10].demands = vec![(1, 1)];
    steps[11] = Step {
        demands: vec![(3, 1)],
        latest: millis(100_000),
        uses_second_spec: true,
        clock: -30_000_000,
        ..Step::idle()
    };
    steps[19].wait = 6_000_000;
    steps[20].clock = 900_000;
    steps[28].clock = 900_000;
    let quotas = [Quota::fixed(4, millis(60_000)), Quota::new(3, millis(3000))];
    same_grants(&mut world, quotas, &steps).unwrap();
}
