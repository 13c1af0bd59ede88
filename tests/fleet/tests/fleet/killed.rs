//! A killed process does not keep its permits for long, and a stalled process does not use expired
//! permits.

use anyhow::ensure;
use fleet::{Arrivals, Fleet, Options, Outcome, now};

use super::*;

#[test]
fn slots_of_a_killed_process_go_to_the_others() {
    let _turn = turn_beside_others();
    once_in_three(one_is_killed);
}

fn one_is_killed() -> anyhow::Result<()> {
    let site = Site::new();
    let options = Options {
        quota: "50/1s".into(),
        // Every task finds a slot, so each process has some of every second window.
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
    let served = log
        .iter()
        .filter(|arrival| arrival.at < killed && arrival.who.as_deref() == Some("0"))
        .count();
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
    // Its bookings lie at most `max_wait` ahead, and count for a window.
    let back = between(&log, killed + ms(3500), killed + ms(6500));
    ensure!(
        back >= 110,
        "{back} calls in three seconds after the others have all of it"
    );
    Ok(())
}

#[test]
fn stopped_process_uses_no_slot_that_has_passed() {
    let _turn = turn_beside_others();
    let site = Site::new();
    let options = Options {
        quota: "50/1s".into(),
        // Every task finds a slot, so each process has some of every second window.
        tasks: 30,
        span: ms(9000),
        max_wait: ms(2000),
        ..Options::default()
    };
    let mut fleet = site.start(3, &options);
    let start = Instant::now();
    fleet.go();
    // Longer than its slots lie ahead, shorter than that, and hardly longer than the life of a
    // permit.
    for (at, span) in [
        (1000, 2500),
        (4200, 700),
        (5500, 40),
        (6000, 15),
        (6500, 15),
    ] {
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
    // A call that was on its way then arrives late: what counts is when it was sent.
    assert_never_over(&log, &options.quota.parse().unwrap());
    let back = reports[0]
        .events
        .iter()
        .filter(|event| event.outcome == Outcome::Granted);
    let last = back.map(|event| event.ended).max();
    assert!(
        last.is_some_and(|last| now() < last + 4_000_000_000),
        "it is served again"
    );
}

/// The permits at hand in a killed process are lost for a window, and stay counted: no other
/// process gets them too.
#[test]
fn permits_fetched_by_killed_processes_return_after_a_window() {
    let _turn = busy_turn();
    let redis = RedisServer::start().unwrap();
    let options = Options {
        quota: "20000/1s".into(),
        store: redis.url(),
        live: true,
        ..Options::default()
    };
    let quota = options.quota.parse().unwrap();
    // Less than the limit: permits that are not scarce are fetched ahead.
    let busy = Options {
        arrivals: Arrivals::Every(Duration::from_micros(400)),
        ..options.clone()
    };
    let heir = Options {
        tasks: 64,
        span: ms(1500),
        ..options
    };
    let (mut fleet, mut heirs) = (
        Fleet::start(WORKER, 4, &busy),
        Fleet::start(WORKER, 2, &heir),
    );
    let outsider = Outsider::new(&redis, quota);
    let used = || outsider.peek().limits[0].used;
    let start = Instant::now();
    fleet.go();
    wait_until(start, ms(2500));
    (0..4).for_each(|number| fleet.kill(number));
    let counted = used();
    heirs.go();
    let reports = fleet.finish();
    assert!(
        reports.iter().all(|report| !report.ended),
        "they were killed before their end"
    );
    let heirs = heirs.finish();
    assert_all_ended(&heirs);
    // What the heirs have used last counts for a window from now on. The margin is less than the rest.
    std::thread::sleep(ms(1200));
    let left = used();
    println!(
        "{quota}, 4 processes killed: the store counts {counted}; two others end, and after a window it counts {left}"
    );
    assert!(counted >= 1000, "they were at work: {counted}");
    let all: Vec<_> = reports.into_iter().chain(heirs).collect();
    assert_never_over(&fleet::log(&all), &quota);
    assert_eq!(left, 0, "all of it is back");
}
