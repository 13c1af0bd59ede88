//! The request of a process for permits of one key, and the lease that a store grants.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::hold::HoldState;
use super::joint_call::JointCall;
use super::source::Source;
use crate::key::Key;
use crate::limit::{Charge, LimitSpec, SetQuota, UnusedPermits, UpstreamRemaining};
use crate::quota::Limit;

/// A request to a store for permits of one key.
#[derive(Debug)]
#[non_exhaustive]
pub struct LeaseRequest<'a> {
    /// The key whose limits are used.
    pub key: Key,
    /// The limits of the key, and the version of the set quota that they are of.
    pub spec: &'a Arc<LimitSpec>,
    /// The permits that waiters need, in the order of the waiters. Empty if the process only
    /// exchanges state.
    pub demands: &'a [Demand],
    /// How many units to grant in advance, besides the demands. The store grants only units that
    /// are free now, and at most a quarter of these.
    pub prefetch: u32,
    /// The latest slot that a waiter can use, counted from now.
    pub latest: Duration,
    /// How long after its slot a permit must be valid. The store uses a returned slot again if half
    /// of that time is left.
    pub validity: Duration,
    /// How long after its slot a prefetched permit must be valid.
    pub prefetch_validity: Duration,
    /// Unused permits, which the store takes back.
    pub returns: &'a [UnusedPermits],
    /// Units that were used without a permit, oldest first. A store takes in the first
    /// [`Charge::MOST`] of them.
    pub charges: &'a [Charge],
    /// What the process knows of the state of the key from earlier replies.
    pub session: ClientSession,
    /// A hold that the process knows of and the store may not know of.
    pub hold: HoldState,
    /// What the upstream last stated is left of a limit. `None` if the store knows it already.
    pub remaining: Option<UpstreamRemaining>,
    /// Whether the permits are borrowed: the key is the part of another class, and the store grants only
    /// what that part [lends](LimitSpec::lending).
    pub borrows: bool,
    /// The calls of the joint request that this request is a part of, if the store may send them as
    /// one.
    #[cfg_attr(
        not(feature = "redis"),
        allow(dead_code, reason = "the store in Redis reads it")
    )]
    pub(crate) joint: Option<&'a JointCall>,
}

impl<'a> LeaseRequest<'a> {
    /// Returns a request for permits that are valid for no time, of a process that knows nothing of the state of the
    /// key. Set the other fields before you make it.
    pub fn new(key: Key, spec: &'a Arc<LimitSpec>, demands: &'a [Demand]) -> Self {
        LeaseRequest {
            key,
            spec,
            demands,
            prefetch: 0,
            latest: Duration::ZERO,
            validity: Duration::ZERO,
            prefetch_validity: Duration::ZERO,
            returns: &[],
            charges: &[],
            session: ClientSession::default(),
            hold: HoldState::default(),
            remaining: None,
            borrows: false,
            joint: None,
        }
    }
}

/// Permits of one cost that waiters need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Demand {
    /// The units of each permit, at least 1.
    pub cost: u32,
    /// How many permits are needed.
    pub count: u32,
    /// How long after the store handles the call a permit is of use at the earliest. The store
    /// grants no earlier slot. Default of [`Demand::new`]: zero.
    ///
    /// It is longer than zero if the request also waits for another key. [`LeaseRequest::latest`]
    /// counts from the same moment. Both are spans, because the clocks of the stores of two keys
    /// may differ.
    ///
    /// A store that does not know this field may ignore it. The permit then has an earlier slot
    /// than the request can use, and [`Grant::wait`] shows it. The process gives the permit back.
    pub earliest: Duration,
}

impl Demand {
    /// Makes a demand for `count` permits of `cost` units each.
    pub const fn new(cost: u32, count: u32) -> Self {
        Demand {
            cost,
            count,
            earliest: Duration::ZERO,
        }
    }

    /// Sets how long after the store handles the call a permit is of use at the earliest.
    #[must_use]
    pub const fn earliest(self, earliest: Duration) -> Self {
        Demand { earliest, ..self }
    }
}

/// What a process knows of a store's state of a key. The store compares it with its state, and so
/// finds out that it lost the state.
///
/// A store that cannot lose its state replies with incarnation 0. Then all fields are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientSession {
    /// [`Lease::incarnation`] of the last reply. 0 if the process knows of no state.
    pub incarnation: u64,
    /// [`Lease::writes`] of the last reply.
    pub writes: u64,
    /// [`Lease::now`] of the last reply.
    pub seen: u64,
    /// How long ago the last reply arrived.
    pub since: Duration,
    /// The longest round trip of a recent call.
    pub trip: Duration,
    /// How many units this process was granted within the longest window of the quota, rounded up.
    pub granted: u64,
}

/// The permits that a store grants, and the state of the key.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Lease {
    /// The permits for the demands, in the order of the demands.
    pub grants: Grants,
    /// Permits that were granted in advance, of cost 1. `None` if there are none.
    pub prefetched: Option<Grant>,
    /// Why the demands after the last grant were not granted. `None` if all demands were granted.
    pub refused: Option<Refusal>,
    /// For how long the store grants nothing because it lost its state. Set if it decided nothing
    /// about the demands: the process asks again after that time, or at once if it is zero.
    pub recovering: Option<Duration>,
    /// The incarnation of the state: a random number that the store draws when it makes the state.
    /// It is 0 for a store that cannot lose its state.
    pub incarnation: u64,
    /// How often the state has been written. Grows with each write of one incarnation.
    pub writes: u64,
    /// The store's time of this reply, in microseconds. [`Grant::wait`] counts from it.
    pub now: u64,
    /// How long a [`ClientSession`] of this reply is of use.
    pub session_ttl: Duration,
    /// The hold of the key.
    pub hold: HoldState,
    /// A limit in force that the request does not state, because another process states it for the
    /// same key. `None` if there is none.
    pub foreign: Option<Limit>,
    /// Whether clients that do not share this store use a limit too, as responses of the upstream
    /// show. While this is `true`, the store needs each [`LeaseRequest::remaining`].
    pub external_usage: bool,
    /// The set quota of the key, or its end, if its version is not that of the request
    /// ([`LimitSpec::quota_version`]). It decided about the demands.
    ///
    /// If the request stated the limits of a set quota that has ended, nothing was decided:
    /// [`recovering`](Lease::recovering) is zero, and the process asks again with its own limits.
    pub set_quota: Option<Box<SetQuota>>,
    /// How many more units could leave now. 0 if a demand was refused.
    pub free: u64,
    /// The ledger that granted the permits.
    pub(crate) source: Source,
    /// Whether this is the key that allows a joint request last. Set if the store decided about
    /// several keys in one step.
    pub(crate) is_last: bool,
}

impl Lease {
    /// Returns all permits of the lease as unused permits, for a caller that cannot use them.
    pub(crate) fn unused(&self) -> SmallVec<[UnusedPermits; 4]> {
        let incarnation = self.permit_incarnation();
        let grants = self.all_grants();
        grants.map(|grant| grant.unused(incarnation)).collect()
    }

    /// Returns the grants for the demands, and the one in advance.
    pub(crate) fn all_grants(&self) -> impl Iterator<Item = &Grant> {
        self.grants.iter().chain(&self.prefetched)
    }

    /// Returns the incarnation of the ledger that granted the permits.
    pub(crate) fn permit_incarnation(&self) -> u64 {
        self.source.incarnation(self.incarnation)
    }
}

/// The grants of a lease, in order. Two fit without an allocation.
#[derive(Clone, Debug, Default)]
pub struct Grants(SmallVec<[Grant; 2]>);

impl Grants {
    /// Adds a grant at the end.
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

/// Permits with the same slot and the same cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The units of each permit.
    pub cost: u32,
    /// How many permits are granted.
    pub count: u32,
    /// How long after [`Lease::now`] the slot of the permits is. Zero if they may be used now.
    pub wait: Duration,
    /// How long after their slot the permits are valid. A process counts it from when it sent the
    /// call.
    pub validity: Duration,
    /// The slot, in microseconds of the store's time. A process sends it back in [`UnusedPermits`].
    pub slot: u64,
    /// The stamp, in microseconds of the store's time. A process sends it back in
    /// [`UnusedPermits`].
    pub stamp: u64,
}

impl Grant {
    /// Makes a grant of `count` permits of `cost` units each. Their slot is after `wait`, and they
    /// are valid for `validity` from then.
    ///
    /// The slot and the stamp are 0. A store that takes permits back sets both, and receives them
    /// in [`UnusedPermits`].
    pub const fn new(cost: u32, count: u32, wait: Duration, validity: Duration) -> Self {
        Grant {
            cost,
            count,
            wait,
            validity,
            slot: 0,
            stamp: 0,
        }
    }

    pub(crate) fn units(&self) -> u64 {
        u64::from(self.cost) * u64::from(self.count)
    }

    /// Returns the permits as unused ones, which a ledger of this incarnation granted.
    pub(crate) fn unused(&self, incarnation: u64) -> UnusedPermits {
        UnusedPermits::new(self.slot, self.stamp, self.units(), incarnation)
    }
}

/// States that a demand has no slot up to [`LeaseRequest::latest`]. The store booked nothing for it
/// and for the demands after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// How long until the first slot of the demand. `None` if there will be no slot.
    pub wait: Option<Duration>,
    /// The limit that allows the demand last. `None` if no limit refused it, for example because
    /// the key is on hold.
    pub limit: Option<Limit>,
}

impl Refusal {
    /// Makes a refusal because of `limit`. The first slot is after `wait`, or never if that is
    /// `None`.
    pub const fn new(wait: Option<Duration>, limit: Option<Limit>) -> Self {
        Refusal { wait, limit }
    }

    /// Makes a refusal of which only the first slot is known.
    pub(crate) const fn for_span(wait: Duration) -> Self {
        Refusal::new(Some(wait), None)
    }

    /// A refusal that no wait ends.
    pub(crate) const NEVER: Refusal = Refusal::new(None, None);
}
