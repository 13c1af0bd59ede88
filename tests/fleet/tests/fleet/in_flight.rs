//! Calls in flight: never more at the upstream than the limit, whatever happens, and all slots are
//! used.

use fleet::{Options, Outcome, percentile, store_calls};
use upstream::Arrival;

use super::*;

const MOST: usize = 8;

/// How long a call takes.
const CALL: Duration = ms(50);

/// The `in_flight_ttl` of tests that wait until claims expire.
const LIFE: Duration = ms(1500);

fn site(redis: RedisServer, latency: Duration) -> Site {
    Site {
        redis,
        upstream: Upstream::open().latency(latency),
    }
}

/// Returns what the upstream saw until the first process reached the end of its span. At that
/// moment calls are dropped: their slots are free at once, and the upstream notices a moment later.
fn seen(site: &Site, start: Instant, span: Duration) -> Log {
    let log = site.upstream.log();
    part(&log, start, start + span)
}

fn options(tasks: usize, span: Duration) -> Options {
    let store_timeout = ms(1000); // no call fails because the machine is busy
    Options {
        quota: "8 in flight".into(),
        tasks,
        span,
        life: LIFE,
        store_timeout,
        ..Options::default()
    }
}

fn lost(reports: &[Report]) -> usize {
    let failed = reports
        .iter()
        .flat_map(|report| report.of(Outcome::StoreFailed));
    failed
        .filter(|event| event.text.contains("cancelled ("))
        .count()
}

fn failed(reports: &[Report]) -> usize {
    reports
        .iter()
        .map(|report| report.of(Outcome::StoreFailed).count())
        .sum()
}

/// Returns the fraction of `MOST` that was used, by the times that the upstream measured.
fn used(log: &Log) -> f64 {
    let (Some(first), Some(last)) = (log.first(), log.last()) else {
        return 0.0;
    };
    let span = (last.at - first.at).as_secs_f64();
    log.len() as f64 * log.mean_time().as_secs_f64() / (MOST as f64 * span)
}

fn assert_at_once(log: &Log, what: &str) {
    let most = log.most_at_once();
    assert!(most <= MOST, "{what}: {most} at the same time");
}

fn steady(processes: usize, tasks: usize, quota: &str) -> Log {
    let _turn = busy_turn();
    let site = site(RedisServer::start().unwrap(), CALL);
    let options = Options {
        quota: quota.into(),
        ..options(tasks, ms(8000))
    };
    let mut fleet = site.start(processes, &options);
    let calls_before = store_calls(&site.redis);
    let start = Instant::now();
    fleet.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = seen(&site, start, options.span);
    let asked = (store_calls(&site.redis) - calls_before) as f64 / log.len() as f64;
    let steady = part(&log, log[0].at + ms(1000), log[0].at + ms(7000));
    let mut waits: Vec<_> = fleet::by_grant(&reports)
        .iter()
        .map(|event| event.waited())
        .collect();
    waits.sort_unstable();
    let served = log.by_who();
    println!(
        "{quota}, {processes} processes with {tasks} tasks each: at most {} at once; {:.1} calls a second of {:.0}, {:.1} % \
         of the slots used (a call takes {:.1?}); {asked:.2} store calls for each; waits p50 {:.1?} p99 {:.1?}; each \
         process had {:?} to {:?} calls",
        log.most_at_once(),
        steady.len() as f64 / 6.0,
        MOST as f64 / CALL.as_secs_f64(),
        100.0 * used(&steady),
        steady.mean_time(),
        percentile(&waits, 0.5),
        percentile(&waits, 0.99),
        served.values().map(|tally| tally.all()).min(),
        served.values().map(|tally| tally.all()).max(),
    );
    assert_at_once(&log, quota);
    figure(failed(&reports) == 0, "calls failed for the store");
    log
}

#[test]
fn eight_in_flight_by_4_processes() {
    let log = steady(4, 16, "8 in flight");
    assert_eq!(log.most_at_once(), MOST, "all slots are used");
}

#[test]
fn in_flight_limit_and_rate_limit_by_4_processes() {
    let log = steady(4, 16, "100/1s, 8 in flight");
    assert_never_over(&log, &"100/1s".parse().unwrap());
    assert!(log.len() >= 300, "{} calls in eight seconds", log.len());
}

#[test]
fn processes_that_never_wait_find_free_slots() {
    let _turn = busy_turn();
    let site = site(RedisServer::start().unwrap(), CALL);
    let options = Options {
        max_wait: ms(0),
        pause: ms(10),
        ..options(8, ms(5000))
    };
    let mut fleet = site.start(4, &options);
    let calls_before = store_calls(&site.redis);
    let start = Instant::now();
    fleet.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = seen(&site, start, options.span);
    let refused: Vec<_> = reports
        .iter()
        .flat_map(|report| report.of(Outcome::Refused))
        .collect();
    let mut waits: Vec<_> = refused.iter().map(|event| event.waited()).collect();
    waits.sort_unstable();
    println!(
        "8 in flight, 4 processes that never wait: {} calls, {:.1} % of the slots used; {} refused after p50 {:.1?} p99 \
         {:.1?} max {:.1?}; {} store calls",
        log.len(),
        100.0 * used(&log),
        refused.len(),
        percentile(&waits, 0.5),
        percentile(&waits, 0.99),
        percentile(&waits, 1.0),
        store_calls(&site.redis) - calls_before,
    );
    assert_at_once(&log, "never waiting");
    assert!(log.len() >= 200, "{} calls in five seconds", log.len());
}

#[test]
fn in_flight_slots_of_a_killed_process_come_back() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), ms(300));
    let options = options(8, ms(9000));
    let mut fleet = site.start(3, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(3100));
    fleet.kill(0);
    let killed = Instant::now();
    let reports = fleet.finish();
    assert_all_ended(&reports[1..]);
    let log = seen(&site, start, options.span);
    // The number of calls in flight at a moment.
    let at_once = |at: Instant| {
        log.iter()
            .filter(|call| call.at <= at && call.ended.is_none_or(|end| end > at))
            .count()
    };
    // The calls whose connections were closed before the response.
    let cut = |call: &&upstream::Arrival| call.ended.is_some_and(|end| end < call.at + ms(300));
    let held = log
        .iter()
        .filter(|call| call.who.as_deref() == Some("0"))
        .filter(cut)
        .count();
    let back = log
        .iter()
        .map(|call| call.at)
        .find(|&at| at > killed + ms(10) && at_once(at) == MOST);
    println!(
        "killed with {held} slots: all are used again {:.2?} later; a claim is valid for {LIFE:?}",
        back.map(|back| back - killed)
    );
    assert_at_once(&log, "killed");
    assert!(back.is_some(), "all slots are used again");
}

/// Runs three processes, and stops the first at 2 s for `span`.
fn stopped(span: Duration, life: Duration) -> (Log, Vec<Report>, Instant) {
    let site = site(RedisServer::start().unwrap(), CALL);
    let options = Options {
        life,
        ..options(8, ms(4700) + span)
    };
    let mut fleet = site.start(3, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(2000));
    fleet.pause(0);
    wait_until(start, ms(2000) + span);
    // The process may continue before the next line runs.
    let resumed = Instant::now();
    fleet.resume(0);
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = seen(&site, start, options.span);
    let after = part(&log, resumed + ms(1000), resumed + ms(2500));
    println!(
        "one stopped for {span:?}, its claims are valid for {life:?}: at most {} at once; {:?} calls in each second; {:.1} % of the slots used a second after; \
         {} calls were cancelled",
        log.most_at_once(),
        per_second(&log),
        100.0 * used(&after),
        lost(&reports),
    );
    assert!(
        after.len() >= 30,
        "{} calls in a second and a half",
        after.len()
    );
    (log, reports, resumed)
}

#[test]
fn process_stopped_within_in_flight_ttl_keeps_its_slots() {
    let _turn = turn_beside_others();
    let (log, reports, _) = stopped(ms(800), LIFE);
    assert_at_once(&log, "stopped");
    assert_eq!(lost(&reports), 0);
}

#[test]
fn process_stopped_beyond_in_flight_ttl_gets_new_slots() {
    let _turn = turn_beside_others();
    let rounds = histories::cases(1);
    let life = ms(600);
    for _ in 0..rounds {
        for span in [life * 6 / 5, life * 2, life * 10]
            .into_iter()
            .take(if rounds > 1 { 3 } else { 2 })
        {
            let (log, _, resumed) = stopped(span, life);
            // A call that was about to be written when the process was stopped is a documented
            // exception.
            let late = |call: &Arrival| {
                let of_stopped = call.who.as_deref() == Some("0") && call.at >= resumed;
                of_stopped && call.sent.is_some_and(|sent| sent < resumed)
            };
            let all = log.iter().filter(|call| !late(call)).cloned();
            assert_at_once(&Log::from(all.collect::<Vec<_>>()), "all the time");
            let again = part(&log, resumed + ms(1000), resumed + ms(10_000));
            assert!(again.by_who().contains_key("0"), "it is served again");
        }
    }
}

#[test]
fn process_stopped_beyond_in_flight_ttl_cancels_its_calls() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), ms(5000));
    let options = |who: &str| Options {
        who: who.into(),
        ..options(MOST, ms(9000))
    };
    let (mut stopped, mut other) = (
        site.start(1, &options("stopped")),
        site.start(1, &options("other")),
    );
    let start = Instant::now();
    stopped.go();
    wait_until(start, ms(500));
    other.go();
    wait_until(start, ms(1000));
    assert_eq!(
        site.upstream.log().by_who().len(),
        1,
        "the first process has all slots"
    );
    stopped.pause(0);
    wait_until(start, ms(4000));
    let resumed = Instant::now();
    stopped.resume(0);
    let reports = [stopped.finish(), other.finish()].concat();
    assert_all_ended(&reports);
    let log = seen(&site, start, ms(9000));
    let ended = log
        .iter()
        .filter(|call| call.who.as_deref() == Some("stopped0"))
        .filter_map(|call| call.ended);
    println!(
        "stopped for 3 s with 8 calls of 5 s: at most {} at once; {} of them cancelled; the last ends {:.1?} after the process \
         continues",
        log.most_at_once(),
        lost(&reports),
        ended
            .filter(|end| *end < start + ms(5000))
            .max()
            .map(|end| end.saturating_duration_since(resumed)),
    );
    assert!(
        log.by_who().contains_key("other0"),
        "the other process gets the slots"
    );
    assert_eq!(lost(&reports[..1]), MOST);
    // The calls of a stopped process stay open at the server until it continues: a documented
    // exception.
    let after = log
        .iter()
        .filter(|call| call.ended.is_none_or(|end| end > resumed + ms(500)));
    assert_at_once(
        &Log::from(after.cloned().collect::<Vec<_>>()),
        "half a second after it continues",
    );
}

/// The result of a disturbed fleet, and when it was disturbed.
struct Disturbed {
    log: Log,
    reports: Vec<Report>,
    start: Instant,
    done: Instant,
}

/// Runs four processes, and calls `act` on Redis after three seconds.
fn disturb(mut site: Site, options: &Options, act: impl FnOnce(&mut RedisServer)) -> Disturbed {
    let mut fleet = site.start(4, options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(3000));
    act(&mut site.redis);
    let done = Instant::now();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = seen(&site, start, options.span);
    Disturbed {
        log,
        reports,
        start,
        done,
    }
}

/// Runs the same, and checks that calls go on as before.
fn after(
    what: &str,
    site: Site,
    options: &Options,
    act: impl FnOnce(&mut RedisServer),
) -> Vec<Report> {
    let Disturbed {
        log,
        reports,
        start,
        done,
    } = disturb(site, options, act);
    let steady = part(&log, done + ms(4000), done + ms(6000));
    println!(
        "{what}, after {:.1?}: at most {} at once; {:?} calls in each second, longest silence {:.2?}; {:.1} % of the slots \
         used four seconds later; {} calls failed for the store, {} of them were cancelled",
        done - start,
        log.most_at_once(),
        per_second(&log),
        longest_silence(&log),
        100.0 * used(&steady),
        failed(&reports),
        lost(&reports),
    );
    assert_at_once(&log, what);
    assert!(!steady.is_empty(), "no call, four seconds later");
    figure(
        steady.len() >= 100,
        "less than 100 calls in two seconds, four seconds later",
    );
    reports
}

fn disturbed() -> Options {
    options(8, ms(10_000))
}

#[test]
fn redis_forgets_calls_in_flight() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), CALL);
    let reports = after("flushed", site, &disturbed(), |redis| {
        redis.command(&["FLUSHALL"])
    });
    figure(failed(&reports) == 0, "calls failed for the store");
}

#[test]
fn redis_forgets_calls_in_flight_and_its_scripts() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), CALL);
    after("flushed with its scripts", site, &disturbed(), |redis| {
        let () = redis.command(&["SCRIPT", "FLUSH"]);
        redis.command(&["FLUSHALL"])
    });
}

#[test]
fn redis_restarts_while_calls_are_in_flight() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), ms(200));
    let options = Options {
        life: ms(10_000),
        ..disturbed()
    };
    let reports = after_slow("restarted", site, &options, |redis| {
        redis.restart().unwrap()
    });
    assert_eq!(lost(&reports), 0, "the in-flight TTL is longer");
}

#[test]
fn redis_outage_within_in_flight_ttl_keeps_the_limit() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), CALL);
    let reports = after("killed for 700 ms", site, &disturbed(), |redis| {
        redis.kill();
        sleep(ms(700));
        redis.restart().unwrap();
    });
    assert!(
        failed(&reports) > 0,
        "calls fail while Redis is unreachable"
    );
}

#[test]
fn redis_outage_beyond_in_flight_ttl_cancels_calls() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), ms(2500));
    let options = Options {
        life: ms(1000),
        ..disturbed()
    };
    let reports = after_slow("killed for 2 s", site, &options, |redis| {
        redis.kill();
        sleep(ms(2000));
        redis.restart().unwrap();
    });
    assert!(lost(&reports) > 0, "calls in flight are cancelled");
}

/// Runs the same with a slow upstream, and checks only that the limit is kept and that calls go on.
fn after_slow(
    what: &str,
    site: Site,
    options: &Options,
    act: impl FnOnce(&mut RedisServer),
) -> Vec<Report> {
    let Disturbed {
        log, reports, done, ..
    } = disturb(site, options, act);
    println!(
        "{what}, a call takes {:.1?}: at most {} at once; {:?} calls in each second; {} calls failed for the store, {} of \
         them were cancelled",
        log.mean_time(),
        log.most_at_once(),
        per_second(&log),
        failed(&reports),
        lost(&reports),
    );
    assert_at_once(&log, what);
    assert!(between(&log, done, done + ms(7000)) > 0, "calls flow again");
    reports
}

#[test]
fn redis_clock_steps_forwards_while_calls_are_in_flight() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::with_stepping_clock().unwrap(), CALL);
    let reports = after("+30 s", site, &disturbed(), |redis| {
        redis.step_clock(30).unwrap()
    });
    assert_eq!(lost(&reports), 0);
}

#[test]
fn redis_clock_steps_backwards_while_calls_are_in_flight() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::with_stepping_clock().unwrap(), CALL);
    let reports = after("-30 s", site, &disturbed(), |redis| {
        redis.step_clock(-30).unwrap()
    });
    assert_eq!(lost(&reports), 0);
}

#[test]
fn upstream_slower_than_in_flight_ttl_sees_no_overrun() {
    let _turn = turn_beside_others();
    let site = site(RedisServer::start().unwrap(), ms(2500));
    let options = Options {
        life: ms(600),
        ..options(4, ms(8000))
    };
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = seen(&site, start, options.span);
    println!(
        "a call takes 2.5 s, a claim is valid for 600 ms: {} calls, at most {} at once",
        log.len(),
        log.most_at_once()
    );
    assert_at_once(&log, "slow");
    assert_eq!((log.most_at_once(), failed(&reports)), (MOST, 0));
    assert!(log.len() >= 2 * MOST, "{} calls", log.len());
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn eight_in_flight_by_16_processes() {
        let log = steady(16, 4, "8 in flight");
        assert_eq!(log.most_at_once(), MOST, "all slots are used");
    }
}
