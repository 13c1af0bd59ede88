//! Records of calls in flight and of registers are as in the first release: `tests/formats/1` has its
//! scripts.

use super::*;
use crate::store::Claim;

const IN_FLIGHT_1: &str = include_str!("../../../../tests/formats/1/seats.lua");
const REGISTER_1: &str = include_str!("../../../../tests/formats/1/register.lua");

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

/// Returns a claim of format 1 for one of format 2 without a class: it has no server's time.
fn claim_1(call: &[u8]) -> Vec<u8> {
    const BEFORE_SERVER: usize = 2 + 6 * 7;
    [&[1], &call[1..BEFORE_SERVER], &call[BEFORE_SERVER + 14..]].concat()
}

/// The scripts about calls in flight of format 1 and of today, with the time as their last argument.
struct InFlightScripts {
    redis: redis::Connection,
    before: redis::Script,
    today: redis::Script,
}

impl InFlightScripts {
    fn new(server: &RedisServer) -> Self {
        let reads_clock = "local raw = redis.call('TIME')\nraw = raw[1] * 1000000 + raw[2]\n";
        assert_eq!(IN_FLIGHT_1.matches(reads_clock).count(), 1);
        let before = IN_FLIGHT_1.replace(reads_clock, "local raw = tonumber(ARGV[3])\n");
        let today = at_time_of_argument(script::IN_FLIGHT, 3);
        InFlightScripts {
            redis: server.connect().expect("a connection"),
            before: redis::Script::new(&before),
            today: redis::Script::new(&script::with_inlined_constants(&today)),
        }
    }

    /// Runs a claim. Returns how many slots the holder was ever granted, and the state.
    fn run(&mut self, key: &str, claim: &Claim, is_before: bool, now: Micros) -> (u64, Vec<u8>) {
        const GRANTED: usize = 2 + 4 * 7;
        let call = codec::claim(claim, claim.number, 77, ClientSession::default(), 9);
        let (script, call) = if is_before {
            (&self.before, claim_1(&call))
        } else {
            (&self.today, call)
        };
        let mut invocation = script.key(key);
        invocation.arg(call).arg("told:").arg(now);
        let reply: Vec<u8> = invocation.invoke(&mut self.redis).expect("a reply");
        let mut granted = [0; 8];
        granted[..7].copy_from_slice(&reply[GRANTED..GRANTED + 7]);
        let state = redis::cmd("GET").arg(key).query(&mut self.redis);
        (u64::from_le_bytes(granted), state.expect("a state"))
    }
}

fn claim_of(holder: u64, number: u64, in_use: u32, wanted: u32) -> Claim {
    Claim {
        holder,
        number,
        limit: 4,
        in_use,
        wanted,
        granted_seen: in_use.into(),
        ttl: millis(1000),
        ..Claim::NONE
    }
}

#[test]
fn claims_without_a_class_write_the_bytes_of_format_1() {
    let server = RedisServer::start().expect("a server of our own");
    let mut scripts = InFlightScripts::new(&server);
    for number in 1..60u64 {
        let now = START + number * 30_000;
        let (in_use, wanted) = ((number % 4) as u32, (number * 7 % 5) as u32);
        let claim = claim_of(number % 3, number, in_use, wanted);
        let before = scripts.run("before", &claim, true, now);
        let today = scripts.run("today", &claim, false, now);
        assert_eq!(before, today, "claim {number}");
    }
}

/// Format 1 does not know of classes. It reads a state that has some, and serves first come, first
/// served. It writes the state without classes, until their holders send their next claims.
#[test]
fn format_1_goes_on_with_slots_of_classes() {
    let server = RedisServer::start().expect("a server of our own");
    let mut scripts = InFlightScripts::new(&server);
    let of_class = |class: u32, claim: Claim| Claim {
        class,
        share: 50,
        ..claim
    };
    let mut run = |claim, is_before| scripts.run("key", &claim, is_before, START);
    let others = |number, in_use, wanted| Claim {
        granted_seen: if number > 1 { 4 } else { 0 },
        ..of_class(0, claim_of(1, number, in_use, wanted))
    };
    let web = |number, in_use, wanted| of_class(8, claim_of(2, number, in_use, wanted));
    let size = |holders: usize, batches: usize| 48 + 44 * holders + 6 * batches;

    assert_eq!(run(others(1, 0, 6), false).0, 4);
    let (granted, state) = run(web(1, 0, 2), false);
    assert_eq!((granted, state.len()), (0, size(2, 2) + 2 * 5));
    assert_eq!(state[0], 1, "the format");
    // A process with an earlier release and no class waits, too.
    let (granted, state) = run(claim_of(3, 1, 0, 1), true);
    assert_eq!((granted, state.len()), (0, size(3, 3)));
    // The classes are known again, and the web goes first.
    assert_eq!(run(web(2, 0, 2), false).0, 0);
    let (granted, state) = run(others(2, 3, 2), false);
    assert_eq!((granted, state.len()), (4, size(3, 3) + 3 * 5));
    assert_eq!(run(web(3, 0, 2), false).0, 1);
}
