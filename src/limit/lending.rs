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
//!
//! # What an owner waits at most
//!
//! A part has `G` units in a span `S`: its window, the life of a permit and the transit slack. `tau` is
//! `S / G`, and `H` the horizon. Of the owner's requests, each with a cost `c` of at most `c_own`, number
//! `k` would end at `F(k) = max(arrival(k), F(k - 1)) + c tau'` in a server of its own, with
//! `tau' = S / (G + 1 - c_own)`. The largest cost of a borrower is `c_lent`.
//!
//! > *Latency-rate law.* Request `k` of the owner has a slot by `F(k) + 2 H + c_lent tau`, whatever others
//! > have borrowed.
//!
//! *Why, for a sliding window.* Let `T` be the moment at which the pace is full again, less the life and the
//! slack. A booking at `slot` moves it to `max(T, slot) + c tau`. So before each booking, all units with slots
//! later than any `x` are at most `(T - x) / tau` (1). The last borrower before `k` was admitted at a time `b`,
//! so its slot was at most `b + H`, and `T` at most `H` later than that. It left `T` at most at
//! `b + 2 H + c_lent tau` (2). All later bookings are the owner's.
//!
//! If request `k` does not leave when it arrives, its slot is `s + S`, where `s` is a slot whose units it waits
//! for. The units with slots from `s` on, and its own, are more than `G`. Take the first of these that was
//! booked.
//!
//! - If the owner booked it after `b`, as request `i`: the units booked after it, up to `k`, are at least
//!   `G + 1 - c_own`. So `F(k) >= F(i) + S`, and the law for `i` gives that for `k`.
//! - Otherwise let `Q` be the owner's units booked after `b`, up to `k`. By (1), the others are at most
//!   `(T - s) / tau` with the `T` of (2). Together they are at least `G + 1`, so the slot `s + S` is before
//!   `T + Q tau`. These requests have arrived after `b`, so `F(k) >= b + Q tau`, and with (2) the law holds.
//!
//! Of several limits, `tau` is the longest, and so is `tau'`. Three things add to the bound:
//!
//! - A sliding window keeps units in chunks of a hundredth of the limit (`window.rs`), and each chunk leaves
//!   at once. For a chunk of `n` units, `tau'` is `S / (G + 2 - c_own - n)` and the bound is `(n - 1) tau` later. That
//!   is a hundredth of the window at most: 36 s of an hour. A counterexample without it: 1483 units per
//!   minute, and bursts of 151 at half of the rate.
//! - No request leaves around the boundary of a fixed window, so the bound is as much later.
//! - A bucket whose capacity is hardly more than a cost gives the units of the margin as well before each such
//!   request: `tau'` is so much longer.
//!
//! `limit/properties/lending.rs` checks the law, with `c_own tau` besides for mixed limits.

use std::sync::Arc;
use std::time::Duration;

use crate::quota::{Limit, Quota, percent_of};

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
                let (one, other) = (span.as_nanos(), other_span.as_nanos());
                (one * u128::from(*other_units)).cmp(&(other * u128::from(*units)))
            })?;
        let tau = span / units.max(1);
        let horizon = SHORTEST_HORIZON.max(tau * 2);
        let ahead = horizon.as_nanos() * u128::from(units) / span.as_nanos().max(1);
        let capacity = u32::try_from(ahead).unwrap_or(Quota::LARGEST_COUNT - 1) + 1;
        // The pace limits no owner, so it is none of the limits.
        let pace = (1..=capacity.min(Quota::LARGEST_COUNT))
            .rev()
            .map(|capacity| Limit::Bucket {
                capacity,
                count: units,
                window: span,
            })
            .find(|pace| !limits.contains(pace))?;
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
        kept(limit, self.0.percent)
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

/// Returns how many units of `limit` stay free if borrowers may use `percent` of it.
pub(super) fn kept(limit: Limit, percent: u8) -> u32 {
    let most = limit.largest_cost();
    most.saturating_sub(percent_of(most, percent))
}

/// The longest margin that a pace is recognised with.
const LONGEST_MARGIN: Duration = Duration::from_secs(60);
