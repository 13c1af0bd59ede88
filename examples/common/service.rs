//! A service with several limits, each with a key of its own, and the outcome of the calls to it.
//!
//! The service counts by itself, in sliding windows: it has no code of tollgate.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use reqwest::{Request, Response};
use tokio::time::Instant;
use tollgate::Limited;
use tollgate::error::BoxError;
use tower::{Service, ServiceExt};
use upstream::{Rule, Upstream, refusal};

use super::table::{TRANSIT_SLACK, table};

/// One limit of the service.
#[derive(Clone, Copy)]
pub(crate) struct ServiceLimit {
    pub(crate) name: &'static str,
    pub(crate) rule: Rule,
    /// Finds whose limit it is, in the path and the headers of a call. `None` if the limit does not
    /// see the call.
    pub(crate) key: fn(&str, &HeaderMap) -> Option<String>,
    /// The scope that a refusal by this limit names.
    pub(crate) scope: &'static str,
}

/// The calls that the service accepted, by limit and key, and how many it refused by limit.
#[derive(Clone, Default)]
pub(crate) struct Counts(Arc<Mutex<Counted>>);

#[derive(Default)]
struct Counted {
    accepted: BTreeMap<(&'static str, String), Vec<Duration>>,
    refused: BTreeMap<&'static str, u64>,
}

/// Makes a service with `limits`, which counts in `counts`. A call that one limit refuses counts in
/// none.
pub(crate) fn service(limits: Vec<ServiceLimit>, counts: &Counts) -> Upstream {
    let counts = counts.clone();
    Upstream::open().deciding(move |path, headers, now| {
        let mut counted = counts.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen_by: Vec<_> = limits
            .iter()
            .filter_map(|limit| Some((limit, (limit.key)(path, headers)?)))
            .collect();
        for (limit, key) in &seen_by {
            let accepted = counted.accepted.entry((limit.name, key.clone()));
            let accepted = accepted.or_default();
            // The call that has to leave the window before another one may come.
            let oldest = accepted.iter().rev().nth(limit.rule.count as usize - 1);
            let Some(free_at) = oldest.map(|at| *at + limit.rule.window) else {
                continue;
            };
            if now < free_at {
                *counted.refused.entry(limit.name).or_default() += 1;
                let mut response = refusal((free_at - now).as_secs_f64().ceil() as u64);
                let scope = limit.scope.parse().expect("a scope is a header value");
                response.headers_mut().insert("x-ratelimit-scope", scope);
                return response;
            }
        }
        for (limit, key) in seen_by {
            let accepted = counted.accepted.entry((limit.name, key)).or_default();
            accepted.push(now);
        }
        http::Response::new("welcome\n".to_owned())
    })
}

impl Counts {
    /// Returns a table of the limits, by what the service counted.
    ///
    /// The share that is used is that of the busiest key. It is the window over the mean time in
    /// which `count` calls came.
    pub(crate) fn table(&self, limits: &[ServiceLimit]) -> String {
        let counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let row = |limit: &ServiceLimit| {
            let Rule { count, window } = limit.rule;
            let keys = counted.accepted.iter();
            let keys = keys.filter(|((name, _), _)| *name == limit.name);
            let keys: Vec<&Vec<Duration>> = keys.map(|(_, accepted)| accepted).collect();
            let most = keys.iter().map(|accepted| most_within(accepted, window));
            let busiest = keys.iter().max_by_key(|accepted| accepted.len());
            let used = busiest.and_then(|accepted| used(accepted, limit.rule));
            [
                format!("{}: {count} in {window:?}", limit.name),
                keys.len().to_string(),
                most.max().unwrap_or_default().to_string(),
                used.map_or("-".to_owned(), |used| format!("{:.0} %", 100.0 * used)),
                counted
                    .refused
                    .get(limit.name)
                    .copied()
                    .unwrap_or_default()
                    .to_string(),
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
}

/// Returns the most of `times` within one half-open `window`.
fn most_within(times: &[Duration], window: Duration) -> usize {
    let within = |(index, first): (usize, &Duration)| {
        let rest = &times[index..];
        rest.partition_point(|at| *at - *first < window)
    };
    times.iter().enumerate().map(within).max().unwrap_or(0)
}

/// Returns which share of `rule` the calls used. `None` until more than `rule.count` came.
fn used(times: &[Duration], rule: Rule) -> Option<f64> {
    let later = times.get(rule.count as usize..)?;
    let took: Duration = later.iter().zip(times).map(|(to, from)| *to - *from).sum();
    (!took.is_zero()).then(|| rule.window.as_secs_f64() * later.len() as f64 / took.as_secs_f64())
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

/// What became of all calls.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    /// The time until the response, for each accepted call.
    waits: Vec<Duration>,
    refused_by_service: u64,
    /// The calls that were not sent, by the limit that refused them.
    not_sent: BTreeMap<String, u64>,
}

impl Outcomes {
    /// Reads a line of [`call`].
    pub(crate) fn add(&mut self, line: &str) -> Result<(), BoxError> {
        let (status, rest) = line.split_once(' ').ok_or("a line without an outcome")?;
        match status {
            "200" => self.waits.push(Duration::from_micros(rest.parse()?)),
            "refused" => *self.not_sent.entry(rest.to_owned()).or_default() += 1,
            _ => self.refused_by_service += 1,
        }
        Ok(())
    }

    /// Returns a table of the outcomes.
    pub(crate) fn table(mut self) -> String {
        self.waits.sort_unstable();
        let wait = |percent: usize| {
            let last = self.waits.len().saturating_sub(1);
            let wait = self.waits.get(last * percent / 100);
            wait.map_or("-".to_owned(), |wait| {
                format!("{:.3} s", wait.as_secs_f64())
            })
        };
        let sent = self.waits.len() as u64 + self.refused_by_service;
        let mut rows = vec![
            ["sent".to_owned(), sent.to_string()],
            [
                "refused by the service".to_owned(),
                self.refused_by_service.to_string(),
            ],
            ["wait, p50".to_owned(), wait(50)],
            ["wait, p99".to_owned(), wait(99)],
        ];
        for (name, count) in &self.not_sent {
            rows.push([format!("not sent, because of {name}"), count.to_string()]);
        }
        table(["calls", ""], &rows)
    }
}

/// Prints what became of the calls, and what the service counted.
///
/// # Errors
///
/// If the service refused a call, though the time to it varied by no more than `transit_slack`. If
/// the machine paused, the table shows the refusals.
pub(crate) fn report(
    outcomes: Outcomes,
    service: &Upstream,
    counts: &Counts,
    limits: &[ServiceLimit],
) -> Result<(), BoxError> {
    println!("{}\n{}", outcomes.table(), counts.table(limits));
    let (refused, jitter) = (service.tally().refused, service.log().jitter());
    if refused > 0 && jitter > TRANSIT_SLACK {
        println!("The machine paused: the time to the service varied by {jitter:?}.");
        return Ok(());
    }
    match refused {
        0 => Ok(()),
        _ => Err(format!("the service refused {refused} calls").into()),
    }
}
