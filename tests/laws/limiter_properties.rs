//! Random histories through the whole limiter, against a brute-force count of every window.

use crate::support::over;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use over::over;
use proptest::prelude::*;
use tokio::time::{Instant, sleep, timeout};
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

/// One caller.
#[derive(Clone, Debug)]
struct Caller {
    /// Comes this long after the one before.
    after: u64,
    cost: u32,
    /// How long the caller waits before it gives up.
    patience: Option<u64>,
    /// What the caller does with its permit: uses it after this delay, or gives it back.
    uses_after: Option<u64>,
}

fn caller() -> impl Strategy<Value = Caller> {
    (
        prop_oneof![6 => Just(0u64), 2 => 1u64..50, 1 => 200u64..3000],
        prop_oneof![5 => Just(1u32), 1 => 2u32..5],
        prop_oneof![4 => Just(None), 1 => (0u64..3000).prop_map(Some)],
        prop_oneof![6 => Just(Some(0u64)), 2 => (1u64..9).prop_map(Some), 1 => Just(None)],
    )
        .prop_map(|(after, cost, patience, uses_after)| Caller {
            after,
            cost,
            patience,
            uses_after,
        })
}

fn quota() -> impl Strategy<Value = Quota> {
    let millis = Duration::from_millis;
    prop_oneof![
        (5u32..30).prop_map(Quota::per_second),
        (5u32..20).prop_map(|count| Quota::per_second(count).burst(5)),
        (5u32..10)
            .prop_map(move |count| Quota::new(count, millis(500))
                .and(Quota::new(count * 3, millis(4000)))),
        (5u32..12, 3u32..30)
            .prop_map(move |(capacity, count)| Quota::bucket(capacity).refill(count, millis(1000))),
        (120u32..400).prop_map(Quota::per_second),
    ]
}

type Uses = Arc<Mutex<Vec<(Instant, u32)>>>;

async fn call(limiter: Limiter, caller: Caller, uses: Uses) {
    let acquire = limiter.acquire(Key::new("key")).cost(caller.cost);
    let permit = match caller.patience {
        Some(patience) => match timeout(Duration::from_millis(patience), acquire).await {
            Ok(permit) => permit.unwrap(),
            Err(_) => return,
        },
        None => acquire.await.unwrap(),
    };
    match caller.uses_after {
        None => permit.give_back(),
        Some(after) => {
            sleep(Duration::from_millis(after)).await;
            if permit.is_valid() {
                uses.lock().unwrap().push((Instant::now(), caller.cost));
            } else {
                permit.give_back();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..histories::config(75) })]

    #[test]
    fn histories_keep_limits_end_waits_and_leave_nothing(
        quota in quota(),
        callers in prop::collection::vec(caller(), 1..250),
    ) {
        let runtime = crate::support::paused_runtime();
        let (uses, waiting, end) = runtime.block_on(async {
            let layer = RateLimitLayer::builder(quota).max_wait(Duration::from_secs(80_000)).build().unwrap();
            let uses = Uses::default();
            let mut tasks = Vec::new();
            for caller in &callers {
                sleep(Duration::from_millis(caller.after)).await;
                tasks.push(tokio::spawn(call(layer.limiter(), caller.clone(), uses.clone())));
            }
            for task in tasks {
                task.await.unwrap();
            }
            let end = Instant::now();
            let waiting = layer.limiter().peek(Key::new("key")).await.unwrap().waiting;
            // Units that were cancelled or given back are no longer counted once a window has
            // passed.
            sleep(Duration::from_secs(60)).await;
            let largest = quota.largest_cost();
            let permit = timeout(Duration::ZERO, layer.limiter().acquire(Key::new("key")).cost(largest)).await;
            assert!(permit.is_ok(), "all of a rested quota is free");
            (uses.lock().unwrap().clone(), waiting, end)
        });
        prop_assert_eq!(waiting, 0);
        prop_assert_eq!(over(&quota, &uses), None);
        // The limiter is never idle: if work took longer than twice what the limit needs for it, a
        // slot stayed unused.
        let arrived: u64 = callers.iter().map(|caller| caller.after).sum();
        let units: u32 = callers.iter().map(|caller| caller.cost).sum();
        let slowest = quota.limits().iter().map(|limit| {
            let largest_waste = 5; // a cost of 5 may leave up to 4 units of a window
            let windows = units.div_ceil(limit.count().saturating_sub(largest_waste - 1).max(1)) + 1;
            (limit.window() + Duration::from_millis(30)) * windows
        }).max().unwrap();
        let start = uses.first().map_or(end, |first| first.0);
        prop_assert!(end - start <= slowest + Duration::from_millis(arrived) + Duration::from_secs(1));
    }
}
