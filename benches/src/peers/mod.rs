//! The compared limiters: one file each, each under a limit that it never reaches.

mod checked;
pub(crate) mod governor;
pub(crate) mod leaky_bucket;
pub(crate) mod ratelimit;
pub(crate) mod throttle_net;
pub(crate) mod tollgate;
pub(crate) mod tower;

/// The limit, in units a second.
pub(crate) const PLENTY: u32 = 1_000_000_000;
