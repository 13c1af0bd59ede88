//! Shares that change while requests are sent: releases with different shares, and releases without, side by
//! side.

use crate::everything::known;
use crate::support::{self, over, remote};

use std::sync::{Arc, Mutex};
use std::time::Duration;

use over::over;
use proptest::prelude::*;
use remote::Remote;
use support::paused;
use tokio::time::{Instant, sleep, sleep_until};

use tollgate::store::{MemoryStore, Store};
use tollgate::{Key, Limiter, Quota, RateLimitLayer, Reason};

const K: Key = Key::ALL;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

type Uses = Arc<Mutex<Vec<(Instant, u32)>>>;

/// Shares in per cent. None: a release without shares.
type Shares = Vec<(&'static str, u8)>;

/// A process of a release: what it is, which class it uses, and when.
#[derive(Clone, Debug)]
struct Process {
    shares: Shares,
    class: &'static str,
    /// When it runs, each time with this many tasks that always ask.
    runs: Vec<(u64, u64, usize)>,
    max_wait: u64,
}

fn limiter(quota: Quota, shares: &Shares, max_wait: u64, store: &Arc<dyn Store>) -> Limiter {
    let builder = RateLimitLayer::builder(quota)
        .max_wait(ms(max_wait))
        .store(store.clone());
    let builder = shares.iter().fold(builder, |builder, (class, percent)| {
        builder.share(class, *percent)
    });
    builder.build().unwrap().limiter()
}

/// Asks again and again until `end`.
async fn ask_until(limiter: Limiter, class: &'static str, end: Instant, uses: Uses) {
    while Instant::now() < end {
        match limiter.acquire(K).class(class).await {
            Ok(permit) => {
                uses.lock().unwrap().push((Instant::now(), 1));
                drop(permit);
            }
            Err(limited) => {
                let wait = limited.retry_after().unwrap_or(ms(100));
                sleep(wait.clamp(ms(20), ms(1000))).await;
            }
        }
    }
}

/// Runs the processes beside each other. Returns what was used.
fn run(quota: Quota, processes: &[Process], is_remote: bool) -> Vec<(Instant, u32)> {
    let uses = Uses::default();
    paused(async {
        let begin = Instant::now();
        let store: Arc<dyn Store> = if is_remote {
            Arc::new(Remote::default())
        } else {
            Arc::new(MemoryStore::default())
        };
        let mut tasks = tokio::task::JoinSet::new();
        for process in processes {
            let limiter = limiter(quota, &process.shares, process.max_wait, &store);
            for (at, lasts, count) in process.runs.clone() {
                for _ in 0..count {
                    let (limiter, uses, class) = (limiter.clone(), uses.clone(), process.class);
                    tasks.spawn(async move {
                        sleep_until(begin + ms(at)).await;
                        ask_until(limiter, class, begin + ms(at + lasts), uses).await;
                    });
                }
            }
        }
        while tasks.join_next().await.is_some() {}
    });
    let mut uses = uses.lock().unwrap().clone();
    uses.sort();
    uses
}

#[tokio::test(start_paused = true)]
async fn holds_of_processes_without_shares_stop_each_class() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let process = |shares: &Shares| limiter(Quota::per_second(50), shares, 0, &store);
    let with_shares = vec![("web", 50)];
    let old = process(&vec![]);
    let running = process(&with_shares);
    for class in ["web", "cron"] {
        drop(running.acquire(K).class(class).await.unwrap());
    }
    old.hold_for(K, ms(60_000)).await.unwrap();
    for limiter in [running, process(&with_shares)] {
        for class in ["web", "cron"] {
            let refused = limiter.acquire(K).class(class).await.unwrap_err();
            assert_eq!(refused.reason(), Some(Reason::Held), "{class}");
        }
        old.release(K).await.unwrap();
        for class in ["web", "cron"] {
            drop(limiter.acquire(K).class(class).await.unwrap());
        }
        old.hold_for(K, ms(60_000)).await.unwrap();
    }
}

/// Requests of a class wait until what was booked without shares is through, or are refused at once.
#[tokio::test(start_paused = true)]
async fn requests_wait_for_undivided_callers_up_to_max_wait() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let limiter = |shares| limiter(Quota::new(50, ms(5000)), &shares, 0, &store);
    let old = limiter(vec![]);
    drop(old.acquire(K).cost(50).await.unwrap());
    let shares = || vec![("web", 50)];
    for new in [limiter(shares()), limiter(shares())] {
        let start = Instant::now();
        let web = || new.acquire(K).class("web");
        let both = || new.acquire(Key::new("other")).class("web").and(web());
        let refused = both().await.unwrap_err();
        assert!(
            matches!(refused.reason(), Some(Reason::MaxWait(_))),
            "{refused}"
        );
        assert!(web().await.is_err());
        assert_eq!(start.elapsed(), ms(0));
    }
}

fn processes(window: u64) -> impl Strategy<Value = Vec<Process>> {
    let shares = prop_oneof![
        1 => Just(vec![]),
        2 => Just(vec![("web", 50), ("jobs", 30)]),
        2 => Just(vec![("web", 30), ("jobs", 50)]),
        1 => Just(vec![("web", 10), ("jobs", 85)]),
    ];
    let runs = (0..8 * window, 1..4 * window, 1usize..30);
    let process = (
        shares,
        prop::sample::select(vec!["web", "jobs", "cron", "others"]),
        prop::collection::vec(runs, 1..4),
        prop::sample::select(vec![0, window / 2, 4 * window]),
    );
    let process = process.prop_map(|(shares, class, runs, max_wait)| Process {
        shares,
        class,
        runs,
        max_wait,
    });
    let processes = prop::collection::vec(process, 2..7);
    processes.prop_map(|mut processes: Vec<Process>| {
        let divide = |process: &Process| !process.shares.is_empty();
        if known::RUNS_WITHOUT_SHARES.stands() && processes.iter().any(divide) {
            processes.retain(divide);
        }
        processes
    })
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..histories::config(15)
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_mix_of_releases_exceeds_the_quota(
        (quota, processes) in prop_oneof![
            (20u32..100).prop_map(|count| (Quota::per_second(count), 1000)),
            (20u32..200).prop_map(|count| (Quota::new(count, ms(5000)), 5000)),
            (20u32..60, 10u32..40).prop_map(|(capacity, count)| {
                (Quota::bucket(capacity).refill(count, ms(1000)), 1000)
            }),
        ].prop_flat_map(|(quota, window)| (Just(quota), processes(window))),
        is_remote: bool,
    ) {
        let uses = run(quota, &processes, is_remote);
        prop_assert_eq!(over(&quota, &uses), None);
    }
}
