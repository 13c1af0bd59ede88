//! Records of calls in flight and of registers are as in the first release: `tests/formats/1` has its
//! scripts.

use super::*;

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
