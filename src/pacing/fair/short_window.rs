//! Fixed windows of at most ten seconds.
//!
//! Headers state the reset in whole seconds, which is too coarse for a window of two seconds. So
//! its beginnings place it: within a fixed window Remaining only falls, and it jumps when the next
//! window begins. The end is one window length after the beginning.
//!
//! A client that asks rarely sees the jump late, and would believe in a later end than the others.
//! So the beginning is computed from how much of the new window is already used, as if all clients
//! together used the limit evenly. All clients then follow the same line, however rarely they ask.
//!
//! The limit is used evenly, along a line from the limit to 0. What an idle window has left may be
//! used at once, up to half of the limit. The tokens above the line behave like those of a bucket,
//! so the rest of the pace needs no rule for short windows.
//!
//! A bucket and a sliding window look similar, but there Remaining rises little by little. If that
//! happens too often, the limit no longer counts as a window. A sole client knows more: in a window
//! each of its requests takes a token, so a Remaining that stays has risen, too.

use std::time::{Duration, Instant};

use super::super::{StateCodec, seconds, span};
use crate::clock;

/// What is known of a window of at most [`LONGEST`].
#[derive(Clone, Debug, Default)]
pub(super) struct ShortWindow {
    limit: f64,
    /// The length that was learned, in seconds. A length that a header states comes first.
    learned: Option<f64>,
    /// When the current window began.
    began: Option<Instant>,
    /// When the current window ends. `None` if the limit does not count as a short window.
    ends: Option<Instant>,
    /// When the first answer arrived, until Remaining rose. It is `None` if something was used before.
    first: Option<Instant>,
    /// When the last answer of the window before the current one arrived.
    old_until: Option<Instant>,
    /// The last answer that was compared: its moment, and what was left.
    latest: Option<(Instant, f64)>,
    /// The least that was left since the last rise. For a sole client, the most that can be left.
    least: Option<f64>,
    /// What was left above the line at the last answer.
    spare: f64,
    /// How much of the current window may be used at once.
    burst: f64,
    /// The time to the reset that the first answer stated, in seconds, if nothing was used before.
    first_reset: Option<f64>,
    /// The longest time to a reset, in seconds.
    longest_reset: f64,
    /// How often Remaining rose within a window, or did not rise at its end.
    doubts: u32,
}

/// The longest short window, in seconds.
const LONGEST: f64 = 10.0;
/// The most that is used at once, as a fraction of the limit.
const BURST: f64 = 0.5;
/// How wrong the end of a window may be, as a fraction of its length.
const WRONG: f64 = 0.15;
/// The factor of the learned length with each window, in case it is too short.
const LONGER: f64 = 1.01;
/// The largest factor of the learned length after a window that did not end when it should.
const MUCH_LONGER: f64 = 1.5;
/// A learned length above a whole number of seconds by up to this factor is that number.
const WHOLE: f64 = 1.1;
/// The longest time to the reset of a short window, in seconds. A reset as a moment is too late by up
/// to a second for each time that is rounded to whole seconds: the reset, and the time of the answer.
const LONGEST_RESET: f64 = 13.0;
/// The shortest length that can be learned, in seconds.
const SHORTEST: f64 = 0.01;
/// The number of doubts from which the limit does not count as a window.
const OFTEN: u32 = 3;
/// How much faster than a window's quota Remaining has to rise for a jump.
const FASTER: f64 = 1.5;
/// From how many used tokens on the reset of a bucket would have moved.
const USED: f64 = 3.0;

/// What the answers of one limit state.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowAnswer {
    pub(super) limit: f64,
    pub(super) remaining: f64,
    /// The length of the window, in seconds.
    pub(super) window: Option<f64>,
    /// The time to the reset, in seconds.
    pub(super) reset: Option<f64>,
    /// Whether the request took a token, and no other client takes any.
    pub(super) is_counted: bool,
    pub(super) sent: Instant,
    pub(super) now: Instant,
}

impl ShortWindow {
    /// Learns from an answer. Returns the token time in seconds, and how many tokens were left
    /// above the line before the answer's request. Returns `None` if the limit does not count as a
    /// short window.
    pub(super) fn look(&mut self, answer: &WindowAnswer) -> Option<(f64, f64)> {
        let &WindowAnswer {
            limit,
            remaining,
            now,
            ..
        } = answer;
        if self.limit != limit {
            *self = ShortWindow {
                limit,
                ..ShortWindow::default()
            };
        }
        if answer.window.is_some_and(|window| window > LONGEST) {
            self.ends = None;
            return None;
        }
        self.longest_reset = self.longest_reset.max(answer.reset.unwrap_or(0.0));
        if self.latest.is_none_or(|(at, _)| answer.sent >= at) {
            self.compare(answer);
        }
        let window = answer.window.or(self.learned)?;
        if self.doubts >= OFTEN {
            self.ends = None;
            return None;
        }
        let ends = self.began.map(|began| clock::after(began, span(window)));
        let ends = ends.filter(|ends| seconds(*ends, now) <= WRONG * window);
        if ends.is_none()
            && let Some(began) = self.began.take()
        {
            self.doubts = self.doubts.saturating_add(1);
            if answer.window.is_none() {
                // Remaining has not risen at the end. If this is a window, it is longer: a client whose
                // looks are in the same places of each window never sees a reset of the whole length.
                let length = seconds(began, now).min(MUCH_LONGER * window);
                self.learned = Some(usual(length).max(window));
            }
        }
        // Without a beginning only the reset is known.
        let ends = ends
            .unwrap_or_else(|| clock::after(now, span(answer.reset.unwrap_or(0.0).min(window))));
        self.ends = Some(ends);
        let line = (limit - self.burst) * (seconds(now, ends) / window).min(1.0);
        self.spare = remaining + 1.0 - line;
        Some((window / limit, self.spare))
    }

    /// Compares an answer with the answer before, whose request the server has judged earlier.
    fn compare(&mut self, answer: &WindowAnswer) {
        let &WindowAnswer {
            limit,
            remaining,
            reset,
            is_counted,
            sent,
            now,
            ..
        } = answer;
        let is_fresh = remaining >= limit - (limit / 4.0).clamp(1.0, 2.0);
        let before = self.latest.replace((now, remaining));
        let (Some(least), Some((then, left))) = (self.least, before) else {
            self.least = Some(remaining);
            if is_fresh {
                (self.first, self.began, self.old_until) = (Some(now), Some(now), Some(now));
                self.burst = BURST * limit;
                self.first_reset = reset.filter(|reset| (2.0..=LONGEST_RESET).contains(reset));
            }
            return;
        };
        let window = answer.window.or(self.learned);
        let is_over = self
            .ends
            .zip(window)
            .is_some_and(|(ends, window)| seconds(now, ends) <= WRONG * window);
        // Each request of a sole client takes a token. If Remaining does not fall by it, it has risen.
        let least = match is_counted {
            true => (least - 1.0).max(0.0),
            false => least,
        };
        let rise = remaining - least;
        let is_jump = rise >= limit / 2.0 || (is_fresh && rise >= limit / 4.0);
        if is_jump || (is_fresh && (rise >= 1.0 || is_over)) || (rise >= 2.0 && is_over) {
            if is_jump {
                let refill = window.map_or(f64::INFINITY, |window| {
                    FASTER * seconds(then, now) * limit / window + 2.0
                });
                self.doubts = self
                    .doubts
                    .saturating_sub(u32::from(remaining - left > refill));
                self.learn(then, now);
            }
            self.begin(answer, then);
        } else if rise >= 2.0 {
            self.doubts = self.doubts.saturating_add(1);
            self.least = Some(remaining);
            // In a sliding window Remaining rises when the first request has left it. A reset that is
            // stated too late would make the window seem longer.
            let first = self.first.take().filter(|_| is_counted);
            if let (Some(first), Some(learned)) = (first, self.learned) {
                self.learned = Some(learned.min(usual(seconds(first, now))));
            }
        } else {
            self.least = Some(least.min(remaining));
            if self.learned.is_none() && limit - remaining >= USED {
                // The reset of a bucket is the time until it is full, which would have become
                // longer.
                let first = self.first_reset.take();
                self.learned = first
                    .filter(|first| reset.is_some_and(|reset| reset <= *first))
                    .map(usual);
            }
            if let (Some(began), Some(learned)) = (self.began, self.learned)
                && remaining < 1.0
                && seconds(began, sent) > learned
            {
                self.learned = Some(usual(seconds(began, now)));
            }
        }
    }

    /// Begins a window of which the answer is the first one. The answer before arrived at `then`.
    fn begin(&mut self, answer: &WindowAnswer, then: Instant) {
        let &WindowAnswer {
            limit,
            remaining,
            now,
            ..
        } = answer;
        let window = answer.window.or(self.learned);
        // The window of a calendar does not wait for the first request. If that comes late, the
        // reset shows it.
        let is_late = remaining >= limit - 1.0
            && answer
                .reset
                .zip(window)
                .is_some_and(|(reset, window)| reset <= window - 1.0);
        let began = match (self.ends.filter(|_| is_late), window) {
            (Some(ends), _) => ends,
            (None, Some(window)) => {
                let used = (limit - 1.0 - remaining).max(0.0);
                now.checked_sub(span(used * window / limit)).unwrap_or(then)
            }
            (None, None) => now,
        };
        self.began = Some(began.max(then).min(now));
        self.first = None;
        self.burst = self.spare.clamp(0.0, BURST * limit);
        self.least = Some(remaining);
    }

    /// Learns the length from a window that began after `then` and until `now`.
    fn learn(&mut self, then: Instant, now: Instant) {
        let Some(earliest) = self.old_until.replace(then) else {
            return;
        };
        let reset = Some(self.longest_reset).filter(|reset| (1.0..=LONGEST_RESET).contains(reset));
        let reset = reset.map(usual);
        let longest = self.learned.map(|learned| learned * LONGER).or(reset);
        let length = seconds(earliest, now);
        if longest.is_none() && length > LONGEST {
            return;
        }
        let length = length.min(longest.unwrap_or(LONGEST)).max(SHORTEST);
        self.learned = Some(usual(length));
    }

    /// Returns when the window ends; `None` if the limit does not count as a short window.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.ends
    }

    /// Returns the length that was learned, in seconds, if the limit seemed to be a short window, but
    /// Remaining rises within it, as in a sliding window.
    pub(super) fn sliding_window(&self) -> Option<f64> {
        self.learned.filter(|_| self.doubts >= OFTEN)
    }

    /// Returns when the window ends, if `in_flight` requests take all that is left of it.
    pub(super) fn exhausted_until(&self, in_flight: usize) -> Option<Instant> {
        let (_, remaining) = self.latest?;
        self.ends.filter(|_| remaining - (in_flight as f64) < 1.0)
    }

    /// Writes or reads everything that was learned.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        codec.number(&mut self.limit);
        codec.optional_number(&mut self.learned);
        codec.moment(&mut self.first);
        codec.near(&mut self.began, Duration::ZERO);
        codec.near(&mut self.ends, span(LONGEST));
        codec.moment(&mut self.old_until);
        let (mut at, mut left) = self.latest.unzip();
        codec.moment(&mut at);
        codec.optional_number(&mut left);
        self.latest = at.zip(left);
        codec.optional_number(&mut self.least);
        codec.number(&mut self.spare);
        codec.number(&mut self.burst);
        codec.optional_number(&mut self.first_reset);
        codec.number(&mut self.longest_reset);
        codec.small_count(&mut self.doubts);
        self.learned = self
            .learned
            .filter(|window| (SHORTEST..=LONGEST).contains(window));
        self.burst = self.burst.clamp(0.0, BURST * self.limit.max(0.0));
    }
}

/// Returns the length of a short window that seems to have this one: a whole number of seconds if
/// that is only a little shorter.
fn usual(length: f64) -> f64 {
    let length = length.min(LONGEST);
    match length.floor() {
        whole if whole >= 1.0 && length <= WHOLE * whole => whole,
        _ => length,
    }
}
