//! Classes of requests with shares of one quota, or of a limit of calls in flight: a fleet of jobs that
//! always ask, and a web that asks now and then.

use std::thread;

use anyhow::ensure;
use fleet::{Arrivals, Event, Options, Outcome, Report, percentile, store_calls};

use super::*;

/// A fleet of jobs, and a web whose requests wait for up to `patience`.
#[derive(Clone)]
struct Setup {
    quota: &'static str,
    shares: &'static [(&'static str, u8)],
    cost: u32,
    /// How many processes the jobs have, and how many tasks each of them.
    jobs: usize,
    tasks: usize,
    /// How many processes the web has.
    web: usize,
    /// The mean time between two requests of a process of the web, which come at random moments.
    every: Duration,
    patience: Duration,
    /// How long the jobs run before the web begins, and the web.
    lead: Duration,
    span: Duration,
    /// How many processes of the jobs are killed, one after the other, while the web runs.
    kills: usize,
    /// How long a call takes at the server.
    latency: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            quota: "50/1s",
            shares: &[],
            cost: 1,
            jobs: 10,
            tasks: 100,
            web: 4,
            every: ms(400),
            patience: ms(1000),
            lead: ms(3000),
            span: ms(12_000),
            kills: 0,
            latency: Duration::ZERO,
        }
    }
}

/// How a fleet of jobs and the web fared together.
struct Outcomes {
    /// The calls of the web, in the order in which they asked.
    web: Vec<Event>,
    log: Log,
    /// The most calls at once while the jobs ran alone.
    most_alone: usize,
    /// How many calls were sent while both ran, and how long that was.
    sent: usize,
    span: Duration,
    calls_per_grant: f64,
}

impl Setup {
    fn run(&self) -> Outcomes {
        let shares = self.shares.iter();
        let jobs = Options {
            quota: self.quota.into(),
            shares: shares
                .map(|(class, percent)| ((*class).into(), *percent))
                .collect(),
            class: "jobs".into(),
            cost: self.cost,
            tasks: self.tasks,
            span: self.lead + self.span + ms(500),
            max_wait: ms(60_000),
            who: "jobs ".into(),
            ..Options::default()
        };
        let web = Options {
            class: "web".into(),
            tasks: 1,
            arrivals: Arrivals::Random(self.every),
            span: self.span,
            max_wait: self.patience,
            who: "web ".into(),
            ..jobs.clone()
        };
        let site = Site {
            redis: RedisServer::start().unwrap(),
            upstream: Upstream::open().latency(self.latency),
        };
        let mut jobs = site.start(self.jobs, &jobs);
        let mut webs = site.start(self.web, &web);
        jobs.go();
        thread::sleep(self.lead);
        let alone = site.upstream.log();
        let (calls, sent) = (store_calls(&site.redis), alone.len());
        let from = Instant::now();
        webs.go();
        let parts = u32::try_from(self.kills + 1).unwrap();
        for number in 0..self.kills {
            thread::sleep((self.span - ms(500)) / parts);
            jobs.kill(number);
        }
        wait_until(from, self.span - ms(500));
        let (span, calls) = (from.elapsed(), store_calls(&site.redis) - calls);
        let sent = site.upstream.log().len() - sent;
        let reports = webs.finish();
        drop(jobs.stop());
        let events = reports.iter().flat_map(|report: &Report| &report.events);
        let mut web: Vec<Event> = events.cloned().collect();
        web.sort_by_key(|event| event.asked);
        Outcomes {
            web,
            log: site.upstream.log(),
            most_alone: alone.most_at_once(),
            sent,
            span,
            calls_per_grant: calls as f64 / sent as f64,
        }
    }
}

impl Outcomes {
    fn waits(&self) -> Vec<Duration> {
        let granted = self.web.iter();
        let granted = granted.filter(|event| event.outcome == Outcome::Granted);
        let mut waits: Vec<_> = granted.map(Event::waited).collect();
        waits.sort_unstable();
        waits
    }

    fn p99(&self) -> Duration {
        percentile(&self.waits(), 0.99)
    }

    fn refused(&self) -> usize {
        let refused = self.web.iter();
        refused
            .filter(|event| event.outcome == Outcome::Refused)
            .count()
    }

    /// Returns how much was used of `per_second` calls per second.
    fn used(&self, per_second: f64) -> f64 {
        self.sent as f64 / (per_second * self.span.as_secs_f64() / 1.02)
    }

    fn print(&self, name: &str) {
        let waits = self.waits();
        println!(
            "{name:<32} {:5.2} calls/s, web {:3} sent, {:3} refused, wait p50 {:6.1?} p99 {:6.1?}, {:.2} calls a grant",
            self.sent as f64 / self.span.as_secs_f64(),
            waits.len(),
            self.refused(),
            percentile(&waits, 0.5),
            self.p99(),
            self.calls_per_grant,
        );
    }

    /// Returns by how much the latest request of the web was later than F: when it would have ended in a
    /// server of its own that takes `time` for each request.
    fn latest_after(&self, time: Duration) -> Duration {
        let time = time.as_nanos() as u64;
        let mut finish = 0;
        let late = self.web.iter().map(|event| {
            finish = event.asked.max(finish) + time;
            event.ended.saturating_sub(finish)
        });
        Duration::from_nanos(late.max().unwrap_or_default())
    }
}

#[test]
fn a_class_gets_in_flight_slots_up_to_its_share() {
    let _turn = busy_turn();
    once_in_three(|| {
        let first_come = Setup {
            quota: "10 in flight",
            jobs: 4,
            tasks: 20,
            web: 2,
            every: ms(500),
            latency: ms(300),
            ..Setup::default()
        };
        let half = Setup {
            shares: &[("web", 50)],
            ..first_come.clone()
        };
        let (first_come, half) = (first_come.run(), half.run());
        first_come.print("10 in flight, first come");
        half.print("10 in flight, .share(\"web\", 50)");
        for outcomes in [&first_come, &half] {
            assert!(outcomes.log.most_at_once() <= 10);
            ensure!(
                outcomes.most_alone == 10,
                "jobs use all while the web is idle"
            );
        }
        ensure!(first_come.refused() > first_come.waits().len());
        ensure!(half.refused() == 0, "{} refused", half.refused());
        ensure!(half.p99() <= ms(600), "{:?}", half.p99());
        Ok(())
    });
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    #[test]
    fn a_class_with_a_share_waits_for_nobody_else() {
        let _turn = busy_turn();
        once_in_three(|| {
            let setup = Setup::default();
            let first_come = setup.run();
            first_come.print("first come, first served");
            assert_never_over(&first_come.log, &setup.quota.parse()?);
            ensure!(first_come.refused() > first_come.waits().len());

            let half = Setup {
                shares: &[("web", 50)],
                ..setup.clone()
            };
            let half = half.run();
            half.print(".share(\"web\", 50)");
            assert_never_over(&half.log, &setup.quota.parse()?);
            ensure!(half.refused() == 0, "{} refused", half.refused());
            ensure!(half.p99() <= ms(300), "{:?}", half.p99());
            ensure!(half.used(50.0) >= 0.95, "{}", half.used(50.0));
            ensure!(half.calls_per_grant <= 1.0, "{}", half.calls_per_grant);

            let all = Setup {
                shares: &[("web", 100)],
                ..setup.clone()
            };
            let all = all.run();
            all.print(".share(\"web\", 100)");
            assert_never_over(&all.log, &setup.quota.parse()?);
            ensure!(all.refused() == 0, "{} refused", all.refused());
            ensure!(all.p99() <= ms(150), "{:?}", all.p99());
            ensure!(all.used(50.0) >= 0.9, "{}", all.used(50.0));
            Ok(())
        });
    }

    #[test]
    fn killed_processes_cost_no_more_than_without_shares() {
        let _turn = busy_turn();
        once_in_three(|| {
            let setup = Setup {
                kills: usual_or(1, 5),
                span: usual_or(ms(8000), ms(20_000)),
                ..Setup::default()
            };
            let first_come = setup.run();
            first_come.print("first come, processes killed");
            let half = Setup {
                shares: &[("web", 50)],
                ..setup.clone()
            };
            let half = half.run();
            half.print(".share(\"web\", 50), the same");
            assert_never_over(&half.log, &setup.quota.parse()?);
            ensure!(half.refused() == 0, "{} refused", half.refused());
            ensure!(half.p99() <= ms(300), "{:?}", half.p99());
            let (half, first_come) = (half.used(50.0), first_come.used(50.0));
            ensure!(half >= first_come - 0.01, "{half} of {first_come}");
            Ok(())
        });
    }

    /// Two limits, and a limit of tokens: the web is within the latency-rate law (`limit/lending.rs`).
    #[test]
    fn a_class_of_several_limits_has_its_rate() {
        let _turn = busy_turn();
        once_in_three(|| {
            // The time of one unit of the part that takes longest, for each limit, and of one chunk.
            let of = |window: u64, units: u64| Duration::from_micros((window + 20) * 1000 / units);
            let two = Setup {
                quota: usual_or("50/1s, 150/6s", "50/1s, 1500/60s"),
                shares: &[("web", 50)],
                tasks: 20,
                patience: ms(3000),
                lead: ms(500),
                span: usual_or(ms(13_000), ms(100_000)),
                ..Setup::default()
            };
            let tokens = Setup {
                quota: usual_or("20000/6s", "200000/60s"),
                shares: &[("web", 40)],
                cost: 400,
                every: ms(1700),
                patience: ms(5000),
                ..two.clone()
            };
            let (window, chunk) = usual_or((6000, 1), (60_000, 8));
            let tau = of(window, usual_or(75, 750));
            let of_two = (tau, tau * 4 + tau * 2 + tau * (chunk - 1));
            let (token, chunk) = usual_or((of(6000, 8000), 80), (of(60_000, 80_000), 800));
            let of_tokens = (token * 400, ms(100) + token * 800 + token * chunk);
            let (seen_two, seen_tokens) = thread::scope(|scope| {
                let other = scope.spawn(|| tokens.run());
                (two.run(), other.join().unwrap())
            });
            for (setup, seen, (time, bound)) in
                [(&two, seen_two, of_two), (&tokens, seen_tokens, of_tokens)]
            {
                seen.print(setup.quota);
                let late = seen.latest_after(time);
                println!("{:<32} F + {late:.1?}, of at most F + {bound:.1?}", "");
                ensure!(seen.refused() == 0, "{} refused", seen.refused());
                ensure!(late <= bound + ms(50), "F + {late:?}");
            }
            Ok(())
        });
    }

    /// A line that only one class waits in.
    #[test]
    fn a_line_of_one_class_drains_as_fast_as_without_shares() {
        let _turn = busy_turn();
        once_in_three(|| {
            let (processes, tasks) = usual_or((20, 30), (40, 25));
            let drain = |shares: &[(&str, u8)]| {
                let shares = shares.iter();
                let options = Options {
                    quota: "50/1s".into(),
                    shares: shares
                        .map(|(class, percent)| ((*class).into(), *percent))
                        .collect(),
                    class: "jobs".into(),
                    tasks,
                    arrivals: Arrivals::Once,
                    span: ms(60_000),
                    max_wait: ms(60_000),
                    ..Options::default()
                };
                let site = Site::new();
                let mut fleet = site.start(processes, &options);
                fleet.go();
                let from = Instant::now();
                let reports = fleet.finish();
                assert_all_ended(&reports);
                let log = site.upstream.log();
                assert_never_over(&log, &options.quota.parse().unwrap());
                assert_eq!(log.len(), processes * tasks);
                let last = log.iter().map(|arrival| arrival.at).max().unwrap();
                (last - from, store_calls(&site.redis))
            };
            let (first_come, calls) = drain(&[]);
            println!("{processes} processes drain a line in {first_come:.1?}, {calls} calls");
            let (half, calls) = drain(&[("web", 50)]);
            println!("{:<32} with shares in {half:.1?}, {calls} calls", "");
            ensure!(half <= first_come.mul_f64(1.25), "{half:?}");
            Ok(())
        });
    }
}
