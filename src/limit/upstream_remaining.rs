//! What an upstream states is left of a limit.

use std::time::Duration;

use crate::quota::Limit;

/// What an upstream states is left of a limit, for
/// [`LeaseRequest::remaining`](crate::store::LeaseRequest::remaining).
///
/// Units that are gone and that the store did not grant were used by other clients. The store
/// reserves these units. If less is left than the store knew, it reserves the difference.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamRemaining {
    /// The limit of which units are left.
    pub limit: Limit,
    /// How many units are left.
    pub units: u64,
    /// How long until the upstream starts its count anew. `None` if the upstream does not state it.
    /// A bucket ignores it.
    pub reset_in: Option<Duration>,
    /// Whether the moment of the reset is the same in each response. If it moves with time, units
    /// that are gone may just have left the log. Then only refusals show use by other clients.
    pub steady: bool,
    /// How long ago the upstream stated what is left.
    pub ago: Duration,
    /// How many units the upstream has refused since its last response, because nothing was left.
    pub refused: u32,
    /// For how long units are reserved for other clients, unless a later response confirms them.
    /// Default of [`UpstreamRemaining::new`]: 60 s.
    pub valid_for: Duration,
    /// Whether earlier responses were about another limit. If so, the units that were reserved
    /// because of them are forgotten.
    pub forget: bool,
    /// Whether the store notifies other processes at once if less is left than it knew. The
    /// upstream would refuse permits that they have prefetched or booked. A store without other
    /// processes ignores this field.
    pub urgent: bool,
}

impl UpstreamRemaining {
    /// Makes a statement of this moment that `units` of `limit` are left. It states no reset.
    pub fn new(limit: Limit, units: u64) -> Self {
        UpstreamRemaining {
            limit,
            units,
            reset_in: None,
            steady: false,
            ago: Duration::ZERO,
            refused: 0,
            valid_for: Duration::from_secs(60),
            forget: false,
            urgent: false,
        }
    }
}
