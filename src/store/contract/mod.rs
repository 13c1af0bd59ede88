//! The contract of a store, as a test suite that any store can run.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! use std::sync::Arc;
//! use tollgate::store::{contract, MemoryStore};
//!
//! contract::check(Arc::new(MemoryStore::default())).await;
//! # }
//! ```
//!
//! The suite checks the replies of a store: the slots, validity and stamps of grants in the store's
//! own time. No check depends on when a task wakes, so the suite finds the same faults on a slow
//! machine as on a fast one. It takes about two seconds. If the store uses Tokio's clock and that
//! is paused, the suite takes no time.

mod in_flight;
mod registers;

use std::sync::Arc;
use std::time::Duration;

use super::{
    Charge, ClientSession, Demand, Grant, HoldState, Lease, LeaseRequest, LimitSpec, Refusal,
    Store, UnusedPermits, UpstreamRemaining, Usage,
};
use crate::clock;
use crate::key::Key;
use crate::quota::{Limit, Quota};

/// Runs every law of the contract against `store`, each on keys of its own.
///
/// # Panics
///
/// If the store breaks a law. The message names the law and shows the store's reply.
pub async fn check(store: Arc<dyn Store>) {
    grants_at_once_what_is_free(&store).await;
    is_never_over(&store).await;
    counts_a_cost_whole(&store).await;
    takes_all_limits_or_none(&store).await;
    refuses_without_a_trace_and_says_when(&store).await;
    serves_in_order(&store).await;
    hands_a_returned_slot_to_the_next(&store).await;
    counts_what_passed_unused_back_once(&store).await;
    takes_back_any_number_of_permits(&store).await;
    fetches_ahead_only_what_is_plenty(&store).await;
    never_grants_what_costs_more_than_the_limit(&store).await;
    forgets_no_sooner_and_no_later_than_the_window(&store).await;
    keeps_keys_apart_and_peeks_without_a_trace(&store).await;
    leaves_to_others_what_they_use(&store).await;
    counts_charges_by_their_age(&store).await;
    decides_in_one_step(&store).await;
    in_flight::counts_calls_in_flight(&store).await;
    registers::changes_registers_in_one_step(&store).await;
}

// ── requests of the suite ────────────────────────────────────────────────────────────────────────

const LIFE: Duration = Duration::from_millis(10);
const SLACK: Duration = Duration::from_millis(10);
const MARGIN: u64 = 20_000;
const LONG: Duration = Duration::from_secs(3600);

/// One key and its quota.
#[derive(Clone)]
struct Desk {
    store: Arc<dyn Store>,
    key: Key,
    spec: Arc<LimitSpec>,
}

impl Desk {
    fn new(store: &Arc<dyn Store>, law: &str, quota: Quota) -> Self {
        Desk {
            store: store.clone(),
            key: key(store, law),
            spec: Arc::new(LimitSpec::new(quota, SLACK, Duration::from_millis(20))),
        }
    }

    async fn lease(
        &self,
        demands: &[Demand],
        prefetch: u32,
        latest: Duration,
        returns: &[UnusedPermits],
    ) -> Lease {
        self.ask(LeaseRequest {
            prefetch,
            latest,
            returns,
            ..self.asks_for(demands)
        })
        .await
    }

    /// Makes a request for `demands` now, and for nothing else.
    fn asks_for<'a>(&'a self, demands: &'a [Demand]) -> LeaseRequest<'a> {
        LeaseRequest {
            key: self.key,
            spec: &self.spec,
            demands,
            prefetch: 0,
            latest: Duration::ZERO,
            validity: LIFE,
            prefetch_validity: LIFE,
            returns: &[],
            charges: &[],
            session: ClientSession::default(),
            hold: HoldState::default(),
            remaining: None,
        }
    }

    async fn ask(&self, request: LeaseRequest<'_>) -> Lease {
        self.store
            .lease(request)
            .arrives()
            .await
            .expect("the store answers")
    }

    /// Books `count` permits of `cost`.
    async fn book(&self, cost: u32, count: u32, latest: Duration) -> Lease {
        self.lease(&[Demand { cost, count }], 0, latest, &[]).await
    }

    async fn peek(&self) -> Usage {
        self.store
            .peek(self.key, &self.spec)
            .arrives()
            .await
            .expect("the store answers")
    }
}

/// Two stores in one process are asked about different keys, should they share their state.
fn store_address(store: &Arc<dyn Store>) -> [u8; 8] {
    (Arc::as_ptr(store).cast::<()>().addr() as u64).to_le_bytes()
}

/// A key that no other run of the suite has.
fn key(store: &Arc<dyn Store>, law: &str) -> Key {
    Key::new(law)
        .and(clock::micros(clock::now()).to_le_bytes())
        .and(store_address(store))
}

async fn pass(span: Duration) {
    clock::sleep_until(clock::after(clock::now(), span)).await;
}

fn granted(lease: &Lease) -> u32 {
    lease.grants.iter().map(|grant| grant.count).sum()
}

fn unused(lease: &Lease, grant: &Grant, count: u32) -> UnusedPermits {
    let &Grant {
        cost, slot, stamp, ..
    } = grant;
    UnusedPermits {
        slot,
        stamp,
        units: u64::from(cost) * u64::from(count),
        incarnation: lease.incarnation,
    }
}

/// One per permit.
fn slots(lease: &Lease) -> Vec<u64> {
    lease
        .grants
        .iter()
        .flat_map(|grant| std::iter::repeat_n(grant.slot, grant.count as usize))
        .collect()
}

// ── the laws ────────────────────────────────────────────────────────────────────────────────────

async fn grants_at_once_what_is_free(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "free", Quota::per_minute(20));
    let lease = desk.book(1, 20, Duration::ZERO).await;
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
async fn is_never_over(store: &Arc<dyn Store>) {
    const COUNT: u64 = 12;
    const WINDOW: u64 = 200_000;
    let desk = Desk::new(store, "over", Quota::new(12, Duration::from_micros(WINDOW)));
    let mut arrivals: Vec<(u64, u64)> = Vec::new();
    for round in 0u32..60 {
        let latest = Duration::from_millis([0, 30, 150, 700][round as usize % 4]);
        let cost = 1 + round % 3;
        let lease = desk.book(cost, 1 + round % 5, latest).await;
        for (index, grant) in lease.grants.iter().enumerate() {
            let wait = u64::try_from(grant.wait.as_micros()).unwrap_or(u64::MAX);
            assert!(
                Duration::from_micros(wait) <= latest,
                "no slot is later than asked: {lease:?}"
            );
            let late = (round as usize + index) % 2 == 1;
            let at = if late { grant.stamp - 1 } else { grant.slot };
            arrivals.extend((0..grant.count).map(|_| (at, u64::from(grant.cost))));
        }
        if round % 7 == 0 {
            pass(Duration::from_millis(60)).await;
        }
    }
    arrivals.sort_unstable();
    for (index, &(from, _)) in arrivals.iter().enumerate() {
        let inside = arrivals[index..]
            .iter()
            .take_while(|&&(at, _)| at - from < WINDOW);
        let units: u64 = inside.map(|&(_, units)| units).sum();
        assert!(
            units <= COUNT,
            "{units} units in a window that allows {COUNT}"
        );
    }
    assert!(
        arrivals.len() > 20,
        "a store that grants nothing is not over, but it is no store"
    );
}

async fn counts_a_cost_whole(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "cost", Quota::per_minute(10));
    assert_eq!(granted(&desk.book(8, 1, Duration::ZERO).await), 1);
    assert_eq!(
        granted(&desk.book(3, 1, Duration::ZERO).await),
        0,
        "8 and 3 are more than 10"
    );
    assert_eq!(granted(&desk.book(2, 1, Duration::ZERO).await), 1);
    assert_eq!(
        granted(&desk.book(1, 1, Duration::ZERO).await),
        0,
        "a small one counts after a big one"
    );
}

async fn takes_all_limits_or_none(store: &Arc<dyn Store>) {
    let quota = Quota::new(5, Duration::from_secs(60)).and(Quota::new(7, Duration::from_secs(600)));
    let desk = Desk::new(store, "all or none", quota);
    let lease = desk.book(1, 9, Duration::ZERO).await;
    assert_eq!(granted(&lease), 5, "the first limit allows five: {lease:?}");
    assert_eq!(
        lease.refused.and_then(|refusal| refusal.limit),
        Some(quota.limits()[0]),
        "{lease:?}"
    );
    let used: Vec<u64> = desk
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

async fn refuses_without_a_trace_and_says_when(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "trace", Quota::new(1, Duration::from_millis(300)));
    let first = desk.book(1, 1, Duration::ZERO).await;
    let slot = first.grants[0].slot;
    let mut last_wait = Duration::MAX;
    for _ in 0..5 {
        let lease = desk.book(1, 1, Duration::ZERO).await;
        let Some(Refusal {
            wait: Some(wait),
            limit,
        }) = lease.refused
        else {
            panic!("a refusal states the wait until the first slot: {lease:?}")
        };
        assert!(lease.grants.is_empty(), "{lease:?}");
        assert!(
            wait <= last_wait,
            "a refusal delays no later call: {wait:?} after {last_wait:?}"
        );
        assert_eq!(limit, Some(desk.spec.quota().limits()[0]));
        last_wait = wait;
    }
    let lease = desk.book(1, 1, LONG).await;
    assert_eq!(
        lease.grants[0].slot,
        slot + 300_000 + MARGIN,
        "a window and a margin after the first"
    );
}

async fn serves_in_order(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "order", Quota::per_second(2));
    let demands = [
        Demand { cost: 1, count: 3 },
        Demand { cost: 2, count: 1 },
        Demand { cost: 1, count: 2 },
    ];
    let lease = desk.lease(&demands, 0, LONG, &[]).await;
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
    let later = desk.book(1, 1, LONG).await;
    assert!(
        slots(&lease).iter().max() <= slots(&later).first(),
        "a later call gets no earlier slot: {later:?}"
    );
}

async fn hands_a_returned_slot_to_the_next(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "return", Quota::new(1, Duration::from_secs(30)));
    let line = desk.book(1, 4, LONG).await;
    let second = line
        .grants
        .iter()
        .find(|grant| !grant.wait.is_zero())
        .expect("a line lies ahead");
    let returned = [unused(&line, second, 1)];
    let next = desk
        .lease(&[Demand { cost: 1, count: 1 }], 0, LONG, &returned)
        .await;
    assert_eq!(
        slots(&next),
        [second.slot],
        "the returned slot goes to the next call"
    );
    desk.store.give_back(desk.key, &desk.spec, &returned);
    pass(Duration::from_millis(20)).await; // a store may take its time with a give-back
    let after = desk.book(1, 2, LONG).await;
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

async fn counts_what_passed_unused_back_once(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "passed", Quota::per_minute(3));
    let lease = desk.book(1, 3, Duration::ZERO).await;
    pass(Duration::from_millis(15)).await;
    let back = [unused(&lease, &lease.grants[0], 1)];
    let again = desk
        .lease(&[Demand { cost: 1, count: 3 }], 0, Duration::ZERO, &back)
        .await;
    assert_eq!(
        granted(&again),
        1,
        "one permit was returned, so one is granted: {again:?}"
    );
}

/// More permits than a store may take back in one step: the rest may follow until [`Store::flush`]
/// has been answered.
async fn takes_back_any_number_of_permits(store: &Arc<dyn Store>) {
    const MANY: u32 = 1000;
    let desk = Desk::new(store, "many returns", Quota::per_minute(MANY));
    let lease = desk.book(1, MANY, Duration::ZERO).await;
    let returns: Vec<UnusedPermits> = lease
        .grants
        .iter()
        .flat_map(|grant| std::iter::repeat_n(unused(&lease, grant, 1), grant.count as usize))
        .collect();
    assert_eq!(returns.len(), MANY as usize);
    desk.lease(&[Demand { cost: 1, count: 1 }], 0, Duration::ZERO, &returns)
        .await;
    desk.store
        .flush()
        .arrives()
        .await
        .expect("the store answers");
    let used = desk.peek().await.limits[0].used;
    assert_eq!(used, 1, "all permits that were returned are free again");
}

async fn fetches_ahead_only_what_is_plenty(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "ahead", Quota::per_minute(100));
    let lease = desk
        .lease(&[Demand { cost: 1, count: 20 }], 1000, Duration::ZERO, &[])
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
    let rest = desk.book(1, 100, Duration::ZERO).await;
    assert_eq!(granted(&rest), 80 - ahead, "prefetched permits are counted");
    let scarce = desk
        .lease(&[Demand { cost: 1, count: 1 }], 1000, LONG, &[])
        .await;
    assert!(
        scarce.prefetched.is_none(),
        "nothing is prefetched of a scarce limit: {scarce:?}"
    );
}

async fn never_grants_what_costs_more_than_the_limit(store: &Arc<dyn Store>) {
    let window = Duration::from_secs(1);
    for quota in [
        Quota::new(5, window),
        Quota::bucket(5).refill(9, window),
        Quota::fixed(5, window),
    ] {
        let desk = Desk::new(store, "too much", quota);
        let lease = desk.book(6, 1, LONG).await;
        assert!(lease.grants.is_empty(), "{quota}: {lease:?}");
        assert!(
            lease.refused.is_some_and(|refusal| refusal.wait.is_none()),
            "no wait helps: {lease:?}"
        );
    }
}

async fn forgets_no_sooner_and_no_later_than_the_window(store: &Arc<dyn Store>) {
    let window = Duration::from_millis(250);
    let desk = Desk::new(store, "forget", Quota::new(2, window));
    let first = desk.book(1, 2, Duration::ZERO).await;
    let next = desk.book(1, 1, LONG).await;
    assert_eq!(slots(&next)[0] - slots(&first)[0], 250_000 + MARGIN);
    pass(window * 4).await;
    let rested = desk.book(1, 3, Duration::ZERO).await;
    assert_eq!(
        granted(&rested),
        2,
        "a long rest refills the limit, and no more: {rested:?}"
    );
}

async fn keeps_keys_apart_and_peeks_without_a_trace(store: &Arc<dyn Store>) {
    let quota = Quota::per_minute(4);
    let (one, other) = (
        Desk::new(store, "one", quota),
        Desk::new(store, "other", quota),
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

/// Ten permits were granted, and the upstream states that 18 units of 100 are left and that it
/// refused two of the ten.
async fn leaves_to_others_what_they_use(store: &Arc<dyn Store>) {
    let quota = Quota::per_minute(100);
    let desk = Desk::new(store, "strangers", quota);
    desk.book(1, 10, Duration::ZERO).await;
    let reset_in = Some(Duration::from_secs(30));
    let left = UpstreamRemaining {
        reset_in,
        steady: true,
        refused: 2,
        ..UpstreamRemaining::new(quota.limits()[0], 18)
    };
    let demands = [Demand { cost: 1, count: 30 }];
    let lease = desk
        .ask(LeaseRequest {
            remaining: Some(left),
            ..desk.asks_for(&demands)
        })
        .await;
    assert!(
        lease.external_usage,
        "the lease states that other clients use the limit: {lease:?}"
    );
    assert_eq!(
        granted(&lease),
        16,
        "other clients used 74 of the 82 units: {lease:?}"
    );
    let usage = desk.peek().await;
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
async fn counts_charges_by_their_age(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "charge", Quota::per_minute(100));
    desk.book(1, 90, Duration::ZERO).await;
    let age = |seconds| Duration::from_secs(seconds);
    let charges = [
        Charge::new(age(70), 1000),
        Charge::new(age(58), 30),
        Charge::new(age(20), 5),
    ];
    desk.ask(LeaseRequest {
        charges: &charges,
        ..desk.asks_for(&[])
    })
    .await;
    assert_eq!(
        desk.peek().await.limits[0].used,
        125,
        "charges older than the window do not count"
    );
    let refusal = desk
        .book(1, 1, Duration::ZERO)
        .await
        .refused
        .expect("25 above the limit");
    let wait = refusal.wait.expect("the oldest leave in 2 s");
    assert!((age(1)..=age(3)).contains(&wait), "{wait:?}");
    let lease = desk.book(1, 10, Duration::from_secs(5)).await;
    assert_eq!(
        granted(&lease),
        5,
        "100 less 90 and the 5 that stay: {lease:?}"
    );

    let bucket = Desk::new(
        store,
        "charge of a bucket",
        Quota::bucket(50).refill(50, Duration::from_secs(60)),
    );
    let charges = [Charge::new(age(600), 400), Charge::new(age(0), 10_000)];
    bucket
        .ask(LeaseRequest {
            charges: &charges,
            ..bucket.asks_for(&[])
        })
        .await;
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

async fn decides_in_one_step(store: &Arc<dyn Store>) {
    let desk = Desk::new(store, "step", Quota::per_minute(50));
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let desk = desk.clone();
            tokio::spawn(async move { granted(&desk.book(1, 5, Duration::ZERO).await) })
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
