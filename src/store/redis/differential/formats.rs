//! This release reads the states that an earlier release wrote. The earlier release reads the
//! states that this one writes, unless they contain something new. `tests/formats/1` has the
//! scripts of format 1, and states written by them.

use super::super::layout::LEASE_LATER;
use super::*;
use crate::limit::micros_up;

const RATES_1: &str = include_str!("../../../../tests/formats/1/rates.lua");
const IN_FLIGHT_1: &str = include_str!("../../../../tests/formats/1/seats.lua");
const REGISTER_1: &str = include_str!("../../../../tests/formats/1/register.lua");
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

/// Fields of a line: name, quota, time, incarnation, writes, seen, state.
fn states() -> impl Iterator<Item = (&'static str, Quota, Micros, ClientSession, Vec<u8>)> {
    let quotas = [
        ("empty pool, one window", Quota::per_second(10)),
        (
            "two windows",
            Quota::new(25, millis(5000)).and(Quota::per_minute(300)),
        ),
        ("a window of an hour", Quota::per_hour(5000)),
        ("a long line", Quota::per_second(50)),
        ("a line with coarse chunks", Quota::new(7, millis(100))),
        ("a bucket", Quota::bucket(40).refill(2, millis(1000))),
        ("a bucket with marks", Quota::per_second(50).burst(10)),
        ("fixed windows", Quota::fixed(20, millis(1000))),
        ("a spacing", Quota::every(millis(1000))),
        (
            "a window, a bucket and fixed windows",
            Quota::per_minute(60)
                .burst(9)
                .and(Quota::fixed(30, millis(60_000))),
        ),
        ("others use it", Quota::new(60, millis(10_000))),
    ];
    STATES_1.lines().map(move |line| {
        let mut fields = line.split('|');
        let mut field = || fields.next().expect("seven fields");
        let (name, text) = (field(), field());
        let mut number = || field().parse().expect("a number");
        let (now, incarnation, writes, seen) = (number(), number(), number(), number());
        let (_, quota) = quotas
            .iter()
            .find(|(other, _)| *other == name)
            .expect("a known quota");
        assert_eq!(quota.to_string(), text);
        let hex = line.rsplit('|').next().expect("a state");
        let state = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
        (
            name,
            *quota,
            now,
            ClientSession {
                incarnation,
                writes,
                seen,
                ..ClientSession::default()
            },
            state.collect(),
        )
    })
}

#[test]
fn states_of_format_1_are_read_as_before() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let mut count = 0;
    for (number, (name, quota, now, memory, state)) in states().enumerate() {
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
    let later = [&[4], &stored(&mut world)[1..]].concat();
    load(&mut world, "later", &later);
    let mut invocation = world.script.key("later");
    let invocation = invocation.arg(call).arg("told").arg("key").arg(world.now);
    let error = invocation
        .invoke::<Vec<u8>>(&mut world.redis)
        .unwrap_err()
        .to_string();
    assert!(error.contains("format 4"), "{error}");
}

/// A state has format 3 only while it has advance bookings.
#[test]
fn format_3_states_are_clear_errors_to_format_1() {
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
    let error = run_1(&mut world, &call).unwrap_err().to_string();
    assert!(error.contains("format 3"), "{error}");
    // The slot has come, so the state is as an earlier release would have written it.
    world.now += 10_000_000;
    let (reply, call) = lease(&mut world, Demand::new(1, 5));
    assert_eq!(reply.grants[0].count, 2, "three are booked");
    assert_eq!(stored(&mut world)[0], 1);
    assert!(run_1(&mut world, &call).is_ok());
}

/// The scripts of format 1 run the first steps of a history, and the scripts of today the others.
fn same_grants_after_an_upgrade(
    world: &mut World,
    quotas: [Quota; 2],
    steps: &[Step],
    old: usize,
) -> Result<(), TestCaseError> {
    world.begin();
    let spec = quotas.map(|quota| Arc::new(LimitSpec::new(quota, millis(10), millis(2))));
    let longest = spec
        .iter()
        .map(|spec| spec.quota().longest_memory())
        .max()
        .unwrap_or_default();
    let mut upgraded = world.now;
    for (number, step) in steps.iter().enumerate() {
        world.now += step.wait;
        world.release = if number < old {
            Release::Format1
        } else {
            Release::Today
        };
        let mut step = step.clone();
        if number < old {
            (step.left, step.clock) = (None, 0);
            step.earliest = Duration::ZERO;
            step.charges.clear();
            step.held.cut = false;
            step.hold = step
                .hold
                .map(|hold| hold.map(|held| HoldState { cut: false, ..held }));
            upgraded = world.now;
        } else if world.now <= upgraded + micros_up(longest) {
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
            "step {} of which {} are old",
            number,
            old
        );
        world.keep(&ours);
        world.forget_what_redis_does_not_keep();
    }
    Ok(())
}

#[test]
fn histories_go_on_through_an_upgrade() {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let steps = prop::collection::vec(step(Mix::Any), 2..40);
    TestRunner::new(config)
        .run(
            &([quota(Mix::Any), quota(Mix::Any)], steps, 1usize..20),
            |(quotas, steps, old)| {
                same_grants_after_an_upgrade(&mut world.borrow_mut(), quotas, &steps, old)
            },
        )
        .unwrap_or_else(|error| panic!("{error}"));
}

/// Returns whether the first constants of a line of a script of format 1 have the values of
/// constants of today.
fn has_values(script: &str, line: &str, today: &[&str]) -> bool {
    let values: Vec<&str> = today.iter().map(|name| literal(name)).collect();
    let line = script
        .lines()
        .find(|other| other.starts_with(line))
        .expect("a line of the script");
    line.split_once(" = ")
        .is_some_and(|(_, all)| all.starts_with(&values.join(", ")))
}

#[test]
fn in_flight_and_register_records_have_not_changed() {
    let in_flight = ["IN_FLIGHT_HEAD", "IN_FLIGHT_HEAD_SIZE"];
    assert!(has_values(IN_FLIGHT_1, "local HEAD, HEAD_SIZE", &in_flight));
    assert!(has_values(
        IN_FLIGHT_1,
        "local HOLDER, HOLDER_SIZE",
        &["HOLDER", "HOLDER_SIZE"]
    ));
    assert!(has_values(
        IN_FLIGHT_1,
        "local BATCH, BATCH_SIZE",
        &["BATCH", "BATCH_SIZE"]
    ));
    assert!(has_values(
        REGISTER_1,
        "local VERSION, REGISTER",
        &["REGISTER_VERSION", "REGISTER_MESSAGE"]
    ));
    assert!(has_values(
        REGISTER_1,
        "local HEAD, HEAD_SIZE",
        &["REGISTER_HEAD", "REGISTER_HEAD_SIZE"]
    ));
}

/// The scripts of format 1 and of today, each on a register of its own: they return and write the
/// same.
#[test]
fn registers_of_format_1_go_on_unchanged() {
    let server = RedisServer::start().expect("a server of our own");
    let mut redis = server.connect().expect("a connection");
    let reads_clock = "local raw = redis.call('TIME')\nraw = raw[1] * 1000000 + raw[2]\n";
    assert_eq!(
        REGISTER_1.matches(reads_clock).count(),
        1,
        "the script reads the clock once"
    );
    let before =
        redis::Script::new(&REGISTER_1.replace(reads_clock, "local raw = tonumber(ARGV[5])\n"));
    let today = script::with_inlined_constants(&at_time_of_argument(script::REGISTER, 5));
    let today = redis::Script::new(&today);
    let mut seen = 0u64;
    for step in 0..60u64 {
        let (now, is_change) = (START + step * 1000, u8::from(step % 3 != 1));
        let stated = if step % 7 == 6 { 0 } else { seen };
        let call = [
            &[1, is_change],
            &stated.to_le_bytes()[..7],
            &60_000_000u64.to_le_bytes()[..7],
        ]
        .concat();
        if step % 20 == 19 {
            let () = redis::cmd("DEL")
                .arg(&["before", "today"])
                .query(&mut redis)
                .expect("an answer");
        }
        let mut run = |script: &redis::Script, key: &str| -> (Vec<u8>, Option<Vec<u8>>) {
            let mut invocation = script.key(key);
            invocation
                .arg(&call)
                .arg(format!("value {step}"))
                .arg("channel")
                .arg("name")
                .arg(now);
            let answer = invocation.invoke(&mut redis).expect("an answer");
            (
                answer,
                redis::cmd("GET")
                    .arg(key)
                    .query(&mut redis)
                    .expect("a value"),
            )
        };
        let (before, today) = (run(&before, "before"), run(&today, "today"));
        assert_eq!(before, today, "step {step}");
        let mut version = [0; 8];
        version[..7].copy_from_slice(&today.0[2..9]);
        seen = u64::from_le_bytes(version);
    }
}
