//! The cost of a key when there are many: memory, the mean call, and the slowest of all calls.
//!
//! This benchmark does not use a server.

#![expect(
    clippy::disallowed_methods,
    reason = "it measures time, and lets some pass"
)]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tollgate::store::MemoryStore;
use tollgate::{Key, Limiter, Quota, RateLimitLayer};

/// Measures, and prints the table.
pub(crate) fn report() {
    println!("# Many keys, in memory\n");
    println!(
        "Each key in turn; bytes as the allocator was asked for them, lines and counts together. The slowest call is \
         counted without the time for which its thread had no core.\n"
    );
    println!("| quota | keys | call | ns | worst, us | above 1 ms | bytes a key |");
    println!("|---|--:|---|--:|--:|--:|--:|");
    let second = Quota::per_second(50);
    for (quota, keys) in [(second, 10_000), (second, 100_000), (second, 1_000_000)] {
        in_turn(quota, keys, keys);
    }
    // Each key stays limited, or worth keeping, until the end of the measurement.
    in_turn(Quota::per_hour(5000), 1_000_000, 1_000_000);
    println!("\n## More keys than there is room for\n");
    println!("A million come after the first million; the others are in use, or idle.\n");
    println!("| they are | ns | worst, us | above 1 ms | refused |");
    println!("|---|--:|--:|--:|--:|");
    crowd("in use", Quota::per_hour(1), Duration::ZERO);
    crowd(
        "idle",
        Quota::new(1, Duration::from_millis(1)),
        Duration::from_millis(50),
    );
    crowd(
        "idle one by one",
        Quota::new(1, Duration::from_millis(600)),
        Duration::ZERO,
    );
    println!("\n## Stats\n");
    println!("One thread calls each key, and another one reads the stats all the time.\n");
    println!(
        "| keys | stats, ms | ns a call | worst, us | above 1 ms | ns beside stats | worst, us | above 1 ms |"
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|");
    for keys in [1000, 10_000, 100_000, 1_000_000] {
        read_stats(keys);
    }
}

/// Measures how long it takes to read the stats of many keys, and what that costs calls beside it.
fn read_stats(keys: usize) {
    const READS: u32 = 20;
    // Each key keeps its state until the end of the measurement.
    let limiter = limiter(Quota::per_hour(5000), 2 * keys);
    for _ in 0..3 {
        Laps::run(&limiter, 0..keys);
    }
    let start = Instant::now();
    for _ in 0..READS {
        let stats = limiter.stats();
        let counted = stats.values().find(|(name, _)| *name == "keys");
        assert_eq!(counted, Some(("keys", keys as f64)));
    }
    let read = start.elapsed().as_secs_f64() * 1e3 / f64::from(READS);
    let alone = Laps::run(&limiter, 0..keys);
    let ends = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                std::hint::black_box(limiter.stats());
            }
        });
        let laps = Laps::run(&limiter, 0..keys);
        ends.store(true, Ordering::Relaxed);
        laps
    });
    println!("| {keys} | {read:.2} | {alone} | {beside} |");
}

fn limiter(quota: Quota, keys: usize) -> Limiter {
    let builder = RateLimitLayer::builder(quota)
        .max_keys(keys)
        .max_wait(Duration::ZERO);
    let builder = builder.store(Arc::new(MemoryStore::new(keys)));
    builder.build().expect("the settings make sense").limiter()
}

fn in_turn(quota: Quota, keys: usize, max_keys: usize) {
    let limiter = limiter(quota, max_keys);
    let mut laps = Laps::default();
    let used = allocation_counter::measure(|| laps = Laps::run(&limiter, 0..keys));
    let bytes = used.bytes_current as f64 / keys as f64;
    println!("| {quota} | {keys} | first | {laps} | {bytes:.0} |");
    let again = allocation_counter::measure(|| {
        for _ in 0..3 {
            laps = Laps::run(&limiter, 0..keys);
        }
    });
    let bytes = (used.bytes_current + again.bytes_current) as f64 / keys as f64;
    println!("| {quota} | {keys} | fourth | {laps} | {bytes:.0} |");
}

fn crowd(are: &str, quota: Quota, rest: Duration) {
    const KEYS: usize = 1_000_000;
    let limiter = limiter(quota, KEYS);
    Laps::run(&limiter, 0..KEYS);
    std::thread::sleep(rest);
    let laps = Laps::run(&limiter, KEYS..2 * KEYS);
    println!("| {are} | {laps} | {} |", laps.refused);
}

/// A call that took longer may have lost its core to another thread.
const MAY_HAVE_WAITED: Duration = Duration::from_micros(50);

/// Returns for how long this thread was ready to run and had no core, as Linux counts it. Zero on
/// other systems.
fn time_off_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = stat
        .split_whitespace()
        .nth(1)
        .and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// A lap: one call of each of some keys.
#[derive(Default)]
struct Laps {
    calls: usize,
    took: Duration,
    worst: Duration,
    long: usize,
    refused: usize,
}

impl Laps {
    fn run(limiter: &Limiter, keys: std::ops::Range<usize>) -> Laps {
        let mut laps = Laps {
            calls: keys.len(),
            ..Laps::default()
        };
        let start = Instant::now();
        let mut before = start;
        let mut off_cpu = time_off_cpu();
        for number in keys {
            let cx = &mut Context::from_waker(Waker::noop());
            let ended = pin!(limiter.acquire(Key::new(number.to_le_bytes()))).poll(cx);
            laps.refused += usize::from(!matches!(ended, Poll::Ready(Ok(_))));
            let mut now = Instant::now();
            let mut call = now - before;
            if call > MAY_HAVE_WAITED {
                let waited = std::mem::replace(&mut off_cpu, time_off_cpu());
                call = call.saturating_sub(off_cpu.saturating_sub(waited));
                now = Instant::now();
            }
            laps.worst = laps.worst.max(call);
            laps.long += usize::from(call > Duration::from_millis(1));
            before = now;
        }
        laps.took = start.elapsed();
        laps
    }
}

impl std::fmt::Display for Laps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nanos = self.took.as_nanos() as f64 / self.calls as f64;
        let worst = self.worst.as_secs_f64() * 1e6;
        write!(f, "{nanos:.0} | {worst:.0} | {}", self.long)
    }
}
