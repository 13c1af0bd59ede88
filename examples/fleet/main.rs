//! A fleet of tasks calls a service with a limit: once without tollgate, once with it.
//!
//!     cargo run --release --example fleet
//!     cargo run --release --example fleet -- --limit "25/5s, 300/60s" --tasks 100 --seconds 15
//!
//! A fleet of processes runs twice: first each process counts for itself, which is the usual mistake; then they share a
//! count in Redis.
//!
//!     cargo run --release --example fleet -- --processes 4 --redis spawn
//!     cargo run --release --example fleet -- --processes 4 --redis redis://localhost:6379/
//!
//! The service is a real HTTP server in this process (`tests/upstream`), and all counts come from its own log. All runs
//! are the same loop around the same `reqwest::Client` (`run.rs`). With one process (`alone.rs`), the second run has
//! one more layer, and that is the only difference. With many processes (`parent.rs`, `child.rs`), the layer of the
//! second run has a store.

mod alone;
mod args;
mod chart;
mod child;
mod parent;
mod progress;
mod report;
mod run;
mod seen;
mod sentences;
mod shared;
mod wire;

use std::process::ExitCode;
use std::time::Duration;

use tollgate::Quota;
use tollgate::error::BoxError;
use upstream::Rule;

use args::Args;
use shared::Redis;

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

async fn begin() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    let role = words.next_if(|word| word == child::ROLE).map(|_| child::Role::read(&mut words));
    let args = match Args::parse(words) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{}", args::HELP);
            return ExitCode::SUCCESS;
        }
        Err(complaint) => return failed(&format!("{complaint}\nTry --help."), 2),
    };
    match role {
        Some(Some(role)) => return child::live(&role, &args).await,
        Some(None) => return failed("only a fleet starts its processes\nTry --help.", 2),
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
        () = ended() => Err("ended before the report".into()),
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

async fn compare(args: &Args, redis: Option<&Redis>) -> Result<String, BoxError> {
    if args.many() { parent::compare(args, redis).await } else { alone::compare(args).await }
}

fn failed(why: &str, code: u8) -> ExitCode {
    eprintln!("fleet: {why}");
    ExitCode::from(code)
}

/// Waits until the program is asked to end. Everything that it started is then dropped, and so ends too.
async fn ended() {
    #[cfg(unix)]
    if let Ok(mut terminate) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
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
    limit.limits().iter().map(|limit| Rule::new(limit.count(), limit.window())).collect()
}

/// How much the transit time to the service may vary, as `RateLimitLayer` assumes it.
const TRANSIT_SLACK: Duration = Duration::from_millis(10);

/// What tollgate keeps free between two windows: the life of a permit, 10 ms, and the slack.
const MARGIN: Duration = Duration::from_millis(20);
