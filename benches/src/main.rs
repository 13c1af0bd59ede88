//! tollgate beside its peers, in one run:
//!
//! ```sh
//! cargo run --release -p tollgate-benches              # a permit at hand, in memory
//! cargo run --release -p tollgate-benches -- hand "one key"   # only the groups of that title
//! cargo run --release -p tollgate-benches -- keys      # a million keys, in memory
//! cargo run --release -p tollgate-benches -- routes    # a table of routes
//! cargo run --release -p tollgate-benches -- bursts    # many tasks that wait at once
//! cargo run --release -p tollgate-benches -- bursts herd   # only that table: waiters, herd, costs or collapse
//! cargo run --release -p tollgate-benches -- signals   # reading a response
//! cargo run --release -p tollgate-benches --features paused -- joint  # requests with several keys
//! cargo run --release -p tollgate-benches -- redis     # one decision in Redis
//! cargo run --release -p tollgate-benches -- fleet     # processes that share a limit; --rounds N, --chart FILE
//! cargo run --release -p tollgate-benches -- growth    # tollgate with more processes and more keys; --rounds N
//! ```
//!
//! Prints Markdown. No benchmark passes or fails: the numbers are for reading, on an otherwise idle
//! machine.

mod at_hand;
mod bursts;
mod contenders;
mod fleet;
mod in_redis;
mod inner;
#[cfg(feature = "paused")]
mod joint;
mod machine;
mod many_keys;
mod measure;
mod peers;
mod routes;
mod signals;

use contenders::Failure;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first() {
        None => with_timers(|| at_hand::report(None))?,
        Some((bench, only)) if bench == "hand" => {
            with_timers(|| at_hand::report(only.first().map(String::as_str)))?;
        }
        Some((bench, only)) if bench == "bursts" => {
            bursts::report(only.first().map(String::as_str));
        }
        Some((bench, _)) if bench == "keys" => with_timers(many_keys::report)?,
        Some((bench, _)) if bench == "routes" => with_timers(routes::report)?,
        Some((bench, _)) if bench == "signals" => signals::report(),
        #[cfg(feature = "paused")]
        Some((bench, _)) if bench == "joint" => joint::report(),
        Some((bench, _)) if bench == "redis" => in_redis::report(),
        Some((bench, options)) if bench == "fleet" => {
            fleet::report(&fleet::Options::from_words(options)?)?;
        }
        Some((bench, options)) if bench == "growth" => {
            fleet::growth::report(&fleet::Options::from_words(options)?)?;
        }
        Some((child, task)) if child == fleet::CHILD => {
            let task =
                fleet::ChildTask::from_words(task).ok_or("a child is started by the bench")?;
            fleet::child(&task)?;
        }
        Some((other, _)) => {
            return Err(format!(
                "{other}: hand, bursts, keys, routes, signals, joint, redis, fleet, growth, or nothing"
            )
            .into());
        }
    }
    Ok(())
}

/// Runs a benchmark whose limiters create timers early, although no call ever waits for one.
fn with_timers(bench: impl FnOnce()) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let _guard = runtime.enter();
    bench();
    Ok(())
}
