//! Classes of requests with shares of one quota: a fleet of jobs that always ask, and a web that asks
//! now and then.

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
