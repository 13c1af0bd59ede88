//! What the upstream's `Remaining` headers state about the limits of a key, and when it is sent to the store, as a value.
//!
//! The store compares what the upstream counts with the requests in its own log. What the upstream
//! counts beyond them was used by other clients. The comparison is possible only if both count the
//! same requests. This is so if the stated reset stays at one moment: the upstream counts in
//! windows, or from its oldest request. If the reset moves along with the responses, only refusals
//! show that other clients use the limit.

use std::time::{Duration, Instant};

use super::quota_match::{left_of, names_no_limit, quota_about};
use crate::clock;
use crate::limit::LimitSpec;
use crate::quota::Limit;
use crate::signal::{ObservedQuota, Signal};
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
        self.limits.iter().any(|headers| headers.is_less)
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
            .filter(|(_, headers)| {
                headers.latest.is_some() && (external_usage || headers.refused > 0)
            })
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

/// What the upstream stated about one limit.
#[derive(Default)]
struct RemainingHeaders {
    /// The last statement that was not yet sent to the store.
    latest: Option<StatedRemaining>,
    /// The reset to which later ones are compared.
    anchor: Option<FirstReset>,
    /// Whether the reset stays at one moment, and moves only by whole windows. This is known after
    /// [`LONG`].
    stays: bool,
    /// Units of refused requests that were not yet sent to the store.
    refused: u32,
    /// When a statement was last sent to the store.
    sent_at: Option<Instant>,
    /// Whether fewer units are left than could still leave, and the store does not know. They are
    /// sent with the next call.
    is_less: bool,
    /// Whether the next statement that is sent notifies the other processes.
    urgent: bool,
    /// When the other processes were last notified, and of how many units.
    notified: Option<(Instant, u64)>,
    /// Whether unnamed quotas (without name, size and window) turned out to be about another limit.
    is_other: bool,
    /// Whether the store has to drop what followed from earlier statements, which were about
    /// another limit.
    forget: bool,
}

/// A statement of the upstream.
#[derive(Clone, Copy, Debug)]
struct StatedRemaining {
    /// The units left.
    units: u64,
    /// When the limit resets.
    resets_at: Instant,
    /// When the request was sent whose response states this.
    at: Instant,
}

/// A reset, and when it was first stated.
#[derive(Clone, Copy, Debug)]
struct FirstReset {
    resets_at: Instant,
    since: Instant,
}

/// Two resets that differ by no more are one reset. Many servers state whole seconds, and round in
/// different ways.
const SAME_RESET: Duration = Duration::from_millis(1500);

/// Until a statement is this old, it bounds what may leave, even if it is not yet known whether the
/// reset stays at one moment.
const FRESH: Duration = Duration::from_millis(250);

/// The longest that units are reserved without a confirmation by another response, unless
/// `max_hold` is shorter.
const LONGEST_VALID: Duration = Duration::from_secs(60);

/// After this span it is known whether the reset stays at one moment.
const LONG: Duration = Duration::from_secs(3);

/// A reset that is nearer may be over, because servers round to whole seconds.
pub(super) const LAST: Duration = Duration::from_secs(1);

/// How often within a window statements are sent to the store. They are sent at least once every
/// [`LONGEST_PAUSE`], and refusals at once.
const SENT_PER_WINDOW: u32 = 32;

/// The longest pause between two statements that are sent to the store.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl RemainingHeaders {
    /// Takes in what `quota` states in the response to a request that was sent at `sent`. The
    /// upstream refused `refused` units.
    ///
    /// The upstream made the statement between `sent` and now. It counts as made at `sent`: then
    /// the reset is earlier, and more was refilled since.
    fn observe(&mut self, limit: Limit, quota: &ObservedQuota, refused: u32, sent: Instant) {
        let Some(units) = left_of(limit, quota) else {
            return;
        };
        let is_unnamed = names_no_limit(quota);
        if is_unnamed && self.is_other {
            return;
        }
        if units == 0 {
            self.refused = self.refused.saturating_add(refused);
        }
        let reset_after = quota.reset_after().unwrap_or_default();
        let statement = StatedRemaining {
            units,
            resets_at: clock::after(sent, reset_after),
            at: sent,
        };
        self.latest = Some(statement);
        match self.anchor {
            None => self.anchor = Some(FirstReset::new(statement)),
            Some(anchor) if is_one_reset(statement.resets_at, anchor.resets_at) => {
                self.reset_stayed(limit, anchor, reset_after, sent);
            }
            Some(anchor) => self.reset_moved(limit, anchor, statement, is_unnamed),
        }
    }

    /// Notes that the upstream states the reset of the `anchor` again. If it has done so for long
    /// enough, the reset stays at one moment.
    fn reset_stayed(
        &mut self,
        limit: Limit,
        anchor: FirstReset,
        reset_after: Duration,
        sent: Instant,
    ) {
        // A reset that is further away than the window is of another limit.
        let is_near = reset_after <= limit.window().saturating_add(LAST);
        self.stays |= is_near && sent.saturating_duration_since(anchor.since) >= LONG;
    }

    /// Notes that the upstream states another reset than that of the `anchor`. The new reset is the
    /// anchor from now on.
    ///
    /// If the old reset is over, the new one is expected a window later, or some windows later if the key was
    /// idle. If it is not, the upstream does not count in windows of the limit, or it states another limit.
    fn reset_moved(
        &mut self,
        limit: Limit,
        anchor: FirstReset,
        statement: StatedRemaining,
        is_unnamed: bool,
    ) {
        let StatedRemaining { resets_at, at, .. } = statement;
        let is_over = clock::after(at, LAST) >= anchor.resets_at;
        let is_later = is_over && resets_at > anchor.resets_at;
        let next_reset = clock::after(anchor.resets_at, limit.window());
        // After idle windows the reset is some windows later, or that of a window that the first request
        // has begun. Neither shows that the statement is about another limit.
        let is_near = resets_at <= clock::after(at, limit.window().saturating_add(LAST));
        let is_after_idle = is_later && is_near && resets_at > clock::after(next_reset, SAME_RESET);
        let is_next_window = is_later
            && (is_one_reset(resets_at, next_reset)
                || (is_after_idle && are_windows(apart(resets_at, anchor.resets_at), limit)));
        if is_later && is_unnamed {
            // A quota of a minute is not about a limit of an hour.
            let period = apart(resets_at, anchor.resets_at).saturating_add(SAME_RESET);
            self.is_other = limit.window() > 2 * period;
        }
        if self.is_other || (self.stays && is_over && !is_next_window && !is_after_idle) {
            self.forget = true;
            self.latest = None;
        }
        self.stays &= is_next_window;
        self.anchor = Some(FirstReset::new(statement));
    }

    /// Returns the units left, if the last statement bounds what may leave: if it is not old and
    /// states a reset.
    fn bound(&self, limit: Limit, now: Instant) -> Option<u64> {
        let StatedRemaining {
            units,
            resets_at,
            at,
        } = self.latest?;
        let is_fresh = self.stays || now.saturating_duration_since(at) <= FRESH;
        let lasts = matches!(limit, Limit::Bucket { .. }) || resets_at > clock::after(now, LAST);
        (is_fresh && lasts).then_some(units)
    }

    /// Returns how long until a statement has to be sent to the store.
    fn pause(&self, limit: Limit, now: Instant) -> Duration {
        let Some(sent_at) = self.sent_at.filter(|_| self.refused == 0) else {
            return Duration::ZERO;
        };
        let pause = (limit.window() / SENT_PER_WINDOW).min(LONGEST_PAUSE);
        clock::after(sent_at, pause).saturating_duration_since(now)
    }

    /// Notes that only `units` are left, which is less than could still leave. Returns whether the
    /// other processes are notified at once. They are, unless they were notified within the last
    /// second and more than half is left of what they were notified of.
    fn notify_less(&mut self, units: u64, now: Instant) -> bool {
        self.is_less = true;
        self.urgent |= self.notified.is_none_or(|(notified_at, before)| {
            now >= clock::after(notified_at, LONGEST_PAUSE) || units <= before / 2
        });
        if self.urgent {
            self.notified = Some((now, units));
        }
        self.urgent
    }

    /// Takes the statement that is sent to the store now, if one is due.
    fn take_due(
        &mut self,
        limit: Limit,
        max_hold: Duration,
        now: Instant,
    ) -> Option<UpstreamRemaining> {
        if std::mem::take(&mut self.forget) {
            return Some(UpstreamRemaining {
                forget: true,
                ..UpstreamRemaining::new(limit, 0)
            });
        }
        let is_due = std::mem::take(&mut self.is_less) || self.pause(limit, now).is_zero();
        let StatedRemaining {
            units,
            resets_at,
            at,
        } = self.latest.take_if(|_| is_due)?;
        self.sent_at = Some(now);
        let reset_in = resets_at.saturating_duration_since(now);
        Some(UpstreamRemaining {
            reset_in: (reset_in > LAST).then_some(reset_in),
            steady: self.stays,
            ago: now.saturating_duration_since(at),
            refused: std::mem::take(&mut self.refused),
            valid_for: max_hold.min(LONGEST_VALID),
            urgent: std::mem::take(&mut self.urgent),
            ..UpstreamRemaining::new(limit, units)
        })
    }
}

impl FirstReset {
    fn new(statement: StatedRemaining) -> Self {
        FirstReset {
            resets_at: statement.resets_at,
            since: statement.at,
        }
    }
}

/// Returns whether two resets are so near that they are one.
fn is_one_reset(one: Instant, other: Instant) -> bool {
    apart(one, other) <= SAME_RESET
}

/// Returns whether a span is a whole number of the windows of `limit`.
fn are_windows(span: Duration, limit: Limit) -> bool {
    let window = limit.window().as_nanos().max(1);
    let rest = span.as_nanos() % window;
    rest.min(window - rest) <= SAME_RESET.as_nanos()
}

fn apart(one: Instant, other: Instant) -> Duration {
    one.max(other) - one.min(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit::Sliding {
        count: 100,
        window: Duration::from_secs(60),
    };

    /// Returns the units that are sent to the store after `answers`. An answer is the second of its
    /// arrival, the units left, and the seconds until the reset.
    fn sent(answers: &[(u64, u64, u64)]) -> Option<u64> {
        let (mut headers, start) = (RemainingHeaders::default(), clock::now());
        let mut at = start;
        for &(second, left, reset) in answers {
            at = start + Duration::from_secs(second);
            let quota = ObservedQuota::new()
                .with_remaining(left)
                .with_reset_after(Duration::from_secs(reset));
            headers.observe(LIMIT, &quota, 0, at);
        }
        let left = headers.take_due(LIMIT, LONGEST_VALID, at);
        left.filter(|left| left.steady && left.reset_in.is_some())
            .map(|left| left.units)
    }

    #[test]
    fn only_resets_that_stay_are_steady() {
        assert_eq!(sent(&[(0, 90, 50)]), None, "it is not known yet");
        assert_eq!(
            sent(&[(0, 90, 50), (1, 80, 49)]),
            None,
            "it may be rounding"
        );
        assert_eq!(sent(&[(0, 90, 50), (4, 80, 46)]), Some(80));
        assert_eq!(sent(&[(0, 90, 60), (4, 80, 60)]), None, "it moves along");
        assert_eq!(
            sent(&[(0, 90, 50), (4, 80, 46), (51, 99, 59)]),
            Some(99),
            "the next window"
        );
        assert_eq!(
            sent(&[(0, 90, 50), (4, 80, 46), (10, 70, 59)]),
            None,
            "it did not stay"
        );
        assert_eq!(sent(&[(0, 90, 5), (4, 80, 1)]), None, "it may be over");
        assert_eq!(
            sent(&[(0, 90, 50), (4, 80, 46), (171, 99, 59)]),
            Some(99),
            "two windows were idle"
        );
    }

    /// A window that begins with its first request.
    #[test]
    fn statement_after_idle_windows_is_believed() {
        let (mut headers, start) = (RemainingHeaders::default(), clock::now());
        let mut last = None;
        for (second, left, reset) in [(0, 90, 50), (4, 80, 46), (200, 2, 60)] {
            let at = start + Duration::from_secs(second);
            let quota = ObservedQuota::new()
                .with_remaining(left)
                .with_reset_after(Duration::from_secs(reset));
            headers.observe(LIMIT, &quota, 0, at);
            assert_eq!(headers.bound(LIMIT, at), Some(left), "{second}");
            last = headers.take_due(LIMIT, LONGEST_VALID, at);
        }
        let last = last.expect("it is due");
        assert_eq!((last.units, last.forget), (2, false));
    }

    /// A server that states what is left of a minute, under a limit of an hour.
    #[test]
    fn unnamed_quotas_of_shorter_periods_are_other_limits() {
        let hour = Limit::Sliding {
            count: 5000,
            window: Duration::from_secs(3600),
        };
        let (mut headers, start) = (RemainingHeaders::default(), clock::now());
        let mut sent = Vec::new();
        for second in (0..200).step_by(5) {
            let at = start + Duration::from_secs(second);
            let reset = Duration::from_secs(60 - second % 60);
            headers.observe(
                hour,
                &ObservedQuota::new()
                    .with_remaining(37)
                    .with_reset_after(reset),
                0,
                at,
            );
            sent.extend(
                headers
                    .take_due(hour, LONGEST_VALID, at)
                    .map(|left| (second, left.forget)),
            );
        }
        assert_eq!(sent.last(), Some(&(60, true)), "{sent:?}");
    }

    #[test]
    fn remaining_is_reported_rarely_and_refusals_at_once() {
        let (mut headers, start) = (RemainingHeaders::default(), clock::now());
        let mut answered = |millis: u64, left: u64, refused: u32| {
            let at = start + Duration::from_millis(millis);
            let reset = Duration::from_millis(50_000 - millis);
            headers.observe(
                LIMIT,
                &ObservedQuota::new()
                    .with_remaining(left)
                    .with_reset_after(reset),
                refused,
                at,
            );
            headers
                .take_due(LIMIT, LONGEST_VALID, at)
                .map(|left| left.refused)
        };
        assert_eq!(answered(0, 50, 0), Some(0));
        assert_eq!(answered(4000, 40, 0), Some(0));
        assert_eq!(answered(4100, 30, 0), None);
        assert_eq!(
            answered(4200, 30, 2),
            None,
            "another limit has refused that"
        );
        assert_eq!(answered(4300, 0, 2), Some(2));
        assert_eq!(answered(7000, 0, 0), Some(0));
    }
}
