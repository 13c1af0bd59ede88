//! What a key does about the upstream's `Remaining` headers. It sends them to the store. If less is
//! left than could leave, it gives up permits.

use std::time::{Duration, Instant};

use super::KeyState;
use super::context::{Effect, KeyContext};
use super::remaining_headers::{LAST, RemainingHeaders, quota_about};
use crate::clock;
use crate::limit::LimitSpec;
use crate::limiter::queue::Gathering;
use crate::signal::Signal;
use crate::store::UpstreamRemaining;

/// What the upstream stated about the limits of one key.
#[derive(Default)]
pub(super) struct RemainingTracker {
    /// The statements about each limit, in the order of the limits in the quota.
    limits: Vec<RemainingHeaders>,
    /// When a task is to send the last statements to the store.
    sends_at: Option<Instant>,
}

impl RemainingTracker {
    /// Returns the statements about the limit `index`.
    fn limit(&mut self, index: usize) -> &mut RemainingHeaders {
        if self.limits.len() <= index {
            self.limits
                .resize_with(index + 1, RemainingHeaders::default);
        }
        &mut self.limits[index]
    }
}

impl KeyState {
    /// Takes in the response to a request that was sent at `sent`. The upstream refused `refused`
    /// units.
    ///
    /// Returns whether less is left than could leave before the next call, from this process or
    /// another one.
    pub(in crate::limiter) fn upstream_stated(
        &mut self,
        spec: &LimitSpec,
        signal: &Signal,
        refused: u32,
        sent: Instant,
        now: Instant,
    ) -> bool {
        let at_hand = u64::from(self.prefetched.units(now));
        let could_leave = at_hand.saturating_add(self.store.free);
        let mut is_less = false;
        for (index, limit) in spec.quota().limits().iter().enumerate() {
            let Some(quota) = quota_about(*limit, signal, spec) else {
                continue;
            };
            let headers = self.remaining.get_or_insert_default().limit(index);
            headers.observe(*limit, quota, refused, sent);
            if let Some(left) = headers
                .bound(*limit, now)
                .filter(|left| *left < could_leave)
            {
                is_less |= headers.notify_less(left, now) || left < at_hand;
            }
        }
        is_less
    }

    /// Gives up permits at hand and booked slots, because less is left than this process could
    /// send. Asks for them anew.
    pub(in crate::limiter) fn tighten(&mut self, ctx: &mut KeyContext<'_>) {
        let unused = self.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.extend(unused);
        queue.give_up_slots();
        // A call under way may bring more than is left: this is done again when it is answered.
        self.store.tightens = queue.is_calling(ctx.now);
        if self.store.tightens {
            return;
        }
        let has_waiters = queue.waiting() > 0;
        if has_waiters {
            queue.gathering = Gathering::Done;
        }
        let is_new_to_store = self
            .remaining
            .as_ref()
            .is_some_and(|tracker| tracker.limits.iter().any(RemainingHeaders::is_less));
        if is_new_to_store && !has_waiters {
            self.inquire(ctx);
        } else {
            self.step(ctx, None);
        }
        self.close(ctx);
    }

    /// Takes in that another process stated to the store that less is left. `writes` is how often
    /// the state in the store had been written then.
    pub(in crate::limiter) fn less_heard(&mut self, ctx: &mut KeyContext<'_>, writes: u64) {
        if self.store.is_behind(writes) {
            self.tighten(ctx);
        }
    }

    /// Sends the store what the upstream stated, even if no request waits. Sends refusals at once.
    /// If other clients use the limit as well, sends other statements soon.
    pub(in crate::limiter) fn pass_on(&mut self, ctx: &mut KeyContext<'_>) {
        let Some(tracker) = &mut self.remaining else {
            return;
        };
        let stated = ctx.spec.quota().limits().iter().zip(&tracker.limits);
        let relevant = stated.filter(|(_, headers)| {
            headers.is_news() && (self.store.has_external_usage || headers.has_refused())
        });
        let Some(pause) = relevant
            .map(|(limit, headers)| headers.pause(*limit, ctx.now))
            .min()
        else {
            return;
        };
        if pause.is_zero() {
            return self.inquire(ctx);
        }
        // A task that is late was lost with its runtime.
        let has_no_task = tracker
            .sends_at
            .is_none_or(|at| clock::after(at, LAST) < ctx.now);
        if has_no_task {
            tracker.sends_at = Some(clock::after(ctx.now, pause));
            ctx.work.effects.push(Effect::PassOn(pause));
        }
    }

    /// Sends the store what the upstream stated, after the delay of [`Effect::PassOn`]. If a hold
    /// is doubted, asks the store about it again.
    pub(in crate::limiter) fn pass_on_now(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(tracker) = &mut self.remaining {
            tracker.sends_at = None;
        }
        let is_doubted = self.hold.is_doubted(ctx.now);
        self.pass_on(ctx);
        if is_doubted && ctx.work.effects.is_empty() {
            self.confirm(ctx);
        }
        self.close(ctx);
    }

    /// Takes the statement that is sent to the store with a call. One call carries the statement
    /// about one limit.
    pub(in crate::limiter) fn take_remaining(
        &mut self,
        spec: &LimitSpec,
        max_hold: Duration,
        now: Instant,
    ) -> Option<UpstreamRemaining> {
        let tracker = self.remaining.as_mut()?;
        let mut limits = spec.quota().limits().iter().zip(&mut tracker.limits);
        limits.find_map(|(limit, headers)| headers.take_due(*limit, max_hold, now))
    }
}
