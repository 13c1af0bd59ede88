//! Whether the Remaining of an answer is plausible.

use std::time::Instant;

use super::super::reading::QuotaAnswer;
use super::super::{StateCodec, seconds};

/// The Remaining values up to now.
#[derive(Clone, Debug, Default)]
pub(super) struct Trust {
    /// How many answers in a row had no plausible value.
    missing: u32,
    /// The moment of the last value, and the value, plausible or not.
    latest: Option<(Instant, f64)>,
    /// The last plausible value, how many answers in a row had it, and since when.
    last: Option<f64>,
    same: u32,
    same_since: Option<Instant>,
    /// How many of our requests passed since then.
    taken: u32,
    /// The tokens that may have been refilled during the longest round trip since then: the server
    /// may have judged the request at any moment of it.
    blur: f64,
    /// Whether Remaining is ignored.
    silent: bool,
}

/// How many answers in a row it takes to ignore Remaining.
const OFTEN: u32 = 8;
/// By how many tokens the refill must differ from what we took. A client that takes just the refill
/// sees no change.
const STRANGE: f64 = 2.0;
/// How long a machine may stall, and how wrong the moments of other processes may be, in seconds.
const STALL: f64 = 0.25;

impl Trust {
    /// Returns the answer's Remaining if it is plausible. `limit` is the limit if it is known, and one token is
    /// refilled each `token_time` seconds.
    pub(super) fn believe(
        &mut self,
        answer: &QuotaAnswer,
        limit: Option<f64>,
        token_time: f64,
    ) -> Option<f64> {
        let &QuotaAnswer {
            told,
            passed,
            sent,
            now,
        } = answer;
        let latest = told.remaining.map(|remaining| (now, remaining));
        let before = std::mem::replace(&mut self.latest, latest);
        let by_now = before.map_or(0.0, |(at, said)| {
            said + seconds(at, now) / token_time + STRANGE
        });
        // More than the limit can be left if the limit is the speed at which a larger bucket fills.
        let most = limit.map_or(f64::MAX, |limit| by_now.max(limit * 1.01 + 1.0));
        let Some(remaining) = told.remaining.filter(|it| (0.0..=most).contains(it)) else {
            self.missing = self.missing.saturating_add(1);
            self.silent |= self.missing >= OFTEN;
            return None;
        };
        if passed {
            self.missing = 0;
        }
        if self.last != Some(remaining) {
            if passed || self.silent {
                self.last = Some(remaining);
                self.same = u32::from(passed);
                self.same_since = Some(now);
                (self.taken, self.blur) = (0, 0.0);
            }
        } else if passed {
            self.same = self.same.saturating_add(1);
        }
        self.taken = self.taken.saturating_add(u32::from(passed));
        self.blur = self.blur.max(seconds(sent, now) / token_time);
        let came = self.same_since.map_or(0.0, |since| seconds(since, now)) / token_time;
        let strange = STRANGE.max(1.0 + self.blur + STALL / token_time);
        let is_strange = remaining < 1.0 || (came - f64::from(self.taken)).abs() >= strange;
        self.silent = self.same >= OFTEN && (self.silent || is_strange);
        (!self.silent).then_some(remaining)
    }

    /// Takes note of a request that passed and whose Remaining is out of date.
    pub(super) fn passed(&mut self) {
        self.taken = self.taken.saturating_add(1);
    }

    /// Reports whether refusals alone may state what is left. At a refusal that is always next to
    /// nothing, and says nothing of what is left later.
    pub(super) fn is_missing(&self) -> bool {
        self.missing >= OFTEN
    }

    /// Writes or reads all of it.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        codec.small_count(&mut self.missing);
        codec.number_at(&mut self.latest);
        codec.optional_number(&mut self.last);
        codec.small_count(&mut self.same);
        codec.moment(&mut self.same_since);
        codec.small_count(&mut self.taken);
        codec.number(&mut self.blur);
        codec.flag(&mut self.silent);
    }

    /// Reports whether Remaining is ignored, because it was missing or constant in too many
    /// answers.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::reading::QuotaNumbers;
    use super::*;
    use crate::clock;

    /// A sequence of answers, one each `seconds`. One token is refilled each second, and the limit
    /// is 10.
    struct Talk {
        trust: Trust,
        now: Instant,
        seconds: u64,
    }

    impl Talk {
        fn each(seconds: u64) -> Self {
            Talk {
                trust: Trust::default(),
                now: clock::now(),
                seconds,
            }
        }

        fn believes(&mut self, remaining: impl Into<Option<f64>>, passed: bool) -> Option<f64> {
            self.now += Duration::from_secs(self.seconds);
            self.believes_after(Duration::ZERO, remaining, passed)
        }

        /// As `believes`, with this round trip.
        fn believes_after(
            &mut self,
            trip: Duration,
            remaining: impl Into<Option<f64>>,
            passed: bool,
        ) -> Option<f64> {
            let now = self.now;
            let answer = QuotaAnswer {
                told: QuotaNumbers {
                    remaining: remaining.into(),
                    ..QuotaNumbers::default()
                },
                passed,
                sent: now - trip,
                now,
            };
            self.trust.believe(&answer, Some(10.0), 1.0)
        }
    }

    #[test]
    fn unusable_remaining_is_ignored_until_it_changes() {
        let mut talk = Talk::each(2);
        assert_eq!(talk.believes(7.0, true), Some(7.0));
        for wrong in [
            None,
            Some(-1.0),
            Some(99.0),
            Some(f64::NAN),
            Some(f64::INFINITY),
            None,
            None,
        ] {
            assert_eq!(
                (talk.believes(wrong, true), talk.trust.is_silent()),
                (None, false)
            );
        }
        assert_eq!(
            (talk.believes(None, false), talk.trust.is_silent()),
            (None, true)
        );
        for _ in 0..7 {
            assert_eq!(talk.believes(3.0, true), Some(3.0));
            assert_eq!(talk.believes(3.0, false), Some(3.0));
        }
        assert_eq!(
            (talk.believes(3.0, true), talk.trust.is_silent()),
            (None, true)
        );
        assert_eq!(talk.believes(3.0, false), None);
        assert_eq!(talk.believes(4.0, false), Some(4.0));
    }

    #[test]
    fn constant_remaining_is_plausible_when_every_request_passes() {
        let mut talk = Talk::each(1);
        for _ in 0..100 {
            assert_eq!(talk.believes(7.0, true), Some(7.0));
        }
        // A value that is always 0 is not plausible.
        let mut talk = Talk::each(1);
        let believed: Vec<_> = (0..10).map(|_| talk.believes(0.0, true)).collect();
        assert_eq!(
            (believed[6], believed[7], believed[9]),
            (Some(0.0), None, None)
        );
    }

    #[test]
    fn slow_and_late_responses_keep_remaining_plausible() {
        let mut talk = Talk::each(1);
        for round in 0..100 {
            // The machine stalls for some token times, and the answers of that time arrive at once.
            if round % 20 == 10 {
                talk.now += Duration::from_secs(4);
                for late in (0..4).rev() {
                    let trip = Duration::from_secs(late);
                    assert_eq!(talk.believes_after(trip, 7.0, true), Some(7.0), "{round}");
                }
            }
            // Another process shares its answers late.
            if round % 20 == 15 {
                talk.now += Duration::from_secs(3);
                (0..3).for_each(|_| talk.trust.passed());
            }
            assert_eq!(talk.believes(7.0, true), Some(7.0), "{round}");
        }
    }

    #[test]
    fn remaining_above_the_limit_must_rise_gradually() {
        let mut talk = Talk::each(1);
        assert_eq!(talk.believes(40.0, true), None);
        assert_eq!(talk.believes(39.0, true), Some(39.0));
        assert_eq!(talk.believes(5.0, true), Some(5.0));
        assert_eq!(talk.believes(40.0, true), None);
        let mut talk = Talk::each(1);
        for left in 8..100 {
            assert_eq!(talk.believes(f64::from(left), true), Some(f64::from(left)));
        }
    }
}
