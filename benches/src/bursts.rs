//! Bursts: many tasks that wait for one quota at once. How long they take beside what the quota needs, and
//! what they cost.
//!
//! Two threads run the tasks, under the real clock. The peers get the same burst in the same process. governor
//! and leaky-bucket allow a burst as large as the limit, so they let up to twice the limit through in a window.

use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use governor::{DefaultDirectRateLimiter, Quota as GovernorQuota, RateLimiter as Governor};
use leaky_bucket::RateLimiter as LeakyBucket;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tollgate::limiter::Acquire;
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

use crate::machine::{cpu_time, machine};

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(80_000);
/// A peer whose tasks have not all left by then is stopped.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many waiters of different costs there are, and their quota of units per second.
const COSTS: u32 = 20_000;
const UNITS: u32 = 20_000_000;

/// Measures, and prints the tables: all of them, or the one of that name.
pub(crate) fn report(only: Option<&str>) {
    println!("# Bursts\n\n{}", machine(" -- bursts"));
    let tables: [(&str, fn()); 4] = [
        ("waiters", waiters),
        ("herd", herd),
        ("costs", costs),
        ("collapse", collapse),
    ];
    for (_, table) in tables
        .iter()
        .filter(|(name, _)| only.is_none_or(|only| only == *name))
    {
        table();
    }
}

/// N tasks at once.
fn collapse() {
    println!("\n## Tasks at once\n");
    println!("{}", Burst::header("quota | tasks | limiter"));
    // The last one takes half a minute.
    for (count, window, tasks, rounds) in [
        (2000_u32, SECOND, 6000_u32, 1),
        (20_000, SECOND, 60_000, 5),
        (50_000, 10 * SECOND, 150_000, 1),
    ] {
        let quota = Quota::new(count, window);
        let needs = window * (tasks.div_ceil(count) - 1);
        let row = |name: &str, rounds: usize, run: &dyn Fn() -> Burst| {
            let burst = Burst::median(rounds, run);
            println!("| {quota} | {tasks} | {name} | {}", burst.row(needs));
        };
        row("tollgate", rounds, &|| {
            let limiter = limiter(quota);
            Burst::run(tasks, window, move |_| send(limiter.acquire(Key::ALL)))
        });
        row("governor, `until_ready`", 1, &|| {
            let limiter = governor(count, window);
            Burst::run(tasks, window, move |_| {
                let limiter = limiter.clone();
                async move {
                    limiter.until_ready().await;
                    Some(Instant::now())
                }
            })
        });
        row("leaky-bucket, `acquire_owned`", 1, &|| {
            let limiter = leaky_bucket(count, window);
            Burst::run(tasks, window, move |_| {
                let acquire = limiter.clone().acquire_owned(1);
                async move {
                    acquire.await;
                    Some(Instant::now())
                }
            })
        });
    }
}

/// Waiters that leave after the release of a hold.
fn herd() {
    println!("\n## Waiters after a release\n");
    println!("{}", Burst::header("quota | waiters"));
    let quota = Quota::per_second(20_000);
    for tasks in [50_000_u32, 100_000] {
        let limiter = limiter(quota);
        let runtime = runtime();
        let burst = runtime.block_on(async {
            let hold = limiter.hold_for(Key::ALL, LONG / 2).await;
            hold.expect("the memory store answers");
            let tasks: Vec<_> = (0..tasks)
                .map(|_| tokio::spawn(send(limiter.acquire(Key::ALL))))
                .collect();
            while limiter.stats().waiting() < tasks.len() {
                sleep(SECOND / 10).await;
            }
            let start = (Instant::now(), cpu_time());
            let release = limiter.release(Key::ALL).await;
            release.expect("the memory store answers");
            Burst::end(tasks, SECOND, start).await
        });
        println!(
            "| {quota} | {tasks} | {}",
            burst.row(SECOND.mul_f64(f64::from(tasks) / 20_000.0 - 1.0))
        );
    }
}

/// Waiters of different costs beside waiters of one cost.
fn costs() {
    println!("\n## Waiters of different costs\n");
    println!("{}", Burst::header("limiter | costs"));
    let same = |_: u32| 1000 + COSTS / 2;
    let different = |number: u32| 1000 + number;
    for (name, cost) in [
        ("one", &same as &(dyn Fn(u32) -> u32 + Sync)),
        ("20,000", &different),
    ] {
        let units: u64 = (0..COSTS).map(|number| u64::from(cost(number))).sum();
        // What is left of a window after the largest cost that fits is not counted.
        let needs = SECOND.mul_f64((units as f64 / f64::from(UNITS)).ceil() - 1.0);
        let row = |limiter: &str, burst: Burst| {
            println!("| {limiter} | {name} | {}", burst.row(needs));
        };
        let tokens = limiter(Quota::per_second(UNITS));
        let request = |number| tokens.acquire(Key::ALL).cost(cost(number));
        row(
            "tollgate",
            Burst::run(COSTS, SECOND, |number| send(request(number))),
        );
        let tokens = limiter(Quota::per_second(UNITS));
        let calls = limiter(Quota::per_second(1_000_000));
        let request = |number| {
            let tokens = tokens.acquire(Key::ALL).cost(cost(number));
            tokens.and(calls.acquire(Key::ALL))
        };
        row(
            "tollgate, two keys",
            Burst::run(COSTS, SECOND, |number| send(request(number))),
        );
        let tokens = governor(UNITS, SECOND);
        let request = |number| {
            let tokens = tokens.clone();
            let cost = NonZeroU32::new(cost(number)).expect("a cost is above zero");
            async move {
                let fits = tokens.until_n_ready(cost).await;
                fits.is_ok().then(Instant::now)
            }
        };
        row(
            "governor, `until_n_ready`",
            Burst::run(COSTS, SECOND, request),
        );
        let tokens = leaky_bucket(UNITS, SECOND);
        let request = |number| {
            let acquire = tokens.clone().acquire_owned(cost(number) as usize);
            async move {
                acquire.await;
                Some(Instant::now())
            }
        };
        row(
            "leaky-bucket, `acquire_owned`",
            Burst::run(COSTS, SECOND, request),
        );
    }
}

/// The memory of requests that wait, on one thread: their futures, and what the allocator was asked for when they
/// entered, with the tables of the queue.
fn waiters() {
    println!("\n## Memory of a waiter\n");
    println!("| waiters | keys of a request | future, bytes | entered, bytes | allocations |");
    println!("|--:|--:|--:|--:|--:|");
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime starts");
    let _guard = runtime.enter();
    for waiters in [1000, 100_000] {
        for keys in [1, 2] {
            let limiters = [(); 2].map(|()| limiter(Quota::per_second(10)));
            let request = || {
                let mut keys = limiters[..keys].iter().map(|one| one.acquire(Key::ALL));
                let first = keys.next().expect("a request has a key");
                keys.fold(first, Acquire::and)
            };
            let mut cx = Context::from_waker(Waker::noop());
            let mut waits: Vec<_> = (0..waiters).map(|_| Box::pin(request())).collect();
            let entered = allocation_counter::measure(|| {
                waits.retain_mut(|wait| wait.as_mut().poll(&mut cx).is_pending());
            });
            let of_one = |all: f64| all / waits.len() as f64;
            println!(
                "| {waiters} | {keys} | {} | {:.0} | {:.2} |",
                size_of::<Acquire>(),
                of_one(entered.bytes_current as f64),
                of_one(entered.count_current as f64)
            );
        }
    }
}

fn limiter(quota: Quota) -> Limiter {
    let builder = RateLimitLayer::builder(quota)
        .max_wait(LONG)
        .max_queue(1_000_000);
    builder.build().expect("the settings make sense").limiter()
}

/// Allows a burst of `count`.
fn governor(count: u32, window: Duration) -> Arc<DefaultDirectRateLimiter> {
    let count = NonZeroU32::new(count).expect("a limit is above zero");
    let quota = GovernorQuota::with_period(window / count.get()).expect("it is not zero");
    Arc::new(Governor::direct(quota.allow_burst(count)))
}

/// Begins full, and gets `count` at the end of each window.
fn leaky_bucket(count: u32, window: Duration) -> Arc<LeakyBucket> {
    let count = count as usize;
    let mut builder = LeakyBucket::builder();
    builder.initial(count).max(count).refill(count);
    Arc::new(builder.interval(window).build())
}

/// Sends a request when it has its permit. Returns when it left. `None` if it did not: its permit had expired.
async fn send(acquire: Acquire) -> Option<Instant> {
    let permit = acquire.await.expect("it may wait for long");
    permit.begin().ok().map(|_sent| Instant::now())
}

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).enable_time();
    builder.build().expect("a runtime starts")
}

/// What became of a burst.
struct Burst {
    took: Duration,
    cpu: Duration,
    /// The most that left in any window.
    most: usize,
    /// How many got a permit that had expired when they used it.
    expired: usize,
    /// How many still waited when the patience ended.
    wait: usize,
}

impl Burst {
    /// Starts all tasks, and waits until the last one has ended.
    fn run<F>(tasks: u32, window: Duration, request: impl Fn(u32) -> F) -> Burst
    where
        F: Future<Output = Option<Instant>> + Send + 'static,
    {
        runtime().block_on(async {
            let start = (Instant::now(), cpu_time());
            let tasks = (0..tasks)
                .map(|number| tokio::spawn(request(number)))
                .collect();
            Burst::end(tasks, window, start).await
        })
    }

    /// Waits until the last task has ended.
    async fn end(
        tasks: Vec<JoinHandle<Option<Instant>>>,
        window: Duration,
        (start, cpu): (Instant, Duration),
    ) -> Burst {
        let mut left = Vec::with_capacity(tasks.len());
        let (mut expired, mut wait) = (0, 0);
        for task in tasks {
            let patience = PATIENCE.saturating_sub(start.elapsed());
            match timeout(patience, task).await {
                Ok(ended) => match ended.expect("no task panics") {
                    Some(moment) => left.push(moment),
                    None => expired += 1,
                },
                Err(_) => wait += 1,
            }
        }
        Burst {
            took: start.elapsed(),
            cpu: cpu_time() - cpu,
            most: most(&mut left, window),
            expired,
            wait,
        }
    }

    /// Returns the one of `rounds` bursts that took the median time.
    fn median(rounds: usize, run: &dyn Fn() -> Burst) -> Burst {
        let mut bursts: Vec<Burst> = (0..rounds).map(|_| run()).collect();
        bursts.sort_by_key(|burst| burst.took);
        bursts.swap_remove(rounds / 2)
    }

    fn header(first: &str) -> String {
        let dashes = "---|".repeat(first.split('|').count());
        format!(
            "| {first} | took, s | the quota needs, s | most in a window | CPU, ms | expired | still wait |\n\
             |{dashes}--:|--:|--:|--:|--:|--:|"
        )
    }

    fn row(&self, needs: Duration) -> String {
        format!(
            "{:.2} | {:.1} | {} | {} | {} | {} |",
            self.took.as_secs_f64(),
            needs.as_secs_f64(),
            self.most,
            self.cpu.as_millis(),
            self.expired,
            self.wait
        )
    }
}

/// Returns the most moments in any window.
fn most(moments: &mut [Instant], window: Duration) -> usize {
    moments.sort_unstable();
    let mut from = 0;
    let counts = (0..moments.len()).map(|to| {
        while moments[to] - moments[from] >= window {
            from += 1;
        }
        to + 1 - from
    });
    counts.max().unwrap_or(0)
}
