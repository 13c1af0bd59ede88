//! The names of units that one process reads from texts are kept, so their number is bounded.

use tollgate::Quota;

#[test]
fn names_of_units_beyond_256_are_refused_with_the_reason() {
    for number in 0..256 {
        format!("9 unit-{number}/s").parse::<Quota>().unwrap();
    }
    let error = "9 customer-17/s".parse::<Quota>().unwrap_err().to_string();
    assert!(
        error.contains("\"customer-17\"") && error.contains("256 other names"),
        "{error}"
    );
    // Those that are known cost nothing.
    for text in ["9 unit-0/s", "9 tokens/s", "9/s"] {
        text.parse::<Quota>().unwrap();
    }
}
