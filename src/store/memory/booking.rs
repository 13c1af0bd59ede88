//! Translates a request to a store into calls of a [`Ledger`], and the results of the ledger into a
//! [`Lease`].

use std::time::Duration;

use crate::clock;
use crate::limit::{
    Booking, Charge, Ledger, LimitSpec, Micros, Order, StoredHold, micros_down, micros_up,
};
use crate::store::{
    Grant, HoldState, Lease, LeaseRequest, LimitUsage, PeekRequest, Refusal, Usage,
};

/// Books a request in a ledger at `now`.
///
/// Twin: `store/redis/lua/main.lua`.
pub(in crate::store) fn book(
    ledger: &mut Ledger,
    now: Micros,
    request: &LeaseRequest<'_>,
) -> Lease {
    ledger.renew_quota();
    let held = held(ledger.hold(hold(request.hold, now)), now);
    for unused in request.returns {
        ledger.take_back(*unused);
    }
    for charge in request.charges.iter().take(Charge::MOST) {
        ledger.charge(request.spec, *charge);
    }
    // The ledger compares what is left with its log. So this follows the returns and the charges.
    if let Some(remaining) = &request.remaining {
        ledger.see(request.spec, remaining);
    }
    let latest = now.saturating_add(micros_down(request.latest));
    let life = micros_up(request.validity);
    let mut lease = Lease {
        now,
        hold: held,
        ..Lease::default()
    };
    let is_outdated = ledger.is_outdated(request.spec);
    if is_outdated && !request.demands.is_empty() {
        lease.recovering = Some(Duration::ZERO);
    }
    for demand in request.demands.iter().filter(|_| !is_outdated) {
        let order = Order {
            cost: demand.cost,
            count: demand.count,
            earliest: now.saturating_add(micros_up(demand.earliest)),
            latest,
            life,
            borrows: request.borrows,
        };
        let booked = ledger.book(request.spec, order, |booking| {
            lease.grants.push(grant_of(booking, demand.cost, now));
        });
        if let Err(late) = booked {
            let wait = (late.slot < Micros::MAX).then(|| span(now, late.slot));
            lease.refused = Some(Refusal {
                wait,
                limit: late.limit,
            });
            break;
        }
    }
    lease.external_usage = ledger.is_shared();
    lease.foreign = ledger.foreign(request.spec);
    let is_decided = lease.refused.is_none() && !is_outdated;
    if is_decided && request.prefetch > 0 {
        let booking = ledger.prefetch(
            request.spec,
            request.prefetch,
            micros_up(request.prefetch_validity),
        );
        lease.prefetched = booking.map(|booking| grant_of(booking, 1, now));
    }
    lease.free = if is_decided { ledger.free() } else { 0 };
    let set_quota = ledger.quota_unless(request.spec.quota_version());
    lease.set_quota = set_quota.map(Box::new);
    lease
}

/// Returns the grant of what a ledger booked.
fn grant_of(booking: Booking, cost: u32, now: Micros) -> Grant {
    let Booking {
        slot,
        life,
        stamp,
        count,
    } = booking;
    Grant {
        cost,
        count,
        wait: span(now, slot),
        validity: Duration::from_micros(life),
        slot,
        stamp,
    }
}

/// Returns how long after `now` a slot is.
fn span(now: Micros, slot: Micros) -> Duration {
    Duration::from_micros(slot.saturating_sub(now))
}

/// Returns the usage of a ledger at `now`, as a caller with the limits of `spec` sees it. Books
/// nothing.
///
/// Twin: `PEEK` in `store/redis/lua/main.lua`.
pub(in crate::store) fn usage(
    ledger: &mut Ledger,
    spec: &LimitSpec,
    request: &PeekRequest,
    now: Micros,
) -> Usage {
    let usage = ledger.usage();
    let mut limits: Vec<LimitUsage> = usage
        .map(|(limit, used, free, reserved)| LimitUsage {
            reserved,
            ..LimitUsage::new(limit, used, free)
        })
        .collect();
    let hold = held(ledger.hold(StoredHold::default()), now);
    let free = ledger.free();
    let life = micros_up(request.validity);
    let mut later;
    let ledger = if request.ahead.is_empty() {
        ledger
    } else {
        later = ledger.clone();
        for demand in &request.ahead {
            let order = Order {
                cost: demand.cost,
                count: demand.count,
                earliest: now,
                latest: Micros::MAX - 1,
                life,
                borrows: false,
            };
            // A permit that no limit ever allows delays no other permit.
            let _ = later.book(spec, order, |_| ());
        }
        &mut later
    };
    let slots = ledger.first_slots(spec, request.cost, life);
    for (limit, slot) in limits.iter_mut().zip(slots) {
        limit.wait = span_or_never(now, slot);
    }
    Usage {
        limits,
        free,
        next_slot: span_or_never(now, ledger.next_slot(spec, request.cost, life)),
        hold,
        recovering: Duration::ZERO,
        set_quota: ledger.quota_unless(0).map(Box::new),
        degraded: false,
    }
}

/// Returns how long after `now` a slot is, or [`Duration::MAX`] if there is none.
fn span_or_never(now: Micros, slot: Micros) -> Duration {
    if slot < Micros::MAX {
        span(now, slot)
    } else {
        Duration::MAX
    }
}

/// Returns a hold in the time of a ledger.
pub(in crate::store) fn hold(state: HoldState, now: Micros) -> StoredHold {
    let HoldState {
        remaining,
        releases,
        cut,
    } = state;
    let none = StoredHold {
        cut,
        releases,
        ..StoredHold::default()
    };
    if remaining.is_zero() {
        return none;
    }
    StoredHold {
        until: now.saturating_add(micros_up(remaining)),
        slept: micros_down(clock::slept()),
        ..none
    }
}

/// Returns a hold of a ledger, counted from `now`.
pub(super) fn held(hold: StoredHold, now: Micros) -> HoldState {
    let remaining = span(now, hold.until);
    HoldState {
        remaining,
        releases: hold.releases,
        cut: !remaining.is_zero() && hold.cut,
    }
}
