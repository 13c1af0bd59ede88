//! Requests with several keys: how much of the limits they use, how long they wait, and what a
//! waiter costs.
//!
//! Under a paused clock: four processes, each a limiter of its own, share a store in memory, whose
//! replies take a millisecond. The first 20 s of each run are not counted.
//!
//! The *exact order* is computed from the same arrivals: each request gets, when it arrives, the
//! first moment that all of its keys allow, with a log of every request. No rule that serves
//! requests in their order uses more of the limits.

#![expect(
    clippy::disallowed_methods,
    reason = "it measures time, and lets some pass"
)]

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use fastrand::Rng;
use futures::lock::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tollgate::limiter::Acquire;
use tollgate::store::{Lease, LeaseRequest, MemoryStore, Store, StoreReply};
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

const PROCESSES: usize = 4;
const TRIP: Duration = Duration::from_millis(1);
const WARM_UP: Duration = Duration::from_secs(20);
const LONG: Duration = Duration::from_secs(140);
const MAX_WAIT: Duration = Duration::from_secs(15);
/// How much longer than the quota says a window is: validity of a permit and transit slack.
const MARGIN: Duration = Duration::from_millis(20);
/// The waits of the requests that leave before are also printed on their own. Where more is asked
/// than the limits allow, waits grow with the time.
const EARLY: Duration = Duration::from_secs(30);

/// Measures, and prints the tables.
pub(crate) fn report() {
    println!("# Requests with several keys\n");
    println!("| keys of a request | tightest key used, least | median | store calls a key |");
    println!("|---|--:|--:|--:|");
    random_keys(6, 12);
    random_keys(2, 6);
    println!(
        "\n| routes | requests per s | give up | used | in exact order | light routes wait, p50 | in exact order | p99 | \
         p50 of the first {} s | in exact order | store calls a key |",
        EARLY.as_secs()
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    routes(20, 30.0, 0.0);
    routes(100, 60.0, 0.0);
    routes(100, 100.0, 0.0);
    routes(20, 30.0, 0.1);
    routes(100, 100.0, 0.1);
    println!("\n| waiters of equal keys | us to enter | us to leave |");
    println!("|--:|--:|--:|");
    for waiters in [100, 1000, 10_000] {
        crowd(waiters);
    }
}

/// A store in memory whose replies take a trip. It counts its calls.
struct Distant {
    store: MemoryStore,
    calls: AtomicU64,
}

impl Store for Distant {
    fn inner(&self) -> Option<&dyn Store> {
        Some(&self.store)
    }

    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let StoreReply::Ready(lease) = self.store.lease(request) else {
            unreachable!("memory replies at once")
        };
        StoreReply::Pending(Box::pin(async move {
            sleep(TRIP).await;
            lease
        }))
    }
}

/// A key with its quota.
#[derive(Clone, Copy)]
struct Limited {
    count: u32,
    window: Duration,
}

impl Limited {
    fn new(count: u32, seconds: u64) -> Self {
        Limited {
            count,
            window: Duration::from_secs(seconds),
        }
    }

    /// Returns how many requests per second it lets through, after the margin.
    fn rate(&self) -> f64 {
        f64::from(self.count) / (self.window + MARGIN).as_secs_f64()
    }
}

/// A request that has left.
struct Left {
    keys: Vec<usize>,
    /// When it left, after the beginning.
    at: Duration,
    waited: Duration,
}

/// What requests arrive.
struct Load {
    limits: Vec<Limited>,
    per_second: f64,
    /// The part of the requests that give up while they wait.
    give_up: f64,
}

/// A request that arrives.
struct Arrival {
    keys: Vec<usize>,
    /// When it arrives, after the beginning.
    at: Duration,
}

struct Outcome {
    arrivals: Vec<Arrival>,
    left: Vec<Left>,
    calls_a_key: f64,
}

/// Returns how many requests of `key` left per second, after the warm-up.
fn rate(left: &[Left], key: usize) -> f64 {
    let counted = left
        .iter()
        .filter(|left| left.at >= WARM_UP && left.keys.contains(&key));
    counted.count() as f64 / (LONG - WARM_UP).as_secs_f64()
}

/// The moments at which the requests of a key leave, in exact order.
struct ExactLog {
    count: usize,
    window: Duration,
    /// Sorted.
    moments: Vec<Duration>,
}

impl ExactLog {
    /// Returns the first moment from `from` on at which one more request may leave.
    fn first(&self, from: Duration) -> Duration {
        let mut first = from;
        loop {
            let near = self
                .moments
                .partition_point(|at| *at + self.window <= first);
            let mut full = self.moments[near..]
                .windows(self.count)
                .take_while(|full| full[0] < first + self.window);
            let is_one_too_many = |full: &&[Duration]| {
                full[self.count - 1].max(first) - full[0].min(first) < self.window
            };
            match full.find(is_one_too_many) {
                Some(full) => first = full[0] + self.window,
                None => return first,
            }
        }
    }
}

/// Serves `arrivals` in exact order.
fn in_exact_order(limits: &[Limited], arrivals: &[Arrival]) -> Vec<Left> {
    let log = |limit: &Limited| ExactLog {
        count: limit.count as usize,
        window: limit.window + MARGIN,
        moments: Vec::new(),
    };
    let mut logs: Vec<ExactLog> = limits.iter().map(log).collect();
    let serve = |arrival: &Arrival| {
        let Arrival { keys, at } = arrival;
        let mut slot = *at;
        loop {
            let later = keys.iter().fold(slot, |slot, key| logs[*key].first(slot));
            if later == slot {
                break;
            }
            slot = later;
        }
        let is_in_time = slot <= *at + MAX_WAIT;
        if is_in_time {
            for key in keys {
                let moments = &mut logs[*key].moments;
                let place = moments.partition_point(|other| *other <= slot);
                moments.insert(place, slot);
            }
        }
        (is_in_time && slot < LONG).then(|| Left {
            keys: keys.clone(),
            at: slot,
            waited: slot - *at,
        })
    };
    arrivals.iter().filter_map(serve).collect()
}

fn paused() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().start_paused(true);
    builder.build().expect("a runtime starts")
}

/// Runs `load`, where `pick` chooses the keys of each request.
fn run(load: &Load, rng: &mut Rng, pick: impl Fn(&mut Rng) -> Vec<usize>) -> Outcome {
    paused().block_on(async {
        let store = Arc::new(Distant {
            store: MemoryStore::default(),
            calls: AtomicU64::new(0),
        });
        let limiter = |limit: &Limited| {
            let quota = Quota::new(limit.count, limit.window);
            let builder = RateLimitLayer::builder(quota).max_wait(MAX_WAIT);
            let layer = builder.store(store.clone()).build();
            layer.expect("the settings make sense").limiter()
        };
        let processes: Vec<Vec<Limiter>> = (0..PROCESSES)
            .map(|_| load.limits.iter().map(limiter).collect())
            .collect();
        let left = Arc::new(Mutex::new(Vec::new()));
        let mut arrivals = Vec::new();
        let begin = Instant::now();
        let (mut at, mut calls) = (begin, 0);
        let mut tasks = JoinSet::new();
        while at < begin + LONG {
            at += Duration::from_secs_f64(-rng.f64().max(1e-9).ln() / load.per_second);
            sleep_until(at).await;
            if at < begin + WARM_UP {
                calls = store.calls.load(Ordering::Relaxed);
            }
            let keys = pick(rng);
            arrivals.push(Arrival {
                keys: keys.clone(),
                at: at - begin,
            });
            let process = &processes[rng.usize(..PROCESSES)];
            let one = |key: &usize| process[*key].acquire(Key::new([*key as u8]));
            let mut all = keys.iter().map(one);
            let first = all.next().expect("a request has keys");
            let acquire = all.fold(first, Acquire::and);
            let patience = if rng.f64() < load.give_up {
                MAX_WAIT.mul_f64(rng.f64())
            } else {
                MAX_WAIT * 2
            };
            let left = left.clone();
            tasks.spawn(async move {
                let entered = Instant::now();
                if let Ok(Ok(permit)) = timeout(patience, acquire).await {
                    drop(permit);
                    let (at, waited) = (begin.elapsed(), entered.elapsed());
                    if at < LONG {
                        left.lock().await.push(Left { keys, at, waited });
                    }
                }
            });
        }
        let calls = store.calls.load(Ordering::Relaxed) - calls;
        tasks.shutdown().await;
        let left = std::mem::take(&mut *left.lock().await);
        let counted = left.iter().filter(|left| left.at >= WARM_UP);
        let keys: usize = counted.map(|left| left.keys.len()).sum();
        Outcome {
            arrivals,
            left,
            calls_a_key: calls as f64 / keys as f64,
        }
    })
}

/// Requests of `count` random keys out of `of`, one and a half times as many as the tightest allows.
fn random_keys(count: usize, of: usize) {
    let mut used = Vec::new();
    let mut calls = 0.0;
    const SEEDS: u64 = 14;
    for seed in 0..SEEDS {
        let mut rng = Rng::with_seed(seed);
        let limits: Vec<Limited> = (0..of)
            .map(|_| Limited::new(rng.u32(5..100), [1, 2, 5, 10][rng.usize(..4)]))
            .collect();
        let rates = limits.iter().map(Limited::rate).enumerate();
        let (tightest, allowed) = rates
            .min_by(|one, other| one.1.total_cmp(&other.1))
            .expect("there are keys");
        let load = Load {
            limits,
            per_second: 1.5 * allowed * of as f64 / count as f64,
            give_up: 0.0,
        };
        let outcome = run(&load, &mut rng, |rng| {
            let mut keys: Vec<usize> = (0..of).collect();
            rng.shuffle(&mut keys);
            keys.truncate(count);
            keys.sort_unstable();
            keys
        });
        used.push(rate(&outcome.left, tightest) / allowed * 100.0);
        calls += outcome.calls_a_key / SEEDS as f64;
    }
    used.sort_by(f64::total_cmp);
    let (least, median) = (used[0], used[used.len() / 2]);
    println!("| {count} of {of} | {least:.1} % | {median:.1} % | {calls:.2} |");
}

/// Requests to `count` routes of 5 per 5 s, and 50 per second in all. Routes are chosen by Zipf's
/// law, so few of them are hot.
fn routes(count: usize, per_second: f64, give_up: f64) {
    let mut limits = vec![Limited::new(50, 1)];
    limits.extend((0..count).map(|_| Limited::new(5, 5)));
    let all: f64 = (1..=count).map(|rank| 1.0 / rank as f64).sum();
    let demand = |rank: usize| per_second / (rank as f64 * all);
    let pick = |rng: &mut Rng| {
        let mut left = rng.f64() * all;
        let rank = (1..count).find(|rank| {
            left -= 1.0 / *rank as f64;
            left < 0.0
        });
        vec![0, rank.unwrap_or(count)]
    };
    let load = Load {
        limits,
        per_second,
        give_up,
    };
    let outcome = run(&load, &mut Rng::with_seed(7), pick);
    let route = |rank: usize| demand(rank).min(load.limits[rank].rate());
    let allowed: f64 = (1..=count).map(route).sum();
    let allowed = allowed.min(load.limits[0].rate());
    let used = |left: &[Left]| rate(left, 0) / allowed * 100.0;
    let is_light = |left: &&Left| demand(left.keys[1]) < 0.7 * load.limits[1].rate();
    // Returns a quantile of the waits of the light requests that left in this time.
    let wait = |left: &[Left], from: Duration, to: Duration, part: f64| {
        let light = left.iter().filter(is_light);
        let light = light.filter(|left| (from..to).contains(&left.at));
        let mut waits: Vec<Duration> = light.map(|left| left.waited).collect();
        waits.sort_unstable();
        waits[((waits.len() - 1) as f64 * part) as usize].as_millis()
    };
    let early = |left: &[Left]| wait(left, Duration::ZERO, EARLY, 0.5);
    let left = &outcome.left;
    let [exactly_used, exact_wait, exact_early] = if give_up > 0.0 {
        // The exact order does not know who gives up.
        [""; 3].map(str::to_owned)
    } else {
        let exact = in_exact_order(&load.limits, &outcome.arrivals);
        [
            format!("{:.1} %", used(&exact)),
            format!("{} ms", wait(&exact, WARM_UP, LONG, 0.5)),
            format!("{} ms", early(&exact)),
        ]
    };
    println!(
        "| {count} | {per_second} | {:.0} % | {:.1} % | {exactly_used} | {} ms | {exact_wait} | {} ms | {} ms | {exact_early} | \
         {:.2} |",
        give_up * 100.0,
        used(left),
        wait(left, WARM_UP, LONG, 0.5),
        wait(left, WARM_UP, LONG, 0.99),
        early(left),
        outcome.calls_a_key
    );
}

/// What each of `waiters` requests of equal keys costs, until it waits and until it leaves.
fn crowd(waiters: u32) {
    paused().block_on(async {
        let limiter = || {
            let quota = Quota::new(1, Duration::from_millis(50));
            let builder = RateLimitLayer::builder(quota).max_queue(waiters as usize);
            let layer = builder.max_wait(Duration::from_secs(3600)).build();
            layer.expect("the settings make sense").limiter()
        };
        let limiters = [limiter(), limiter()];
        let both = || {
            let [one, other] = &limiters;
            one.acquire(Key::ALL).and(other.acquire(Key::ALL))
        };
        let micros = |from: std::time::Instant| from.elapsed().as_micros() / u128::from(waiters);
        let begin = std::time::Instant::now();
        let mut waits: Vec<_> = (0..waiters).map(|_| Box::pin(both())).collect();
        let mut cx = Context::from_waker(Waker::noop());
        waits.retain_mut(|wait| wait.as_mut().poll(&mut cx).is_pending());
        let enter = micros(begin);
        let mut tasks = JoinSet::new();
        waits.into_iter().for_each(|wait| {
            tasks.spawn(wait);
        });
        let begin = std::time::Instant::now();
        while tasks.join_next().await.is_some() {}
        println!("| {waiters} | {enter} | {} |", micros(begin));
    });
}
