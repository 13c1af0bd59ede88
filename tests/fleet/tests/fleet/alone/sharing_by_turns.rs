//! Demand that goes on and off: the other processes use what one process leaves.

use anyhow::ensure;
use fleet::{Arrivals, Fleet, Options, store_calls};
use redis_server::RedisServer;
use upstream::Rule;

use super::*;

const PROCESSES: u32 = 16;

/// Starts processes that call for a second with `tasks` tasks each, and rest for a second. Each
/// begins a sixteenth of that later than the process before. So half of the processes call at any
/// time, and could use all of the limit.
fn look(quota: &str, tasks: usize) -> anyhow::Result<()> {
    let redis = RedisServer::start().unwrap();
    let (on, off) = (ms(1000), ms(1000));
    // Two rounds of turns, or three, after those in which the processes start.
    let span = usual_or(ms(7000), ms(9000));
    let start = |number| {
        let first = (on + off) * number / PROCESSES;
        let arrivals = Arrivals::Turns { first, on, off };
        let options = Options {
            quota: quota.into(),
            store: redis.url(),
            tasks,
            arrivals,
            span,
            ..Options::default()
        };
        Fleet::start(WORKER, 1, &options)
    };
    let mut fleets: Vec<_> = (0..PROCESSES).map(start).collect();
    let calls = store_calls(&redis);
    fleets.iter_mut().for_each(Fleet::go);
    let reports: Vec<_> = fleets.into_iter().flat_map(Fleet::finish).collect();
    let calls = store_calls(&redis) - calls;
    assert_all_ended(&reports);
    let (log, quota) = (fleet::log(&reports), quota.parse().unwrap());
    let rule = rules(&quota)[0];
    let steady = part(&log, log[0].at + ms(2500), log[0].at + span - ms(500));
    let used = steady
        .used(Rule::new(rule.count, rule.window + MARGIN))
        .unwrap_or_default();
    println!(
        "{quota}, {PROCESSES} processes of which half call at a time, {tasks} tasks each: {:.2} % of what limit and margin \
         allow; {:?} in each second; {:.3} calls of the store for each grant",
        100.0 * used,
        per_second(&log),
        calls as f64 / log.len() as f64
    );
    assert_never_over(&log, &quota);
    // A stall of the machine loses slots.
    ensure!(used >= 0.9, "{used}");
    Ok(())
}

#[test]
fn a_thousand_a_second_by_processes_that_take_turns() {
    let _turn = turn();
    once_in_three(|| look("1000/1s", 16));
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn ten_thousand_a_second_by_processes_that_take_turns() {
        let _turn = turn();
        once_in_three(|| look("10000/1s", 64));
    }
}
