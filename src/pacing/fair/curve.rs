//! The rate of a search as a function of the requests that left.

use super::super::StateCodec;

/// `middle + width x (sent / reach - 1)^3`, the natural logarithm of requests per second.
///
/// The curve is steep at first, flat near its middle, and steep again. It counts requests instead of
/// seconds, so it fits slow and fast servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Curve {
    middle: f64,
    width: f64,
    reach: f64,
    sent: f64,
}

/// The width of the narrowest and of the widest curve.
const NARROWEST: f64 = 0.03;
const WIDEST: f64 = 0.35;
/// The requests in which a curve of width 1 rises from its start to its middle.
const REACH: f64 = 8.0;
/// A distance up to which a curve is centred near the measured rate.
const NEAR: f64 = 0.1;
/// Where in the distance the middle is, if the distance is short, and if it is not.
const MIDDLE_NEAR: f64 = 0.1;
const MIDDLE_FAR: f64 = 0.5;
/// The lowest and the highest rate: one request in 900 s, and a million in a second.
const SLOWEST: f64 = -6.8;
const FASTEST: f64 = 13.8;

impl Default for Curve {
    fn default() -> Self {
        Curve {
            middle: 0.0,
            width: WIDEST,
            reach: REACH / WIDEST,
            sent: 0.0,
        }
    }
}

impl Curve {
    /// Creates a curve between the rate `measured` and a rate that is `gap` higher. It reaches its
    /// middle after at least `window` requests, times `slower`.
    pub(super) fn between(measured: f64, gap: f64, window: f64, slower: f64) -> Self {
        let width = (gap / 2.0).clamp(NARROWEST, WIDEST);
        let reach = (REACH / width).max(window) * slower;
        let part = if gap > NEAR { MIDDLE_FAR } else { MIDDLE_NEAR };
        Curve {
            middle: measured + part * gap,
            width,
            reach,
            sent: reach / 2.0,
        }
    }

    /// Returns the rate.
    pub(super) fn rate(&self) -> f64 {
        bounded(self.middle + self.width * (self.sent / self.reach - 1.0).powi(3))
    }

    /// Returns after how many requests the curve is at its middle.
    pub(super) fn reach(&self) -> f64 {
        self.reach
    }

    /// Counts a request that left. Above its end the curve goes on as a wider one.
    pub(super) fn advance(&mut self) {
        self.sent += 1.0;
        if self.sent >= 2.0 * self.reach {
            self.middle = bounded(self.middle + self.width);
            self.width = (2.0 * self.width).min(WIDEST);
            self.sent = self.reach;
        }
    }

    /// Goes on as the narrowest curve if the rate is above `rate`. A steep curve would leave it far
    /// behind before the answers show that it was the limit.
    pub(super) fn slow_down_above(&mut self, rate: f64) {
        let is_steep = self.reach < REACH / NARROWEST || self.width > 2.0 * NARROWEST;
        if is_steep && self.rate() > rate {
            *self = Curve::between(self.rate(), 0.0, 0.0, 1.0);
        }
    }

    /// Restarts as a wider curve whose rate is at most `most`, and lower than now.
    pub(super) fn lower_to(&mut self, most: f64) {
        let drop = self.rate() - most;
        self.width = (1.5 * self.width).max(drop).min(WIDEST);
        self.middle = self.middle.min(most - self.width / 2.0);
        self.reach = REACH / self.width;
        self.sent = self.reach / 2.0;
    }

    /// Lowers the rate by `part`.
    pub(super) fn lower_by(&mut self, part: f64) {
        self.middle = bounded(self.middle - part);
    }

    /// Writes or reads all of it.
    pub(super) fn share(&mut self, codec: &mut StateCodec<'_>) {
        codec.number(&mut self.middle);
        codec.number(&mut self.width);
        codec.number(&mut self.reach);
        codec.number(&mut self.sent);
        self.middle = bounded(self.middle);
        self.width = self.width.clamp(NARROWEST, WIDEST);
        self.reach = self.reach.max(1.0);
        self.sent = self.sent.clamp(0.0, 2.0 * self.reach);
    }
}

/// Returns the rate within its bounds. A rate that is not a number becomes the lowest.
pub(super) fn bounded(rate: f64) -> f64 {
    if rate.is_nan() {
        return SLOWEST;
    }
    rate.clamp(SLOWEST, FASTEST)
}
