//! The token time, and whether the limit is a bucket or a window.

use std::time::{Duration, Instant};

use super::super::reading::{QuotaAnswer, QuotaNumbers};
use super::super::{LONGEST, StateCodec, seconds};
use super::SET_POINT;
use super::short_window::ShortWindow;

/// What the pace knows of the limit.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Limit and window, in seconds, as configured.
    configured: Option<(f64, f64)>,
    /// The token time: window / limit, in seconds.
    pub(super) token_time: f64,
    /// The token time of the pace. It is longer if less is left of the window than an even pace
    /// would leave.
    pub(super) paced_time: f64,
    /// Whether the token time is a guess.
    pub(super) is_guess: bool,
    /// Whether less is left of the window than an even pace would leave.
    pub(super) is_below: bool,
    kind: ScaleKind,
    /// The limit as a window of at most ten seconds, which goes before `kind`.
    pub(super) short: ShortWindow,
    limit: Option<f64>,
    /// The length of the window that a header states, in seconds.
    stated_window: Option<f64>,
    /// The longest time to a reset, in seconds. The window is at least that long.
    longest_reset: f64,
    watch: Option<ResetWatch>,
    /// The last answer that later ones are compared with: its moment, and what was left. An answer
    /// is compared if its request left after that moment, because answers to concurrent requests
    /// arrive in any order.
    last: Option<(Instant, f64)>,
    /// The most tokens that were ever left.
    most: f64,
    is_mostly_free: bool,
    /// The average round trip, in seconds; 0 if none is known.
    trip: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleKind {
    Unknown,
    Bucket,
    Window,
}

/// A reset that is watched, to find out whether its moment moves.
#[derive(Clone, Copy, Debug)]
struct ResetWatch {
    reset_at: Instant,
    since: Instant,
    remaining: f64,
}

/// The fraction of a window's quota that is kept for an even pace.
const KEPT: f64 = 0.5;
/// The first guess of the token time, in seconds.
const GUESS: f64 = 0.3;
/// A reset that moves by no more than this counts as fixed, in seconds: headers have whole seconds,
/// and transit times vary.
const STAYS: f64 = 1.5;
/// How long a reset has to stay fixed, in seconds.
const WATCHED: f64 = 4.0;
/// The least rise of Remaining from which the token time is computed.
const LEAST_GAIN: f64 = 3.0;
/// The least time to a full bucket from which the token time is computed, in seconds: headers have
/// whole seconds.
const LEAST_RESET: f64 = 5.0;
/// The most tokens that are refilled in a round trip before several count as one, for a bucket and
/// for a short window.
const TRIP: f64 = 8.0;
const WINDOW_TRIP: f64 = 4.0;
/// The weight of a new round trip in the average.
const TRIP_WEIGHT: f64 = 0.05;
/// The set point in a short window, in tokens, and how many tokens above it the line is.
const WINDOW_SET_POINT: f64 = 4.0;
const OFFSET: f64 = 0.35;
/// How much faster `n` falls in a short window, divided by this power of `n`: of two clients the one
/// with the larger `n` still falls faster for each of its requests, but the level depends less on `n`.
const WINDOW_HASTE: f64 = 18.0;
const WINDOW_HASTE_POWER: f64 = 0.6;
const SHORTEST: f64 = 1e-6;

impl Default for Scale {
    fn default() -> Self {
        Scale {
            configured: None,
            token_time: GUESS,
            paced_time: GUESS,
            is_guess: true,
            is_below: false,
            kind: ScaleKind::Unknown,
            short: ShortWindow::default(),
            limit: None,
            stated_window: None,
            longest_reset: 0.0,
            watch: None,
            last: None,
            most: 0.0,
            is_mostly_free: false,
            trip: 0.0,
        }
    }
}

impl Scale {
    pub(super) fn configure(&mut self, limit: f64, window: f64) {
        self.configured = Some((limit, window));
        self.set(window / limit);
    }

    fn set(&mut self, token_time: f64) {
        self.token_time = token_time.clamp(SHORTEST, LONGEST);
        self.paced_time = self.token_time;
        self.is_guess = false;
    }

    /// Returns the limit, or infinity if it is unknown.
    pub(super) fn limit(&self) -> f64 {
        self.limit
            .or(self.configured.map(|(limit, _)| limit))
            .unwrap_or(f64::INFINITY)
    }

    /// Reports whether it was ever known what is left.
    pub(super) fn has_level(&self) -> bool {
        self.last.is_some()
    }

    /// Returns the limit to which `remaining` belongs.
    pub(super) fn known_limit(&self, told: &QuotaNumbers) -> Option<f64> {
        told.limit
            .or(self.limit)
            .or(self.configured.map(|(limit, _)| limit))
    }

    /// Reports whether most of the tokens that were ever left are left now. It helps if the size of
    /// the bucket is unknown.
    pub(super) fn is_mostly_free(&self) -> bool {
        self.is_guess && self.is_mostly_free
    }

    pub(super) fn is_window(&self) -> bool {
        self.kind == ScaleKind::Window || self.is_short()
    }

    /// Returns the set point: how many tokens the pace wants to be left. It is lower for a small
    /// bucket, because otherwise even a full one would seem short.
    pub(super) fn set_point(&self) -> f64 {
        let aimed = match self.is_short() {
            true => WINDOW_SET_POINT,
            false => SET_POINT,
        };
        (self.lag() * aimed).min(self.limit() / 4.0)
    }

    /// Returns how many tokens count as one. More than a few are refilled in a round trip of a fast
    /// limit, so that many requests leave before a response shows the effect of one. The pace then
    /// takes smaller steps towards a higher level.
    pub(super) fn lag(&self) -> f64 {
        if self.is_guess {
            return 1.0;
        }
        let seen = match self.is_short() {
            true => WINDOW_TRIP,
            false => TRIP,
        };
        (self.trip / (seen * self.token_time)).max(1.0)
    }

    /// Returns how much one answer counts.
    pub(super) fn weight(&self) -> f64 {
        1.0 / self.lag()
    }

    /// Returns the factor of the release of an `n` like this. In a short window the competition has
    /// to show at a level that all clients see near the line.
    pub(super) fn haste(&self, n: f64) -> f64 {
        match self.is_short() {
            true => WINDOW_HASTE * n.powf(-WINDOW_HASTE_POWER),
            false => 1.0,
        }
    }

    /// Takes note of the time that a response took, in seconds.
    pub(super) fn answered_after(&mut self, trip: f64) {
        let weight = match self.trip > 0.0 {
            true => TRIP_WEIGHT,
            false => 1.0,
        };
        self.trip += weight * (trip - self.trip);
    }

    /// Reports whether the limit has a short fixed window, which the pace uses evenly.
    pub(super) fn is_short(&self) -> bool {
        self.short.ends().is_some()
    }

    /// Returns the requests per second of a short sliding window; `None` if the limit is none.
    pub(super) fn sliding_rate(&self) -> Option<f64> {
        let window = self.short.sliding_window()?;
        Some(self.limit() / window)
    }

    /// Returns when the next window begins, and the time that each request has in it, in seconds;
    /// `None` for a bucket.
    pub(super) fn next_window(&self) -> Option<(Instant, f64)> {
        if self.is_short() {
            return None;
        }
        let reset_at = self
            .watch
            .filter(|_| self.kind == ScaleKind::Window)?
            .reset_at;
        Some((reset_at, self.window()? / self.limit?))
    }

    /// Returns the time until the reset, in seconds, if an answer says that the window is
    /// exhausted.
    pub(super) fn empty_until_reset(&self, told: &QuotaNumbers, now: Instant) -> Option<f64> {
        if let Some(ends) = self.short.ends()
            && told.remaining == Some(0.0)
        {
            return Some(seconds(now, ends));
        }
        told.reset
            .filter(|_| self.kind == ScaleKind::Window && told.remaining == Some(0.0))
    }

    fn window(&self) -> Option<f64> {
        let configured = self.configured.map(|(_, window)| window);
        let seen = (self.longest_reset > 0.0).then_some(self.longest_reset);
        self.stated_window.or(configured).or(seen)
    }

    /// Learns from an answer, of which only a plausible Remaining is left. Returns how many tokens are left
    /// above those that are kept for an even pace.
    pub(super) fn look(&mut self, answer: &QuotaAnswer) -> Option<f64> {
        let &QuotaAnswer {
            told, sent, now, ..
        } = answer;
        self.note_quota(
            told.limit.filter(|limit| *limit >= 1.0),
            told.window.filter(|window| *window > 0.0),
        );
        let remaining = told.remaining?;
        let last = self.last;
        let is_later = last.is_none_or(|(at, _)| sent >= at);
        if is_later {
            self.last = Some((now, remaining));
        }
        if let Some(reset) = told.reset.filter(|_| is_later) {
            self.watch(reset, remaining, now);
        }
        let told = QuotaNumbers {
            limit: self.limit,
            window: self.stated_window,
            ..told
        };
        if let Some(seen) = self.short.look(&QuotaAnswer { told, ..*answer }) {
            self.set(seen.token_time);
            self.paced_time = seen.paced_time.clamp(SHORTEST, LONGEST);
            self.is_below = false;
            return seen.spare.map(|spare| spare + self.set_point() + OFFSET);
        }
        if self.kind == ScaleKind::Window
            && let (Some(limit), Some(window), Some(reset)) =
                (self.limit, self.window(), told.reset)
        {
            return Some(self.line(remaining, limit, window, reset));
        }
        self.is_below = false;
        self.measure(&told, remaining, last.filter(|_| is_later), now);
        Some(remaining)
    }

    /// Takes note of the limit and the window that an answer states. A server with several quotas states now one and now
    /// another. So a part that an answer leaves out stays only if it states nothing new.
    fn note_quota(&mut self, limit: Option<f64>, window: Option<f64>) {
        let is_known = limit.is_none_or(|_| limit == self.limit)
            && window.is_none_or(|_| window == self.stated_window);
        self.limit = limit.or(self.limit.filter(|_| is_known));
        self.stated_window = window.or(self.stated_window.filter(|_| is_known));
    }

    /// Returns what is left of a window above the straight line from the kept fraction to 0 at the
    /// reset.
    fn line(&mut self, remaining: f64, limit: f64, window: f64, reset: f64) -> f64 {
        let line = KEPT * limit * reset / window;
        let level = remaining - line;
        self.is_below = level < 0.0;
        self.set(window / (KEPT * limit));
        if self.is_below {
            self.paced_time = (reset / remaining.max(1.0)).clamp(self.token_time, LONGEST);
        }
        level
    }

    /// Writes or reads everything that was learned.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        codec.number(&mut self.token_time);
        codec.number(&mut self.paced_time);
        codec.flag(&mut self.is_guess);
        codec.flag(&mut self.is_below);
        codec.flag(&mut self.is_mostly_free);
        let mut kind = self.kind as u32;
        codec.small_count(&mut kind);
        self.kind = match kind {
            0 => ScaleKind::Unknown,
            1 => ScaleKind::Bucket,
            _ => ScaleKind::Window,
        };
        codec.optional_number(&mut self.limit);
        codec.optional_number(&mut self.stated_window);
        codec.number(&mut self.longest_reset);
        codec.number(&mut self.most);
        codec.number(&mut self.trip);
        let mut reset_at = self.watch.map(|watch| watch.reset_at);
        let mut seen = self.watch.map(|watch| (watch.since, watch.remaining));
        codec.moment(&mut reset_at);
        codec.number_at(&mut seen);
        let watch = reset_at.zip(seen);
        self.watch = watch.map(|(reset_at, (since, remaining))| ResetWatch {
            reset_at,
            since,
            remaining,
        });
        codec.number_at(&mut self.last);
        self.short.share(codec);
        self.limit = self.limit.filter(|limit| *limit >= 1.0);
        self.stated_window = self.stated_window.filter(|window| *window >= SHORTEST);
        self.longest_reset = if self.longest_reset >= SHORTEST {
            self.longest_reset
        } else {
            0.0
        };
        self.token_time = self.token_time.clamp(SHORTEST, LONGEST);
        self.paced_time = self.paced_time.clamp(SHORTEST, LONGEST);
        self.trip = self.trip.clamp(0.0, LONGEST);
    }

    fn measure(
        &mut self,
        told: &QuotaNumbers,
        remaining: f64,
        last: Option<(Instant, f64)>,
        now: Instant,
    ) {
        self.most = self.most.max(remaining);
        self.is_mostly_free = remaining >= 0.8 * self.most && remaining > 6.0 * SET_POINT;
        if let Some((limit, window)) = self.configured {
            return self.set(window / limit);
        }
        if let (Some(limit), Some(window)) = (self.limit, self.stated_window) {
            return self.set(window / limit);
        }
        if let (Some(limit), Some(reset), ScaleKind::Bucket) = (self.limit, told.reset, self.kind)
            && reset >= LEAST_RESET
            && limit - remaining >= 1.0
        {
            return self.set(reset / (limit - remaining));
        }
        if let Some((then, before)) = last
            && self.is_guess
            && remaining - before >= LEAST_GAIN
        {
            let seen = seconds(then, now) / (remaining - before - 1.0);
            self.token_time = seen
                .clamp(self.token_time / 2.0, self.token_time)
                .max(SHORTEST);
            self.paced_time = self.token_time;
        }
    }

    /// Finds out whether the reset is fixed, as for a window, or moves, as for a bucket.
    fn watch(&mut self, reset: f64, remaining: f64, now: Instant) {
        self.longest_reset = self.longest_reset.max(whole_window(reset));
        let Ok(until) = Duration::try_from_secs_f64(reset) else {
            return;
        };
        let Some(reset_at) = now.checked_add(until) else {
            return;
        };
        let fresh = ResetWatch {
            reset_at,
            since: now,
            remaining,
        };
        let Some(watch) = &mut self.watch else {
            self.watch = Some(fresh);
            return;
        };
        let moved = seconds(watch.reset_at, reset_at).max(seconds(reset_at, watch.reset_at));
        if moved <= STAYS {
            if remaining > watch.remaining {
                *watch = ResetWatch {
                    reset_at: watch.reset_at,
                    ..fresh
                };
            } else if seconds(watch.since, now) >= WATCHED {
                self.kind = ScaleKind::Window;
            }
            watch.remaining = remaining;
        } else {
            // The reset of a window moves only when the window has ended.
            if seconds(now, watch.reset_at) > STAYS {
                self.kind = ScaleKind::Bucket;
            }
            // An earlier reset contradicts the one before. That was of another quota, or of one that applies no more, such
            // as a lockout of a day.
            if reset_at < watch.reset_at {
                self.longest_reset = whole_window(reset);
                self.short = ShortWindow::default();
            }
            *watch = fresh;
        }
    }
}

/// Returns the shortest usual window that can have `reset` seconds left.
fn whole_window(reset: f64) -> f64 {
    let usual = [1.0, 10.0, 60.0, 900.0, 3600.0, 86_400.0];
    usual
        .into_iter()
        .find(|window| reset <= window + STAYS)
        .unwrap_or(reset)
}
