//! What the laboratory (`examples/simulate`) and the contract of stores (`tests/contract`) need of the crate. This is no part of the API: any version may change it.

use std::time::{Duration, Instant};

use crate::error::Limited;
use crate::quota::Quota;
use crate::rng;
use crate::signal::{ResponseInfo, Signal};
use crate::store::{Lease, LeaseRequest, LimitSpec, OwnedLeaseRequest, Store, StoreReply};
use crate::throttle::ThrottlePermit;

pub use crate::clock::laboratory::begin as begin_clock;
pub use crate::pacing::{CallState, Dice, Pace, Pause, Reply, StateCodec, Traffic};
pub use crate::rng::laboratory::begin as begin_dice;
pub use crate::store::joint_call::JointCall;
pub use crate::throttle::paced_queue::{Flight, PacedQueue, Refused};

/// Returns an unpredictable number, or the next one of the dice of this thread.
pub fn dice() -> u64 {
    rng::dice()
}

/// Ends a request with its response. If the server refused it, it waits in its old place: the future returns its next
/// permit, or why it got none. Otherwise this returns `None`.
pub fn answered_or_back(
    permit: ThrottlePermit,
    signal: &Signal,
    arrived: Instant,
) -> Option<impl Future<Output = Result<ThrottlePermit, Limited>> + Send> {
    let back = permit.end(signal, None, true, arrived);
    let back = back.transpose()?;
    Some(async { back?.permit().await })
}

/// Reads the signal of a response that arrived at `arrived`.
pub fn read_signal(response: &impl ResponseInfo, arrived: Instant) -> Signal {
    Signal::read_at(response, arrived)
}

/// Copies a request for permits, so that it can be sent to a store later.
pub fn lease_later<S: Store>(
    request: &LeaseRequest<'_>,
) -> impl FnOnce(&S) -> StoreReply<Lease> + Send + 'static + use<S> {
    let owned = OwnedLeaseRequest::new(request);
    move |store| store.lease(owned.as_request())
}

/// Returns the limits of a caller with this quota, which knows of the set quota of version `version`, 0 for none.
pub fn limit_spec(
    quota: Quota,
    transit_slack: Duration,
    boundary_guard: Duration,
    version: u32,
    life: Duration,
) -> LimitSpec {
    LimitSpec::new(quota, transit_slack, boundary_guard).with_quota_version(version, life)
}

/// Makes `request` a part of a joint request.
pub fn part_of<'a>(joint: &'a JointCall, request: LeaseRequest<'a>) -> LeaseRequest<'a> {
    LeaseRequest {
        joint: Some(joint),
        ..request
    }
}
