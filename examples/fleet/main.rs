//! A fleet of tasks calls a service with a limit: once without tollgate, once with it.
//!
//!     cargo run --release --example fleet
//!     cargo run --release --example fleet -- --limit "25/5s, 300/60s" --tasks 100 --seconds 15
//!
//! The service is a real HTTP server in this process (`tests/upstream`), and all counts come from its own log. Both runs
//! are the same loop around the same `reqwest::Client` (`run.rs`); the second has one layer more, and that is all.

mod args;
mod chart;
mod report;
mod run;

use std::process::ExitCode;
use std::time::Duration;

use reqwest::Request;
use tollgate::{BoxError, Quota, RateLimitLayer};
use tower::ServiceBuilder;
use upstream::{Rule, SENT_HEADER, Upstream, sent_now};

use args::Args;
use report::Run;

#[tokio::main]
async fn main() -> ExitCode {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{}", args::HELP);
            return ExitCode::SUCCESS;
        }
        Err(complaint) => {
            eprintln!("fleet: {complaint}\nTry --help.");
            return ExitCode::from(2);
        }
    };
    match compare(&args).await {
        Ok(report) => {
            print!("\n{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fleet: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn compare(args: &Args) -> Result<String, BoxError> {
    let limit = RateLimitLayer::new(args.quota())?;
    let client = reqwest::Client::builder().no_proxy().build()?; // the service is on this machine
    println!(
        "{} tasks call a service that allows {}, for {:?} each time.\n",
        args.tasks, args.limit, args.time
    );

    // Without tollgate.
    let service = ServiceBuilder::new().map_request(stamp).service(client.clone());
    let upstream = Upstream::start(rules(args.limit));
    let outcome = run::fleet("without tollgate", args, &upstream, service, None).await?;
    let without = Run::new(outcome, upstream.log());

    // With it: one layer more.
    let service = ServiceBuilder::new().layer(limit.clone()).map_request(stamp).service(client);
    let upstream = Upstream::start(rules(args.limit));
    let outcome = run::fleet("with tollgate", args, &upstream, service, Some(limit.limiter())).await?;
    let with = Run::new(outcome, upstream.log());

    Ok(report::compare(args, &rules(args.limit), &without, &with))
}

/// Writes into a request when it was sent. It stands behind the gate, so that a wait there does not count.
fn stamp(mut request: Request) -> Request {
    request.headers_mut().insert(SENT_HEADER, sent_now());
    request
}

/// What the service enforces is what tollgate is told: sliding windows, here.
fn rules(limit: Quota) -> Vec<Rule> {
    limit.limits().iter().map(|limit| Rule::new(limit.count(), limit.window())).collect()
}

/// By how much the way to the service may vary, as `RateLimitLayer` assumes it.
const TRANSIT_SLACK: Duration = Duration::from_millis(10);

/// What tollgate keeps free between two windows: the life of a permit, 10 ms, and the slack.
const MARGIN: Duration = Duration::from_millis(20);
