//! Clients that do not share state, over HTTP, compared with the result of the simulator.

use std::collections::BTreeMap;
use std::sync::Mutex;

use fleet::MEMORY;
use http::Response;
use redis_server::RedisServer;
use tollgate_simulate::{Metrics, Runs, Scenario, Scenarios, Server, Strategy, sweep};
use upstream::Bucket;

use super::*;

/// `seed-run` at 20 times its speed, for the first 500 of its 1800 seconds: two processes of five
/// callers, and a bucket that is empty at the start, which no process knows.
const SCENARIO: &str = r#"{ "seed-run / 20": {
    "fleet": [{"procs": 2, "tasks": 5}],
    "server": {"kind": "bucket", "cap": 4500, "refill": 25, "start": 0},
    "headers": {"remaining": true},
    "hint": [4500, 180],
    "latency": [0.0065, 0.01, 0],
    "duration": 25
} }"#;

/// Enough processes to make sharing worthwhile, of one caller each.
const MANY: &str = r#"{ "n32 / 20": {
    "fleet": [{"procs": 32, "tasks": 1}],
    "server": {"kind": "bucket", "cap": 4500, "refill": 25, "start": 0},
    "headers": {"remaining": true},
    "hint": [4500, 180],
    "latency": [0.0065, 0.01, 0],
    "store": {"trip": [0.0005, 0.0015, 0]},
    "duration": 25
} }"#;

const BUCKET: Bucket = Bucket {
    size: 4500.0,
    refill: 25.0,
    start: 0.0,
};
/// Rows of the laboratory's fast set: one of each kind of limit that states what is left.
const FAST: [&str; 3] = ["s-fixed-50-full", "s-sliding-40-full", "s-bucket-100-rem"];

const SPAN: Duration = ms(25_000);
const LATENCY: Duration = ms(8);
/// The mean of the fast set.
const FAST_LATENCY: Duration = ms(75);

/// A server and the number of requests that it allows within the test.
struct Allowance {
    upstream: Upstream,
    allowed: f64,
}

impl Allowance {
    fn bucket(bucket: Bucket) -> Allowance {
        Allowance {
            upstream: Upstream::open().bucket(bucket).latency(LATENCY),
            allowed: bucket.start + bucket.refill * SPAN.as_secs_f64(),
        }
    }

    fn of(server: &Server) -> Allowance {
        let in_span = |limit: f64, window: f64| limit / window * SPAN.as_secs_f64();
        let mut all = match *server {
            Server::Bucket {
                cap, refill, start, ..
            } => Allowance::bucket(Bucket {
                size: cap,
                refill,
                start,
            }),
            Server::Sliding { limit, window, .. } => {
                let rule = Rule::new(limit as u32, Duration::from_secs_f64(window));
                Allowance {
                    upstream: Upstream::start(rule).stating(),
                    allowed: in_span(limit, window),
                }
            }
            Server::Fixed { limit, window, .. } => Allowance {
                upstream: Upstream::open().script(fixed_windows(limit as u64, window)),
                allowed: in_span(limit, window),
            },
            _ => unreachable!("the rows have no other server"),
        };
        all.upstream = all.upstream.latency(FAST_LATENCY);
        all
    }
}

/// Returns a script that allows `limit` requests in each window of `window` seconds. Each response states the limit, what
/// is left, and the time to the next window, in whole seconds.
fn fixed_windows(limit: u64, window: f64) -> impl Fn(usize) -> Option<Response<String>> + Send {
    let began = Instant::now();
    let current = Mutex::new((0, 0));
    move |_| {
        let age = began.elapsed().as_secs_f64();
        let number = (age / window) as u64;
        let mut current = current.lock().expect("no script panics");
        if current.0 != number {
            *current = (number, 0);
        }
        let reset = ((number + 1) as f64 * window - age).ceil() as u64;
        let mut response = match current.1 < limit {
            true => Response::new("welcome\n".to_owned()),
            false => upstream::refusal(reset),
        };
        current.1 = (current.1 + 1).min(limit);
        let headers = response.headers_mut();
        headers.insert("ratelimit-limit", limit.into());
        headers.insert("ratelimit-remaining", (limit - current.1).into());
        headers.insert("ratelimit-reset", reset.into());
        Some(response)
    }
}

struct Fellows {
    pace: &'static str,
    callers: usize,
    server: Allowance,
    fleet: Fleet,
}

impl Fellows {
    fn start(
        pace: &'static str,
        [processes, tasks]: [usize; 2],
        store: String,
        server: Allowance,
        quota: String,
    ) -> Fellows {
        let options = Options {
            quota,
            pace: pace.into(),
            store,
            store_timeout: ms(2000),
            url: server.upstream.url(),
            tasks,
            span: SPAN,
            max_wait: ms(120_000),
            who: "p".into(),
            ..Options::default()
        };
        let fleet = Fleet::start(WORKER, processes, &options);
        Fellows {
            pace,
            callers: processes * tasks,
            fleet,
            server,
        }
    }

    /// Starts clients of an empty bucket.
    fn of_bucket(pace: &'static str, shape: [usize; 2], store: String) -> Fellows {
        let server = Allowance::bucket(BUCKET);
        Fellows::start(pace, shape, store, server, "4500/180s".into())
    }

    /// Starts the clients of a scenario, with the limit that they know.
    fn of(scenario: &Scenario) -> Fellows {
        let group = &scenario.fleet[0];
        let server = Allowance::of(&scenario.server);
        let (pace, quota) = match scenario.hint {
            Some((limit, window)) => ("fair", format!("{limit}/{window}s")),
            None => ("fair-untold", "1/1s".into()),
        };
        Fellows::start(
            pace,
            [group.procs, group.tasks],
            MEMORY.into(),
            server,
            quota,
        )
    }

    /// Returns the result: the requests from the log of the upstream, the waits from the reports of
    /// the workers.
    fn finish(self) -> Metrics {
        let reports = self.fleet.finish();
        assert!(
            reports
                .iter()
                .all(|report| report.ended && report.of(fleet::Outcome::Broken).count() == 0)
        );
        let mut callers = BTreeMap::<_, [f64; 2]>::new();
        for arrival in self.server.upstream.log().iter() {
            callers.entry(arrival.who.clone()).or_default()[usize::from(!arrival.accepted)] += 1.0;
        }
        assert_eq!(callers.len(), self.callers);
        let of = |metric: &dyn Fn(&[f64; 2]) -> f64| callers.values().map(metric).sum::<f64>();
        let count = self.callers as f64;
        let mean = of(&|[accepted, refused]| accepted + refused) / count;
        let accepted = of(&|[accepted, _]| *accepted);
        let mut waits: Vec<_> = reports
            .iter()
            .flat_map(|report| &report.events)
            .map(fleet::Event::waited)
            .collect();
        waits.sort_unstable();
        let mut metrics = Metrics::default();
        metrics.retry_pct =
            100.0 * of(&|[accepted, refused]| refused / (accepted + refused)) / count;
        metrics.max_wait = fleet::percentile(&waits, 1.0).as_secs_f64();
        metrics.p99_wait = fleet::percentile(&waits, 0.99).as_secs_f64();
        metrics.stdev =
            (of(&|[accepted, refused]| (accepted + refused - mean).powi(2)) / (count - 1.0)).sqrt();
        metrics.jain = accepted.powi(2) / (count * of(&|[accepted, _]| accepted.powi(2)));
        metrics.util_pct = 100.0 * accepted / self.server.allowed;
        metrics
    }
}

fn row(pace: &str, place: &str, metrics: &Metrics, deviation: &Metrics) {
    let with = |of: fn(&Metrics) -> f64, digits: usize| {
        let (mean, deviation) = (of(metrics), of(deviation));
        if deviation > 0.0 {
            format!("{mean:.digits$} ± {deviation:.digits$}")
        } else {
            format!("{mean:.digits$}")
        }
    };
    println!(
        "{pace:14} {place:10} {} % refused, longest wait {} s, p99 {} s, stdev {}, Jain {}, {} % used",
        with(|metrics| metrics.retry_pct, 2),
        with(|metrics| metrics.max_wait, 2),
        with(|metrics| metrics.p99_wait, 2),
        with(|metrics| metrics.stdev, 1),
        with(|metrics| metrics.jain, 3),
        with(|metrics| metrics.util_pct, 1),
    );
}

fn laboratory(scenario: &(String, Scenario), pace: &str) -> Runs {
    let strategy = Strategy::named(pace).expect("the laboratory has it");
    let runs =
        sweep(std::slice::from_ref(scenario), &[strategy], 1..=20, || ()).expect("all are known");
    runs.into_iter()
        .next()
        .expect("one scenario and one strategy")
}

/// On a calm machine only: `./.ci/run`.
mod calm {
    use super::*;

    /// Runs the recommended pace and the best published one at the same time, each against its own
    /// server.
    #[test]
    fn real_processes_do_as_the_laboratory_says() {
        let _turn = busy_turn();
        let scenario = &Scenarios::read(SCENARIO).unwrap().0[0];
        let mut fellows =
            ["fair", "blog-remaining"].map(|pace| Fellows::of_bucket(pace, [2, 5], MEMORY.into()));
        fellows.iter_mut().for_each(|fellows| fellows.fleet.go());
        let [fair, published] = fellows.map(|fellows| {
            let pace = fellows.pace;
            let (simulated, real) = (laboratory(scenario, pace), fellows.finish());
            row(
                pace,
                "laboratory",
                &simulated.mean(),
                &simulated.deviation(),
            );
            row(pace, "over HTTP", &real, &Metrics::default());
            let simulated = simulated.mean();
            // A stall of the machine adds to waits, and makes bursts.
            assert!(
                real.retry_pct < 2.0 * simulated.retry_pct + 1.5,
                "{pace} is refused as often"
            );
            assert!(
                real.max_wait < 2.0 * simulated.max_wait + 0.5,
                "{pace} waits as long"
            );
            assert!(
                real.util_pct > simulated.util_pct - 5.0,
                "{pace} uses as much"
            );
            real
        });
        assert!(fair.jain > 0.99, "shares are equal");
        assert!(
            fair.retry_pct < published.retry_pct,
            "it is refused less often than the published winner"
        );
    }

    /// Runs rows of the laboratory's fast set at the same time, each against its own server.
    #[test]
    fn fast_limits_do_as_the_laboratory_says() {
        let _turn = turn();
        let mut rows = Scenarios::fast().0;
        rows.retain(|(name, _)| FAST.contains(&name.as_str()));
        assert_eq!(rows.len(), FAST.len());
        for (_, scenario) in &mut rows {
            scenario.duration = SPAN.as_secs_f64();
        }
        let mut fellows: Vec<_> = rows
            .iter()
            .map(|(_, scenario)| Fellows::of(scenario))
            .collect();
        fellows.iter_mut().for_each(|fellows| fellows.fleet.go());
        for (fellows, scenario) in fellows.into_iter().zip(&rows) {
            let name = &scenario.0;
            let (simulated, real) = (laboratory(scenario, "fair"), fellows.finish());
            row(
                name,
                "laboratory",
                &simulated.mean(),
                &simulated.deviation(),
            );
            row(name, "over HTTP", &real, &Metrics::default());
            let simulated = simulated.mean();
            // A stall of the machine adds to waits, and makes bursts.
            assert!(
                real.retry_pct < 2.0 * simulated.retry_pct + 1.5,
                "{name}: refused as often"
            );
            assert!(
                real.max_wait < 2.0 * simulated.max_wait + 0.5,
                "{name}: waits as long"
            );
            assert!(
                real.util_pct > simulated.util_pct - 5.0,
                "{name}: uses as much"
            );
            // Beside builds a process may come late for a minute, and gets less than the others.
            figure(
                real.jain > simulated.jain - 0.1,
                &format!("{name}: shares are as equal"),
            );
        }
    }

    /// Compares one fleet that shares its pace and its queue with one whose processes share nothing.
    #[test]
    fn processes_that_share_a_pace_are_hardly_refused() {
        let _turn = turn();
        let scenario = &Scenarios::read(MANY).unwrap().0[0];
        let redis = RedisServer::start().unwrap();
        let mut fellows =
            ["fair", "fair-shared"].map(|pace| Fellows::of_bucket(pace, [32, 1], redis.url()));
        fellows.iter_mut().for_each(|fellows| fellows.fleet.go());
        let [alone, shared] = fellows.map(|fellows| {
            let pace = fellows.pace;
            let (simulated, real) = (laboratory(scenario, pace), fellows.finish());
            row(
                pace,
                "laboratory",
                &simulated.mean(),
                &simulated.deviation(),
            );
            row(pace, "over HTTP", &real, &Metrics::default());
            real
        });
        let calls: u64 = redis
            .command::<String>(&["INFO", "commandstats"])
            .lines()
            .filter_map(|line| {
                line.strip_prefix("cmdstat_evalsha:calls=")?
                    .split(',')
                    .next()?
                    .parse::<u64>()
                    .ok()
            })
            .sum();
        println!(
            "{calls} calls of Redis for {:.0} requests",
            shared.util_pct / 100.0 * BUCKET.refill * SPAN.as_secs_f64()
        );
        // A stall of the machine adds one or two refusals.
        assert!(
            shared.retry_pct < 1.5 && shared.retry_pct < alone.retry_pct / 2.0,
            "it is refused next to never"
        );
        assert!(
            shared.jain > 0.99 && shared.max_wait < alone.max_wait,
            "all get the same, and soon"
        );
        assert!(shared.util_pct > 85.0, "it uses what there is");
    }
}
