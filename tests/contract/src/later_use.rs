//! The laws of permits that are of use later: [`Demand::earliest`].
//!
//! A store may ignore it and grant an earlier slot. Then only the first law says something about
//! the store.

use std::sync::Arc;
use std::time::Duration;

use super::caller::{Arrivals, Caller, LONG, granted, pass, slots, unused};
use tollgate::Quota;
use tollgate::store::{Demand, Lease, Store};

/// Books `count` permits that are of use after `earliest`. Returns `None` if the store granted an
/// earlier slot.
async fn book_later(caller: &Caller, count: u32, earliest: Duration) -> Option<Lease> {
    let demands = [Demand::new(1, count).earliest(earliest)];
    let lease = caller.lease(&demands, 0, LONG, &[]).await;
    assert_eq!(granted(&lease), count, "the slots are not later than asked");
    let is_kept = lease.grants.iter().all(|grant| grant.wait >= earliest);
    is_kept.then_some(lease)
}

/// Books for now and for later in turns, uses each permit at its first or last moment, and counts
/// every window.
pub(super) async fn is_never_over_with_later_use(store: &Arc<dyn Store>) {
    const COUNT: u64 = 6;
    const WINDOW: u64 = 200_000;
    let caller = Caller::new(store, "later", Quota::new(6, Duration::from_micros(WINDOW)));
    let mut arrivals = Arrivals::default();
    for round in 0u32..60 {
        let earliest = Duration::from_millis([0, 300, 1900, 0, 700, 60][round as usize % 6]);
        let demands = [Demand::new(1 + round % 3, 1 + round % 4).earliest(earliest)];
        let lease = caller.lease(&demands, 0, LONG, &[]).await;
        arrivals.add(&lease, round);
        if round % 7 == 0 {
            pass(Duration::from_millis(60)).await;
        }
    }
    arrivals.assert_never_over(COUNT, WINDOW);
}

/// A request that waits long for another key takes nothing of the time before.
pub(super) async fn is_not_blocked_by_later_use(store: &Arc<dyn Store>) {
    let window = Duration::from_secs(10);
    for (law, quota) in [
        ("later in a window", Quota::new(5, window)),
        ("later in a bucket", Quota::bucket(5).refill(5, window)),
        (
            "later in two windows",
            Quota::new(5, window).and(Quota::fixed(100, window)),
        ),
    ] {
        let caller = Caller::new(store, law, quota);
        if book_later(&caller, 5, window * 10).await.is_none() {
            return;
        }
        let usage = caller.peek().await;
        assert_eq!(usage.limits[0].used, 5, "booked units count: {usage:?}");
        assert_eq!(usage.free, 5, "all are free now: {usage:?}");
        let lease = caller.book(1, 5, window).await;
        assert_eq!(granted(&lease), 5, "all are granted now: {lease:?}");
    }
}

/// A permit of later use that comes back leaves no trace.
pub(super) async fn erases_later_use_that_is_returned(store: &Arc<dyn Store>) {
    let window = Duration::from_secs(1);
    let caller = Caller::new(store, "erased", Quota::new(4, window));
    let (earliest, earlier) = (window * 10, window * 10 - window / 2);
    let Some(lease) = book_later(&caller, 4, earliest).await else {
        return;
    };
    let later = book_later(&caller, 1, earlier)
        .await
        .map(|lease| slots(&lease)[0]);
    assert!(
        later > Some(slots(&lease)[0]),
        "the window is full: {later:?}"
    );
    // A part of it, and then the rest.
    for (count, free) in [(1, 1), (3, 3)] {
        let returned = [unused(&lease, &lease.grants[0], count)];
        caller.store.give_back(caller.key, &caller.spec, &returned);
        pass(Duration::from_millis(20)).await; // a store may take its time with a give-back
        let again = book_later(&caller, free, earlier).await;
        let again = again.map(|lease| slots(&lease));
        assert!(
            again.iter().flatten().all(|slot| *slot < slots(&lease)[0]),
            "the units are free again: {again:?}"
        );
    }
}
