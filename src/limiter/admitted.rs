//! A request that is sent, as far as its response needs it.

use std::sync::Arc;

use super::engine::{Core, CoreId};
use super::entry::Entry;
use super::hosts::Reach;
use super::split_signal::SignalKey;
use crate::clock::Moment;
use crate::key::Key;

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
