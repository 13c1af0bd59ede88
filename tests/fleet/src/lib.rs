//! Many processes behind one limit: starts them, tells them to go, and reads what they saw.
//!
//! A worker is a process that calls through tollgate; its program is `src/worker`, and by hand it runs like this:
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
    Event, Outcome, Report, by_grant, ideal, lateness, log, longest_wait, overtaken, percentile, refusal,
};
pub use fleet::Fleet;
pub use options::{Arrivals, INCR, MEMORY, Options};
pub use redis::{keys_for_ever, store_calls};
pub use stalls::Stalls;

/// Now, in nanoseconds since the Unix epoch, by a clock that no step of the system's moves.
pub fn now() -> u64 {
    let now = upstream::sent_now();
    now.to_str().ok().and_then(|now| now.parse().ok()).expect("a number is text")
}
