//! Redis loses its state, or its clock steps: nobody goes over, and calls flow again.

use fleet::{Arrivals, Fleet, Options, Outcome, Report, by_grant};

use super::*;

fn per_half_second(log: &Log) -> Vec<u64> {
    log.per(ms(500)).into_iter().map(|tally| tally.all()).collect()
}

/// Runs four processes behind 100 a second, does something to Redis after two seconds, and looks whether calls flow
/// after four more.
fn after(what: &str, mut site: Site, act: impl FnOnce(&mut RedisServer)) -> Vec<Report> {
    let options = Options {
        quota: "100/1s".into(),
        tasks: 60,
        span: ms(9500),
        max_wait: ms(2000),
        ..Options::default()
    };
    let mut fleet = site.start(4, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(2300));
    act(&mut site.redis);
    let done = Instant::now();
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    let failed: usize = reports.iter().map(|report| report.of(Outcome::StoreFailed).count()).sum();
    println!(
        "{what} after {:.1?}: {:?} calls in each second, longest silence {:.2?}, {failed} calls failed for the store; \
         jitter {:.1?}",
        done - start,
        per_second(&log),
        longest_silence(&log),
        log.jitter()
    );
    assert_never_over(&log, &options.quota.parse().unwrap());
    let before = between(&log, start, start + ms(2000));
    let again = between(&log, done + ms(4000), done + ms(6000));
    assert!(before >= 50, "{before} calls in the two seconds before");
    assert!(again >= 100, "{again} calls in two seconds, four seconds later");
    reports
}

#[test]
fn redis_is_killed_and_started_again() {
    let _turn = turn();
    let reports = after("killed and started", Site::new(), |redis| {
        redis.kill();
        sleep(ms(400));
        redis.restart().unwrap();
    });
    let failed = reports.iter().any(|report| report.of(Outcome::StoreFailed).count() > 0);
    assert!(failed, "who asks while it is away is told so");
}

/// A snapshot is loaded, or a replica that is behind takes over: what was granted since is not in it.
#[test]
fn redis_comes_back_with_an_older_state() {
    let _turn = turn();
    let redis = RedisServer::with_options(&["--save", "3600 1"]).unwrap();
    let mut site = Site { redis, upstream: Upstream::open() };
    let quota = "10/1s";
    let later = Options {
        quota: quota.into(),
        tasks: 10,
        arrivals: Arrivals::Once,
        span: ms(3000),
        ..Options::default()
    };
    let eager = Options { arrivals: Arrivals::Every(ms(5)), max_wait: ms(0), ..later.clone() };
    let mut fleets = [&eager, &later].map(|options| site.start(1, options));
    let start = Instant::now();
    fleets[0].go();
    wait_until(start, ms(200));
    let () = site.redis.command(&["SAVE"]);
    // The second takes all of the next window.
    fleets[1].go();
    wait_until(start, ms(400));
    site.redis.restart().unwrap();
    let reports: Vec<_> = fleets.into_iter().flat_map(Fleet::finish).collect();
    let log = site.upstream.log();
    println!("10/1s, an older state: {:?} calls in each half second", per_half_second(&log));
    // The first may have had one or two of them.
    let granted = by_grant(&reports[1..]).len();
    assert!(granted >= 8, "the second got its slots after the snapshot: {granted}");
    assert_never_over(&log, &quota.parse().unwrap());
}

#[test]
fn redis_forgets_everything() {
    let _turn = turn();
    after("flushed", Site::new(), |redis| redis.command(&["FLUSHALL"]));
}

#[test]
fn redis_forgets_everything_and_its_scripts() {
    let _turn = turn();
    after("flushed with its scripts", Site::new(), |redis| {
        let () = redis.command(&["SCRIPT", "FLUSH"]);
        redis.command(&["FLUSHALL"])
    });
}

/// Those whose slots lie further ahead than the store learns tell of them in time, though nothing wakes them before.
#[test]
fn redis_forgets_slots_that_lie_far_ahead() {
    let _turn = turn();
    let site = Site::new();
    let quota = "10/1s";
    let later = Options {
        quota: quota.into(),
        tasks: 10,
        arrivals: Arrivals::Once,
        span: ms(4000),
        ..Options::default()
    };
    let eager = Options { arrivals: Arrivals::Every(ms(5)), max_wait: ms(0), ..later.clone() };
    let mut fleets = [&eager, &later, &later].map(|options| site.start(1, options));
    let start = Instant::now();
    // The first takes what is free now, the second all of the window after that, the last all of the one behind it.
    for (fleet, at) in fleets.iter_mut().zip([0, 200, 400]) {
        wait_until(start, ms(at));
        fleet.go();
    }
    wait_until(start, ms(600));
    // Nobody tells of the second window, so that the first process is served before the third one's slots.
    fleets[1].kill(0);
    let () = site.redis.command(&["FLUSHALL"]);
    let reports: Vec<_> = fleets.into_iter().flat_map(Fleet::finish).collect();
    let log = site.upstream.log();
    println!("10/1s, flushed: {:?} calls in each half second", per_half_second(&log));
    assert_eq!(by_grant(&reports[2..]).len(), 10, "the last got its slots before the store forgot them");
    assert_never_over(&log, &quota.parse().unwrap());
}

#[test]
fn the_clock_of_redis_steps_forwards() {
    let _turn = turn();
    after("+30 s", Site::with_stepping_clock(), |redis| redis.step_clock(30).unwrap());
}

#[test]
fn the_clock_of_redis_steps_backwards() {
    let _turn = turn();
    after("-30 s", Site::with_stepping_clock(), |redis| redis.step_clock(-30).unwrap());
}

#[test]
fn the_clock_of_redis_is_corrected_by_little() {
    let _turn = turn();
    after("+1 s", Site::with_stepping_clock(), |redis| redis.step_clock(1).unwrap());
}
