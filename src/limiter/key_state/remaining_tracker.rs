//! What the upstream's `Remaining` headers state about all limits of a key, and when it is sent to
//! the store.

use std::time::{Duration, Instant};

use super::quota_match::quota_about;
use super::remaining_headers::RemainingHeaders;
use crate::limit::LimitSpec;
use crate::signal::Signal;
use crate::store::UpstreamRemaining;

/// What the upstream stated is left of the limits of one key.
#[derive(Default)]
pub(super) struct RemainingTracker {
    /// The statements about each limit, in the order of the limits in the quota.
    limits: Vec<RemainingHeaders>,
}

/// Units that could be sent before the next call to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sendable {
    /// Units that this process has at hand.
    pub(super) at_hand: u64,
    /// Units that this process or another one could send.
    pub(super) in_all: u64,
}

impl RemainingTracker {
    /// Takes in how much the response to a request that was sent at `sent` states is left. The
    /// upstream refused `refused` units. Returns whether less is left than could be sent before the
    /// next call.
    pub(super) fn observe(
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
            let headers = self.limit(index);
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

    /// Returns the statements about the limit `index`.
    fn limit(&mut self, index: usize) -> &mut RemainingHeaders {
        if self.limits.len() <= index {
            self.limits
                .resize_with(index + 1, RemainingHeaders::default);
        }
        &mut self.limits[index]
    }

    /// Returns whether nothing was stated.
    pub(super) fn is_empty(&self) -> bool {
        self.limits.is_empty()
    }

    /// Returns whether less is left of a limit than could be sent, and the store does not know.
    pub(super) fn is_less(&self) -> bool {
        self.limits.iter().any(RemainingHeaders::is_less)
    }

    /// Returns how long until a statement has to be sent to the store, even if no request waits.
    /// Refusals are sent at once. Other statements are sent only if the limits have
    /// `external_usage`: other clients use them as well.
    pub(super) fn due_in(
        &self,
        spec: &LimitSpec,
        external_usage: bool,
        now: Instant,
    ) -> Option<Duration> {
        let stated = spec.quota().limits().iter().zip(&self.limits);
        stated
            .filter(|(_, headers)| headers.is_news() && (external_usage || headers.has_refused()))
            .map(|(limit, headers)| headers.pause(*limit, now))
            .min()
    }

    /// Takes the statement that is sent to the store with a call. One call carries the statement
    /// about one limit.
    pub(super) fn take_due(
        &mut self,
        spec: &LimitSpec,
        max_hold: Duration,
        now: Instant,
    ) -> Option<UpstreamRemaining> {
        let mut limits = spec.quota().limits().iter().zip(&mut self.limits);
        limits.find_map(|(limit, headers)| headers.take_due(*limit, max_hold, now))
    }
}
