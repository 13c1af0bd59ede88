//! The laws of lending: what the parts of a quota lend each other costs an owner little, and exceeds
//! no limit.

use super::super::window::chunk_size;
use super::*;
use crate::quota::{ClassShare, Division, Slacks};

/// The numbers of a random sequence (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number from `range`.
    fn within(&mut self, range: std::ops::RangeInclusive<u32>) -> u32 {
        let (least, most) = range.into_inner();
        least + (self.next() % u64::from(most - least + 1)) as u32
    }
}

/// When an owner asks.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    Even,
    Random,
    /// So many requests at once.
    Bursts(u32),
}

/// A divided quota, of which one class asks as its pattern says, and another one asks always.
#[derive(Clone, Debug)]
struct Case {
    quota: Quota,
    /// The share of the class, and how much of it is lent, in per cent.
    percent: u8,
    lends: u8,
    /// What the class asks for, in per cent of its part.
    load: u32,
    pattern: Pattern,
    largest_cost: u32,
    largest_lent: u32,
    /// How often the other class asks in the time of one unit.
    asks: u32,
    /// How many windows pass before the class begins.
    idle: u32,
    seed: u64,
}

fn divided_quota() -> impl Strategy<Value = Quota> {
    let window = || select(vec![1u64, 1, 10, 60, 60, 3600]).prop_map(Duration::from_secs);
    let count = || prop_oneof![4u32..60, 20u32..600, 600u32..6000];
    prop_oneof![
        4 => (count(), window()).prop_map(|(count, window)| Quota::new(count, window)),
        2 => (4u32..60, count(), window())
            .prop_map(|(capacity, count, window)| Quota::bucket(capacity).refill(count, window)),
        1 => (count(), window()).prop_map(|(count, window)| Quota::fixed(count, window)),
        1 => (4u32..80, 60u32..3000)
            .prop_map(|(short, long)| Quota::per_second(short).and(Quota::per_minute(long))),
        1 => (10u32..80, 60u32..3000).prop_map(|(count, hour)| {
            Quota::bucket(count).refill(count, millis(1000)).and(Quota::per_hour(hour))
        }),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let pattern = prop_oneof![
        Just(Pattern::Even),
        Just(Pattern::Random),
        (2u32..200).prop_map(Pattern::Bursts)
    ];
    let load = select(vec![20u32, 50, 80, 90, 95, 120]);
    let part = (10u8..=90, select(vec![97u8, 97, 97, 75, 100]));
    let costs = (1u32..=4, 1u32..=4);
    let borrower = (1u32..=4, select(vec![0u32, 1, 3]));
    (
        divided_quota(),
        part,
        (load, pattern),
        costs,
        borrower,
        any::<u64>(),
    )
        .prop_map(
            |(quota, (percent, lends), (load, pattern), costs, (asks, idle), seed)| Case {
                quota,
                percent,
                lends,
                load,
                pattern,
                largest_cost: costs.0,
                largest_lent: costs.1,
                asks,
                idle,
                seed,
            },
        )
}

/// The part of a class.
struct Part {
    spec: LimitSpec,
    ledger: Ledger,
    life: Micros,
    horizon: Micros,
    /// The time of one unit of the pace, in microseconds.
    tau: f64,
    /// What arrives at the upstream. A borrowed permit counts here, too.
    arrivals: Vec<Arrival>,
}

impl Part {
    fn new(quota: Quota, lends: u8) -> Option<Self> {
        let slacks = Slacks {
            transit: Duration::from_micros(SLACK),
            boundary: Duration::from_micros(GUARD),
            rate_loss: 10,
        };
        let spec = LimitSpec::checked(quota, slacks, Duration::ZERO).ok()?;
        let spec = spec.with_lending(lends);
        let lending = spec.lending()?;
        let pace = lending.pace();
        Some(Part {
            ledger: Ledger::new(&spec, START),
            life: micros_up(spec.life()),
            horizon: micros_up(lending.horizon()),
            tau: micros_up(pace.window()) as f64 / f64::from(pace.count()),
            arrivals: Vec::new(),
            spec,
        })
    }

    fn limits(&self) -> &[Limit] {
        self.spec.quota().limits()
    }

    /// Books up to `count` permits at `now`. Returns the slots.
    fn book(
        &mut self,
        now: Micros,
        cost: u32,
        count: u32,
        latest: Micros,
        borrows: bool,
    ) -> Vec<Micros> {
        self.ledger.advance(&self.spec, now);
        let order = Order {
            borrows,
            ..order(cost, count, latest, self.life)
        };
        let mut slots = Vec::new();
        let _ = self.ledger.book(&self.spec, order, |grant| {
            slots.extend(std::iter::repeat_n(grant.slot, grant.count as usize));
        });
        let used = slots.iter().map(|slot| (*slot, u64::from(cost)));
        self.arrivals.extend(used);
        slots
    }

    /// Lends up to `count` permits at `now`.
    fn lend(&mut self, now: Micros, cost: u32, count: u32) -> Vec<Micros> {
        self.book(now, cost, count, now + self.horizon, true)
    }

    /// Returns the largest chunk in which a limit keeps its units.
    fn chunk(&self) -> f64 {
        let sliding = self
            .limits()
            .iter()
            .filter(|limit| matches!(limit, Limit::Sliding { .. }));
        let chunks = sliding.map(|limit| chunk_size(u64::from(limit.count())));
        chunks.max().unwrap_or(1) as f64
    }

    /// Returns how long a fixed window lets nothing leave around its boundary.
    fn gap(&self) -> f64 {
        let is_fixed = self
            .limits()
            .iter()
            .any(|limit| matches!(limit, Limit::Fixed { .. }));
        if is_fixed {
            (2 * GUARD + self.life) as f64
        } else {
            0.0
        }
    }

    /// How long after its slot a permit counts.
    fn margin(&self) -> f64 {
        (self.life + SLACK) as f64
    }

    /// Returns the time in which the part gives a request of `cost` its units, if the largest cost of
    /// its requests is `largest`.
    fn time_of(&self, cost: u32, largest: u32) -> f64 {
        let margin = self.margin();
        let units = f64::from(cost);
        let times = self.limits().iter().map(|limit| match *limit {
            Limit::Bucket {
                capacity,
                count,
                window,
            } => {
                let tau = micros_up(window) as f64 / f64::from(count);
                units * tau + (margin - f64::from(capacity - cost) * tau).max(0.0)
            }
            _ => {
                // The units that a permit waits for leave the window in one chunk, or as one cost.
                let room = f64::from(limit.count() + 2 - largest) - self.chunk();
                units * (micros_up(limit.window()) as f64 + margin) / room.max(1.0)
            }
        });
        times.fold(0.0, f64::max)
    }

    /// Returns the rate of the pace, which is a bucket as the one of `time_of`.
    fn pace_rate(&self) -> f64 {
        let lending = self.spec.lending().expect("a part");
        let room = f64::from(lending.pace().largest_cost() - 1) * self.tau;
        1.0 / (self.tau + (self.margin() - room).max(0.0))
    }
}

/// Returns the parts of the class and of all others.
fn parts(case: &Case) -> Option<(Part, Part)> {
    let share = ClassShare {
        class: "a",
        percent: case.percent,
        lends: case.lends,
    };
    let parts = Division::new(&[share]).ok()?.parts(&case.quota).ok()?;
    Some((
        Part::new(parts[1], case.lends)?,
        Part::new(parts[0], ClassShare::LENDS)?,
    ))
}

/// What a class has seen.
struct Seen {
    /// By how much a slot was later than the law allows at most, in the time of one unit.
    worst: f64,
    /// Its slots.
    slots: Vec<Micros>,
}

/// Runs a case. The class borrows, too. If `lent` is false, nobody borrows.
fn run(case: &Case, own: &mut Part, others: &mut Part, lent: bool) -> Seen {
    let largest = case.largest_cost.min(own.spec.quota().largest_cost());
    let largest_lent = case.largest_lent.min(own.spec.quota().largest_cost());
    let (tau, windows) = (
        own.tau,
        own.limits().iter().map(|limit| micros_up(limit.window())),
    );
    let longest = windows.max().unwrap_or_default() as f64;
    let bound = 2.0 * own.horizon as f64
        + (f64::from(largest_lent) + f64::from(largest) + own.chunk() - 1.0) * tau
        + own.gap();
    let mean = f64::from(1 + largest) / 2.0 * tau * 100.0 / f64::from(case.load);
    let mut numbers = Numbers(case.seed);
    let mut now = START as f64;
    let mut next = now + (f64::from(case.idle) + numbers.share()) * longest;
    let mut finish = 0.0f64;
    let mut seen = Seen {
        worst: f64::MIN,
        slots: Vec::new(),
    };
    for _ in 0..20_000 {
        if seen.slots.len() > 300 {
            break;
        }
        now = (now + numbers.share() * 2.0 * tau / f64::from(case.asks)).min(next);
        let at = now.ceil() as Micros;
        let cost = numbers.within(1..=largest_lent);
        if lent {
            // The other class asks for more than there is, and waits in its own part as well.
            for slot in own.lend(at, cost, 64) {
                assert!(slot <= at + own.horizon, "lent beyond the horizon");
            }
            others.book(
                at,
                cost.min(others.spec.quota().largest_cost()),
                2,
                at + others.horizon,
                false,
            );
        }
        if now < next {
            continue;
        }
        let count = match case.pattern {
            Pattern::Bursts(count) => count,
            _ => 1,
        };
        for _ in 0..count {
            let cost = numbers.within(1..=largest);
            finish = finish.max(at as f64) + own.time_of(cost, largest);
            if lent && count == 1 {
                // The class borrows, too.
                others.lend(at, cost, 1);
            }
            let slot = own.book(at, cost, 1, Micros::MAX / 4, false)[0];
            seen.worst = seen.worst.max((slot as f64 - finish - bound) / tau);
            seen.slots.push(slot);
        }
        next = now
            + f64::from(count)
                * match case.pattern {
                    Pattern::Random => -mean * (1.0 - numbers.share()).ln(),
                    _ => mean,
                };
    }
    seen
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..histories::config(10) })]

    /// The latency-rate law of `lending.rs`. No part is exceeded, and their sum is not.
    #[test]
    fn an_owner_waits_for_its_own_rate_only(case in case()) {
        let Some((mut own, mut others)) = parts(&case) else { return Ok(()) };
        let seen = run(&case, &mut own, &mut others, true);
        prop_assert!(seen.worst <= 0.0, "{:.2} units late", seen.worst);
        for part in [&own, &others] {
            let broken = broken(part.spec.quota(), &part.arrivals);
            prop_assert!(broken.is_none(), "{}", broken.unwrap_or_default());
        }
        let all: Vec<Arrival> = own.arrivals.iter().chain(&others.arrivals).copied().collect();
        let broken = broken(&case.quota, &all);
        prop_assert!(broken.is_none(), "{}", broken.unwrap_or_default());
    }

    /// If nobody borrows, an owner has the same slots as in a ledger that lends nothing.
    #[test]
    fn lending_delays_no_owner_alone(case in case()) {
        let Some((mut own, mut others)) = parts(&case) else { return Ok(()) };
        let alone = run(&case, &mut own, &mut others, false).slots;
        let Some((mut own, mut others)) = parts(&case) else { return Ok(()) };
        own.spec = LimitSpec::new(*own.spec.quota(), own.spec.transit_slack(), own.spec.boundary_guard());
        own.ledger = Ledger::new(&own.spec, START);
        prop_assert_eq!(alone, run(&case, &mut own, &mut others, false).slots);
    }

    /// A borrower that always asks uses what the part may lend.
    #[test]
    fn what_is_lent_is_used(case in case()) {
        let Some((mut own, _)) = parts(&case) else { return Ok(()) };
        let quota = *own.spec.quota();
        let longest = quota.limits().iter().map(|limit| match limit {
            // A bucket has no window: some of its units are enough.
            Limit::Bucket { .. } => 200.0 * own.tau,
            _ => micros_up(limit.window()) as f64,
        });
        let longest = longest.fold(0.0, f64::max);
        let margin = own.margin();
        // A part of few units keeps more than a tenth of them: it cannot lend a part of a unit.
        let lent = |limit: &Limit| {
            let kept = own.spec.lending().map_or(0, |lending| lending.kept(*limit));
            f64::from(limit.largest_cost() - kept)
        };
        let rates = quota.limits().iter().map(|limit| match limit {
            // A bucket that lends one or two units is full again before the borrower asks.
            Limit::Bucket { .. } if lent(limit) < 3.0 || lent(limit) * own.tau < 2.0 * margin => 0.0,
            Limit::Bucket { .. } => 1.0 / own.tau,
            _ => lent(limit) / (micros_up(limit.window()) as f64 + margin),
        });
        let rate = rates.fold(own.pace_rate(), f64::min);
        let mut numbers = Numbers(case.seed);
        let (from, to) = (START as f64 + longest, START as f64 + 4.0 * longest);
        let mut now = START as f64;
        while now < to {
            now += numbers.share() * 2.0 * own.tau;
            own.lend(now.ceil() as Micros, 1, 64);
        }
        let within = |slot: Micros| (from..to).contains(&(slot as f64));
        let used = own.arrivals.iter().filter(|(slot, _)| within(*slot)).count() as f64;
        let expected = rate * (to - from);
        // The borrower takes what a window lends as fast as the pace allows, and then waits for the rest of the
        // window. Both ends of the time may lie in such a wait. Units leave in chunks.
        let waits = rate * longest * (1.0 - rate * own.tau);
        prop_assert!(used >= 0.97 * expected - waits - 4.0, "{} of {:.1}", used, expected);
    }
}

/// What settled requests of the owner give back is lent at once, however long the owner was busy.
#[test]
fn a_part_lends_what_settled_requests_left() {
    let mut part = Part::new(Quota::new(1000, millis(20_000)), 97).expect("it has a rate");
    let (estimate, cost) = (40, 10);
    let mut used = std::collections::VecDeque::<UnusedPermits>::new();
    let mut now = START;
    while now < START + 600_000_000 {
        now += 20_000;
        part.ledger.advance(&part.spec, now);
        // A response takes 400 ms.
        while used
            .front()
            .is_some_and(|unused| unused.slot + 400_000 <= now)
            && let Some(unused) = used.pop_front()
        {
            part.ledger.take_back(unused);
        }
        let order = order(estimate, 1, now, part.life);
        let _ = part.ledger.book(&part.spec, order, |grant| {
            used.push_back(UnusedPermits::new(
                grant.slot,
                grant.stamp,
                u64::from(estimate - cost),
                0,
            ));
        });
    }
    now += 400_000;
    used.into_iter()
        .for_each(|unused| part.ledger.take_back(unused));
    // By then the window is empty.
    now += 21_000_000;
    assert_eq!(part.lend(now, 1, 1), [now]);
}
