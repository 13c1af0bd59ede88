//! The permits of the store that a process with a share has planned: they count in its own ledger
//! too.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::limit::{Micros, UnusedPermits};
use crate::store::{Grant, Source};

/// The most entries that are kept. Permits of older entries stay counted in the share if they come
/// back.
const MOST_PLANNED: usize = 400;

/// The planned permits, the last ones last.
#[derive(Default)]
pub(super) struct PlannedPermits(VecDeque<Planned>);

/// Permits that the store granted, and the same number in the ledger of the process.
struct Planned {
    /// The slot and the stamp of the store.
    slot: Micros,
    stamp: Micros,
    of_share: UnusedPermits,
}

/// What the ledger of the process takes back.
pub(super) type OfShare = SmallVec<[UnusedPermits; 2]>;

impl PlannedPermits {
    /// Adds what the store granted of a plan. Returns the rest of the plan.
    pub(super) fn add(&mut self, plan: &[Grant], granted: &[Grant]) -> OfShare {
        let mut granted: VecDeque<Grant> = granted.iter().copied().collect();
        let mut rest = OfShare::new();
        for planned in plan {
            let mut left = planned.count;
            while left > 0 {
                let count = granted.front().map_or(left, |grant| grant.count.min(left));
                left -= count;
                let of_share = UnusedPermits {
                    slot: planned.slot,
                    stamp: planned.stamp,
                    units: u64::from(planned.cost) * u64::from(count),
                    incarnation: Source::STANDALONE_INCARNATION,
                };
                let Some(grant) = granted.front_mut() else {
                    rest.push(of_share);
                    continue;
                };
                self.0.push_back(Planned {
                    slot: grant.slot,
                    stamp: grant.stamp,
                    of_share,
                });
                grant.count -= count;
                if grant.count == 0 {
                    granted.pop_front();
                }
            }
        }
        let surplus = self.0.len().saturating_sub(MOST_PLANNED);
        self.0.drain(..surplus);
        rest
    }

    /// Removes what the share counts for unused permits of the store, and returns it.
    pub(super) fn take(&mut self, unused: &UnusedPermits) -> OfShare {
        let (mut left, mut taken) = (unused.units, OfShare::new());
        for planned in &mut self.0 {
            let of_share = &mut planned.of_share;
            let units = of_share.units.min(left);
            if (planned.slot, planned.stamp) == (unused.slot, unused.stamp) && units > 0 {
                taken.push(UnusedPermits { units, ..*of_share });
                of_share.units -= units;
                left -= units;
            }
        }
        self.0.retain(|planned| planned.of_share.units > 0);
        taken
    }
}
