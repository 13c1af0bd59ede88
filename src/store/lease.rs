//! What a process asks of a store for one key, and what the store grants.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::hold::HoldState;
use super::source::Source;
use crate::key::Key;
use crate::limit::{Charge, LimitSpec, UnusedPermits, UpstreamRemaining};
use crate::quota::Limit;

/// A request to a store for permits of one key.
#[derive(Debug)]
#[non_exhaustive]
pub struct LeaseRequest<'a> {
    /// The key.
    pub key: Key,
    /// The limits of the key.
    pub spec: &'a Arc<LimitSpec>,
    /// The permits that waiters need, in their order.
    pub demands: &'a [Demand],
    /// How many units more to grant in advance, if they are free now. The store grants at most a quarter of what is free.
    pub prefetch: u32,
    /// The latest slot that a waiter can use, from now.
    pub latest: Duration,
    /// How long after its slot a permit must be valid; half of that is enough for a slot that was returned.
    pub validity: Duration,
    /// The same, for permits in advance.
    pub prefetch_validity: Duration,
    /// Permits that were not used.
    pub returns: &'a [UnusedPermits],
    /// Units that were used without a permit, oldest first. At most [`Charge::MOST`] in a call.
    pub charges: &'a [Charge],
    /// What the process knows from earlier answers.
    pub session: ClientSession,
    /// The hold that the process knows of, and the store may not.
    pub hold: HoldState,
    /// What is left of a limit, as the upstream stated last.
    pub remaining: Option<UpstreamRemaining>,
}

/// Permits of one cost that waiters need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Demand {
    /// The units of each permit; at least 1.
    pub cost: u32,
    /// How many permits.
    pub count: u32,
}

impl Demand {
    /// Makes a need of `count` permits of `cost` units each.
    pub const fn new(cost: u32, count: u32) -> Self {
        Demand { cost, count }
    }
}

/// What a process knows of the state of a key. By it a store finds out that it lost the state.
///
/// A store that loses nothing answers with incarnation 0; then all fields are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientSession {
    /// The incarnation of the state: a random number that is drawn when the state is made; 0 for none.
    pub incarnation: u64,
    /// [`Lease::writes`] of the last answer.
    pub writes: u64,
    /// [`Lease::now`] of the last answer.
    pub seen: u64,
    /// How long ago the last answer arrived.
    pub since: Duration,
    /// The longest round trip of a call lately.
    pub trip: Duration,
    /// At least as many units as this process was granted within the longest window.
    pub granted: u64,
}

/// The permits that a store grants, and the state of the key.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Lease {
    /// Permits for the needs, in their order.
    pub grants: Grants,
    /// Permits in advance: a segment of cost 1.
    pub prefetched: Option<Grant>,
    /// Set if not all needs were granted.
    pub refused: Option<Refusal>,
    /// Set if the store decided nothing of the needs: it lost its state, and learns for this long what it granted before. Ask
    /// again then.
    pub recovering: Option<Duration>,
    /// The incarnation of the state; 0 for a store that loses nothing.
    pub incarnation: u64,
    /// How often the state was written, for [`ClientSession::writes`].
    pub writes: u64,
    /// The store's time, for [`ClientSession::seen`]. Waits count from it.
    pub now: u64,
    /// How long a [`ClientSession`] of this answer is of use.
    pub session_ttl: Duration,
    /// The hold of the key.
    pub hold: HoldState,
    /// A limit in force that these terms do not have: another process states it for the same key.
    pub foreign: Option<Limit>,
    /// Whether clients that do not share this store use the limit too, as the upstream's headers show. Then the store needs each
    /// [`LeaseRequest::remaining`].
    pub external_usage: bool,
    /// How many more units could leave now; 0 if a need was refused.
    pub free: u64,
    /// The ledger that granted the permits.
    pub(crate) source: Source,
}

impl Lease {
    /// Returns all permits of the lease as unused permits, for a caller that cannot use them.
    pub(crate) fn unused(&self) -> SmallVec<[UnusedPermits; 4]> {
        let incarnation = self.permit_incarnation();
        let grants = self.grants.iter().chain(&self.prefetched);
        let unused = grants.map(|&Grant { cost, count, slot, stamp, .. }| UnusedPermits {
            slot,
            stamp,
            units: u64::from(cost) * u64::from(count),
            incarnation,
        });
        unused.collect()
    }

    /// Returns the incarnation of the ledger that granted the permits.
    pub(crate) fn permit_incarnation(&self) -> u64 {
        self.source.incarnation(self.incarnation)
    }
}

/// The segments of a lease, in order. Two fit without allocation.
#[derive(Clone, Debug, Default)]
pub struct Grants(SmallVec<[Grant; 2]>);

impl Grants {
    /// Adds a segment at the end.
    pub fn push(&mut self, grant: Grant) {
        self.0.push(grant);
    }
}

impl std::ops::Deref for Grants {
    type Target = [Grant];

    fn deref(&self) -> &[Grant] {
        &self.0
    }
}

impl std::ops::DerefMut for Grants {
    fn deref_mut(&mut self) -> &mut [Grant] {
        &mut self.0
    }
}

/// Permits of the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The units of each permit.
    pub cost: u32,
    /// How many permits.
    pub count: u32,
    /// How long after the answer arrives their slot is.
    pub wait: Duration,
    /// How long after their slot they are valid, counted from when the call was sent.
    pub validity: Duration,
    /// The slot in the store's time, for [`UnusedPermits`].
    pub slot: u64,
    /// The stamp in the store's time, for [`UnusedPermits`].
    pub stamp: u64,
}

impl Grant {
    /// Makes a segment of `count` permits of `cost` units each, whose slot comes after `wait`, and that are valid for `life` from
    /// then.
    ///
    /// Its slot and stamp are 0. A store that takes permits back sets both, and receives them in [`UnusedPermits`].
    pub const fn new(cost: u32, count: u32, wait: Duration, life: Duration) -> Self {
        Grant { cost, count, wait, validity: life, slot: 0, stamp: 0 }
    }
}

/// There is no slot up to [`LeaseRequest::latest`]. Nothing was booked for this need and the needs after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// How long until the first slot; `None` if there will be none.
    pub wait: Option<Duration>,
    /// The limit that allows it last.
    pub limit: Option<Limit>,
}

impl Refusal {
    /// Makes a refusal because of `limit`: the first slot would come after `wait`, or never if that is `None`.
    pub const fn new(wait: Option<Duration>, limit: Option<Limit>) -> Self {
        Refusal { wait, limit }
    }

    /// A refusal that no wait ends.
    pub(crate) const NEVER: Refusal = Refusal { wait: None, limit: None };
}
