//! Calls in flight: the same claims get the same slots in Redis as in memory, and the same holders
//! are notified.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use redis_server::RedisServer;

use super::super::codec::{self, HolderState};
use super::super::script::{self, IN_FLIGHT};
use super::{START, at_time_of_argument, millis};
use crate::limit::{HolderClaim, InFlightSlots, Micros};
use crate::store::{Claim, ClientSession};

const INSTANCE: u64 = 77;

#[derive(Clone, Debug)]
struct Step {
    wait: Micros,
    holder: u64,
    sits: u32,
    wants: u32,
    /// How many slots it was granted and does not know of.
    unheard: u64,
    most: u32,
    /// Whether the claim is an old one, sent again.
    old: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let waits = prop::sample::select(vec![0u64, 1, 5_000, 400_000, 900_000]);
    let most = prop_oneof![8 => Just(6u32), 1 => 2u32..9];
    (
        waits,
        1u64..5,
        0u32..4,
        0u32..6,
        0u64..3,
        most,
        prop::bool::weighted(0.1),
    )
        .prop_map(|(wait, holder, sits, wants, unheard, most, old)| Step {
            wait,
            holder,
            sits,
            wants,
            unheard,
            most,
            old,
        })
}

/// Returns the script under the time of the test. It pushes its messages to a list.
fn script() -> redis::Script {
    let publishes = "redis.pcall('PUBLISH', ARGV[2] .. string.format('%.0f', holder.store),";
    let text = at_time_of_argument(IN_FLIGHT, 3);
    assert_eq!(text.matches(publishes).count(), 1);
    let text = text.replace(publishes, "redis.pcall('RPUSH', 'told',");
    redis::Script::new(&script::with_inlined_constants(&text))
}

type Update = (u64, u64, u64, bool);

fn of(state: HolderState, holder: u64) -> Update {
    (holder, state.number, state.granted, state.others_wait)
}

fn history(redis: &mut redis::Connection, steps: &[Step]) -> Result<(), TestCaseError> {
    let () = redis::cmd("FLUSHALL").query(redis).expect("a server");
    let (script, mut slots, mut now, mut number) = (script(), InFlightSlots::default(), START, 0);
    let mut given = [0u64; 5];
    for step in steps {
        now += step.wait;
        number += 1;
        let number = if step.old { number / 2 } else { number };
        let heard = given[step.holder as usize].saturating_sub(step.unheard);
        let Step {
            holder,
            sits,
            wants,
            most,
            ..
        } = *step;
        let life = millis(1000);
        let claim = Claim {
            holder,
            number,
            limit: most,
            in_use: sits,
            wanted: wants,
            granted_seen: heard,
            ttl: life,
            ..Claim::NONE
        };

        let mut here: Vec<Update> = Vec::new();
        let claimed = HolderClaim {
            id: holder,
            number,
            limit: most,
            in_use: sits,
            wanted: wants,
            granted_seen: heard,
            ttl: 1_000_000,
        };
        slots.claim(now, claimed, |update| {
            here.push((update.id, update.number, update.granted, update.others_wait));
        });

        let call = codec::claim(&claim, number, INSTANCE, ClientSession::default(), 1);
        let answer: Vec<u8> = script
            .key("key")
            .arg(call)
            .arg("told:")
            .arg(now)
            .invoke(redis)
            .expect("an answer");
        let answer = codec::read_claim_reply(&answer).expect("an answer that can be read");
        let messages: Vec<Vec<u8>> = redis::cmd("LRANGE")
            .arg(&["told", "0", "-1"])
            .query(redis)
            .expect("a list");
        let () = redis::cmd("DEL").arg("told").query(redis).expect("a list");
        let mut there = vec![of(answer.state, holder)];
        for message in messages {
            let (id, state) =
                codec::read_holder_message(&message).expect("a message that can be read");
            there.push(of(state, id));
        }
        here.sort_unstable();
        there.sort_unstable();
        prop_assert_eq!(&here, &there);
        for (id, _, total, _) in here {
            given[id as usize] = total;
        }
        let peek = codec::peek_in_flight(6, 1);
        let peeked: Vec<u8> = script
            .key("key")
            .arg(peek)
            .arg("")
            .arg(now)
            .invoke(redis)
            .expect("an answer");
        prop_assert_eq!(
            codec::read_peek_in_flight(&peeked).expect("two numbers"),
            slots.usage(6)
        );
    }
    Ok(())
}

#[test]
fn slots_are_granted_in_redis_as_in_memory() {
    let server = RedisServer::start().expect("redis-server");
    let redis = std::cell::RefCell::new(server.connect().expect("a connection"));
    let config = ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    let steps = prop::collection::vec(step(), 1..60);
    let run = runner.run(&steps, |steps| history(&mut redis.borrow_mut(), &steps));
    run.unwrap_or_else(|error| panic!("{error}"));
}
