//! Limits with a window of at most ten seconds.
//!
//! A reset in whole seconds says little about a window of one second, and a response is older by a
//! part of its round trip. So this module keeps what is certain of the window's end: the earliest
//! and the latest moment at which it can be. Within a fixed window Remaining only falls. If it rises
//! between two looks, a window ended after the first request left and before the second response
//! arrived. The bounds of all windows together soon leave a few hundredths of a second.
//!
//! The pace takes what is used for even wherever it would be even for one of the possible ends. It
//! spreads what is left until the latest end, and waits for it if nothing is left.
//!
//! In a bucket and in a sliding window Remaining rises little by little. Then windows seem to end too
//! early, with a small rise, or not at all. If that happens too often, the limit *slides*. The effect of
//! a request then lasts for a window, so Remaining is no ticket number.

use std::time::Instant;

use super::super::reading::QuotaAnswer;
use super::super::{StateCodec, seconds, span};
use crate::clock;

/// What is known of a window of at most [`LONGEST`].
#[derive(Clone, Debug, Default)]
pub(super) struct ShortWindow {
    limit: f64,
    /// The length, in seconds; 0 if it is unknown.
    length: f64,
    /// The longest time to a reset, in seconds. It is the length if no header states one.
    longest_reset: f64,
    /// The shortest time between the ends of two windows, in seconds; 0 if it is unknown. The length
    /// is not longer.
    shortest: f64,
    /// The earliest moment of the last end.
    ended: Option<Instant>,
    /// The earliest and the latest end of the current window.
    end: Option<(Instant, Instant)>,
    /// The last answer that was compared.
    last: Option<Look>,
    /// How often a window ended otherwise than a fixed one does, less twice the number of proper ends.
    doubts: u32,
}

/// When a request left, when its response arrived, and what that said was left.
#[derive(Clone, Copy, Debug)]
struct Look {
    sent: Instant,
    now: Instant,
    remaining: f64,
}

/// What an answer shows of the limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// The token time, in seconds.
    pub(super) token_time: f64,
    /// The token time that spreads what is left over the rest of the window, in seconds.
    pub(super) paced_time: f64,
    /// How many tokens fewer were used than by an even pace; `None` if the limit slides.
    pub(super) spare: Option<f64>,
}

/// The longest short window, in seconds.
const LONGEST: f64 = 10.0;
/// The longest time to the reset of a short window, in seconds. A reset as a moment is too late by up
/// to a second for each time that is rounded to whole seconds: the reset, and the time of the answer.
const LONGEST_RESET: f64 = 13.0;
/// The shortest length that counts, in seconds.
const SHORTEST: f64 = 0.01;
/// A length above a whole number of seconds by up to this factor is that number.
const WHOLE: f64 = 1.1;
/// By how much later the latest end is after each window, as a fraction of the window: clocks differ.
const DRIFT: f64 = 0.0005;
/// The largest rise that does not count as the end of a window, as a fraction of what an even use leaves
/// if the window ended half-way between the two looks. At 0.5 one of five processes takes 20 per second
/// that slide for a window; at 0.7 a window of 15 for one that slides.
const SMALL: f64 = 0.6;
/// The overuse from which a limit may slide, as a fraction of the limit.
const OVERUSE: f64 = 0.5;
/// Two looks that are no further apart than this fraction of the window show that it has not ended.
const CLOSE: f64 = 0.25;
/// How much longer than expected a window may last, as a fraction of it, after a request that passed
/// and after one that was refused. Some windows begin with their first request.
const LATE: f64 = 0.05;
const LATE_REFUSED: f64 = 0.25;
/// The number of doubts from which the limit slides, and the largest number.
const OFTEN: u32 = 3;
const MOST_DOUBTS: u32 = 6;
/// The shortest and the longest time of a token, in token times, for what is left of a window. A
/// response is too old for a longer or a shorter one.
const SPREAD: (f64, f64) = (0.7, 2.0);
/// The least part of a token time for a limit that slides, while most of it is unused.
const LEAST: f64 = 0.05;

impl ShortWindow {
    /// Learns from an answer. Returns `None` if the limit has no short window.
    pub(super) fn look(&mut self, answer: &QuotaAnswer) -> Option<Seen> {
        let &QuotaAnswer {
            told, sent, now, ..
        } = answer;
        let (limit, remaining) = (told.limit.unwrap_or_default(), told.remaining?);
        if self.limit != limit {
            *self = ShortWindow {
                limit,
                ..ShortWindow::default()
            };
        }
        if limit == 0.0 {
            return None;
        }
        self.longest_reset = self.longest_reset.max(told.reset.unwrap_or(0.0));
        self.length = self.length_of(told.window).unwrap_or(0.0);
        if self.length < SHORTEST {
            self.end = None;
            return None;
        }
        if self.last.is_none_or(|last| sent >= last.now) {
            let look = Look {
                sent,
                now,
                remaining,
            };
            self.compare(look, told.reset, answer.passed);
            self.last = Some(look);
        }
        let token_time = self.length / limit;
        if self.slides() {
            return Some(Seen {
                token_time,
                paced_time: token_time * ((limit - remaining) / limit).max(LEAST),
                spare: None,
            });
        }
        let (earliest, latest) = self.end?;
        // The server judges a request about half-way.
        let judged = sent + span(seconds(sent, now) / 2.0);
        let apart = seconds(earliest, latest);
        let rest = (seconds(judged, latest) - apart / 2.0).clamp(0.0, self.length);
        let spare = remaining + 0.5 - limit * rest / self.length;
        // Within the bounds any use may be even.
        let unsure = limit * apart / 2.0 / self.length;
        let spare = spare - spare.clamp(-unsure, unsure);
        if spare < -OVERUSE * limit {
            self.doubt();
        }
        let spread = seconds(judged, latest).min(self.length) / (remaining + 0.5).max(1.0);
        Some(Seen {
            token_time,
            paced_time: spread.clamp(SPREAD.0 * token_time, SPREAD.1 * token_time),
            spare: Some(spare),
        })
    }

    /// Returns the length of the window if it is short.
    fn length_of(&self, stated: Option<f64>) -> Option<f64> {
        if let Some(stated) = stated {
            return Some(stated).filter(|stated| *stated <= LONGEST);
        }
        let reset = Some(self.longest_reset).filter(|it| (1.0..=LONGEST_RESET).contains(it))?;
        let most = match self.shortest > 0.0 {
            true => self.shortest.min(LONGEST),
            false => LONGEST,
        };
        let length = reset.min(most);
        let whole = length.floor();
        Some(match whole >= 1.0 && length <= WHOLE * whole {
            true => whole,
            false => length,
        })
    }

    fn doubt(&mut self) {
        self.doubts = (self.doubts + 1).min(MOST_DOUBTS);
    }

    /// Compares an answer with the answer before, whose request the server has judged earlier. `reset` is the
    /// stated time to the reset, in seconds.
    fn compare(&mut self, look: Look, reset: Option<f64>, passed: bool) {
        let (
            limit,
            Look {
                sent,
                now,
                remaining,
            },
        ) = (self.limit, look);
        let (Some((mut earliest, mut latest)), Some(last)) = (self.end, self.last) else {
            let reset = reset.unwrap_or(self.length).min(self.length);
            let earliest = clock::after(sent, span(reset - 1.0));
            self.end = Some((earliest, clock::after(now, span(reset))));
            return;
        };
        let gap = seconds(last.sent, now) / self.length;
        if gap < 1.0 && remaining > last.remaining {
            // A window ended between the two looks.
            let is_early = now < earliest;
            let rise = remaining - last.remaining + 1.0;
            if rise < SMALL * limit * (1.0 - gap / 2.0) {
                self.doubt();
            } else {
                if let Some(before) = self.ended.replace(last.sent) {
                    let time = seconds(before, now);
                    self.shortest = match self.shortest > 0.0 {
                        true => self.shortest.min(time),
                        false => time,
                    };
                }
                match is_early {
                    true => self.doubt(),
                    false => self.doubts = self.doubts.saturating_sub(2),
                }
            }
            if is_early || last.sent > latest {
                (earliest, latest) = (last.sent, now);
            } else {
                earliest = earliest.max(last.sent);
                latest = latest.min(now);
            }
            earliest = clock::after(earliest, span(self.length));
            latest = clock::after(latest, span(self.length));
        } else if sent > latest && (gap < CLOSE || (!passed && gap < 1.0 && last.now < earliest)) {
            // The window should have ended.
            self.doubt();
            let late = if passed { gap.min(LATE) } else { LATE_REFUSED };
            (earliest, latest) = (sent, clock::after(now, span(late * self.length)));
        }
        let windows = (seconds(latest, sent) / self.length).ceil();
        if windows * DRIFT > 1.0 {
            self.end = None;
            return self.compare(look, reset, passed);
        }
        // All of them may be hours, longer than any pause of a pace.
        let past = span(self.length) * windows as u32;
        self.end = Some((
            clock::after(earliest, past),
            clock::after(latest, past.mul_f64(1.0 + DRIFT)),
        ));
    }

    /// Reports whether the limit has a short window, fixed or sliding.
    pub(super) fn is_known(&self) -> bool {
        self.end.is_some()
    }

    /// Reports whether the limit seemed to have a short window, but Remaining rises within it.
    pub(super) fn slides(&self) -> bool {
        self.is_known() && self.doubts >= OFTEN
    }

    /// Returns the length of the window, in seconds, if the limit slides.
    pub(super) fn sliding_window(&self) -> Option<f64> {
        self.slides().then_some(self.length)
    }

    /// Returns which part of the last window was unused, if the limit slides.
    pub(super) fn sliding_unused(&self) -> Option<f64> {
        let left = self.last.filter(|_| self.slides())?.remaining;
        Some((left / self.limit).clamp(0.0, 1.0))
    }

    /// Returns the latest moment at which the window ends; `None` if the limit has no fixed window.
    pub(super) fn ends(&self) -> Option<Instant> {
        let (_, latest) = self.end?;
        (!self.slides()).then_some(latest)
    }

    /// Returns when the window ends at the latest, if `in_flight` requests take all that is left of
    /// it.
    pub(super) fn exhausted_until(&self, in_flight: usize) -> Option<Instant> {
        let remaining = self.last?.remaining;
        self.ends().filter(|_| remaining - (in_flight as f64) < 1.0)
    }

    /// Writes or reads everything that was learned.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        for number in [
            &mut self.limit,
            &mut self.length,
            &mut self.longest_reset,
            &mut self.shortest,
        ] {
            codec.number(number);
        }
        codec.moment(&mut self.ended);
        let (mut earliest, mut latest) = self.end.unzip();
        codec.near(&mut earliest, span(LONGEST));
        codec.near(&mut latest, span(LONGEST));
        self.end = earliest.zip(latest);
        let mut sent = self.last.map(|last| last.sent);
        let mut seen = self.last.map(|last| (last.now, last.remaining));
        codec.moment(&mut sent);
        codec.number_at(&mut seen);
        let last = sent.zip(seen);
        self.last = last.map(|(sent, (now, remaining))| Look {
            sent,
            now,
            remaining,
        });
        codec.small_count(&mut self.doubts);
        self.length = self.length.clamp(0.0, LONGEST);
    }
}
