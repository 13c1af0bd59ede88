//! Code that the examples share: options, servers, child processes, progress, a table, and the
//! outcome of calls to a service with several limits.
//!
//! An example with several processes is one program. Started without `--role`, it starts a Redis, a service with a
//! limit, and itself once more for each role. These processes share the limit.
#![allow(dead_code, unused_imports, reason = "each example uses its part")]

mod children;
mod options;
mod outcomes;
mod places;
mod progress;
mod table;

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use reqwest::Request;
use tollgate::error::BoxError;
use upstream::{SENT_HEADER, sent_now};

pub(crate) use children::{Children, Line};
pub(crate) use options::{Options, Usage};
pub(crate) use outcomes::{LIGHT, Outcomes, call, call_from_processes, report};
pub(crate) use places::Places;
pub(crate) use progress::ProgressLine;
pub(crate) use table::{TRANSIT_SLACK, not_kept, table};

/// Runs an example: prints help, does its work, or prints the error. A bad option ends it with 2, a
/// failure with 1.
pub(crate) async fn main(
    name: &str,
    help: &str,
    work: impl AsyncFnOnce(Options) -> Result<(), BoxError>,
) -> ExitCode {
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{help}");
            return ExitCode::SUCCESS;
        }
        Err(usage) => return complain(name, &usage.into()),
    };
    match work(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(name, &error),
    }
}

fn complain(name: &str, error: &BoxError) -> ExitCode {
    if error.is::<Usage>() {
        eprintln!("{name}: {error}\nTry --help.");
        return ExitCode::from(2);
    }
    let mut text = error.to_string();
    let mut beneath = error.source();
    while let Some(error) = beneath {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
        beneath = error.source();
    }
    eprintln!("{name}: {text}");
    ExitCode::FAILURE
}

/// Returns a client that makes one attempt for each call, so that the limiter sees all attempts.
pub(crate) fn client() -> Result<reqwest::Client, BoxError> {
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy() // the service is on this machine
        .build()?;
    Ok(client)
}

/// Writes the send time into a request. It stands behind the gate, so that a wait there does not
/// count.
pub(crate) fn stamp(mut request: Request) -> Request {
    request.headers_mut().insert(SENT_HEADER, sent_now());
    request
}

/// Formats the time of day in UTC.
pub(crate) fn clock(at: SystemTime) -> String {
    let since_epoch = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = since_epoch.as_secs() % 86_400;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!(
        "{hours:02}:{minutes:02}:{seconds:02}.{:03}",
        since_epoch.subsec_millis()
    )
}

/// Formats a span, such as `2.04 s`.
pub(crate) fn span(span: Duration) -> String {
    format!("{:.2} s", span.as_secs_f64())
}
