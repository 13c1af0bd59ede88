//! The laws of the limits, compared with a brute-force count of every window.

mod advance;
mod external;
mod lending;
mod settled;

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;

use super::limit_set::MOST_LIMITS;
use super::window::Window;
use super::*;
use crate::quota::Limit;
use crate::quota::Quota;

const SLACK: Micros = 10_000;
const GUARD: Micros = 20_000;
const START: Micros = 1_700_000_000_000_000;

fn terms(quota: Quota) -> LimitSpec {
    LimitSpec::new(
        quota,
        Duration::from_micros(SLACK),
        Duration::from_micros(GUARD),
    )
}

/// Returns an order of permits that are of use at once.
fn order(cost: u32, count: u32, latest: Micros, life: Micros) -> Order {
    Order {
        cost,
        count,
        earliest: 0,
        latest,
        life,
        borrows: false,
    }
}

fn millis(span: u64) -> Duration {
    Duration::from_millis(span)
}

// ── what the upstream counts ────────────────────────────────────────────────────────────────────

/// Units that arrived at a moment.
type Arrival = (Micros, u64);

/// Returns the first limit of `quota` that `arrivals` break.
fn broken(quota: &Quota, arrivals: &[Arrival]) -> Option<String> {
    let mut arrivals = arrivals.to_vec();
    arrivals.sort_unstable();
    quota.limits().iter().find_map(|limit| match *limit {
        Limit::Sliding { count, window } => {
            over_sliding(&arrivals, u64::from(count), micros_up(window))
        }
        Limit::Bucket {
            capacity,
            count,
            window,
        } => {
            let (capacity, count) = (u64::from(capacity), u64::from(count));
            let window = micros_up(window);
            over_bucket(&arrivals, capacity, count, window).or_else(|| {
                let offsets = [0, window / 3, window / 2];
                let offsets = offsets
                    .into_iter()
                    .chain(arrivals.iter().map(|&(at, _)| at));
                let mut offsets = offsets.take(20);
                offsets.find_map(|offset| {
                    over_sliding_counter(&arrivals, capacity + count, window, offset)
                })
            })
        }
        // The clock of the upstream may differ, and the way takes time: up to the guard in both
        // directions.
        Limit::Fixed { count, window } => [0, GUARD - 1, 2 * GUARD - 2]
            .into_iter()
            .find_map(|offset| over_fixed(&arrivals, u64::from(count), micros_up(window), offset)),
        Limit::InFlight { .. } => unreachable!("Quota::limits are of rate"),
    })
}

fn over_sliding(arrivals: &[Arrival], count: u64, window: Micros) -> Option<String> {
    arrivals.iter().enumerate().find_map(|(index, &(from, _))| {
        let inside = arrivals[index..]
            .iter()
            .take_while(|&&(at, _)| at - from < window);
        let units: u64 = inside.map(|&(_, units)| units).sum();
        (units > count).then(|| format!("{units} > {count} in {window} us from {}", from - START))
    })
}

/// A server's token bucket, in whole tokens times `window`.
fn over_bucket(arrivals: &[Arrival], capacity: u64, count: u64, window: Micros) -> Option<String> {
    let full = u128::from(capacity) * u128::from(window);
    let mut tokens = full;
    let mut last = 0;
    arrivals.iter().find_map(|&(at, units)| {
        tokens = full.min(tokens + u128::from(at - last) * u128::from(count));
        last = at;
        let needed = u128::from(units) * u128::from(window);
        let short = needed > tokens;
        tokens = tokens.saturating_sub(needed);
        short.then(|| format!("bucket of {capacity} dry at {}", at - START))
    })
}

/// A server's sliding window counter: the share of the last window that is younger than a window
/// counts, and all of this window. The windows begin at `offset`. A bucket that is refilled with
/// `count` minus its capacity stays within it: see `Quota::sliding_counter`.
fn over_sliding_counter(
    arrivals: &[Arrival],
    count: u64,
    window: Micros,
    offset: Micros,
) -> Option<String> {
    let (mut number, mut last, mut current) = (0, 0, 0);
    arrivals.iter().find_map(|&(at, units)| {
        let since = at + window - offset % window;
        let passed = since / window - number;
        if passed > 0 {
            last = if passed == 1 { current } else { 0 };
            current = 0;
            number = since / window;
        }
        current += units;
        let left = window - since % window;
        let estimate =
            u128::from(last) * u128::from(left) + u128::from(current) * u128::from(window);
        let is_over = estimate > u128::from(count) * u128::from(window);
        is_over.then(|| format!("estimate of {count} exceeded at {}", at - START))
    })
}

fn over_fixed(arrivals: &[Arrival], count: u64, window: Micros, offset: Micros) -> Option<String> {
    arrivals.iter().find_map(|&(at, _)| {
        let index = |at: Micros| (at + offset - (GUARD - 1)) / window;
        let same = arrivals
            .iter()
            .filter(|&&(other, _)| index(other) == index(at));
        let units: u64 = same.map(|&(_, units)| units).sum();
        (units > count).then(|| format!("{units} > {count} in the window of {}", at - START))
    })
}

// ── random histories ────────────────────────────────────────────────────────────────────────────

#[derive(Clone, Debug)]
enum Op {
    /// Time advances.
    Wait(Micros),
    /// Books `count` permits, which are used at a share of their life, except `unused` of them.
    Book {
        cost: u32,
        count: u32,
        patience: Micros,
        life: Micros,
        used_at: u8,
        jitter: u8,
        unused: u32,
    },
    Prefetch {
        most: u32,
        life: Micros,
        used_at: u8,
        unused: u32,
    },
    /// Gives back unused permits, the newest first.
    GiveBack(usize),
    /// The upstream makes a statement about one of the limits, true or not.
    See {
        which: usize,
        units: u64,
        reset_in: Option<u64>,
        steady: bool,
        refused: u32,
    },
    /// Charges units of an age that the upstream accepted before.
    Charge { age: Micros, units: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let life = select(vec![1_000u64, 10_000, 10_000, 40_000]);
    prop_oneof![
        3 => select(vec![0u64, 1, 500, 10_000, 50_000, 200_000, 1_000_000, 5_000_000]).prop_map(Op::Wait),
        6 => (
            1u32..4, prop_oneof![4 => 1u32..12, 1 => 50u32..300], select(vec![0u64, 100_000, 2_000_000, 20_000_000]), life.clone(),
            any::<u8>(), any::<u8>(), 0u32..4,
        ).prop_map(|(cost, count, patience, life, used_at, jitter, unused)| {
            Op::Book { cost, count, patience, life, used_at, jitter, unused }
        }),
        1 => (1u32..20, life, any::<u8>(), 0u32..6)
            .prop_map(|(most, life, used_at, unused)| Op::Prefetch { most, life, used_at, unused }),
        2 => (1usize..5).prop_map(Op::GiveBack),
        1 => (
            0usize..3, 0u64..40, select(vec![None, Some(0u64), Some(400), Some(5000)]), any::<bool>(),
            select(vec![0u32, 0, 3, u32::MAX]),
        ).prop_map(|(which, units, reset_in, steady, refused)| Op::See { which, units, reset_in, steady, refused }),
        1 => (select(vec![0u64, 700, 50_000, 900_000, 4_000_000]), 0u64..60)
            .prop_map(|(age, units)| Op::Charge { age, units }),
    ]
}

fn quota() -> impl Strategy<Value = Quota> {
    let one = prop_oneof![
        (4u32..40, select(vec![100u64, 1000, 3000]))
            .prop_map(|(count, window)| Quota::new(count, millis(window))),
        (300u32..900, select(vec![1000u64, 3000]))
            .prop_map(|(count, window)| Quota::new(count, millis(window))),
        (4u32..20, 1u32..30, select(vec![500u64, 1000])).prop_map(|(capacity, count, window)| {
            Quota::bucket(capacity).refill(count, millis(window))
        }),
        (4u32..30, select(vec![200u64, 1000]))
            .prop_map(|(count, window)| Quota::fixed(count, millis(window))),
        (5u32..40, 4u32..10).prop_map(|(count, burst)| Quota::per_second(count).burst(burst)),
    ];
    (one.clone(), prop::option::of(one)).prop_map(|(first, second)| match second {
        Some(second) => first.and(second),
        None => first,
    })
}

/// A ledger, and the requests that arrive at the upstream under its grants.
struct World {
    ledger: Ledger,
    spec: LimitSpec,
    now: Micros,
    arrivals: Vec<Arrival>,
    unused: Vec<UnusedPermits>,
}

impl World {
    fn new(quota: Quota) -> Self {
        let spec = terms(quota);
        World {
            ledger: Ledger::new(&spec, START),
            spec,
            now: START,
            arrivals: Vec::new(),
            unused: Vec::new(),
        }
    }

    fn book(
        &mut self,
        cost: u32,
        count: u32,
        patience: Micros,
        life: Micros,
    ) -> (Vec<Booking>, Result<(), TooLate>) {
        let now = self.ledger.advance(&self.spec, self.now);
        let mut grants = Vec::new();
        let booked = self.ledger.book(
            &self.spec,
            order(cost, count, now + patience, life),
            |grant| grants.push(grant),
        );
        (grants, booked)
    }

    /// Uses a grant except for `unused` of its permits: at a share of its life, after a share of
    /// the slack.
    fn use_up(&mut self, grant: Booking, cost: u32, used_at: u8, jitter: u8, unused: u32) {
        let unused = unused.min(grant.count);
        let at = grant.slot + (grant.life - 1) * u64::from(used_at) / 255;
        let fixed = self
            .spec
            .quota()
            .limits()
            .iter()
            .any(|limit| matches!(limit, Limit::Fixed { .. }));
        let way = if fixed {
            0
        } else {
            SLACK * u64::from(jitter) / 255
        };
        for _ in unused..grant.count {
            self.arrivals.push((at + way, u64::from(cost)));
        }
        let units = u64::from(unused) * u64::from(cost);
        self.unused
            .push(UnusedPermits::new(grant.slot, grant.stamp, units, 0));
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Wait(span) => self.now += span,
            Op::Book {
                cost,
                count,
                patience,
                life,
                used_at,
                jitter,
                unused,
            } => {
                for grant in self.book(cost, count, patience, life).0 {
                    assert!(grant.slot >= self.now && grant.slot <= self.now + patience);
                    self.use_up(grant, cost, used_at, jitter, unused);
                }
            }
            Op::Prefetch {
                most,
                life,
                used_at,
                unused,
            } => {
                self.ledger.advance(&self.spec, self.now);
                if let Some(grant) = self.ledger.prefetch(&self.spec, most, life) {
                    assert_eq!(
                        grant.slot, self.now,
                        "only permits that are free now are prefetched"
                    );
                    self.use_up(grant, 1, used_at, 0, unused);
                }
            }
            Op::See {
                which,
                units,
                reset_in,
                steady,
                refused,
            } => {
                self.ledger.advance(&self.spec, self.now);
                let limits = self.spec.quota().limits();
                let (limit, reset_in) = (limits[which % limits.len()], reset_in.map(millis));
                self.ledger.see(
                    &self.spec,
                    &UpstreamRemaining {
                        reset_in,
                        steady,
                        refused,
                        ..UpstreamRemaining::new(limit, units)
                    },
                );
            }
            Op::Charge { age, units } => {
                self.ledger.advance(&self.spec, self.now);
                self.ledger
                    .charge(&self.spec, Charge::new(Duration::from_micros(age), units));
            }
            Op::GiveBack(count) => {
                self.ledger.advance(&self.spec, self.now);
                for _ in 0..count {
                    if let Some(unused) = self.unused.pop() {
                        self.ledger.take_back(unused);
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(histories::config(500))]

    /// No limit is exceeded, with costs, several limits, bookings ahead, prefetched permits,
    /// cancelled slots and late use.
    #[test]
    fn no_window_of_any_history_is_over(quota in quota(), ops in prop::collection::vec(op(), 1..60)) {
        let mut world = World::new(quota);
        ops.iter().for_each(|op| world.apply(op));
        let broken = broken(&quota, &world.arrivals);
        prop_assert!(broken.is_none(), "{quota}: {}", broken.unwrap_or_default());
    }
}

fn deep_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0u64..3_000_000).prop_map(Op::Wait),
        1 => (0u64..60_000_000).prop_map(Op::Wait),
        // Of each slot, one permit is not used, or none.
        3 => (1u32..200, 0u32..2, any::<u8>()).prop_map(|(count, unused, used_at)| Op::Book {
            cost: 1, count, patience: 500_000_000, life: 10_000, used_at, jitter: 0, unused,
        }),
        2 => (20usize..300).prop_map(Op::GiveBack),
        2 => (0u64..10_000, 1u64..5).prop_map(|(age, units)| Op::Charge { age, units }),
    ]
}

proptest! {
    #![proptest_config(histories::config(250))]

    /// No limit is exceeded if queues of hundreds of windows give up, in part or as a whole, and units are charged
    /// meanwhile.
    #[test]
    fn deep_queues_that_give_up_exceed_no_limit(
        quota in prop_oneof![
            (1u32..6).prop_map(Quota::per_second),
            (1u32..6).prop_map(|count| Quota::fixed(count, millis(1000))),
            (1u32..6).prop_map(|count| Quota::bucket(count).refill(count, millis(1000))),
        ],
        ops in prop::collection::vec(deep_op(), 1..60),
    ) {
        let mut world = World::new(quota);
        ops.iter().for_each(|op| world.apply(op));
        let broken = broken(&quota, &world.arrivals);
        prop_assert!(broken.is_none(), "{quota}: {}", broken.unwrap_or_default());
    }
}

proptest! {
    #![proptest_config(histories::config(250))]

    #[test]
    fn slots_work_when_promised_and_no_microsecond_earlier(
        quota in quota(),
        ops in prop::collection::vec(op(), 1..40),
        cost in 1u32..4,
    ) {
        let mut world = World::new(quota);
        ops.iter().for_each(|op| world.apply(op));
        if let (_, Err(late)) = world.book(cost, 1, 0, 10_000) {
            let patience = late.slot - world.now;
            prop_assert!(patience > 0);
            prop_assert_eq!(world.book(cost, 1, patience - 1, 10_000).1, Err(late));
            prop_assert_eq!(world.book(cost, 1, patience, 10_000).0[0].slot, late.slot);
        }
    }

    #[test]
    fn a_refusal_leaves_no_trace(quota in quota(), ops in prop::collection::vec(op(), 1..40)) {
        let mut one = World::new(quota);
        let mut other = World::new(quota);
        for op in &ops {
            one.apply(op);
            other.apply(op);
            let cost = quota.largest_cost().min(3);
            if let (grants, Err(_)) = one.book(cost, 1, 0, 10_000) {
                prop_assert!(grants.is_empty());
            } else {
                let _ = other.book(cost, 1, 0, 10_000);
            }
        }
        prop_assert_eq!(one.arrivals, other.arrivals);
    }

    /// Slots that were cancelled while they lay ahead all go to the next calls.
    #[test]
    fn a_cancelled_slot_goes_to_the_next_who_asks(quota in quota(), cancelled in 1u32..20, seed in any::<u64>()) {
        let mut world = World::new(quota);
        let (grants, _) = world.book(1, 200, 60_000_000, 10_000);
        let mut ahead: Vec<UnusedPermits> = grants
            .iter()
            .filter(|grant| grant.slot > world.now)
            .flat_map(|grant| {
                std::iter::repeat_n(UnusedPermits::new(grant.slot, grant.stamp, 1, 0), grant.count as usize)
            })
            .collect();
        prop_assume!(ahead.len() >= cancelled as usize);
        let start = (seed % ahead.len() as u64) as usize;
        ahead.rotate_left(start);
        ahead.truncate(cancelled as usize);
        ahead.iter().for_each(|&unused| world.ledger.take_back(unused));
        let mut slots: Vec<Micros> = ahead.iter().map(|unused| unused.slot).collect();
        slots.sort_unstable();
        let (again, booked) = world.book(1, cancelled, 60_000_000, 10_000);
        prop_assert_eq!(booked, Ok(()));
        let again: Vec<Micros> =
            again.iter().flat_map(|grant| std::iter::repeat_n(grant.slot, grant.count as usize)).collect();
        // Where another limit delays what a bucket allows, it takes back only as much as is certain. The rest is refilled.
        let refill = quota.limits().iter().find_map(|limit| match limit {
            Limit::Bucket { count, window, .. } => {
                Some(Micros::from(cancelled) * window.as_micros() as Micros / Micros::from(*count))
            }
            _ => None,
        });
        match refill.filter(|_| quota.limits().len() > 1) {
            Some(refill) => prop_assert!(
                again.iter().zip(&slots).all(|(again, slot)| *again <= slot + refill),
                "{again:?} for {slots:?}"
            ),
            None => prop_assert_eq!(again, slots),
        }
    }

    /// A ledger that may be forgotten grants the same as a new one.
    #[test]
    fn a_ledger_is_forgotten_only_when_nobody_can_tell(quota in quota(), ops in prop::collection::vec(op(), 1..40)) {
        let mut world = World::new(quota);
        ops.iter().for_each(|op| world.apply(op));
        world.now = world.now.max(world.ledger.fresh_from());
        let mut fresh = World { now: world.now, ..World::new(quota) };
        prop_assert_eq!(world.book(1, 100, 5_000_000, 10_000), fresh.book(1, 100, 5_000_000, 10_000));
    }
}

// ── the wall clock is set ───────────────────────────────────────────────────────────────────────

proptest! {
    #![proptest_config(histories::config(250))]

    /// After the wall clock was set, once or several times, no window of the new alignment gets more than the limit,
    /// for any grants under the old alignment. In the next window, the whole limit is available.
    #[test]
    fn fixed_windows_follow_a_wall_clock_that_is_set(
        count in 4u32..30,
        window in select(vec![1_000_000u64, 60_000_000, 3_600_000_000]),
        before in prop::collection::vec((0u64..400, 0u32..20), 1..8),
        after in prop::collection::vec((0u64..400, 1u32..20), 1..8),
        // No permit is on its way when the clock is set.
        steps in prop::collection::vec((50u64..400, -400_000_000i64..400_000_000), 1..5),
    ) {
        let quota = Quota::fixed(count, Duration::from_micros(window));
        let mut world = World::new(quota);
        let mut used = Vec::new();
        let book = |world: &mut World, steps: &[(u64, u32)], used: &mut Vec<(Micros, u32)>| {
            for &(wait, wanted) in steps {
                // Steps are in thousandths of the window.
                world.now += wait * window / 1000;
                used.extend(world.book(1, wanted, 0, 10_000).0.iter().map(|grant| (grant.slot, grant.count)));
            }
        };
        book(&mut world, &before, &mut used);
        let old = used.len();
        let mut ahead = 0;
        for (wait, set) in steps {
            world.now += wait * window / 1000;
            world.ledger.align(set, world.now);
            ahead = set;
        }
        book(&mut world, &after, &mut used);
        let number = |at: Micros| at.checked_add_signed(ahead).unwrap() / window;
        for &(at, _) in &used[old..] {
            let same = used.iter().filter(|(other, _)| number(*other) == number(at));
            let units: u32 = same.map(|(_, units)| units).sum();
            prop_assert!(units <= count, "{} of {} in the window of {}", units, count, at - START);
        }
        let into = (number(world.now) + 1) * window + window / 2;
        world.now = into.checked_add_signed(-ahead).unwrap();
        let granted: u32 = world.book(1, 100, 0, 10_000).0.iter().map(|grant| grant.count).sum();
        prop_assert_eq!(granted, count);
    }
}

/// A clock that runs a little fast or slow moves no unit into another window.
#[test]
fn fixed_windows_lose_nothing_to_a_drift() {
    let mut world = World::new(Quota::fixed(10, Duration::from_secs(3600)));
    let mut granted = 0;
    for hour in 0..200 {
        // The clock drifts by a second a day.
        for quarter in 0..4 {
            world.now += 900_000_000;
            world.ledger.align((hour * 4 + quarter) * 10_417, world.now);
            granted += world
                .book(1, 10, 0, 10_000)
                .0
                .iter()
                .map(|grant| grant.count)
                .sum::<u32>();
        }
    }
    assert!((1990..=2010).contains(&granted), "{granted} of 2000");
}

/// A caller that states a longer slack gets it, even if the key is in use with a shorter one.
#[test]
fn a_longer_boundary_guard_counts_at_once() {
    let spec = |guard: u64| {
        LimitSpec::new(
            Quota::fixed(10, Duration::from_secs(60)),
            Duration::from_micros(SLACK),
            millis(guard),
        )
    };
    let minute = 60_000_000;
    let start = START / minute * minute;
    let mut ledger = Ledger::new(&spec(100), start + minute / 2);
    ledger
        .book(&spec(100), order(1, 1, start + minute / 2, 10_000), |_| ())
        .unwrap();
    // A new release knows that the clocks differ by two seconds.
    let now = start + minute - 1_500_000;
    ledger.advance(&spec(2000), now);
    let late = ledger.book(&spec(2000), order(1, 1, now, 10_000), |grant| {
        panic!("1.5 s before the boundary: {grant:?}")
    });
    assert_eq!(late.unwrap_err().slot, start + minute + 2_000_000);
}

/// A caller whose guard is as long as the windows of another caller keeps their limit all the same.
#[test]
fn a_guard_beyond_foreign_windows_exceeds_none() {
    let spec = |quota, guard| LimitSpec::new(quota, Duration::from_micros(SLACK), millis(guard));
    let windows = spec(Quota::fixed(5, millis(100)), 10);
    let second = spec(Quota::per_second(40), 100);
    let mut ledger = Ledger::new(&windows, START);
    ledger.advance(&second, START);
    let mut used = std::collections::BTreeMap::new();
    let latest = START + 1_000_000;
    let _ = ledger.book(&second, order(1, 40, latest, 1000), |grant| {
        *used.entry(grant.slot / 100_000).or_default() += grant.count;
    });
    assert!(used.values().all(|units: &u32| *units <= 5), "{used:?}");
    assert!(used.len() > 5, "{used:?}");
}

/// A caller whose permits live longer than the windows of another caller keeps their limit all the same.
#[test]
fn a_life_beyond_foreign_windows_exceeds_none() {
    let windows = terms(Quota::fixed(5, millis(100)));
    let hour = terms(Quota::per_hour(1000));
    let mut ledger = Ledger::new(&windows, START);
    ledger.advance(&hour, START);
    let (latest, long) = (START + 1_000_000, 180_000_000);
    let mut used = std::collections::BTreeMap::new();
    let _ = ledger.book(&hour, order(1, 40, latest, long), |grant| {
        let window = grant.slot / 100_000;
        assert_eq!(
            (grant.slot + grant.life + GUARD) / 100_000,
            window + 1,
            "{grant:?}"
        );
        *used.entry(window).or_default() += grant.count;
    });
    assert!(
        used.len() > 5 && used.values().all(|units: &u32| *units <= 5),
        "{used:?}"
    );
    ledger.advance(&hour, START + 1_020_000);
    let grant = ledger.prefetch(&hour, 1, long).unwrap();
    assert_eq!(grant.life, 60_000);
}

/// A slot that a caller with a long slack gives back is not valid for that slack.
#[test]
fn a_returned_slot_lives_no_longer_than_asked() {
    // The sliding window would not give the slot again.
    let quota = Quota::fixed(1, millis(200)).and(Quota::new(1, millis(300)));
    let spec = |slack| LimitSpec::new(quota, millis(slack), millis(20));
    let (late, prompt) = (spec(200), spec(0));
    let mut ledger = Ledger::new(&late, START);
    let mut slots = Vec::new();
    let latest = START + 10_000_000;
    ledger
        .book(&late, order(1, 4, latest, 40_000), |grant| {
            slots.push(grant)
        })
        .unwrap();
    let UnusedPermits { slot, .. } = give_back(&mut ledger, slots[1]);
    ledger.advance(&prompt, START);
    ledger
        .book(&prompt, order(1, 1, latest, 180_000), |grant| {
            assert_eq!((grant.slot, grant.stamp), (slot, slots[1].stamp));
            assert_eq!(grant.life, 160_000);
            assert_eq!((grant.slot + grant.life) / 200_000, grant.slot / 200_000);
        })
        .unwrap();
}

fn give_back(ledger: &mut Ledger, grant: Booking) -> UnusedPermits {
    let unused = UnusedPermits::new(grant.slot, grant.stamp, u64::from(grant.count), 0);
    ledger.take_back(unused);
    unused
}

// ── never idle ──────────────────────────────────────────────────────────────────────────────────

/// Returns how many permits are used in `span` if a request always waits. Every `cancel`-th slot is
/// cancelled while it lies ahead.
fn granted_under_saturation(
    quota: Quota,
    span: Micros,
    life: Micros,
    cancel: Option<usize>,
) -> u64 {
    let mut world = World::new(quota);
    let mut used = 0;
    for number in 0.. {
        let Some(grant) = world.book(1, 1, Micros::MAX / 4, life).0.first().copied() else {
            break;
        };
        if grant.slot >= START + span {
            break;
        }
        // Waiters book ahead; each request leaves at its slot.
        if cancel.is_some_and(|every| number % every == 0) && grant.slot > world.now {
            world
                .ledger
                .take_back(UnusedPermits::new(grant.slot, grant.stamp, 1, 0));
            continue;
        }
        world.now = world.now.max(grant.slot.saturating_sub(1_000_000));
        used += 1;
    }
    used
}

#[test]
fn saturating_demand_gets_99_percent_of_limit_less_margin() {
    for (quota, per_window, window) in [
        (Quota::per_second(1), 1, 1000),
        (Quota::per_second(50), 50, 1000),
        (Quota::per_second(50).burst(10), 50, 1000),
        (Quota::per_second(1000), 1000, 1000),
        (Quota::per_second(100_000), 100_000, 1000),
        (Quota::new(25, millis(5000)), 25, 5000),
        (
            Quota::new(25, millis(5000)).and(Quota::per_minute(300)),
            300,
            60_000,
        ),
        (Quota::bucket(40).refill(20, millis(1000)), 20, 980), // a bucket loses no margin
        (Quota::every(millis(2000)), 1, 2000),
        (Quota::fixed(100, millis(1000)), 100, 980),
    ] {
        for cancel in [None, Some(10)] {
            let margin = 20_000;
            // Each window of a high rate is many grants, and like the one before.
            let windows = if per_window > 10_000 { 3 } else { 40 };
            let span = windows * (window * 1000 + margin);
            let granted = granted_under_saturation(quota, span, 10_000, cancel);
            let allowed = per_window * windows;
            assert!(
                granted * 100 >= allowed * 99,
                "{quota}, {cancel:?}: {granted} of {allowed}"
            );
        }
    }
}

/// Waiters behind a burst get the whole limit of each window: the last units of a burst do not count with
/// the first of the next.
#[test]
fn bursts_behind_a_burst_lose_nothing() {
    for (limit, batch) in [(20_000, 7), (20_000, 256), (20_000, 60_000), (1000, 3)] {
        let mut world = World::new(Quota::per_second(limit));
        let (mut left, mut granted) = (3 * limit, [0; 4]);
        while left > 0 {
            let (grants, _) = world.book(1, batch.min(left), Micros::MAX / 4, 10_000);
            for grant in grants {
                granted[((grant.slot - START) / 1_000_000) as usize] += grant.count;
            }
            left -= batch.min(left);
            // All come within 50 ms.
            world.now = START + 50_000 - u64::from(left) * 50_000 / u64::from(3 * limit);
        }
        assert_eq!(granted, [limit, limit, limit, 0], "batches of {batch}");
    }
}

/// Permits that come back join no chunks over a gap.
#[test]
fn give_backs_keep_bursts_apart() {
    let mut window = Window::new(1000, 1_000_000);
    for (stamp, units) in [(START, 20), (START + 1, 5), (START + 900_000, 5)] {
        window.insert(stamp, units);
    }
    window.subtract(START, START + 1, 1);
    let chunks = window.chunks().map(|chunk| (chunk.stamp, chunk.count));
    let expected = [(START, 20), (START + 1, 4), (START + 900_000, 5)];
    assert_eq!(chunks.collect::<Vec<_>>(), expected);
}

/// Three bursts in each window add few chunks: the newest units of twice the limit stay in fine ones.
#[test]
fn bursts_cost_a_bounded_log() {
    let (limit, third) = (10_000, 340_000);
    let mut window = Window::new(limit, 1_000_000);
    for number in 0..60 * u64::from(limit) {
        let burst = number * 3 / u64::from(limit);
        window.insert(START + burst * third + number % 3333, 1);
    }
    let counts: Vec<u64> = window.chunks().map(|chunk| chunk.count).collect();
    assert!(counts.len() <= 252, "{} chunks", counts.len());
    let mut newest = 0;
    let is_among_newest = |count: &&u64| {
        newest += **count;
        newest <= 2 * u64::from(limit)
    };
    let largest = counts.iter().rev().take_while(is_among_newest).max();
    assert!(largest <= Some(&100), "{largest:?} units in a chunk");
}

/// Many waiters give up at once.
#[test]
fn waiters_that_give_up_leave_slots_to_the_next() {
    for quota in [
        Quota::per_second(10),
        Quota::per_second(1000),
        Quota::per_second(50).burst(10),
        Quota::bucket(5).refill(20, millis(1000)),
        Quota::fixed(50, millis(1000)),
        Quota::per_second(20).and(Quota::per_minute(600)),
    ] {
        let mut world = World::new(quota);
        let length = quota.limits()[0].count() * 15; // what 15 s of waiting may be
        let line: Vec<UnusedPermits> = world
            .book(1, length, Micros::MAX / 4, 10_000)
            .0
            .iter()
            .filter(|grant| grant.slot > START)
            .flat_map(|grant| {
                let one = UnusedPermits::new(grant.slot, grant.stamp, 1, 0);
                std::iter::repeat_n(one, grant.count as usize)
            })
            .collect();
        line.iter()
            .rev()
            .for_each(|&unused| world.ledger.take_back(unused));
        let mut next = World::new(quota);
        let _ = next.book(1, length - line.len() as u32, 0, 10_000);
        let slots = |world: &mut World| {
            let grants = world.book(1, 1000, Micros::MAX / 4, 10_000).0;
            grants
                .iter()
                .flat_map(|grant| std::iter::repeat_n(grant.slot, grant.count as usize))
                .collect::<Vec<_>>()
        };
        let (again, fresh) = (slots(&mut world), slots(&mut next));
        // Slots far ahead were kept in coarse chunks, so one window may be lost, for a queue of any
        // length.
        let bound = fresh
            .last()
            .map(|last| last + micros_up(quota.limits()[0].window()) + 20_000);
        assert!(
            again.last() <= bound.as_ref(),
            "{quota}: {:?} after {:?}",
            again.last(),
            fresh.last()
        );
    }
}

#[test]
fn a_long_line_costs_a_bounded_log() {
    for quota in [
        Quota::per_second(7),
        Quota::per_second(100),
        Quota::per_second(5000),
        Quota::per_second(1_000_000),
    ] {
        let mut window = Window::new(quota.largest_cost(), 1_000_000);
        let mut world = World::new(quota);
        let line = quota.largest_cost() * 15;
        for grant in world.book(1, line, Micros::MAX / 4, 10_000).0 {
            window.insert(grant.stamp, u64::from(grant.count));
        }
        assert!(
            window.chunk_count() <= 252,
            "{quota}: {} chunks",
            window.chunk_count()
        );
    }
}

#[test]
fn give_backs_leave_no_crumbs() {
    let mut window = Window::new(10_000, 1_000_000_000);
    for number in 0..20_000u64 {
        window.insert(START + number, 1);
        if number % 100 != 0 {
            window.subtract(START, START + number, 1);
        }
    }
    assert_eq!(window.used(), 200);
    assert!(window.chunk_count() <= 5, "{} chunks", window.chunk_count());
}

// ── tables ──────────────────────────────────────────────────────────────────────────────────────

/// Each step: the time of the call in ms, its cost, and the slot in ms. Life and slack are 10 ms
/// each.
fn replay(quota: Quota, calls: &[(u64, u32, Result<u64, u64>)]) {
    let mut world = World::new(quota);
    for (index, &(at, cost, expected)) in calls.iter().enumerate() {
        world.now = START + at * 1000;
        let (grants, booked) = world.book(cost, 1, 0, 10_000);
        let got = match booked {
            Ok(()) => Ok((grants[0].slot - START) / 1000),
            Err(late) => Err((late.slot - START) / 1000),
        };
        assert_eq!(got, expected, "{quota}: call {index} at {at} ms");
    }
}

#[test]
fn slots_return_one_window_and_margin_after_use() {
    replay(
        Quota::per_second(2),
        &[
            (0, 1, Ok(0)),
            (0, 1, Ok(0)),
            (0, 1, Err(1020)), // both are out; the third may leave a window after the first
            (1019, 1, Err(1020)),
            (1020, 1, Ok(1020)),
            (5000, 1, Ok(5000)), // a long rest refills two, never three
            (5000, 1, Ok(5000)),
            (5000, 1, Err(6020)),
        ],
    );
}

/// A big cost, then a small one.
#[test]
fn costs_count_whole() {
    replay(
        Quota::per_second(10),
        &[
            (0, 8, Ok(0)),
            (100, 3, Err(1020)),
            (100, 2, Ok(100)),
            (200, 1, Err(1020)),
            (1020, 8, Ok(1020)),
            (1020, 1, Err(1120)),
        ],
    );
}

/// Unused permits are not saved up.
#[test]
fn an_idle_bucket_holds_its_capacity_and_no_more() {
    replay(
        Quota::bucket(3).refill(1, millis(1000)),
        &[
            (600_000, 3, Ok(600_000)),
            (600_000, 1, Err(601_020)),
            (601_020, 1, Ok(601_020)),
            (601_020, 1, Err(602_020)),
        ],
    );
}

/// An upstream may count units near a boundary in either window, so no unit leaves there.
#[test]
fn a_fixed_window_keeps_clear_of_its_boundaries() {
    // START is a whole second; the guard is 20 ms.
    replay(
        Quota::fixed(2, millis(1000)),
        &[
            (0, 1, Err(20)),
            (20, 1, Ok(20)),
            (500, 1, Ok(500)),
            (500, 1, Err(1020)),
            (960, 1, Err(1020)),
            (1971, 1, Err(2020)), // its life would reach into the guard
        ],
    );
}

#[test]
fn several_limits_are_taken_all_or_nothing() {
    let quota = Quota::per_second(2).and(Quota::new(3, millis(10_000)));
    replay(
        quota,
        &[
            (0, 1, Ok(0)),
            (0, 1, Ok(0)),
            (0, 1, Err(1020)), // refused by the first, counted in neither
            (1020, 1, Ok(1020)),
            (1020, 1, Err(10_020)),
            (10_020, 2, Ok(10_020)),
            (10_020, 1, Err(11_040)),
        ],
    );
}

#[test]
fn costs_above_the_limit_are_refused_at_once() {
    for quota in [
        Quota::per_second(5),
        Quota::bucket(5).refill(1, millis(1000)),
        Quota::fixed(5, millis(1000)),
    ] {
        let mut world = World::new(quota);
        let (grants, booked) = world.book(6, 1, Micros::MAX / 4, 10_000);
        assert!(grants.is_empty());
        assert_eq!(
            booked,
            Err(TooLate {
                slot: Micros::MAX,
                limit: None
            })
        );
    }
}

/// Units of a window that come back late are none of a bucket that counts fewer of them.
#[test]
fn a_late_return_fills_no_bucket_that_begins_empty() {
    let hour = millis(3_600_000);
    let window = terms(Quota::new(100, hour));
    let mut ledger = Ledger::new(&window, START);
    let mut stamp = 0;
    ledger
        .book(&window, order(1, 100, START, 10_000), |grant| {
            stamp = grant.stamp;
        })
        .unwrap();
    let now = START + 50_000;
    let bucket = terms(Quota::bucket(10).refill(100, hour));
    ledger.advance(&bucket, now);
    ledger.take_back(UnusedPermits::new(START, stamp, 20, 0));
    let late = ledger.book(&bucket, order(1, 1, now, 10_000), |grant| {
        panic!("80 units are used: {grant:?}")
    });
    assert!(late.is_err());
}

/// A bucket that is set begins empty at most: it owes nothing for what the window before remembers.
#[test]
fn a_set_bucket_owes_nothing_for_what_was_used() {
    let hour = millis(3_600_000);
    let window = terms(Quota::new(100, hour));
    let mut ledger = Ledger::new(&window, START);
    ledger
        .book(&window, order(1, 100, START, 10_000), |_| ())
        .unwrap();
    let now = START + 60_000_000;
    let bucket = set(&mut ledger, Quota::bucket(10).refill(100, hour), now);
    let (mut slots, unit) = (Vec::new(), 36_000_000);
    ledger
        .book(&bucket, order(1, 10, now + 10 * unit, 10_000), |grant| {
            slots.push(grant.slot);
        })
        .unwrap();
    assert_eq!(slots[0], now);
    assert!(
        slots.last().is_some_and(|last| *last < START + 11 * unit),
        "{slots:?}"
    );
}

/// Sets a quota. Returns the spec of a caller that knows it.
fn set(ledger: &mut Ledger, quota: Quota, now: Micros) -> LimitSpec {
    change(ledger, terms(quota), ChangeKind::Set, now)
}

/// Ends the quota of `known`. Returns the spec of a caller that knows that, and states `quota`.
fn unset(ledger: &mut Ledger, known: &LimitSpec, quota: Quota, now: Micros) -> LimitSpec {
    let spec = terms(quota).with_quota_version(known.quota_version(), known.quota_life());
    change(ledger, spec, ChangeKind::End, now)
}

fn change(ledger: &mut Ledger, spec: LimitSpec, kind: ChangeKind, now: Micros) -> LimitSpec {
    let life = millis(30 * 86_400_000);
    let version = ledger.change_quota(
        &spec,
        QuotaChange {
            kind,
            life,
            above: 0,
        },
        now,
    );
    let spec = spec.with_quota_version(version, life);
    ledger.advance(&spec, now);
    spec
}

/// Returns the slot of the next permit.
fn next_slot(ledger: &mut Ledger, spec: &LimitSpec, now: Micros) -> Micros {
    ledger.advance(spec, now);
    ledger.next_slot(spec, 1, 10_000)
}

/// A bucket that was paused while more was used than it has is empty at most.
#[test]
fn a_paused_bucket_gets_into_no_debt() {
    let (hour, own) = (3_600_000, Quota::bucket(10).refill(100, millis(3_600_000)));
    let mut ledger = Ledger::new(&terms(own), START);
    let larger = set(&mut ledger, Quota::new(10_000, millis(hour)), START);
    let mut now = START;
    for _ in 0..5 {
        now += 600_000_000;
        ledger.advance(&larger, now);
        ledger
            .book(&larger, order(1000, 1, now, 10_000), |_| ())
            .unwrap();
    }
    let own = unset(&mut ledger, &larger, own, now);
    let slot = next_slot(&mut ledger, &own, now);
    assert!(slot > now && slot <= now + 36_100_000, "{} us", slot - now);
}

/// A bucket that is set owes nothing for a queue that gives up, because another quota allowed it.
#[test]
fn a_set_bucket_owes_nothing_for_a_queue() {
    let own = terms(Quota::per_minute(100));
    let mut ledger = Ledger::new(&own, START);
    let mut queue = Vec::new();
    ledger
        .book(&own, order(1, 400, START + 600_000_000, 10_000), |grant| {
            let unused = UnusedPermits::new(grant.slot, grant.stamp, 1, 0);
            queue.extend((0..grant.count).map(|_| unused));
        })
        .unwrap();
    queue.retain(|unused| unused.slot > START);
    let now = START + 100_000;
    let bucket = set(
        &mut ledger,
        Quota::bucket(20).refill(200, millis(60_000)),
        now,
    );
    let mut reversed = ledger.clone();
    queue.iter().for_each(|unused| ledger.take_back(*unused));
    queue
        .iter()
        .rev()
        .for_each(|unused| reversed.take_back(*unused));
    for ledger in [&mut ledger, &mut reversed] {
        let slot = next_slot(ledger, &bucket, now);
        assert!(slot > now && slot <= now + 300_000, "{} us", slot - now);
    }
}

/// A limit that begins just after the boundary of fixed windows knows what was used before.
#[test]
fn a_limit_beside_fixed_windows_knows_the_window_before() {
    let hour = 3_600_000_000;
    let boundary = START / hour * hour + hour;
    let fixed = Quota::fixed(1000, millis(hour / 1000));
    let mut ledger = Ledger::new(&terms(fixed), boundary - 1_000_000);
    let earlier = order(1, 100, boundary - 1_000_000, 10_000);
    ledger.book(&terms(fixed), earlier, |_| ()).unwrap();
    let now = boundary + 1_000_000;
    let minute = Quota::per_minute(100);
    let mut changed = ledger.clone();
    let set = set(&mut changed, minute, now);
    for (mut ledger, spec) in [(changed, set), (ledger, terms(fixed.and(minute)))] {
        let slot = next_slot(&mut ledger, &spec, now);
        assert!(slot > boundary + 59_900_000, "{} us", slot - now);
        assert!(slot < boundary + 60_100_000, "{} us", slot - now);
    }
}

/// A fixed window that begins with a log counts units that were used now, although the chunk they are in has a later
/// stamp.
#[test]
fn a_fixed_window_counts_a_chunk_from_now_on() {
    let (minute, hour) = (60_000_000, 3_600_000_000);
    let start = START / hour * hour;
    let log = terms(Quota::per_hour(10_000));
    let mut ledger = Ledger::new(&log, start);
    let mut book = |now: Micros, count: u32, latest: Micros| {
        ledger.advance(&log, now);
        ledger
            .book(&log, order(1, count, latest, 10_000), |_| ())
            .unwrap();
    };
    book(start, 9901, start);
    let now = start + 50 * minute + 5_000_000;
    book(now, 97, now);
    book(now + 1_000_000, 2, now + 1_000_000);
    // A waiter books the next slot. It is almost ten minutes ahead.
    book(now + 2_000_000, 1, Micros::MAX / 4);
    let fixed = set(
        &mut ledger,
        Quota::fixed(20, millis(60_000)),
        now + 3_000_000,
    );
    let slot = next_slot(&mut ledger, &fixed, now + 4_000_000);
    assert!(slot >= start + 51 * minute, "{} us", slot - now);
}

/// Two layers with different quotas for one key, or a quota that changed.
#[test]
fn the_strictest_stated_quota_applies_until_forgotten() {
    let (loose, strict) = (terms(Quota::per_second(10)), terms(Quota::per_second(4)));
    let mut ledger = Ledger::new(&loose, START);
    let mut book = |spec: &LimitSpec, at: Micros, count: u32| {
        let now = ledger.advance(spec, START + at);
        let mut granted = 0;
        let _ = ledger.book(spec, order(1, count, now, 10_000), |grant| {
            granted += grant.count
        });
        granted
    };
    assert_eq!(book(&loose, 0, 3), 3);
    assert_eq!(
        book(&strict, 100, 10),
        1,
        "the new limit counts earlier use"
    );
    assert_eq!(
        book(&loose, 200, 10),
        0,
        "the new limit applies to callers that assert the old one"
    );
    assert_eq!(book(&strict, 5_000_000, 10), 4);
    assert_eq!(book(&loose, 7_000_000, 10), 4);
    assert_eq!(
        book(&loose, 8_000_000, 10),
        0,
        "the limit applies for at least two windows and a second"
    );
    assert_eq!(
        book(&loose, 8_600_000, 10),
        10,
        "half a window later the limit is forgotten"
    );
}

/// Time never goes back.
#[test]
fn clock_steps_back_grant_nothing_twice_and_block_nothing() {
    let mut world = World::new(Quota::per_second(2));
    assert_eq!(world.book(1, 2, 0, 10_000).0[0].count, 2);
    world.now = START - 3_600_000_000;
    let (_, booked) = world.book(1, 1, 0, 10_000);
    assert_eq!(booked.map_err(|late| late.slot), Err(START + 1_020_000));
}

/// Each caller states another limit. The limits of earlier callers are forgotten, but their use is
/// not.
#[test]
fn too_many_limits_are_bounded_and_forget_no_use() {
    let mut ledger = None;
    for number in 0..200 {
        let (quota, now) = (
            Quota::new(300 + number, millis(1000)),
            START + u64::from(number),
        );
        let ledger = ledger.get_or_insert_with(|| Ledger::new(&terms(quota), now));
        ledger.advance(&terms(quota), now);
        ledger
            .book(&terms(quota), order(1, 1, now, 10_000), |_| ())
            .unwrap();
        let usage: Vec<_> = ledger.usage().collect();
        assert!(usage.len() <= MOST_LIMITS, "{} limits", usage.len());
        let own = usage
            .iter()
            .find(|(limit, ..)| limit.count() == 300 + number)
            .expect("it is stated");
        assert_eq!(own.1, u64::from(number) + 1, "the use of all callers");
    }
}

/// A store in memory keeps the ledger of each of many keys.
#[test]
fn ledgers_of_keys_are_small() {
    assert!(size_of::<Ledger>() <= 104, "{} bytes", size_of::<Ledger>());
}
