//! What a request states when it enters.

use std::time::Instant;

use super::quotas::QuotaId;
use crate::key::Key;

/// A request that enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) cost: u32,
    pub(crate) deadline: Option<Instant>,
    /// The key of its host. `None` if the host does not matter.
    ///
    /// The host matters if each host has holds of its own (`hosts.rs`). It also matters if the
    /// client follows redirects, because the response of another host states nothing about this
    /// key.
    pub(crate) host: Option<Key>,
    /// The quota that the request states for the key.
    pub(crate) quota: QuotaId,
}

impl Entry {
    /// Makes the entry of a request that states nothing but its cost.
    #[inline]
    pub(crate) fn new(key: Key, cost: u32) -> Self {
        Entry {
            key,
            cost,
            deadline: None,
            host: None,
            quota: QuotaId::NONE,
        }
    }
}
