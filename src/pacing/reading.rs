//! The part of a signal that paces read.

use std::time::{Duration, Instant};

use crate::signal::{ObservedQuota, Signal};

/// One quota that an answer states, as numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct QuotaNumbers {
    pub(super) remaining: Option<f64>,
    pub(super) limit: Option<f64>,
    /// The length of the window, in seconds.
    pub(super) window: Option<f64>,
    /// The time until the reset, in seconds from the answer on.
    pub(super) reset: Option<f64>,
}

impl QuotaNumbers {
    /// Reads the quota of which the smallest fraction is left.
    pub(super) fn of(signal: &Signal) -> QuotaNumbers {
        let requests = signal
            .quotas()
            .iter()
            .filter(|quota| quota.unit() == ObservedQuota::REQUESTS && !is_code(quota));
        let Some(quota) = requests.min_by(|one, other| left(one).total_cmp(&left(other))) else {
            return QuotaNumbers::default();
        };
        QuotaNumbers {
            remaining: quota.remaining().map(|count| count as f64),
            limit: quota.limit().map(|count| count as f64),
            window: quota.window().map(|span| span.as_secs_f64()),
            reset: quota.reset_after().map(|span| span.as_secs_f64()),
        }
    }
}

/// Returns the fraction of a quota that is left.
fn left(quota: &ObservedQuota) -> f64 {
    match (quota.remaining(), quota.limit()) {
        (Some(remaining), Some(limit)) => remaining as f64 / limit.max(1) as f64,
        (Some(0), None) => 0.0,
        (Some(_), None) => 1.0,
        (None, _) => f64::INFINITY,
    }
}

/// What an answer shows of a limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuotaAnswer {
    /// What it states. Parts that are not believed are left out on the way.
    pub(super) told: QuotaNumbers,
    /// Whether the request was not refused.
    pub(super) passed: bool,
    /// When the request left.
    pub(super) sent: Instant,
    /// When the answer arrived.
    pub(super) now: Instant,
}

/// Returns whether a quota may be that of a code in a body: it is used up, and no more is known of it than its window of a
/// day or more. It states no level.
fn is_code(quota: &ObservedQuota) -> bool {
    quota.is_used_up()
        && quota.limit().is_none()
        && quota.reset_after().is_none()
        && quota.window() >= Some(Duration::from_secs(86_400))
}

/// A wait below this that equals the time to a reset is no wish of its own. Servers state whole seconds, so the clients of a
/// window of two seconds would wait for the next one together: with twenty processes, 24 % were refused instead of 4 %.
const SHORT_WAIT: Duration = Duration::from_secs(10);

/// Returns the wait that a refusal explicitly asks for.
pub(crate) fn wait_said(signal: &Signal) -> Option<Duration> {
    let wait = signal.asked_wait()?;
    let mut quotas = signal.quotas().iter();
    let is_reset = quotas.any(|quota| quota.is_used_up() && quota.reset_after() == Some(wait));
    (!is_reset || wait >= SHORT_WAIT).then_some(wait)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(headers: &[(&'static str, &str)]) -> Signal {
        let mut response = http::Response::builder().status(429);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        Signal::read(&response.body(()).unwrap())
    }

    #[test]
    fn scarcest_quota_counts() {
        let quota = |limit, remaining| {
            ObservedQuota::new()
                .with_limit(limit)
                .with_remaining(remaining)
        };
        let signal = Signal::default()
            .with_quota(quota(10, 9))
            .with_quota(quota(4500, 100));
        let signal = signal.with_quota(quota(7, 0).with_unit("tokens"));
        assert_eq!(QuotaNumbers::of(&signal).remaining, Some(100.0));
        assert_eq!(
            QuotaNumbers::of(&Signal::default()),
            QuotaNumbers::default()
        );
    }

    #[test]
    fn used_up_quota_without_a_limit_is_the_scarcest() {
        let plenty = ObservedQuota::new().with_limit(120).with_remaining(110);
        let second = ObservedQuota::new().with_window(Duration::from_secs(1));
        let of = |left| {
            let signal = Signal::default().with_quota(plenty.clone());
            QuotaNumbers::of(&signal.with_quota(second.clone().with_remaining(left))).remaining
        };
        assert_eq!((of(0), of(5)), (Some(0.0), Some(110.0)));
    }

    #[test]
    fn reset_is_no_explicit_wait() {
        let reset = [("ratelimit-remaining", "0"), ("ratelimit-reset", "3600")];
        assert_eq!(wait_said(&refusal(&reset)), None);
        // Nothing says that a bucket is empty until then.
        assert_eq!(
            wait_said(&refusal(&[("ratelimit-reset", "60")])),
            Some(Duration::from_secs(60))
        );
        let both = |wait| {
            [
                ("ratelimit-remaining", "0"),
                ("ratelimit-reset", wait),
                ("retry-after", wait),
            ]
        };
        // A server may make both of one value.
        let hour = Duration::from_secs(3600);
        assert_eq!(wait_said(&refusal(&both("3600"))), Some(hour));
        assert_eq!(wait_said(&refusal(&both("2"))), None);
        assert_eq!(wait_said(&refusal(&[])), None);
    }
}
