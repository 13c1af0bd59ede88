//! Redis loses its state, or its clock steps: the limit is kept, and calls flow again.

use anyhow::ensure;
use fleet::{Arrivals, Fleet, Options, Outcome, Report, by_grant};

use super::*;

fn per_half_second(log: &Log) -> Vec<u64> {
    log.per(ms(500))
        .into_iter()
        .map(|tally| tally.all())
        .collect()
}

/// Runs four processes behind 100 a second, calls `act` on Redis after two seconds, and checks that
/// calls flow four seconds later. Gives the reports to `check`.
fn after(
    what: &str,
    site: impl Fn() -> Site,
    act: impl Fn(&mut RedisServer),
    check: impl Fn(&[Report]),
) {
    once_in_three(|| look_after(what, site(), &act, &check));
}

fn look_after(
    what: &str,
    mut site: Site,
    act: impl Fn(&mut RedisServer),
    check: impl Fn(&[Report]),
) -> anyhow::Result<()> {
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
    let failed: usize = reports
        .iter()
        .map(|report| report.of(Outcome::StoreFailed).count())
        .sum();
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
    check(&reports);
    ensure!(before >= 25, "{before} calls in the two seconds before");
    ensure!(
        again >= 50,
        "{again} calls in two seconds, four seconds later"
    );
    Ok(())
}

#[test]
fn redis_is_killed_and_started_again() {
    let _turn = turn_beside_others();
    let restart = |redis: &mut RedisServer| {
        redis.kill();
        // Longer than a window, so that processes call the store meanwhile.
        sleep(ms(1100));
        redis.restart().unwrap();
    };
    after("killed and started", Site::new, restart, |reports| {
        let failed = reports
            .iter()
            .any(|report| report.of(Outcome::StoreFailed).count() > 0);
        assert!(failed, "calls fail while Redis is unreachable");
    });
}

/// Two or more processes behind one limit. The first takes each slot as soon as it is free. Each of
/// the others books the whole window behind those already booked.
struct InAdvance {
    site: Site,
    fleets: Vec<Fleet>,
}

/// A process that loses Redis reconnects within a second. The windows are longer, so that no
/// process has had the next slots by then.
const AHEAD: &str = "10/3s";

impl InAdvance {
    fn new(redis: RedisServer, processes: usize, span: Duration) -> InAdvance {
        let site = Site {
            redis,
            upstream: Upstream::open(),
        };
        let later = Options {
            quota: AHEAD.into(),
            tasks: 10,
            arrivals: Arrivals::Once,
            span,
            // A store call that times out on a busy machine books nothing.
            store_timeout: ms(5000),
            ..Options::default()
        };
        let eager = Options {
            arrivals: Arrivals::Every(ms(5)),
            max_wait: ms(0),
            ..later.clone()
        };
        let options = std::iter::once(&eager).chain(std::iter::repeat_n(&later, processes - 1));
        let fleets = options.map(|options| site.start(1, options)).collect();
        InAdvance { site, fleets }
    }

    /// Starts the processes one after the other, each when the process before it has its slots, and
    /// then calls `then`.
    fn go(&mut self, mut then: impl FnMut(usize, &RedisServer)) {
        let outsider = Outsider::new(&self.site.redis, AHEAD.parse().unwrap());
        let mut taken: Option<Instant> = None;
        for (number, fleet) in self.fleets.iter_mut().enumerate() {
            let start = Instant::now();
            fleet.go();
            let ahead = (ms(3000) + MARGIN) * number as u32;
            // If a slot is free, `next_slot` is now.
            let free_in =
                || outsider.peek().next_slot + taken.map_or(ms(0), |taken| taken.elapsed());
            while free_in() <= ahead {
                assert!(
                    start.elapsed() < ms(10_000),
                    "process {number} gets its slots"
                );
                sleep(ms(5));
            }
            taken.get_or_insert_with(Instant::now);
            then(number, &self.site.redis);
        }
    }

    fn finish(self) -> (Log, Vec<Report>) {
        let reports = self.fleets.into_iter().flat_map(Fleet::finish).collect();
        let log = self.site.upstream.log();
        println!(
            "{AHEAD}: {:?} calls in each half second",
            per_half_second(&log)
        );
        (log, reports)
    }
}

/// Redis loads a snapshot, or a replica that lags behind takes over: the latest grants are missing.
#[test]
fn redis_restarts_with_an_older_state() {
    let _turn = turn_beside_others();
    once_in_three(|| {
        let redis = RedisServer::with_options(&["--save", "3600 1"]).unwrap();
        let mut fleets = InAdvance::new(redis, 2, ms(12_000));
        fleets.go(|number, redis| {
            if number == 0 {
                let () = redis.command(&["SAVE"]);
            }
        });
        fleets.site.redis.restart().unwrap();
        let (log, reports) = fleets.finish();
        assert_never_over(&log, &AHEAD.parse().unwrap());
        // The first process may have had one or two of these slots. While the server starts, store
        // calls fail, and on a busy machine the start takes long.
        let granted = by_grant(&reports[1..]).len();
        ensure!(
            granted >= 8,
            "the second got its slots after the snapshot: {granted}, {:?}",
            reports[1].events
        );
        Ok(())
    });
}

#[test]
fn redis_forgets_everything() {
    let _turn = turn_beside_others();
    let flush = |redis: &mut RedisServer| redis.command(&["FLUSHALL"]);
    after("flushed", Site::new, flush, |_| ());
}

#[test]
fn redis_forgets_everything_and_its_scripts() {
    let _turn = turn_beside_others();
    let flush = |redis: &mut RedisServer| {
        let () = redis.command(&["SCRIPT", "FLUSH"]);
        redis.command(&["FLUSHALL"])
    };
    after("flushed with its scripts", Site::new, flush, |_| ());
}

/// A process whose slots lie further ahead than the recovery of the store reports them in time,
/// though nothing wakes it before.
#[test]
fn redis_forgets_slots_that_lie_far_ahead() {
    let _turn = turn_beside_others();
    let mut fleets = InAdvance::new(RedisServer::start().unwrap(), 3, ms(15_000));
    fleets.go(|_, _| ());
    // No process reports the second window, so the first process is served before the slots of the
    // third.
    fleets.fleets[1].kill(0);
    let () = fleets.site.redis.command(&["FLUSHALL"]);
    let (log, reports) = fleets.finish();
    assert_eq!(
        by_grant(&reports[2..]).len(),
        10,
        "the last got its slots before the store forgot them"
    );
    assert_never_over(&log, &AHEAD.parse().unwrap());
}

#[test]
fn redis_clock_steps_forwards() {
    let _turn = turn_beside_others();
    let step = |redis: &mut RedisServer| redis.step_clock(30).unwrap();
    after("+30 s", Site::with_stepping_clock, step, |_| ());
}

#[test]
fn redis_clock_steps_backwards() {
    let _turn = turn_beside_others();
    let step = |redis: &mut RedisServer| redis.step_clock(-30).unwrap();
    after("-30 s", Site::with_stepping_clock, step, |_| ());
}

#[test]
fn redis_clock_is_corrected_by_one_second() {
    let _turn = turn_beside_others();
    let step = |redis: &mut RedisServer| redis.step_clock(1).unwrap();
    after("+1 s", Site::with_stepping_clock, step, |_| ());
}
