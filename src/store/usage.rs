//! The state of a key, as [`Store::peek`](super::Store::peek) returns it.

use std::time::Duration;

use super::hold::HoldState;
use crate::cost::Cost;
use crate::quota::Limit;

/// The state of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The usage of each limit of the key.
    pub limits: Vec<LimitUsage>,
    /// How many units could leave now under all limits.
    pub free: u64,
    /// How long until one unit could leave. Zero if one could leave now.
    pub next_slot: Duration,
    /// The hold of the key.
    pub hold: HoldState,
    /// Whether the store cannot be reached. Then the limits are the [fallback
    /// share](crate::OnStoreError::FallbackShare) of this process.
    pub degraded: bool,
}

impl Usage {
    /// Adds a limit of `most` calls in flight, of whose slots `used` are in use and `free` are
    /// free.
    pub(crate) fn in_flight(mut self, most: u32, used: u32, free: u32) -> Self {
        let limit = Limit::InFlight { count: most };
        self.limits
            .push(LimitUsage::new(limit, u64::from(used), u64::from(free)));
        self.free = self.free.min(u64::from(free));
        self
    }
}

/// The usage of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitUsage {
    /// The limit.
    pub limit: Limit,
    /// What the limit counts: [`Cost::REQUESTS`], or the name given to
    /// [`Quota::of`](crate::Quota::of). A store need not set it.
    pub unit: &'static str,
    /// Units that count against the limit now. Units that are booked ahead are included.
    pub used: u64,
    /// Units that the limit would allow now.
    pub free: u64,
    /// Units that are reserved for clients that do not share this store, as responses of the
    /// upstream show.
    pub reserved: u64,
}

impl LimitUsage {
    /// Makes the usage of `limit`: `used` units count against it, and `free` more could leave now.
    /// No units are reserved.
    pub const fn new(limit: Limit, used: u64, free: u64) -> Self {
        LimitUsage {
            limit,
            unit: Cost::REQUESTS,
            used,
            free,
            reserved: 0,
        }
    }
}
