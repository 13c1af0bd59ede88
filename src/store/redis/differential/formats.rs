//! This release reads the states that an earlier release wrote. The earlier release reads the
//! states that this one writes, unless they contain something new. `tests/formats/1` has the
//! scripts of format 1, and states written by them. `tests/formats/2` has the script of the last
//! release without advance bookings. `tests/formats/3` has states with advance bookings, and the script
//! of the last release without set quotas. `tests/formats/4` has states with set and learned
//! quotas.

use super::super::layout::LEASE_LATER;
use super::*;
use crate::limit::micros_up;

const RATES_1: &str = include_str!("../../../../tests/formats/1/rates.lua");
pub(super) const RATES_2: &str = include_str!("../../../../tests/formats/2/rates.lua");
pub(super) const RATES_3: &str = include_str!("../../../../tests/formats/3/rates.lua");
const STATES_4: &str = include_str!("../../../../tests/formats/4/states.txt");
const STATES_3: &str = include_str!("../../../../tests/formats/3/states.txt");
const STATES_1: &str = include_str!("../../../../tests/formats/1/states.txt");

/// Returns a call of format 1 for one of format 2 that has nothing new: no server's time, no
/// charges, and no demand that is of use later.
fn call_1(call: &[u8]) -> Vec<u8> {
    const BEFORE_SERVER: usize = 2 + 6 * 7;
    const BEFORE_CUT: usize = BEFORE_SERVER + 2 * 7 + 5 * 7 + 4 + 7 + 7 + 4;
    const BEFORE_CHARGES: usize = BEFORE_CUT + 1 + 1 + 2 + 2;
    assert_ne!(call[1], LEASE_LATER, "no permits of later use");
    let is_new = [BEFORE_CUT, BEFORE_CHARGES, BEFORE_CHARGES + 1].map(|at| call[at]);
    assert_eq!(
        is_new, [0; 3],
        "no cut hold, no charges and no statements of the upstream"
    );
    let (head, rest) = (
        &call[1..BEFORE_SERVER],
        &call[BEFORE_SERVER + 14..BEFORE_CUT],
    );
    [
        &[1],
        head,
        rest,
        &call[BEFORE_CUT + 1..BEFORE_CHARGES],
        &call[BEFORE_CHARGES + 1..],
    ]
    .concat()
}

/// Returns a reply of format 2 for a reply of format 1, with no free units.
fn answer_2(answer: &[u8]) -> Vec<u8> {
    const BEFORE_FREE: usize = 2 + 5 * 7;
    [
        &[2],
        &answer[1..BEFORE_FREE],
        &[0; 7],
        &answer[BEFORE_FREE..],
    ]
    .concat()
}

fn run_1(world: &mut World, call: &[u8]) -> Result<Vec<u8>, redis::RedisError> {
    let reads_clock = "local raw = redis.call('TIME')\nraw = raw[1] * 1000000 + raw[2]\n";
    assert_eq!(
        RATES_1.matches(reads_clock).count(),
        1,
        "the script reads the clock once"
    );
    let script =
        redis::Script::new(&RATES_1.replace(reads_clock, "local raw = tonumber(ARGV[4])\n"));
    let raw = world.now.saturating_add_signed(world.clock);
    let mut invocation = script.key(&world.key);
    invocation
        .arg(call_1(call))
        .arg("told")
        .arg("key")
        .arg(raw)
        .invoke(&mut world.redis)
}

fn run_of(world: &mut World, release: Release, call: &[u8]) -> redis::RedisResult<Vec<u8>> {
    world.release = release;
    let reply = world.try_run(call);
    world.release = Release::Today;
    reply
}

/// Returns the reply of the script of format 1 to a call, as a reply of today.
pub(super) fn lease_1(world: &mut World, call: &[u8]) -> Vec<u8> {
    answer_2(&run_1(world, call).unwrap())
}

fn load(world: &mut World, key: &str, state: &[u8]) {
    world.key = key.into();
    redis::cmd("SET")
        .arg(key)
        .arg(state)
        .exec(&mut world.redis)
        .unwrap();
}

fn stored(world: &mut World) -> Vec<u8> {
    redis::cmd("GET")
        .arg(&world.key)
        .query(&mut world.redis)
        .unwrap()
}

fn granted(lease: &Lease) -> (Vec<Grant>, Option<Refusal>) {
    (lease.grants.to_vec(), lease.refused)
}

fn lease_of(request: &LeaseRequest<'_>, answer: &[u8]) -> (Vec<Grant>, Option<Refusal>) {
    granted(&codec::read_lease(answer, request.spec.transit_slack()).unwrap())
}

/// Returns the quota of a state of the fixtures.
fn quota_of(name: &str) -> Quota {
    match name {
        "empty pool, one window" => Quota::per_second(10),
        "two windows" => Quota::new(25, millis(5000)).and(Quota::per_minute(300)),
        "a window of an hour" => Quota::per_hour(5000),
        "a long line" => Quota::per_second(50),
        "a line with coarse chunks" => Quota::new(7, millis(100)),
        "a bucket" => Quota::bucket(40).refill(2, millis(1000)),
        "a bucket with marks" => Quota::per_second(50).burst(10),
        "fixed windows" => Quota::fixed(20, millis(1000)),
        "a spacing" => Quota::every(millis(1000)),
        "a window, a bucket and fixed windows" => Quota::per_minute(60)
            .burst(9)
            .and(Quota::fixed(30, millis(60_000))),
        "others use it" => Quota::new(60, millis(10_000)),
        _ => panic!("{name} has no quota"),
    }
}

/// A state of a fixture. Fields of its line: name, quota, time, incarnation, writes, seen, state.
struct StateLine {
    name: &'static str,
    quota: Quota,
    now: Micros,
    session: ClientSession,
    state: Vec<u8>,
    /// The fields after the state.
    rest: Vec<&'static str>,
}

impl StateLine {
    fn read(line: &'static str) -> Self {
        let mut fields = line.split('|');
        let mut field = || fields.next().expect("seven fields");
        let (name, text) = (field(), field());
        let quota = quota_of(name);
        assert_eq!(quota.to_string(), text);
        let mut number = || field().parse().expect("a number");
        let (now, incarnation, writes, seen) = (number(), number(), number(), number());
        let hex = field();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits");
        StateLine {
            name,
            quota,
            now,
            session: ClientSession {
                incarnation,
                writes,
                seen,
                ..ClientSession::default()
            },
            state: (0..hex.len()).step_by(2).map(byte).collect(),
            rest: fields.collect(),
        }
    }
}

#[test]
fn states_of_format_1_are_read_as_before() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let mut count = 0;
    for (number, line) in STATES_1.lines().enumerate() {
        let StateLine {
            name,
            quota,
            now,
            session: memory,
            state,
            ..
        } = StateLine::read(line);
        for wait in [0, 700, 40_000, 1_500_000] {
            let spec = Arc::new(LimitSpec::new(quota, millis(10), millis(2)));
            let demands = [Demand::new(1, 3), Demand::new(2, 2)];
            let since = Duration::from_micros(wait);
            let request = LeaseRequest {
                latest: millis(2000),
                session: ClientSession { since, ..memory },
                ..lease_request(&spec, &demands)
            };
            let call = codec::lease(&request, 7);
            world.now = now + wait;
            load(&mut world, &format!("old {number} {wait}"), &state);
            let before = lease_1(&mut world, &call);
            load(&mut world, &format!("new {number} {wait}"), &state);
            let after = world.run(&call);
            let (before, after) = (lease_of(&request, &before), lease_of(&request, &after));
            if name == "others use it" {
                // Units reserved for other clients are free sooner now.
                assert!(!after.0.is_empty() || after.1.is_some());
            } else {
                assert_eq!(before, after, "{name}, {wait} us later");
            }
            // The earlier release continues with the state that this one wrote.
            let (written, again) = (
                stored(&mut world),
                codec::lease(
                    &LeaseRequest {
                        session: ClientSession::default(),
                        ..request
                    },
                    7,
                ),
            );
            world.now += 1000;
            load(&mut world, &format!("back {number} {wait}"), &written);
            let before = lease_1(&mut world, &again);
            load(&mut world, &format!("on {number} {wait}"), &written);
            let after = world.run(&again);
            if name != "others use it" {
                assert_eq!(
                    lease_of(&request, &before),
                    lease_of(&request, &after),
                    "{name}, written by this release"
                );
            }
            count += 1;
        }
    }
    assert!(count > 100, "{count}");
}

#[test]
fn format_2_states_are_clear_errors_to_format_1() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let spec = Arc::new(LimitSpec::new(
        Quota::fixed(20, millis(60_000)),
        millis(10),
        millis(2),
    ));
    let demands = [Demand::new(1, 3)];
    world.begin();
    let first = world.run(&codec::lease(&lease_request(&spec, &demands), 7));
    let first = codec::read_lease(&first, millis(10)).unwrap();
    // The server's clock is set. Fixed windows follow it, which format 1 cannot express.
    world.clock = 7_000_000;
    let memory = ClientSession {
        incarnation: first.incarnation,
        writes: 1,
        seen: first.now,
        ..ClientSession::default()
    };
    let call = codec::lease(
        &LeaseRequest {
            session: memory,
            ..lease_request(&spec, &demands)
        },
        7,
    );
    assert_eq!(
        lease_of(
            &lease_request(&spec, &demands),
            &world.run_by_memory(call.clone())
        )
        .0
        .len(),
        1
    );
    assert_eq!(stored(&mut world)[0], 2);
    let error = run_1(&mut world, &call).unwrap_err().to_string();
    assert!(error.contains("format 2"), "{error}");
    // A later format is a clear error to this release.
    let later = [&[5], &stored(&mut world)[1..]].concat();
    load(&mut world, "later", &later);
    let error = world.try_run(&call).unwrap_err().to_string();
    assert!(error.contains("format 5"), "{error}");
}

/// Returns what a call gets from a state, as text: the grants, each with its cost and its wait in
/// microseconds, or the wait until the first slot.
fn decision(world: &mut World, spec: &Arc<LimitSpec>, session: ClientSession) -> String {
    let demands = [
        Demand::new(1, 2),
        Demand::new(2, 1).earliest(millis(3000)),
        Demand::new(1, 4),
    ];
    let request = LeaseRequest {
        latest: millis(90_000),
        session,
        ..lease_request(spec, &demands)
    };
    let (grants, refused) = lease_of(&request, &world.run(&codec::lease(&request, 7)));
    let grants = grants.iter().map(|grant| {
        let Grant {
            cost, count, wait, ..
        } = grant;
        format!("{count} of {cost} at {}", wait.as_micros())
    });
    let refused = refused.map(|refused| format!("refused for {:?}", refused.wait));
    grants.chain(refused).collect::<Vec<_>>().join(", ")
}

#[test]
fn states_with_advance_bookings_are_read_as_before() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    for (number, line) in STATES_3.lines().enumerate() {
        let old = StateLine::read(line);
        assert_eq!(old.state[0], 3, "{}", old.name);
        let spec = Arc::new(LimitSpec::new(old.quota, millis(10), millis(2)));
        assert_eq!(old.rest.len(), WAITS_3.len());
        for (wait, expected) in WAITS_3.iter().zip(old.rest) {
            world.now = old.now + wait;
            load(&mut world, &format!("{number} {wait}"), &old.state);
            let since = Duration::from_micros(*wait);
            let session = ClientSession {
                since,
                ..old.session
            };
            let decided = decision(&mut world, &spec, session);
            assert_eq!(decided, expected, "{}, {wait} us later", old.name);
        }
    }
}

/// How many microseconds after their last write the states with advance bookings are read.
const WAITS_3: [Micros; 3] = [0, 4_000_000, 100_000_000];

/// A state has format 3 only while it has advance bookings.
#[test]
fn format_3_states_are_clear_errors_to_earlier_releases() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = Arc::new(LimitSpec::new(Quota::per_second(5), millis(10), millis(2)));
    let lease = |world: &mut World, demand: Demand| {
        let demands = [demand];
        let request = LeaseRequest {
            latest: millis(20_000),
            session: world.memory(),
            ..lease_request(&spec, &demands)
        };
        let call = codec::lease(&request, 7);
        let reply = codec::read_lease(&world.run_by_memory(call.clone()), millis(10)).unwrap();
        (world.incarnation, world.writes, world.seen) =
            (reply.incarnation, reply.writes, reply.now);
        (reply, call)
    };
    let (reply, _) = lease(&mut world, Demand::new(1, 3).earliest(millis(10_000)));
    assert_eq!(reply.grants[0].wait, millis(10_000));
    assert_eq!(stored(&mut world)[0], 3);
    let (_, call) = lease(&mut world, Demand::new(1, 1));
    let errors = [
        run_1(&mut world, &call).unwrap_err(),
        run_of(&mut world, Release::Format2, &call).unwrap_err(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.contains("format 3"), "{error}");
    }
    // The slot has come, so the state is as an earlier release would have written it.
    world.now += 10_000_000;
    let (reply, call) = lease(&mut world, Demand::new(1, 5));
    assert_eq!(reply.grants[0].count, 2, "three are booked");
    assert_eq!(stored(&mut world)[0], 1);
    assert!(run_1(&mut world, &call).is_ok());
    assert!(run_of(&mut world, Release::Format2, &call).is_ok());
}

/// The script of `release_of` runs each step of a history. A step of format 1 is without what that
/// format cannot express.
fn same_grants_across_releases(
    world: &mut World,
    quotas: [Quota; 2],
    steps: &[Step],
    release_of: impl Fn(usize) -> Release,
) -> Result<(), TestCaseError> {
    world.begin();
    let spec = quotas.map(|quota| Arc::new(LimitSpec::new(quota, millis(10), millis(2))));
    let longest = spec
        .iter()
        .map(|spec| spec.quota().longest_memory())
        .max()
        .unwrap_or_default();
    let mut upgraded = 0;
    for (number, step) in steps.iter().enumerate() {
        world.now += step.wait;
        world.release = release_of(number);
        let mut step = step.clone();
        if world.release == Release::Format1 {
            (step.left, step.clock) = (None, 0);
            step.earliest = Duration::ZERO;
            step.charges.clear();
            step.held.cut = false;
            step.hold = step
                .hold
                .map(|hold| hold.map(|held| HoldState { cut: false, ..held }));
            upgraded = world.now + micros_up(longest);
        } else if world.now <= upgraded {
            // Format 1 forgot each fixed window at its end, which a clock that is set back counts
            // again.
            step.clock = 0;
        }
        let spec = &spec[usize::from(step.uses_second_spec)];
        let returns = world.take_returns(&step);
        let (ours, theirs) = world.lease(spec, &step, &returns);
        prop_assert_eq!(
            granted(&ours),
            granted(&theirs),
            "step {} of {:?}",
            number,
            world.release
        );
        world.keep(&ours);
        world.forget_what_redis_does_not_keep();
    }
    Ok(())
}

/// Checks random histories whose steps are those of `step`. `release_of` gets a number from 1 to
/// 19, which is the same for all steps, and the number of a step.
fn check_releases(step: impl Strategy<Value = Step>, release_of: impl Fn(usize, usize) -> Release) {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let steps = prop::collection::vec(step, 2..40);
    TestRunner::new(config)
        .run(
            &([quota(Mix::Any), quota(Mix::Any)], steps, 1usize..20),
            |(quotas, steps, old)| {
                let mut world = world.borrow_mut();
                same_grants_across_releases(&mut world, quotas, &steps, |step| {
                    release_of(old, step)
                })
            },
        )
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn histories_go_on_through_an_upgrade() {
    check_releases(step(Mix::Any), |old, step| match step < old {
        true => Release::Format1,
        false => Release::Today,
    });
}

/// While a fleet is upgraded, processes of both releases use a key.
#[test]
fn releases_take_turns_without_advance_bookings() {
    let without_later_use = step(Mix::Any).prop_map(|step| Step {
        earliest: Duration::ZERO,
        ..step
    });
    check_releases(without_later_use, |turns, step| {
        match turns >> (step % 5) & 1 {
            0 => Release::Today,
            _ => Release::Format2,
        }
    });
}

/// Without a set quota, the last release that knows none writes and replies the same, byte for byte.
#[test]
fn plain_keys_are_as_before_byte_for_byte() {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mix = prop_oneof![Just(Mix::Any), Just(Mix::LaterUse), Just(Mix::Plain)];
    let histories = mix.prop_flat_map(|mix| {
        let steps = prop::collection::vec(step(mix), 1..40);
        ([quota(mix), quota(mix)], steps)
    });
    TestRunner::new(config)
        .run(&histories, |(quotas, steps)| {
            let mut world = world.borrow_mut();
            world.begin();
            let spec = quotas.map(|quota| Arc::new(LimitSpec::new(quota, millis(10), millis(2))));
            for (number, step) in steps.iter().enumerate() {
                world.now += step.wait;
                let spec = &spec[usize::from(step.uses_second_spec)];
                let demands = step.demands.iter();
                let demands: Vec<Demand> = demands
                    .map(|&(cost, count)| Demand::new(cost, count).earliest(step.earliest))
                    .collect();
                let returns = world.take_returns(step);
                let request = LeaseRequest {
                    prefetch: step.prefetch,
                    latest: step.earliest + step.latest,
                    validity: step.life,
                    returns: &returns,
                    hold: step.held,
                    remaining: step.left.map(|left| left.of(spec)),
                    session: world.memory(),
                    ..lease_request(spec, &demands)
                };
                let call = match step.hold {
                    Some(Some(held)) => codec::hold(spec, held, None, 7),
                    Some(None) => codec::release(spec, 7),
                    None => codec::lease(&request, 7),
                };
                let key = world.key.clone();
                let mut run = |release: Release, key: String| {
                    world.key = key;
                    let reply = run_of(&mut world, release, &call).unwrap();
                    let state: Option<Vec<u8>> = redis::cmd("GET")
                        .arg(&world.key)
                        .query(&mut world.redis)
                        .unwrap();
                    (reply, state)
                };
                let before = run(Release::Format3, format!("{key} before"));
                let (reply, state) = run(Release::Today, key);
                prop_assert_eq!(before, (reply.clone(), state), "step {}", number);
                let lease = codec::read_lease(&reply, millis(10)).unwrap();
                (world.incarnation, world.writes, world.seen) =
                    (lease.incarnation, lease.writes, lease.now);
                world.keep(&lease);
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}

/// Sets a quota for the key of a world. Returns its version.
fn set_quota(world: &mut World, quota: Quota, life: Duration) -> u32 {
    let spec = LimitSpec::new(quota, millis(10), millis(2));
    let reply = world.run(&codec::change_quota(ChangeKind::Set, &spec, life, 7));
    let lease = codec::read_lease(&reply, millis(10)).unwrap();
    lease.set_quota.expect("it is set").version
}

/// A state has format 4 only while it has a set quota, or the end of one.
#[test]
fn format_4_states_are_clear_errors_to_earlier_releases() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = Arc::new(LimitSpec::new(Quota::per_second(5), millis(10), millis(2)));
    let demands = [Demand::new(1, 1)];
    let call = codec::lease(&lease_request(&spec, &demands), 7);
    world.run(&call);
    assert_eq!(stored(&mut world)[0], 1);
    set_quota(&mut world, Quota::per_second(9), millis(1000));
    assert_eq!(stored(&mut world)[0], 4);
    let errors = [
        run_1(&mut world, &call).unwrap_err(),
        run_of(&mut world, Release::Format2, &call).unwrap_err(),
        run_of(&mut world, Release::Format3, &call).unwrap_err(),
    ];
    for error in errors.map(|error| error.to_string()) {
        assert!(error.contains("format 4"), "{error}");
    }
    // The set quota has ended, and that was forgotten.
    world.now += 62_000_000;
    world.run(&call);
    assert_eq!(stored(&mut world)[0], 1);
    for release in [Release::Format2, Release::Format3] {
        assert!(run_of(&mut world, release, &call).is_ok());
    }
}

/// How many microseconds after their last write the states with set quotas are read.
const WAITS_4: [Micros; 3] = [0, 4_000_000, 4_000_000_000];

/// Returns what a process that knows of no set quota gets from a state, and what it is told.
fn decision_4(world: &mut World, spec: &Arc<LimitSpec>, session: ClientSession) -> String {
    let peek = codec::peek(&crate::store::PeekRequest::new(Key::ALL, spec), 7);
    let usage = codec::read_peek(&world.run(&peek)).unwrap();
    let told = usage.set_quota.map(|told| {
        let quota = told.quota.map(|quota| quota.to_string());
        format!("{} {:?} for {:?}", told.version, quota, told.left)
    });
    format!("{told:?}; {}", decision(world, spec, session))
}

#[test]
fn states_with_set_quotas_are_read_as_before() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    for (number, line) in STATES_4.lines().enumerate() {
        let old = StateLine::read(line);
        assert_eq!(old.state[0], 4, "{}", old.name);
        let spec = Arc::new(LimitSpec::new(old.quota, millis(10), millis(2)));
        assert_eq!(old.rest.len(), WAITS_4.len());
        for (wait, expected) in WAITS_4.iter().zip(old.rest) {
            world.now = old.now + wait;
            load(&mut world, &format!("{number} {wait}"), &old.state);
            let since = Duration::from_micros(*wait);
            let session = ClientSession {
                since,
                ..old.session
            };
            let decided = decision_4(&mut world, &spec, session);
            assert_eq!(decided, expected, "{}, {wait} us later", old.name);
        }
    }
}
