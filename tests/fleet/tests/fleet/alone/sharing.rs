//! What a slot costs the store, and which process gets it.

use std::time::Duration;

use anyhow::ensure;
use fleet::{
    Arrivals, Event, Fleet, MEMORY, Options, Report, by_grant, lateness, now, overtaken,
    percentile, store_calls,
};
use redis_server::RedisServer;

use super::*;

/// How much earlier a caller of another process may arrive and still be overtaken: the batching
/// delay of a store call, and the time that the call takes.
const GRACE: Duration = Duration::from_millis(20);

/// What a stall of the machine may add to `GRACE`.
const LATE: Duration = Duration::from_millis(30);

fn in_order(reports: &[Report]) -> anyhow::Result<()> {
    let (calls, most) = overtaken(reports, GRACE);
    println!("{calls} calls overtaken by more than {GRACE:?}, by at most {most:.1?}");
    ensure!(
        !out_of_order(reports),
        "{:?}",
        overtaken(reports, GRACE + LATE)
    );
    Ok(())
}

/// Reports whether more calls were overtaken than stalls explain: a call whose slot passed during a
/// stall gets a slot behind all later calls.
fn out_of_order(reports: &[Report]) -> bool {
    overtaken(reports, GRACE + LATE).0 > 3 + by_grant(reports).len() / 20
}

/// The calls that the store answered, and the calls of the fleet that were granted meanwhile.
struct Cost {
    calls: u64,
    grants: u64,
}

impl Cost {
    /// Counts from the moment `from`, when the store had answered `before` calls, until now.
    fn since(redis: &RedisServer, before: u64, from: u64) -> impl FnOnce(&[Report]) -> Cost {
        let (calls, then) = (store_calls(redis) - before, now());
        move |reports| {
            let granted = |event: &&&Event| (from..then).contains(&event.ended);
            Cost {
                calls,
                grants: by_grant(reports).iter().filter(granted).count() as u64,
            }
        }
    }

    fn per_grant(&self) -> f64 {
        self.calls as f64 / self.grants as f64
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cost { calls, grants } = self;
        write!(
            f,
            "{calls} calls of the store for {grants} grants, {:.3} each",
            self.per_grant()
        )
    }
}

#[test]
fn one_a_second_by_10_processes() {
    let _turn = turn();
    once_in_three(|| {
        let site = Site::new();
        let seconds = usual_or(7, 10);
        let span = ms(1000) * seconds;
        let options = Options {
            quota: "1/1s".into(),
            span,
            ..Options::default()
        };
        let mut fleet = site.start(10, &options);
        let start = Instant::now();
        fleet.go();
        // By then all processes wait in the queue.
        wait_until(start, ms(500));
        let (before, from) = (store_calls(&site.redis), now());
        wait_until(start, span - ms(100));
        let cost = Cost::since(&site.redis, before, from);
        let reports = fleet.finish();
        assert_all_ended(&reports);
        let log = site.upstream.log();
        assert_never_over(&log, &"1/1s".parse().unwrap());
        let cost = cost(&reports);
        println!(
            "1/1s, 10 processes: {} calls in {seconds} s; when all stand in line {cost}",
            log.len()
        );
        ensure!(log.len() >= seconds as usize - 1, "{} calls", log.len());
        // A process whose permit expired on a busy machine asks again.
        ensure!(cost.calls <= 2 * cost.grants + 2, "{cost}");
        in_order(&reports)
    });
}

/// Runs `processes` processes with ten tasks each behind 20 a second, without an upstream. Returns
/// their reports and the store calls for each grant.
fn share(processes: usize, options: Options) -> (Vec<Report>, f64) {
    let redis = RedisServer::start().unwrap();
    let options = Options {
        quota: "20/1s".into(),
        tasks: 10,
        store: redis.url(),
        ..options
    };
    let mut fleet = Fleet::start(WORKER, processes, &options);
    let before = store_calls(&redis);
    let (start, from) = (Instant::now(), now());
    fleet.go();
    let (reports, cost) = if options.arrivals == Arrivals::Once {
        let reports = fleet.finish();
        (reports, Cost::since(&redis, before, from))
    } else {
        wait_until(start, options.span - ms(100));
        let cost = Cost::since(&redis, before, from);
        (fleet.finish(), cost)
    };
    assert_all_ended(&reports);
    let quota = options.quota.parse().unwrap();
    assert_never_over(&fleet::log(&reports), &quota);
    let cost = cost(&reports);
    println!(
        "20/1s, {processes} processes, {:?}: {cost}",
        options.arrivals
    );
    (reports, cost.per_grant())
}

#[test]
fn a_hundred_callers_at_once_by_10_processes() {
    let _turn = turn();
    once_in_three(|| {
        let options = Options {
            arrivals: Arrivals::Once,
            span: ms(7000),
            ..Options::default()
        };
        let (reports, per_grant) = share(10, options);
        print_lateness(&reports);
        assert_eq!(by_grant(&reports).len(), 100);
        // One call of each process, one for the callers that arrived meanwhile, and one or two
        // reports while they wait.
        ensure!(
            per_grant <= 0.4,
            "{per_grant} calls of the store for each grant"
        );
        in_order(&reports)
    });
}

/// Prints how evenly callers that arrive at once are served.
fn print_lateness(reports: &[Report]) {
    let late = lateness(reports, &"20/1s".parse().unwrap(), MARGIN);
    let [half, most, all] = [0.5, 0.99, 1.0].map(|share| percentile(&late, share));
    println!(
        "later than ideal: p50 {half:.2?}, p99 {most:.2?}, the last {all:.2?}; p99 - p50 {:.2?}",
        most.saturating_sub(half)
    );
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn hundred_callers_in_a_closed_loop_by_10_processes() {
        let _turn = turn();
        once_in_three(|| {
            let (reports, per_grant) = share(
                10,
                Options {
                    span: ms(6000),
                    ..Options::default()
                },
            );
            // In each window every process makes one call for two grants, and one or two more when the
            // window begins.
            ensure!(
                per_grant <= 0.6,
                "{per_grant} calls of the store for each grant"
            );
            in_order(&reports)
        });
    }

    #[test]
    fn callers_that_come_one_by_one_by_10_processes() {
        let _turn = turn();
        once_in_three(|| {
            // 25 a second behind 20: the wait grows to two seconds.
            let options = Options {
                arrivals: Arrivals::Every(ms(400)),
                span: ms(8000),
                ..Options::default()
            };
            let (reports, _) = share(10, options);
            ensure!(
                by_grant(&reports).len() >= 80,
                "not half of what the limit allows"
            );
            in_order(&reports)
        });
    }

    /// Shows that the check of the order detects overtaking: two processes have separate queues, one
    /// long and one short.
    #[test]
    fn processes_with_lines_of_their_own_overtake_each_other() {
        let _turn = turn();
        once_in_three(|| {
            let line = |tasks| Options {
                store: MEMORY.into(),
                tasks,
                span: ms(2500),
                ..Options::default()
            };
            let mut fleets = [30, 1].map(|tasks| Fleet::start(WORKER, 1, &line(tasks)));
            fleets.iter_mut().for_each(Fleet::go);
            let reports: Vec<_> = fleets.into_iter().flat_map(Fleet::finish).collect();
            ensure!(
                out_of_order(&reports),
                "{:?}",
                overtaken(&reports, GRACE + LATE)
            );
            Ok(())
        });
    }
}
