//! How the part of a class lends to other classes what its class leaves unused.
//!
//! A quota may be divided into parts, one for each class of requests (`Division` in
//! `quota/division.rs`). Each part is a key of its own. The requests of its class *own* the part. Other
//! classes *borrow* from it under three conditions:
//!
//! - The slot is at most [`horizon`](Lending::horizon) ahead. So no borrower books far ahead.
//! - The slot is not before the part's *pace* ([`Lending::pace`]) allows one unit: a bucket with the
//!   rate of the part, in which the permits of everybody count. So the use of the part stays even, and an
//!   owner that comes back soon finds free units, however long the part was idle.
//! - Some units of each limit stay free ([`Lending::kept`]).
//!
//! The pace never delays an owner: it only tells whether there is something to lend.

use std::sync::Arc;
use std::time::Duration;

use crate::quota::{Limit, Quota};

/// How far ahead a part lends at least.
const SHORTEST_HORIZON: Duration = Duration::from_millis(50);

/// How the part of a class lends to other classes. [`LimitSpec::lending`](super::LimitSpec::lending)
/// returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lending(Arc<Terms>);

#[derive(Debug, PartialEq, Eq)]
struct Terms {
    pace: Limit,
    percent: u8,
    horizon: Duration,
    /// The limits of the part, and then the pace.
    limits: Box<[Limit]>,
}

impl Lending {
    /// Makes the terms on which the part `quota` lends `percent` of each limit. A used unit counts for
    /// `margin` longer than the window. Returns `None` if the part has no limit of a rate.
    pub(super) fn new(quota: &Quota, percent: u8, margin: Duration) -> Option<Self> {
        let limits = quota.limits();
        let (units, span) = limits
            .iter()
            .map(|limit| match *limit {
                Limit::Bucket { count, window, .. } => (count, window),
                _ => (limit.count(), limit.window() + margin),
            })
            .max_by(|(units, span), (other_units, other_span)| {
                let product = |span: &Duration, units: &u32| span.as_nanos() * u128::from(*units);
                product(span, other_units).cmp(&product(other_span, units))
            })?;
        let tau = span / units.max(1);
        let horizon = SHORTEST_HORIZON.max(tau * 2);
        let ahead = horizon.as_nanos() * u128::from(units) / span.as_nanos().max(1);
        let capacity = u32::try_from(ahead).unwrap_or(Quota::LARGEST_COUNT - 1) + 1;
        let pace = |capacity: u32| Limit::Bucket {
            capacity,
            count: units,
            window: span,
        };
        let capacities = (1..=capacity.min(Quota::LARGEST_COUNT)).rev();
        // The pace limits no owner, so it is none of the limits.
        let pace = capacities.map(pace).find(|pace| !limits.contains(pace))?;
        Some(Lending(Arc::new(Terms {
            pace,
            percent: percent.min(100),
            horizon,
            limits: limits.iter().copied().chain([pace]).collect(),
        })))
    }

    /// Returns the pace of the part: a bucket in which all permits of the part count, and of which a
    /// borrower needs one unit, whatever its permit costs. It does not limit the owner.
    pub fn pace(&self) -> Limit {
        self.0.pace
    }

    /// Returns how far ahead the part lends at most.
    pub fn horizon(&self) -> Duration {
        self.0.horizon
    }

    /// Returns the percentage of each limit that borrowers may use, from 0 to 100.
    pub fn percent(&self) -> u8 {
        self.0.percent
    }

    /// Returns how many units of `limit` stay free when somebody borrows.
    pub fn kept(&self, limit: Limit) -> u32 {
        let most = u64::from(limit.largest_cost());
        let lent = most * u64::from(self.0.percent) / 100;
        u32::try_from(most - lent).unwrap_or(u32::MAX)
    }

    /// Returns the limits of the part, and then its pace.
    pub(super) fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// Returns the quota without its last limit, if that is the pace of the others.
    pub(crate) fn without_pace(quota: Quota) -> Quota {
        let [others @ .., last] = quota.limits() else {
            return quota;
        };
        let is_pace = matches!(last, Limit::Bucket { count, window, .. } if others.iter().any(|other| {
            other.count() == *count && (other.window()..=other.window() * 2 + LONGEST_MARGIN).contains(window)
        }));
        let without =
            is_pace.then(|| Quota::of_limits(others.iter().copied(), quota.most_in_flight()));
        without.flatten().unwrap_or(quota)
    }
}

/// The longest margin that a pace is recognised with.
const LONGEST_MARGIN: Duration = Duration::from_secs(60);
