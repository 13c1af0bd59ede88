//! What the pace learns of the competition: `n`, `m` and `drain` of the [`Fair`](super::Fair) docs.

use super::super::{LONGEST, StateCodec};
use super::scale::Scale;

/// Growth of ln n for an answer at an empty bucket.
pub(super) const GROWTH: f64 = 0.22;
/// Release of ln n for each token time.
const RELEASE: f64 = 0.0044;
/// Release of ln n for each second if the token time is a guess, so that clients with different
/// guesses settle at the same interval.
const RELEASE_A_SECOND: f64 = 0.005;
/// The most that one answer releases.
const MOST_RELEASE: f64 = 1.5;
/// The longest time for which an answer releases in a short window, in shares.
const LONGEST_RELEASE: f64 = 2.0;
/// The largest n that the first answer can set.
pub(super) const FIRST_LOOK: f64 = 20.0;
/// The first guess of n after a refusal, divided by the number of requests that wait here.
pub(super) const FIRST_GUESS: f64 = 5.0;
/// The first guess of m if the level is unknown. It is higher, because only refusals correct it.
const FIRST_GUESS_BLIND: f64 = 7.5;
/// The factor of n for a refusal if none of our requests passed since the last one.
pub(super) const REFUSED: f64 = 2.0;
/// After this many passed requests a refusal adds half as much.
const REFUSED_PASSED: f64 = 2.0;
/// The factor of m for a refusal if the level is unknown. It is lower, because chance decides which
/// client is refused.
const REFUSED_BLIND: f64 = 1.2;
/// The factor of m for a refusal while plenty is left.
const REFUSED_SEEN: f64 = 1.3;
/// Release of ln m for each token time, if the level is known and if it is not.
const SEEN_RELEASE: f64 = 0.0004;
const BLIND_RELEASE: f64 = 0.0001;
/// The token times without a refusal after which m falls twice as fast, if the level is known and
/// if it is not.
const SEEN_CALM: f64 = 320.0;
const BLIND_CALM: f64 = 1000.0;
/// Release of ln m for each token time of a sliding window that is unused.
const SLIDING_RELEASE: f64 = 0.002;
/// The least m in a sliding window. Resets in whole seconds may make a window seem twice as long as it is.
const LEAST_SLIDING: f64 = 0.5;
/// The token times in which m falls by a factor of e if no request passed before the first refusal. From the
/// guess to the interval of 12 requests per second it takes 40 s. With 25 instead of 35, twenty processes
/// before strict spacing are refused more often.
const GUESS_RELEASE: f64 = 35.0;
/// The largest drain, in tokens.
const MOST_DRAIN: f64 = 1e8;
/// The weight of a new sample in an average.
const WEIGHT: f64 = 0.2;

/// What is known of the competition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    /// The number of equal competitors, this one included.
    pub(super) n: f64,
    /// The least interval, in token times, because of refusals that Remaining does not explain.
    pub(super) m: f64,
    /// The tokens that all competitors take per request of ours, on average.
    pub(super) drain: f64,
}

impl Default for Estimate {
    fn default() -> Self {
        Estimate {
            n: 1.0,
            m: 0.0,
            drain: 1.0,
        }
    }
}

impl Estimate {
    /// Lowers `m`, the faster the longer the last refusal is past. The answer before was `since`
    /// seconds ago, and the last refusal `calm` seconds. `knows_level` states whether it is known
    /// how many tokens are left.
    pub(super) fn relax_m(&mut self, scale: &Scale, since: f64, calm: f64, knows_level: bool) {
        if self.m <= 0.0 {
            return;
        }
        let tokens = since / scale.paced_time;
        let calm = calm / scale.token_time;
        let (rate, calm) = if knows_level {
            (SEEN_RELEASE, calm / SEEN_CALM)
        } else {
            (BLIND_RELEASE, calm / BLIND_CALM)
        };
        self.m *= (-rate * tokens * (1.0 + calm * calm)).exp();
    }

    /// Lowers `m` if no request passed before the first refusal. `m` is then only a guess, which shows nothing
    /// of the limit. It falls over time, so that equal clients stay equal.
    pub(super) fn relax_guess(&mut self, scale: &Scale, since: f64) {
        // A pause shows nothing of the limit.
        let tokens = (since / scale.token_time).min(self.m);
        self.m *= (-tokens / GUESS_RELEASE).exp();
    }

    /// Lowers `m` for the part of a sliding window that is unused. The answer before was `since` seconds
    /// ago.
    pub(super) fn relax_sliding(&mut self, scale: &Scale, since: f64, unused: f64) {
        let tokens = since / scale.token_time;
        self.m = (self.m * (-SLIDING_RELEASE * unused * tokens).exp()).max(LEAST_SLIDING);
    }

    /// What was learned of the competitors belongs to `m` alone if the limit slides, otherwise to `n`.
    pub(super) fn slides(&mut self, slides: bool) {
        let learned = self.n.max(self.m);
        (self.n, self.m) = match slides {
            true => (1.0, learned),
            false => (learned, 0.0),
        };
    }

    /// Averages how many tokens all clients took since the answer before, which was `since` seconds
    /// ago and after which `before` tokens were left.
    pub(super) fn track_drain(&mut self, scale: &Scale, level: f64, before: f64, since: f64) {
        if level > 0.0 || scale.is_below {
            let drain = before - level + since / scale.token_time;
            let drain = drain.clamp(1.0, 2.0 * self.drain + 5.0);
            self.drain += WEIGHT * (drain - self.drain);
        }
    }

    /// Sets `n` from `u` of the very first answer: other clients that hold the bucket at a level
    /// have this `n`.
    pub(super) fn seed_n(&mut self, scale: &Scale, used: f64) {
        if used < 1.0 && !scale.is_below {
            let n = GROWTH / (RELEASE * scale.haste(self.n)) * used / (1.0 - used);
            self.n = n.min(scale.limit()).clamp(1.0, FIRST_LOOK);
        }
    }

    /// Raises `n` for an answer of which `u` is `used`.
    pub(super) fn grow_n(&mut self, scale: &Scale, used: f64) {
        self.n *= (GROWTH * scale.weight() * used).exp();
    }

    /// Lowers `n` for the time since the answer before, `since` seconds ago. If the level is
    /// unknown, `n` stays as it is.
    pub(super) fn release_n(&mut self, scale: &Scale, used: f64, since: f64, knows_level: bool) {
        if knows_level {
            let tokens = match scale.is_short() {
                // A pause shows nothing of the competition.
                true => (since / scale.token_time).min(LONGEST_RELEASE * self.n),
                false => since / scale.paced_time,
            };
            let release = match scale.is_guess {
                true => RELEASE_A_SECOND * since,
                false => RELEASE * scale.weight() * scale.haste(self.n) * tokens,
            };
            self.n *= (-(release * (1.0 - used)).min(MOST_RELEASE)).exp();
        }
        if scale.is_mostly_free() {
            self.n *= (-GROWTH).exp();
        }
    }

    /// Raises `n` for a refusal when little was left. Since the refusal before, `passed` requests
    /// passed. `waiting` requests wait here, and the answer before was `since` seconds ago.
    pub(super) fn refused_at_low_level(
        &mut self,
        scale: &Scale,
        passed: u32,
        waiting: f64,
        since: f64,
    ) {
        let release = (RELEASE * scale.weight() * since / scale.token_time).min(MOST_RELEASE);
        let passed = f64::from(passed) / REFUSED_PASSED;
        let factor = 1.0 + (REFUSED - 1.0) / (1.0 + passed);
        self.n = (self.n * factor * (-release).exp()).max(FIRST_GUESS / waiting);
    }

    /// Raises `m` for a refusal while plenty was left. `interval` is the average time between two of
    /// our requests, in seconds.
    pub(super) fn refused_at_high_level(&mut self, scale: &Scale, interval: Option<f64>) {
        let own = interval.unwrap_or(0.0) / scale.token_time;
        self.m = REFUSED_SEEN * self.m.max(own);
    }

    /// Raises `m` for a refusal if it is unknown how much was left. `interval` is the average time between
    /// two of our requests, in seconds.
    pub(super) fn refused_blind(&mut self, scale: &Scale, waiting: f64, interval: Option<f64>) {
        let first = match interval {
            // Without any other information the interval that was too short is the measure.
            Some(own) if scale.is_guess || !scale.has_level() => own / scale.token_time,
            _ if scale.short.slides() => 0.0,
            _ => FIRST_GUESS_BLIND / waiting,
        };
        self.m = (self.m * REFUSED_BLIND).max(first);
    }

    /// Makes each of the other `processes` a competitor for `share`, which all had together.
    pub(super) fn divide(&mut self, share: f64, processes: f64) {
        self.n = share * processes;
        self.m *= processes;
        self.drain *= processes;
    }

    /// Bounds all values, so that no interval is longer than [`LONGEST`].
    pub(super) fn bound(&mut self, scale: &Scale) {
        let most = (LONGEST / scale.token_time).max(1.0);
        self.n = self.n.clamp(1.0, most);
        self.m = self.m.clamp(0.0, most);
        self.drain = self.drain.clamp(1.0, MOST_DRAIN);
    }

    /// Writes or reads all of it.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        codec.number(&mut self.n);
        codec.number(&mut self.m);
        codec.number(&mut self.drain);
    }
}
