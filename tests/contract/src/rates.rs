//! The laws of rates.

use std::sync::Arc;
use std::time::Duration;

use super::caller::{Arrivals, Caller, LIFE, LONG, MARGIN, granted, pass, slots, unused};
use tollgate::quota::{Limit, Quota};
use tollgate::store::{Charge, Demand, Refusal, Store, UnusedPermits, UpstreamRemaining};

pub(super) async fn grants_at_once_what_is_free(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "free", Quota::per_minute(20));
    let lease = caller.book(1, 20, Duration::ZERO).await;
    assert_eq!(
        granted(&lease),
        20,
        "all of a fresh quota is free: {lease:?}"
    );
    assert!(lease.refused.is_none(), "{lease:?}");
    assert!(
        lease
            .grants
            .iter()
            .all(|grant| grant.wait.is_zero() && grant.validity >= LIFE),
        "{lease:?}"
    );
}

/// Asks in many ways, uses each permit at its first or last moment, and counts every window.
pub(super) async fn is_never_over(store: &Arc<dyn Store>) {
    const COUNT: u64 = 12;
    const WINDOW: u64 = 200_000;
    let caller = Caller::new(store, "over", Quota::new(12, Duration::from_micros(WINDOW)));
    let mut arrivals = Arrivals::default();
    for round in 0u32..60 {
        let latest = Duration::from_millis([0, 30, 150, 700][round as usize % 4]);
        let cost = 1 + round % 3;
        let lease = caller.book(cost, 1 + round % 5, latest).await;
        for grant in lease.grants.iter() {
            let wait = u64::try_from(grant.wait.as_micros()).unwrap_or(u64::MAX);
            assert!(
                Duration::from_micros(wait) <= latest,
                "no slot is later than asked: {lease:?}"
            );
        }
        arrivals.add(&lease, round);
        if round % 7 == 0 {
            pass(Duration::from_millis(60)).await;
        }
    }
    let used = arrivals.assert_never_over(COUNT, WINDOW);
    assert!(
        used > 20,
        "a store that grants nothing is not over, but it is no store"
    );
}

pub(super) async fn counts_a_cost_whole(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "cost", Quota::per_minute(10));
    assert_eq!(granted(&caller.book(8, 1, Duration::ZERO).await), 1);
    assert_eq!(
        granted(&caller.book(3, 1, Duration::ZERO).await),
        0,
        "8 and 3 are more than 10"
    );
    assert_eq!(granted(&caller.book(2, 1, Duration::ZERO).await), 1);
    assert_eq!(
        granted(&caller.book(1, 1, Duration::ZERO).await),
        0,
        "a small one counts after a big one"
    );
}

pub(super) async fn takes_all_limits_or_none(store: &Arc<dyn Store>) {
    let quota = Quota::new(5, Duration::from_secs(60)).and(Quota::new(7, Duration::from_secs(600)));
    let caller = Caller::new(store, "all or none", quota);
    let lease = caller.book(1, 9, Duration::ZERO).await;
    assert_eq!(granted(&lease), 5, "the first limit allows five: {lease:?}");
    assert_eq!(
        lease.refused.and_then(|refusal| refusal.limit),
        Some(quota.limits()[0]),
        "{lease:?}"
    );
    let used: Vec<u64> = caller
        .peek()
        .await
        .limits
        .iter()
        .map(|limit| limit.used)
        .collect();
    assert_eq!(
        used,
        [5, 5],
        "units that one limit refused are counted in no limit"
    );
}

pub(super) async fn refuses_without_a_trace_and_says_when(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "trace", Quota::new(1, Duration::from_millis(300)));
    let first = caller.book(1, 1, Duration::ZERO).await;
    let slot = first.grants[0].slot;
    let mut last_wait = Duration::MAX;
    for _ in 0..5 {
        let lease = caller.book(1, 1, Duration::ZERO).await;
        let Some(Refusal {
            wait: Some(wait),
            limit,
            ..
        }) = lease.refused
        else {
            panic!("a refusal states the wait until the first slot: {lease:?}")
        };
        assert!(lease.grants.is_empty(), "{lease:?}");
        assert!(
            wait <= last_wait,
            "a refusal delays no later call: {wait:?} after {last_wait:?}"
        );
        assert_eq!(limit, Some(caller.spec.quota().limits()[0]));
        last_wait = wait;
    }
    let lease = caller.book(1, 1, LONG).await;
    assert_eq!(
        lease.grants[0].slot,
        slot + 300_000 + MARGIN,
        "a window and a margin after the first"
    );
}

pub(super) async fn serves_in_order(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "order", Quota::per_second(2));
    let demands = [Demand::new(1, 3), Demand::new(2, 1), Demand::new(1, 2)];
    let lease = caller.lease(&demands, 0, LONG, &[]).await;
    let costs: Vec<u32> = lease
        .grants
        .iter()
        .flat_map(|grant| std::iter::repeat_n(grant.cost, grant.count as usize))
        .collect();
    assert_eq!(
        costs,
        [1, 1, 1, 2, 1, 1],
        "needs are served in their order: {lease:?}"
    );
    let later = caller.book(1, 1, LONG).await;
    assert!(
        slots(&lease).iter().max() <= slots(&later).first(),
        "a later call gets no earlier slot: {later:?}"
    );
}

pub(super) async fn hands_a_returned_slot_to_the_next(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "return", Quota::new(1, Duration::from_secs(30)));
    let line = caller.book(1, 4, LONG).await;
    let second = line
        .grants
        .iter()
        .find(|grant| !grant.wait.is_zero())
        .expect("a line lies ahead");
    let returned = [unused(&line, second, 1)];
    let next = caller.lease(&[Demand::new(1, 1)], 0, LONG, &returned).await;
    assert_eq!(
        slots(&next),
        [second.slot],
        "the returned slot goes to the next call"
    );
    caller.store.give_back(caller.key, &caller.spec, &returned);
    let after = caller.book(1, 2, LONG).await;
    assert_eq!(
        slots(&after)[0],
        second.slot,
        "a slot that is given back early goes to the next call"
    );
    assert!(
        slots(&after)[1] > slots(&line)[3],
        "a returned slot is granted only once: {after:?}"
    );
}

pub(super) async fn counts_what_passed_unused_back_once(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "passed", Quota::per_minute(3));
    let lease = caller.book(1, 3, Duration::ZERO).await;
    pass(Duration::from_millis(15)).await;
    let back = [unused(&lease, &lease.grants[0], 1)];
    let again = caller
        .lease(&[Demand::new(1, 3)], 0, Duration::ZERO, &back)
        .await;
    assert_eq!(
        granted(&again),
        1,
        "one permit was returned, so one is granted: {again:?}"
    );
}

/// More permits than a store may take back in one step: the rest may follow until [`Store::flush`]
/// has been answered.
pub(super) async fn takes_back_any_number_of_permits(store: &Arc<dyn Store>) {
    const MANY: u32 = 1000;
    let caller = Caller::new(store, "many returns", Quota::per_minute(MANY));
    let lease = caller.book(1, MANY, Duration::ZERO).await;
    let returns: Vec<UnusedPermits> = lease
        .grants
        .iter()
        .flat_map(|grant| std::iter::repeat_n(unused(&lease, grant, 1), grant.count as usize))
        .collect();
    assert_eq!(returns.len(), MANY as usize);
    caller
        .lease(&[Demand::new(1, 1)], 0, Duration::ZERO, &returns)
        .await;
    caller
        .store
        .flush()
        .arrives()
        .await
        .expect("the store answers");
    let used = caller.peek().await.limits[0].used;
    assert_eq!(used, 1, "all permits that were returned are free again");
}

pub(super) async fn fetches_ahead_only_what_is_plenty(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "ahead", Quota::per_minute(100));
    let lease = caller
        .lease(&[Demand::new(1, 20)], 1000, Duration::ZERO, &[])
        .await;
    let ahead = lease.prefetched.as_ref().map_or(0, |grant| grant.count);
    assert!(
        ahead <= 20,
        "at most a quarter of the 80 that are free: {lease:?}"
    );
    assert!(
        lease
            .prefetched
            .as_ref()
            .is_none_or(|grant| grant.cost == 1 && grant.wait.is_zero())
    );
    let rest = caller.book(1, 100, Duration::ZERO).await;
    assert_eq!(granted(&rest), 80 - ahead, "prefetched permits are counted");
    let scarce = caller.lease(&[Demand::new(1, 1)], 1000, LONG, &[]).await;
    assert!(
        scarce.prefetched.is_none(),
        "nothing is prefetched of a scarce limit: {scarce:?}"
    );
}

pub(super) async fn never_grants_what_costs_more_than_the_limit(store: &Arc<dyn Store>) {
    let window = Duration::from_secs(1);
    for quota in [
        Quota::new(5, window),
        Quota::bucket(5).refill(9, window),
        Quota::fixed(5, window),
    ] {
        let caller = Caller::new(store, "too much", quota);
        let lease = caller.book(6, 1, LONG).await;
        assert!(lease.grants.is_empty(), "{quota}: {lease:?}");
        assert!(
            lease.refused.is_some_and(|refusal| refusal.wait.is_none()),
            "no wait helps: {lease:?}"
        );
    }
}

pub(super) async fn forgets_no_sooner_and_no_later_than_the_window(store: &Arc<dyn Store>) {
    let window = Duration::from_millis(250);
    let caller = Caller::new(store, "forget", Quota::new(2, window));
    let first = caller.book(1, 2, Duration::ZERO).await;
    let next = caller.book(1, 1, LONG).await;
    assert_eq!(slots(&next)[0] - slots(&first)[0], 250_000 + MARGIN);
    pass(window * 4).await;
    let rested = caller.book(1, 3, Duration::ZERO).await;
    assert_eq!(
        granted(&rested),
        2,
        "a long rest refills the limit, and no more: {rested:?}"
    );
}

pub(super) async fn keeps_keys_apart_and_peeks_without_a_trace(store: &Arc<dyn Store>) {
    let quota = Quota::per_minute(4);
    let (one, other) = (
        Caller::new(store, "one", quota),
        Caller::new(store, "other", quota),
    );
    assert_eq!(granted(&one.book(1, 4, Duration::ZERO).await), 4);
    for _ in 0..3 {
        let usage = one.peek().await;
        assert_eq!((usage.free, usage.limits[0].used), (0, 4), "{usage:?}");
        assert!(usage.next_slot > Duration::from_secs(55), "{usage:?}");
        let usage = other.peek().await;
        assert_eq!(
            (usage.free, usage.limits[0].used, usage.next_slot),
            (4, 0, Duration::ZERO),
            "{usage:?}"
        );
        assert!(matches!(
            usage.limits[0].limit,
            Limit::Sliding { count: 4, .. }
        ));
    }
    assert_eq!(granted(&other.book(1, 4, Duration::ZERO).await), 4);
}

/// Of four units, two are free. A store may ignore what a question states besides its key. Then it
/// answers for one unit.
pub(super) async fn tells_how_long_a_request_would_wait(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "questions", Quota::new(4, Duration::from_secs(2)));
    assert_eq!(granted(&caller.book(1, 2, Duration::ZERO).await), 2);
    let two = caller.ask_about(2, &[]).await;
    let both = (two.next_slot, two.limits[0].wait);
    assert_eq!(both, (Duration::ZERO, Duration::ZERO), "{two:?}");
    let behind = caller.ask_about(2, &[Demand::new(1, 1)]).await;
    assert_eq!((behind.free, behind.limits[0].used), (2, 2), "{behind:?}");
    let longest = Duration::from_secs(3);
    for usage in [caller.ask_about(3, &[]).await, behind] {
        let ignores = usage.next_slot.is_zero();
        assert!(ignores || usage.next_slot < longest, "{usage:?}");
        assert!(
            usage.limits[0].wait <= usage.next_slot || ignores,
            "{usage:?}"
        );
        // The first two units have left the window when the slot comes.
        let due = usage.next_slot;
        assert!(ignores || due > Duration::from_millis(1500), "{usage:?}");
    }
    assert_eq!(granted(&caller.book(2, 1, Duration::ZERO).await), 1);
}

/// Ten permits were granted, and the upstream states that 18 units of 100 are left and that it
/// refused two of the ten.
pub(super) async fn leaves_to_others_what_they_use(store: &Arc<dyn Store>) {
    let quota = Quota::per_minute(100);
    let caller = Caller::new(store, "strangers", quota);
    caller.book(1, 10, Duration::ZERO).await;
    let reset_in = Some(Duration::from_secs(30));
    let mut left = UpstreamRemaining::new(quota.limits()[0], 18);
    (left.reset_in, left.steady, left.refused) = (reset_in, true, 2);
    let demands = [Demand::new(1, 30)];
    let mut request = caller.asks_for(&demands);
    request.remaining = Some(left);
    let lease = caller.ask(request).await;
    assert!(
        lease.external_usage,
        "the lease states that other clients use the limit: {lease:?}"
    );
    assert_eq!(
        granted(&lease),
        16,
        "other clients used 74 of the 82 units: {lease:?}"
    );
    let usage = caller.peek().await;
    assert_eq!((usage.limits[0].reserved, usage.free), (74, 0), "{usage:?}");
    let refusal = lease.refused.expect("the rest is refused");
    assert!(
        refusal
            .wait
            .is_some_and(|wait| wait <= Duration::from_secs(31)),
        "the wait ends at the reset: {refusal:?}"
    );
}

/// Units used without a permit count from the moment of their use, even beyond the limit, and leave
/// the window accordingly.
pub(super) async fn counts_charges_by_their_age(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "charge", Quota::per_minute(100));
    caller.book(1, 90, Duration::ZERO).await;
    let age = |seconds| Duration::from_secs(seconds);
    let charges = [
        Charge::new(age(70), 1000),
        Charge::new(age(58), 30),
        Charge::new(age(20), 5),
    ];
    let mut request = caller.asks_for(&[]);
    request.charges = &charges;
    caller.ask(request).await;
    assert_eq!(
        caller.peek().await.limits[0].used,
        125,
        "charges older than the window do not count"
    );
    let refusal = caller
        .book(1, 1, Duration::ZERO)
        .await
        .refused
        .expect("25 above the limit");
    let wait = refusal.wait.expect("the oldest leave in 2 s");
    assert!((age(1)..=age(3)).contains(&wait), "{wait:?}");
    let lease = caller.book(1, 10, Duration::from_secs(5)).await;
    assert_eq!(
        granted(&lease),
        5,
        "100 less 90 and the 5 that stay: {lease:?}"
    );

    let bucket = Caller::new(
        store,
        "charge of a bucket",
        Quota::bucket(50).refill(50, Duration::from_secs(60)),
    );
    let charges = [Charge::new(age(600), 400), Charge::new(age(0), 10_000)];
    let mut request = bucket.asks_for(&[]);
    request.charges = &charges;
    bucket.ask(request).await;
    let refusal = bucket
        .book(1, 1, Duration::ZERO)
        .await
        .refused
        .expect("it is empty");
    assert!(
        refusal.wait.is_some_and(|wait| wait <= age(3)),
        "and no more than that: {refusal:?}"
    );
}

pub(super) async fn decides_in_one_step(store: &Arc<dyn Store>) {
    let caller = Caller::new(store, "step", Quota::per_minute(50));
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let caller = caller.clone();
            tokio::spawn(async move { granted(&caller.book(1, 5, Duration::ZERO).await) })
        })
        .collect();
    let mut sum = 0;
    for task in tasks {
        sum += task.await.expect("a call ends");
    }
    assert_eq!(
        sum, 50,
        "concurrent calls count like calls one after the other"
    );
}
