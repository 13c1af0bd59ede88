//! A process of two ends by SIGTERM under load: it drains.

use anyhow::ensure;
use fleet::{Options, Outcome};

use super::*;

const WINDOW: Duration = ms(1000);
const COUNT: u32 = 100;
const DRAIN: Duration = ms(500);

#[test]
fn a_drained_process_leaves_the_whole_limit_to_the_other() {
    let _turn = turn_beside_others();
    once_in_three(one_of_two);
}

fn one_of_two() -> anyhow::Result<()> {
    let site = Site::new();
    let options = Options {
        quota: format!("{COUNT}/1s"),
        tasks: 40,
        span: ms(6000),
        drain: DRAIN,
        ..Options::default()
    };
    let mut fleet = site.start(2, &options);
    fleet.go();
    sleep(ms(2000));
    let terminated = Instant::now();
    fleet.terminate(0);
    let reports = fleet.finish();
    assert_all_ended(&reports);
    let log = site.upstream.log();
    assert_never_over(&log, &options.quota.parse()?);

    let drained = reports[0].drained.expect("it was drained");
    let of_first = || {
        log.iter()
            .filter(|arrival| arrival.who.as_deref() == Some("0"))
    };
    let mut granted = reports[0].of(Outcome::Granted);
    assert!(
        granted.all(|event| event.ended <= drained),
        "sent after the end of the drain"
    );
    let last = of_first()
        .map(|arrival| arrival.at)
        .max()
        .expect("it has called");
    let refused = reports[0]
        .events
        .iter()
        .filter(|event| event.text.contains("drained"));
    let refused = refused.count();
    assert!(refused > 0, "it refuses what has no slot in time");

    // From a window and a half after the drain on, the other one has the limit alone.
    let from = terminated + DRAIN + WINDOW * 3 / 2;
    let steady = part(&log, from, from + ms(1400));
    let rule = Rule::new(COUNT, WINDOW + MARGIN);
    let used = steady.used(rule).unwrap_or_default();
    println!(
        "the last call {:.1?} after SIGTERM, {refused} refused; then the other one uses {:.1} %",
        last.saturating_duration_since(terminated),
        100.0 * used
    );
    ensure!(used >= 0.9, "the other one uses {:.1} %", 100.0 * used);
    Ok(())
}
