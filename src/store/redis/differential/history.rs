//! Random histories: which calls are made, and when.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::millis;
use crate::limit::{LimitSpec, Micros, UpstreamRemaining};
use crate::quota::{Limit, Quota};
use crate::store::HoldState;

#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) wait: Micros,
    pub(super) demands: Vec<(u32, u32)>,
    /// How long after the call the permits are of use at the earliest. The latest slot counts from
    /// then.
    pub(super) earliest: Duration,
    pub(super) latest: Duration,
    pub(super) life: Duration,
    pub(super) prefetch: u32,
    /// How many unused grants are given back, the newest or the oldest first.
    pub(super) returns: usize,
    pub(super) newest: bool,
    /// How many units of each such grant are given back, perhaps only a part.
    pub(super) part: u64,
    /// Which of the two specs the call states.
    pub(super) uses_second_spec: bool,
    /// Whether the call borrows from the part of another class.
    pub(super) borrows: bool,
    /// The hold that the caller knows of.
    pub(super) held: HoldState,
    /// How the hold changes before the call.
    pub(super) hold: Option<Option<HoldState>>,
    /// What the upstream stated before the call.
    pub(super) left: Option<Said>,
    /// Uses without a permit: the units, and how long ago.
    pub(super) charges: Vec<(u64, u64)>,
    /// By how many microseconds the clock of the server is set before the call: the wall clock, not
    /// the time of the state.
    pub(super) clock: i64,
}

impl Step {
    /// Returns a call that asks for nothing, and gives back and states nothing.
    pub(super) fn idle() -> Self {
        Step {
            wait: 0,
            demands: Vec::new(),
            earliest: millis(0),
            latest: millis(0),
            life: millis(1),
            prefetch: 0,
            returns: 0,
            newest: false,
            part: 1,
            uses_second_spec: false,
            borrows: false,
            held: HoldState::default(),
            hold: None,
            left: None,
            charges: Vec::new(),
            clock: 0,
        }
    }
}

/// What an upstream states is left of one of the limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said {
    pub(super) which: usize,
    pub(super) units: u64,
    pub(super) reset_in: Option<Duration>,
    pub(super) steady: bool,
    pub(super) ago: Duration,
    pub(super) refused: u32,
    pub(super) forget: bool,
    pub(super) urgent: bool,
}

impl Said {
    pub(super) fn of(self, spec: &LimitSpec) -> UpstreamRemaining {
        let limits = spec.quota().limits();
        let Said {
            which,
            units,
            reset_in,
            steady,
            ago,
            refused,
            forget,
            urgent,
        } = self;
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
pub(super) enum Mix {
    /// All kinds.
    Any,
    /// Long queues.
    LongLines,
    /// Permits that are of use later.
    LaterUse,
    /// The calls of most callers: one need, of sliding windows, mostly now.
    Plain,
}

pub(super) fn step(mix: Mix) -> impl Strategy<Value = Step> {
    let count = match mix {
        Mix::Any => prop_oneof![6 => 1u32..8, 1 => 20u32..200].boxed(),
        Mix::LaterUse => prop_oneof![20 => 1u32..8, 1 => 20u32..100].boxed(),
        Mix::LongLines => prop_oneof![3 => 1u32..30, 1 => 100u32..900].boxed(),
        Mix::Plain => (1u32..4).boxed(),
    };
    let demand = (prop_oneof![60 => 1u32..4, 1 => 30u32..60], count);
    let (demands, waits, latest) = match mix {
        Mix::Plain => (
            1..2,
            vec![0u64, 300, 4_000, 40_000, 150_000],
            vec![0u64, 0, 0, 0, 500],
        ),
        _ => (
            0..3,
            vec![
                0u64, 0, 1, 700, 12_000, 60_000, 210_000, 1_000_000, 6_000_000,
            ],
            vec![0u64, 100, 2000, 20_000, 100_000],
        ),
    };
    let later = || {
        prop_oneof![
            (0u64..3_000).prop_map(Duration::from_millis),
            (0u64..90_000_000).prop_map(Duration::from_micros),
            select(vec![1u64, 9, 15, 1000, 70_000]).prop_map(millis),
        ]
    };
    let earliest = match mix {
        Mix::LaterUse => prop_oneof![1 => Just(millis(0)), 3 => later()].boxed(),
        Mix::Any => prop_oneof![15 => Just(millis(0)), 1 => later()].boxed(),
        Mix::LongLines | Mix::Plain => Just(millis(0)).boxed(),
    };
    let charge = (
        select(vec![0u64, 1, 20_000, 700_000, 2_000_000, 50_000_000]),
        prop_oneof![0u64..50, any::<u64>()],
    );
    (
        select(waits),
        prop::collection::vec(demand, demands),
        (earliest, select(latest).prop_map(millis)),
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
                (earliest, latest),
                life,
                prefetch,
                returns,
                newest,
                part,
                uses_second_spec,
                (held, hold, left, charges, clock),
            )| Step {
                wait,
                demands,
                earliest,
                latest,
                life,
                prefetch,
                returns,
                newest,
                part,
                uses_second_spec,
                borrows: false,
                held: held.unwrap_or_default(),
                hold,
                left,
                charges,
                clock,
            },
        )
}

pub(super) fn said() -> impl Strategy<Value = Said> {
    let units = prop_oneof![3 => 0u64..40, 1 => 0u64..3000, 1 => any::<u64>()];
    let spans = (
        prop::option::of(select(vec![1u64, 500, 2000, 40_000])),
        select(vec![0u64, 3, 700, 90_000]),
    );
    let refused = prop_oneof![3 => Just(0u32), 2 => 1u32..20, 1 => any::<u32>()];
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.05));
    (0usize..6, units, spans, refused, flags).prop_map(
        |(which, units, (reset_in, ago), refused, (steady, urgent, forget))| {
            let (reset_in, ago) = (reset_in.map(millis), millis(ago));
            Said {
                which,
                units,
                reset_in,
                steady,
                ago,
                refused,
                forget,
                urgent,
            }
        },
    )
}

pub(super) fn held() -> impl Strategy<Value = HoldState> {
    (
        select(vec![0u64, 1, 30, 900, 20_000]),
        0u32..3,
        any::<bool>(),
    )
        .prop_map(|(left, releases, cut)| HoldState {
            remaining: millis(left),
            releases,
            cut,
        })
}

pub(super) fn quota(mix: Mix) -> BoxedStrategy<Quota> {
    if let Mix::Plain = mix {
        let window = select(vec![100u64, 1000, 3000]).prop_map(millis);
        let count = prop_oneof![3u32..40, 100u32..400];
        let one = prop_oneof![
            2 => (count.clone(), window.clone())
                .prop_map(|(count, window)| Quota::new(count, window)),
            1 => (3u32..40, count, window.clone())
                .prop_map(|(capacity, count, window)| Quota::bucket(capacity).refill(count, window)),
            1 => (3u32..1_000_000_000, 1u32..1_000_000_000, window)
                .prop_map(|(capacity, count, window)| Quota::bucket(capacity).refill(count, window)),
        ];
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

/// A kind of limit that no history has is never compared with its Lua twin.
#[test]
fn histories_have_every_kind_of_limit() {
    const KINDS: usize = 4;
    // A new kind of limit does not compile here before it has a number, and fails until the
    // strategy generates it.
    let kind = |limit: &Limit| match limit {
        Limit::Sliding { .. } => 0,
        Limit::Bucket { .. } => 1,
        Limit::Fixed { .. } => 2,
        // `in_flight.rs` has histories of its own for these.
        Limit::InFlight { .. } => 3,
    };
    let mut seen = [false; KINDS];
    seen[kind(&Limit::InFlight { count: 1 })] = true;
    let mut runner = TestRunner::deterministic();
    for _ in 0..200 {
        let quota = quota(Mix::Any)
            .new_tree(&mut runner)
            .expect("no quota is rejected")
            .current();
        quota
            .limits()
            .iter()
            .for_each(|limit| seen[kind(limit)] = true);
    }
    assert_eq!(
        seen, [true; KINDS],
        "add the kind to `quota`, and to the scripts in `store/redis/lua`"
    );
}
