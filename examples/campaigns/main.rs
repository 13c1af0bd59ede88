//! Many campaigns of many thousand calls, by four worker processes, under one limit per second.
//!
//!     cargo run --release --example campaigns
//!     cargo run --release --example campaigns -- --calls 100000 --rate 4000    # 2,000,000 calls
//!
//! The second command takes nine minutes. Six processes on one machine wait for its processors, so
//! the transit time to the service varies by more than the default allowance of 10 ms. Here
//! `--transit-slack` is 50 ms, which costs 5 % of the rate.
//!
//! A call that cannot be sent soon is refused at once, with a time to retry; the worker defers it
//! until then (`work.rs`). At the end the log of the service shows whether each call was sent
//! exactly once, and whether the limit was kept.

#[path = "../common/mod.rs"]
mod common;
mod queue;
mod report;
mod work;

use std::process::ExitCode;
use std::time::Duration;

use tokio::time::Instant;
use tollgate::error::BoxError;
use upstream::{Rule, Upstream};

use common::{Children, Line, Options, Places, ProgressLine, Usage};
use report::Told;

const HELP: &str = "\
Campaigns of many calls, by four worker processes, under one limit per second.

Usage: cargo run --release --example campaigns -- [options]

  --redis <url>       where to count                           [spawn: a redis-server of its own]
  --api <url>         whom to call                             [spawn: a service of its own]
  --rate <n>          how many calls per second are allowed    [200]
  --campaigns <n>     how many campaigns                       [20]
  --calls <n>         how many calls each of them has          [200]
  --max-wait <s>      how long a call may wait in line         [0.25]
  --transit-slack <s> how much the way to the service may vary [0.05]
  --senders <n>       how many calls a worker has at once      [64]
  --workers <n>       how many processes                       [4]
  --role worker       be one of them
  --number <n>        which
  --help              this text
";

#[tokio::main]
async fn main() -> ExitCode {
    common::main("campaigns", HELP, async |mut options| {
        let role = options.role(&["worker"])?;
        let args = Args::read(options)?;
        match role {
            Some(_) => work::work(&args).await,
            None => start_all(args).await,
        }
    })
    .await
}

/// Starts the Redis, the service and the workers, shows their progress, and checks what the service
/// saw.
async fn start_all(mut args: Args) -> Result<(), BoxError> {
    let rule = Rule::per_second(args.rate);
    args.places.start(|| Upstream::start(rule)).await?;
    let calls = u64::from(args.campaigns) * u64::from(args.calls);
    println!(
        "{} campaigns of {} calls each, {calls} in all, by {} processes, at {} calls per second.\n",
        args.campaigns, args.calls, args.workers, args.rate
    );

    let mut children = Children::of_this_program()?;
    for number in 0..args.workers {
        children.start(format!("worker {number}"), args.words(number))?;
    }
    let start = Instant::now();
    let mut told = Told::default();
    let mut progress = ProgressLine::new();
    while let Some(Line { who, text }) = children.line().await {
        told.on_event(who, &text);
        progress.show(
            start.elapsed(),
            told.done(calls),
            &told.summary(start.elapsed(), calls),
        );
    }
    progress.finish(told.done(calls), &told.summary(start.elapsed(), calls));
    children.end().await?;

    let log = args.places.upstream.as_ref().map(Upstream::log);
    println!("\n{}", report::table(&args, &told, log.as_ref()));
    match log {
        Some(log) => report::check(&args, rule, &log),
        None => Ok(()),
    }
}

/// The options of the command line.
#[derive(Debug)]
struct Args {
    places: Places,
    rate: u32,
    campaigns: u32,
    calls: u32,
    max_wait: Duration,
    transit_slack: Duration,
    senders: u32,
    workers: u32,
    /// The number of the worker that this process is.
    number: u32,
}

impl Args {
    fn read(mut options: Options) -> Result<Self, Usage> {
        let args = Args {
            places: Places::given(&mut options)?,
            rate: options.number("--rate", 200, 1..=100_000)?,
            campaigns: options.number("--campaigns", 20, 1..=1000)?,
            calls: options.number("--calls", 200, 1..=10_000_000)?,
            max_wait: options.seconds("--max-wait", 0.25)?,
            transit_slack: options.seconds("--transit-slack", 0.05)?,
            senders: options.number("--senders", 64, 1..=10_000)?,
            workers: options.number("--workers", 4, 1..=64)?,
            number: options.number("--number", 0, 0..=63)?,
        };
        options.finish()?;
        Ok(args)
    }

    /// Returns the options as words for the worker `number`.
    fn words(&self, number: u32) -> Vec<String> {
        let mut words = self.places.words();
        words.extend(["--role", "worker"].map(str::to_owned));
        for (name, span) in [
            ("--max-wait", self.max_wait),
            ("--transit-slack", self.transit_slack),
        ] {
            words.extend([name.to_owned(), span.as_secs_f64().to_string()]);
        }
        for (name, value) in [
            ("--rate", self.rate),
            ("--campaigns", self.campaigns),
            ("--calls", self.calls),
            ("--senders", self.senders),
            ("--workers", self.workers),
            ("--number", number),
        ] {
            words.extend([name.to_owned(), value.to_string()]);
        }
        words
    }

    /// Returns the campaigns of the worker `number`.
    fn campaigns_of(&self, number: u32) -> Vec<u32> {
        (0..self.campaigns)
            .filter(|campaign| campaign % self.workers == number)
            .collect()
    }
}
