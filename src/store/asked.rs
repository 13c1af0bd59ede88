//! What was asked of a store, kept while it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{ClientSession, Demand, HoldState, LeaseRequest};
use crate::clock;
use crate::key::Key;
use crate::limit::{Charge, LimitSpec, UnusedPermits, UpstreamRemaining};

/// An [`LeaseRequest`] that outlives its call.
pub(crate) struct OwnedLeaseRequest {
    pub(crate) key: Key,
    pub(crate) spec: Arc<LimitSpec>,
    pub(crate) demands: SmallVec<[Demand; 2]>,
    pub(crate) prefetch: u32,
    pub(crate) latest: Duration,
    pub(crate) life: Duration,
    pub(crate) prefetch_life: Duration,
    pub(crate) returns: SmallVec<[UnusedPermits; 4]>,
    pub(crate) charges: Vec<Charge>,
    pub(crate) memory: ClientSession,
    pub(crate) held: HoldState,
    pub(crate) left: Option<UpstreamRemaining>,
    pub(crate) at: Instant,
}

impl OwnedLeaseRequest {
    pub(crate) fn new(request: &LeaseRequest<'_>) -> Self {
        OwnedLeaseRequest {
            key: request.key,
            spec: request.spec.clone(),
            demands: request.demands.into(),
            prefetch: request.prefetch,
            latest: request.latest,
            life: request.validity,
            prefetch_life: request.prefetch_validity,
            returns: request.returns.into(),
            charges: request.charges.to_vec(),
            memory: request.session,
            held: request.hold,
            left: request.remaining,
            at: clock::now(),
        }
    }

    /// Makes a call that asks for no permits.
    pub(crate) fn without_needs(key: Key, spec: &Arc<LimitSpec>, memory: ClientSession) -> Self {
        OwnedLeaseRequest {
            key,
            spec: spec.clone(),
            demands: SmallVec::new(),
            prefetch: 0,
            latest: Duration::ZERO,
            life: Duration::ZERO,
            prefetch_life: Duration::ZERO,
            returns: SmallVec::new(),
            charges: Vec::new(),
            memory,
            held: HoldState::default(),
            left: None,
            at: clock::now(),
        }
    }

    pub(crate) fn request<'a>(&'a self, demands: &'a [Demand]) -> LeaseRequest<'a> {
        LeaseRequest {
            key: self.key,
            spec: &self.spec,
            demands: demands,
            prefetch: self.prefetch,
            latest: self.latest,
            validity: self.life,
            prefetch_validity: self.prefetch_life,
            returns: &self.returns,
            charges: &self.charges,
            session: self.memory,
            hold: self.held,
            remaining: self.left,
        }
    }
}
