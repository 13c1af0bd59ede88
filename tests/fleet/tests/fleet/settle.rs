//! Processes that settle the costs of their calls, one of which is killed before it has settled.

use anyhow::ensure;
use fleet::{Arrivals, Options};

use super::*;

const WINDOW: Duration = ms(2000);

/// When the upstream answers.
const LATENCY: Duration = ms(700);

/// The estimate and the true cost of a call.
const ESTIMATE: u32 = 40;
const ACTUAL: u32 = 4;

#[test]
fn a_killed_process_leaves_its_estimate_for_one_window() {
    let _turn = turn_beside_others();
    once_in_three(|| one_call_each(Duration::ZERO));
}

#[test]
fn a_late_upstream_makes_that_window_longer() {
    let _turn = turn_beside_others();
    once_in_three(|| one_call_each(ms(1500)));
}

/// Two processes send one call each. One is killed before the response.
fn one_call_each(late: Duration) -> anyhow::Result<()> {
    let mut site = Site::new();
    site.upstream = Upstream::open().latency(LATENCY);
    let options = Options {
        quota: "100/2s".into(),
        arrivals: Arrivals::Once,
        span: ms(3000),
        cost: ESTIMATE,
        actual: Some(ACTUAL),
        late,
        ..Options::default()
    };
    let builder = RateLimitLayer::builder(options.quota.parse()?);
    let builder = builder.settle_by_hand().counted_within(late);
    let outsider = Outsider::of(&site.redis, builder);
    let mut fleet = site.start(2, &options);
    fleet.go();
    let begun = Instant::now();
    while site.upstream.log().len() < 2 && begun.elapsed() < ms(5000) {
        sleep(ms(1));
    }
    fleet.kill(0);
    let log = site.upstream.log();
    let arrived = |who: &str| {
        log.iter()
            .find(|arrival| arrival.who.as_deref() == Some(who))
    };
    let of_killed = arrived("0").expect("it has called").at;
    ensure!(of_killed.elapsed() < LATENCY, "it may have been answered");
    // What the store counts, from the call of the killed process on.
    let mut counted = Vec::new();
    loop {
        let used = outsider.peek().limits[0].used;
        let since = of_killed.elapsed();
        counted.push((since, used));
        if used < u64::from(ESTIMATE) || since > WINDOW + late + ms(3000) {
            break;
        }
        sleep(ms(10));
    }
    let survivors = fleet.finish();
    assert!(survivors[1].ended, "the other one came to its end");
    let most = |from: Duration| {
        let later = counted.iter().filter(|(since, _)| *since >= from);
        later.map(|(_, used)| *used).max().unwrap_or(0)
    };
    let (ended, left) = counted[counted.len() - 1];
    println!(
        "an estimate of {ESTIMATE}, {late:?} late: at most {} counted, {} after the other one has settled, \
         {left} from {ended:.1?} on",
        most(Duration::ZERO),
        most(ms(1200))
    );
    // It may have cost as much as the estimate, up to this moment.
    assert!(
        ended + SLACK >= WINDOW + late,
        "given back after {ended:?}: {counted:?}"
    );
    assert!(
        most(Duration::ZERO) <= u64::from(2 * ESTIMATE),
        "{counted:?}"
    );
    ensure!(
        most(ms(1200)) <= u64::from(ESTIMATE + ACTUAL),
        "more than the estimate is stranded: {counted:?}"
    );
    ensure!(
        ended < WINDOW + late + MARGIN + ms(200),
        "stranded for {ended:?}"
    );
    Ok(())
}

#[test]
fn the_others_get_what_a_killed_process_has_not_settled() {
    let _turn = turn_beside_others();
    once_in_three(one_of_three);
}

fn one_of_three() -> anyhow::Result<()> {
    let mut site = Site::new();
    site.upstream = Upstream::open().latency(ms(300));
    let options = Options {
        quota: "100/1s".into(),
        tasks: 8,
        span: ms(9000),
        max_wait: ms(4000),
        cost: 10,
        actual: Some(5),
        ..Options::default()
    };
    let mut fleet = site.start(3, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(4000));
    fleet.kill(0);
    let killed = Instant::now();
    let reports = fleet.finish();
    let log = site.upstream.log();
    let before = between(&log, killed - ms(3000), killed);
    let after = between(&log, killed + ms(1500), killed + ms(4500));
    println!(
        "100 units a second, calls of 5, estimated with 10: {before} in 3 s, {after} after one of three was killed"
    );
    assert!(!reports[0].ended, "it was killed before its end");
    assert_all_ended(&reports[1..]);
    assert_eq!(over_rule(&log, Rule::new(20, ms(1000))), None);
    // Estimates take a third of the limit until the responses arrive: 46 calls would be all of it.
    ensure!(before >= 38, "{before} calls in three seconds");
    ensure!(after >= 38, "{after} calls in three seconds");
    Ok(())
}
