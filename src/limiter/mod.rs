//! The gate: a key enters and a [`Permit`] comes out, at once or after a wait; the permit ends exactly once.
//!
//! [`Limiter`] is the gate with a quota; [`Throttle`], in a folder of its own, is the one that learns its pace. Each key has a *line* in this process: what is at hand, and who waits. All of
//! a line's state is behind one lock that is never held across an `await`; a waiting future holds a number in the line
//! and nothing else, so it can be dropped at any time.
//!
//! What this does not do: count. Counting is the store's.

mod acquire;
mod effects;
mod engine;
mod holds;
mod hosts;
mod in_flight;
mod key_state;
mod permit;
mod prefetched;
mod queue;
mod reservation;
mod seat;
mod session;
mod settings;
mod status;

pub use acquire::Acquire;
pub(crate) use acquire::Waiter;
pub use engine::Limiter;
pub(crate) use engine::{Entry, Started};
pub use key_state::{Learn, Learned};
pub use permit::Permit;
pub(crate) use permit::Sent;
pub(crate) use seat::Seat;
pub use settings::OnStoreError;
pub(crate) use settings::{OnScope, Settings};
pub use status::Peek;
