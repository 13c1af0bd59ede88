//! Tests of the units reserved for clients outside this fleet.

use super::*;

/// How an upstream counts, and when it states that the count starts anew: at a fixed moment.
#[derive(Clone, Copy, Debug)]
enum Counting {
    /// In windows, the first of which ends `phase` after the start.
    Fixed { phase: Micros },
    /// What it saw within the window; the oldest of it leaves next.
    Sliding,
}

impl Counting {
    /// What is left of `count` after `arrivals`, and until when, in whole seconds rounded up.
    fn says(
        self,
        arrivals: &[Arrival],
        count: u64,
        window: Micros,
        now: Micros,
    ) -> (u64, Duration) {
        let begun = match self {
            Counting::Fixed { phase } => now - (now - START + window - phase) % window,
            Counting::Sliding => now - window + 1,
        };
        let inside = arrivals.iter().filter(|&&(at, _)| at >= begun && at <= now);
        let used: u64 = inside.clone().map(|&(_, units)| units).sum();
        let oldest = match self {
            Counting::Fixed { .. } => begun,
            Counting::Sliding => inside.map(|&(at, _)| at).min().unwrap_or(now),
        };
        let reset_in = oldest + window - now;
        (
            count.saturating_sub(used),
            Duration::from_secs(reset_in.div_ceil(1_000_000)),
        )
    }
}

fn counting() -> impl Strategy<Value = Counting> {
    prop_oneof![
        (1u64..3_000_000).prop_map(|phase| Counting::Fixed { phase }),
        Just(Counting::Sliding)
    ]
}

proptest! {
    #![proptest_config(histories::config(500))]

    /// For each way to count, with any requests on their way, and whether the response arrives at
    /// once or later.
    #[test]
    fn a_fleet_that_is_alone_reserves_nothing_for_others(
        count in 4u32..60,
        counting in counting(),
        ops in prop::collection::vec(op(), 1..60),
        late in any::<bool>(),
        longer in select(vec![1u64, 15]),
        steady in any::<bool>(),
    ) {
        let window = 3_000_000;
        let limit = Limit::Sliding { count, window: Duration::from_micros(window) };
        let mut world = World::new(Quota::new(count, Duration::from_micros(window)));
        let mut said = None;
        for op in ops.iter().filter(|op| !matches!(op, Op::See { .. })) {
            // If wake-ups are late, permits live for up to a twentieth of the window.
            let mut op = op.clone();
            if let Op::Book { life, .. } | Op::Prefetch { life, .. } = &mut op {
                *life = (*life * longer).min(window / 20);
            }
            world.apply(&op);
            let now = counting.says(&world.arrivals, u64::from(count), window, world.now);
            let before = said.replace((world.now, now));
            let Some((at, (units, reset_in))) = (if late { before } else { said }) else { continue };
            let ago = Duration::from_micros(world.now - at);
            // A second may be the rounding.
            let Some(reset_in) = reset_in.checked_sub(ago + Duration::from_secs(1)) else { continue };
            world.ledger.advance(&world.spec, world.now);
            let left = UpstreamRemaining { reset_in: Some(reset_in), steady, ago, ..UpstreamRemaining::new(limit, units) };
            world.ledger.see(&world.spec, &left);
            let reserved: u64 = world.ledger.usage().map(|(_, _, _, reserved)| reserved).sum();
            prop_assert_eq!(reserved, 0, "{:?}: {} left", counting, units);
        }
    }
}

/// Use by the fleet and by other clients in the window of an upstream, which states its count after
/// each request of the fleet.
#[test]
fn external_usage_is_reserved_for_this_and_next_window() {
    let window = 10_000_000;
    let quota = Quota::new(60, Duration::from_micros(window));
    let mut world = World::new(quota);
    let reserved = |world: &mut World| {
        world.ledger.advance(&world.spec, world.now);
        world
            .ledger
            .usage()
            .map(|(_, _, _, reserved)| reserved)
            .sum::<u64>()
    };
    let see = |world: &mut World, units: u64, reset_in: Micros, refused: u32| {
        let limit = quota.limits()[0];
        let reset_in = Duration::from_micros(reset_in);
        world.ledger.see(
            &world.spec,
            &UpstreamRemaining {
                reset_in: Some(reset_in),
                steady: true,
                refused,
                ..UpstreamRemaining::new(limit, units)
            },
        );
    };
    assert_eq!(world.book(1, 60, 0, 10_000).0[0].count, 60);
    see(&mut world, 0, 9_900_000, 25);
    assert_eq!(reserved(&mut world), 25, "what was refused was not ours");

    // In the next window they are expected again.
    world.now += 10_100_000;
    let (grants, booked) = world.book(1, 60, 0, 10_000);
    assert_eq!(grants.iter().map(|grant| grant.count).sum::<u32>(), 35);
    assert!(booked.is_err());
    see(&mut world, 20, 9_900_000, 0);
    assert_eq!(reserved(&mut world), 25, "until it ends");

    // They used 5.
    world.now += 10_100_000;
    assert_eq!(reserved(&mut world), 5);
    see(&mut world, 60, 9_900_000, 0);
    world.now += 20_000_000;
    world.ledger.advance(&world.spec, world.now);
    assert_eq!(reserved(&mut world), 0, "they are gone");
}

/// After a restart, what is gone may have been ours.
#[test]
fn usage_before_the_log_counts_until_the_window_ends() {
    let quota = Quota::per_hour(5000);
    let limit = quota.limits()[0];
    let mut world = World::new(quota);
    let _ = world.book(1, 1, 0, 10_000);
    let reset_in = Duration::from_secs(1200);
    let valid_for = Duration::from_secs(3600);
    world.ledger.see(
        &world.spec,
        &UpstreamRemaining {
            reset_in: Some(reset_in),
            steady: true,
            valid_for,
            ..UpstreamRemaining::new(limit, 10)
        },
    );
    let granted = |world: &mut World, count| {
        world
            .book(1, count, 0, 10_000)
            .0
            .iter()
            .map(|grant| grant.count)
            .sum::<u32>()
    };
    assert_eq!(granted(&mut world, 100), 10);
    let late = world.book(1, 1, 0, 10_000).1.unwrap_err();
    assert_eq!(
        late.slot,
        START + 1_200_000_000,
        "when the upstream starts anew"
    );
    world.now += 1_200_000_000;
    assert_eq!(
        granted(&mut world, 5000),
        4989,
        "all but what was granted here within the hour"
    );
}
