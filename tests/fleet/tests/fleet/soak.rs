//! Random faults in Redis never let calls exceed the limit. The same check detects limiters that
//! are not exact. No call waits for longer than allowed, and every key in Redis has a time to live.
//!
//! `TOLLGATE_CASES=360` runs for an hour instead of ten seconds. `TOLLGATE_SEED` repeats the faults of
//! a run, but not the scheduling of its processes.

use anyhow::Context;
use fleet::{Fleet, INCR, MEMORY, Options, Outcome, keys_for_ever, longest_wait};

use super::*;

/// What stalls of the machine and outages of Redis may add to the longest wait.
const NOISE: Duration = Duration::from_secs(5);

/// A random number generator; its numbers follow from the seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % sides
    }
}

/// Causes one fault in Redis, and returns its description.
fn disturb(redis: &mut RedisServer, dice: &mut Dice) -> String {
    let span = 20 + dice.roll(700);
    match dice.roll(6) {
        0 => {
            redis.kill();
            sleep(ms(span));
            redis.restart().unwrap();
            format!("killed for {span} ms")
        }
        1 => {
            redis.restart().unwrap();
            "restarted".into()
        }
        2 | 3 => {
            redis.pause();
            sleep(ms(span));
            redis.resume();
            format!("stopped for {span} ms")
        }
        4 => {
            let () = redis.command(&["FLUSHALL"]);
            "flushed".into()
        }
        _ => {
            let () = redis.command(&["SCRIPT", "FLUSH"]);
            let _: i64 = redis.command(&["CLIENT", "KILL", "TYPE", "normal"]);
            "its scripts flushed and its clients thrown out".into()
        }
    }
}

/// Runs four processes through random faults, and returns how they exceeded the limit, if they did.
fn soak(what: &str, store: Option<&str>, span: Duration, calm: bool) -> Option<String> {
    println!("{what}: {}", histories::again());
    let mut dice = Dice(histories::seed() | 1);
    let mut site = Site::new();
    let url = site.redis.url();
    let store = store.map_or_else(|| url.clone(), |store| store.replace("URL", &url));
    let options = Options {
        quota: "50/1s".into(),
        store,
        url: site.upstream.url(),
        tasks: 16,
        span,
        ..Options::default()
    };
    let mut fleet = Fleet::start(WORKER, 4, &options);
    let start = Instant::now();
    fleet.go();
    let (mut happened, mut keys, mut for_ever) = (Vec::new(), 0, 0);
    let mut look = |redis: &RedisServer| {
        let (all, without) = keys_for_ever(redis);
        (keys, for_ever) = (keys + all, for_ever + without);
    };
    while !calm && start.elapsed() + ms(1000) < span {
        sleep(ms(200 + dice.roll(3000)).min(span.saturating_sub(start.elapsed())));
        // A fault may remove the keys, so they are counted first.
        look(&site.redis);
        happened.push(disturb(&mut site.redis, &mut dice));
    }
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    let granted: usize = reports
        .iter()
        .map(|report| report.of(Outcome::Granted).count())
        .sum();
    println!(
        "{what}: {happened:?}; {granted} calls, {:?} in each second",
        per_second(&log)
    );
    let oldest = longest_wait(&reports);
    look(&site.redis);
    println!(
        "{what}: {} faults in {span:?}, {granted} calls; the oldest waiter waited for {oldest:?}; of {keys} keys seen \
         between the faults and at the end {for_ever} were without a time to live",
        happened.len()
    );
    assert!(granted > 30, "{granted} calls");
    assert!(
        oldest <= options.max_wait + NOISE,
        "one waited for {oldest:?}"
    );
    assert_eq!(for_ever, 0, "keys without a time to live");
    over(&log, &options.quota.parse().unwrap())
}

#[test]
fn random_redis_faults_never_exceed_the_limit() {
    let _turn = turn_beside_others();
    let span = Duration::from_secs(histories::cases(10).into());
    assert_eq!(soak("soak", None, span, false), None);
}

/// Checks that calls exceed the limit. They may be too slow for that while the machine stalls.
fn exceeds(what: &str, store: &str, span: Duration) {
    once_in_three(|| {
        let over = soak(what, Some(store), span, true);
        println!("{}", over.context("it is never over")?);
        Ok(())
    });
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    /// Each process has its own counter.
    #[test]
    fn counter_in_each_process_exceeds_the_limit() {
        let _turn = turn_beside_others();
        exceeds("a counter in each process", MEMORY, ms(2000));
    }

    /// One counter in Redis for each second, as many programs write it.
    #[test]
    fn counter_for_each_second_exceeds_the_limit() {
        let _turn = turn_beside_others();
        exceeds(
            "a counter for each second",
            &format!("{INCR} URL"),
            ms(4000),
        );
    }
}
