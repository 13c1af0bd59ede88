//! What the upstream stated is left of the limits of one key.

use std::time::{Duration, Instant};

use super::quota_match::quota_about;
use super::remaining_tracker::RemainingTracker;
use crate::limit::LimitSpec;
use crate::signal::Signal;
use crate::store::UpstreamRemaining;

/// What the upstream stated about one key.
#[derive(Default)]
pub(in crate::limiter) struct UpstreamView {
    /// What it stated is left of each limit of the key. `None` after the limits have changed, until
    /// responses state it anew.
    pub(super) remaining: Option<Box<RemainingTracker>>,
}

/// Units that could be sent before the next call to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sendable {
    /// Units that this process has at hand.
    pub(super) at_hand: u64,
    /// Units that this process or another one could send.
    pub(super) in_all: u64,
}

impl UpstreamView {
    /// Takes in how much the response to a request that was sent at `sent` states is left. The
    /// upstream refused `refused` units. Returns whether less is left than could be sent before the
    /// next call.
    pub(super) fn observe_remaining(
        &mut self,
        spec: &LimitSpec,
        signal: &Signal,
        refused: u32,
        sent: Instant,
        sendable: Sendable,
        now: Instant,
    ) -> bool {
        let mut is_less = false;
        for (index, limit) in spec.quota().limits().iter().enumerate() {
            let Some(quota) = quota_about(*limit, signal, spec) else {
                continue;
            };
            let headers = self.remaining.get_or_insert_default().limit(index);
            headers.observe(*limit, quota, refused, sent);
            if let Some(left) = headers
                .bound(*limit, now)
                .filter(|left| *left < sendable.in_all)
            {
                is_less |= headers.notify_less(left, now) || left < sendable.at_hand;
            }
        }
        is_less
    }

    /// Takes what a call to the store states is left. One call carries the statement about one
    /// limit.
    pub(in crate::limiter) fn take_remaining(
        &mut self,
        spec: &LimitSpec,
        max_hold: Duration,
        now: Instant,
    ) -> Option<UpstreamRemaining> {
        self.remaining.as_mut()?.take_due(spec, max_hold, now)
    }
}
