//! Classes of requests with shares of one quota, or of a limit of calls in flight: a fleet of jobs that
//! always ask, and a web that asks now and then.

use std::thread;

use anyhow::ensure;
use fleet::{Arrivals, Options, Outcome, Report, percentile, store_calls};

use super::*;

const QUOTA: &str = "50/1s";

/// How long the jobs run before the web begins, and the web.
const LEAD: Duration = ms(3000);
const SPAN: Duration = ms(12_000);

/// What a class has seen.
struct Seen {
    granted: usize,
    refused: usize,
    waits: Vec<Duration>,
}

impl Seen {
    fn of(reports: &[Report]) -> Seen {
        let count = |outcome| reports.iter().flat_map(|report| report.of(outcome)).count();
        let granted = reports
            .iter()
            .flat_map(|report| report.of(Outcome::Granted));
        let mut waits: Vec<_> = granted.map(|event| event.waited()).collect();
        waits.sort_unstable();
        Seen {
            granted: waits.len(),
            refused: count(Outcome::Refused),
            waits,
        }
    }

    fn p99(&self) -> Duration {
        percentile(&self.waits, 0.99)
    }
}

/// How a fleet of jobs and the web fared together.
struct Outcomes {
    web: Seen,
    log: Log,
    /// The part of the quota that was used while both ran.
    used: f64,
    calls_per_grant: f64,
}

/// Runs 10 processes with 100 jobs each, and 4 processes of the web with 10 requests per second in all,
/// each of which waits for up to a second.
fn together(shares: &[(&str, u8)]) -> Outcomes {
    let shares = shares
        .iter()
        .map(|(class, percent)| ((*class).into(), *percent));
    let jobs = Options {
        quota: QUOTA.into(),
        shares: shares.collect(),
        class: "jobs".into(),
        tasks: 100,
        span: LEAD + SPAN + ms(500),
        max_wait: ms(60_000),
        who: "jobs ".into(),
        ..Options::default()
    };
    let web = Options {
        class: "web".into(),
        tasks: 1,
        arrivals: Arrivals::Every(ms(400)),
        span: SPAN,
        max_wait: ms(1000),
        who: "web ".into(),
        ..jobs.clone()
    };
    let site = Site::new();
    let mut jobs = site.start(10, &jobs);
    let mut webs = site.start(4, &web);
    jobs.go();
    thread::sleep(LEAD);
    let (calls, sent) = (store_calls(&site.redis), site.upstream.log().len());
    let from = Instant::now();
    webs.go();
    thread::sleep(SPAN - ms(500));
    let (to, calls) = (Instant::now(), store_calls(&site.redis) - calls);
    let log = site.upstream.log();
    let (grants, span) = (log.len() - sent, to - from);
    let web = Seen::of(&webs.finish());
    drop(jobs.stop());
    let full = 50.0 * span.as_secs_f64() / 1.02;
    Outcomes {
        web,
        log: site.upstream.log(),
        used: grants as f64 / full,
        calls_per_grant: calls as f64 / grants as f64,
    }
}

fn print(name: &str, outcomes: &Outcomes) {
    let Outcomes {
        web,
        used,
        calls_per_grant,
        ..
    } = outcomes;
    println!(
        "{name:<26} used {:5.1} %, web {:3} sent, {:3} refused, wait p50 {:6.1?} p99 {:6.1?}, {calls_per_grant:.2} calls a grant",
        used * 100.0,
        web.granted,
        web.refused,
        percentile(&web.waits, 0.5),
        web.p99(),
    );
}

#[test]
fn a_class_with_a_share_waits_for_nobody_else() {
    let _turn = busy_turn();
    once_in_three(|| {
        let first_come = together(&[]);
        print("first come, first served", &first_come);
        assert_never_over(&first_come.log, &QUOTA.parse()?);
        ensure!(first_come.web.refused > first_come.web.granted);

        let half = together(&[("web", 50)]);
        print(".share(\"web\", 50)", &half);
        assert_never_over(&half.log, &QUOTA.parse()?);
        ensure!(half.web.refused == 0, "{} refused", half.web.refused);
        ensure!(half.web.p99() <= ms(300), "{:?}", half.web.p99());
        ensure!(half.used >= 0.95, "{}", half.used);

        let all = together(&[("web", 100)]);
        print(".share(\"web\", 100)", &all);
        assert_never_over(&all.log, &QUOTA.parse()?);
        ensure!(all.web.refused == 0, "{} refused", all.web.refused);
        ensure!(all.web.p99() <= ms(300), "{:?}", all.web.p99());
        ensure!(all.used >= 0.9, "{}", all.used);
        Ok(())
    });
}

/// Runs 4 processes with 20 jobs each behind 10 calls in flight, and 2 processes of the web with 4 requests
/// per second in all, each of which waits for up to a second. A call takes 300 ms.
fn in_flight_together(shares: &[(&str, u8)]) -> (Seen, Log, f64) {
    let shares = shares
        .iter()
        .map(|(class, percent)| ((*class).into(), *percent));
    let jobs = Options {
        quota: "10 in flight".into(),
        shares: shares.collect(),
        class: "jobs".into(),
        tasks: 20,
        span: LEAD + SPAN + ms(500),
        max_wait: ms(60_000),
        store_timeout: ms(1000),
        who: "jobs ".into(),
        ..Options::default()
    };
    let web = Options {
        class: "web".into(),
        tasks: 1,
        arrivals: Arrivals::Every(ms(500)),
        span: SPAN,
        max_wait: ms(1000),
        who: "web ".into(),
        ..jobs.clone()
    };
    let site = Site {
        redis: RedisServer::start().unwrap(),
        upstream: Upstream::open().latency(ms(300)),
    };
    let (mut jobs, mut webs) = (site.start(4, &jobs), site.start(2, &web));
    jobs.go();
    thread::sleep(LEAD);
    let alone = site.upstream.log();
    assert_eq!(
        alone.most_at_once(),
        10,
        "jobs use all slots while the web is idle"
    );
    let calls = store_calls(&site.redis);
    webs.go();
    let web = Seen::of(&webs.finish());
    let (calls, log) = (store_calls(&site.redis) - calls, site.upstream.log());
    drop(jobs.stop());
    let calls_per_grant = calls as f64 / (log.len() - alone.len()) as f64;
    (web, log, calls_per_grant)
}

#[test]
fn a_class_with_a_share_gets_the_next_in_flight_slot() {
    let _turn = busy_turn();
    once_in_three(|| {
        let run = |shares: &[(&str, u8)]| {
            let (web, log, calls) = in_flight_together(shares);
            println!(
                "10 in flight, shares {shares:?}: web {} sent, {} refused, wait p50 {:.1?} p99 {:.1?}, at most {} at once, \
                 {calls:.2} calls a grant",
                web.granted,
                web.refused,
                percentile(&web.waits, 0.5),
                web.p99(),
                log.most_at_once(),
            );
            assert!(log.most_at_once() <= 10, "{}", log.most_at_once());
            web
        };
        let first_come = run(&[]);
        ensure!(first_come.refused > first_come.granted);
        let half = run(&[("web", 50)]);
        ensure!(half.refused == 0, "{} refused", half.refused);
        ensure!(half.p99() <= ms(600), "{:?}", half.p99());
        Ok(())
    });
}
