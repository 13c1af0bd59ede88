//! Set quotas: the ledger of this process and the scripts decide the same while operators set and
//! unset quotas, the upstream states some, processes hear of it late, and states are lost.

use proptest::test_runner::TestRunner;

use super::history::{Mix, Step, quota, step};
use super::model::recovery::recovering_until;
use super::world::{World, quota_change};
use super::*;
use crate::limit::{Ledger, QuotaChange, is_set};
use crate::store::SetQuota;

/// How many processes have a memory of their own.
const PROCESSES: usize = 3;

/// A change before a call.
#[derive(Clone, Copy, Debug)]
struct Change {
    kind: ChangeKind,
    which: usize,
    life: Duration,
}

#[derive(Clone, Debug)]
struct QuotaStep {
    step: Step,
    /// Which process makes the call.
    process: usize,
    /// What this process changes before the call.
    change: Option<Change>,
    /// Whether the process receives the reply to the change, and that of the call.
    receives: (bool, bool),
    /// Whether the state is lost before the call.
    is_lost: bool,
}

fn a_change() -> impl Strategy<Value = Change> {
    use ChangeKind::{End, Learn, Set};
    let kind = select(vec![Set, Set, Learn, Learn, Learn, End, End]);
    let life = select(vec![1_000u64, 5_000, 60_000, 3_600_000]).prop_map(millis);
    (kind, 0usize..4, life).prop_map(|(kind, which, life)| Change { kind, which, life })
}

fn quota_step(mix: Mix) -> impl Strategy<Value = QuotaStep> {
    let parts = (
        step(mix),
        0..PROCESSES,
        prop::option::weighted(0.18, a_change()),
        (prop::bool::weighted(0.9), prop::bool::weighted(0.8)),
        prop::bool::weighted(0.02),
    );
    parts.prop_map(|(step, process, change, receives, is_lost)| QuotaStep {
        step,
        process,
        change,
        receives,
        is_lost,
    })
}

fn spec_of(quota: Quota) -> LimitSpec {
    LimitSpec::new(quota, millis(10), millis(2))
}

/// Returns the limits that a process states: those of the set quota that it knows of, or its own with
/// the version of the end.
fn stated(own: Quota, known: Option<&SetQuota>) -> Arc<LimitSpec> {
    let Some(known) = known else {
        return Arc::new(spec_of(own));
    };
    let spec = spec_of(known.quota.unwrap_or(own));
    Arc::new(spec.with_quota_version(known.version, known.life))
}

/// What changed versions so far.
#[derive(Default)]
struct Seen {
    changes: usize,
    /// Quotas that were learned again, or not because of one of an operator.
    nothing_new: usize,
    /// Ends of a learned quota after another version has ended it.
    spared: usize,
    /// Leases that a set quota decided, although the caller did not know it.
    unknown: usize,
    /// Leases of a caller with the limits of a set quota that has ended.
    outdated: usize,
    /// Calls that set a quota anew after the state was lost.
    retold: usize,
    ended: usize,
}

/// Makes a change in both. Returns the set quota.
fn change(world: &mut World, spec: &LimitSpec, kind: ChangeKind, life: Duration) -> SetQuota {
    let call = quota_change(spec, kind, life);
    let theirs = codec::read_lease(&world.run(&call)).unwrap();
    if theirs.incarnation != world.incarnation {
        (world.incarnation, world.seen) = (theirs.incarnation, theirs.now);
    }
    let raw = world.now.saturating_add_signed(world.clock);
    let steps = raw.saturating_sub(1_700_000_000_000_000) / 8_000_000;
    let change = QuotaChange {
        kind,
        life,
        above: u32::try_from(4 * steps).unwrap(),
    };
    let (now, clock) = (world.now, world.clock);
    let ledger = world.ledger.get_or_insert_with(|| Ledger::empty(now));
    ledger.align(clock, now);
    let version = ledger.change_quota(spec, change, now);
    assert!(is_set(version) || kind == ChangeKind::End);
    let ours = ledger.quota_unless(0).unwrap();
    assert_eq!(ours.version, version);
    assert!(!ours.is_learned() || kind == ChangeKind::Learn);
    let theirs = *theirs.set_quota.expect("a change is always stated");
    assert_eq!(ours, theirs);
    theirs
}

fn same_with_set_quotas(
    world: &mut World,
    own: [Quota; 2],
    others: [Quota; 3],
    steps: &[QuotaStep],
    seen: &mut Seen,
) -> Result<(), TestCaseError> {
    world.begin();
    let mut known: [Option<SetQuota>; PROCESSES] = Default::default();
    let (mut newest, mut learned) = (0, 0);
    for (number, quota_step) in steps.iter().enumerate() {
        let QuotaStep { step, process, .. } = quota_step;
        world.now += step.wait;
        if quota_step.is_lost {
            redis::cmd("DEL")
                .arg(&world.key)
                .exec(&mut world.redis)
                .unwrap();
            (world.ledger, world.incarnation, world.writes) = (None, 0, 0);
            world.unused.clear();
            // The next state begins with the server's time.
            let clock = std::mem::take(&mut world.clock);
            world.now = world.now.saturating_add_signed(clock);
            (world.seen, newest) = (world.now, 0);
        }
        let own = own[usize::from(step.uses_second_spec)];
        if let Some(Change { kind, which, life }) = quota_step.change {
            let version = match kind {
                // A process that saw this one learned ends it, and no other one.
                ChangeKind::End if which % 2 == 0 => learned,
                _ => known[*process].as_ref().map_or(0, |known| known.version),
            };
            let quota = match kind {
                ChangeKind::End => own,
                _ => *others.get(which).unwrap_or(&own),
            };
            let spec = spec_of(quota).with_quota_version(version, life);
            let told = change(world, &spec, kind, life);
            seen.changes += 1;
            let is_old = kind != ChangeKind::Set && told.version == newest;
            seen.nothing_new += usize::from(is_old && kind == ChangeKind::Learn);
            seen.spared += usize::from(is_old && kind == ChangeKind::End);
            prop_assert!(is_old || told.version > newest, "step {}", number);
            newest = told.version;
            if told.is_learned() {
                learned = told.version;
            }
            if quota_step.receives.0 {
                known[*process] = Some(told);
            }
        }
        let spec = stated(own, known[*process].as_ref());
        let returns = world.take_returns(step);
        let (ours, theirs) = world.lease(&spec, step, &returns);
        prop_assert_eq!(decided(&ours), decided(&theirs), "step {}", number);
        prop_assert_eq!(&ours.set_quota, &theirs.set_quota, "step {}", number);
        prop_assert_eq!(ours.recovering, theirs.recovering, "step {}", number);
        if spec.quota_version() > newest {
            seen.retold += 1;
            newest = spec.quota_version();
        }
        world.keep(&ours);
        let is_outdated = theirs.recovering.is_some();
        if let Some(told) = theirs.set_quota {
            prop_assert!(told.version > spec.quota_version(), "step {}", number);
            prop_assert!(told.version >= newest, "step {}", number);
            seen.ended += usize::from(told.version > newest && !is_set(told.version));
            newest = told.version;
            let is_unknown = is_set(told.version) && !theirs.grants.is_empty();
            seen.unknown += usize::from(is_unknown);
            if quota_step.receives.1 {
                known[*process] = Some(*told);
            }
        }
        seen.outdated += usize::from(is_outdated);
        world.forget_what_redis_does_not_keep();
        if number % 3 == 2 && !is_outdated {
            let (ours, theirs) = world.peek(&spec, step);
            let ttl = world.ttl;
            // Times to live follow the real clock of the server, which this test does not set.
            let has_jumped = steps[..=number].iter().any(|step| step.step.clock != 0);
            let left = ours.set_quota.as_ref().map(|quota| quota.left.as_millis());
            prop_assert!(
                has_jumped || left.is_none_or(|left| u128::try_from(ttl).unwrap() >= left)
            );
            prop_assert_eq!(ours, theirs, "peek at step {}", number);
            if let Some(version) = world.set_quota_version().filter(|version| is_set(*version)) {
                let end = spec_of(own).with_quota_version(version + 1, millis(1000));
                let (ours, theirs) = world.peek_ahead(&Arc::new(end), step);
                prop_assert_eq!(ours, theirs, "peek ahead at step {}", number);
            }
        }
    }
    Ok(())
}

fn check_set_quotas(cases: u32, mix: Mix, length: usize) {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new((World::new(&server), Seen::default()));
    let config = ProptestConfig {
        failure_persistence: None,
        ..histories::config(cases)
    };
    let histories = (
        [quota(mix), quota(mix)],
        [quota(mix), quota(mix), quota(mix)],
        prop::collection::vec(quota_step(mix), 1..length),
    );
    TestRunner::new(config)
        .run(&histories, |(own, others, steps)| {
            let (world, seen) = &mut *world.borrow_mut();
            same_with_set_quotas(world, own, others, &steps, seen)
        })
        .unwrap_or_else(|error| panic!("{error}"));
    let Seen {
        changes,
        nothing_new,
        spared,
        unknown,
        outdated,
        retold,
        ended,
    } = world.into_inner().1;
    let counts = [changes, nothing_new, spared, unknown, outdated, retold];
    assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    // Plain calls follow each other at once, so they renew each set quota.
    assert_eq!(ended > 10, !matches!(mix, Mix::Plain), "{ended}");
}

#[test]
fn memory_and_redis_set_quotas_alike() {
    check_set_quotas(200, Mix::Any, 60);
}

#[test]
fn memory_and_redis_set_quotas_of_later_use_alike() {
    check_set_quotas(50, Mix::LaterUse, 80);
}

#[test]
fn memory_and_redis_set_quotas_of_plain_calls_alike() {
    check_set_quotas(63, Mix::Plain, 120);
}

#[test]
fn set_quotas_without_limits_are_errors() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = spec_of(Quota::in_flight(3));
    let error = world
        .try_run(&quota_change(&spec, ChangeKind::Set, millis(1000)))
        .unwrap_err();
    assert!(error.to_string().contains("1 to 9 limits"), "{error}");
    let exists: bool = redis::cmd("EXISTS")
        .arg(&world.key)
        .query(&mut world.redis)
        .unwrap();
    assert!(!exists);
    // The end of a set quota may leave a key to limits of calls in flight.
    let end = world.run(&quota_change(&spec, ChangeKind::End, millis(1000)));
    let end = codec::read_lease(&end).unwrap().set_quota;
    assert!(end.is_some_and(|end| end.quota.is_none()));
}

/// A client in another language may send the text of the script as it is in the files. A function of
/// Lua has at most 200 local variables.
#[test]
fn scripts_with_named_constants_compile() {
    let server = RedisServer::start().expect("a server of our own");
    let mut redis = server.connect().unwrap();
    for text in [RATES, &script::joint(), script::IN_FLIGHT, script::REGISTER] {
        let loaded: redis::RedisResult<String> =
            redis::cmd("SCRIPT").arg("LOAD").arg(text).query(&mut redis);
        assert!(loaded.is_ok(), "{loaded:?}");
    }
}

/// After a loss, the state recovers for as long as permits of the set quota count, as soon as a process
/// states it.
#[test]
fn lost_states_recover_under_the_set_quota() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    let (own, set) = (Quota::per_second(10), Quota::new(700, millis(40_000)));
    for is_first in [true, false] {
        world.begin();
        let demands = [Demand::new(1, 1)];
        let first = world.run(&codec::lease(
            &lease_request(&Arc::new(spec_of(own)), &demands),
            7,
        ));
        let first = codec::read_lease(&first).unwrap();
        (world.incarnation, world.seen) = (first.incarnation, first.now);
        let session = world.memory();
        let told = change(&mut world, &spec_of(set), ChangeKind::Set, millis(60_000));
        redis::cmd("DEL")
            .arg(&world.key)
            .exec(&mut world.redis)
            .unwrap();
        let knows = stated(own, Some(&told));
        let lease = |world: &mut World, spec: &Arc<LimitSpec>, random: u64| {
            let request = LeaseRequest {
                session: ClientSession {
                    since: Duration::from_micros(world.now - session.seen),
                    ..session
                },
                ..lease_request(spec, &demands)
            };
            let reply = world.run_by_memory(codec::lease(&request, random));
            codec::read_lease(&reply).unwrap()
        };
        world.now += 300_000;
        let (made_at, mut random) = (world.now, 100);
        if !is_first {
            let reply = lease(&mut world, &Arc::new(spec_of(own)), 50);
            let until = recovering_until(made_at, own.limits());
            let left = Duration::from_micros(until - made_at);
            assert_eq!((reply.recovering, reply.set_quota), (Some(left), None));
            world.now += 1_000_000;
            random = 200;
        }
        let reply = lease(&mut world, &knows, random);
        let until = recovering_until(made_at, set.limits());
        let left = Duration::from_micros(until - world.now);
        assert_eq!((reply.recovering, reply.set_quota), (Some(left), None));
        let told_again = lease(&mut world, &Arc::new(spec_of(own)), random).set_quota;
        assert_eq!(told_again.map(|quota| quota.quota), Some(Some(set)));
    }
}
