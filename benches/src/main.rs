//! tollgate beside its peers, in one run: `cargo run --release -p tollgate-benches`; with `-- redis`, in Redis; with
//! `-- keys`, what many keys cost.
//!
//! Prints Markdown. Nothing here passes or fails: numbers are for reading, on a machine that does nothing else.

mod at_hand;
mod in_redis;
mod inner;
mod many_keys;
mod measure;
mod peers;

fn main() {
    // Some peers make their timers early. None of them is ever waited for.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime of one thread needs nothing but memory");
    let guard = runtime.enter();
    let asked_for = |what: &str| std::env::args().any(|word| word == what);
    if asked_for("redis") {
        drop(guard);
        in_redis::report();
    } else if asked_for("keys") {
        many_keys::report();
    } else {
        at_hand::report();
    }
}
