//! Settled requests: permits that are booked for an estimate, and of which the rest comes back when the response
//! states the true cost.

use std::collections::VecDeque;

use super::*;

const ESTIMATE: u32 = 40;

/// A request that was sent and has no response yet.
struct Pending {
    answered_at: Micros,
    slot: Micros,
    stamp: Micros,
    cost: u64,
}

/// Returns the units that were used in `seconds` if a request waits whenever `asks` says so at that second. The true
/// cost of request `n` is `cost(n)`. Checks what arrives at the upstream.
fn used_in(
    seconds: u64,
    quota: Quota,
    response_time: Micros,
    cost: impl Fn(u64) -> u64,
    asks: impl Fn(u64) -> bool,
) -> u64 {
    let mut world = World::new(quota);
    let mut pending = VecDeque::<Pending>::new();
    let (mut number, mut is_over) = (0, false);
    while world.now < START + seconds * 1_000_000 {
        world.now += 5_000;
        world.ledger.advance(&world.spec, world.now);
        while pending
            .front()
            .is_some_and(|request| request.answered_at <= world.now)
            && let Some(request) = pending.pop_front()
        {
            let units = request.cost.abs_diff(u64::from(ESTIMATE));
            if request.cost < u64::from(ESTIMATE) {
                let (slot, stamp) = (request.slot, request.stamp);
                world
                    .ledger
                    .take_back(UnusedPermits::new(slot, stamp, units, 0));
            } else if units > 0 {
                // The upstream accepted more than the ledger knew, so its bucket may be over.
                is_over = true;
                let age = Duration::from_micros(world.now - request.slot);
                world.ledger.charge(&world.spec, Charge::new(age, units));
            }
        }
        if !asks((world.now - START) / 1_000_000) {
            continue;
        }
        for grant in world.book(ESTIMATE, 1, 0, 10_000).0 {
            let cost = cost(number);
            number += 1;
            world.arrivals.push((grant.slot, cost));
            pending.push_back(Pending {
                answered_at: grant.slot + response_time,
                slot: grant.slot,
                stamp: grant.stamp,
                cost,
            });
        }
    }
    if !is_over {
        assert_eq!(broken(&quota, &world.arrivals), None);
    }
    world.arrivals.iter().map(|(_, units)| units).sum()
}

/// Most of a bucket is used, although its requests cost a quarter of their estimate, and the answers take
/// long.
#[test]
fn settled_requests_use_most_of_a_bucket() {
    let quota = Quota::bucket(1000).refill(50, millis(1000));
    let exact = |_| 10;
    let spread = |number| 5 + number * 7 % 36;
    let with_charges = |number| {
        if number % 20 == 0 {
            41
        } else {
            5 + number * 7 % 11
        }
    };
    for (response_time, least) in [(400_000, 97), (2_000_000, 95), (5_000_000, 90)] {
        let used = [
            used_in(400, quota, response_time, exact, |_| true),
            used_in(400, quota, response_time, spread, |_| true),
            used_in(400, quota, response_time, with_charges, |_| true),
        ];
        let allowed = 1000 + 50 * 400;
        assert!(
            used.iter().all(|used| used * 100 >= allowed * least),
            "{used:?} after {response_time} us"
        );
    }
}

/// The same if they come in bursts.
#[test]
fn settled_bursts_use_most_of_a_bucket() {
    let quota = Quota::bucket(1000).refill(50, millis(1000));
    let used = used_in(400, quota, 2_000_000, |_| 10, |second| second % 20 < 10);
    assert!(used * 100 >= 400 * 50 * 90, "{used}");
}
