//! How a quota is divided among classes of requests.

use std::time::Duration;

use super::{Limit, Quota};
use crate::config_error::ConfigError;

/// A class of requests with a share of the quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClassShare {
    pub(crate) class: &'static str,
    /// The percentage of each limit that the class has.
    pub(crate) percent: u8,
    /// The percentage of its part that the class lends at most.
    pub(crate) lends: u8,
}

/// How a quota is divided among classes of requests. What the shares leave is the part of all requests
/// without a share, the *rest*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    shares: Vec<ClassShare>,
}

impl ClassShare {
    /// The percentage of its part that a class lends by default.
    pub(crate) const LENDS: u8 = 97;

    /// The most classes with a share.
    pub(crate) const MOST: usize = 7;
}

impl Division {
    /// Makes the division into these shares and the rest.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the shares cannot be had together.
    pub(crate) fn new(shares: &[ClassShare]) -> Result<Self, ConfigError> {
        let out_of_range =
            |value: String, allowed| Err(ConfigError::out_of_range("share", value, allowed));
        if shares.len() > ClassShare::MOST {
            return out_of_range(format!("{} classes", shares.len()), "at most seven classes");
        }
        for (index, share) in shares.iter().enumerate() {
            let ClassShare { class, percent, .. } = *share;
            if shares[..index].iter().any(|other| other.class == class) {
                return out_of_range(format!("{class:?}"), "a class that has no share yet");
            }
            if !(1..=100).contains(&percent) {
                return out_of_range(
                    format!("{percent} % for {class:?}"),
                    "from 1 to 100 per cent",
                );
            }
        }
        let all: u32 = shares.iter().map(|share| u32::from(share.percent)).sum();
        if all > 100 {
            return out_of_range(format!("{all} % in all"), "at most 100 per cent in all");
        }
        Ok(Division {
            shares: shares.to_vec(),
        })
    }

    /// Returns the percentage of the part number `part` that it lends at most. The rest is the first.
    pub(crate) fn lends(&self, part: usize) -> u8 {
        let share = part.checked_sub(1).and_then(|index| self.shares.get(index));
        share.map_or(ClassShare::LENDS, |share| share.lends)
    }

    /// Returns the percentage of each limit that the part number `part` has. The rest is the first.
    pub(crate) fn percent(&self, part: usize) -> u8 {
        let percents = self.percents();
        match part.checked_sub(1) {
            Some(index) => percents.get(index).copied().unwrap_or(0),
            None => 100 - percents.iter().sum::<u8>(),
        }
    }

    /// Returns the percentage of each limit that each class has. Something is left for the rest: if the
    /// shares are the whole limit, the largest of them gives up one per cent.
    fn percents(&self) -> Vec<u8> {
        let mut percents: Vec<u8> = self.shares.iter().map(|share| share.percent).collect();
        let all: u32 = percents.iter().copied().map(u32::from).sum();
        if all == 100
            && let Some(largest) = percents.iter_mut().rev().max()
        {
            *largest -= 1;
        }
        percents
    }

    /// Divides the limits of rates of `quota`. Returns the part of the rest, and then that of each
    /// class. Each part has the whole limit of calls in flight, because the store divides that
    /// among the claims.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if a part of a limit would be less than one unit.
    pub(crate) fn parts(&self, quota: &Quota) -> Result<Vec<Quota>, ConfigError> {
        let percents = self.percents();
        let mut parts = vec![*quota; 1 + percents.len()];
        if quota.limits().len() == Quota::MOST_LIMITS {
            return Err(ConfigError::new(
                "a quota with shares holds at most 7 limits, bursts included",
            ));
        }
        for (index, limit) in quota.limits().iter().enumerate() {
            let mut rest = *limit;
            for (class, percent) in percents.iter().enumerate() {
                let part = part(*limit, *percent)
                    .ok_or_else(|| undividable(*limit, self.shares[class].class))?;
                rest = rest.with_units(rest.largest_cost() - part.largest_cost());
                parts[1 + class].limits[index] = part;
            }
            let rest = with_refill(rest, *limit, self.percent(0));
            parts[0].limits[index] = rest.ok_or_else(|| undividable(*limit, "the rest"))?;
        }
        Ok(parts)
    }
}

fn undividable(limit: Limit, class: &'static str) -> ConfigError {
    ConfigError::new(format!(
        "quota {limit}: the share of {class:?} is less than one unit: give the class a larger share, or write the quota with \
         a longer window or a burst, such as Quota::bucket(10).refill(1, d) instead of Quota::every(d); all classes \
         without a share have the rest together"
    ))
}

/// Returns `percent` of a limit, or `None` if that is less than one unit.
fn part(limit: Limit, percent: u8) -> Option<Limit> {
    match percent_of(limit.largest_cost(), percent) {
        0 => None,
        units => with_refill(limit.with_units(units), limit, percent),
    }
}

/// Returns `percent` of a count, rounded down.
pub(crate) fn percent_of(count: u32, percent: u8) -> u32 {
    let part = u64::from(count) * u64::from(percent) / 100;
    u32::try_from(part).unwrap_or(u32::MAX)
}

/// Gives a bucket `percent` of the refill of `limit`: exactly, unless that takes a longer window than a limit may have.
/// Then it is rounded down. Returns `None` if that is less than one unit. Other limits stay as they are.
fn with_refill(bucket: Limit, limit: Limit, percent: u8) -> Option<Limit> {
    let (Limit::Bucket { capacity, .. }, Limit::Bucket { count, window, .. }) = (bucket, limit)
    else {
        return Some(bucket);
    };
    let units = u64::from(count) * u64::from(percent);
    let common = greatest_common_divisor(units, 100);
    let (units, windows) = (units / common, 100 / common);
    let nanos = window.as_nanos() * u128::from(windows);
    let exact = u32::try_from(units)
        .ok()
        .filter(|units| *units <= Quota::LARGEST_COUNT)
        .zip(u64::try_from(nanos).ok().map(Duration::from_nanos))
        .filter(|(_, window)| *window <= Quota::LONGEST_WINDOW);
    let (count, window) = exact.unwrap_or((percent_of(count, percent), window));
    (count > 0).then_some(Limit::Bucket {
        capacity,
        count,
        window,
    })
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(class: &'static str, percent: u8) -> ClassShare {
        ClassShare {
            class,
            percent,
            lends: ClassShare::LENDS,
        }
    }

    fn division(percents: &[u8]) -> Division {
        const NAMES: [&str; 7] = ["a", "b", "c", "d", "e", "f", "g"];
        let shares: Vec<ClassShare> = NAMES
            .iter()
            .zip(percents)
            .map(|(class, percent)| share(class, *percent))
            .collect();
        Division::new(&shares).unwrap()
    }

    #[test]
    fn parts_are_what_the_shares_say() {
        let quota = Quota::per_second(50).and(Quota::per_hour(5000));
        let parts = division(&[50, 30]).parts(&quota).unwrap();
        let texts: Vec<String> = parts.iter().map(Quota::to_string).collect();
        assert_eq!(
            texts,
            [
                "10/1s, 1000/3600s",
                "25/1s, 2500/3600s",
                "15/1s, 1500/3600s"
            ]
        );
    }

    #[test]
    fn the_whole_limit_leaves_one_unit() {
        let parts = division(&[100]).parts(&Quota::per_second(50)).unwrap();
        assert_eq!(parts, [Quota::per_second(1), Quota::per_second(49)]);
    }

    #[test]
    fn each_part_has_the_whole_limit_of_calls_in_flight() {
        let (quota, division) = (Quota::in_flight(8), division(&[50, 50]));
        assert_eq!(division.parts(&quota).unwrap(), [quota; 3]);
        assert_eq!([0, 1, 2].map(|part| division.percent(part)), [1, 49, 50]);
    }

    #[test]
    fn refills_are_divided_exactly() {
        let second = Duration::from_secs(1);
        let quota = Quota::bucket(40).refill(2, second);
        let parts = division(&[30]).parts(&quota).unwrap();
        let expected = [
            Quota::bucket(28).refill(7, second * 5),
            Quota::bucket(12).refill(3, second * 5),
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn what_cannot_be_divided_is_an_error() {
        let every = Quota::every(Duration::from_secs(2));
        let error = division(&[50]).parts(&every).unwrap_err();
        assert!(
            error.to_string().contains(r#"the share of "a" is less"#),
            "{error}"
        );
        let few = division(&[10, 10]).parts(&Quota::per_second(5));
        assert!(few.is_err());
    }

    proptest! {
        #![proptest_config(histories::config(64))]

        /// The parts of a limit add up to the limit, and no part is empty.
        #[test]
        fn parts_add_up(
            percents in prop::collection::vec(1u8..=14, 1..=7),
            (capacity, count) in (1u32..5000, prop_oneof![1u32..4, 1u32..5000]),
            seconds in prop_oneof![Just(1), 1u64..60 * 86_400],
            kind in 0..3,
        ) {
            let window = Duration::from_secs(seconds);
            let quota = match kind {
                0 => Quota::new(count, window),
                1 => Quota::fixed(count, window),
                _ => Quota::bucket(capacity).refill(count, window),
            };
            let Ok(parts) = division(&percents).parts(&quota) else {
                return Ok(());
            };
            let limits = || parts.iter().map(|part| part.limits()[0]);
            prop_assert!(limits().all(|limit| limit.largest_cost() > 0));
            let whole = quota.limits()[0];
            let most: u32 = limits().map(|limit| limit.largest_cost()).sum();
            prop_assert_eq!(most, whole.largest_cost());
            let rate = |limit: Limit| f64::from(limit.count()) / limit.window().as_secs_f64();
            let rates: f64 = limits().map(rate).sum();
            prop_assert!(rates <= rate(whole) * (1.0 + 1e-9), "{} of {}", rates, rate(whole));
        }
    }
}
