//! Prefetched permits that are not used. They are given back when they expire, so that the store
//! can grant them again.

use std::time::{Duration, Instant};

use super::KeyState;
use super::context::KeyContext;
use crate::clock;
use crate::limit::UnusedPermits;

/// A sweep that is later than this was lost with its runtime.
const LOST_SWEEP: Duration = Duration::from_secs(1);

impl KeyState {
    /// Returns when to [`sweep`](KeyState::sweep) first, if permits are at hand and no task is
    /// about to sweep.
    pub(in crate::limiter) fn start_sweep(&mut self, now: Instant) -> Option<Instant> {
        let is_lost = self
            .sweep_at
            .is_none_or(|at| clock::after(at, LOST_SWEEP) < now);
        let until = self.prefetched.until();
        (is_lost && self.prefetched.units(now) > 0).then(|| *self.sweep_at.insert(until))
    }

    /// Gives back the permits at hand if they have expired, so that an idle process takes nothing
    /// from the others. Else returns when to sweep again.
    pub(in crate::limiter) fn sweep(&mut self, ctx: &KeyContext<'_>) -> Option<Instant> {
        self.sweep_at = Some(self.prefetched.until()).filter(|until| *until > ctx.now);
        if self.sweep_at.is_none()
            && let Some(left) = self.clear()
        {
            ctx.store.give_back(ctx.key, ctx.spec, &[left]);
        }
        self.sweep_at
    }

    /// Gives back the permits at hand, before the state of the key is dropped.
    pub(in crate::limiter) fn forgotten(&mut self, ctx: &KeyContext<'_>) {
        if let Some(left) = self.prefetched.clear() {
            ctx.store.give_back(ctx.key, ctx.spec, &[left]);
        }
    }

    /// Takes out the permits at hand, to give them back to the store.
    pub(in crate::limiter) fn clear(&mut self) -> Option<UnusedPermits> {
        let unused = self.prefetched.clear();
        self.store.forget(unused.as_slice());
        unused
    }
}
