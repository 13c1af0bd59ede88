//! The law of set quotas, compared with a brute-force count: from each change on, no window of a limit
//! that applies has more than it allows, with the units that were used before.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;

use super::booking::book;
use crate::key::Key;
use crate::limit::{
    ChangeKind, Charge, Ledger, LimitSpec, Micros, QuotaChange, UnusedPermits, UpstreamRemaining,
    is_learned, is_set, micros_up,
};
use crate::quota::{Limit, Quota};
use crate::store::{ClientSession, Demand, Grant, HoldState, Lease, LeaseRequest, SetQuota};

const SLACK: Micros = 10_000;
const START: Micros = 1_700_000_000_000_000;
const PROCESSES: usize = 3;

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

fn spec(quota: Quota) -> LimitSpec {
    LimitSpec::new(quota, Duration::from_micros(SLACK), millis(20))
}

#[derive(Clone, Debug)]
enum Op {
    Wait(Micros),
    /// A process books permits. `unused` of each grant are given back later, and the others are used at
    /// a share of their life, after a share of the slack. The process may miss the reply.
    Book {
        process: usize,
        own: usize,
        cost: u32,
        count: u32,
        earliest: Micros,
        patience: Micros,
        prefetch: u32,
        used_at: u8,
        jitter: u8,
        unused: u32,
        receives: bool,
    },
    /// Unused permits come back, the newest or the oldest first.
    GiveBack {
        count: usize,
        newest: bool,
    },
    /// An operator sets a quota. The process may miss the reply.
    Set {
        process: usize,
        which: usize,
        life: Duration,
        receives: bool,
    },
    Unset {
        process: usize,
        own: usize,
        receives: bool,
    },
    /// The upstream states a quota.
    Learn {
        process: usize,
        which: usize,
        life: Duration,
        receives: bool,
    },
    Charge {
        age: Micros,
        units: u64,
    },
    See {
        which: usize,
        units: u64,
    },
    /// The store loses the state of the key.
    Lose,
}

fn op() -> impl Strategy<Value = Op> {
    let waits = vec![0u64, 1, 500, 10_000, 50_000, 200_000, 1_000_000, 5_000_000];
    let later = vec![0u64, 0, 0, 0, 30_000, 700_000, 2_500_000];
    let book = (
        (0..PROCESSES, 0usize..2),
        (1u32..4, prop_oneof![4 => 1u32..12, 1 => 50u32..100]),
        select(later),
        select(vec![0u64, 100_000, 2_000_000, 20_000_000]),
        select(vec![0u32, 0, 0, 6]),
        (any::<u8>(), any::<u8>()),
        0u32..4,
        prop::bool::weighted(0.8),
    );
    prop_oneof![
        6 => select(waits).prop_map(Op::Wait),
        12 => book.prop_map(
            |((process, own), (cost, count), earliest, patience, prefetch, (used_at, jitter), unused, receives)| {
                Op::Book {
                    process, own, cost, count, earliest, patience, prefetch, used_at, jitter, unused, receives,
                }
            }
        ),
        4 => (1usize..9, any::<bool>()).prop_map(|(count, newest)| Op::GiveBack { count, newest }),
        3 => (0..PROCESSES, 0usize..3, select(vec![1u64, 4, 3600]), any::<bool>()).prop_map(
            |(process, which, life, receives)| Op::Set {
                process, which, life: Duration::from_secs(life), receives,
            }
        ),
        2 => (0..PROCESSES, 0usize..2, any::<bool>())
            .prop_map(|(process, own, receives)| Op::Unset { process, own, receives }),
        3 => (0..PROCESSES, 0usize..3, select(vec![1u64, 4, 3600]), any::<bool>()).prop_map(
            |(process, which, life, receives)| Op::Learn {
                process, which, life: Duration::from_secs(life), receives,
            }
        ),
        1 => (select(vec![0u64, 50_000, 900_000, 4_000_000]), 1u64..4)
            .prop_map(|(age, units)| Op::Charge { age, units }),
        1 => (0usize..3, 0u64..40).prop_map(|(which, units)| Op::See { which, units }),
        1 => Just(Op::Lose),
    ]
}

/// A quota. Those of a history have fixed windows or late arrivals, not both: the boundary guard is
/// for clocks that differ, and not for the slack.
fn quota(has_fixed: bool) -> BoxedStrategy<Quota> {
    let sliding = prop_oneof![
        (4u32..40, select(vec![100u64, 1000, 3000]))
            .prop_map(|(count, window)| Quota::new(count, millis(window))),
        (300u32..900, select(vec![1000u64, 3000]))
            .prop_map(|(count, window)| Quota::new(count, millis(window))),
    ];
    let bucket =
        (4u32..20, 1u32..30, select(vec![500u64, 1000])).prop_map(|(capacity, count, window)| {
            Quota::bucket(capacity).refill(count, millis(window))
        });
    let fixed = (4u32..30, select(vec![200u64, 1000]))
        .prop_map(|(count, window)| Quota::fixed(count, millis(window)));
    let one = match has_fixed {
        true => prop_oneof![2 => sliding, 1 => bucket, 2 => fixed].boxed(),
        false => prop_oneof![3 => sliding, 1 => bucket].boxed(),
    };
    (one.clone(), prop::option::weighted(0.4, one))
        .prop_map(|(first, second)| match second {
            Some(second) => first.and(second),
            None => first,
        })
        .boxed()
}

/// What a limit certainly counts of the permits before it was added.
#[derive(Clone, Copy, Debug)]
struct Knows {
    /// Those that arrived after this moment,
    arrived_after: Micros,
    /// and were booked from this one on.
    booked_from: usize,
    /// Whether that is certain. Without a set quota, a limit that a caller adds may miss permits that
    /// come back later.
    is_certain: bool,
}

/// Units that arrived, or that will.
#[derive(Clone, Debug)]
struct Use {
    slot: Micros,
    at: Micros,
    units: u64,
    /// The units were booked after those with a smaller number.
    number: usize,
    /// Whether they were used without a permit.
    is_charge: bool,
    /// The limits that applied then, with what they knew.
    limits: Vec<(Limit, Knows)>,
}

/// Permits that were not used.
#[derive(Clone, Debug)]
struct Unused {
    permits: UnusedPermits,
    /// The quota version of the ledger when they were booked.
    version: u32,
    number: usize,
    limits: Vec<(Limit, Knows)>,
}

struct World {
    own: [Quota; 2],
    others: [Quota; 3],
    is_prompt: bool,
    ledger: Ledger,
    now: Micros,
    known: [Option<SetQuota>; PROCESSES],
    newest: u32,
    limits: Vec<(Limit, Knows)>,
    uses: Vec<Use>,
    unused: Vec<Unused>,
    /// Unused permits whose slots are kept for the next callers.
    returned: Vec<Unused>,
    number: usize,
}

impl World {
    fn new(own: [Quota; 2], others: [Quota; 3], is_prompt: bool) -> Self {
        World {
            own,
            others,
            is_prompt,
            ledger: Ledger::empty(START),
            now: START,
            known: Default::default(),
            newest: 0,
            limits: Vec::new(),
            uses: Vec::new(),
            unused: Vec::new(),
            returned: Vec::new(),
            number: 0,
        }
    }

    /// Returns the limits that a process states.
    fn stated(&self, process: usize, own: usize) -> Arc<LimitSpec> {
        let own = self.own[own];
        let Some(known) = &self.known[process] else {
            return Arc::new(spec(own));
        };
        let spec = spec(known.quota.unwrap_or(own));
        Arc::new(spec.with_quota_version(known.version, known.life))
    }

    /// Notes which limits there are after a call.
    fn note_limits(&mut self) {
        let window = |limit: &Limit| micros_up(limit.window());
        let before = std::mem::take(&mut self.limits);
        let windows = before
            .iter()
            .filter(|(limit, _)| matches!(limit, Limit::Sliding { .. }));
        let longest = windows.max_by_key(|(limit, _)| limit.window()).copied();
        for limit in self.ledger.all_limits() {
            let old = before.iter().find(|(other, _)| *other == limit);
            let same_windows = before.iter().find(|(other, _)| {
                matches!((other, limit), (Limit::Fixed { .. }, Limit::Fixed { .. }))
                    && other.window() == limit.window()
            });
            let knows = match (old, limit, same_windows, longest) {
                (Some((_, knows)), ..) => *knows,
                (None, Limit::Sliding { .. }, _, Some((longest, knows))) => Knows {
                    arrived_after: knows.arrived_after.max(self.now - window(&longest)),
                    ..knows
                },
                (None, Limit::Fixed { .. }, Some((_, knows)), _) => *knows,
                // A bucket starts with what the longest window knows.
                _ => Knows {
                    arrived_after: 0,
                    booked_from: self.number,
                    is_certain: longest.is_none_or(|(_, knows)| knows.is_certain),
                },
            };
            let is_plain = old.is_none() && !before.is_empty() && !self.ledger.has_set_quota();
            let knows = Knows {
                is_certain: knows.is_certain && !is_plain,
                ..knows
            };
            self.limits.push((limit, knows));
        }
    }

    /// Returns the quota version of the ledger.
    fn version(&self) -> u32 {
        self.ledger.quota_version()
    }

    /// Takes in what a process was told.
    fn hear(&mut self, process: usize, told: Option<SetQuota>, receives: bool) {
        if let Some(told) = told {
            assert!(told.version >= self.newest, "versions go back");
            if told.version > self.newest {
                self.newest = told.version;
                self.returned.clear();
            }
            if receives {
                self.known[process] = Some(told);
            }
        }
    }

    fn change(
        &mut self,
        process: usize,
        quota: Quota,
        life: Duration,
        kind: ChangeKind,
        hears: bool,
    ) {
        // As a call finds it that changes nothing.
        let mut advanced = self.ledger.clone();
        advanced.advance(&self.last_spec(), self.now);
        let before = advanced.quota_unless(0);
        let known = self.known[process].as_ref();
        let stated = known.map_or(0, |known| known.version);
        let spec = spec(quota).with_quota_version(stated, Duration::ZERO);
        let change = QuotaChange {
            kind,
            life,
            above: 0,
        };
        let version = self.ledger.change_quota(&spec, change, self.now);
        let newest = before.as_ref().map_or(0, |before| before.version);
        let has_ended = is_learned(stated) && newest > stated && !is_learned(newest);
        let before = before.filter(|before| before.quota.is_some());
        let of_operator = before
            .as_ref()
            .is_some_and(|before| !is_learned(before.version));
        let has_same = |other: Quota| {
            let (limits, others) = (quota.limits(), other.limits());
            limits.iter().all(|limit| others.contains(limit))
                && others.iter().all(|limit| limits.contains(limit))
        };
        let is_same = before.as_ref().and_then(|before| before.quota);
        let is_same = is_same.is_some_and(has_same);
        let after = self
            .ledger
            .quota_unless(0)
            .expect("a change leaves a version");
        assert_eq!(after.version, version);
        if kind == ChangeKind::Learn && (of_operator || is_same) {
            assert_eq!(before.map(|before| before.version), Some(version));
            assert!(of_operator || after.left == after.life, "{after:?}");
        } else if kind == ChangeKind::End && has_ended {
            assert_eq!(version, newest, "only a learned quota was to end");
        } else {
            assert!(version > self.newest && is_set(version) == (kind != ChangeKind::End));
            assert_eq!(is_learned(version), kind == ChangeKind::Learn);
        }
        let told = self.ledger.quota_unless(0);
        self.note_limits();
        self.hear(process, told, hears);
        if kind != ChangeKind::End && !(kind == ChangeKind::Learn && of_operator) {
            let limits: Vec<Limit> = self.ledger.usage().map(|(limit, ..)| limit).collect();
            assert!(quota.limits().iter().all(|limit| limits.contains(limit)));
            assert!(limits.iter().all(|limit| quota.limits().contains(limit)));
        }
    }

    fn book(&mut self, spec: &Arc<LimitSpec>, request: LeaseRequest<'_>) -> Lease {
        let now = self.ledger.advance(spec, self.now);
        assert_eq!(now, self.now);
        let lease = book(&mut self.ledger, now, &request);
        self.note_limits();
        if spec.quota_version() > self.newest {
            self.newest = spec.quota_version();
            self.returned.clear();
        }
        if lease.set_quota.is_none() && self.ledger.has_set_quota() {
            let version = spec.quota_version();
            assert_eq!(self.newest, version, "the reply states another version");
        }
        lease
    }

    fn apply(&mut self, op: &Op) {
        let none = Arc::new(spec(self.own[0]));
        let idle = LeaseRequest {
            key: Key::ALL,
            spec: &none,
            demands: &[],
            prefetch: 0,
            latest: Duration::ZERO,
            validity: millis(10),
            prefetch_validity: millis(10),
            returns: &[],
            charges: &[],
            session: ClientSession::default(),
            hold: HoldState::default(),
            remaining: None,
            borrows: false,
            joint: None,
        };
        match *op {
            Op::Wait(span) => self.now += span,
            Op::Book {
                process,
                own,
                cost,
                count,
                earliest,
                patience,
                prefetch,
                used_at,
                jitter,
                unused,
                receives,
            } => {
                let spec = self.stated(process, own);
                let earliest = Duration::from_micros(earliest);
                let demands = [Demand::new(cost, count).earliest(earliest)];
                let request = LeaseRequest {
                    spec: &spec,
                    demands: &demands,
                    prefetch,
                    latest: earliest + Duration::from_micros(patience),
                    ..idle
                };
                let lease = self.book(&spec, request);
                let told = lease.set_quota.as_deref().cloned();
                if lease.recovering.is_some() {
                    let granted = lease.grants.len() + lease.prefetched.iter().len();
                    assert_eq!(granted, 0, "limits of a set quota that has ended");
                }
                let in_force = self.ledger.quota_unless(0).and_then(|told| told.quota);
                let applying: Vec<Limit> = self.ledger.usage().map(|(limit, ..)| limit).collect();
                if let Some(quota) = in_force {
                    assert!(applying.iter().all(|limit| quota.limits().contains(limit)));
                }
                self.hear(process, told, receives);
                let limits = self.limits.iter().copied();
                let limits =
                    limits.filter(|(limit, knows)| applying.contains(limit) && knows.is_certain);
                let limits: Vec<_> = limits.collect();
                for grant in lease.all_grants() {
                    self.take_permits(grant, &limits, (used_at, jitter), unused.min(grant.count));
                }
            }
            Op::GiveBack { count, newest } => {
                for _ in 0..count.min(self.unused.len()) {
                    let last = self.unused.len() - 1;
                    let unused = self.unused.remove(if newest { last } else { 0 });
                    let spec = self.last_spec();
                    self.ledger.advance(&spec, self.now);
                    self.note_limits();
                    let before = self.ledger.returned_units();
                    self.ledger.take_back(unused.permits);
                    // It is one of few that are kept.
                    if self.ledger.returned_units() > before {
                        self.returned.push(unused);
                    }
                }
            }
            Op::Set {
                process,
                which,
                life,
                receives,
            } => self.change(process, self.others[which], life, ChangeKind::Set, receives),
            Op::Learn {
                process,
                which,
                life,
                receives,
            } => self.change(
                process,
                self.others[which],
                life,
                ChangeKind::Learn,
                receives,
            ),
            Op::Unset {
                process,
                own,
                receives,
            } => self.change(
                process,
                self.own[own],
                Duration::from_secs(1),
                ChangeKind::End,
                receives,
            ),
            Op::Charge { age, units } => {
                let spec = self.last_spec();
                self.ledger.advance(&spec, self.now);
                self.note_limits();
                let charge = Charge::new(Duration::from_micros(age), units);
                self.ledger.charge(&spec, charge);
                let at = self.now - age;
                self.uses.push(Use {
                    slot: at,
                    at,
                    units,
                    number: self.number,
                    is_charge: true,
                    limits: Vec::new(),
                });
                self.number += 1;
            }
            Op::See { which, units } => {
                let spec = self.last_spec();
                self.ledger.advance(&spec, self.now);
                self.note_limits();
                let limits = self.others[which].limits();
                self.ledger
                    .see(&spec, &UpstreamRemaining::new(limits[0], units));
            }
            Op::Lose => {
                self.ledger = Ledger::empty(self.now);
                self.newest = 0;
                self.limits.clear();
                self.uses.clear();
                self.unused.clear();
                self.returned.clear();
            }
        }
    }

    /// Returns the limits of a process that has heard of everything.
    fn last_spec(&self) -> Arc<LimitSpec> {
        let quota = self.ledger.quota_unless(0);
        let Some(quota) = quota else {
            return Arc::new(spec(self.own[0]));
        };
        let spec = spec(quota.quota.unwrap_or(self.own[0]));
        Arc::new(spec.with_quota_version(quota.version, quota.life))
    }

    /// Uses the permits of a grant, except for `unused` of them.
    fn take_permits(
        &mut self,
        grant: &Grant,
        limits: &[(Limit, Knows)],
        (used_at, jitter): (u8, u8),
        unused: u32,
    ) {
        let life = grant.stamp - SLACK - grant.slot;
        let late = life.saturating_sub(1) * u64::from(used_at) / 255;
        let way = if self.is_prompt { 0 } else { SLACK };
        let at = grant.slot + late + way * u64::from(jitter) / 255;
        let cost = u64::from(grant.cost);
        let mut used = cost * u64::from(grant.count - unused);
        for mut part in self.parts(grant, limits) {
            let units = part.permits.units.min(used);
            used -= units;
            part.permits.units -= units;
            if units > 0 {
                self.uses.push(Use {
                    slot: grant.slot,
                    at,
                    units,
                    number: part.number,
                    is_charge: false,
                    limits: part.limits.clone(),
                });
            }
            if part.permits.units > 0 {
                self.unused.push(part);
            }
        }
    }

    /// Returns the permits of a grant. Each part has the number with which it was booked first, and the
    /// limits that allowed it then: a slot that came back may be granted again.
    fn parts(&mut self, grant: &Grant, limits: &[(Limit, Knows)]) -> Vec<Unused> {
        let version = self.version();
        let mut new = Unused {
            permits: grant.unused(0),
            version,
            number: self.number,
            limits: limits.to_vec(),
        };
        self.number += 1;
        let is_same = |earlier: &Unused| {
            let permits = earlier.permits;
            (permits.slot, permits.stamp) == (grant.slot, grant.stamp) && earlier.version == version
        };
        let returned = self.returned.iter().filter(|earlier| is_same(earlier));
        let returned: u64 = returned.map(|earlier| earlier.permits.units).sum();
        // Units of several bookings may make one permit, but none is made of these and of new units.
        let mut left = returned - returned % u64::from(grant.cost);
        let mut parts = Vec::new();
        for earlier in self.returned.iter_mut().filter(|earlier| is_same(earlier)) {
            let units = earlier.permits.units.min(new.permits.units).min(left);
            left -= units;
            earlier.permits.units -= units;
            new.permits.units -= units;
            parts.push(Unused {
                permits: UnusedPermits {
                    units,
                    ..earlier.permits
                },
                ..earlier.clone()
            });
        }
        parts.push(new);
        parts
    }

    /// Returns a use that breaks a limit.
    fn broken(&self) -> Option<String> {
        self.uses.iter().find_map(|own| {
            own.limits.iter().find_map(|&(limit, knows)| {
                let is_counted = |other: &&Use| {
                    (knows.booked_from..=own.number).contains(&other.number)
                        && other.at > knows.arrived_after
                };
                let counted: Vec<&Use> = self.uses.iter().filter(is_counted).collect();
                let over = over(limit, own, &counted);
                over.map(|over| format!("{limit:?} at {}: {over}", own.at - START))
            })
        })
    }
}

/// Returns how `own` breaks a limit, if only `counted` is used.
fn over(limit: Limit, own: &Use, counted: &[&Use]) -> Option<String> {
    let window = micros_up(limit.window());
    let count = u64::from(limit.count());
    match limit {
        Limit::Sliding { .. } => {
            let starts = counted.iter().map(|other| other.at);
            let mut starts = starts.filter(|from| *from <= own.at && own.at < from + window);
            starts.find_map(|from| {
                let inside = counted
                    .iter()
                    .filter(|other| other.at >= from && other.at < from + window);
                let units: u64 = inside.map(|other| other.units).sum();
                (units > count).then(|| format!("{units} from {}", from - START))
            })
        }
        Limit::Fixed { .. } => {
            let same = |other: &&&Use| other.slot / window == own.slot / window;
            let units: u64 = counted.iter().filter(same).map(|other| other.units).sum();
            (units > count).then(|| format!("{units}"))
        }
        Limit::Bucket { capacity, .. } => {
            let full = u128::from(capacity) * u128::from(window);
            // A charge leaves a bucket empty at most, so not all of it may count.
            let permits = counted.iter().filter(|other| !other.is_charge);
            let mut sorted: Vec<&Use> = permits.copied().collect();
            sorted.sort_by_key(|other| other.at);
            let (mut tokens, mut last) = (full, 0);
            for other in sorted {
                tokens = full.min(tokens + u128::from(other.at - last) * u128::from(count));
                last = other.at;
                let needed = u128::from(other.units) * u128::from(window);
                if std::ptr::eq(other, own) && needed > tokens {
                    return Some("it is dry".into());
                }
                tokens = tokens.saturating_sub(needed);
            }
            None
        }
        Limit::InFlight { .. } => unreachable!("Quota::limits are of rate"),
    }
}

fn history(has_fixed: bool) -> impl Strategy<Value = ([Quota; 2], [Quota; 3], Vec<Op>)> {
    let quota = || quota(has_fixed);
    (
        [quota(), quota()],
        [quota(), quota(), quota()],
        prop::collection::vec(op(), 1..80),
    )
}

proptest! {
    #![proptest_config(histories::config(250))]

    #[test]
    fn no_window_is_over_from_any_change_on((own, others, ops) in history(false)) {
        let mut world = World::new(own, others, false);
        ops.iter().for_each(|op| world.apply(op));
        prop_assert_eq!(world.broken(), None);
    }

    #[test]
    fn no_fixed_window_is_over_from_any_change_on((own, others, ops) in history(true)) {
        let mut world = World::new(own, others, true);
        ops.iter().for_each(|op| world.apply(op));
        prop_assert_eq!(world.broken(), None);
    }
}
