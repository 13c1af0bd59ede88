//! An operator changes the quota of the fleet while it runs.

use anyhow::ensure;
use fleet::{Options, percentile};

use super::*;

const WINDOW: Duration = ms(1000);

/// How long a message may take to all processes on a calm machine, and what their calls on the way take.
const PUSH: Duration = ms(30);

/// How long that may take at all, besides what the machine stalls.
const LATEST: Duration = ms(200);

impl Outsider {
    /// Sets the quota of the fleet. Returns when the store had it.
    fn set_quota(&self, quota: &str) -> Instant {
        let set = self.limiter.set_quota(Key::ALL, quota.parse().unwrap());
        self.runtime.block_on(set).unwrap();
        Instant::now()
    }
}

fn options(span: Duration) -> Options {
    Options {
        quota: "100/1s".into(),
        tasks: 60,
        span,
        max_wait: ms(5000),
        ..Options::default()
    }
}

/// Returns the calls that were sent after `since` and made more than `count` within the window before
/// them: how long after `since` each was sent.
fn above(log: &Log, count: usize, since: Instant, until: Instant) -> Vec<Duration> {
    let mut sent: Vec<Instant> = log.iter().map(|arrival| arrival.sent.unwrap()).collect();
    sent.sort_unstable();
    let within = |at: Instant| {
        let before = sent.partition_point(|other| *other <= at);
        before - sent.partition_point(|other| *other + WINDOW <= at)
    };
    let late = sent.iter().filter(|at| **at > since && **at < until);
    let late = late.filter(|at| within(**at) > count);
    late.map(|at| *at - since).collect()
}

/// Returns how much of `count` a window was used in the two windows from `from` on.
fn used(log: &Log, count: usize, from: Instant) -> f64 {
    let calls = between(log, from, from + (WINDOW + MARGIN) * 2);
    calls as f64 / (2 * count) as f64
}

#[test]
fn a_set_quota_is_in_force_everywhere_at_once() {
    let _turn = turn_beside_others();
    once_in_three(changes_of_the_rate);
}

fn changes_of_the_rate() -> anyhow::Result<()> {
    let stalls = Stalls::watch();
    let site = Site::new();
    let options = Options {
        // Nobody gives up, so that the faster rate is wanted at once.
        max_wait: ms(20_000),
        ..options(ms(12_500))
    };
    let operator = Outsider::new(&site.redis, options.quota.parse()?);
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(3300));
    let slower = operator.set_quota("20/1s");
    wait_until(start, ms(7800));
    let faster = operator.set_quota("200/1s");
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    assert_never_over(&log, &"200/1s".parse()?);

    let late = above(&log, 20, slower, faster);
    let last = late.last().copied().unwrap_or_default();
    let rates = [
        used(&log, 100, start + ms(1200)),
        used(&log, 20, slower + WINDOW * 2),
        used(&log, 200, faster + WINDOW * 2),
    ];
    println!(
        "{} calls above the new rate, the last {last:.1?} after the change; used of 100, 20 and 200 a second: {:.1?} %; \
         in each second {:?}",
        late.len(),
        rates.map(|used| 100.0 * used),
        per_second(&log)
    );
    let latest = LATEST + stalls.worst();
    assert!(last < latest, "a call under the old rate after {last:?}");
    ensure!(last <= PUSH, "a call under the old rate after {last:?}");
    ensure!(rates.iter().all(|used| *used >= 0.85), "used {rates:?}");
    Ok(())
}

/// How soon each of many changes applies in all processes, while calls leave all the time.
#[test]
fn all_processes_follow_each_of_many_changes() {
    let _turn = turn_beside_others();
    once_in_three(many_changes);
}

fn many_changes() -> anyhow::Result<()> {
    const CHANGES: u32 = 50;
    const PHASE: Duration = ms(100);
    // Calls leave all the time, not once in a second.
    const FASTER: &str = "5/20ms, 500/1s";
    const SLOWER: &str = "5/20ms, 20/1s";
    let stalls = Stalls::watch();
    let site = Site::new();
    let options = Options {
        quota: FASTER.into(),
        ..options(ms(1000) + PHASE * 2 * CHANGES)
    };
    let operator = Outsider::new(&site.redis, options.quota.parse()?);
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    let mut asked = Vec::new();
    let mut slow = Vec::new();
    for change in 0..CHANGES {
        let begins = ms(600) + PHASE * 2 * change;
        wait_until(start, begins);
        asked.push(fleet::now());
        let slower = operator.set_quota(SLOWER);
        wait_until(start, begins + PHASE);
        asked.push(fleet::now());
        slow.push((slower, Instant::now()));
        operator.set_quota(FASTER);
    }
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    assert_never_over(&log, &FASTER.parse()?);
    // More than 20 leave in the faster phases of a second, so each call of a slower phase is above it.
    let last = |(slower, faster): &(Instant, Instant)| {
        let late = above(&log, 20, *slower, *faster);
        late.last().copied().unwrap_or_default()
    };
    let mut lasts: Vec<Duration> = slow.iter().map(last).collect();
    let mut pushes = Vec::new();
    for report in &reports {
        let learned = report.quotas.len();
        ensure!(learned == asked.len(), "learned of {learned} changes");
        let of = |(learned, asked): (&u64, &u64)| Duration::from_nanos(learned - asked);
        pushes.extend(report.quotas.iter().zip(&asked).map(of));
    }
    lasts.sort_unstable();
    pushes.sort_unstable();
    let [half, most] = [0.5, 0.99].map(|share| percentile(&pushes, share));
    let worst = lasts[lasts.len() - 1];
    println!(
        "{} processes learned of a change within {half:.1?} (p50), {most:.1?} (p99), {:.1?} (worst); the last \
         call under the old rate {:.1?} (p50), {worst:.1?} (worst) after a change; {} calls",
        pushes.len(),
        pushes[pushes.len() - 1],
        percentile(&lasts, 0.5),
        log.len(),
    );
    let latest = LATEST + stalls.worst();
    assert!(worst < latest, "a call under the old rate after {worst:?}");
    ensure!(
        most <= ms(20),
        "a process learned of a change after {most:?}"
    );
    ensure!(worst <= PUSH, "a call under the old rate after {worst:?}");
    Ok(())
}

#[test]
fn a_set_quota_outlives_all_processes() {
    let _turn = turn_beside_others();
    let site = Site::new();
    let options = Options {
        // What killed processes have booked is lost.
        max_wait: ms(1000),
        ..options(ms(3000))
    };
    let operator = Outsider::new(&site.redis, options.quota.parse().unwrap());
    let mut fleet = site.start(2, &options);
    fleet.go();
    sleep(ms(1200));
    let set = operator.set_quota("20/1s");
    sleep(ms(300));
    fleet.kill(0);
    fleet.kill(1);
    drop(fleet);
    drop(operator);
    sleep(ms(3000));
    let mut fleet = site.start(2, &options);
    fleet.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    let late = above(&log, 20, set + PUSH, Instant::now());
    let at_last = above(&log, 20, set + WINDOW * 2, Instant::now());
    let calls = between(&log, set + ms(3000), Instant::now());
    println!(
        "{calls} calls of new processes; in each second {:?}",
        per_second(&log)
    );
    assert!(at_last.is_empty(), "calls above the set quota: {at_last:?}");
    figure(
        late.is_empty(),
        &format!("calls above the set quota: {late:?}"),
    );
    assert!(calls > 0, "no calls of new processes");
    figure(calls >= 30, &format!("{calls} calls of new processes"));
}

#[test]
fn one_survivor_tells_a_redis_that_lost_its_data() {
    let _turn = turn_beside_others();
    let site = Site::new();
    let operator = Outsider::new(&site.redis, "100/1s".parse().unwrap());
    let mut survivor = site.start(1, &options(ms(9000)));
    let mut others = site.start(3, &options(ms(9000)));
    survivor.go();
    others.go();
    sleep(ms(1200));
    let set = operator.set_quota("20/1s");
    drop(operator);
    sleep(ms(1200));
    (0..3).for_each(|number| others.kill(number));
    drop(others);
    let () = site.redis.command(&["FLUSHALL"]);
    let lost = Instant::now();
    let mut new = site.start(3, &options(ms(4500)));
    new.go();
    let mut reports = new.finish();
    reports.extend(survivor.finish());
    assert_all_ended(&reports);
    let log = site.upstream.log();
    let until_lost = above(&log, 20, set + PUSH, lost);
    figure(
        until_lost.is_empty(),
        &format!("calls above: {until_lost:?}"),
    );
    // New processes know of no quota, until the survivor calls: within a window.
    let late = above(&log, 20, lost + WINDOW * 2, Instant::now());
    let calls = between(&log, lost + ms(3000), Instant::now());
    println!(
        "{calls} calls from 3 s after the loss on; in each second {:?}",
        per_second(&log)
    );
    assert!(late.is_empty(), "calls above the set quota: {late:?}");
    assert!(calls >= 20, "{calls} calls after the loss");
}
