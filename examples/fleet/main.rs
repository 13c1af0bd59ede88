//! A fleet of tasks calls a service with a limit: once without tollgate, once with it.
//!
//!     cargo run -p tollgate-fleet --example fleet
//!     cargo run -p tollgate-fleet --example fleet -- --limit "25/5s, 300/60s" --tasks 100 --seconds 15
//!
//! A fleet of processes runs twice: first each process counts for itself, which is the usual
//! mistake; then they share a count in Redis.
//!
//!     cargo run -p tollgate-fleet --example fleet -- --processes 4 --redis spawn
//!     cargo run -p tollgate-fleet --example fleet -- --processes 4 --redis redis://localhost:6379/
//!
//! The service is a real HTTP server in this process (`tests/upstream`), and all counts come from
//! its own log. All runs are the same loop around the same `reqwest::Client` (`callers.rs`). With
//! one process (`compare_one_process` below), the only difference of the second run is one more
//! layer. With many processes (`many_processes.rs`, `child.rs`), the layer of the second run has a
//! store.

mod args;
mod callers;
mod chart;
mod child;
mod many_processes;
mod progress;
#[path = "../common/progress.rs"]
mod progress_line;
mod report;
mod run;
mod shared_redis;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tollgate::error::BoxError;
use tollgate::{Quota, RateLimitLayer};
use tower::ServiceBuilder;
use upstream::{Rule, Upstream};

use args::Args;
use callers::{Callers, MAX_CALLS};
use progress::Progress;
use run::Run;
use shared_redis::Redis;

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.to_string(), 1),
    };
    let code = runtime.block_on(begin());
    // A name lookup blocks a thread; the program does not wait for it.
    runtime.shutdown_background();
    code
}

/// Reads the command line, and runs what it asks for.
async fn begin() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    let role = words
        .next_if(|word| word == child::ROLE)
        .map(|_| child::Role::read(&mut words));
    let args = match Args::parse(words) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{}", args::HELP);
            return ExitCode::SUCCESS;
        }
        Err(complaint) => return failed(&format!("{complaint}\nTry --help."), 2),
    };
    match role {
        Some(Some(role)) => return child::run(&role, &args).await,
        Some(None) => {
            return failed(
                "the role \"child\" is for processes that the example starts\nTry --help.",
                2,
            );
        }
        None => {}
    }
    let redis = match &args.redis {
        Some(place) => match Redis::reach(place).await {
            Ok(redis) => Some(redis),
            Err(complaint) => return failed(&complaint, 2),
        },
        None => None,
    };
    let report = tokio::select! {
        biased;
        () = termination() => Err("ended before the report".into()),
        report = compare(&args, redis.as_ref()) => report,
    };
    match report {
        Ok(report) => {
            print!("\n{report}");
            ExitCode::SUCCESS
        }
        Err(error) => failed(&error.to_string(), 1),
    }
}

/// Runs the fleet twice, and returns the report.
async fn compare(args: &Args, redis: Option<&Redis>) -> Result<String, BoxError> {
    if args.has_children() {
        many_processes::compare(args, redis).await
    } else {
        compare_one_process(args).await
    }
}

/// Runs the fleet without tollgate and with it.
async fn compare_one_process(args: &Args) -> Result<String, BoxError> {
    let limit = RateLimitLayer::new(args.quota())?;
    let client = callers::client()?;
    println!(
        "{} tasks call a service that allows {}, for {:?} each time.\n",
        args.tasks, args.limit, args.time
    );

    // Without tollgate.
    let upstream = Upstream::start(rules(args.limit));
    let callers = Arc::new(Callers::new(args, 0, &upstream.url())?.max_calls(MAX_CALLS));
    let service = ServiceBuilder::new()
        .map_request(callers.stamp())
        .service(client.clone());
    let mut progress = Progress::start("without tollgate", args.time);
    let outcome = callers::run(&callers, service, |waiting| {
        progress.show(upstream.tally(), waiting)
    })
    .await?;
    progress.finish(upstream.tally());
    let without = Run::new("without tollgate", outcome, upstream.log());

    // With tollgate: one layer more.
    let upstream = Upstream::start(rules(args.limit));
    let callers = Arc::new(Callers::new(args, 0, &upstream.url())?);
    let service = ServiceBuilder::new()
        .layer(limit)
        .map_request(callers.stamp())
        .service(client);
    let mut progress = Progress::start("with tollgate", args.time);
    let outcome = callers::run(&callers, service, |waiting| {
        progress.show(upstream.tally(), waiting)
    })
    .await?;
    progress.finish(upstream.tally());
    let with = Run {
        margin: Some(MARGIN),
        ..Run::new("with tollgate", outcome, upstream.log())
    };

    Ok(report::one(args, &rules(args.limit), &[without, with]))
}

/// Prints an error, and returns the exit code.
fn failed(why: &str, code: u8) -> ExitCode {
    eprintln!("fleet: {why}");
    ExitCode::from(code)
}

/// Waits for SIGTERM or Ctrl-C. The program then drops, and so ends, everything that it started.
async fn termination() {
    #[cfg(unix)]
    if let Ok(mut terminate) =
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
    {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        return;
    }
    let _ = tokio::signal::ctrl_c().await;
}

/// Returns the rules that the service enforces: the sliding windows of tollgate's quota.
fn rules(limit: Quota) -> Vec<Rule> {
    limit
        .limits()
        .iter()
        .map(|limit| Rule::new(limit.count(), limit.window()))
        .collect()
}

/// How much the transit time to the service may vary: the default of `RateLimitLayer`.
const TRANSIT_SLACK: Duration = Duration::from_millis(10);

/// The time that tollgate keeps free between two windows: the validity of a permit, 10 ms, and the
/// slack.
const MARGIN: Duration = Duration::from_millis(20);
