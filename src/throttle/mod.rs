//! The gate that learns its pace.
//!
//! `PacedQueue` is its pure core, one for each key: who waits, who is on the way, until when nothing may leave. It has no
//! timer, no task and no clock; it is told the moment, and tells who may leave and when to look again. The simulator
//! drives it in virtual time. `Waiters` drives it with wakers and one timer for each who waits: only that of the first
//! stands at the line's next moment, so nobody is woken for nothing.
//!
//! Where a fleet shares its lines, `PaceState` and `Peers` are what it shares, `PeerView` is one process's part in it, `sharing` how the line takes
//! its turns then, and `SyncTask` the task that talks to the store.
//!
//! What this does not do: decide. That is the [pace](crate::pace)'s.

mod engine;
mod hold;
mod pace_state;
mod paced_queue;
#[cfg(test)]
mod peer_properties;
mod peer_view;
mod peers;
mod permit;
#[cfg(test)]
mod properties;
mod sharing;
mod sync_task;
mod waiters;

pub use engine::Throttle;
pub(crate) use engine::{Begun, ThrottleSettings};
#[cfg(feature = "sim")]
pub(crate) use paced_queue::{Flight, Number, PacedQueue, Refused};
pub use permit::ThrottlePermit;
pub(crate) use permit::{Back, Wait};
