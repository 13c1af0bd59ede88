//! The outcome of the calls to a service with several limits, each with a key of its own.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::{Request, Response};
use tokio::time::Instant;
use tollgate::Limited;
use tollgate::error::BoxError;
use tower::{Service, ServiceExt};
use upstream::{KeyedRule, Log, Rule, Upstream};

use super::children::{Children, Line};
use super::places::Places;
use super::table::{TRANSIT_SLACK, table};

/// Returns a table of the limits, by the log of the service.
///
/// The share that is used is that of the busiest key.
fn limits_table(log: &Log, limits: &[KeyedRule]) -> String {
    let row = |limit: &KeyedRule| {
        let Rule { count, window } = limit.rule;
        let keys = log.by_key(limit.name);
        let most = keys.values().map(|accepted| accepted.largest_count(window));
        let busiest = keys.values().max_by_key(|accepted| accepted.len());
        let used = busiest.and_then(|accepted| accepted.used(limit.rule));
        [
            format!("{}: {count} in {window:?}", limit.name),
            keys.len().to_string(),
            most.max().unwrap_or_default().to_string(),
            used.map_or("-".to_owned(), |used| format!("{:.0} %", 100.0 * used)),
            log.refused_by(limit.name).to_string(),
        ]
    };
    let rows: Vec<_> = limits.iter().map(row).collect();
    table(
        [
            "limit of the service",
            "keys",
            "most in a window",
            "used",
            "refused 429",
        ],
        &rows,
    )
}

/// Makes one call. Returns what became of it, as a line that [`Outcomes`] reads.
pub(crate) async fn call<S>(service: S, request: Request) -> Result<String, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>>,
{
    let start = Instant::now();
    let error = match service.oneshot(request).await {
        Ok(response) => {
            let waited = start.elapsed().as_micros();
            return Ok(format!("{} {waited}", response.status().as_u16()));
        }
        Err(error) => error.into(),
    };
    match Limited::find(&*error) {
        Some(Limited::Local { report, .. }) => {
            let name = report.name().unwrap_or("the first limit");
            Ok(format!("refused {name}"))
        }
        Some(_) => Ok("refused the store".to_owned()),
        None => Err(error),
    }
}

/// Marks the outcome of a call to a key with little use.
pub(crate) const LIGHT: &str = "light ";

/// What became of all calls.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    /// The time until the response, for each accepted call.
    waits: Vec<Duration>,
    /// The same, for the calls that are marked as [`LIGHT`].
    light_waits: Vec<Duration>,
    refused_by_service: u64,
    /// The calls that were not sent, by the limit that refused them.
    not_sent: BTreeMap<String, u64>,
}

impl Outcomes {
    /// Reads a line of [`call`], which may be marked as [`LIGHT`].
    pub(crate) fn add(&mut self, line: &str) -> Result<(), BoxError> {
        let outcome = line.strip_prefix(LIGHT).unwrap_or(line);
        let (status, rest) = outcome.split_once(' ').ok_or("a line without an outcome")?;
        match status {
            "200" => {
                let wait = Duration::from_micros(rest.parse()?);
                self.waits.push(wait);
                if outcome != line {
                    self.light_waits.push(wait);
                }
            }
            "refused" => *self.not_sent.entry(rest.to_owned()).or_default() += 1,
            _ => self.refused_by_service += 1,
        }
        Ok(())
    }

    /// Returns how many calls were sent.
    pub(crate) fn sent(&self) -> u64 {
        self.waits.len() as u64 + self.refused_by_service
    }

    /// Returns a table of the outcomes.
    pub(crate) fn table(&self) -> String {
        let mut rows = vec![
            ["sent".to_owned(), self.sent().to_string()],
            [
                "refused by the service".to_owned(),
                self.refused_by_service.to_string(),
            ],
        ];
        rows.extend(wait_rows("wait", &self.waits));
        if !self.light_waits.is_empty() {
            rows.extend(wait_rows("wait with little use", &self.light_waits));
        }
        for (name, count) in &self.not_sent {
            rows.push([format!("not sent, because of {name}"), count.to_string()]);
        }
        table(["calls", ""], &rows)
    }
}

/// Returns the rows of `waits` in the table of outcomes.
fn wait_rows(name: &str, waits: &[Duration]) -> [[String; 2]; 2] {
    let mut waits = waits.to_vec();
    waits.sort_unstable();
    [50, 99].map(|percent| {
        let last = waits.len().saturating_sub(1);
        let wait = waits.get(last * percent / 100);
        let wait = wait.map_or("-".to_owned(), |wait| {
            format!("{:.3} s", wait.as_secs_f64())
        });
        [format!("{name}, p{percent}"), wait]
    })
}

/// Starts the Redis, a service with `limits`, and `processes` processes of this program, each with
/// the `words` of its number. They print the outcomes of their calls. Prints what became of them.
///
/// # Errors
///
/// If a server or a process fails, or the service refused a call: see [`report`].
pub(crate) async fn call_from_processes(
    places: &mut Places,
    limits: &[KeyedRule],
    processes: u32,
    words: impl Fn(u32) -> Vec<String>,
) -> Result<Outcomes, BoxError> {
    places
        .start(|| Upstream::open().keyed(limits.to_vec()))
        .await?;
    let mut children = Children::of_this_program()?;
    for number in 0..processes {
        let words = [places.words(), words(number)].concat();
        children.start(format!("process {number}"), words)?;
    }
    let mut outcomes = Outcomes::default();
    while let Some(Line { text, .. }) = children.line().await {
        outcomes.add(&text)?;
    }
    children.end().await?;
    let Some(service) = &places.upstream else {
        println!("{}", outcomes.table());
        return Ok(outcomes);
    };
    let calls = places.script_calls();
    report(&outcomes, service, limits)?;
    if let Some(calls) = calls {
        let each = calls as f64 / outcomes.sent().max(1) as f64;
        println!("Redis: {each:.2} calls for each call sent.");
    }
    Ok(outcomes)
}

/// Prints what became of the calls, and what the service counted.
///
/// # Errors
///
/// If the service refused a call, though the time to it varied by no more than `transit_slack`. If
/// the machine paused, the table shows the refusals.
pub(crate) fn report(
    outcomes: &Outcomes,
    service: &Upstream,
    limits: &[KeyedRule],
) -> Result<(), BoxError> {
    let log = service.log();
    println!("{}\n{}", outcomes.table(), limits_table(&log, limits));
    let (refused, jitter) = (service.tally().refused, log.jitter());
    if refused > 0 && jitter > TRANSIT_SLACK {
        println!("The machine paused: the time to the service varied by {jitter:?}.");
        return Ok(());
    }
    match refused {
        0 => Ok(()),
        _ => Err(format!("the service refused {refused} calls").into()),
    }
}
