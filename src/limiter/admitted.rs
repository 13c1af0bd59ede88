//! A request that is sent, as far as its response needs it, and which of its keys a statement of the response is about.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::engine::{Core, CoreId};
use super::hosts::Reach;
use super::key_state::{counts, names_unit, states_limit_of};
use super::part::Entry;
use crate::clock::Moment;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::signal::{ObservedQuota, Signal};

/// A request that is sent, under the first of its keys.
#[derive(Clone, Copy)]
pub(crate) struct Admitted {
    pub(super) core: CoreId,
    pub(super) cost: u32,
    pub(super) key: Key,
    /// The key of its host, if the host matters: see [`Entry::host`].
    pub(super) host: Option<Key>,
    /// When the request was sent, or a little before.
    pub(super) at: Moment,
}

impl Admitted {
    /// Makes the value for the request of `entry`, which the limiter of `core` counts.
    #[inline]
    pub(super) fn new(core: CoreId, entry: &Entry, at: Moment) -> Self {
        let &Entry {
            key, cost, host, ..
        } = entry;
        Admitted {
            core,
            cost,
            key,
            host,
            at,
        }
    }

    /// Returns how far the response may reach with this key.
    fn reach(&self, core: &Arc<Core>) -> Reach {
        let &Admitted { key, host, .. } = self;
        let is_of_host = host.is_some_and(|host| {
            let named = core.settings.name.map(|name| host.and(name));
            core.key_of(host) == key || named.is_some_and(|named| core.key_of(named) == key)
        });
        // The requests of all classes have the key.
        let first = core.part_at(0, key);
        let (first, key) = first.unwrap_or_else(|| (core.clone(), key));
        first.hosts.reach(key, host, is_of_host)
    }

    /// Returns the key as one of those that a response may be about.
    pub(super) fn signal_key(&self) -> SignalKey {
        let Some(core) = self.core.find() else {
            return SignalKey::default();
        };
        SignalKey {
            name: core.settings.name,
            has_on_scope: core.settings.on_scope.is_some(),
            is_further_unit: core.settings.is_further_unit,
            reach: self.reach(&core),
            holds_host: core.hold_key(self.key, self.host) != self.key,
            spec: Some(core.terms(self.key)),
        }
    }
}

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

impl SignalKey {
    /// Returns what its limits count. `None` for requests, and if the limiter was dropped.
    fn unit(&self) -> Option<&str> {
        self.spec.as_ref()?.quota().unit()
    }

    fn is_named(&self, word: &str) -> bool {
        self.name
            .is_some_and(|name| name.eq_ignore_ascii_case(word))
    }

    /// Returns whether its limits count the unit of a quota, and not requests.
    fn counts_unit_of(&self, quota: &ObservedQuota) -> bool {
        self.unit().is_some() && counts(quota, self.unit())
    }

    /// Returns whether one of its limits has the size and the window of a quota, and may count the same.
    fn has_equal_of(&self, quota: &ObservedQuota) -> bool {
        let mut limits = self.spec.iter().flat_map(|spec| spec.quota().limits());
        let may_be_meant = self.unit().is_none() || self.counts_unit_of(quota);
        may_be_meant
            && limits.any(|limit| {
                quota.window() == Some(limit.window())
                    && quota.limit() == Some(u64::from(limit.count()))
            })
    }

    fn has_limit_of(&self, quota: &ObservedQuota) -> bool {
        let spec = self.spec.as_ref();
        spec.is_some_and(|spec| states_limit_of(quota, spec))
    }
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
    let reached = ReachedKeys::of(keys);
    let first = reached.position(|_| true).unwrap_or(0);
    let refused = reached.refused_by(signal);
    let mut signals = SmallVec::new();
    for index in 0..keys.len() {
        let mut own = signal.clone().without_quotas();
        for quota in signal.quotas() {
            if reached.owner_of(quota).unwrap_or(first) == index {
                own = own.with_quota(quota.clone());
            }
        }
        let is_refused = refused.as_ref().is_some_and(|keys| keys.contains(&index));
        signals.push(if is_refused {
            own
        } else {
            own.with_refusal(None)
        });
    }
    (signals, refused.map(|refused| refused.start))
}

/// The keys of a joint request, some of which a response may reach: see [`split`].
struct ReachedKeys<'a> {
    keys: &'a [SignalKey],
    reach: Reach,
    /// The last key, with its first unit. `None` if there is no such key.
    last: Option<usize>,
}

impl<'a> ReachedKeys<'a> {
    fn of(keys: &'a [SignalKey]) -> Self {
        ReachedKeys {
            keys,
            reach: keys.iter().map(|key| key.reach).max().unwrap_or_default(),
            last: keys.iter().rposition(|key| !key.is_further_unit),
        }
    }

    fn is_reached(&self, index: usize) -> bool {
        match self.reach {
            Reach::Shared => self.last.is_none_or(|last| index >= last),
            reach => self.keys[index].reach == reach,
        }
    }

    /// Returns the first key that is `wanted`, of those that the response may reach.
    fn position(&self, wanted: impl Fn(&SignalKey) -> bool) -> Option<usize> {
        let mut all = 0..self.keys.len();
        all.find(|index| self.is_reached(*index) && wanted(&self.keys[*index]))
    }

    /// Returns the key that a quota is about, if one says so by its name, its unit or a limit.
    fn owner_of(&self, quota: &ObservedQuota) -> Option<usize> {
        self.position(|key| quota.name().is_some_and(|name| key.is_named(name)))
            .or_else(|| self.position(|key| key.unit().is_some_and(|unit| names_unit(quota, unit))))
            .or_else(|| self.position(|key| key.has_equal_of(quota)))
            .or_else(|| self.position(|key| key.has_limit_of(quota)))
            .or_else(|| self.position(|key| key.counts_unit_of(quota)))
    }

    /// Returns the key that a refusal is about. If the response does not say which, the last one in all of its units.
    /// `None` if it is no refusal.
    fn refused_by(&self, signal: &Signal) -> Option<Range<usize>> {
        signal.refusal()?;
        let by_scope = signal.scope().and_then(|scope| {
            self.position(|key| key.has_on_scope)
                .or_else(|| self.position(|key| key.is_named(scope)))
        });
        let known = by_scope.or_else(|| {
            let mut used_up = signal.quotas().iter().filter(|quota| quota.is_used_up());
            used_up.find_map(|quota| self.owner_of(quota))
        });
        if let Some(known) = known {
            return Some(known..known + 1);
        }
        let mut all = (0..self.keys.len()).rev();
        let last = all.find(|index| self.is_reached(*index) && !self.keys[*index].is_further_unit);
        let last = last.unwrap_or(0);
        let further = self.keys[last + 1..].iter();
        let further = further.take_while(|key| key.is_further_unit && !self.keys[last].holds_host);
        Some(last..last + 1 + further.count())
    }
}
