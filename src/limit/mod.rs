//! The arithmetic of limits: when is the next slot?
//!
//! One rule serves slots, leases and slack:
//!
//! > A permit is usable once, at any moment from its **slot** to its **deadline**. The log keeps
//! > deadlines (plus the slack for the way to the upstream: the **stamp**). The slot of a new
//! > permit is the first moment at which at most `limit - 1` earlier permits have a stamp younger
//! > than the window.
//!
//! *Why the limit is never exceeded.* Take any window in which permits were used, and the permit in
//! it that was granted last, used at `u >= slot`. Every other permit in the window was used after
//! `u - window`, so its stamp is later than `slot - window`: it was among the at most `limit - 1`
//! permits that the rule counted. Nothing is assumed about the order of use, about the holder of
//! each permit, or whether a holder still lives. Stamps that are rounded up or merged are only
//! later, so the proof still holds.
//!
//! Everything here is pure: `now` is an argument, time is whole microseconds, and the same history
//! gives the same grants wherever it runs.
//!
//! What this does not do: wait, lock, or know what a request is.
//!
//! Every rule is written twice, because Redis runs it in Lua: each file names its *twin*, and the
//! tests run both on the same history.

mod algorithm;
mod booking;
mod bucket;
mod charge;
mod external;
mod fixed;
mod hold;
mod in_flight;
mod ledger;
mod limit_spec;
mod limit_state;
#[cfg(test)]
pub(crate) mod logical_clock;
mod micros;
#[cfg(test)]
mod properties;
#[cfg(test)]
pub(crate) mod recovery;
mod returned;
mod unused_permits;
mod upstream_remaining;
mod window;

pub(crate) use booking::{Booking, TooLate};
pub use charge::Charge;
pub(crate) use hold::Hold;
pub(crate) use in_flight::{HolderClaim, HolderUpdate, InFlightSlots};
pub(crate) use ledger::Ledger;
pub use limit_spec::LimitSpec;
pub(crate) use micros::{Micros, micros_down, micros_up};
pub use unused_permits::UnusedPermits;
pub use upstream_remaining::UpstreamRemaining;
