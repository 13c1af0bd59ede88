//! How many random histories a test checks, and from which seed: the one knob of all of them.
//!
//! A run of one commit gives the same answer twice, so the seed is fixed. `TOLLGATE_SEED` sets another
//! one: a number, or any text. `TOLLGATE_CASES` multiplies the number of histories, and of rounds and
//! seconds of the tests that inject faults: `./.ci/run` sets both.

use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::test_runner::{Config, RngSeed};

/// The seed of `./tests/run`. Nothing is special about it.
const USUAL_SEED: u64 = 20_261_126;

/// Returns the seed of every generator.
pub fn seed() -> u64 {
    let Ok(stated) = std::env::var("TOLLGATE_SEED") else {
        return USUAL_SEED;
    };
    stated.parse().unwrap_or_else(|_| {
        let mut hasher = DefaultHasher::new();
        stated.hash(&mut hasher);
        hasher.finish()
    })
}

/// Returns `usual` times `TOLLGATE_CASES`, and at least 1.
///
/// # Panics
///
/// If `TOLLGATE_CASES` is not a number.
pub fn cases(usual: u32) -> u32 {
    let times = std::env::var("TOLLGATE_CASES").map_or(1.0, |stated| {
        let times = stated.parse::<f64>();
        times.unwrap_or_else(|_| panic!("TOLLGATE_CASES={stated}: not a number, such as 0.5 or 10"))
    });
    (f64::from(usual) * times).round().max(1.0) as u32
}

/// Returns the settings of a law that checks `usual` histories, and prints how to repeat them. The
/// test harness shows that line if the test fails.
pub fn config(usual: u32) -> Config {
    eprintln!("{}", again());
    let cases = cases(usual);
    Config {
        cases,
        // As many of the inputs may be left out, whatever their number.
        max_global_rejects: cases.saturating_add(1024),
        rng_seed: RngSeed::Fixed(seed()),
        ..Config::default()
    }
}

/// Returns whether figures that a stall of the machine can spoil are judged: if `TOLLGATE_CALM` is set.
pub fn is_calm() -> bool {
    std::env::var_os("TOLLGATE_CALM").is_some()
}

/// Returns the command that repeats the test that calls this.
pub fn again() -> String {
    let thread = std::thread::current();
    let times = std::env::var("TOLLGATE_CASES").unwrap_or_else(|_| "1".to_owned());
    format!(
        "again: TOLLGATE_SEED={} TOLLGATE_CASES={times} cargo test --workspace --all-features -- {}",
        seed(),
        thread.name().unwrap_or("")
    )
}
