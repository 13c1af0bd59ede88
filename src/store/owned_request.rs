//! A request for permits that is kept while the store replies. The fallback needs the request again
//! if the store fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{ClientSession, Demand, HoldState, Lease, LeaseRequest, StoreSession};
use crate::clock;
use crate::key::Key;
use crate::limit::{Charge, LimitSpec, UnusedPermits, UpstreamRemaining};

/// A [`LeaseRequest`] that outlives its call. The fields are those of the request, without
/// [`joint`](LeaseRequest): a call that is made later is made alone.
pub(crate) struct OwnedLeaseRequest {
    pub(crate) key: Key,
    pub(crate) spec: Arc<LimitSpec>,
    pub(crate) demands: SmallVec<[Demand; 2]>,
    pub(crate) prefetch: u32,
    pub(crate) latest: Duration,
    pub(crate) validity: Duration,
    pub(crate) prefetch_validity: Duration,
    pub(crate) returns: SmallVec<[UnusedPermits; 4]>,
    pub(crate) charges: Vec<Charge>,
    pub(crate) session: ClientSession,
    pub(crate) hold: HoldState,
    pub(crate) remaining: Option<UpstreamRemaining>,
    pub(crate) borrows: bool,
    /// When the call was made.
    pub(crate) sent: Instant,
}

impl OwnedLeaseRequest {
    pub(crate) fn new(request: &LeaseRequest<'_>) -> Self {
        OwnedLeaseRequest {
            key: request.key,
            spec: request.spec.clone(),
            demands: request.demands.into(),
            prefetch: request.prefetch,
            latest: request.latest,
            validity: request.validity,
            prefetch_validity: request.prefetch_validity,
            returns: request.returns.into(),
            charges: request.charges.to_vec(),
            session: request.session,
            hold: request.hold,
            remaining: request.remaining,
            borrows: request.borrows,
            sent: clock::now(),
        }
    }

    /// Makes the request state `reply`, which has just arrived at `now`, as what the process knows of the store.
    pub(crate) fn follow(&mut self, reply: &Lease, now: Instant) {
        let session = StoreSession::of(reply, self.sent, now).client_session(now);
        self.session = ClientSession {
            granted: self.session.granted,
            ..session.unwrap_or_default()
        };
    }

    pub(crate) fn as_request(&self) -> LeaseRequest<'_> {
        LeaseRequest {
            key: self.key,
            spec: &self.spec,
            demands: &self.demands,
            prefetch: self.prefetch,
            latest: self.latest,
            validity: self.validity,
            prefetch_validity: self.prefetch_validity,
            returns: &self.returns,
            charges: &self.charges,
            session: self.session,
            hold: self.hold,
            remaining: self.remaining,
            borrows: self.borrows,
            joint: None,
        }
    }
}
