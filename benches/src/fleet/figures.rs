//! The figures of a contender's turns.

use std::time::Duration;

use super::task::{Record, Task};
use crate::measure::quantile;

/// The raw counts of a turn.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The measured span, in nanoseconds of [`clock::now`](super::clock::now).
    pub(crate) from: u64,
    pub(crate) until: u64,
    /// Within the span: store calls, the CPU time of the server and of all children, and grants.
    pub(crate) calls: u64,
    pub(crate) redis: Duration,
    pub(crate) client: Duration,
    pub(crate) grants: u64,
    /// The fraction of all cores that other programs kept busy.
    pub(crate) others: f64,
    /// Since the start: the growth of all children's memory, the number of keys they called, and
    /// errors.
    pub(crate) memory: u64,
    pub(crate) keys: u64,
    pub(crate) errors: u64,
    /// The memory of the keys in Redis, if they are few, and of one key.
    pub(crate) bytes: f64,
    pub(crate) bytes_of_a_key: f64,
    /// Since the start.
    pub(crate) each: Vec<Grant>,
}

/// A grant, or many if grants are only counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) at: u64,
    pub(crate) waited: u64,
    pub(crate) count: u64,
}

/// The figures of a turn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// Store calls for each grant.
    pub(crate) calls: f64,
    /// Microseconds of CPU for each grant, of the server and of the callers.
    pub(crate) redis: f64,
    pub(crate) client: f64,
    /// The fraction of a core that the server used.
    pub(crate) core: f64,
    /// Grants a second.
    pub(crate) rate: f64,
    /// The most grants in any window; `None` if grants are only counted.
    pub(crate) largest: Option<u64>,
    /// In milliseconds: the median wait of the calls, and the 99th percentile.
    pub(crate) wait: Option<[f64; 2]>,
    /// Bytes in Redis: of the whole limit if there is one limit, and of a key if there are many.
    pub(crate) bytes: f64,
    pub(crate) bytes_of_a_key: f64,
    /// Bytes at a client for each key it called.
    pub(crate) memory_of_a_key: f64,
    pub(crate) errors: u64,
    /// The fraction of all cores that other programs kept busy.
    pub(crate) others: f64,
}

impl Seen {
    pub(crate) fn figures(mut self, task: &Task) -> Figures {
        self.each.sort_unstable_by_key(|grant| grant.at);
        let each = task.record == Record::Each;
        let grants = self.grants.max(1) as f64;
        let span = self.until - self.from;
        let inside = |grant: &&Grant| (self.from..self.until).contains(&grant.at);
        let waits: Vec<f64> = self
            .each
            .iter()
            .filter(inside)
            .map(|grant| grant.waited as f64 / 1e6)
            .collect();
        Figures {
            calls: self.calls as f64 / grants,
            redis: micros(self.redis) / grants,
            client: micros(self.client) / grants,
            core: micros(self.redis) * 1e3 / span as f64,
            rate: self.rate(task.limit.window),
            largest: each.then(|| largest(&self.each, task.limit.window)),
            wait: (each && !waits.is_empty())
                .then(|| [0.5, 0.99].map(|share| quantile(&waits, share))),
            bytes: self.bytes,
            bytes_of_a_key: self.bytes_of_a_key,
            memory_of_a_key: self.memory as f64 / self.keys.max(1) as f64,
            errors: self.errors,
            others: self.others,
        }
    }

    /// Returns the grants a second. Most contenders grant a whole limit at once, and then nothing
    /// for the rest of the window. The figure must not depend on where the span begins and ends
    /// between two such bursts. So it is the mean over all spans that are shorter by a window and a
    /// fiftieth (tollgate's margin at a window of a second).
    fn rate(&self, window: Duration) -> f64 {
        let span = self.until - self.from;
        let edge = (window.as_nanos() as u64 * 51 / 50).min(span / 2);
        let weight = |grant: &Grant| -> f64 {
            let (since, left) = (
                grant.at.saturating_sub(self.from),
                self.until.saturating_sub(grant.at),
            );
            grant.count as f64 * (since.min(left) as f64 / edge as f64).min(1.0)
        };
        self.each.iter().map(weight).sum::<f64>() * 1e9 / (span - edge) as f64
    }
}

/// Returns the most grants in any half-open window.
fn largest(each: &[Grant], window: Duration) -> u64 {
    let window = window.as_nanos() as u64;
    let mut first = 0;
    let counts = each.iter().enumerate().map(|(last, grant)| {
        while grant.at - each[first].at >= window {
            first += 1;
        }
        last - first + 1
    });
    counts.max().unwrap_or_default() as u64
}

impl Figures {
    /// Returns the server's microseconds of CPU for each grant, less the fraction `idle` of a core
    /// that an idle server uses.
    pub(crate) fn redis_above(&self, idle: f64) -> f64 {
        (self.redis - self.redis * idle / self.core).max(0.0)
    }

    /// Returns the medians of several turns. For the largest count and the disturbance it takes the
    /// largest, for errors the sum.
    pub(crate) fn median(turns: &[Figures]) -> Figures {
        let median = |figure: fn(&Figures) -> f64| {
            quantile(&turns.iter().map(figure).collect::<Vec<_>>(), 0.5)
        };
        let waits = |index: usize| -> Option<f64> {
            let waits: Option<Vec<f64>> =
                turns.iter().map(|turn| Some(turn.wait?[index])).collect();
            Some(quantile(&waits?, 0.5))
        };
        Figures {
            calls: median(|turn| turn.calls),
            redis: median(|turn| turn.redis),
            client: median(|turn| turn.client),
            core: median(|turn| turn.core),
            rate: median(|turn| turn.rate),
            largest: turns.iter().map(|turn| turn.largest).max().flatten(),
            wait: waits(0).zip(waits(1)).map(|(half, most)| [half, most]),
            bytes: median(|turn| turn.bytes),
            bytes_of_a_key: median(|turn| turn.bytes_of_a_key),
            memory_of_a_key: median(|turn| turn.memory_of_a_key),
            errors: turns.iter().map(|turn| turn.errors).sum(),
            others: turns.iter().map(|turn| turn.others).fold(0.0, f64::max),
        }
    }
}

fn micros(span: Duration) -> f64 {
    span.as_secs_f64() * 1e6
}

/// Formats three significant digits, or fewer if there are fewer.
pub(crate) fn digits(value: f64) -> String {
    match value {
        _ if value >= 100.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.1}"),
        _ if value >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Returns ten grants at once, every `every` nanoseconds, for twenty seconds.
    fn bursts(every: u64) -> Vec<Grant> {
        (0..20 * SECOND / every)
            .flat_map(|burst| {
                (0..10).map(move |_| Grant {
                    at: burst * every,
                    waited: 0,
                    count: 1,
                })
            })
            .collect()
    }

    #[test]
    fn a_window_is_half_open() {
        assert_eq!(largest(&bursts(SECOND), Duration::from_secs(1)), 10);
        assert_eq!(largest(&bursts(SECOND - 1), Duration::from_secs(1)), 20);
        assert_eq!(largest(&[], Duration::from_secs(1)), 0);
    }

    #[test]
    fn rate_of_bursts_ignores_where_the_span_begins() {
        for phase in 0..10 {
            let from = 3 * SECOND + phase * SECOND / 10;
            let seen = Seen {
                from,
                until: from + 6_120_000_000,
                each: bursts(1_020_000_000),
                ..Seen::default()
            };
            let rate = seen.rate(Duration::from_secs(1));
            assert!((rate - 10.0 / 1.02).abs() < 0.01, "{rate} at phase {phase}");
        }
    }
}
