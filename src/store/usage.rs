//! The state of a key, as [`Store::peek`](super::Store::peek) returns it.

use std::sync::Arc;
use std::time::Duration;

use super::hold::HoldState;
use super::lease::Demand;
use crate::cost::Cost;
use crate::key::Key;
use crate::limit::{LimitSpec, SetQuota};
use crate::quota::Limit;

/// A question about the state of a key, and about when one more request could leave.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeekRequest {
    /// The key.
    pub key: Key,
    /// The limits of the key.
    pub spec: Arc<LimitSpec>,
    /// The key whose calls in flight are counted. It is another one if `key` is the part of a class.
    /// Default of [`PeekRequest::new`]: `key`.
    pub in_flight_key: Key,
    /// The units of the request, at least 1. Default of [`PeekRequest::new`]: 1.
    pub cost: u32,
    /// How long after its slot the permit of the request must be valid. Default: zero.
    pub validity: Duration,
    /// Permits that other requests get before this one. Only [`LimitUsage::wait`] and
    /// [`Usage::next_slot`] depend on them. Default: none. [`Demand::earliest`] is ignored.
    pub ahead: Vec<Demand>,
}

impl PeekRequest {
    /// Asks about a request of `key` that costs one unit.
    pub fn new(key: Key, spec: &Arc<LimitSpec>) -> Self {
        PeekRequest {
            key,
            spec: spec.clone(),
            in_flight_key: key,
            cost: 1,
            validity: Duration::ZERO,
            ahead: Vec::new(),
        }
    }
}

/// The state of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The usage of each limit of the key.
    pub limits: Vec<LimitUsage>,
    /// How many units could leave now under all limits.
    pub free: u64,
    /// How long until the request could leave that the [`PeekRequest`] describes. Zero if it could
    /// leave now. [`Duration::MAX`] if the limits never allow it.
    pub next_slot: Duration,
    /// The hold of the key.
    pub hold: HoldState,
    /// For how long the store grants nothing, because it has lost its state. Zero if it grants.
    pub recovering: Duration,
    /// The set quota of the key, or its end while the store remembers it. [`limits`](Usage::limits)
    /// are then those of the set quota.
    pub set_quota: Option<Box<SetQuota>>,
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
    /// How long until this limit would allow the request that is asked for, if only
    /// this limit were in its way. Zero if it would now. [`Duration::MAX`] if it never does, or if it
    /// is not known when.
    pub wait: Duration,
}

impl LimitUsage {
    /// Returns whether it is about calls in flight, and not about a rate.
    pub(crate) const fn is_in_flight(&self) -> bool {
        matches!(self.limit, Limit::InFlight { .. })
    }

    /// Makes the usage of `limit`: `used` units count against it, and `free` more could leave now.
    /// No units are reserved. If nothing is free, it is not known how long until a unit is.
    pub(crate) const fn new(limit: Limit, used: u64, free: u64) -> Self {
        LimitUsage {
            limit,
            unit: Cost::REQUESTS,
            used,
            free,
            reserved: 0,
            wait: if free > 0 {
                Duration::ZERO
            } else {
                Duration::MAX
            },
        }
    }
}

/// The usage of a limit of which nothing is used.
impl From<Limit> for LimitUsage {
    fn from(limit: Limit) -> Self {
        LimitUsage::new(limit, 0, limit.count().into())
    }
}
