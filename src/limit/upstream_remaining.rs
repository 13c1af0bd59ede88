//! What an upstream states is left of a limit.

use std::time::Duration;

use crate::quota::Limit;

/// What an upstream states is left of a limit, for [`LeaseRequest::remaining`](crate::store::LeaseRequest::remaining).
///
/// Units that are gone and were not granted by the store were used by other clients. The store reserves them. If less is left
/// than the store knew, it reserves the difference.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamRemaining {
    /// The limit.
    pub limit: Limit,
    /// The units that are left.
    pub units: u64,
    /// How long until the upstream starts its count anew, if the upstream states it. A bucket ignores it.
    pub reset_in: Option<Duration>,
    /// Whether the moment of the reset stays where it is. If it moves along, what is gone may just have left the log, and
    /// only refusals show use by other clients.
    pub steady: bool,
    /// How long ago the upstream stated it.
    pub ago: Duration,
    /// Units that the upstream has refused since its last response, because nothing was left.
    pub refused: u32,
    /// How long the units that follow from it are reserved for other clients, unless a later response confirms them.
    /// [`UpstreamRemaining::new`]: 60 s.
    pub valid_for: Duration,
    /// Whether earlier responses were about another limit. If so, the units reserved because of them are forgotten.
    pub forget: bool,
    /// Whether other processes are notified at once if less is left than the store knew, because the upstream would refuse
    /// permits that they have at hand or booked. A store without other processes ignores it.
    pub urgent: bool,
}

impl UpstreamRemaining {
    /// Makes a statement of this moment that `units` of `limit` are left. It states no reset.
    pub fn new(limit: Limit, units: u64) -> Self {
        let (ago, valid_for) = (Duration::ZERO, Duration::from_secs(60));
        UpstreamRemaining {
            limit,
            units,
            reset_in: None,
            steady: false,
            ago,
            refused: 0,
            valid_for,
            forget: false,
            urgent: false,
        }
    }
}
