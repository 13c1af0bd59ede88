//! Calls never exceed the limit, and use nearly all of it.

use std::time::Duration;

use fleet::{Fleet, Options};
use upstream::Upstream;

use super::*;

fn check(processes: usize, options: Options) {
    let _turn = turn_beside_others();
    let site = Site::new();
    let Options { quota, span, .. } = options.clone();
    let mut fleet = site.start(processes, &options);
    fleet.go();
    assert_all_ended(&fleet.finish());
    let (log, quota) = (site.upstream.log(), quota.parse().unwrap());
    let allowed = allowed(&quota, span);
    println!(
        "{quota}, {processes} processes: {} calls of {allowed} that limit and margin allow, {:.2} %; {:?} in each \
         second; jitter {:.1?}",
        log.len(),
        100.0 * log.len() as f64 / allowed as f64,
        per_second(&log),
        log.jitter()
    );
    // The loss in the first two windows comes from connections that open and scripts that load.
    if let [rule] = rules(&quota)[..] {
        let steady = part(&log, log[0].at + ms(2500), log[0].at + span);
        let used = steady
            .used(Rule::new(rule.count, rule.window + MARGIN))
            .unwrap_or_default();
        println!(
            "{:.2} % of the rate later than 2.5 s after the first",
            100.0 * used
        );
    }
    assert_never_over(&log, &quota);
    // A stall of the machine loses slots, and a process that starts late books beyond the end. The
    // figure is printed, and only an idle gate is an error.
    assert!(log.len() * 4 >= allowed, "{} of {allowed}", log.len());
}

fn options(quota: &str, tasks: usize, span: Duration) -> Options {
    Options {
        quota: quota.into(),
        tasks,
        span,
        ..Options::default()
    }
}

#[test]
fn a_hundred_a_second_by_4_processes() {
    check(4, options("100/1s", 50, ms(8000)));
}

#[test]
fn two_limits_by_4_processes() {
    check(4, options("25/5s, 60/12s", 5, ms(11_500)));
}

#[test]
fn two_limits_bind_in_turn_by_16_processes() {
    check(16, options("10/1s, 24/4s", 2, ms(8600)));
}

#[test]
fn cold_server_serves_one_a_second_to_10_processes() {
    check(
        10,
        Options {
            cold: true,
            ..options("1/1s", 1, ms(9900))
        },
    );
}

/// Shows that the tests above detect an excess.
#[test]
fn processes_that_count_for_themselves_go_over() {
    let _turn = turn_beside_others();
    let upstream = Upstream::open();
    let options = Options {
        quota: "100/1s".into(),
        url: upstream.url(),
        tasks: 50,
        span: ms(1500),
        ..Options::default()
    };
    let mut fleet = Fleet::start(WORKER, 4, &options);
    fleet.go();
    assert_all_ended(&fleet.finish());
    let over = over(&upstream.log(), &"100/1s".parse().unwrap());
    assert!(over.is_some(), "four times the limit is over");
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn a_hundred_a_second_by_16_processes() {
        check(16, options("100/1s", 12, ms(8000)));
    }
}
