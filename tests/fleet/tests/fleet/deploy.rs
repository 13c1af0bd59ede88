//! A rolling deploy: while two versions state two limits for one key, the stricter one holds.

use anyhow::ensure;
use fleet::{Options, Report};

use super::*;

const FOREIGN: &str = "another process limits this key by another quota";

fn version(quota: &str, span: Duration) -> Options {
    Options {
        quota: quota.into(),
        tasks: 30,
        span,
        max_wait: ms(1000),
        ..Options::default()
    }
}

fn foreign(report: &Report) -> usize {
    report
        .warnings
        .iter()
        .filter(|warning| warning.contains(FOREIGN))
        .count()
}

#[test]
fn stricter_limit_holds_until_its_processes_end() {
    let _turn = turn_beside_others();
    once_in_three(stricter_ones_end);
}

fn stricter_ones_end() -> anyhow::Result<()> {
    let site = Site::new();
    let mut strict = site.start(
        2,
        &Options {
            who: "strict".into(),
            ..version("20/1s", ms(4000))
        },
    );
    let mut loose = site.start(
        2,
        &Options {
            who: "loose".into(),
            ..version("50/1s", ms(10_000))
        },
    );
    let start = Instant::now();
    strict.go();
    wait_until(start, ms(300));
    loose.go();
    let strict = strict.finish();
    let gone = Instant::now();
    let loose = loose.finish();
    assert_all_ended(&strict);
    assert_all_ended(&loose);
    let log = site.upstream.log();
    println!(
        "20/1s for {:.1?} and 50/1s: {:?} calls in each second; warnings {:?} and {:?}",
        gone - start,
        per_second(&log),
        strict.iter().map(foreign).collect::<Vec<_>>(),
        loose.iter().map(foreign).collect::<Vec<_>>()
    );
    assert_never_over(&log, &"50/1s".parse().unwrap());
    let both = part(&log, start, start + ms(4000));
    assert_never_over(&both, &"20/1s".parse().unwrap());
    assert!(
        both.len() >= 50,
        "{} calls in four seconds at 20 a second",
        both.len()
    );
    // Two windows and a second after the end of the last process with the stricter limit.
    let free = part(&log, gone + ms(3000), gone + ms(6000));
    ensure!(
        free.len() >= 110,
        "{} calls in the three seconds that follow",
        free.len()
    );
    for report in strict.iter().chain(&loose) {
        assert_eq!(foreign(report), 1, "{:?}", report.warnings);
    }
    Ok(())
}

#[test]
fn stricter_limit_applies_to_a_running_fleet() {
    let _turn = turn_beside_others();
    let site = Site::new();
    let mut loose = site.start(
        2,
        &Options {
            who: "loose".into(),
            ..version("50/1s", ms(8500))
        },
    );
    let mut strict = site.start(
        2,
        &Options {
            who: "strict".into(),
            ..version("20/1s", ms(6500))
        },
    );
    let start = Instant::now();
    loose.go();
    wait_until(start, ms(2000));
    strict.go();
    let joined = Instant::now();
    let reports = [strict.finish(), loose.finish()].concat();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    println!(
        "50/1s, and 20/1s from 2 s on: {:?} calls in each second",
        per_second(&log)
    );
    assert_never_over(&log, &"50/1s".parse().unwrap());
    // Earlier bookings lie at most `max_wait` ahead, and a window starts after them.
    let both = part(&log, joined + ms(1500), joined + ms(6500));
    assert_never_over(&both, &"20/1s".parse().unwrap());
    assert!(
        both.len() >= 60,
        "{} calls in five seconds at 20 a second",
        both.len()
    );
    for report in &reports {
        assert_eq!(foreign(report), 1, "{:?}", report.warnings);
    }
}
