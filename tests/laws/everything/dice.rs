//! Random numbers that a seed repeats.

use std::env;
use std::sync::OnceLock;

/// SplitMix64, by Sebastiano Vigna (public domain). The same seed rolls the same numbers.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn seeded(seed: u64) -> Self {
        Dice(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Returns a number below `end`, which is at least 1.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns a number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns the same as [`between`](Self::between), as a count of units.
    pub(crate) fn count(&mut self, low: u32, high: u32) -> u32 {
        u32::try_from(self.between(low.into(), high.into())).expect("it is between two counts")
    }

    /// Returns true `percent` times in a hundred.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        let index = self.below(from.len() as u64);
        from[usize::try_from(index).expect("an index fits")].clone()
    }
}

/// Returns the dice of history `number` of a run with this seed.
pub(crate) fn of_history(seed: u64, number: u64) -> Dice {
    let mut both = Dice::seeded(seed);
    let mut dice = Dice::seeded(both.next() ^ number.wrapping_mul(0xd134_2543_de82_ef95));
    dice.next();
    dice
}

/// The file that gets what happened in each history: see `tests/before/compare`.
pub(crate) const TRANSCRIPT: &str = "TOLLGATE_TRANSCRIPT";

/// Returns whether what happens is written down.
pub(crate) fn is_transcribed() -> bool {
    static IS_SET: OnceLock<bool> = OnceLock::new();
    *IS_SET.get_or_init(|| env::var_os(TRANSCRIPT).is_some())
}

/// Returns the only history to run, if `TOLLGATE_HISTORY` states one.
pub(crate) fn only_history() -> Option<u64> {
    let stated = env::var("TOLLGATE_HISTORY").ok()?;
    Some(
        stated
            .parse()
            .expect("TOLLGATE_HISTORY is the number of a history"),
    )
}
