//! The logical clock: `lua/time.lua` returns what its model returns.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use redis_server::RedisServer;

use super::START;
use super::model::logical_clock::{Expected, logical_time};
use super::script;
use crate::limit::Micros;

/// The function of `lua/time.lua` on its own. An empty argument is nil.
fn function() -> redis::Script {
    let text = concat!(
        include_str!("../lua/layout.lua"),
        include_str!("../lua/time.lua"),
        "local function argument(i) return tonumber(ARGV[i]) end\n",
        "local now = logical_time(argument(1), argument(2), argument(3), argument(4), argument(5), argument(6), argument(7))\n",
        "return now and string.format('%.0f', now)",
    );
    redis::Script::new(&script::with_inlined_constants(text))
}

fn near(at: Micros) -> impl Strategy<Value = Micros> {
    prop_oneof![2 => Just(at), 6 => at - 600_000..at + 600_000, 1 => at - 90_000_000..at + 90_000_000]
}

fn expected() -> impl Strategy<Value = Expected> {
    let server_time = prop::option::of(near(START));
    (near(START), 0u64..100_000_000, 0u64..250_000, server_time).prop_map(
        |(time, age, on_way, server_time)| Expected {
            time,
            age,
            on_way,
            server_time,
        },
    )
}

#[test]
fn logical_time_is_the_same_in_rust_and_lua() {
    let server = RedisServer::start().expect("a server of our own");
    let redis = std::cell::RefCell::new(server.connect().expect("a connection"));
    let function = function();
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(750)
    };
    let cases = (
        near(START),
        near(START),
        prop::option::weighted(0.9, expected()),
    );
    TestRunner::new(config)
        .run(&cases, |(clock, last_write, expected)| {
            let mut invocation = function.prepare_invoke();
            invocation.arg(START).arg(clock).arg(last_write);
            match expected {
                Some(Expected {
                    time,
                    age,
                    on_way,
                    server_time,
                }) => {
                    let server_time = server_time.map_or(String::new(), |time| time.to_string());
                    invocation.arg(time).arg(age).arg(on_way).arg(server_time)
                }
                None => invocation.arg("").arg("").arg("").arg(""),
            };
            let lua: Option<Micros> = invocation
                .invoke(&mut redis.borrow_mut())
                .expect("an answer");
            prop_assert_eq!(lua, logical_time(START, clock, last_write, expected));
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
}
