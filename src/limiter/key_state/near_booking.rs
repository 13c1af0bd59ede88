//! When slots are booked for requests that may give units back after they were sent.
//!
//! A slot that is booked far ahead is computed from what is used now. If a request then costs less
//! than its estimate, units become free, but the slots that are booked already do not move, and these
//! units stay unused. So if a limiter [settles](crate::RateLimitBuilder::settle), the store grants
//! only slots that are near. It is asked again when the next slot may be near, and for requests of one key when
//! units came back.
//!
//! Requests of one process still leave in order. Between processes there is no order: requests of
//! low cost of another process may take all that becomes free. So if a remote store has granted
//! nothing for some time, the first waiter books its slot wherever it is.

use std::time::{Duration, Instant};

use crate::clock;
use crate::limit::LimitSpec;
use crate::limiter::queue::Queue;
use crate::store::{Lease, Refusal};
use crate::wait_queue::WaitBound;
use crate::wakers::Wakers;

/// How far ahead a slot may be. What is charged meanwhile does not delay a request that has its slot
/// already.
const NEAR: Duration = Duration::from_millis(50);

/// Returns the bound of a call that asks for slots that are near.
pub(in crate::limiter) fn near(bound: WaitBound, now: Instant) -> WaitBound {
    WaitBound {
        latest: bound.latest.min(latest(now)),
        ..bound
    }
}

/// Returns the latest slot that is near.
pub(super) fn latest(now: Instant) -> Instant {
    clock::after(now, NEAR)
}

/// Returns the longest time between two calls for waiters without a slot. Other processes give units
/// back, too.
fn interval(spec: &LimitSpec) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(250);
    const LONGEST: Duration = Duration::from_secs(5);
    (spec.quota().shortest_window() / 200).clamp(SHORTEST, LONGEST)
}

/// Returns for how long the store is not asked again, after it has refused a slot that is near.
pub(in crate::limiter) fn pause(spec: &LimitSpec, refusal: Refusal) -> Duration {
    let wait = refusal.wait.unwrap_or(Duration::MAX);
    let pause = wait.saturating_sub(NEAR / 2).min(interval(spec));
    pause.max(clock::SHORTEST_TIMER)
}

/// Returns whether a request books its slot wherever it is, because the store has granted nothing
/// `since` then.
pub(in crate::limiter) fn is_far_allowed(spec: &LimitSpec, since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= interval(spec) * 10
}

/// Returns whether the next call is for the first waiter only, wherever its slot is.
pub(super) fn is_for_first(queue: &Queue, spec: &LimitSpec, now: Instant) -> bool {
    let since = queue.refused_since;
    since.is_some_and(|since| is_far_allowed(spec, since, now))
}

/// Takes in what the store granted of slots that are near. If it refused one, it is asked again
/// later.
pub(super) fn answered(
    queue: &mut Queue,
    spec: &LimitSpec,
    lease: &Lease,
    now: Instant,
    wakers: &mut Wakers,
) {
    if !lease.grants.is_empty() {
        queue.refused_since = None;
    }
    if let Some(refusal) = lease.refused {
        queue.refused_since.get_or_insert(now);
        queue.pause(pause(spec, refusal), now, wakers);
    }
}
