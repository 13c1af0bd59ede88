//! The outcome of each call of a worker, and figures over all calls.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::Context;
use tollgate::Quota;
use tollgate::quota::Limit;
use upstream::{Arrival, Log};

/// The end of one call at the gate. Moments are those of [`now`](crate::now).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When the call entered the gate.
    pub asked: u64,
    /// When the call left the gate.
    pub ended: u64,
    /// How the call left the gate.
    pub outcome: Outcome,
    /// The text of the error, if there was one. If the upstream refused the call: when the refusal
    /// arrived.
    pub text: String,
}

/// Returns the text of a call whose refusal by the upstream arrived at `moment`.
pub fn refusal(moment: u64) -> String {
    format!("429 {moment}")
}

/// How a call left the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call had a permit, or passed uncounted.
    Granted,
    /// The limit refused the call.
    Refused,
    /// The call was refused because the store did not answer.
    StoreFailed,
    /// The gate let the call through, but the call itself failed.
    Broken,
    /// The caller gave up at the end of its turn.
    GivenUp,
}

const NAMES: [(Outcome, &str); 5] = [
    (Outcome::Granted, "granted"),
    (Outcome::Refused, "refused"),
    (Outcome::StoreFailed, "store-failed"),
    (Outcome::Broken, "broken"),
    (Outcome::GivenUp, "given-up"),
];

impl Event {
    /// Returns how long the call was at the gate.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.ended.saturating_sub(self.asked))
    }

    /// Returns when the refusal by the upstream arrived, if there was one.
    pub fn refused_at(&self) -> Option<u64> {
        self.text.strip_prefix("429 ")?.parse().ok()
    }
}

/// The format in which a worker prints an event.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES
            .iter()
            .find(|(outcome, _)| *outcome == self.outcome)
            .map_or("", |(_, name)| name);
        write!(
            f,
            "{name} {} {} {}",
            self.asked,
            self.ended,
            self.text.replace('\n', " ")
        )
    }
}

impl FromStr for Event {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Self> {
        let mut words = line.splitn(4, ' ');
        let name = words.next().unwrap_or_default();
        let outcome = NAMES
            .iter()
            .find(|(_, other)| *other == name)
            .context("no outcome")?
            .0;
        let mut moment =
            || -> anyhow::Result<u64> { Ok(words.next().context("no moment")?.parse()?) };
        let (asked, ended) = (moment()?, moment()?);
        Ok(Event {
            asked,
            ended,
            outcome,
            text: words.next().unwrap_or_default().into(),
        })
    }
}

/// The report of one worker.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The calls of the worker, in the order in which they ended.
    pub events: Vec<Event>,
    /// The warnings that tollgate logged.
    pub warnings: Vec<String>,
    /// When the worker learned of each quota that was set, as [`now`](crate::now) has it.
    pub quotas: Vec<u64>,
    /// When the worker was drained, as [`now`](crate::now) has it.
    pub drained: Option<u64>,
    /// Whether the worker ran to its end. A killed worker did not, and reports nothing.
    pub ended: bool,
}

impl Report {
    /// Returns the calls with this outcome.
    pub fn of(&self, outcome: Outcome) -> impl Iterator<Item = &Event> {
        self.events
            .iter()
            .filter(move |event| event.outcome == outcome)
    }
}

/// Returns the grants of all workers, sorted by the moment of the grant.
pub fn by_grant(reports: &[Report]) -> Vec<&Event> {
    let mut grants: Vec<_> = reports
        .iter()
        .flat_map(|report| report.of(Outcome::Granted))
        .collect();
    grants.sort_by_key(|event| event.ended);
    grants
}

/// Returns the grants of all workers as the log of an upstream with no network delay.
pub fn log(reports: &[Report]) -> Log {
    let grants = by_grant(reports);
    let first = grants.first().map_or(0, |event| event.ended);
    let start = Instant::now();
    let arrival = |event: &&Event| {
        let at = start + Duration::from_nanos(event.ended - first);
        Arrival {
            at,
            sent: Some(at),
            who: None,
            accepted: true,
            ended: None,
            body: 0,
            keys: Vec::new(),
            refused_by: None,
        }
    };
    Log::from(grants.iter().map(arrival).collect::<Vec<_>>())
}

/// Returns the longest time that a call was at the gate, whatever its outcome.
pub fn longest_wait(reports: &[Report]) -> Duration {
    reports
        .iter()
        .flat_map(|report| &report.events)
        .map(Event::waited)
        .max()
        .unwrap_or_default()
}

/// Counts the calls that another process overtook: its call arrived more than `grace` later and was
/// granted more than `grace` earlier. Also returns the largest lead.
pub fn overtaken(reports: &[Report], grace: Duration) -> (usize, Duration) {
    let grace = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
    let (mut calls, mut most) = (0, 0);
    for (i, report) in reports.iter().enumerate() {
        let others = || {
            reports
                .iter()
                .enumerate()
                .filter(|(j, _)| *j != i)
                .map(|(_, other)| other)
        };
        for first in report.of(Outcome::Granted) {
            let later = others()
                .flat_map(|other| other.of(Outcome::Granted))
                .filter(|later| {
                    first.asked + grace < later.asked && first.ended > later.ended + grace
                });
            if let Some(by) = later.map(|later| first.ended - later.ended).max() {
                calls += 1;
                most = most.max(by);
            }
        }
    }
    (calls, Duration::from_nanos(most))
}

/// Returns when calls can leave that all arrive at once: each as soon as all limits allow it, with
/// windows longer by `margin`.
pub fn ideal(quota: &Quota, margin: Duration) -> impl Iterator<Item = Duration> {
    let mut moments: Vec<Duration> = Vec::new();
    std::iter::from_fn(move || {
        let free = quota.limits().iter().filter_map(|limit| match *limit {
            Limit::Sliding { count, window, .. } => {
                let last = moments.len().checked_sub(count as usize)?;
                Some(moments[last] + window + margin)
            }
            _ => None,
        });
        moments.push(
            free.max()
                .unwrap_or_default()
                .max(moments.last().copied().unwrap_or_default()),
        );
        moments.last().copied()
    })
}

/// Returns how much later than ideal each call left, sorted. The clock starts when the first call
/// enters the gate.
pub fn lateness(reports: &[Report], quota: &Quota, margin: Duration) -> Vec<Duration> {
    let grants = by_grant(reports);
    let Some(start) = grants.iter().map(|event| event.asked).min() else {
        return Vec::new();
    };
    let late = |(event, ideal): (&&Event, Duration)| {
        Duration::from_nanos(event.ended - start).saturating_sub(ideal)
    };
    let mut late: Vec<_> = grants.iter().zip(ideal(quota, margin)).map(late).collect();
    late.sort_unstable();
    late
}

/// Returns the value that the fraction `share` of the sorted values does not exceed.
pub fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let index = (sorted.len() as f64 * share).ceil() as usize;
    sorted
        .get(index.saturating_sub(1))
        .copied()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(asked: u64, ended: u64) -> Event {
        Event {
            asked,
            ended,
            outcome: Outcome::Granted,
            text: String::new(),
        }
    }

    fn report(events: Vec<Event>) -> Report {
        Report {
            events,
            ended: true,
            ..Report::default()
        }
    }

    #[test]
    fn events_parse_back_from_their_lines() {
        let event = Event {
            outcome: Outcome::StoreFailed,
            text: "it is away".into(),
            ..granted(1, 2)
        };
        assert_eq!(event.to_string().parse::<Event>().unwrap(), event);
        assert_eq!(
            granted(1, 2).to_string().parse::<Event>().unwrap(),
            granted(1, 2)
        );
        let refused = Event {
            text: refusal(3),
            ..granted(1, 2)
        };
        assert_eq!(
            refused.to_string().parse::<Event>().unwrap().refused_at(),
            Some(3)
        );
        assert_eq!(event.refused_at(), None);
        assert!("done".parse::<Event>().is_err());
    }

    #[test]
    fn overtaken_counts_other_processes_beyond_the_grace() {
        let grace = Duration::from_nanos(10);
        let calls =
            |first, second| overtaken(&[report(vec![first]), report(vec![second])], grace).0;
        assert_eq!(calls(granted(0, 111), granted(11, 100)), 1);
        assert_eq!(calls(granted(11, 100), granted(0, 111)), 1);
        assert_eq!(calls(granted(0, 110), granted(11, 100)), 0);
        assert_eq!(calls(granted(0, 111), granted(10, 100)), 0);
        let by_two = [
            vec![granted(0, 150)],
            vec![granted(11, 100), granted(12, 120)],
        ]
        .map(report);
        assert_eq!(overtaken(&by_two, grace), (1, Duration::from_nanos(50)));
        assert_eq!(
            overtaken(&[report(vec![granted(0, 111), granted(11, 100)])], grace).0,
            0
        );
    }

    #[test]
    fn ideal_schedule_keeps_every_limit() {
        let ms = Duration::from_millis;
        let quota = "2/1s, 3/5s".parse().unwrap();
        let moments: Vec<_> = ideal(&quota, ms(20)).take(5).collect();
        assert_eq!(moments, [0, 0, 1020, 5020, 5020].map(ms));
        let late = lateness(
            &[report(vec![granted(5, 5), granted(5, 1_000_005)])],
            &quota,
            ms(20),
        );
        assert_eq!(late, [0, 1].map(ms));
    }

    #[test]
    fn percentiles_are_values_that_occur() {
        let values: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        for (share, value) in [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)] {
            assert_eq!(percentile(&values, share), Duration::from_millis(value));
        }
        assert_eq!(percentile(&[], 0.5), Duration::ZERO);
    }
}
