//! Prefetched permits that were not used: they are given back before they expire.

use std::time::{Duration, Instant};

use super::KeyState;
use super::context::KeyContext;
use crate::clock;
use crate::limit::UnusedPermits;

/// A sweep that is this late was lost with its runtime.
const LOST_SWEEP: Duration = Duration::from_secs(1);

impl KeyState {
    /// Returns when to [`sweep`](KeyState::sweep), if no task is about to.
    pub(in crate::limiter) fn start_sweep(&mut self, now: Instant) -> Option<Instant> {
        let is_lost = self.sweep_at.is_none_or(|at| clock::after(at, LOST_SWEEP) < now);
        let until = self.prefetched.until();
        (is_lost && self.prefetched.units(now) > 0).then(|| *self.sweep_at.insert(until))
    }

    /// Gives back the permits that have expired, so that an idle process takes nothing from the others. Returns when to look
    /// again.
    pub(in crate::limiter) fn sweep(&mut self, ctx: &KeyContext<'_>) -> Option<Instant> {
        self.sweep_at = Some(self.prefetched.until()).filter(|until| *until > ctx.now);
        if self.sweep_at.is_none()
            && let Some(left) = self.clear()
        {
            ctx.store.give_back(ctx.key, ctx.spec, &[left]);
        }
        self.sweep_at
    }

    /// Gives back its permits, before the state of the key is dropped for want of room.
    pub(in crate::limiter) fn forgotten(&mut self, ctx: &KeyContext<'_>) {
        if let Some(left) = self.prefetched.clear() {
            ctx.store.give_back(ctx.key, ctx.spec, &[left]);
        }
    }

    /// Takes out the permits at hand, for the store.
    pub(in crate::limiter) fn clear(&mut self) -> Option<UnusedPermits> {
        let unused = self.prefetched.clear();
        if let Some(session) = &mut self.session {
            session.forget(unused.as_slice());
        }
        unused
    }
}
