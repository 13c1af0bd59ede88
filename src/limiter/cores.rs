//! The cores of a limiter: one for each unit that its quota counts.
//!
//! Most quotas count requests, and their limiter has one core. If a quota also counts tokens
//! ([`Quota::of`](crate::Quota::of)), the tokens have a core of their own, with keys of their own. A
//! request is then a joint request (`joint`) of one key for each unit.

use std::future::Future;
use std::sync::Arc;

use super::engine::Core;
use crate::cost::RequestCost;
use crate::error::{Reason, StoreError};
use crate::events;
use crate::join::join_all;
use crate::key::Key;

/// The cores of a limiter.
#[derive(Clone, Debug)]
pub(super) struct Cores {
    /// The core of requests, or of the first unit if requests are not counted.
    pub(super) first: Arc<Core>,
    /// `None` if only requests are counted. Else the cores of the other units, which may be none.
    others: Option<Arc<[Arc<Core>]>>,
}

impl Cores {
    /// Makes the cores of a limiter.
    pub(super) fn new(first: Arc<Core>, others: Vec<Arc<Core>>) -> Self {
        let counts_requests_only = others.is_empty() && first.unit().is_none();
        Cores {
            first,
            others: (!counts_requests_only).then(|| others.into()),
        }
    }

    /// Returns whether the quota counts other units than requests.
    #[inline]
    pub(super) fn count_units(&self) -> bool {
        self.others.is_some()
    }

    /// Returns all cores, the first one first.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Core>> {
        let others = self.others.iter().flat_map(|others| others.iter());
        std::iter::once(&self.first).chain(others)
    }

    /// Returns whether one of the limits counts `unit`.
    pub(super) fn count(&self, unit: &str) -> bool {
        self.all().any(|core| core.unit_name() == unit)
    }

    /// Compares the units of `cost` with those that are counted, and reports the first difference: a unit that the cost
    /// lacks, or one for which `is_unknown` returns true. Returns why the request is refused, if no request has stated a
    /// unit so far.
    pub(super) fn check_units(
        &self,
        cost: &RequestCost,
        is_unknown: impl Fn(&str) -> bool,
    ) -> Option<Reason> {
        let mut missing = None;
        let mut refused = None;
        for core in self.all().filter(|core| core.settings.needs_cost) {
            let Some(unit) = core.unit() else { continue };
            let states = cost.states(unit);
            if !states {
                missing = missing.or(Some(unit));
            }
            if core.unit_check.is_uncharged(states) {
                refused = refused.or(Some(Reason::NotCharged { unit }));
            }
        }
        let check = &self.first.unit_check;
        if check.is_unreported() {
            let unknown = cost.units().find(|unit| is_unknown(unit));
            if (missing.is_some() || unknown.is_some()) && check.report() {
                events::units_differ(&self.first.settings.tally, missing, unknown);
            }
        }
        refused
    }

    /// Returns the cores of all units and all parts, each with its key for the quota of `key`.
    pub(super) fn everywhere(&self, key: Key) -> impl Iterator<Item = (Arc<Core>, Key)> {
        self.all()
            .flat_map(move |core| core.all_parts(core.key_of(key)).rev())
    }

    /// Runs `act` for the key of each unit and each part, all at once. Returns the first error.
    pub(super) async fn for_each<F>(
        &self,
        key: Key,
        act: impl Fn(Arc<Core>, Key) -> F,
    ) -> Result<(), StoreError>
    where
        F: Future<Output = Result<(), StoreError>>,
    {
        let all = self.everywhere(key).map(|(core, key)| act(core, key));
        join_all(all).await.into_iter().collect()
    }
}
