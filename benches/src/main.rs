//! tollgate beside its peers, in one run: `cargo run --release -p tollgate-benches`; with `-- redis`, in Redis.
//!
//! Prints Markdown. Nothing here passes or fails: numbers are for reading, on a machine that does nothing else.

mod at_hand;
mod in_redis;
mod inner;
mod measure;
mod peers;

fn main() {
    // Some peers make their timers early. None of them is ever waited for.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime of one thread needs nothing but memory");
    let guard = runtime.enter();
    if std::env::args().any(|word| word == "redis") {
        drop(guard);
        in_redis::report();
    } else {
        at_hand::report();
    }
}
