//! The checks of a quota, its parts and its text.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use super::*;

const SLACKS: Slacks = Slacks {
    transit: Duration::from_millis(10),
    boundary: Duration::from_millis(100),
    rate_loss: Slacks::RATE_LOSS,
};

fn check(quota: Quota) -> Result<(), ConfigError> {
    quota.check(SLACKS).map(|_| ())
}

#[test]
fn lives_follow_the_time_between_slots() {
    let millis = Duration::from_millis;
    for (quota, life) in [
        (Quota::per_second(50), 10),
        (Quota::per_second(2), 10),
        (Quota::per_second(1), 20),
        (Quota::new(1, millis(2000)), 40),
        (Quota::per_minute(1), 50),
        (Quota::per_minute(1).and(Quota::per_second(5)), 10),
        (Quota::every(millis(1000)), 20),
        (Quota::in_flight(5), 10),
    ] {
        assert_eq!(quota.check(SLACKS), Ok(millis(life)), "{quota}");
    }
    // The spacing is fine against the margin: the allowed loss decides how long permits live.
    let every = Quota::every(millis(150)).check(SLACKS).unwrap();
    assert!(every > millis(6) && every < millis(7), "{every:?}");
    let fine = Slacks {
        transit: millis(1),
        rate_loss: 15,
        ..SLACKS
    };
    assert_eq!(
        Quota::every(millis(20)).check(fine),
        Ok(Duration::from_nanos(2_529_411))
    );
    let error = Quota::every(millis(20))
        .check(Slacks {
            rate_loss: 10,
            ..fine
        })
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("loses 14 %") && error.contains(".max_rate_loss(14)"),
        "{error}"
    );
}

/// A layer refuses a larger value of `max_rate_loss`.
#[test]
fn errors_name_no_loss_that_cannot_be_accepted() {
    for spacing in [5, 10] {
        let error = Quota::every(Duration::from_millis(spacing)).check(Slacks::DEFAULT);
        let error = error.unwrap_err().to_string();
        assert!(
            !error.contains("max_rate_loss") && error.contains(".burst("),
            "{error}"
        );
    }
}

/// The share of the count that is used: the refill, less what the margin of a permit costs.
#[test]
fn sliding_counters_use_most_of_the_count() {
    let second = Duration::from_secs(1);
    for (count, window, used) in [
        (1, second, 48),
        (2, second, 48),
        (10, second, 80),
        (25, second, 92),
        (50, second, 96),
        (100, second * 2, 98),
        (1000, second, 97),
        (25, second * 60, 93),
        (600, second * 60, 99),
        (1_000_000, second, 98),
    ] {
        let quota = Quota::sliding_counter(count, window);
        let life = quota.check(SLACKS).unwrap();
        let [
            Limit::Bucket {
                capacity,
                count: refill,
                window: period,
                ..
            },
        ] = *quota.limits()
        else {
            panic!("{quota}")
        };
        if count > 1 {
            assert_eq!((capacity + refill, period), (count, window), "{quota}");
        }
        let between = period / refill;
        let margin = life + SLACKS.transit;
        let delayed = (margin + 2 * between).saturating_sub(between * capacity);
        let spacing = between.max(delayed);
        let share = 100 * window.as_nanos() / spacing.as_nanos() / u128::from(count);
        assert_eq!(share, used, "{quota}");
    }
    assert!(check(Quota::sliding_counter(0, second)).is_err());
    assert!(check(Quota::sliding_counter(5, Duration::ZERO)).is_err());
    assert!(check(Quota::sliding_counter(u32::MAX, Duration::MAX)).is_err());
}

#[test]
fn zero_huge_and_overflowing_quotas_are_errors_never_panics() {
    let hour = Duration::from_secs(3600);
    for (quota, part) in [
        (Quota::per_second(0), "0"),
        (Quota::bucket(0).refill(1, hour), "0"),
        (Quota::bucket(5).refill(0, hour), "0"),
        (Quota::per_second(50).burst(0), "0"),
        (Quota::per_second(u32::MAX), "1000000000"),
        (Quota::in_flight(0), "0 in flight"),
        (Quota::in_flight(u32::MAX), "1000000000"),
        (Quota::in_flight(3).burst(2), "in flight"),
        (Quota::bucket(u32::MAX).refill(1, hour), "1000000000"),
        (Quota::new(1, Duration::ZERO), "1ms"),
        (Quota::new(1, Duration::MAX), "366 days"),
        (Quota::every(Duration::ZERO), "1ms"),
        (Quota::every(Duration::MAX), "366 days"),
        (Quota::fixed(1, Duration::MAX), "366 days"),
        (
            Quota::fixed(10, Duration::from_millis(300)),
            "boundary_guard",
        ),
        (Quota::every(hour).burst(3), "burst"),
        (
            Quota::bucket(1_000_000).refill(1, hour),
            "41666 days to fill",
        ),
    ] {
        let error = check(quota).unwrap_err().to_string();
        assert!(error.contains(part), "{quota}: {error}");
    }
    let nine = (0..8).fold(Quota::per_second(1), |quota, _| {
        quota.and(Quota::per_second(1))
    });
    assert!(check(nine).unwrap_err().to_string().contains('8'));
    assert_eq!(check(Quota::per_day(Quota::LARGEST_COUNT)), Ok(()));
}

#[test]
fn too_fine_error_names_the_smallest_burst_that_works() {
    for (quota, smallest) in [
        (Quota::per_second(1000).burst(10), 21),
        (Quota::per_second(50).burst(1), 2),
        (Quota::every(Duration::from_millis(100)), 2),
        (Quota::bucket(5).refill(10_000, Duration::from_secs(1)), 201),
    ] {
        let error = check(quota).unwrap_err().to_string();
        let named = format!("allow a burst of {smallest}, which loses nothing");
        assert!(error.contains(&named), "{error}");
        let fine = quota
            .limits()
            .iter()
            .find(|limit| matches!(limit, Limit::Bucket { .. }));
        let fine = fine.unwrap();
        let works = Quota::bucket(smallest).refill(fine.count(), fine.window());
        assert_eq!(check(works), Ok(()), "{works}");
    }
    for fine in [
        Quota::per_second(50).burst(10),
        Quota::every(Duration::from_millis(180)),
        Quota::per_second(1000).burst(21),
        Quota::new(1, Duration::from_millis(100)), // a window says what it says
    ] {
        assert_eq!(check(fine), Ok(()), "{fine}");
    }
}

#[test]
fn quota_part_below_one_unit_stretches_the_window() {
    let [second, minute] = [1, 60].map(Duration::from_secs);
    for (quota, part, of, expected) in [
        (Quota::new(100, second), 1, 4, Quota::new(25, second)),
        (Quota::new(10, second), 1, 3, Quota::new(3, second)),
        (Quota::new(2, second), 1, 4, Quota::new(1, 2 * second)),
        (Quota::new(1, minute), 1, 8, Quota::new(1, 8 * minute)),
        (
            Quota::new(10, second).and(Quota::in_flight(3)),
            1,
            2,
            Quota::new(5, second),
        ),
        (
            Quota::bucket(8).refill(2, second),
            1,
            4,
            Quota::bucket(2).refill(2, 4 * second),
        ),
        (Quota::every(second), 1, 4, Quota::every(4 * second)),
        (Quota::fixed(7, minute), 1, 2, Quota::fixed(3, minute)),
        (
            Quota::new(25, 5 * second).and(Quota::new(300, minute)),
            30,
            300,
            { Quota::new(2, 5 * second).and(Quota::new(30, minute)) },
        ),
        (Quota::new(10, second), 9, 4, Quota::new(10, second)),
        (Quota::new(10, second), 0, 4, Quota::new(2, second)),
    ] {
        assert_eq!(quota.part(part, of), expected, "{quota}, {part} of {of}");
    }
}

#[test]
fn smaller_of_two_in_flight_limits_holds() {
    for (one, other) in [(3, 8), (8, 3), (3, 3)] {
        assert_eq!(
            Quota::in_flight(one)
                .and(Quota::in_flight(other))
                .most_in_flight(),
            Some(3)
        );
    }
    let both = Quota::in_flight(8).and(Quota::per_second(5)).burst(2);
    assert_eq!(both.to_string(), "5/1s, 2 at once, then 5/1s, 8 in flight");
    assert_eq!(both.limits().len(), 2);
}

#[test]
fn equal_quotas_may_be_built_in_any_way() {
    let hash = |quota| BuildHasherDefault::<DefaultHasher>::default().hash_one(quota);
    let (one, other) = (
        Quota::in_flight(8).and(Quota::per_second(5)),
        Quota::per_second(5).and(Quota::in_flight(8)),
    );
    assert_eq!(one, other);
    assert_eq!(hash(one), hash(other));
    assert_ne!(one, Quota::per_second(5));
    assert_ne!(one, one.and(Quota::per_minute(5)));
}

#[test]
fn a_cost_fits_when_it_fits_the_smallest_limit() {
    assert_eq!(Quota::per_second(50).largest_cost(), 50);
    assert_eq!(Quota::per_second(50).burst(10).largest_cost(), 10);
    assert_eq!(
        Quota::per_second(50)
            .and(Quota::per_minute(20))
            .largest_cost(),
        20
    );
}
