//! tollgate beside its peers, in one run: `cargo run --release -p tollgate-benches`.
//!
//! Prints Markdown. Nothing here passes or fails: numbers are for reading, on a machine that does nothing else.

mod at_hand;
mod inner;
mod measure;
mod peers;

fn main() {
    // Some peers make their timers early. None of them is ever waited for.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime of one thread needs nothing but memory");
    let _guard = runtime.enter();
    at_hand::report();
}
