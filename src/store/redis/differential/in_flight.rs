//! Calls in flight: the same claims get the same slots in Redis as in memory, and the same holders
//! are notified.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use redis_server::RedisServer;

use super::super::codec::{self, HolderState};
use super::super::script::{self, IN_FLIGHT};
use super::{START, at_time_of_argument, millis};
use crate::limit::{InFlightSlots, Micros};
use crate::store::{Claim, ClientSession};

const INSTANCE: u64 = 77;

#[derive(Clone, Debug)]
struct Step {
    wait: Micros,
    holder: u64,
    /// How many slots the holder uses.
    in_use: u32,
    /// How many more slots it wants.
    wanted: u32,
    /// How many slots it was granted and does not know of.
    granted_unseen: u64,
    limit: u32,
    /// The percentage of the limit that the class of the holder has. 0 if the limit is not divided.
    share: u8,
    /// Whether the claim is an old one, sent again.
    old: bool,
}

/// Returns the class of a holder: two holders have the same one.
fn class_of(holder: u64, share: u8) -> u32 {
    if share > 0 { holder as u32 / 2 } else { 0 }
}

/// Generates claims. With `shares`, most of them state one.
fn step(shares: Vec<u8>) -> impl Strategy<Value = Step> {
    let waits = prop::sample::select(vec![0u64, 1, 5_000, 400_000, 900_000]);
    let limit = prop_oneof![8 => Just(6u32), 1 => 2u32..9];
    (
        waits,
        1u64..5,
        0u32..4,
        0u32..6,
        0u64..3,
        limit,
        prop::sample::select(shares),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |(wait, holder, in_use, wanted, granted_unseen, limit, share, old)| Step {
                wait,
                holder,
                in_use,
                wanted,
                granted_unseen,
                limit,
                share,
                old,
            },
        )
}

/// Returns the script under the time of the test. It pushes its messages to a list, and its state does not expire: it
/// would do so by the clock of the machine, which may stall.
fn script() -> redis::Script {
    let expires = ", 'PX', time_to_live)";
    let publishes = "redis.pcall('PUBLISH', ARGV[2] .. string.format('%.0f', holder.store),";
    let text = at_time_of_argument(IN_FLIGHT, 3);
    for changed in [expires, publishes] {
        assert_eq!(text.matches(changed).count(), 1, "{changed}");
    }
    let text = text.replace(expires, ")");
    let text = text.replace(publishes, "redis.pcall('RPUSH', 'messages',");
    redis::Script::new(&script::with_inlined_constants(&text))
}

type Update = (u64, u64, u64, bool);

fn of(state: HolderState, holder: u64) -> Update {
    (holder, state.number, state.granted, state.others_wait)
}

fn history(redis: &mut redis::Connection, steps: &[Step]) -> Result<(), TestCaseError> {
    let () = redis::cmd("FLUSHALL").query(redis).expect("a server");
    let (script, mut slots, mut now, mut number) = (script(), InFlightSlots::default(), START, 0);
    let mut granted = [0u64; 5];
    for step in steps {
        now += step.wait;
        number += 1;
        let number = if step.old { number / 2 } else { number };
        let granted_seen = granted[step.holder as usize].saturating_sub(step.granted_unseen);
        let Step {
            holder,
            in_use,
            wanted,
            limit,
            share,
            ..
        } = *step;
        let ttl = millis(1000);
        let claim = Claim {
            holder,
            number,
            limit,
            class: class_of(holder, share),
            share,
            in_use,
            wanted,
            granted_seen,
            ttl,
            ..Claim::NONE
        };

        let mut here: Vec<Update> = Vec::new();
        slots.claim(now, claim, |update| {
            here.push((update.id, update.number, update.granted, update.others_wait));
        });

        let call = codec::claim(&claim, number, INSTANCE, ClientSession::default(), 1);
        let answer: Vec<u8> = script
            .key("key")
            .arg(call)
            .arg("messages:")
            .arg(now)
            .invoke(redis)
            .expect("an answer");
        let answer = codec::read_claim_reply(&answer).expect("an answer that can be read");
        let messages: Vec<Vec<u8>> = redis::cmd("LRANGE")
            .arg(&["messages", "0", "-1"])
            .query(redis)
            .expect("a list");
        let () = redis::cmd("DEL")
            .arg("messages")
            .query(redis)
            .expect("a list");
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
            granted[id as usize] = total;
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
    compare(vec![0]);
}

#[test]
fn slots_of_classes_are_granted_in_redis_as_in_memory() {
    compare(vec![1, 20, 20, 50, 50, 100, 0]);
}

/// Compares histories whose claims state these shares.
fn compare(shares: Vec<u8>) {
    let server = RedisServer::start().expect("redis-server");
    let redis = std::cell::RefCell::new(server.connect().expect("a connection"));
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(75)
    };
    let mut runner = TestRunner::new(config);
    let steps = prop::collection::vec(step(shares), 1..60);
    let run = runner.run(&steps, |steps| history(&mut redis.borrow_mut(), &steps));
    run.unwrap_or_else(|error| panic!("{error}"));
}
