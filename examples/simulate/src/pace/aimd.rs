//! Additive increase, multiplicative decrease.

use std::time::{Duration, Instant};

use tollgate::__lab::{Dice, Pace, Pause, Reply, StateCodec, Traffic};

use super::{seconds, span};

/// Additive increase, multiplicative decrease: speeds up slowly, and halves the speed after a
/// refusal.
///
/// # How it works
///
/// Its state is a rate in requests per second. Before the first refusal there is no rate, and
/// requests leave at once. The first refusal sets the rate to half of the requests sent per second
/// until then, at most 10. Then:
///
/// - An answer that is not a refusal: `rate += rise x time since the last answer`. The time counts
///   up to one interval and up to one minute, so that an idle time does not raise the rate.
/// - A refusal of a request that left after the last cut: `rate /= 2`, and a pause of one to two
///   intervals.
///
/// A request leaves one interval, `1 / rate`, after the one before.
///
/// # Constants
///
/// With the default rise, one client alone takes one hour from nothing to the whole limit. With six
/// times the rise, more than twice as many requests are refused. If the limit is unknown, the rise
/// is 0.0003 requests per second each second. TCP halves, too; a smaller cut lets early clients
/// keep their speed.
///
/// # What it is bad at
///
/// It needs refusals to find the limit: 6 % of all requests with ten clients, a third with fifty.
/// It takes an hour to find capacity that came back, and it does not read what is left. Its shares
/// are even, because a faster client is refused more often. [`Fair`](tollgate::pace::Fair) needs next to no
/// refusals.
#[derive(Clone, Debug)]
pub struct Aimd {
    /// By how much the rate rises, in requests per second each second.
    rise: f64,
    /// The rate in requests per second, after the first refusal.
    rate: Option<f64>,
    first_sent: Option<Instant>,
    sent: f64,
    last_answer: Option<Instant>,
    last_cut: Option<Instant>,
}

impl Default for Aimd {
    fn default() -> Self {
        Aimd {
            rise: RISE,
            rate: None,
            first_sent: None,
            sent: 0.0,
            last_answer: None,
            last_cut: None,
        }
    }
}

impl Aimd {
    /// Creates a pace without a rate.
    pub fn new() -> Self {
        Aimd::default()
    }

    /// Sets the limit, in requests per window. Default: unknown.
    pub fn limit(self, limit: u32, window: Duration) -> Self {
        let rate = f64::from(limit.max(1)) / window.as_secs_f64().max(1e-3);
        Aimd {
            rise: rate / RISES_IN,
            ..self
        }
    }
}

/// The highest rate after the first refusal, in requests per second.
const START: f64 = 10.0;
/// The lowest rate: one request in five minutes.
const LOWEST: f64 = 1.0 / 300.0;
/// The time in which one client alone rises from nothing to the whole limit, in seconds.
const RISES_IN: f64 = 3600.0;
/// By how much the rate rises each second if the limit is unknown.
const RISE: f64 = 0.0003;

impl Pace for Aimd {
    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        Some(traffic.last_sent? + span(1.0 / self.rate?))
    }

    fn sent(&mut self, traffic: &Traffic) {
        self.first_sent.get_or_insert(traffic.now);
        self.sent += 1.0;
    }

    fn passed(&mut self, _: &mut Reply<'_>, traffic: &Traffic, _: &mut Dice) {
        let since = self
            .last_answer
            .replace(traffic.now)
            .map_or(0.0, |last| seconds(last, traffic.now));
        if let Some(rate) = &mut self.rate {
            *rate += self.rise * since.min(1.0 / *rate).min(60.0);
        }
    }

    fn refused(&mut self, reply: &mut Reply<'_>, traffic: &Traffic, dice: &mut Dice) -> Pause {
        self.last_answer = Some(traffic.now);
        let is_new = self.last_cut.is_none_or(|cut| reply.sent > cut);
        let rate = match self.rate {
            Some(rate) if is_new => rate / 2.0,
            Some(rate) => rate,
            None => {
                let span = self
                    .first_sent
                    .map_or(0.0, |first| seconds(first, traffic.now))
                    .max(0.1);
                (self.sent / span / 2.0).min(START)
            }
        };
        let rate = rate.max(LOWEST);
        if is_new {
            self.last_cut = Some(traffic.now);
        }
        self.rate = Some(rate);
        Pause::of_all(span(dice.between(1.0, 2.0) / rate))
    }

    fn share(&mut self, codec: &mut StateCodec<'_>) -> bool {
        codec.optional_number(&mut self.rate);
        codec.moment(&mut self.first_sent);
        codec.number(&mut self.sent);
        codec.moment(&mut self.last_answer);
        codec.moment(&mut self.last_cut);
        self.rate = self.rate.map(|rate| rate.max(LOWEST));
        true
    }

    fn divide(&mut self, processes: u32) {
        self.rate = self
            .rate
            .map(|rate| (rate / f64::from(processes)).max(LOWEST));
    }
}
