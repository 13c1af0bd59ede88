//! Many processes behind one limit, judged by the upstream's own log.
//!
//! That calls never exceed the limit is checked strictly. Figures that a stall of the machine can
//! spoil are printed, and judged on a calm machine only: if `TOLLGATE_CALM` is set, as
//! `./.ci/run --long` does. Modules named `calm` measure most: `./tests/run` leaves them to `./.ci/run`.

mod alone;
mod away;
mod classes;
mod deploy;
mod drain;
mod holds;
mod in_flight;
mod killed;
mod limiters;
mod lost;
mod never_over;
mod paced;
mod places;
mod set_quota;
mod settle;
mod soak;

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use fleet::{Fleet, Options, Report, Stalls, ideal};
use redis_server::RedisServer;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, SemaphorePermit};
use tollgate::limiter::KeyStatus;
use tollgate::quota::Limit;
use tollgate::store::RedisStore;
use tollgate::{Key, Limiter, Quota, RateLimitBuilder, RateLimitLayer};
use upstream::{Log, Rule, Upstream};

const WORKER: &str = env!("CARGO_BIN_EXE_worker");

/// tollgate's default `transit_slack`.
const SLACK: Duration = Duration::from_millis(10);

/// How much longer tollgate makes every window: the slack, and the life of a permit.
const MARGIN: Duration = Duration::from_millis(20);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns `usual`, or `long` if `TOLLGATE_CASES` asks for more than the usual cases.
fn usual_or<T>(usual: T, long: T) -> T {
    if histories::cases(1) > 1 { long } else { usual }
}

/// The load that concurrent tests may put on the machine, in units of about a tenth of a core.
const ROOM: u32 = 14;

static MACHINE: Semaphore = Semaphore::const_new(ROOM as usize);

/// Waits until `units` units are free, in the order of the callers.
fn turn_of(units: u32) -> SemaphorePermit<'static> {
    Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(MACHINE.acquire_many(units))
        .unwrap()
}

/// Waits for the turn of tests that run alone because they also measure the machine.
fn turn() -> SemaphorePermit<'static> {
    turn_of(ROOM)
}

/// Waits for the turn of tests that run beside one or two others: they use much of the machine, and
/// check limits, not speed.
fn busy_turn() -> SemaphorePermit<'static> {
    turn_of(4)
}

/// Waits for the turn of tests that run beside others, because they wait most of the time.
fn turn_beside_others() -> SemaphorePermit<'static> {
    turn_of(1)
}

/// Calls `look`, which panics for faults that no stall excuses and returns figures that a stall can
/// spoil as an error. On a calm machine, `look` may try three times: a failure while a core stalls
/// proves nothing, so the test fails if a look without a stall failed and none succeeded.
fn once_in_three(look: impl Fn() -> anyhow::Result<()>) {
    if !histories::is_calm() {
        if let Err(error) = look() {
            println!("not judged without TOLLGATE_CALM: {error}");
        }
        return;
    }
    let mut calm = 0;
    for _ in 0..3 {
        let stalls = Stalls::watch();
        let seen = look();
        let worst = stalls.worst();
        let Err(error) = seen else { return };
        println!("{error}; the machine stalled for up to {worst:.1?}");
        calm += u32::from(worst < STALL);
    }
    assert_eq!(calm, 0, "failed in {calm} looks on a calm machine");
}

/// Judges a figure that a stall of the machine can spoil: on a calm machine only.
fn figure(is_right: bool, what: &str) {
    assert!(is_right || !histories::is_calm(), "{what}");
    if !is_right {
        println!("not judged without TOLLGATE_CALM: {what}");
    }
}

/// A thread that wakes this late missed its slot.
const STALL: Duration = ms(10);

/// A Redis server, an upstream that never refuses, and workers between them.
struct Site {
    redis: RedisServer,
    upstream: Upstream,
}

impl Site {
    fn new() -> Site {
        Site {
            redis: RedisServer::start().unwrap(),
            upstream: Upstream::open(),
        }
    }

    fn with_stepping_clock() -> Site {
        Site {
            redis: RedisServer::with_stepping_clock().unwrap(),
            upstream: Upstream::open(),
        }
    }

    fn start(&self, processes: usize, options: &Options) -> Fleet {
        let options = Options {
            store: self.redis.url(),
            url: self.upstream.url(),
            ..options.clone()
        };
        Fleet::start(WORKER, processes, &options)
    }
}

/// A limiter of the test itself, beside those of the workers.
struct Outsider {
    runtime: Runtime,
    limiter: Limiter,
}

impl Outsider {
    fn new(redis: &RedisServer, quota: Quota) -> Outsider {
        Outsider::of(redis, RateLimitLayer::builder(quota))
    }

    /// Makes an outsider with the settings of the workers.
    fn of(redis: &RedisServer, builder: RateLimitBuilder) -> Outsider {
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        // The machine may stall for longer than the default timeout.
        let store = RedisStore::builder(&redis.url())
            .store_timeout(ms(5000))
            .build()
            .unwrap();
        let store = Arc::new(store);
        runtime.block_on(store.connect()).unwrap();
        let limiter = builder.store(store).build().unwrap().limiter();
        Outsider { runtime, limiter }
    }

    fn peek(&self) -> KeyStatus {
        self.runtime.block_on(self.limiter.peek(Key::ALL)).unwrap()
    }

    fn hold_for(&self, span: Duration) {
        self.runtime
            .block_on(self.limiter.hold_for(Key::ALL, span))
            .unwrap();
    }
}

fn rules(quota: &Quota) -> Vec<Rule> {
    let rule = |limit: &Limit| match *limit {
        Limit::Sliding { count, window, .. } => Rule::new(count, window),
        _ => panic!("these tests know sliding windows only"),
    };
    quota.limits().iter().map(rule).collect()
}

/// Returns how calls exceeded the quota, by when they were sent or when they arrived.
fn over(log: &Log, quota: &Quota) -> Option<String> {
    rules(quota)
        .into_iter()
        .find_map(|rule| over_rule(log, rule))
}

/// Returns how calls exceeded the rule, by when they were sent or when they arrived.
///
/// A worker may stand still between the gate and the moment that it writes into the call, as it may on the way from
/// there. Only the second is seen, so the first has its allowance, up to a tenth of a second.
fn over_rule(log: &Log, rule: Rule) -> Option<String> {
    let stalled = log.jitter_beyond(SLACK).min(ms(100));
    let window = rule.window.saturating_sub(stalled);
    let sent = log.largest_count_sent(window);
    let said = || {
        format!(
            "{sent} sent within {window:.3?}, allowed are {} in {:?}",
            rule.count, rule.window
        )
    };
    log.over(rule, SLACK)
        .or_else(|| (sent > rule.count as usize).then(said))
}

fn assert_never_over(log: &Log, quota: &Quota) {
    assert_eq!(
        over(log, quota),
        None,
        "{quota}; jitter {:?}, {} calls",
        log.jitter(),
        log.len()
    );
}

/// Returns how many calls the quota allows in `span`.
fn allowed(quota: &Quota, span: Duration) -> usize {
    ideal(quota, MARGIN)
        .take_while(|moment| *moment < span)
        .count()
}

fn part(log: &Log, from: Instant, to: Instant) -> Log {
    Log::from(
        log.iter()
            .filter(|arrival| (from..to).contains(&arrival.at))
            .cloned()
            .collect::<Vec<_>>(),
    )
}

fn between(log: &Log, from: Instant, to: Instant) -> usize {
    log.iter()
        .filter(|arrival| (from..to).contains(&arrival.at))
        .count()
}

fn longest_silence(log: &Log) -> Duration {
    log.windows(2)
        .map(|pair| pair[1].at - pair[0].at)
        .max()
        .unwrap_or_default()
}

fn per_second(log: &Log) -> Vec<u64> {
    log.per(ms(1000))
        .into_iter()
        .map(|tally| tally.all())
        .collect()
}

/// Sleeps until `span` after `start`, and returns the present moment.
fn wait_until(start: Instant, span: Duration) -> Instant {
    sleep((start + span).saturating_duration_since(Instant::now()));
    Instant::now()
}

fn assert_all_ended(reports: &[Report]) {
    assert!(
        reports.iter().all(|report| report.ended),
        "every worker came to its end"
    );
    let broken = reports
        .iter()
        .flat_map(|report| report.of(fleet::Outcome::Broken))
        .next();
    assert_eq!(broken, None, "no call failed behind the gate");
}
