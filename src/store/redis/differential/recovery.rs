//! Recovery after a lost state: the scripts grant nothing for as long as their model grants
//! nothing.

use proptest::test_runner::TestRunner;

use super::model::recovery::{
    KnownState, in_flight_recovering_until, is_charged, is_lost, recovering_until,
};
use super::*;
use crate::quota::Limit;
use crate::store::{Claim, PeekRequest};

/// What happens to the state before a call.
#[derive(Clone, Copy, Debug)]
enum Loss {
    Nothing,
    /// The server forgets it.
    Lost,
    /// The server returns to an earlier state, like a replica that lagged before a failover.
    SetBack,
}

fn loss() -> impl Strategy<Value = Loss> {
    prop_oneof![6 => Just(Loss::Nothing), 1 => Just(Loss::Lost), 1 => Just(Loss::SetBack)]
}

fn quota() -> impl Strategy<Value = Quota> {
    let window = select(vec![100u64, 1000, 59_000, 61_000, 3_600_000]).prop_map(millis);
    let one = prop_oneof![
        3 => (500u32..900, window.clone()).prop_map(|(count, window)| Quota::new(count, window)),
        1 => (500u32..900, 1u32..1000, window.clone())
            .prop_map(|(capacity, count, window)| Quota::bucket(capacity).refill(count, window)),
        1 => (500u32..900, window).prop_map(|(count, window)| Quota::fixed(count, window)),
    ];
    (one.clone(), prop::option::weighted(0.4, one))
        .prop_map(|(first, second)| second.map_or(first, |second| first.and(second)))
}

/// The state as its model has it.
#[derive(Clone, Copy, Debug)]
struct Model {
    known: KnownState,
    made_at: Micros,
    recovering_until: Micros,
}

/// Loses the state, or sets it back to what it was after the first call.
fn lose(
    world: &mut World,
    loss: Loss,
    first: &Option<(Vec<u8>, Model)>,
    model: &mut Option<Model>,
) {
    match (loss, first) {
        (Loss::Lost, _) => {
            redis::cmd("DEL")
                .arg(&world.key)
                .exec(&mut world.redis)
                .expect("an answer");
            *model = None;
        }
        (Loss::SetBack, Some((state, then))) => {
            redis::cmd("SET")
                .arg(&world.key)
                .arg(state)
                .exec(&mut world.redis)
                .expect("an answer");
            *model = Some(*then);
        }
        _ => {}
    }
}

fn recovers_as_its_twin(
    world: &mut World,
    quota: Quota,
    steps: &[(Micros, Loss, u64)],
) -> Result<(), TestCaseError> {
    world.begin();
    let spec = Arc::new(LimitSpec::new(quota, millis(10), millis(2)));
    let (mut first, mut model, mut caller): (_, Option<Model>, Option<KnownState>) =
        (None, None, None);
    for (number, &(wait, loss, granted)) in steps.iter().enumerate() {
        world.now += wait;
        lose(world, loss, &first, &mut model);
        let demands = [Demand::new(1, 1)];
        let request = LeaseRequest {
            session: ClientSession {
                granted,
                ..world.memory()
            },
            ..lease_request(&spec, &demands)
        };
        // A new state takes its incarnation from the random number of the call, which is one less.
        let random = 100 + number as u64;
        let theirs =
            codec::read_lease(&world.run_by_memory(codec::lease(&request, random - 1))).unwrap();
        prop_assert_eq!(theirs.now, world.now);

        let now = world.now;
        let mut state = model.unwrap_or(Model {
            known: KnownState {
                incarnation: random,
                writes: 0,
            },
            made_at: now,
            recovering_until: 0,
        });
        let is_recovering =
            caller.is_some_and(|known| is_lost(known, state.known.incarnation, state.known.writes));
        if is_recovering {
            if caller.is_some_and(|known| known.incarnation == state.known.incarnation) {
                (state.known.incarnation, state.made_at) = (random, now);
            }
            state.recovering_until = state
                .recovering_until
                .max(recovering_until(state.made_at, quota.limits()));
        }
        let recovering = state
            .recovering_until
            .checked_sub(now)
            .filter(|left| *left > 0);
        prop_assert_eq!(
            theirs.recovering,
            recovering.map(Duration::from_micros),
            "step {}",
            number
        );
        prop_assert_eq!(
            theirs.incarnation,
            state.known.incarnation,
            "step {}",
            number
        );
        if is_recovering && model.is_none() {
            let usage =
                codec::read_peek(&world.run(&codec::peek(&PeekRequest::new(Key::ALL, &spec), 7)))
                    .unwrap();
            for limit in usage.limits {
                if let Limit::Sliding { count, .. } = limit.limit {
                    let charged = if is_charged(limit.limit) {
                        granted.min(u64::from(count))
                    } else {
                        0
                    };
                    prop_assert_eq!(limit.used, charged, "{} at step {}", limit.limit, number);
                }
            }
        }

        state.known.writes = theirs.writes;
        model = Some(state);
        caller = Some(state.known);
        (world.incarnation, world.writes, world.seen) =
            (theirs.incarnation, theirs.writes, theirs.now);
        // A refusal may leave no state, and a caller that remembers nothing of it.
        world.forget_what_redis_does_not_keep();
        if world.incarnation == 0 {
            model = None;
            caller = None;
        } else if first.is_none() {
            let bytes: Vec<u8> = redis::cmd("GET")
                .arg(&world.key)
                .query(&mut world.redis)
                .unwrap();
            first = Some((bytes, state));
        }
    }
    Ok(())
}

#[test]
fn lost_states_recover_as_the_model_says() {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(75)
    };
    let step = (
        select(vec![0u64, 1000, 700_000, 1_600_000, 20_000_000]),
        loss(),
        0u64..2000,
    );
    TestRunner::new(config)
        .run(
            &(quota(), prop::collection::vec(step, 2..20)),
            |(quota, steps)| recovers_as_its_twin(&mut world.borrow_mut(), quota, &steps),
        )
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn lost_in_flight_states_recover_as_in_the_model() {
    let server = RedisServer::start().expect("a server of our own");
    let mut redis = server.connect().expect("a connection");
    let script = script::with_inlined_constants(&at_time_of_argument(script::IN_FLIGHT, 3));
    let script = redis::Script::new(&script);
    for (number, time_to_live) in [1u64, 1000, 2500, 30_000, 3_600_000]
        .into_iter()
        .enumerate()
    {
        let key = format!("in flight {number}");
        let claim = Claim {
            holder: 1,
            number: 1,
            limit: 3,
            wanted: 1,
            ttl: millis(time_to_live),
            ..Claim::NONE
        };
        let mut run = |now: Micros, memory: ClientSession, random: u64| {
            let call = codec::claim(&claim, random, 77, memory, random);
            let answer: Vec<u8> = script
                .key(&key)
                .arg(call)
                .arg("told:")
                .arg(now)
                .invoke(&mut redis)
                .expect("an answer");
            codec::read_claim_reply(&answer).expect("an answer that can be read")
        };
        let lost = ClientSession {
            incarnation: 5,
            writes: 1,
            ..ClientSession::default()
        };
        let until = in_flight_recovering_until(START, time_to_live * 1000);
        let first = run(START, lost, 9);
        assert_eq!(
            (first.recovering, first.state.granted),
            (Duration::from_micros(until - START), 0)
        );
        let reply = run(until - 1, ClientSession::default(), 10);
        if time_to_live >= 2500 {
            assert_eq!(
                (reply.recovering, reply.state.granted),
                (Duration::from_micros(1), 0)
            );
            let reply = run(until, ClientSession::default(), 11);
            assert_eq!((reply.recovering, reply.state.granted), (Duration::ZERO, 1));
        }
    }
}
