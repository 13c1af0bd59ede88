//! Constants of a rule and of its twin are equal.

/// Returns the number at the end of the line of a file that begins with a given text.
fn number_after(text: &str, start: &str) -> u64 {
    let line = text.lines().find_map(|line| {
        line.trim_start()
            .trim_start_matches("pub(super) ")
            .trim_start_matches("pub(crate) ")
            .strip_prefix(start)
    });
    let line = line.expect("a line");
    line.trim_end_matches(';')
        .replace('_', "")
        .parse()
        .expect("a number")
}

/// Asserts that the constants `lua` of a script and `rust` of its twin are the same number.
macro_rules! same_constants {
    ($($script:literal $lua:literal, $twin:literal $rust:literal;)*) => {
        $({
            let lua = number_after(include_str!(concat!("../lua/", $script)), concat!("local ", $lua, " = "));
            let twin = include_str!(concat!("../../../limit/", $twin));
            assert_eq!(lua, number_after(twin, concat!("const ", $rust, " = ")), $lua);
        })*
    };
}

#[test]
fn constants_of_rules_are_those_of_their_twins() {
    same_constants! {
        "layout.lua" "CLOCK_TOLERANCE", "../store/redis/differential/model/logical_clock.rs" "CLOCK_TOLERANCE: Micros";
        "layout.lua" "CLOCK_TOLERANCE", "../store/redis/script.rs" "CLOCK_TOLERANCE: u64";
        "layout.lua" "STATED_AHEAD", "limit_set.rs" "STATED_AHEAD: Micros";
        "window.lua" "MOST_COARSE", "long_log.rs" "MOST_COARSE: usize";
        "window.lua" "MOST_FINE", "long_log.rs" "MOST_FINE: usize";
        "bucket.lua" "MOST_DELAYED", "bucket.rs" "MOST_DELAYED: usize";
        "bucket.lua" "LONGEST_AGO", "bucket.rs" "LONGEST_AGO: Micros";
        "bucket.lua" "MOST_TICKS", "bucket.rs" "MOST_TICKS: u128";
        "bucket.lua" "UNIT_TICKS", "bucket.rs" "UNIT_TICKS: u128";
        "fixed.lua" "MOST_WINDOWS", "fixed.rs" "MOST_WINDOWS: usize";
        "fixed.lua" "SMALLEST_STEP", "fixed.rs" "SMALLEST_STEP: Micros";
        "external.lua" "OLDEST_RESPONSE", "external.rs" "OLDEST_RESPONSE: Micros";
        "advance.lua" "TOLERANCE", "advance.rs" "TOLERANCE: Micros";
        "advance.lua" "MOST_ADVANCE", "advance.rs" "MOST: usize";
        "fixed.lua" "MOST_JOINED_WINDOWS", "fixed.rs" "MOST_JOINED_WINDOWS: u64";
        "ledger.lua" "MOST_LIMITS", "limit_set.rs" "MOST_LIMITS: usize";
        "ledger.lua" "MOST_ROUNDS", "limit_set.rs" "MOST_ROUNDS: usize";
        "ledger.lua" "MOST_RETURNED", "returned.rs" "MOST: usize";
        "ledger.lua" "LONGEST_RECOVERY", "../store/redis/differential/model/recovery.rs" "LONGEST_RECOVERY: Micros";
        "ledger.lua" "SHORTEST_TRUST", "../store/redis/differential/model/recovery.rs" "SHORTEST_TRUST: Micros";
        "in_flight.lua" "LONGEST_CLAIM_DELAY", "../store/redis/differential/model/recovery.rs" "LONGEST_CLAIM_DELAY: Micros";
        "in_flight.lua" "MOST_BATCHES", "in_flight.rs" "MOST_BATCHES: usize";
    }
    let external = include_str!("../lua/external.lua");
    let longest = number_after(external, "local LONGEST_LIFE = ");
    assert_eq!(u128::from(longest), crate::tuning::LONGEST_LIFE.as_micros());
}
