//! The example `operate` with a real Prometheus: its metrics, its dashboard, its alerts, and its end.
//!
//! `cargo test` builds the examples first; `cargo test --test operate` does not, and runs the existing
//! binary.
#![cfg(unix)] // SIGTERM

use crate::stage;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use redis_server::RedisServer;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout};
use upstream::{Upstream, refusal};

/// The longest wait for what should come within seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a file of the example.
fn file(name: &str) -> PathBuf {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/operate");
    example.join(name)
}

/// Runs `promtool`, and returns what it prints if it finds nothing wrong.
async fn promtool(arguments: &[&str], input: &str) -> String {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(file(""));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().expect("./tests/run installs prometheus");
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).await.unwrap();
    drop(stdin);
    let output = timeout(PATIENCE, child.wait_with_output()).await;
    let output = output.expect("promtool ends").unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

async fn get(url: &str, parameters: &[(&str, &str)]) -> String {
    let url = reqwest::Url::parse_with_params(url, parameters).unwrap();
    let request = client().get(url).timeout(PATIENCE).send();
    let response = request.await.unwrap();
    let (status, text) = (response.status(), response.text().await.unwrap());
    assert!(status.is_success(), "{status}: {text}");
    text
}

/// Repeats `check` until it returns nothing that is missing.
async fn until<T: std::fmt::Debug>(mut check: impl AsyncFnMut() -> Vec<T>) {
    let start = Instant::now();
    loop {
        let missing = check().await;
        if missing.is_empty() {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "missing: {missing:#?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// The running example.
struct Operate {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Its address, such as `127.0.0.1:40001`.
    address: String,
}

impl Operate {
    async fn start(api: &Upstream, redis: &RedisServer) -> Operate {
        let mut command = Command::new(stage::program("operate"));
        command.args(["--listen", "127.0.0.1:0", "--api", &api.url()]);
        // The linger ends by the second signal.
        command.args(["--redis", &redis.url(), "--linger", "600"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = until_line(&mut lines, "metrics: ").await;
        let address = stage::ends(&line, "http://", "/").unwrap().to_owned();
        Operate {
            child,
            lines,
            address,
        }
    }

    async fn page(&self, name: &str) -> String {
        get(&format!("http://{}/{name}", self.address), &[]).await
    }

    async fn terminate(&self) {
        let id = self.child.id().unwrap().to_string();
        let kill = Command::new("kill").args(["-TERM", &id]).status();
        assert!(kill.await.unwrap().success());
    }
}

async fn until_line(lines: &mut Lines<BufReader<ChildStdout>>, start: &str) -> String {
    let found = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.starts_with(start) {
                return line;
            }
        }
        panic!("it ended before {start:?}");
    };
    timeout(PATIENCE, found).await.expect("the line comes")
}

/// A Prometheus that reads the metrics of a program each second.
struct Prometheus {
    _child: Child,
    url: String,
    directory: PathBuf,
}

impl Prometheus {
    async fn start(target: &str) -> Prometheus {
        let port = redis_server::free_port();
        let directory = format!("tollgate-prometheus-{}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        std::fs::create_dir_all(&directory).unwrap();
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs:\n  - job_name: operate\n    static_configs: [targets: ['{target}']]\n"
        );
        let path = directory.join("prometheus.yml");
        std::fs::write(&path, config).unwrap();
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", path.display()));
        command.arg(format!("--storage.tsdb.path={}", directory.display()));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.kill_on_drop(true).spawn();
        let prometheus = Prometheus {
            _child: child.expect("./tests/run installs prometheus"),
            url: format!("http://127.0.0.1:{port}"),
            directory,
        };
        // It answers before it can be asked.
        let ready = format!("{}/-/ready", prometheus.url);
        until(async || match client().get(&ready).send().await {
            Ok(response) if response.status().is_success() => Vec::new(),
            Ok(response) => vec![response.status().to_string()],
            Err(error) => vec![error.to_string()],
        })
        .await;
        prometheus
    }

    /// Returns the values of all series of `expr` at the moment of the call.
    async fn query(&self, expr: &str) -> Vec<Value> {
        self.ask("query", &[("query", expr)]).await
    }

    /// Returns whether `expr` had a value within the last minutes.
    async fn has_data(&self, expr: &str) -> bool {
        let end = std::time::SystemTime::now();
        let end = end.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let (start, end) = ((end - 180).to_string(), end.to_string());
        let span = [
            ("query", expr),
            ("start", &start),
            ("end", &end),
            ("step", "1"),
        ];
        let series = self.ask("query_range", &span).await;
        let values = series.iter().flat_map(|series| series["values"].as_array());
        let mut values = values.flatten().filter_map(|value| value[1].as_str());
        values.any(|value| value.parse::<f64>().is_ok_and(f64::is_finite))
    }

    async fn ask(&self, kind: &str, parameters: &[(&str, &str)]) -> Vec<Value> {
        let text = get(&format!("{}/api/v1/{kind}", self.url), parameters).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        answer["data"]["result"].as_array().unwrap().clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Returns the sum of the lines of a metric on a page that have `label`.
fn sum(page: &str, metric: &str, labels: &[&str]) -> u64 {
    let lines = page.lines().filter(|line| {
        line.strip_prefix(metric)
            .is_some_and(|rest| rest.starts_with('{'))
            && labels.iter().all(|label| line.contains(label))
    });
    lines
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
        .sum()
}

/// Returns every `expr` of the dashboard, with its variables replaced.
fn dashboard() -> Vec<String> {
    let text = std::fs::read_to_string(file("dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap());
    let exprs = targets.map(|target| target["expr"].as_str().unwrap());
    let replaced = exprs.map(|expr| {
        expr.replace("$__rate_interval", "5s")
            .replace("$limiter", ".*")
    });
    replaced.collect()
}

#[tokio::test]
async fn alerts_fire_when_they_should() {
    promtool(&["check", "rules", "alerts.yml"], "").await;
    promtool(&["check", "config", "prometheus.yml"], "").await;
    promtool(&["test", "rules", "alerts_test.yml"], "").await;
    // Each alert has a test.
    let read = |name| std::fs::read_to_string(file(name)).unwrap();
    let (alerts, tests) = (read("alerts.yml"), read("alerts_test.yml"));
    let names: Vec<_> = alerts
        .lines()
        .filter_map(|line| line.split_once("- alert: "))
        .collect();
    assert!(names.len() >= 7);
    for (_, name) in names {
        let fires = format!("- alertname: {name}\n");
        let rests = format!("- {{alertname: {name}, ");
        assert!(tests.contains(&fires) && tests.contains(&rests), "{name}");
    }
}

#[tokio::test]
async fn counters_dashboard_and_end_match_the_upstream() {
    let redis = RedisServer::start().unwrap();
    let upstream = Upstream::open().latency(Duration::from_millis(30));
    let upstream = upstream.script(|call| (call % 100 == 40).then(|| refusal(1)));
    let mut operate = Operate::start(&upstream, &redis).await;
    let prometheus = Prometheus::start(&operate.address).await;

    // Every panel of the dashboard has data.
    let exprs = dashboard();
    assert!(exprs.len() >= 12);
    until(async || {
        let mut missing = Vec::new();
        for expr in &exprs {
            if !prometheus.has_data(expr).await {
                missing.push(expr);
            }
        }
        missing
    })
    .await;
    promtool(&["check", "metrics"], &operate.page("metrics").await).await;
    let limits = operate.page("limits").await;
    assert!(
        limits.contains("orders ") && limits.contains("20/1s"),
        "{limits}"
    );

    // After it has drained, it calls no more.
    operate.terminate().await;
    until_line(&mut operate.lines, "drained: ").await;
    let log = upstream.log();
    let page = operate.page("metrics").await;
    for who in ["orders", "search"] {
        let limiter = format!("limiter=\"{who}\"");
        let arrived = log.by_who()[who];
        let units = sum(&page, "tollgate_units_total", &[&limiter]);
        assert_eq!(units, arrived.all(), "{who}: {page}");
        let refused = sum(&page, "tollgate_upstream_refusals_total", &[&limiter]);
        assert_eq!(refused, arrived.refused, "{who}: {page}");
        let sent = ["passed", "waited", "uncounted"].map(|outcome| {
            let outcome = format!("outcome=\"{outcome}\"");
            sum(&page, "tollgate_requests_total", &[&limiter, &outcome])
        });
        assert_eq!(sent.iter().sum::<u64>(), arrived.all(), "{who}: {page}");
        let waits = sum(&page, "tollgate_wait_seconds_count", &[&limiter]);
        assert_eq!(waits, sent[1], "{who}: {page}");
        // Prometheus gets the last counts, too.
        let expr = format!("sum(tollgate_units_total{{{limiter}}})");
        until(async || {
            let last = prometheus.query(&expr).await;
            let last = last
                .first()
                .map_or("none", |value| value["value"][1].as_str().unwrap());
            let is_last = last == arrived.all().to_string();
            Vec::from_iter((!is_last).then(|| last.to_owned()))
        })
        .await;
    }
    operate.terminate().await;
    let status = timeout(PATIENCE, operate.child.wait()).await;
    assert!(
        status
            .expect("the second signal ends it")
            .unwrap()
            .success()
    );
    assert_eq!(upstream.log().len(), log.len(), "calls after the drain");
}
