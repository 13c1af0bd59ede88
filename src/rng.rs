//! Random numbers. No other file asks for any.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Returns an unpredictable number, from a seed of the operating system for each process.
pub(crate) fn dice() -> u64 {
    static ROLLS: AtomicU64 = AtomicU64::new(0);
    #[cfg(feature = "__lab")]
    if let Some(roll) = laboratory::roll() {
        return roll;
    }
    RandomState::new().hash_one(ROLLS.fetch_add(1, Ordering::Relaxed))
}

/// Returns two random numbers, the same for as long as the process runs.
pub(crate) fn secret_of_process() -> [u64; 2] {
    static SECRET: LazyLock<[u64; 2]> =
        LazyLock::new(|| [0, 1].map(|half| RandomState::new().hash_one(half)));
    *SECRET
}

/// In the laboratory the same seed is the same run, whatever rolls dice in it.
#[cfg(feature = "__lab")]
pub(crate) mod laboratory {
    use std::cell::RefCell;

    use super::Dice;

    thread_local! {
        static DICE: RefCell<Option<Dice>> = const { RefCell::new(None) };
    }

    /// From now on this thread rolls `dice`.
    pub fn begin(dice: Dice) {
        DICE.set(Some(dice));
    }

    pub(super) fn roll() -> Option<u64> {
        DICE.with_borrow_mut(|dice| dice.as_mut().map(Dice::next))
    }
}

/// Returns a random span from half of `span` to all of it, so that processes that failed together
/// do not retry together.
pub(crate) fn jittered(span: Duration) -> Duration {
    let half = span / 2;
    half.saturating_add(half.mul_f64(dice() as f64 / u64::MAX as f64))
}

/// The pauses between attempts: jittered, and twice as long after each attempt, up to the longest.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    pub(crate) const fn between(shortest: Duration, longest: Duration) -> Self {
        Backoff {
            next: shortest,
            longest,
        }
    }

    /// Makes pauses from 50 ms to a second.
    #[cfg(feature = "redis")]
    pub(crate) const fn new() -> Self {
        Backoff::between(Duration::from_millis(50), Duration::from_secs(1))
    }

    /// Makes pauses from 50 ms to `longest`.
    #[cfg(feature = "redis")]
    pub(crate) fn up_to(longest: Duration) -> Self {
        Backoff::between(Duration::from_millis(50).min(longest), longest)
    }

    /// Returns the pause before the next attempt.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(self.longest);
        pause
    }
}

/// Dice for one line of calls or for one simulation: the same seed rolls the same numbers, always.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Dice that roll the same for the same seed.
    pub fn seeded(seed: u64) -> Self {
        Dice(seed)
    }

    /// The next number, from 0 up to, and without, 1; all alike likely.
    pub fn roll(&mut self) -> f64 {
        // The upper 53 bits: as many as a double keeps.
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The next number, from `low` up to, and without, `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.roll()
    }

    /// SplitMix64, by Sebastiano Vigna (public domain): one addition and a finish, any seed is
    /// good.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_roll_what_is_published_for_their_generator() {
        assert_eq!(Dice::seeded(0).next(), 0xe220_a839_7b1d_cdaf);
        let mut dice = Dice::seeded(1);
        let rolls: Vec<f64> = (0..100_000).map(|_| dice.between(2.0, 4.0)).collect();
        assert!(rolls.iter().all(|roll| (2.0..4.0).contains(roll)));
        assert!((rolls.iter().sum::<f64>() / 100_000.0 - 3.0).abs() < 0.01);
    }
}
