//! What came of a run, by the log of the server and the waits of the callers.

use std::time::Duration;

use crate::calls::Call;
use crate::kind::{Limit, ServerKind};
use crate::log::{Arrival, Log};

/// The figures of a run. Shares are in per cent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Refused requests, of all that were sent.
    pub refused: f64,
    /// The same, after the warm-up.
    pub refused_later: f64,
    /// Accepted requests, of those that the server's own arithmetic allows.
    pub used: f64,
    /// The same, after the warm-up.
    pub used_later: f64,
    /// The time that a call took after the warm-up: median.
    pub p50: Duration,
    /// 99 % of the calls took no longer.
    pub p99: Duration,
    /// The longest call, also of those that did not end.
    pub longest: Duration,
}

impl Figures {
    /// Computes the figures of a run of `span`. The warm-up takes ten seconds, or two windows if that is longer, but at
    /// most half of `span`. The time counts from the first request, and ends with the last whole window.
    pub fn new(kind: ServerKind, limit: Limit, span: Duration, log: &Log, calls: &[Call]) -> Self {
        let windows = (span.as_secs_f64() / limit.window.as_secs_f64() + 1e-9).floor();
        let end = limit.window.as_secs_f64() * windows.max(1.0);
        let warm_up = warm_up(limit, span).as_secs_f64();
        let Some(began) = log.arrivals().first().map(|arrival| arrival.at) else {
            return Figures::default();
        };
        let from = |seconds: f64| began + (1000.0 * seconds).round() as u64;
        let [all, later] =
            [0.0, warm_up].map(|start| Counts::of(log.arrivals(), from(start), from(end)));
        let mut waits: Vec<Duration> = calls
            .iter()
            .filter(|call| call.began + (call.took.as_millis() as u64) >= from(warm_up))
            .map(|call| call.took)
            .collect();
        waits.sort_unstable();
        let supply = |seconds: f64, burst: u32| f64::from(burst) + limit.rate() * seconds;
        Figures {
            refused: all.refused_share(),
            refused_later: later.refused_share(),
            used: 100.0 * all.accepted / supply(end, kind.burst()),
            used_later: 100.0 * later.accepted / supply(end - warm_up, 0),
            p50: percentile(&waits, 0.5),
            p99: percentile(&waits, 0.99),
            longest: percentile(&waits, 1.0),
        }
    }
}

fn warm_up(limit: Limit, span: Duration) -> Duration {
    let least = Duration::from_secs(10).max(2 * limit.window);
    let half = span / 2;
    if least <= half {
        return least;
    }
    // Whole windows, so that no window counts in part.
    let windows = half.as_nanos() / limit.window.as_nanos().max(1);
    limit.window * u32::try_from(windows).unwrap_or(0)
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    accepted: f64,
    refused: f64,
}

impl Counts {
    fn of(arrivals: &[Arrival], from: u64, to: u64) -> Self {
        let mut counts = Counts::default();
        for arrival in arrivals
            .iter()
            .filter(|arrival| (from..to).contains(&arrival.at))
        {
            match arrival.accepted {
                true => counts.accepted += 1.0,
                false => counts.refused += 1.0,
            }
        }
        counts
    }

    fn refused_share(self) -> f64 {
        100.0 * self.refused / (self.accepted + self.refused).max(1.0)
    }
}

fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let index = (sorted.len() as f64 * share).ceil() as usize;
    let value = sorted.get(index.saturating_sub(1));
    value.copied().unwrap_or_default()
}

/// Returns Jain's index of fairness: 1 if all counts are the same, 1/n if one of n has all.
pub fn jain(counts: &[usize]) -> f64 {
    let sum: f64 = counts.iter().map(|count| *count as f64).sum();
    let squares: f64 = counts.iter().map(|count| (*count as f64).powi(2)).sum();
    match squares > 0.0 {
        true => sum * sum / (counts.len() as f64 * squares),
        false => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::ExpressHeaders;

    const LIMIT: Limit = Limit {
        count: 100,
        window: Duration::from_secs(2),
    };

    /// One request accepted every 20 ms for 61 s, and one refused with each tenth of them in the first 8 s.
    fn log() -> Log {
        let accepted = (0..3050).map(|number| Arrival {
            at: 1000 + 20 * number,
            accepted: true,
        });
        let refused = (0..40).map(|number| Arrival {
            at: 1000 + 200 * number,
            accepted: false,
        });
        Log::from_iter(accepted.chain(refused))
    }

    #[test]
    fn shares_are_of_the_servers_own_arithmetic() {
        let span = Duration::from_secs(60);
        let silent = ServerKind::Express(ExpressHeaders::Silent);
        let figures = Figures::new(silent, LIMIT, span, &log(), &[]);
        assert_eq!((figures.used, figures.used_later), (100.0, 100.0));
        assert_eq!(figures.refused_later, 0.0);
        assert!((figures.refused - 100.0 * 40.0 / 3040.0).abs() < 1e-9);
        let burst = Figures::new(ServerKind::NginxBurst, LIMIT, span, &log(), &[]);
        assert!((burst.used - 100.0 * 3000.0 / 3021.0).abs() < 1e-9);
    }

    #[test]
    fn a_run_ends_with_its_last_whole_window() {
        let silent = ServerKind::Express(ExpressHeaders::Silent);
        let figures = Figures::new(silent, LIMIT, Duration::from_secs(61), &log(), &[]);
        assert_eq!(figures.used, 100.0);
        let seconds = Duration::from_secs;
        assert_eq!(warm_up(LIMIT, seconds(60)), seconds(10));
        assert_eq!(warm_up(LIMIT, seconds(6)), seconds(2));
        let minute = Limit {
            count: 600,
            window: seconds(60),
        };
        assert_eq!(warm_up(minute, seconds(240)), seconds(120));
    }

    #[test]
    fn waits_count_after_the_warm_up() {
        let call = |began, took| Call {
            began,
            took: Duration::from_millis(took),
            accepted: true,
        };
        let calls = [
            call(1000, 9000),
            call(2000, 9500),
            call(12_000, 30),
            call(13_000, 10),
        ];
        let silent = ServerKind::Express(ExpressHeaders::Silent);
        let figures = Figures::new(silent, LIMIT, Duration::from_secs(60), &log(), &calls);
        let ms = Duration::from_millis;
        assert_eq!((figures.p50, figures.longest), (ms(30), ms(9500)));
    }

    #[test]
    fn jain_is_one_for_equal_counts() {
        assert_eq!((jain(&[3, 3, 3]), jain(&[0, 0, 5, 0])), (1.0, 0.25));
    }
}
