//! How long requests waited or calls took, in buckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The upper bounds of the buckets, in microseconds.
const BOUNDS: [u64; 17] = [
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    15_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
];

/// The upper bounds of the buckets of [`Stats::waits`](super::Stats::waits), in seconds.
#[cfg(feature = "metrics")]
pub(crate) const WAIT_SECONDS: [f64; BOUNDS.len()] = seconds(&BOUNDS);

#[cfg(feature = "metrics")]
pub(crate) const fn seconds(bounds: &[u64; BOUNDS.len()]) -> [f64; BOUNDS.len()] {
    let mut seconds = [0.0; BOUNDS.len()];
    let mut index = 0;
    while index < BOUNDS.len() {
        seconds[index] = bounds[index] as f64 / 1e6;
        index += 1;
    }
    seconds
}

/// How long requests waited, or calls took. The buckets of waits end at 1, 2.5, 5, 10, 25, 50, 100, 250
/// and 500 ms, at 1, 2.5, 5, 10, 15, 30 and 60 s, and at 5 min. Longer waits are in a last bucket
/// without an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    bounds: &'static [u64; BOUNDS.len()],
    counts: [u64; BOUNDS.len() + 1],
    sum: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        WaitCounts::default().read()
    }
}

impl Histogram {
    /// Returns the upper bound of each bucket with the number of waits in it. A wait is in the first
    /// bucket whose bound it does not exceed. The last bound is [`Duration::MAX`].
    pub fn counts(&self) -> impl Iterator<Item = (Duration, u64)> {
        let bounds = self.bounds.iter().copied().map(Duration::from_micros);
        bounds.chain([Duration::MAX]).zip(self.counts)
    }

    /// Returns the number of waits.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all waits.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Returns the upper bound of the bucket in which the quantile lies, such as 0.99 for the wait that
    /// 99 % do not exceed. `None` if no request waited.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let all = self.count();
        let rank = (all as f64 * quantile.clamp(0.0, 1.0)).ceil().max(1.0);
        let mut below = 0;
        self.counts()
            .find(|(_, count)| {
                below += count;
                all > 0 && below as f64 >= rank
            })
            .map(|(bound, _)| bound)
    }
}

/// A [`Histogram`] that several threads count in.
#[derive(Debug)]
pub(crate) struct WaitCounts {
    /// The upper bounds of the buckets, in microseconds.
    bounds: &'static [u64; BOUNDS.len()],
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Default for WaitCounts {
    fn default() -> Self {
        WaitCounts::new(&BOUNDS)
    }
}

impl WaitCounts {
    pub(crate) fn new(bounds: &'static [u64; BOUNDS.len()]) -> Self {
        WaitCounts {
            bounds,
            counts: Default::default(),
            sum_micros: AtomicU64::new(0),
        }
    }

    pub(crate) fn add(&self, wait: Duration) {
        let micros = u64::try_from(wait.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        let bucket = self.bounds.partition_point(|bound| *bound < micros);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Histogram {
        let mut counts = [0; BOUNDS.len() + 1];
        for (count, bucket) in counts.iter_mut().zip(&self.counts) {
            *count = bucket.load(Ordering::Relaxed);
        }
        Histogram {
            bounds: self.bounds,
            counts,
            sum: Duration::from_micros(self.sum_micros.load(Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_wait_is_in_the_first_bucket_that_reaches_it() {
        let waits = WaitCounts::default();
        for micros in [1000, 1001, 300_000_000, 300_000_001] {
            waits.add(Duration::from_micros(micros));
        }
        let full = waits.read();
        let full: Vec<_> = full.counts().filter(|(_, count)| *count > 0).collect();
        let bounds = [1000, 2500, 300_000_000].map(Duration::from_micros);
        let expected = [
            (bounds[0], 1),
            (bounds[1], 1),
            (bounds[2], 1),
            (Duration::MAX, 1),
        ];
        assert_eq!(full, expected);
        assert_eq!(Histogram::default().quantile(0.5), None);
    }

    proptest! {
        #![proptest_config(histories::config(64))]

        #[test]
        fn a_quantile_is_the_bucket_of_its_wait(
            mut micros in prop::collection::vec(0..400_000_000u64, 1..50),
            quantile in 0.0..=1.0f64,
        ) {
            let waits = WaitCounts::default();
            micros.iter().for_each(|micros| waits.add(Duration::from_micros(*micros)));
            micros.sort_unstable();
            let rank = (micros.len() as f64 * quantile).ceil().max(1.0) as usize;
            let exact = Duration::from_micros(micros[rank - 1]);
            let read = waits.read();
            prop_assert_eq!(read.count(), micros.len() as u64);
            prop_assert_eq!(read.sum(), Duration::from_micros(micros.iter().sum()));
            let bound = read.quantile(quantile).unwrap();
            prop_assert!(exact <= bound);
            let lower = read.counts().map(|(bound, _)| bound).filter(|other| *other < bound).last();
            prop_assert!(lower.is_none_or(|lower| exact > lower));
        }
    }
}
