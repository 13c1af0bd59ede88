//! Which ledger granted the permits of a lease: the store's, or the one of this process.

use std::time::Instant;

use crate::limit::UnusedPermits;

/// The ledger that granted the permits of a [`Lease`](super::Lease).
///
/// Only the [fallback](super::FallbackStore) sets another value than `Store`. The source is a
/// private field of the lease. A type around the lease would have to pass through every decorator
/// of a store, although only this decorator needs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// The store granted the permits.
    #[default]
    Store,
    /// The store did not reply. This process granted the permits of its fallback share. The lease
    /// states nothing else about the key.
    Standalone {
        /// When this process granted them. Waits count from this moment.
        granted_at: Instant,
    },
}

impl Source {
    /// The incarnation of permits that a process granted itself. No store draws it.
    pub(crate) const STANDALONE_INCARNATION: u64 = u64::MAX;

    pub(crate) fn is_standalone(self) -> bool {
        !matches!(self, Source::Store)
    }

    /// Returns the incarnation of the granted permits. `of_store` is that of the store's state.
    pub(super) fn incarnation(self, of_store: u64) -> u64 {
        if self.is_standalone() {
            Source::STANDALONE_INCARNATION
        } else {
            of_store
        }
    }

    /// Returns whether a process granted the permit itself, and not the store.
    pub(super) fn granted_standalone(unused: &UnusedPermits) -> bool {
        unused.incarnation == Source::STANDALONE_INCARNATION
    }
}
