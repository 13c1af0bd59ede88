//! A script that reads an unknown format changes nothing, and its error names the format.

use super::*;
use crate::store::Claim;

/// A format that no script knows.
const UNKNOWN: u8 = 9;

/// Runs a script with one key and one call. The other arguments are empty.
fn run(script: &str, redis: &mut redis::Connection, call: &[u8]) -> redis::RedisResult<Vec<u8>> {
    let script = redis::Script::new(&script::with_inlined_constants(script));
    let mut invocation = script.key("key");
    invocation.arg(call).arg("").arg("").arg("").invoke(redis)
}

#[test]
fn unknown_formats_are_errors_that_name_them() {
    let server = RedisServer::start().expect("a server of our own");
    let mut redis = server.connect().expect("a connection");
    let spec = LimitSpec::new(Quota::per_second(5), millis(10), millis(2));
    let lease = codec::lease(&lease_request(&Arc::new(spec), &[Demand::new(1, 1)]), 7);
    let claim = Claim {
        limit: 4,
        in_use: 1,
        ttl: millis(10_000),
        ..Claim::NONE
    };
    let claim = codec::claim(&claim, 1, 7, ClientSession::default(), 9);
    // Format; change the register; no version was seen; the time to live.
    let ttl = 60_000_000u64.to_le_bytes();
    let change = [&[1, 1][..], &[0; 7], &ttl[..7]].concat();
    for (script, call) in [
        (RATES, lease),
        (script::IN_FLIGHT, claim),
        (script::REGISTER, change),
    ] {
        redis::cmd("DEL").arg("key").exec(&mut redis).unwrap();
        run(script, &mut redis, &call).expect("a reply");
        let unknown = [&[UNKNOWN], &call[1..]].concat();
        let of_call = run(script, &mut redis, &unknown).unwrap_err();

        let get = redis::cmd("GET").arg("key").to_owned();
        let mut state: Vec<u8> = get.query(&mut redis).unwrap();
        assert_eq!([call[0], state[0]], [1, 1], "the format");
        state[0] = UNKNOWN;
        let mut set = redis::cmd("SET");
        set.arg("key").arg(&state).exec(&mut redis).unwrap();
        let of_state = run(script, &mut redis, &call).unwrap_err();
        for error in [of_call, of_state].map(|error| error.to_string()) {
            assert!(error.contains("format 9"), "{error}");
            assert!(error.contains("this script understands 1"), "{error}");
        }
        assert_eq!(get.query::<Vec<u8>>(&mut redis).unwrap(), state);
    }
}
