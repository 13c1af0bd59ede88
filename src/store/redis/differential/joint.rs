//! Joint requests: one script over several keys grants what calls for the single keys would grant
//! at the first common moment, and leaves their states as these calls would.

use super::history::{Mix, Step, quota, step};
use super::world::{World, hold_change, quota_change};
use super::*;

/// The keys of a history. Those of `joint` get joint requests. Those of `alone` get calls for
/// single keys instead, and everything else is the same.
struct Keys {
    joint: Vec<String>,
    alone: Vec<String>,
    specs: Vec<Arc<LimitSpec>>,
    /// What was granted and not given back.
    unused: Vec<Vec<UnusedPermits>>,
    sessions: Vec<ClientSession>,
    script: redis::Script,
}

/// A part of a joint request.
struct Part<'a> {
    key: usize,
    cost: u32,
    step: &'a Step,
    returns: Vec<UnusedPermits>,
    charges: Vec<Charge>,
}

/// How the calls for the single keys end.
enum Found {
    /// All keys grant at this moment, which the last of these keys moved.
    Common(Duration, Option<usize>),
    /// This part does not grant.
    Not(usize),
}

fn joint_script() -> redis::Script {
    let text = at_time_of_argument(&script::joint(), "#KEYS + 1");
    redis::Script::new(&script::with_inlined_constants(&text))
}

impl Keys {
    fn new(world: &mut World, quotas: &[Quota]) -> Self {
        world.begin();
        let names = |which| {
            let name = |key| format!("{} {which} {key}", world.key);
            (0..quotas.len()).map(name).collect()
        };
        let spec = |quota: &Quota| Arc::new(LimitSpec::new(*quota, millis(10), millis(2)));
        Keys {
            joint: names("joint"),
            alone: names("alone"),
            specs: quotas.iter().map(spec).collect(),
            unused: vec![Vec::new(); quotas.len()],
            sessions: vec![ClientSession::default(); quotas.len()],
            script: joint_script(),
        }
    }

    /// Returns the call of a part for a permit that is of use from `earliest` on, or for none.
    fn call(&self, world: &World, part: &Part<'_>, earliest: Option<Duration>) -> Vec<u8> {
        let spec = &self.specs[part.key];
        let demands: Vec<Demand> = earliest
            .map(|earliest| Demand::new(part.cost, 1).earliest(earliest))
            .into_iter()
            .collect();
        let session = self.sessions[part.key];
        let since = Duration::from_micros(world.now.saturating_sub(session.seen));
        let request = LeaseRequest {
            prefetch: if earliest == Some(Duration::ZERO) {
                part.step.prefetch
            } else {
                0
            },
            latest: part.step.earliest + part.step.latest,
            validity: part.step.life,
            returns: &part.returns,
            charges: &part.charges,
            hold: part.step.held,
            remaining: part.step.left.map(|left| UpstreamRemaining {
                urgent: false,
                ..left.of(spec)
            }),
            session: ClientSession { since, ..session },
            ..lease_request(spec, &demands)
        };
        codec::lease(&request, 7)
    }

    fn run(&self, world: &mut World, name: &str, call: &[u8]) -> Vec<u8> {
        world.key = name.to_owned();
        world.run(call)
    }

    /// Runs a call on a copy of a state.
    fn try_out(&self, world: &mut World, name: &str, call: &[u8]) -> Vec<u8> {
        redis::pipe()
            .del("copy")
            .cmd("COPY")
            .arg(name)
            .arg("copy")
            .exec(&mut world.redis)
            .unwrap();
        self.run(world, "copy", call)
    }

    fn run_joint(&self, world: &mut World, parts: &[Part<'_>]) -> Vec<u8> {
        let mut invocation = self.script.prepare_invoke();
        for part in parts {
            invocation.key(&self.joint[part.key]);
            invocation.arg(self.call(world, part, Some(part.step.earliest)));
        }
        invocation.arg(world.now.saturating_add_signed(world.clock));
        let replies = invocation.invoke(&mut world.redis).unwrap();
        parts
            .iter()
            .for_each(|part| world.persist(&self.joint[part.key]));
        replies
    }

    /// Looks for the first common moment of the parts in this order, by calls on copies.
    /// Returns from when on each part was asked last.
    fn find(
        &self,
        world: &mut World,
        parts: &[Part<'_>],
        order: &[usize],
    ) -> (Found, Vec<Duration>) {
        let mut moment = parts.iter().map(|part| part.step.earliest).max().unwrap();
        let (mut last, mut agreed) = (None, 0);
        let mut asked = vec![moment; parts.len()];
        let mut waits = vec![None; parts.len()];
        for &index in order.iter().cycle() {
            if agreed == parts.len() {
                break;
            }
            let part = &parts[index];
            if waits[index] == Some(moment) {
                agreed += 1;
                continue;
            }
            asked[index] = moment;
            let call = self.call(world, part, Some(moment));
            let reply = self.try_out(world, &self.alone[part.key], &call);
            let lease = codec::read_lease(&reply).unwrap();
            let Some(grant) = lease.grants.first() else {
                return (Found::Not(index), asked);
            };
            waits[index] = Some(grant.wait);
            if grant.wait > moment {
                (moment, last, agreed) = (grant.wait, Some(index), 0);
            }
            agreed += 1;
        }
        (Found::Common(moment, last), asked)
    }

    fn bytes(&self, world: &mut World, name: &str) -> Vec<u8> {
        redis::cmd("GET").arg(name).query(&mut world.redis).unwrap()
    }

    /// Asserts that both states of each key are the same, without the moment of their expiry.
    fn assert_same_states(&self, world: &mut World) -> Result<(), TestCaseError> {
        for (joint, alone) in self.joint.iter().zip(&self.alone) {
            let states = [joint, alone].map(|name| self.bytes(world, name));
            prop_assert_eq!(&states[0], &states[1], "the states of {}", joint);
        }
        Ok(())
    }

    fn remember(&mut self, key: usize, lease: &Lease) {
        self.sessions[key] = ClientSession {
            incarnation: lease.incarnation,
            writes: lease.writes,
            seen: lease.now,
            ..ClientSession::default()
        };
        self.unused[key].extend(lease.unused());
    }

    /// Takes permits to give back, as the step says.
    fn take_returns(&mut self, key: usize, step: &Step) -> Vec<UnusedPermits> {
        let unused = &mut self.unused[key];
        let count = step.returns.min(unused.len());
        let from = if step.newest { unused.len() - count } else { 0 };
        unused.drain(from..from + count).collect()
    }
}

/// Runs one step as a call for a single key.
fn step_alone(world: &mut World, keys: &mut Keys, key: usize, step: &Step) {
    let spec = keys.specs[key].clone();
    let demands: Vec<Demand> = step
        .demands
        .iter()
        .map(|&(cost, count)| Demand::new(cost, count).earliest(step.earliest))
        .collect();
    let returns = keys.take_returns(key, step);
    let request = LeaseRequest {
        latest: step.earliest + step.latest,
        validity: step.life,
        returns: &returns,
        ..lease_request(&spec, &demands)
    };
    let call = match step.hold {
        Some(hold) => codec::change(&spec, hold_change(hold), 7),
        None => codec::lease(&request, 7),
    };
    for name in [keys.joint[key].clone(), keys.alone[key].clone()] {
        let reply = keys.run(world, &name, &call);
        if name == keys.alone[key] {
            let lease = codec::read_lease(&reply).unwrap();
            keys.remember(key, &lease);
        }
    }
}

/// What an operator does with the set quota of a key, and whether the process receives the reply.
#[derive(Clone, Copy, Debug)]
struct Change {
    key: usize,
    /// Sets the quota of another key, or else ends the set quota.
    sets: Option<usize>,
    is_learned: bool,
    receives: bool,
}

/// Changes the set quota of a key.
fn change(world: &mut World, keys: &mut Keys, quotas: &[Quota], change: Change) {
    let key = change.key % quotas.len();
    let life = millis(60_000);
    let spec = |quota: Quota| LimitSpec::new(quota, millis(10), millis(2));
    let (kind, quota) = match change.sets {
        Some(which) if change.is_learned => (ChangeKind::Learn, quotas[which % quotas.len()]),
        Some(which) => (ChangeKind::Set, quotas[which % quotas.len()]),
        None => (ChangeKind::End, quotas[key]),
    };
    let call = quota_change(&spec(quota), kind, life);
    for name in [keys.joint[key].clone(), keys.alone[key].clone()] {
        let reply = keys.run(world, &name, &call);
        let lease = codec::read_lease(&reply).unwrap();
        let told = lease.set_quota.expect("a change is always stated");
        if change.receives {
            let spec = spec(told.quota.unwrap_or(quotas[key]));
            keys.specs[key] = Arc::new(spec.with_quota_version(told.version, told.life));
        }
    }
}

/// Runs one step as a joint request. `costs` has the cost for each key, 0 for a key that takes no
/// part. Returns whether it was granted later than its other demands ask.
fn step_jointly(
    world: &mut World,
    keys: &mut Keys,
    costs: &[u32],
    step: &Step,
) -> Result<bool, TestCaseError> {
    let charges = step.charges.iter();
    let charges = charges.map(|&(age, units)| Charge::new(Duration::from_micros(age), units));
    let charges: Vec<Charge> = charges.collect();
    let takes_part = |key: &usize| costs[*key] > 0;
    let parts: Vec<Part<'_>> = (0..keys.specs.len())
        .filter(takes_part)
        .map(|key| Part {
            key,
            cost: costs[key],
            step,
            returns: keys.take_returns(key, step),
            charges: charges.clone(),
        })
        .collect();
    if parts.is_empty() {
        return Ok(false);
    }
    let order: Vec<usize> = (0..parts.len()).collect();
    let (found, asked) = keys.find(world, &parts, &order);
    if let Found::Common(moment, _) = found {
        let backwards: Vec<usize> = order.iter().rev().copied().collect();
        let (Found::Common(other, _), _) = keys.find(world, &parts, &backwards) else {
            return Err(TestCaseError::fail("another order finds no moment"));
        };
        prop_assert_eq!(
            moment,
            other,
            "it is the first moment, so the order does not matter"
        );
    }
    let reply = keys.run_joint(world, &parts);
    let replies = codec::read_joint(&reply, parts.len()).unwrap();
    for (index, (part, reply)) in parts.iter().zip(replies).enumerate() {
        let is_undecided = matches!(found, Found::Not(failed) if failed != index);
        let call = keys.call(world, part, (!is_undecided).then_some(asked[index]));
        let name = keys.alone[part.key].clone();
        let alone = keys.run(world, &name, &call);
        let alone = codec::read_lease(&alone).unwrap();
        let joint = codec::read_lease(&reply.unwrap()).unwrap();
        prop_assert_eq!(decided(&joint), decided(&alone), "part {}", index);
        prop_assert_eq!(&joint.set_quota, &alone.set_quota, "part {}", index);
        let is_last = matches!(found, Found::Common(_, Some(last)) if last == index);
        prop_assert_eq!(joint.is_last, is_last, "part {}", index);
        if is_undecided {
            prop_assert_eq!(joint.recovering, Some(Duration::ZERO));
        } else {
            prop_assert_eq!(joint.recovering, alone.recovering);
        }
        keys.remember(part.key, &joint);
    }
    keys.assert_same_states(world)?;
    Ok(matches!(found, Found::Common(_, Some(_))))
}

#[test]
fn joint_requests_are_calls_at_the_first_common_moment() {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig {
        cases: 80,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let cost = prop_oneof![1 => Just(0u32), 4 => 1u32..3, 1 => 3u32..40];
    let sets = prop::option::weighted(0.6, 0usize..4);
    let change_of = (0usize..4, sets, any::<bool>(), any::<bool>());
    let change_of = change_of.prop_map(|(key, sets, is_learned, receives)| Change {
        key,
        sets,
        is_learned,
        receives,
    });
    let steps = (
        step(Mix::LaterUse),
        0usize..4,
        prop::option::weighted(0.1, change_of),
        prop::option::weighted(0.6, prop::collection::vec(cost, 4)),
    );
    let histories = (
        prop::collection::vec(quota(Mix::LaterUse), 2..=4),
        prop::collection::vec(steps, 1..40),
    );
    let later = std::cell::Cell::new(0);
    TestRunner::new(config)
        .run(&histories, |(quotas, steps)| {
            let world = &mut *world.borrow_mut();
            let mut keys = Keys::new(world, &quotas);
            for (step, key, operator, costs) in &steps {
                world.now += step.wait;
                if let Some(operator) = operator {
                    change(world, &mut keys, &quotas, *operator);
                }
                match costs {
                    Some(costs) => {
                        let is_later = step_jointly(world, &mut keys, costs, step)?;
                        later.set(later.get() + usize::from(is_later));
                    }
                    None => step_alone(world, &mut keys, key % quotas.len(), step),
                }
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(later.get() > 25, "only {} were granted later", later.get());
}
