//! Redis is unreachable: calls pass uncounted or are refused, as configured, and in time.

use anyhow::ensure;
use fleet::{Arrivals, Event, Options, Outcome, now, percentile};

use super::*;

const STORE_TIMEOUT: Duration = Duration::from_millis(250);

/// What a busy machine may add to a wait. Calls that wait for Redis itself mostly wait for longer.
const NOISE: Duration = Duration::from_millis(750);

/// The moments of the outage, by the clock of the workers.
struct Moments {
    away: u64,
    /// When Redis began to recover.
    back: u64,
    /// When Redis was reachable again.
    well: u64,
}

impl Moments {
    /// Returns the calls that arrived while Redis was unreachable.
    fn during<'a>(&self, events: &'a [Event]) -> Vec<&'a Event> {
        let grace = 20_000_000;
        events
            .iter()
            .filter(|event| (self.away + grace..self.back).contains(&event.asked))
            .collect()
    }

    /// Returns the calls of [`during`](Moments::during) that ended before Redis recovered. Calls of
    /// the first window and its margin are left out: for that time a process may have permits at
    /// hand, or know without a store call that no slot is free.
    fn blind<'a>(&self, events: &'a [Event]) -> Vec<&'a Event> {
        let from = self.away + 1_050_000_000;
        events
            .iter()
            .filter(|event| event.asked > from && event.ended < self.back)
            .collect()
    }

    /// Returns the calls that arrived long enough after the recovery.
    fn after<'a>(&self, events: &'a [Event]) -> Vec<&'a Event> {
        events
            .iter()
            .filter(|event| event.asked > self.well + 3_000_000_000)
            .collect()
    }
}

/// Runs two processes behind 10 a second, called 50 times a second, that never wait. Redis is
/// unreachable from 1.5 s to 4 s.
fn run(
    fail_open: bool,
    leave: impl FnOnce(&mut RedisServer),
    come_back: impl FnOnce(&mut RedisServer),
) -> (Log, Vec<Event>, Moments) {
    let mut site = Site::new();
    let options = Options {
        quota: "10/1s".into(),
        arrivals: Arrivals::Every(ms(40)),
        span: ms(9500),
        max_wait: ms(0),
        store_timeout: STORE_TIMEOUT,
        fail_open,
        ..Options::default()
    };
    let mut fleet = site.start(2, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(1500));
    leave(&mut site.redis);
    let away = now();
    wait_until(start, ms(4000));
    let back = now();
    come_back(&mut site.redis);
    let well = now();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let events = reports
        .iter()
        .flat_map(|report| report.events.clone())
        .collect();
    (site.upstream.log(), events, Moments { away, back, well })
}

fn slowest(events: &[&Event]) -> [Duration; 2] {
    let mut waits: Vec<_> = events.iter().map(|event| event.waited()).collect();
    waits.sort_unstable();
    [0.5, 1.0].map(|share| percentile(&waits, share))
}

fn check(
    what: &str,
    fail_open: bool,
    leave: impl FnOnce(&mut RedisServer),
    come_back: impl FnOnce(&mut RedisServer),
) {
    let _turn = turn_beside_others();
    let (log, events, moments) = run(fail_open, leave, come_back);
    let (during, blind) = (moments.during(&events), moments.blind(&events));
    let count = |events: &[&Event], outcome| {
        events
            .iter()
            .filter(|event| event.outcome == outcome)
            .count()
    };
    let [half, all] = slowest(&during);
    println!(
        "{what}, fail_open {fail_open}: {:?} calls in each second; of {} calls meanwhile {} passed and {} failed because \
         of the store, p50 {half:.2?}, the slowest {all:.1?}",
        per_second(&log),
        during.len(),
        count(&during, Outcome::Granted),
        count(&during, Outcome::StoreFailed)
    );
    let expected = if fail_open {
        Outcome::Granted
    } else {
        Outcome::StoreFailed
    };
    assert!(blind.len() >= 20, "{} asked meanwhile", blind.len());
    let others = blind.len() - count(&blind, expected);
    assert_eq!(others, 0, "of {} some ended otherwise", blind.len());
    assert!(all <= STORE_TIMEOUT + NOISE, "{all:?} at the gate");
    let after = moments.after(&events);
    assert_eq!(
        count(&after, Outcome::StoreFailed),
        0,
        "the store is asked again"
    );
    assert!(count(&after, Outcome::Granted) >= 5, "calls flow again");
    assert!(count(&after, Outcome::Refused) > 0, "and are counted again");
    let quota = "10/1s".parse().unwrap();
    if !fail_open {
        assert_never_over(&log, &quota);
    }
    let report = fleet::Report {
        events: after.into_iter().cloned().collect(),
        ..Default::default()
    };
    assert_never_over(&fleet::log(&[report]), &quota);
}

fn kill(redis: &mut RedisServer) {
    redis.kill();
}

fn start(redis: &mut RedisServer) {
    redis.restart().unwrap();
}

fn pause(redis: &mut RedisServer) {
    redis.pause();
}

fn resume(redis: &mut RedisServer) {
    redis.resume();
}

#[test]
fn calls_pass_while_redis_is_killed() {
    check("killed", true, kill, start);
}

#[test]
fn calls_are_refused_while_redis_is_killed() {
    check("killed", false, kill, start);
}

#[test]
fn calls_pass_while_redis_does_not_answer() {
    check("stopped", true, pause, resume);
}

#[test]
fn calls_are_refused_while_redis_does_not_answer() {
    check("stopped", false, pause, resume);
}

/// Each process's fallback share is what it was granted before. The shares together are no more
/// than the limit, except in the windows in which Redis is lost, or comes back: grants of Redis and of
/// the shares may both fall into them.
fn go_on_with_shares(
    what: &str,
    leave: impl Fn(&mut RedisServer),
    come_back: impl Fn(&mut RedisServer),
) {
    let _turn = turn_beside_others();
    once_in_three(|| look_at_shares(what, &leave, &come_back));
}

fn look_at_shares(
    what: &str,
    leave: impl Fn(&mut RedisServer),
    come_back: impl Fn(&mut RedisServer),
) -> anyhow::Result<()> {
    let mut site = Site::new();
    let options = Options {
        quota: "100/1s".into(),
        tasks: 16,
        span: ms(17_000),
        store_timeout: STORE_TIMEOUT,
        share: 0.25,
        ..Options::default()
    };
    let quota = options.quota.parse().unwrap();
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(4000));
    leave(&mut site.redis);
    let away = wait_until(start, ms(4000));
    let back = wait_until(start, ms(8500));
    come_back(&mut site.redis);
    let reports = fleet.finish();
    let log = site.upstream.log();
    assert_all_ended(&reports);
    let told = |report: &fleet::Report| {
        report
            .warnings
            .iter()
            .any(|warning| warning.contains("uses its fallback share"))
    };
    assert!(
        reports.iter().all(told),
        "each process warns that it uses its fallback share"
    );
    let failed = reports
        .iter()
        .flat_map(|report| report.of(Outcome::StoreFailed))
        .count();
    let meanwhile = between(&log, away + ms(1500), back);
    let most = log.largest_count_sent(ms(1000));
    let alone = part(&log, away + ms(1500), back);
    let after = part(&log, back + ms(3500), Instant::now());
    println!(
        "{what}, 4 processes with shares: {:?} calls in each second; {meanwhile} of {} from 1.5 s after it was lost until it \
         was back; at most {most} in a second, {} from 3.5 s after it was back on; {failed} calls failed because of the store",
        per_second(&log),
        allowed(&quota, ms(3000)),
        after.largest_count_sent(ms(1000))
    );
    assert!(most <= 200, "{most} in the second in which it was lost");
    assert_never_over(&alone, &quota);
    assert_never_over(&after, &quota);
    ensure!(meanwhile >= 150, "{meanwhile}: most of the limit is used");
    let last = between(&log, start + ms(15_000), start + ms(16_500));
    ensure!(
        last >= 100,
        "{last} in a second and a half: all of it is back"
    );
    Ok(())
}

#[test]
fn processes_use_fallback_shares_while_redis_is_killed() {
    go_on_with_shares("killed", kill, start);
}

#[test]
fn processes_use_fallback_shares_while_redis_does_not_answer() {
    go_on_with_shares("stopped", pause, resume);
}
