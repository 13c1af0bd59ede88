//! Compares the rules of `src/limit` with their twins in Lua: the same history gets the same grants, to the microsecond.
//!
//! The scripts run in a real server, at the time that the test states.

mod formats;
mod in_flight;
mod late;
mod layout;
mod logical_clock;
mod recovery;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use redis_server::RedisServer;

use super::codec;
use super::script::{self, RATES};
use crate::key::Key;
use crate::limit::{Charge, Ledger, LimitSpec, Micros, UnusedPermits, UpstreamRemaining};
use crate::quota::Quota;
use crate::store::memory::{book, hold, usage};
use crate::store::{ClientSession, Demand, Grant, HoldState, Lease, LeaseRequest, Refusal, Usage};

const START: Micros = 1_700_000_000_000_000;

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

/// Lines of a script of today that read the server's clock.
const READS_CLOCK: &str =
    "local server_time = redis.call('TIME')\nserver_time = server_time[1] * 1000000 + server_time[2]\n";

/// Returns a script that takes the server's clock from argument `argument`. Nothing else of it changes.
fn at_time_of_argument(text: &str, argument: u32) -> String {
    assert_eq!(text.matches(READS_CLOCK).count(), 1, "a script reads the clock once");
    text.replace(READS_CLOCK, &format!("local server_time = tonumber(ARGV[{argument}])\n"))
}

/// Returns the value of a constant of `lua/layout.lua`, as it stands there.
fn literal(name: &str) -> &'static str {
    let mut constants = script::REGISTER.lines().filter_map(script::constant);
    constants.find(|(other, _)| *other == name).map(|(_, value)| value).expect("a constant of the layout")
}

/// A call that asks for `demands` now, without any memory.
fn asks<'a>(spec: &'a Arc<LimitSpec>, demands: &'a [Demand]) -> LeaseRequest<'a> {
    LeaseRequest {
        key: Key::ALL,
        spec,
        demands,
        prefetch: 0,
        latest: Duration::ZERO,
        validity: millis(10),
        prefetch_validity: millis(10),
        returns: &[],
        charges: &[],
        session: ClientSession::default(),
        hold: HoldState::default(),
        remaining: None,
    }
}

// ── random histories ────────────────────────────────────────────────────────────────────────────────────────────────

#[derive(Clone, Debug)]
struct Step {
    wait: Micros,
    demands: Vec<(u32, u32)>,
    latest: Duration,
    life: Duration,
    prefetch: u32,
    /// How many unused grants are given back, the newest or the oldest first.
    returns: usize,
    newest: bool,
    /// How many units of each such grant are given back, perhaps only a part.
    part: u64,
    /// Which of the terms are asserted.
    other_terms: bool,
    /// The hold that the caller knows of.
    held: HoldState,
    /// How the hold changes before the call.
    hold: Option<Option<HoldState>>,
    /// What the upstream stated before the call.
    left: Option<Said>,
    /// Uses without a permit: the units, and how long ago.
    charges: Vec<(u64, u64)>,
    /// By how many microseconds the clock of the server is set before the call: the wall clock, not the time of the state.
    clock: i64,
}

/// What an upstream states is left of one of the limits.
#[derive(Clone, Copy, Debug)]
struct Said {
    which: usize,
    units: u64,
    reset_in: Option<Duration>,
    steady: bool,
    ago: Duration,
    refused: u32,
    forget: bool,
    urgent: bool,
}

impl Said {
    fn of(self, spec: &LimitSpec) -> UpstreamRemaining {
        let limits = spec.quota().limits();
        let Said { which, units, reset_in, steady, ago, refused, forget, urgent } = self;
        let valid_for = millis([0, 300, 60_000][which % 3]);
        UpstreamRemaining {
            reset_in,
            steady,
            ago,
            refused,
            valid_for,
            forget,
            urgent,
            ..UpstreamRemaining::new(limits[which % limits.len()], units)
        }
    }
}

/// Which calls a history is made of.
#[derive(Clone, Copy, Debug)]
enum Mix {
    /// All kinds.
    Any,
    /// Long queues.
    LongLines,
    /// The calls of most callers: one need, of sliding windows, mostly now.
    Plain,
}

fn step(mix: Mix) -> impl Strategy<Value = Step> {
    let count = match mix {
        Mix::Any => prop_oneof![6 => 1u32..8, 1 => 20u32..200].boxed(),
        Mix::LongLines => prop_oneof![3 => 1u32..30, 1 => 100u32..900].boxed(),
        Mix::Plain => (1u32..4).boxed(),
    };
    let demand = (prop_oneof![60 => 1u32..4, 1 => 30u32..60], count);
    let (demands, waits, latest) = match mix {
        Mix::Plain => (1..2, vec![0u64, 300, 4_000, 40_000, 150_000], vec![0u64, 0, 0, 0, 500]),
        _ => (
            0..3,
            vec![0u64, 0, 1, 700, 12_000, 60_000, 210_000, 1_000_000, 6_000_000],
            vec![0u64, 100, 2000, 20_000, 100_000],
        ),
    };
    let charge =
        (select(vec![0u64, 1, 20_000, 700_000, 2_000_000, 50_000_000]), prop_oneof![0u64..50, any::<u64>()]);
    (
        select(waits),
        prop::collection::vec(demand, demands),
        select(latest).prop_map(millis),
        select(vec![1u64, 10, 10, 10, 40]).prop_map(millis),
        select(vec![0u32, 0, 0, 5, 50]),
        select(vec![0usize, 0, 0, 1, 3, 30]),
        any::<bool>(),
        1u64..4,
        prop::bool::weighted(0.1),
        (
            prop::option::weighted(0.04, held()),
            prop::option::weighted(0.04, prop::option::of(held())),
            prop::option::weighted(0.1, said()),
            prop_oneof![9 => Just(Vec::new()), 1 => prop::collection::vec(charge, 1..4)],
            prop_oneof![30 => Just(0i64), 1 => select(vec![-30_000_000i64, -900_000, 900_000, 61_000_500])],
        ),
    )
        .prop_map(
            |(
                wait,
                demands,
                latest,
                life,
                prefetch,
                returns,
                newest,
                part,
                other_terms,
                (held, hold, left, charges, clock),
            )| Step {
                wait,
                demands,
                latest,
                life,
                prefetch,
                returns,
                newest,
                part,
                other_terms,
                held: held.unwrap_or_default(),
                hold,
                left,
                charges,
                clock,
            },
        )
}

fn said() -> impl Strategy<Value = Said> {
    let units = prop_oneof![3 => 0u64..40, 1 => 0u64..3000, 1 => any::<u64>()];
    let spans = (prop::option::of(select(vec![1u64, 500, 2000, 40_000])), select(vec![0u64, 3, 700, 90_000]));
    let refused = prop_oneof![3 => Just(0u32), 2 => 1u32..20, 1 => any::<u32>()];
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.05));
    (0usize..6, units, spans, refused, flags).prop_map(
        |(which, units, (reset_in, ago), refused, (steady, urgent, forget))| {
            let (reset_in, ago) = (reset_in.map(millis), millis(ago));
            Said { which, units, reset_in, steady, ago, refused, forget, urgent }
        },
    )
}

fn held() -> impl Strategy<Value = HoldState> {
    (select(vec![0u64, 1, 30, 900, 20_000]), 0u32..3, any::<bool>())
        .prop_map(|(left, releases, cut)| HoldState { remaining: millis(left), releases, cut })
}

fn quota(mix: Mix) -> BoxedStrategy<Quota> {
    if let Mix::Plain = mix {
        let window = select(vec![100u64, 1000, 3000]).prop_map(millis);
        let one = (prop_oneof![3u32..40, 100u32..400], window)
            .prop_map(|(count, window)| Quota::new(count, window));
        return (one.clone(), prop::option::weighted(0.4, one))
            .prop_map(|(first, second)| second.map_or(first, |second| first.and(second)))
            .boxed();
    }
    let window = select(vec![100u64, 1000, 3000, 60_000]).prop_map(millis);
    let one = prop_oneof![
        3 => (3u32..40, window.clone()).prop_map(|(count, window)| Quota::new(count, window)),
        2 => (100u32..3000, window.clone()).prop_map(|(count, window)| Quota::new(count, window)),
        2 => (3u32..40, 1u32..1000, window.clone())
            .prop_map(|(capacity, count, window)| Quota::bucket(capacity).refill(count, window)),
        1 => (3u32..1_000_000_000, 1u32..1_000_000_000, window.clone())
            .prop_map(|(capacity, count, window)| Quota::bucket(capacity).refill(count, window)),
        1 => (3u32..100, window).prop_map(|(count, window)| Quota::fixed(count, window)),
        1 => (5u32..2000, 3u32..20).prop_map(|(count, burst)| Quota::per_second(count).burst(burst)),
    ];
    (one.clone(), prop::option::weighted(0.4, one))
        .prop_map(|(first, second)| second.map_or(first, |second| first.and(second)))
        .boxed()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Release {
    Format1,
    Today,
}

/// The same history in both.
struct World {
    redis: redis::Connection,
    script: redis::Script,
    /// Which release's script runs the leases.
    release: Release,
    key: String,
    ledger: Option<Ledger>,
    /// The time of the state, and by how much the server's clock is ahead of it.
    now: Micros,
    clock: i64,
    unused: Vec<UnusedPermits>,
    incarnation: u64,
    writes: u64,
    seen: Micros,
    calls: u64,
}

impl World {
    fn new(server: &RedisServer) -> Self {
        let redis = server.connect().unwrap();
        World {
            redis,
            script: redis::Script::new(&script::with_inlined_constants(&at_time_of_argument(RATES, 4))),
            release: Release::Today,
            key: "key".into(),
            ledger: None,
            now: START,
            clock: 0,
            unused: Vec::new(),
            incarnation: 0,
            writes: 0,
            seen: START,
            calls: 0,
        }
    }

    fn begin(&mut self) {
        self.calls += 1;
        self.key = format!("key {}", self.calls);
        (self.ledger, self.now, self.incarnation, self.writes, self.seen) = (None, START, 0, 0, START);
        self.clock = 0;
        self.unused.clear();
    }

    fn run(&mut self, call: &[u8]) -> Vec<u8> {
        let raw = self.now.saturating_add_signed(self.clock);
        let mut invocation = self.script.key(&self.key);
        invocation.arg(call).arg("told").arg("key").arg(raw).invoke(&mut self.redis).unwrap()
    }

    /// Runs a call that states what it knows of the time; sends it again if the script is unsure.
    fn run_by_memory(&mut self, mut call: Vec<u8>) -> Vec<u8> {
        let answer = self.run(&call);
        let Some(server_seen) = codec::read_unsure(&answer) else { return answer };
        codec::Call::ask_again(&mut call, Duration::ZERO, server_seen);
        self.run(&call)
    }

    /// Returns the ledger of the terms at the time of the state; makes one if there is none.
    fn ledger(&mut self, spec: &LimitSpec) -> &mut Ledger {
        let ledger = self.ledger.get_or_insert_with(|| Ledger::new(spec, self.now));
        ledger.align(self.clock);
        ledger.advance(spec, self.now);
        ledger
    }

    fn lease(&mut self, spec: &Arc<LimitSpec>, step: &Step, returns: &[UnusedPermits]) -> (Lease, Lease) {
        let demands: Vec<Demand> = step.demands.iter().map(|&(cost, count)| Demand { cost, count }).collect();
        let charges = step.charges.iter().map(|&(age, units)| Charge::new(Duration::from_micros(age), units));
        let charges: Vec<Charge> = charges.collect();
        let request = LeaseRequest {
            prefetch: step.prefetch,
            latest: step.latest,
            validity: step.life,
            prefetch_validity: step.life * 2,
            returns,
            charges: &charges,
            session: self.memory(),
            hold: step.held,
            remaining: step.left.map(|left| left.of(spec)),
            ..asks(spec, &demands)
        };
        self.set_hold(spec, step.hold);
        // The first call after the clock was set has to know the time.
        if step.hold.is_none() && self.incarnation != 0 {
            self.clock += step.clock;
        }
        let call = codec::lease(&request, 7);
        let theirs = match self.release {
            Release::Format1 => formats::lease_1(self, &call),
            Release::Today => self.run_by_memory(call),
        };
        let theirs = codec::read_lease(&theirs, spec.transit_slack()).unwrap();
        assert_eq!(theirs.now, self.now);
        (self.incarnation, self.writes, self.seen) = (theirs.incarnation, theirs.writes, theirs.now);
        let now = self.now;
        (book(self.ledger(spec), now, &request), theirs)
    }

    fn set_hold(&mut self, spec: &Arc<LimitSpec>, change: Option<Option<HoldState>>) {
        let Some(change) = change else { return };
        let call = change.map_or_else(|| codec::release(spec, 7), |held| codec::hold(spec, held, None, 7));
        let theirs = codec::read_lease(&self.run(&call), millis(0)).unwrap();
        if theirs.incarnation != self.incarnation {
            (self.incarnation, self.seen) = (theirs.incarnation, theirs.now);
        }
        let now = self.now;
        let ledger = self.ledger(spec);
        match change {
            Some(held) => ledger.hold_anew(hold(held, now)),
            None => ledger.release(),
        };
    }

    fn memory(&self) -> ClientSession {
        let &World { incarnation, writes, seen, now, .. } = self;
        let since = Duration::from_micros(now - seen);
        ClientSession { incarnation, writes, seen, since, ..ClientSession::default() }
    }

    fn peek(&mut self, spec: &Arc<LimitSpec>) -> (Usage, Usage) {
        let theirs = codec::read_peek(&self.run(&codec::peek(spec, 7))).unwrap();
        let ours = match &mut self.ledger {
            Some(ledger) => usage(ledger, self.now),
            None => usage(&mut Ledger::new(spec, self.now), self.now),
        };
        (ours, theirs)
    }

    /// Forgets the state here if Redis has none: a refusal may leave none, and then no limit is asserted.
    fn forget_what_redis_does_not_keep(&mut self) {
        if !redis::cmd("EXISTS").arg(&self.key).query::<bool>(&mut self.redis).unwrap() {
            (self.ledger, self.incarnation) = (None, 0);
            // The next state begins with the server's time.
            self.now = self.now.saturating_add_signed(std::mem::take(&mut self.clock));
        }
    }

    fn take_returns(&mut self, step: &Step) -> Vec<UnusedPermits> {
        let mut returns = Vec::new();
        for _ in 0..step.returns.min(self.unused.len()) {
            let index = if step.newest { self.unused.len() - 1 } else { 0 };
            let unused = &mut self.unused[index];
            let units = step.part.min(unused.units);
            unused.units -= units;
            returns.push(UnusedPermits { units, incarnation: self.incarnation, ..*unused });
            if unused.units == 0 {
                self.unused.remove(index);
            }
        }
        returns
    }

    fn keep(&mut self, lease: &Lease) {
        for &Grant { cost, count, slot, stamp, .. } in lease.grants.iter().chain(&lease.prefetched) {
            let units = u64::from(cost) * u64::from(count);
            self.unused.push(UnusedPermits { slot, stamp, units, incarnation: self.incarnation });
        }
    }
}

/// What a lease decides.
type Decided = (Vec<Grant>, Option<Grant>, Option<Refusal>, bool, u64, HoldState);

fn decided(lease: &Lease) -> Decided {
    (lease.grants.to_vec(), lease.prefetched, lease.refused, lease.external_usage, lease.free, lease.hold)
}

fn same_grants(world: &mut World, quotas: [Quota; 2], steps: &[Step]) -> Result<(), TestCaseError> {
    world.begin();
    let spec = quotas.map(|quota| Arc::new(LimitSpec::new(quota, millis(10), millis(2))));
    for (number, step) in steps.iter().enumerate() {
        world.now += step.wait;
        let spec = &spec[usize::from(step.other_terms)];
        let returns = world.take_returns(step);
        let (ours, theirs) = world.lease(spec, step, &returns);
        prop_assert_eq!(decided(&ours), decided(&theirs), "step {}", number);
        // Times to live follow the real clock of the server, which this test does not set.
        let is_set = steps[..=number].iter().any(|step| step.clock != 0);
        if number % 3 == 0 && theirs.incarnation != 0 && !is_set {
            let ttl: i64 = redis::cmd("PTTL").arg(&world.key).query(&mut world.redis).unwrap();
            let remember = i64::try_from(theirs.session_ttl.as_millis()).unwrap();
            prop_assert!(ttl == -2 || ttl >= remember, "remembered for {} ms, kept for {} ms", remember, ttl);
        }
        world.keep(&ours);
        world.forget_what_redis_does_not_keep();
        if number % 5 == 4 {
            let (ours, theirs) = world.peek(spec);
            prop_assert_eq!(ours, theirs, "peek at step {}", number);
        }
    }
    let size: usize = redis::cmd("STRLEN").arg(&world.key).query(&mut world.redis).unwrap();
    prop_assert!(size <= 4096 * quotas[0].and(quotas[1]).limits().len(), "{} bytes", size);
    let ttl: i64 = redis::cmd("PTTL").arg(&world.key).query(&mut world.redis).unwrap();
    prop_assert!(ttl > 0 || size == 0, "a state of {} bytes without a time to live", size);
    Ok(())
}

fn check(cases: u32, mix: Mix, length: usize) {
    let server = RedisServer::start().expect("a server of our own");
    let world = std::cell::RefCell::new(World::new(&server));
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let histories = ([quota(mix), quota(mix)], prop::collection::vec(step(mix), 1..length));
    TestRunner::new(config)
        .run(&histories, |(quotas, steps)| same_grants(&mut world.borrow_mut(), quotas, &steps))
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_and_redis_grant_the_same_to_the_microsecond() {
    check(1200, Mix::Any, 40);
}

#[test]
fn memory_and_redis_grant_the_same_in_long_lines() {
    check(250, Mix::LongLines, 80);
}

#[test]
fn memory_and_redis_grant_plain_calls_the_same() {
    check(400, Mix::Plain, 200);
}

/// A call that only returns permits does not know the time, so it does not change the clock. Earlier versions stopped the
/// clock then, and permits that were booked ahead were valid too early.
#[test]
fn returns_do_not_stop_the_clock() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    let spec = Arc::new(LimitSpec::new(Quota::per_second(10), millis(10), millis(2)));
    let step = Step {
        wait: 0,
        demands: vec![(1, 2)],
        latest: millis(0),
        life: millis(10),
        prefetch: 0,
        returns: 0,
        newest: false,
        part: 1,
        other_terms: false,
        held: HoldState::default(),
        hold: None,
        left: None,
        charges: Vec::new(),
        clock: 0,
    };
    for _ in 0..4 {
        // It asserts that the time is the server's.
        let (ours, theirs) = world.lease(&spec, &step, &[]);
        assert_eq!(decided(&ours), decided(&theirs));
        world.now += 100_000;
        let Grant { slot, stamp, .. } = theirs.grants[0];
        let unused = UnusedPermits { slot, stamp, units: 1, incarnation: theirs.incarnation };
        world.run(&codec::give_back(&spec, &[unused], 7));
        if let Some(ledger) = &mut world.ledger {
            ledger.advance(&spec, world.now);
            ledger.take_back(unused);
        }
        world.now += 100_000;
    }
}

/// Each process of a large fleet may assert another limit. Their calls go on, and each stays within its own limit.
#[test]
fn memory_and_redis_forget_the_same_excess_limits() {
    let server = RedisServer::start().expect("a server of our own");
    let mut world = World::new(&server);
    world.begin();
    for call in 0..120 {
        let number = call * 7 % 40;
        let quota = Quota::new(10 + number, millis(1000 + 100 * u64::from(number % 3)));
        let quota = if number % 5 == 0 {
            quota.and(Quota::bucket(10 + number).refill(3, millis(900)))
        } else {
            quota
        };
        let spec = Arc::new(LimitSpec::new(quota, millis(10), millis(2)));
        world.now += 17_000;
        let demands = [Demand { cost: 1, count: 1 }];
        let request = LeaseRequest { session: world.memory(), ..asks(&spec, &demands) };
        let theirs = codec::read_lease(&world.run_by_memory(codec::lease(&request, 7)), millis(10)).unwrap();
        (world.incarnation, world.writes, world.seen) = (theirs.incarnation, theirs.writes, theirs.now);
        let now = world.now;
        let ours = book(world.ledger(&spec), now, &request);
        assert_eq!(decided(&ours), decided(&theirs), "call {call}");
        let (ours, theirs) = world.peek(&spec);
        assert_eq!(ours, theirs, "peek after call {call}");
        assert!(ours.limits.len() <= 32, "{} limits", ours.limits.len());
        let own = quota.limits().iter().all(|own| ours.limits.iter().any(|usage| usage.limit == *own));
        assert!(own, "the limits of the caller hold");
    }
}
