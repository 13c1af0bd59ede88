//! The arithmetic of limits: when is the next slot?
//!
//! One rule covers slots, leases and the transit slack:
//!
//! > A permit is usable once, at any moment from its **slot** to its **deadline**. The log keeps
//! > the **stamp** of each permit: its deadline plus the transit slack. The slot of a new permit is
//! > the first moment at which at most `limit - 1` earlier permits count: their stamps are younger
//! > than the window.
//!
//! *Why the limit is never exceeded.* Take any window in which permits were used, and the permit in
//! it that was granted last. It was used at `u >= slot`. Every other permit in the window was used
//! after `u - window`, so its stamp is later than `slot - window`. So it was one of the permits
//! that the rule counted, of which there are at most `limit - 1`. Nothing is assumed about the
//! order of use, about the holder of each permit, or whether a holder still lives. Stamps that are
//! rounded up or merged are only later, so the proof still holds.
//!
//! A permit may be of use only later than its first slot. It is then booked in advance, and counts
//! only in the windows that it may be used in: `advance.rs` has the rule and its proof.
//!
//! Everything here is pure: `now` is an argument, time is whole microseconds, and the same history
//! gives the same grants wherever it runs.
//!
//! Nothing here waits, locks, or knows what a request is.
//!
//! Each rule exists twice, because Redis runs it in Lua. Each file names its *twin*, and `cargo
//! test --all-features --lib differential` runs both on the same history.

mod advance;
mod algorithm;
mod booking;
mod bucket;
mod charge;
mod claim;
mod external;
mod fixed;
mod hold;
mod in_flight;
mod ledger;
mod lending;
mod limit_set;
mod limit_spec;
mod limit_state;
mod limit_states;
mod long_log;
mod micros;
#[cfg(test)]
mod properties;
mod returned;
mod set_quota;
mod unused_permits;
mod upstream_remaining;
mod window;
mod window_sweep;

pub(crate) use booking::{Booking, TooLate};
pub use charge::Charge;
pub use claim::Claim;
pub(crate) use hold::StoredHold;
pub(crate) use in_flight::{HolderUpdate, InFlightSlots};
pub(crate) use ledger::{Ledger, Order, QuotaChange};
pub use lending::Lending;
pub(crate) use limit_set::STATED_AHEAD;
pub use limit_spec::LimitSpec;
pub(crate) use micros::{Micros, micros_down, micros_up};
pub use set_quota::{ChangeKind, SetQuota};
pub(crate) use set_quota::{is_learned, is_set};
pub use unused_permits::UnusedPermits;
pub use upstream_remaining::UpstreamRemaining;
