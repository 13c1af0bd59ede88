//! The search for the speed of a server that states neither a limit nor what is left.
//!
//! Only refusals show the limit, and what passes between them. The search has three phases:
//!
//! ```text
//! start ──refused──> outage ──passed──> paced
//!                      ^                  │
//!                      └─────refused──────┘
//! ```
//!
//! - **Start**: no request was refused. The number of requests in flight may grow by one in each
//!   round trip, so that few requests are refused when a limit is met.
//! - **Outage**: the last request was refused. One request at a time leaves, after a pause that grows
//!   with each refusal.
//! - **Paced**: requests leave at a rate that rises along a cubic curve: fast at first, slowly near the rate that is
//!   believed to be the limit, and then ever faster. Above the rate that was refused last it rises slowly.
//!
//! A cycle lasts from the end of one outage to the end of the next. What passed in a cycle, divided
//! by its length, is what the server allows, or a little less. The rate that was refused is what it
//! does not allow. The next curve lies between the two, and its width is half of the distance, so
//! the search narrows as a bisection does. A limit that is found again and again is tested less
//! often.
//!
//! The search takes what it can get. It does not find equal shares with other clients, unless
//! refusals state how long to wait.

use std::time::{Duration, Instant};

use super::super::{Dice, LONGEST, StateCodec, seconds};
use super::LONGEST_PAUSE;
use super::curve::{Curve, bounded};

/// What is known of the limit. Rates are natural logarithms of requests per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    phase: Phase,
    curve: Curve,
    /// The rate at which requests passed in the last cycle that was measured.
    lower: Option<f64>,
    /// The rate that was refused last.
    upper: Option<f64>,
    /// The requests that passed in this cycle, and when it began.
    cycle: PassedCount,
    /// The requests that passed since the last outage, and when that ended.
    lately: PassedCount,
    /// How often the limit was found again at the same rate, in a row.
    calm: f64,
    /// The average length of an interval, in parts of the interval that was meant: timers are late.
    late: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// No request was refused. Up to `window` requests may be in flight.
    Start { window: f64 },
    /// `count` requests were refused in a row, the first one at `began` and the last one at `latest`.
    Outage {
        count: f64,
        began: Instant,
        latest: Instant,
    },
    /// Requests leave at the rate of the curve.
    Paced,
}

/// Requests that passed since a moment.
#[derive(Clone, Copy, Debug, Default)]
struct PassedCount {
    passed: f64,
    since: Option<Instant>,
}

/// The requests in flight with which the search starts.
const FIRST_WINDOW: f64 = 2.0;
/// How long a request in flight keeps the next one waiting at the start and in an outage, in
/// seconds. An answer may be lost.
const PATIENCE: f64 = 0.25;
/// After an idle time of this many seconds, the count of passed requests begins again.
const IDLE: f64 = 1.0;
/// The first pause in seconds, and the factor of each further one, if no rate is known.
const FIRST_PAUSE: f64 = 0.025;
const LONGER_UNKNOWN: f64 = 1.5;
/// The factor of each further pause if a rate is known.
const LONGER: f64 = 1.7;
/// From this number of refusals in a row on, an outage may have another cause than the limit. The
/// measured rate then falls by at most [`OUT`].
const LONG_OUTAGE: f64 = 6.0;
const OUT: f64 = 0.35;
/// The longest outage that the search takes for the end of a window, in seconds, if it knows no rate.
const LONGEST_WINDOW: f64 = 90.0;
/// The least and the most that a pause is multiplied with.
const SPREAD: (f64, f64) = (0.75, 1.25);
/// A request that leaves later than after this many intervals was not delayed by the pace.
const UNPACED: f64 = 2.0;
/// From this many passed requests on, a cycle is long enough to be measured.
const ENOUGH: f64 = 16.0;
/// How much lower the rate is after a refusal.
const STEP: f64 = 0.03;
/// How much lower it is at most. A few requests show the rate only roughly.
const LARGEST_STEP: f64 = 1.4;
/// How far above the rate of a few requests a curve may lie.
const FEW: f64 = 0.25;
/// The distance to the upper rate if that is unknown.
const UNKNOWN_GAP: f64 = 0.35;
/// The largest distance to the upper rate.
const LARGEST_GAP: f64 = 0.7;
/// Two measurements that differ by no more than this are of one limit, and it is the largest
/// distance to the upper rate then.
const SAME: f64 = 0.12;
/// The distance up to which the limit counts as found again, and how far above the refused rate a
/// wide curve may lie.
const FOUND: f64 = 0.06;
/// The largest number of doublings of the reach for a limit that is found again.
const CALMEST: f64 = 3.0;
/// The most by which a rate falls if refusals state a wait. Waits in whole seconds are too long for
/// short windows, so the measured rate is too low.
const STATED_DROP: f64 = 0.005;
/// The same after a cycle that is too short to be measured.
const STATED_STEP: f64 = 0.1;
/// The factor of the reach if refusals state a wait, because such refusals cost more time.
const STATED_REACH: f64 = 8.0;
/// The weight of a new interval in the average lateness.
const LATE_WEIGHT: f64 = 0.05;
/// The most refusals in a row that lengthen the pause.
const MOST_REFUSED: f64 = 100.0;

impl Default for Search {
    fn default() -> Self {
        Search {
            phase: Phase::Start {
                window: FIRST_WINDOW,
            },
            curve: Curve::default(),
            lower: None,
            upper: None,
            cycle: PassedCount::default(),
            lately: PassedCount::default(),
            calm: 0.0,
            late: 1.0,
        }
    }
}

impl PassedCount {
    fn from(now: Instant) -> Self {
        PassedCount {
            passed: 0.0,
            since: Some(now),
        }
    }

    /// Returns the length, in seconds.
    fn length(&self, now: Instant) -> f64 {
        self.since
            .map_or(0.0, |since| seconds(since, now))
            .max(1e-6)
    }

    fn rate(&self, now: Instant) -> f64 {
        (self.passed / self.length(now)).ln()
    }
}

impl Search {
    /// Starts at `rate` requests per second, if no request was refused. The rate may be too low, so the
    /// curve is wide.
    pub(super) fn start_at(&mut self, rate: f64) {
        if matches!(self.phase, Phase::Start { .. }) {
            let rate = bounded(rate.ln());
            self.curve = Curve::between(rate - UNKNOWN_GAP / 2.0, UNKNOWN_GAP, 0.0, 1.0);
            self.lower = Some(rate);
            self.phase = Phase::Paced;
        }
    }

    /// Returns the interval between two requests, in seconds; 0 if there is none.
    pub(super) fn interval(&self) -> f64 {
        match self.phase {
            Phase::Paced => (-self.curve.rate()).exp(),
            Phase::Start { .. } | Phase::Outage { .. } => 0.0,
        }
    }

    /// Returns the interval that was reached, also in an outage, in seconds; 0 if none is known.
    pub(super) fn reached(&self) -> f64 {
        match (self.phase, self.upper) {
            (Phase::Paced, _) | (Phase::Outage { .. }, Some(_)) => (-self.curve.rate()).exp(),
            _ => 0.0,
        }
    }

    /// Returns how long after the last request the next one may leave, in seconds.
    pub(super) fn slot(&self, in_flight: usize) -> f64 {
        match self.phase {
            Phase::Start { window } if in_flight as f64 >= window.floor() => PATIENCE,
            Phase::Outage { .. } if in_flight > 0 => PATIENCE,
            _ => self.interval(),
        }
    }

    /// Takes note that a request leaves at `now`, after the one that left at `last`.
    pub(super) fn sent(&mut self, last: Option<Instant>, in_flight: usize, now: Instant) {
        let gap = last.map_or(0.0, |last| seconds(last, now));
        match self.phase {
            Phase::Start { .. } => {
                if self.cycle.since.is_none() || (gap > IDLE && in_flight == 0) {
                    self.cycle = PassedCount::from(now);
                }
            }
            Phase::Outage { .. } => {}
            Phase::Paced => {
                let part = gap / self.interval();
                if part < UNPACED {
                    self.late += LATE_WEIGHT * (part.max(1.0) - self.late);
                    self.curve.advance();
                    if let Some(upper) = self.upper {
                        self.curve.slow_down_above(upper + FOUND);
                    }
                } else {
                    // Requests leave as they come, so what passes does not show the limit.
                    self.cycle = PassedCount::from(now);
                }
            }
        }
    }

    /// Takes note of an answer at `now` to a request that left at `sent` and passed. `states_wait`
    /// tells whether the last refusal stated how long to wait, and `is_alone` whether no other client
    /// uses the limit.
    pub(super) fn passed(
        &mut self,
        sent: Instant,
        now: Instant,
        states_wait: bool,
        is_alone: bool,
    ) {
        self.cycle.passed += 1.0;
        self.lately.passed += 1.0;
        match &mut self.phase {
            Phase::Start { window } => *window += 1.0 / *window,
            // The server judged this request before it refused another one.
            Phase::Outage { latest, .. } if sent < *latest => {}
            // Nothing passed before the outage, so it shows nothing of the limit.
            Phase::Outage { count, .. }
                if *count >= LONG_OUTAGE && self.cycle.passed == 1.0 && self.upper.is_none() =>
            {
                *self = Search {
                    cycle: PassedCount::from(now),
                    ..Search::default()
                };
            }
            // The first start met an outage too long for a window, or nothing else. Only the limit stops
            // a second start in the same way.
            &mut Phase::Outage { began, .. }
                if is_alone
                    && self.upper.is_none()
                    && self.lower.is_none()
                    && !states_wait
                    && (self.cycle.passed == 1.0 || seconds(began, now) > LONGEST_WINDOW) =>
            {
                *self = Search {
                    lower: Some(bounded(self.cycle.rate(now))),
                    cycle: PassedCount::from(now),
                    ..Search::default()
                };
            }
            &mut Phase::Outage { began, count, .. } => {
                let known = self.lower.filter(|_| count >= LONG_OUTAGE);
                let least = known.map(|lower| bounded(lower - OUT));
                self.end_cycle(seconds(began, now), least, now, states_wait, is_alone);
                self.phase = Phase::Paced;
            }
            Phase::Paced => {}
        }
    }

    /// Takes note of an answer at `now` that refuses a request that left at `sent`. Returns the
    /// pause, in seconds.
    pub(super) fn refused(&mut self, sent: Instant, now: Instant, dice: &mut Dice) -> f64 {
        let (count, began) = match self.phase {
            // It left before the last refusal arrived, and shows nothing new.
            Phase::Outage { latest, .. } if sent < latest => return 0.0,
            Phase::Outage { count, began, .. } => ((count + 1.0).min(MOST_REFUSED), began),
            Phase::Start { .. } => (1.0, now),
            Phase::Paced => {
                self.upper = Some(self.curve.rate());
                (1.0, now)
            }
        };
        self.phase = Phase::Outage {
            count,
            began,
            latest: now,
        };
        let (first, longer) = match self.upper {
            Some(rate) => ((-rate).exp(), LONGER),
            None => (FIRST_PAUSE, LONGER_UNKNOWN),
        };
        let pause = (first * longer.powf(count - 1.0)).min(LONGEST_PAUSE.max(first));
        (pause * dice.between(SPREAD.0, SPREAD.1)).min(LONGEST)
    }

    /// Ends a cycle after an outage of this length, and plans the next curve. The rate does not
    /// fall below `least`, which is given if the outage may have another cause than the limit.
    fn end_cycle(
        &mut self,
        outage: f64,
        least: Option<f64>,
        now: Instant,
        states_wait: bool,
        is_alone: bool,
    ) {
        let begun = PassedCount {
            passed: 1.0,
            since: Some(now),
        };
        let lately = std::mem::replace(&mut self.lately, begun);
        let is_few = self.cycle.passed < ENOUGH;
        let stated_lower = self.lower.filter(|_| states_wait);
        // A short cycle is not measured. It goes on until enough requests have passed.
        match (stated_lower, self.upper) {
            (Some(lower), _) if is_few => {
                self.lower = Some(bounded(lower - STATED_STEP));
                return self.curve.lower_by(STATED_STEP);
            }
            (None, Some(upper)) if is_few => {
                let most = lately.rate(now) + FEW;
                let most = least.map_or(most, |least| most.max(least));
                if least.is_some() {
                    // The next cycle is measured without this outage.
                    self.lower = least;
                    self.cycle = begun;
                }
                let most = most.clamp(upper - LARGEST_STEP, upper - STEP);
                return self.curve.lower_to(most);
            }
            _ => {}
        }
        // Other clients may have met the limit at the same time, and their first rates together may not
        // exceed it. So the request that ends the first cycle does not count, and the first curve lies
        // at the measured rate.
        let is_first_part = !is_alone && self.lower.is_none();
        if is_first_part {
            self.cycle.passed = (self.cycle.passed - 1.0).max(1.0);
        }
        let measured = self.cycle.rate(now) + self.late.ln();
        let measured = match stated_lower {
            Some(lower) => measured.max(lower - STATED_DROP),
            None => least.map_or(measured, |least| measured.max(least)),
        };
        let measured = bounded(measured);
        // Before the first outage ends, no lower rate was measured.
        let moved = self
            .lower
            .filter(|_| lately.since.is_some())
            .map_or(f64::INFINITY, |lower| (measured - lower).abs());
        let most = if moved < SAME { SAME } else { LARGEST_GAP };
        let gap = match self.upper {
            Some(upper) => (upper - measured).clamp(0.0, most),
            None if is_first_part => 0.0,
            None => UNKNOWN_GAP,
        };
        self.calm = match gap.max(moved) <= FOUND && self.cycle.passed >= self.curve.reach() / 2.0 {
            true => (self.calm + 1.0).min(CALMEST),
            false => 0.0,
        };
        // Whether a rate is too high for a window shows only at the end of the window. So the rate
        // stays for as many requests as passed, if much of the cycle was an outage.
        let window = self.cycle.passed * (10.0 * outage / self.cycle.length(now)).min(1.0);
        let slower = self.calm.exp2() * if states_wait { STATED_REACH } else { 1.0 };
        self.curve = Curve::between(measured, gap, window, slower);
        self.lower = Some(measured);
        self.cycle = begun;
    }

    /// Makes each of the other `processes` a competitor for the rate that all had together.
    pub(super) fn divide(&mut self, processes: f64) {
        let part = processes.ln();
        self.curve.lower_by(part);
        self.lower = self.lower.map(|rate| rate - part);
        self.upper = self.upper.map(|rate| rate - part);
    }

    /// Writes or reads all of it.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        let (mut window, mut count, mut began, mut latest) = (None, None, None, None);
        match self.phase {
            Phase::Start { window: now } => window = Some(now),
            Phase::Outage {
                count: refused,
                began: first,
                latest: last,
            } => (count, began, latest) = (Some(refused), Some(first), Some(last)),
            Phase::Paced => {}
        }
        codec.optional_number(&mut window);
        codec.optional_number(&mut count);
        codec.near(&mut began, Duration::ZERO);
        codec.near(&mut latest, Duration::ZERO);
        self.phase = match (window, count.zip(began.zip(latest))) {
            (Some(window), _) => Phase::Start {
                window: window.max(FIRST_WINDOW),
            },
            (None, Some((count, (began, latest)))) => Phase::Outage {
                count: count.clamp(1.0, MOST_REFUSED),
                began,
                latest,
            },
            (None, None) => Phase::Paced,
        };
        self.curve.share(codec);
        codec.optional_number(&mut self.lower);
        codec.optional_number(&mut self.upper);
        for count in [&mut self.cycle, &mut self.lately] {
            codec.number(&mut count.passed);
            codec.near(&mut count.since, Duration::ZERO);
            count.passed = count.passed.max(0.0);
        }
        codec.number(&mut self.calm);
        codec.number(&mut self.late);
        self.lower = self.lower.map(bounded);
        self.upper = self.upper.map(bounded);
        self.calm = self.calm.clamp(0.0, CALMEST);
        self.late = self.late.clamp(1.0, UNPACED);
    }
}
