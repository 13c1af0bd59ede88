//! Changes of a key that all processes are notified of: of its hold, and of its set quota.

use std::time::Duration;

use super::{HoldState, SetQuota, StoreError};
use crate::limit::{ChangeKind, LimitSpec, UpstreamRemaining};

/// A change of the hold or of the set quota of a key, for [`Store::change`](super::Store::change).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// Puts the key on hold.
    ///
    /// A hold without time left states that the upstream accepts requests again. If no hold is in
    /// force, that counts as a release: it ends the probation that follows a hold that was cut.
    Hold {
        /// The hold. The one in force may end later.
        hold: HoldState,
        /// What the same response of the upstream stated of a limit.
        remaining: Option<UpstreamRemaining>,
    },
    /// Ends the hold of the key.
    Release,
    /// Changes the set quota of the key.
    Quota {
        /// How it changes.
        kind: ChangeKind,
        /// For how long the quota applies, or its end is remembered: see [`ChangeKind`].
        life: Duration,
    },
}

impl Change {
    /// Checks that the limits of `spec` can be the set quota of a key, if the change makes them so.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unsupported`] if the quota has no limit of rate: a store counts calls in flight
    /// apart from rates.
    pub(super) fn check(&self, spec: &LimitSpec) -> Result<(), StoreError> {
        match self {
            Change::Quota { kind, .. }
                if *kind != ChangeKind::End && spec.quota().limits().is_empty() =>
            {
                Err(StoreError::Unsupported(
                    "set quotas without a limit of rate",
                ))
            }
            _ => Ok(()),
        }
    }
}

/// The hold and the set quota of a key that are in force after a [`Change`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InForce {
    /// The state of the hold.
    pub hold: HoldState,
    /// The set quota, or its end. After a change of the hold it may be `None`.
    pub set_quota: Option<SetQuota>,
}

impl InForce {
    /// Makes the reply to a change. To one of the quota, it needs the set quota.
    pub const fn new(hold: HoldState, set_quota: Option<SetQuota>) -> Self {
        InForce { hold, set_quota }
    }

    /// Returns the set quota, or its end, after a change of it.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unsupported`] if the store stated none.
    pub(crate) fn changed_quota(self) -> Result<SetQuota, StoreError> {
        self.set_quota.ok_or(StoreError::Unsupported("set quotas"))
    }
}
