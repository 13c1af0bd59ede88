//! A process that is killed takes nothing along for long, and one that stalls uses nothing when it is too late.

use fleet::{Options, Outcome, now};

use super::*;

#[test]
fn what_a_killed_process_holds_and_has_booked_goes_to_the_others() {
    let _turn = turn();
    let site = Site::new();
    let options = Options {
        quota: "50/1s".into(),
        // All of them find a slot, so each process has some of every second window.
        tasks: 30,
        span: ms(10_000),
        max_wait: ms(2000),
        ..Options::default()
    };
    let mut fleet = site.start(3, &options);
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(3000));
    fleet.kill(0);
    let killed = Instant::now();
    let reports = fleet.finish();
    let log = site.upstream.log();
    let served =
        log.iter().filter(|arrival| arrival.at < killed && arrival.who.as_deref() == Some("0")).count();
    let second = |number: u32| {
        let from = killed + ms(1000) * number;
        between(&log, from, from + ms(1000))
    };
    println!(
        "50/1s, 3 processes, one killed after {served} of {} calls; in the seconds after: {:?}",
        between(&log, start, killed),
        (0..6).map(second).collect::<Vec<_>>()
    );
    assert!(served > 0, "the one that is killed had its share");
    assert!(!reports[0].ended, "it was killed before its end");
    assert_all_ended(&reports[1..]);
    assert_never_over(&log, &options.quota.parse().unwrap());
    // What it had booked lies at most `max_wait` ahead, and counts for a window.
    let back = between(&log, killed + ms(3500), killed + ms(6500));
    assert!(back >= 110, "{back} calls in three seconds after the others have all of it");
}

#[test]
fn a_process_that_was_stopped_uses_no_slot_that_has_passed() {
    let _turn = turn();
    let site = Site::new();
    let options = Options {
        quota: "50/1s".into(),
        // All of them find a slot, so each process has some of every second window.
        tasks: 30,
        span: ms(9000),
        max_wait: ms(2000),
        ..Options::default()
    };
    let mut fleet = site.start(3, &options);
    let start = Instant::now();
    fleet.go();
    // Longer than its slots lie ahead, shorter than that, and hardly longer than a permit lives.
    for (at, span) in [(1000, 2500), (4200, 700), (5500, 40), (6000, 15), (6500, 15)] {
        wait_until(start, ms(at));
        fleet.pause(0);
        sleep(ms(span));
        fleet.resume(0);
    }
    let reports = fleet.finish();
    let log = site.upstream.log();
    println!(
        "50/1s, 3 processes, one stopped for a while: {:?} calls in each second; jitter {:.1?}",
        per_second(&log),
        log.jitter()
    );
    assert_all_ended(&reports);
    // A call that was on its way then arrives late: when it was sent is what counts.
    assert_never_over(&log, &options.quota.parse().unwrap());
    let back = reports[0].events.iter().filter(|event| event.outcome == Outcome::Granted);
    let last = back.map(|event| event.ended).max();
    assert!(last.is_some_and(|last| now() < last + 4_000_000_000), "it is served again");
}
