//! Permits that are fetched in advance, so that the next requests need no call to the store.
//!
//! Each call to the store decides how many permits it fetches. If more than half of the last ones
//! are left, it fetches half as many. Otherwise it fetches twice as many, if half of the validity
//! of the last ones has not passed.

use std::mem;
use std::time::{Duration, Instant};

use super::reservation::{CountedAs, Reservation};
use crate::clock::{self, Moment};
use crate::limit::{LimitSpec, UnusedPermits};

/// The prefetched permits of a key: units of one slot, which is due.
#[derive(Default)]
pub(super) struct Prefetched {
    /// If the store is called again before this moment, in microseconds of [`clock::micros`], the permits
    /// were used fast.
    soon: u64,
    /// The units, and how many to fetch next. `None` if the key was never used fast. Most of many keys are
    /// not.
    details: Option<Box<Details>>,
}

/// Prefetched units, and how many to fetch next.
struct Details {
    /// When the units expire.
    until: Instant,
    /// The units left that are not [offered](Prefetched::offer).
    units: u32,
    /// The units of the offer beside the key in the table. Zero during a visit.
    offered: u32,
    /// How many units there were at first.
    fetched: u32,
    /// How many units to fetch next time.
    next: u32,
    /// Slot, stamp (both in the store's time) and incarnation, for permits that are given back.
    slot: u64,
    stamp: u64,
    incarnation: u64,
    /// Whether the permits are given back when they expire, although no request comes.
    is_swept: bool,
}

impl Details {
    /// Makes the details of no units.
    fn new(now: Instant) -> Box<Self> {
        Box::new(Details {
            until: now,
            units: 0,
            offered: 0,
            fetched: 0,
            next: 0,
            slot: 0,
            stamp: 0,
            incarnation: 0,
            is_swept: false,
        })
    }

    /// Returns `units` of these, as permits that were taken at `now`.
    fn reservation(&self, cost: u32, count: u32, now: Instant) -> Reservation {
        Reservation {
            at: now,
            until: self.until,
            cost,
            count,
            slot: self.slot,
            stamp: self.stamp,
            incarnation: self.incarnation,
            lender: None,
            probe: None,
            is_at_once: true,
        }
    }
}

/// Permits at hand that requests take without a visit of the state of their key, but under its lock.
///
/// They stand beside the key in the table. A request of a layer reads no more of its key, unless it has a
/// quota of its own: a process with many keys waits for memory most of the time.
pub(super) struct Offer {
    /// When the units expire, or the last ones expired. Before there are any: when the state was made.
    until: Moment,
    /// The units left.
    units: u32,
    /// The requests that have taken some.
    requests: u32,
}

impl Offer {
    /// Makes an offer of nothing.
    pub(super) fn none(now: Moment) -> Self {
        Offer {
            until: now,
            units: 0,
            requests: 0,
        }
    }

    /// Returns when the units expire, or did.
    pub(super) fn until(&self) -> Moment {
        self.until
    }

    /// Takes the units of a request. Counts the request, if it is to be counted. Returns whether there
    /// were enough.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, counting: CountedAs, now: Moment) -> bool {
        let enough = cost <= self.units && now < self.until;
        if enough {
            self.units -= cost;
            self.requests += u32::from(counting == CountedAs::Request);
        }
        enough
    }
}

impl Prefetched {
    /// Offers the permits, if requests `may` take them.
    #[inline]
    pub(super) fn offer(&mut self, offer: &mut Offer, may: bool) {
        if let Some(details) = &mut self.details {
            offer.until = Moment::of(details.until);
            if may {
                offer.units = mem::take(&mut details.units);
                details.offered = offer.units;
            }
        }
    }

    /// Takes an offer back. Returns the requests and units that were taken.
    #[inline]
    pub(super) fn collect(&mut self, offer: &mut Offer) -> (u32, u32) {
        let Some(details) = &mut self.details else {
            return (0, 0);
        };
        let left = mem::take(&mut offer.units);
        let taken = mem::take(&mut details.offered) - left;
        details.units += left;
        (mem::take(&mut offer.requests), taken)
    }

    /// Returns when the permits expire, or did. `None` if there never were any.
    pub(super) fn until(&self) -> Option<Instant> {
        self.details.as_ref().map(|details| details.until)
    }

    /// Returns until when it matters how fast permits are used.
    pub(super) fn soon(&self) -> Instant {
        clock::instant(self.soon)
    }

    /// Returns the units left.
    pub(super) fn units(&self, now: Instant) -> u32 {
        let details = self.details.as_ref();
        details
            .filter(|details| now < details.until)
            .map_or(0, |details| details.units)
    }

    /// Returns the units that the next call gives back, also if they have expired.
    pub(super) fn to_return(&self) -> u64 {
        let details = self.details.as_ref();
        details.map_or(0, |details| u64::from(details.units))
    }

    /// Takes a permit.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Reservation> {
        let details = self.details.as_mut()?;
        if cost > details.units || now >= details.until {
            return None;
        }
        details.units -= cost;
        Some(details.reservation(cost, 1, now))
    }

    /// Returns a permit that was taken at `now`.
    #[inline]
    pub(super) fn reservation(&self, cost: u32, now: Instant) -> Option<Reservation> {
        let details = self.details.as_ref()?;
        Some(details.reservation(cost, 1, now))
    }

    /// Takes up to `most` permits.
    pub(super) fn take_many(
        &mut self,
        cost: u32,
        most: usize,
        now: Instant,
    ) -> Option<Reservation> {
        let details = self.details.as_mut()?;
        if now >= details.until || cost == 0 {
            return None;
        }
        let count = (details.units / cost).min(u32::try_from(most).unwrap_or(u32::MAX));
        details.units -= count * cost;
        (count > 0).then(|| details.reservation(cost, count, now))
    }

    /// Takes out up to `most` units, whether or not they have expired.
    pub(super) fn take_units(&mut self, most: u32) -> Option<Reservation> {
        let details = self.details.as_mut()?;
        let units = details.units.min(most);
        details.units -= units;
        (units > 0).then(|| details.reservation(1, units, details.until))
    }

    /// Puts back units that [`take_units`](Self::take_units) took out.
    pub(super) fn put_units(&mut self, units: u32) {
        if let Some(details) = &mut self.details {
            details.units += units;
        }
    }

    /// Takes back a permit. Returns false if it is not one of these, or has expired.
    pub(super) fn put(&mut self, slot: &Reservation, now: Instant) -> bool {
        let details = self.details.as_mut();
        let same = details.filter(|details| {
            (details.slot, details.stamp) == (slot.slot, slot.stamp) && now < details.until
        });
        let Some(details) = same else { return false };
        details.units = details.units.saturating_add(slot.cost);
        true
    }

    /// Replaces the permits by those of `slot`.
    pub(super) fn fill(&mut self, slot: &Reservation) {
        let units = slot.cost.saturating_mul(slot.count);
        let details = self.details.get_or_insert_with(|| Details::new(slot.until));
        details.until = slot.until;
        details.units = units;
        details.fetched = units;
        details.slot = slot.slot;
        details.stamp = slot.stamp;
        details.incarnation = slot.incarnation;
    }

    /// Takes out what is left, to give it back.
    pub(super) fn clear(&mut self) -> Option<UnusedPermits> {
        let details = self.details.as_deref_mut()?;
        let left = UnusedPermits {
            slot: details.slot,
            stamp: details.stamp,
            units: u64::from(mem::take(&mut details.units)),
            incarnation: details.incarnation,
        };
        details.fetched = 0;
        (left.units > 0).then_some(left)
    }

    /// Has the permits given back when they expire, from now on.
    pub(super) fn sweep(&mut self) {
        if let Some(details) = &mut self.details {
            details.is_swept = true;
        }
    }

    /// Returns when the permits that are left expire, or did, if they are to be given back then.
    pub(super) fn sweeps_at(&self) -> Option<Instant> {
        let details = self.details.as_ref()?;
        (details.units > 0 && details.is_swept).then_some(details.until)
    }

    /// Returns how many units to fetch with the next call, for permits that are valid for `life`.
    pub(super) fn order(&mut self, spec: &LimitSpec, life: Duration, now: Instant) -> u32 {
        let most = most_ahead(spec);
        let is_fast = clock::micros(now) < self.soon;
        self.soon = clock::micros(clock::after(now, life / 2));
        let wanted = match self.details.as_deref() {
            Some(details) if details.units > details.fetched / 2 => details.next / 2,
            Some(details) if is_fast => details.next.saturating_mul(2).max(1),
            Some(details) => details.next,
            None => u32::from(is_fast),
        };
        let next = wanted.min(most);
        if next > 0 || self.details.is_some() {
            self.details.get_or_insert_with(|| Details::new(now)).next = next;
        }
        next
    }
}

/// Returns the most units to fetch: a fiftieth of the smallest limit.
fn most_ahead(spec: &LimitSpec) -> u32 {
    let limits = spec.quota().limits().iter();
    limits
        .map(|limit| limit.count().min(limit.largest_cost()) / 50)
        .min()
        .unwrap_or(0)
}
