//! Whether a Remaining can be believed.

use std::time::Instant;

use super::super::{Notes, seconds};

/// What was said of what is left, up to now.
#[derive(Clone, Debug, Default)]
pub(super) struct Trust {
    /// How often running it was missing.
    missing: u32,
    /// How often running it was the same in answers that were no refusals, and since when.
    same: u32,
    same_since: Option<Instant>,
    last: Option<f64>,
    silent: bool,
}

/// So often running, it means something.
const OFTEN: u32 = 8;
/// By so many tokens what we took has to differ from what came: a client that takes just what comes sees no change.
const STRANGE: f64 = 2.0;

impl Trust {
    /// What can be believed of an answer that says `remaining` of `limit`, where a token comes each `token_time` seconds.
    pub(super) fn believe(
        &mut self,
        remaining: Option<f64>,
        limit: Option<f64>,
        passed: bool,
        token_time: f64,
        now: Instant,
    ) -> Option<f64> {
        let most = limit.map_or(f64::INFINITY, |limit| limit * 1.01 + 1.0);
        let Some(remaining) = remaining.filter(|remaining| (0.0..=most).contains(remaining)) else {
            self.missing = self.missing.saturating_add(1);
            self.silent |= self.missing >= OFTEN;
            return None;
        };
        self.missing = 0;
        if self.last != Some(remaining) {
            if passed || self.silent {
                self.last = Some(remaining);
                self.same = u32::from(passed);
                self.same_since = Some(now);
            }
        } else if passed {
            self.same = self.same.saturating_add(1);
        }
        let came = self.same_since.map_or(0.0, |since| seconds(since, now)) / token_time;
        let is_strange = remaining < 1.0 || (came - f64::from(self.same)).abs() >= STRANGE;
        self.silent = self.same >= OFTEN && (self.silent || is_strange);
        (!self.silent).then_some(remaining)
    }

    /// All of it, to be written or read.
    pub(super) fn share(&mut self, notes: &mut Notes<'_>) {
        notes.small(&mut self.missing);
        notes.small(&mut self.same);
        notes.moment(&mut self.same_since);
        notes.maybe(&mut self.last);
        notes.flag(&mut self.silent);
    }

    /// Whether nothing was said, or always the same, for so long that it means nothing.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock;

    /// A token comes each second, and an answer each so many.
    struct Talk {
        trust: Trust,
        now: Instant,
        seconds: u64,
    }

    impl Talk {
        fn each(seconds: u64) -> Self {
            Talk { trust: Trust::default(), now: clock::now(), seconds }
        }

        fn believes(&mut self, remaining: impl Into<Option<f64>>, passed: bool) -> Option<f64> {
            self.now += Duration::from_secs(self.seconds);
            self.trust.believe(remaining.into(), Some(10.0), passed, 1.0, self.now)
        }
    }

    #[test]
    fn what_is_missing_wrong_or_always_the_same_falls_silent_until_it_speaks_again() {
        let mut talk = Talk::each(2);
        assert_eq!(talk.believes(7.0, true), Some(7.0));
        for wrong in [None, Some(-1.0), Some(12.0), Some(f64::NAN), Some(f64::INFINITY), None, None] {
            assert_eq!((talk.believes(wrong, true), talk.trust.is_silent()), (None, false));
        }
        assert_eq!((talk.believes(None, false), talk.trust.is_silent()), (None, true));
        for _ in 0..7 {
            assert_eq!(talk.believes(3.0, true), Some(3.0));
            assert_eq!(talk.believes(3.0, false), Some(3.0));
        }
        assert_eq!((talk.believes(3.0, true), talk.trust.is_silent()), (None, true));
        assert_eq!(talk.believes(3.0, false), None);
        assert_eq!(talk.believes(4.0, false), Some(4.0));
    }

    #[test]
    fn who_takes_just_what_comes_sees_no_change_and_believes_it() {
        let mut talk = Talk::each(1);
        for _ in 0..100 {
            assert_eq!(talk.believes(7.0, true), Some(7.0));
        }
        // But a server that never has anything left does not know.
        let mut talk = Talk::each(1);
        let believed: Vec<_> = (0..10).map(|_| talk.believes(0.0, true)).collect();
        assert_eq!((believed[6], believed[7], believed[9]), (Some(0.0), None, None));
    }
}
