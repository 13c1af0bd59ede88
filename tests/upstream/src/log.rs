//! What the server logged, and what that proves.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::time::{Duration, Instant};

use crate::keyed::Keys;
use crate::rules::Rule;

/// One call that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When the server had read its head.
    pub at: Instant,
    /// When the caller sent it: what it wrote into [`SENT_HEADER`](crate::SENT_HEADER).
    pub sent: Option<Instant>,
    /// The caller's name: what it wrote into [`WHO_HEADER`](crate::WHO_HEADER).
    pub who: Option<String>,
    /// Whether the response was a success.
    pub accepted: bool,
    /// When the response was ready, or the connection was closed before; `None` until then.
    pub ended: Option<Instant>,
    /// How many bytes of its body were read; 0 until all of it was.
    pub body: usize,
    /// The keys of the call, if the server has [`KeyedRule`](crate::KeyedRule)s.
    pub keys: Keys,
    /// The name of the keyed rule that refused the call.
    pub refused_by: Option<&'static str>,
}

/// How many calls were accepted, and how many refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Calls with a successful response.
    pub accepted: u64,
    /// Calls with any other response.
    pub refused: u64,
}

impl Tally {
    /// Returns the count of all calls.
    pub fn all(self) -> u64 {
        self.accepted + self.refused
    }

    pub(crate) fn add(&mut self, accepted: bool) {
        *if accepted {
            &mut self.accepted
        } else {
            &mut self.refused
        } += 1;
    }
}

/// All calls, in order of arrival: the oracle.
///
/// It is a slice of [`Arrival`]s. Its methods count every call, including refused calls: they cost
/// the upstream as much, and many upstreams count them.
#[derive(Clone, Debug, Default)]
pub struct Log(Vec<Arrival>);

impl Log {
    /// Returns the most calls that *arrived* in any interval of the length `window`, half open as
    /// that of a [`Rule`].
    pub fn largest_count(&self, window: Duration) -> usize {
        fullest(&self.arrived(), window).count
    }

    /// Returns the most calls that were *sent* in any interval of the length `window`; calls
    /// without the header do not count.
    pub fn largest_count_sent(&self, window: Duration) -> usize {
        let mut sent: Vec<_> = self.iter().filter_map(|arrival| arrival.sent).collect();
        sent.sort_unstable();
        fullest(&sent, window).count
    }

    /// Returns the most calls that were in flight at the same time, as the server saw it. A call is
    /// in flight from the moment its head was read until its response was ready or its caller was
    /// gone. If one call ends when another arrives, the two do not overlap.
    pub fn most_at_once(&self) -> usize {
        let mut ends: Vec<_> = self.iter().filter_map(|arrival| arrival.ended).collect();
        ends.sort_unstable();
        let ended_by = |at| ends.partition_point(|end| *end <= at);
        self.iter()
            .enumerate()
            .map(|(before, call)| before + 1 - ended_by(call.at))
            .max()
            .unwrap_or(0)
    }

    /// Returns the mean duration of the calls that have ended.
    pub fn mean_time(&self) -> Duration {
        let took = self
            .iter()
            .filter_map(|call| Some(call.ended?.saturating_duration_since(call.at)));
        let (sum, count) = took.fold((Duration::ZERO, 0), |(sum, count), took| {
            (sum + took, count + 1)
        });
        sum.checked_div(count).unwrap_or_default()
    }

    /// Returns how much the time from sending to arrival varied; zero if no call has a sent time.
    pub fn jitter(&self) -> Duration {
        self.fastest_and_slowest()
            .map_or(Duration::ZERO, |(fastest, slowest)| {
                nanos(slowest - fastest)
            })
    }

    /// Returns by how much the [`jitter`](Log::jitter) exceeds `slack`.
    pub fn jitter_beyond(&self, slack: Duration) -> Duration {
        self.jitter().saturating_sub(slack)
    }

    /// The oracle of promise I1: describes what exceeded `rule`, if anything did.
    ///
    /// At most `rule.count` calls may have arrived in any interval that is as long as the rule's
    /// window, less the jitter in transit beyond `slack` (tollgate's `transit_slack`). So a machine
    /// that pauses between sending and arrival fails no test, and a limiter that lets one call too
    /// many through still does.
    ///
    /// Without sent times the jitter counts as zero. If it exceeds the window by more than `slack`,
    /// no violation can be proved, and none is reported: a test with a short window should check
    /// [`jitter`](Log::jitter) too.
    pub fn over(&self, rule: Rule, slack: Duration) -> Option<String> {
        let window = rule.window.saturating_sub(self.jitter_beyond(slack));
        let arrived = self.arrived();
        let Fullest { count, from } = fullest(&arrived, window);
        if count <= rule.count as usize {
            return None;
        }
        let since_first = arrived[from] - arrived[0];
        let took = match self.fastest_and_slowest() {
            Some((fastest, slowest)) => {
                format!("took {:.3} to {:.3} ms", millis(fastest), millis(slowest))
            }
            None => "is not known".into(),
        };
        Some(format!(
            "{count} calls arrived within {window:.3?}, from {since_first:.3?} after the first on; allowed are {} in \
             {:?} (the way here {took}; slack {slack:?})",
            rule.count, rule.window,
        ))
    }

    /// Returns the share of `rule` that the accepted calls used: its window over the mean time in
    /// which `rule.count` of them came.
    ///
    /// For a caller that keeps a margin between windows, a rule with a longer window measures
    /// without that margin. `None` until more than `rule.count` calls were accepted; pauses before
    /// that and after the last call are not seen.
    pub fn used(&self, rule: Rule) -> Option<f64> {
        let accepted: Vec<_> = self
            .iter()
            .filter(|arrival| arrival.accepted)
            .map(|arrival| arrival.at)
            .collect();
        let later = accepted.get(rule.count as usize..)?;
        let took: Duration = later
            .iter()
            .zip(&accepted)
            .map(|(later, at)| *later - *at)
            .sum();
        (!took.is_zero())
            .then(|| rule.window.as_secs_f64() * later.len() as f64 / took.as_secs_f64())
    }

    /// Returns how uneven the arrivals were: the standard deviation of the gaps between calls over
    /// their mean.
    ///
    /// The value is 0 for equal gaps, 1 for pure chance (a Poisson stream), and about the root of
    /// `n` for calls that come `n` at a time. With fewer than three calls it is 0.
    pub fn unevenness(&self) -> f64 {
        let gaps: Vec<f64> = self
            .windows(2)
            .map(|pair| (pair[1].at - pair[0].at).as_secs_f64())
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        if gaps.len() < 2 || mean == 0.0 {
            return 0.0;
        }
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        variance.sqrt() / mean
    }

    /// Returns the number of calls in each `interval`, from the first call to the last.
    ///
    /// # Panics
    ///
    /// If `interval` is zero.
    pub fn per(&self, interval: Duration) -> Vec<Tally> {
        let mut tallies = Vec::new();
        for arrival in self.iter() {
            let index = (arrival.at - self[0].at).as_nanos() / interval.as_nanos();
            let index = usize::try_from(index).expect("a log shorter than the age of the universe");
            if tallies.len() <= index {
                tallies.resize(index + 1, Tally::default());
            }
            tallies[index].add(arrival.accepted);
        }
        tallies
    }

    /// Returns the calls of each caller that names itself.
    pub fn by_who(&self) -> BTreeMap<&str, Tally> {
        let mut callers: BTreeMap<&str, Tally> = BTreeMap::new();
        for arrival in self.iter() {
            if let Some(who) = &arrival.who {
                callers.entry(who).or_default().add(arrival.accepted);
            }
        }
        callers
    }

    /// Returns the accepted calls of each key that the keyed rule `name` counted.
    pub fn by_key(&self, name: &str) -> BTreeMap<&str, Log> {
        let mut keys: BTreeMap<&str, Log> = BTreeMap::new();
        for arrival in self.iter().filter(|arrival| arrival.accepted) {
            for (_, key) in arrival.keys.iter().filter(|(of, _)| *of == name) {
                keys.entry(key).or_default().0.push(arrival.clone());
            }
        }
        keys
    }

    /// Returns how many calls the keyed rule `name` refused.
    pub fn refused_by(&self, name: &str) -> usize {
        self.iter()
            .filter(|arrival| arrival.refused_by == Some(name))
            .count()
    }

    fn arrived(&self) -> Vec<Instant> {
        self.iter().map(|arrival| arrival.at).collect()
    }

    /// Returns the shortest and the longest transit, in nanoseconds; negative if the clocks of two
    /// processes differ.
    fn fastest_and_slowest(&self) -> Option<(i64, i64)> {
        let ways = || {
            self.iter()
                .filter_map(|arrival| Some(signed_nanos(arrival.sent?, arrival.at)))
        };
        Some((ways().min()?, ways().max()?))
    }
}

impl Deref for Log {
    type Target = [Arrival];

    fn deref(&self) -> &[Arrival] {
        &self.0
    }
}

/// Sorts calls by their arrival.
impl From<Vec<Arrival>> for Log {
    fn from(mut arrivals: Vec<Arrival>) -> Self {
        arrivals.sort_by_key(|arrival| arrival.at);
        Log(arrivals)
    }
}

/// Returns the fullest window: its count, and the index of its first call.
struct Fullest {
    count: usize,
    from: usize,
}

fn fullest(sorted: &[Instant], window: Duration) -> Fullest {
    let mut fullest = Fullest { count: 0, from: 0 };
    let mut from = 0;
    for (last, at) in sorted.iter().enumerate() {
        while from <= last && at.duration_since(sorted[from]) >= window {
            from += 1;
        }
        let count = last + 1 - from;
        if count > fullest.count {
            fullest = Fullest { count, from };
        }
    }
    fullest
}

fn signed_nanos(from: Instant, to: Instant) -> i64 {
    let whole = |span: Duration| i64::try_from(span.as_nanos()).unwrap_or(i64::MAX / 2);
    match to.checked_duration_since(from) {
        Some(span) => whole(span),
        None => -whole(from - to),
    }
}

fn nanos(nanos: i64) -> Duration {
    Duration::from_nanos(nanos.unsigned_abs())
}

fn millis(nanos: i64) -> f64 {
    nanos as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A log of calls (sent, arrived) in ms.
    fn log(calls: &[(u64, u64)]) -> Log {
        let start = Instant::now() + ms(1000);
        let arrival = |&(sent, at): &(u64, u64)| Arrival {
            at: start + ms(at),
            sent: Some(start + ms(sent)),
            who: None,
            accepted: true,
            ended: None,
            body: 0,
            keys: Vec::new(),
            refused_by: None,
        };
        Log::from(calls.iter().map(arrival).collect::<Vec<_>>())
    }

    /// The same, all sent when they arrived.
    fn arrivals(at: &[u64]) -> Log {
        log(&at.iter().map(|&at| (at, at)).collect::<Vec<_>>())
    }

    #[test]
    fn largest_count_is_of_the_fullest_half_open_window() {
        for (at, window, count) in [
            (&[][..], 10, 0),
            (&[5], 10, 1),
            (&[5], 0, 0),
            (&[0, 10], 10, 1), // exactly a window apart: never together
            (&[0, 9], 10, 2),
            (&[0, 0, 0], 1, 3),
            (&[0, 5, 10, 15, 20], 11, 3),
            (&[0, 5, 10, 15, 20], 10, 2),
            (&[0, 90, 95, 101, 104, 250], 100, 4), // aligned windows [0, 100), [100, 200) would see only 3
            (&[0, 1, 2, 100, 101, 102, 103], 50, 4),
        ] {
            assert_eq!(
                arrivals(at).largest_count(ms(window)),
                count,
                "{at:?} in {window} ms"
            );
        }
    }

    #[test]
    fn calls_are_counted_by_their_sent_time() {
        // Sent far apart, delayed so that they arrive together, and the last overtakes.
        let log = log(&[(0, 30), (10, 31), (20, 29)]);
        assert_eq!(log.largest_count(ms(10)), 3);
        assert_eq!(log.largest_count_sent(ms(10)), 1);
        assert_eq!(log.largest_count_sent(ms(11)), 2);
        assert_eq!(log.jitter(), ms(21)); // 30 ms the slowest, 9 ms the fastest
    }

    #[test]
    fn calls_without_sent_time_count_by_arrival_only() {
        let mut calls = log(&[(0, 1), (1, 2)]).to_vec();
        calls[0].sent = None;
        let log = Log::from(calls);
        assert_eq!(
            (log.largest_count(ms(5)), log.largest_count_sent(ms(5))),
            (2, 1)
        );
        assert_eq!(log.jitter(), Duration::ZERO);
    }

    #[test]
    fn clocks_of_two_processes_that_differ_are_jitter_too() {
        assert_eq!(log(&[(5, 3), (10, 14)]).jitter(), ms(6));
    }

    #[test]
    fn calls_are_concurrent_from_arrival_to_end() {
        let start = Instant::now();
        let at_once = |calls: &[(u64, Option<u64>)]| {
            let mut log = arrivals(&vec![0; calls.len()]).to_vec();
            for (arrival, (at, ended)) in log.iter_mut().zip(calls) {
                (arrival.at, arrival.ended) = (start + ms(*at), ended.map(|end| start + ms(end)));
            }
            Log::from(log).most_at_once()
        };
        for (calls, most) in [
            (&[][..], 0),
            (&[(0, Some(10)), (10, Some(20)), (20, None)], 1),
            (&[(0, Some(11)), (10, Some(20)), (30, Some(40))], 2),
            (&[(0, None), (10, Some(20)), (15, Some(16)), (30, None)], 3),
            (
                &[(5, Some(6)), (0, Some(30)), (7, Some(9)), (8, Some(9))],
                3,
            ),
        ] {
            assert_eq!(at_once(calls), most, "{calls:?}");
        }
    }

    #[test]
    fn one_extra_call_is_over_despite_jitter_slack() {
        let rule = Rule::new(2, ms(100));
        for (calls, slack, over) in [
            (&[][..], 0, false),
            (&[(0, 0), (1, 1), (100, 100)], 0, false),
            (&[(0, 0), (1, 1), (99, 99)], 0, true),
            (&[(0, 0), (1, 1), (99, 99)], 10, true), // the slack is for jitter; there was none
            (&[(0, 5), (105, 105), (106, 106)], 10, false),
            (&[(0, 8), (105, 105), (106, 106)], 10, true), // jitter 8: all within the slack
            (&[(0, 12), (109, 109), (109, 109)], 10, true), // jitter 12: 97 apart where 98 are owed
            (&[(0, 12), (110, 110), (110, 110)], 10, false), // a limiter that keeps window and slack apart
            (&[(0, 500), (300, 500), (600, 600), (600, 600)], 10, false), // jitter beyond the window: no verdict
        ] {
            // The limit is 2, so three in a window are one too many.
            let said = log(calls).over(rule, ms(slack));
            assert_eq!(
                said.is_some(),
                over,
                "{calls:?}, slack {slack} ms: {said:?}"
            );
        }
    }

    #[test]
    fn excess_is_described_with_its_numbers() {
        let said = log(&[(0, 1), (50, 51), (200, 202), (210, 211), (220, 221)])
            .over(Rule::new(2, ms(100)), ms(10));
        assert_eq!(
            said.as_deref(),
            Some(
                "3 calls arrived within 100.000ms, from 201.000ms after the first on; allowed are 2 in 100ms (the way \
                 here took 1.000 to 2.000 ms; slack 10ms)"
            )
        );
    }

    #[test]
    fn a_metronome_is_even_and_bursts_are_not() {
        let metronome: Vec<u64> = (0..100).map(|call| call * 20).collect();
        let bursts: Vec<u64> = (0..100).map(|call| call / 25 * 500).collect();
        assert!(arrivals(&metronome).unevenness() < 1e-9);
        let uneven = arrivals(&bursts).unevenness();
        assert!((5.0..6.0).contains(&uneven), "{uneven}"); // 3 gaps of 500 among 99: root of 99/3 - 1
        for few in [&[][..], &[1], &[1, 2], &[7, 7, 7]] {
            assert_eq!(arrivals(few).unevenness(), 0.0, "{few:?}");
        }
    }

    #[test]
    fn rule_usage_is_seen_for_every_call_shape() {
        let rule = Rule::new(4, ms(100));
        let metronome: Vec<u64> = (0..40).map(|call| call * 25).collect();
        let bursts: Vec<u64> = (0..40).map(|call| call / 4 * 100).collect();
        let slow: Vec<u64> = (0..40).map(|call| call / 4 * 125).collect();
        for (calls, used) in [
            (&metronome, Some(1.0)),
            (&bursts, Some(1.0)),
            (&slow, Some(0.8)),
        ] {
            assert_eq!(arrivals(calls).used(rule), used, "{calls:?}");
        }
        for few in [&[][..], &[0, 1, 2, 3], &[5, 5, 5, 5, 5]] {
            assert_eq!(arrivals(few).used(rule), None, "{few:?}");
        }
        let mut refused = arrivals(&bursts).to_vec();
        refused
            .iter_mut()
            .skip(20)
            .for_each(|call| call.accepted = false);
        refused.push(Arrival {
            at: refused[0].at + ms(1000),
            ..refused[0].clone()
        });
        // 16 calls come 100 ms after the fourth before them; the last comes 600 ms after.
        let used = Log::from(refused).used(rule).unwrap();
        assert!((used - 17.0 * 100.0 / 2200.0).abs() < 1e-9, "{used}");
    }

    #[test]
    fn calls_are_listed_per_interval_and_per_caller() {
        let mut calls = arrivals(&[0, 99, 100, 350]).to_vec();
        for (call, (who, accepted)) in calls.iter_mut().zip([
            (Some("a"), true),
            (Some("b"), false),
            (Some("a"), false),
            (None, true),
        ]) {
            call.who = who.map(String::from);
            call.accepted = accepted;
        }
        let log = Log::from(calls);
        let tally = |accepted, refused| Tally { accepted, refused };
        assert_eq!(
            log.per(ms(100)),
            [tally(1, 1), tally(0, 1), tally(0, 0), tally(1, 0)]
        );
        assert_eq!(
            log.by_who(),
            BTreeMap::from([("a", tally(1, 1)), ("b", tally(0, 1))])
        );
        assert_eq!(Log::default().per(ms(100)), []);
    }
}
