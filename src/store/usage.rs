//! The state of a key, as [`Store::peek`](super::Store::peek) returns it.

use std::time::Duration;

use super::hold::HoldState;
use crate::quota::Limit;

/// The state of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The usage of each limit.
    pub limits: Vec<LimitUsage>,
    /// How many units could leave now.
    pub free: u64,
    /// How long until one unit could leave.
    pub next_slot: Duration,
    /// The hold of the key.
    pub hold: HoldState,
    /// Whether the store cannot be reached, and these limits are the fallback share of this process: see
    /// [`FallbackShare`](crate::OnStoreError::FallbackShare).
    pub degraded: bool,
}

impl Usage {
    /// Adds a limit of `most` calls in flight, of which `taken` are in use and `free` are left.
    pub(crate) fn in_flight(mut self, most: u32, taken: u32, free: u32) -> Self {
        let (limit, used, free) = (Limit::InFlight { count: most }, u64::from(taken), u64::from(free));
        self.limits.push(LimitUsage { limit, used, free, reserved: 0 });
        self.free = self.free.min(free);
        self
    }
}

/// The usage of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitUsage {
    /// The limit.
    pub limit: Limit,
    /// The units that count against the limit now, including units booked ahead.
    pub used: u64,
    /// The units that the limit would allow now.
    pub free: u64,
    /// The units reserved for clients that do not share this store, as the upstream's headers show.
    pub reserved: u64,
}

impl LimitUsage {
    /// Makes the usage of `limit`, of which `used` units count and `free` more could go now. None are reserved.
    pub const fn new(limit: Limit, used: u64, free: u64) -> Self {
        LimitUsage { limit, used, free, reserved: 0 }
    }
}
