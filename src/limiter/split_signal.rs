//! Which of the keys of a joint request a statement of the response is about.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::hosts::Reach;
use super::key_state::{counts, names_unit, states_limit_of};
use crate::limit::LimitSpec;
use crate::signal::{ObservedQuota, Signal};

/// A key of a joint request.
#[derive(Default)]
pub(super) struct SignalKey {
    /// The name of its limit. `None` if it has none.
    pub(super) name: Option<&'static str>,
    /// The limits of the key. `None` if the limiter was dropped.
    pub(super) spec: Option<Arc<LimitSpec>>,
    /// Whether a function of the caller decides what a refusal with a scope holds.
    pub(super) has_on_scope: bool,
    /// Whether the limits are those of a further unit of the key before.
    pub(super) is_further_unit: bool,
    /// How far a response of the host may reach.
    pub(super) reach: Reach,
    /// Whether a refusal holds the host, and not the key.
    pub(super) holds_host: bool,
}

/// Splits the signal of a response into one signal for each of `keys`. If it is a refusal, also
/// returns the key that it is about.
///
/// **Which keys a response may reach.** It neither holds nor teaches keys that requests to other hosts have, too:
/// one server would stop the requests to all others. So it reaches those with the largest [`Reach`]. If
/// all are shared, it reaches the last one: the server has to be obeyed somewhere. The rules below
/// choose among the keys that it may reach.
///
/// A quota goes to the key whose limit has its name, else to the first key whose unit has its name,
/// else to the first key with a limit of its size and window, else to the first key that has such a
/// limit, else to the first key that counts its unit, if that is not requests, else to the first key. A refusal goes to
/// one key: to the key of a limit with `on_scope`, else to the key whose limit has the name of the
/// scope, else to the key for which a used-up quota is stated, else to the last one, in all of its
/// units. The last limit of a layer should be the narrowest, so that a refusal without a reason holds
/// back the fewest requests.
pub(super) fn split(signal: &Signal, keys: &[SignalKey]) -> (SmallVec<[Signal; 4]>, Option<usize>) {
    let reach = keys.iter().map(|key| key.reach).max().unwrap_or_default();
    let last = keys.iter().rposition(|key| !key.is_further_unit);
    let is_reached = |index: usize, key: &SignalKey| match reach {
        Reach::Shared => last.is_none_or(|last| index >= last),
        reach => key.reach == reach,
    };
    let position = |is: &dyn Fn(&SignalKey) -> bool| {
        let mut all = keys.iter().enumerate();
        all.position(|(index, key)| is_reached(index, key) && is(key))
    };
    let first = position(&|_| true).unwrap_or(0);
    let is_named =
        |key: &SignalKey, word: &str| key.name.is_some_and(|name| name.eq_ignore_ascii_case(word));
    let owner = |quota: &ObservedQuota| {
        let has_name = |key: &SignalKey| quota.name().is_some_and(|name| is_named(key, name));
        let unit = |key: &SignalKey| key.spec.as_ref().and_then(|spec| spec.quota().unit());
        let has_unit_name = |key: &SignalKey| unit(key).is_some_and(|unit| names_unit(quota, unit));
        let has_unit = |key: &SignalKey| unit(key).is_some() && counts(quota, unit(key));
        let is_equal = |key: &SignalKey| {
            let mut limits = key.spec.iter().flat_map(|spec| spec.quota().limits());
            let may_be_meant = unit(key).is_none() || has_unit(key);
            may_be_meant
                && limits.any(|limit| {
                    quota.window() == Some(limit.window())
                        && quota.limit() == Some(u64::from(limit.count()))
                })
        };
        let has_limit = |key: &SignalKey| {
            let spec = key.spec.as_ref();
            spec.is_some_and(|spec| states_limit_of(quota, spec))
        };
        position(&has_name)
            .or_else(|| position(&has_unit_name))
            .or_else(|| position(&is_equal))
            .or_else(|| position(&has_limit))
            .or_else(|| position(&has_unit))
    };
    let refused: Option<Range<usize>> = signal.refusal().map(|_| {
        let by_scope = signal.scope().and_then(|scope| {
            position(&|key| key.has_on_scope).or_else(|| position(&|key| is_named(key, scope)))
        });
        let used_up = || {
            let mut quotas = signal.quotas().iter();
            quotas.find_map(|quota| owner(quota).filter(|_| quota.is_used_up()))
        };
        if let Some(known) = by_scope.or_else(used_up) {
            return known..known + 1;
        }
        let mut all = keys.iter().enumerate();
        let last = all.rposition(|(index, key)| is_reached(index, key) && !key.is_further_unit);
        let last = last.unwrap_or(0);
        let further = keys[last + 1..].iter();
        let further = further.take_while(|key| key.is_further_unit && !keys[last].holds_host);
        last..last + 1 + further.count()
    });
    let signal_of = |index: usize| {
        let quotas = signal.quotas().iter();
        let own = quotas.filter(|quota| owner(quota).unwrap_or(first) == index);
        let stated = own.fold(signal.clone().without_quotas(), |signal, quota| {
            signal.with_quota(quota.clone())
        });
        if refused
            .as_ref()
            .is_some_and(|refused| refused.contains(&index))
        {
            stated
        } else {
            stated.with_refusal(None)
        }
    };
    let signals = (0..keys.len()).map(signal_of).collect();
    (signals, refused.map(|refused| refused.start))
}
