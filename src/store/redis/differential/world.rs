//! The same history in the ledger of this process and in Redis.

use std::sync::Arc;
use std::time::Duration;

use redis_server::RedisServer;

use super::history::Step;
use super::{RATES, START, at_time_of_argument, codec, lease_request, script};
use crate::key::Key;
use crate::limit::{ChangeKind, Charge, Ledger, LimitSpec, Micros, UnusedPermits};
use crate::store::memory::{book, hold, usage};
use crate::store::{
    Change, ClientSession, Demand, HoldState, Lease, LeaseRequest, PeekRequest, Usage,
};

/// The same history in both.
pub(super) struct World {
    pub(super) redis: redis::Connection,
    pub(super) script: redis::Script,
    pub(super) key: String,
    pub(super) ledger: Option<Ledger>,
    /// The time of the state, and by how much the server's clock is ahead of it.
    pub(super) now: Micros,
    pub(super) clock: i64,
    pub(super) unused: Vec<UnusedPermits>,
    pub(super) incarnation: u64,
    pub(super) writes: u64,
    pub(super) seen: Micros,
    pub(super) calls: u64,
    /// The time to live that a call has given the state last, in milliseconds. The state itself does not
    /// expire: it would do so by the clock of the machine, which may stall.
    pub(super) ttl: i64,
}

/// Packs a change of the set quota.
pub(super) fn quota_change(spec: &LimitSpec, kind: ChangeKind, life: Duration) -> Vec<u8> {
    codec::change(&Arc::new(spec.clone()), Change::Quota { kind, life }, 7)
}

/// Returns the change to this hold, or to none.
pub(super) fn hold_change(hold: Option<HoldState>) -> Change {
    let remaining = None;
    hold.map_or(Change::Release, |hold| Change::Hold { hold, remaining })
}

impl World {
    pub(super) fn new(server: &RedisServer) -> Self {
        let redis = server.connect().unwrap();
        World {
            redis,
            script: redis::Script::new(&script::with_inlined_constants(&at_time_of_argument(
                RATES, 4,
            ))),
            key: "key".into(),
            ledger: None,
            now: START,
            clock: 0,
            unused: Vec::new(),
            incarnation: 0,
            writes: 0,
            seen: START,
            calls: 0,
            ttl: 0,
        }
    }

    pub(super) fn begin(&mut self) {
        self.calls += 1;
        self.key = format!("key {}", self.calls);
        (
            self.ledger,
            self.now,
            self.incarnation,
            self.writes,
            self.seen,
        ) = (None, START, 0, 0, START);
        (self.clock, self.ttl) = (0, 0);
        self.unused.clear();
    }

    pub(super) fn run(&mut self, call: &[u8]) -> Vec<u8> {
        self.try_run(call).unwrap()
    }

    pub(super) fn try_run(&mut self, call: &[u8]) -> redis::RedisResult<Vec<u8>> {
        let raw = self.now.saturating_add_signed(self.clock);
        let mut invocation = self.script.key(&self.key);
        let answer = invocation
            .arg(call)
            .arg("told")
            .arg("key")
            .arg(raw)
            .invoke(&mut self.redis);
        let (ttl, _): (i64, bool) = redis::pipe()
            .pttl(&self.key)
            .persist(&self.key)
            .query(&mut self.redis)?;
        if ttl > 0 {
            self.ttl = ttl;
        }
        answer
    }

    /// Keeps a state that would expire by the clock of the machine, which may stall.
    pub(super) fn persist(&mut self, key: &str) {
        let () = redis::cmd("PERSIST")
            .arg(key)
            .query(&mut self.redis)
            .unwrap();
    }

    /// Runs a call that states what it knows of the time; sends it again if the script is unsure.
    pub(super) fn run_by_memory(&mut self, mut call: Vec<u8>) -> Vec<u8> {
        let answer = self.run(&call);
        let Some(server_seen) = codec::read_unsure(&answer) else {
            return answer;
        };
        codec::set_server_time(&mut call, Duration::ZERO, server_seen);
        self.run(&call)
    }

    /// Returns the ledger at the time of the state. Makes one with the limits of `spec` if there is
    /// none.
    pub(super) fn ledger(&mut self, spec: &LimitSpec) -> &mut Ledger {
        let ledger = self
            .ledger
            .get_or_insert_with(|| Ledger::new(spec, self.now));
        ledger.align(self.clock, self.now);
        ledger.advance(spec, self.now);
        ledger
    }

    pub(super) fn lease(
        &mut self,
        spec: &Arc<LimitSpec>,
        step: &Step,
        returns: &[UnusedPermits],
    ) -> (Lease, Lease) {
        // The caller knows the state that the hold has made.
        self.set_hold(spec, step.hold);
        // The first call after the clock was set has to know the time.
        if step.hold.is_none() && self.incarnation != 0 {
            self.clock += step.clock;
        }
        let demands: Vec<Demand> = step
            .demands
            .iter()
            .map(|&(cost, count)| Demand::new(cost, count).earliest(step.earliest))
            .collect();
        let charges = step
            .charges
            .iter()
            .map(|&(age, units)| Charge::new(Duration::from_micros(age), units));
        let charges: Vec<Charge> = charges.collect();
        let request = LeaseRequest {
            prefetch: step.prefetch,
            latest: step.earliest + step.latest,
            validity: step.life,
            prefetch_validity: step.life * 2,
            returns,
            charges: &charges,
            session: self.memory(),
            hold: step.held,
            remaining: step.left.map(|left| left.of(spec)),
            borrows: step.borrows,
            ..lease_request(spec, &demands)
        };
        let call = codec::lease(&request, 7);
        let theirs = self.run_by_memory(call);
        let theirs = codec::read_lease(&theirs).unwrap();
        assert_eq!(theirs.now, self.now);
        (self.incarnation, self.writes, self.seen) =
            (theirs.incarnation, theirs.writes, theirs.now);
        let now = self.now;
        (book(self.ledger(spec), now, &request), theirs)
    }

    pub(super) fn set_hold(&mut self, spec: &Arc<LimitSpec>, change: Option<Option<HoldState>>) {
        let Some(change) = change else { return };
        let call = codec::change(spec, hold_change(change), 7);
        let theirs = codec::read_lease(&self.run(&call)).unwrap();
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

    pub(super) fn memory(&self) -> ClientSession {
        let &World {
            incarnation,
            writes,
            seen,
            now,
            ..
        } = self;
        let since = Duration::from_micros(now - seen);
        ClientSession {
            incarnation,
            writes,
            seen,
            since,
            ..ClientSession::default()
        }
    }

    /// Asks about a request like those of `step`, behind all of its demands.
    pub(super) fn peek(&mut self, spec: &Arc<LimitSpec>, step: &Step) -> (Usage, Usage) {
        let request = World::question(spec, step);
        let theirs = codec::read_peek(&self.run(&codec::peek(&request, 7))).unwrap();
        let ours = match &mut self.ledger {
            Some(ledger) => usage(ledger, spec, &request, self.now),
            None => usage(&mut Ledger::new(spec, self.now), spec, &request, self.now),
        };
        (ours, theirs)
    }

    /// Returns the version of the set quota, or of its end.
    pub(super) fn set_quota_version(&self) -> Option<u32> {
        self.ledger.as_ref().map(Ledger::quota_version)
    }

    /// Reads the state under a newer version of the set quota, which changes it in neither.
    pub(super) fn peek_ahead(&mut self, spec: &Arc<LimitSpec>, step: &Step) -> (Usage, Usage) {
        let ledger = self.ledger.clone();
        if let Some(ledger) = &mut self.ledger {
            ledger.align(self.clock, self.now);
            ledger.advance(spec, self.now);
        }
        let both = self.peek(spec, step);
        self.ledger = ledger;
        both
    }

    fn question(spec: &Arc<LimitSpec>, step: &Step) -> PeekRequest {
        let demands = step.demands.iter();
        PeekRequest {
            cost: step.demands.last().map_or(1, |&(cost, _)| cost),
            validity: step.life,
            ahead: demands
                .map(|&(cost, count)| Demand::new(cost, count))
                .collect(),
            ..PeekRequest::new(Key::ALL, spec)
        }
    }

    /// Forgets the state here if Redis has none. A refusal may leave no state, and then no
    /// statement of a limit is recorded.
    pub(super) fn forget_what_redis_does_not_keep(&mut self) {
        if !redis::cmd("EXISTS")
            .arg(&self.key)
            .query::<bool>(&mut self.redis)
            .unwrap()
        {
            (self.ledger, self.incarnation) = (None, 0);
            // The next state begins with the server's time.
            self.now = self
                .now
                .saturating_add_signed(std::mem::take(&mut self.clock));
        }
    }

    pub(super) fn take_returns(&mut self, step: &Step) -> Vec<UnusedPermits> {
        let mut returns = Vec::new();
        for _ in 0..step.returns.min(self.unused.len()) {
            let index = if step.newest {
                self.unused.len() - 1
            } else {
                0
            };
            let unused = &mut self.unused[index];
            let units = step.part.min(unused.units);
            unused.units -= units;
            returns.push(UnusedPermits {
                units,
                incarnation: self.incarnation,
                ..*unused
            });
            if unused.units == 0 {
                self.unused.remove(index);
            }
        }
        returns
    }

    pub(super) fn keep(&mut self, lease: &Lease) {
        let grants = lease.all_grants();
        let unused = grants.map(|grant| grant.unused(self.incarnation));
        self.unused.extend(unused);
    }
}
