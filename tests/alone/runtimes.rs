//! Waiters of several runtimes, some of which end while they wait, under the real clock: the others leave, and nothing of
//! those that ended stays behind. No assertion depends on the speed of the machine.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

const LIMIT: u32 = 1000;
const WINDOW: Duration = Duration::from_millis(100);
/// Longer than any machine needs.
const PATIENCE: Duration = Duration::from_secs(60);
const WAITERS: u32 = 3000;

/// A moment between the two, at which a request left.
type Uses = Arc<Mutex<Vec<(Instant, Instant)>>>;

fn limiter(quota: Quota) -> Limiter {
    let builder = RateLimitLayer::builder(quota).max_wait(2 * PATIENCE);
    let layer = builder.max_queue(100_000).build();
    layer.unwrap().limiter()
}

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_time().build().unwrap()
}

/// Starts the waiters of a runtime: every other one has two keys.
fn start(
    runtime: &Runtime,
    limiters: &[Limiter; 2],
    uses: &Uses,
) -> Vec<tokio::task::JoinHandle<bool>> {
    let start = |number: u32| {
        let [one, other] = limiters.clone();
        let uses = uses.clone();
        runtime.spawn(async move {
            let acquire = one.acquire(Key::ALL);
            let permit = match number % 2 {
                0 => acquire.await,
                _ => acquire.and(other.acquire(Key::ALL)).await,
            };
            let before = Instant::now();
            let sent = permit.unwrap().begin();
            if sent.is_ok() {
                uses.lock().unwrap().push((before, Instant::now()));
            }
            sent.is_ok()
        })
    };
    (0..WAITERS).map(start).collect()
}

/// Returns the most requests that certainly left in one window.
fn most(uses: &mut [(Instant, Instant)]) -> usize {
    uses.sort_unstable();
    let inside = |from: usize| {
        let end = uses[from].0 + WINDOW;
        let near = uses[from..].iter().take_while(|(before, _)| *before < end);
        near.filter(|(_, after)| *after < end).count()
    };
    (0..uses.len()).map(inside).max().unwrap_or(0)
}

#[test]
fn waiters_of_runtimes_that_end_leave_nothing() {
    let limiters = [
        limiter(Quota::new(LIMIT, WINDOW)),
        limiter(Quota::new(LIMIT, WINDOW).and(Quota::in_flight(LIMIT))),
    ];
    let uses = Uses::default();
    let stays = runtime();
    let mut waits = Vec::new();
    for round in 0..3 {
        let ends = runtime();
        // Before and behind those that stay.
        drop(start(&ends, &limiters, &uses));
        waits.extend(start(&stays, &limiters, &uses));
        drop(start(&ends, &limiters, &uses));
        // At another point of the windows in each round.
        std::thread::sleep(Duration::from_millis(60 + 45 * round));
        ends.shutdown_timeout(PATIENCE);
    }
    stays.block_on(async {
        let all = waits.len();
        let left = timeout(PATIENCE, futures::future::join_all(waits)).await;
        let left = left.expect("those that stay leave").into_iter();
        let sent = left.filter(|sent| *sent.as_ref().unwrap()).count();
        println!("{sent} of {all} that stayed were sent");
        assert!(sent > 0);
        for limiter in &limiters {
            assert_eq!(limiter.stats().waiting(), 0);
            let whole = limiter.acquire(Key::ALL).cost(LIMIT);
            let whole = timeout(PATIENCE, whole).await;
            drop(whole.expect("the whole limit is free").unwrap());
            // What was booked further ahead for those that ended is free in the end, and so are their in-flight slots.
            let is_free = async {
                while limiter
                    .peek(Key::ALL)
                    .await
                    .unwrap()
                    .limits
                    .iter()
                    .any(|usage| usage.used > 0)
                {
                    sleep(WINDOW / 10).await;
                }
            };
            timeout(PATIENCE, is_free)
                .await
                .expect("nothing stays used");
        }
    });
    let most = most(&mut uses.lock().unwrap());
    assert!(most <= LIMIT as usize, "{most} in a window");
}
