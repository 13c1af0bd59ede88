//! Many processes behind one limit: starts them, sends "go", and reads their reports.
//!
//! A worker is a process that calls through tollgate. Its program is `src/worker`; by hand it runs
//! like this:
//!
//! ```sh
//! redis-server --port 7000 --save "" &
//! (echo go; sleep 6) | cargo run -p fleet-tests --bin worker -- --quota 10/1s --store redis://127.0.0.1:7000/ --span 5000
//! ```

mod events;
mod fleet;
mod options;
mod redis;
mod stalls;

pub use events::{
    Event, Outcome, Report, by_grant, ideal, lateness, log, longest_wait, overtaken, percentile,
    refusal,
};
pub use fleet::Fleet;
pub use options::{Arrivals, INCR, MEMORY, Options, key_in};
pub use redis::{keys_for_ever, store_calls};
pub use stalls::Stalls;

/// Returns the time in nanoseconds since the Unix epoch, by a clock that ignores steps of the
/// system clock.
pub fn now() -> u64 {
    let now = upstream::sent_now();
    now.to_str()
        .ok()
        .and_then(|now| now.parse().ok())
        .expect("a number is text")
}
