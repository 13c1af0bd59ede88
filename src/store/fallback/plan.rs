//! What a process that is back may request of the store: what it would have granted itself.

use std::collections::VecDeque;
use std::time::Duration;

use smallvec::SmallVec;

use crate::store::{Demand, Grant, Grants, Lease};

/// Returns what a lease grants of `demands`, in their order.
pub(super) fn granted_demands(demands: &[Demand], lease: &Lease) -> SmallVec<[Demand; 2]> {
    let mut grants = lease.grants.iter().peekable();
    let mut granted: SmallVec<[Demand; 2]> = SmallVec::new();
    for demand in demands {
        let mut count = 0;
        while let Some(grant) =
            grants.next_if(|grant| grant.cost == demand.cost && count < demand.count)
        {
            count += grant.count;
        }
        if count > 0 {
            granted.push(Demand { count, ..*demand });
        }
    }
    granted
}

/// Returns the grants of the store, none with an earlier slot than in the plan. The plan is what
/// the process would have granted itself.
pub(super) fn no_earlier(granted: &[Grant], plan: &[Grant]) -> Grants {
    let mut planned: VecDeque<Grant> = plan.iter().copied().collect();
    let mut grants = Grants::default();
    for &grant in granted {
        let mut left = grant.count;
        while left > 0 {
            let (count, from) = match planned.front_mut() {
                Some(first) if first.count > left => {
                    first.count -= left;
                    (left, first.wait)
                }
                Some(_) => planned
                    .pop_front()
                    .map_or((left, Duration::ZERO), |first| (first.count, first.wait)),
                None => (left, Duration::ZERO),
            };
            left -= count;
            let until = grant.wait.saturating_add(grant.validity);
            let wait = grant.wait.max(from);
            grants.push(Grant {
                count,
                wait,
                validity: until.saturating_sub(wait),
                ..grant
            });
        }
    }
    grants
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granted_demands_keep_their_earliest_use() {
        let later = Duration::from_secs(5);
        let demands = [
            Demand::new(9, 1),
            Demand::new(1, 3).earliest(later),
            Demand::new(1, 2),
            Demand::new(2, 2),
        ];
        let mut plan = Lease::default();
        // The share does not allow a cost of 9. Of the last demand, one permit is granted.
        for (cost, count) in [(1, 2), (1, 1), (1, 2), (2, 1)] {
            let grant = Grant::new(cost, count, Duration::ZERO, Duration::ZERO);
            plan.grants.push(grant);
        }
        let granted = [
            Demand::new(1, 3).earliest(later),
            Demand::new(1, 2),
            Demand::new(2, 1),
        ];
        assert_eq!(granted_demands(&demands, &plan).to_vec(), granted);
    }
}
