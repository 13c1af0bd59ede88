//! Which quota of a response is about a limit, and how much of the limit it states is left.

use crate::cost::Cost;
use crate::limit::LimitSpec;
use crate::quota::Limit;
use crate::signal::{ObservedQuota, Signal};

/// Returns whether a response may state what is left of a limit, or the limit.
pub(in crate::limiter) fn is_of_use(signal: &Signal) -> bool {
    let mut quotas = signal.quotas().iter();
    quotas.any(|quota| {
        let states_limit = quota.limit().is_some() && quota.window().is_some();
        quota.remaining().is_some() || states_limit
    })
}

/// Returns the quota that a response states about `limit`. Of several, the one with the least left.
pub(super) fn quota_about<'a>(
    limit: Limit,
    signal: &'a Signal,
    spec: &LimitSpec,
) -> Option<&'a ObservedQuota> {
    let about = signal
        .quotas()
        .iter()
        .filter(|quota| is_about(quota, limit, spec));
    about
        .filter(|quota| quota.remaining().is_some())
        .min_by_key(|quota| left_of(limit, quota))
}

/// Returns whether a quota is about one of the limits of `spec`, and says so by name, size or
/// window.
pub(in crate::limiter) fn states_limit_of(quota: &ObservedQuota, spec: &LimitSpec) -> bool {
    let mut limits = spec.quota().limits().iter();
    !names_no_limit(quota) && limits.any(|limit| is_about(quota, *limit, spec))
}

/// Returns what is left of `limit`: all but what is used of the stated quota.
///
/// The stated quota may be smaller than the limit, for example because it is about some of the
/// requests only. What the limit has more than the quota counts as unused, except for a bucket.
pub(super) fn left_of(limit: Limit, quota: &ObservedQuota) -> Option<u64> {
    let rest = match (limit, quota.limit()) {
        (Limit::Bucket { .. }, _) | (_, None) => 0,
        (_, Some(stated)) => u64::from(limit.count()).saturating_sub(stated),
    };
    quota.remaining().map(|left| left.saturating_add(rest))
}

/// Returns whether a quota states neither name nor size nor window.
pub(super) fn names_no_limit(quota: &ObservedQuota) -> bool {
    quota.name().is_none() && quota.limit().is_none() && quota.window().is_none()
}

/// Returns whether a quota counts the units of limits that count `unit`. `None` stands for requests.
pub(in crate::limiter) fn counts(quota: &ObservedQuota, unit: Option<&str>) -> bool {
    match unit {
        None => quota.unit() == Cost::REQUESTS,
        Some(unit) => names_unit(quota, unit) || is_same_word(quota.unit(), unit),
    }
}

/// Returns whether the name of a quota is `unit`, such as `input-tokens` for `input_tokens`.
pub(in crate::limiter) fn names_unit(quota: &ObservedQuota, unit: &str) -> bool {
    quota.name().is_some_and(|name| is_same_word(name, unit))
}

/// Returns whether two words differ at most in case, and in `-` or `_`.
fn is_same_word(one: &str, other: &str) -> bool {
    let plain = |byte: u8| match byte {
        b'-' => b'_',
        byte => byte.to_ascii_lowercase(),
    };
    one.bytes().map(plain).eq(other.bytes().map(plain))
}

/// Returns whether a quota is about `limit`. Limits that count requests are also meant by a quota of
/// another unit, such as tokens, if it is as large: their unit may be one that has no name here.
fn is_about(quota: &ObservedQuota, limit: Limit, spec: &LimitSpec) -> bool {
    let is_as_large = quota.limit() == Some(u64::from(limit.largest_cost()));
    let unit = spec.quota().unit();
    let may_be_meant = counts(quota, unit) || (unit.is_none() && is_as_large);
    if quota.unit() == "percent" || !may_be_meant {
        return false;
    }
    match (limit, quota.window(), quota.limit()) {
        (Limit::Bucket { .. }, ..) => is_as_large,
        (_, Some(window), _) => window == limit.window(),
        (_, None, Some(_)) => is_as_large,
        (_, None, None) => names_no_limit(quota) && spec.quota().limits().len() == 1,
    }
}
