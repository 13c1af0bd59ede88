//! Additive increase, multiplicative decrease.

use std::time::Instant;

use super::{Dice, Pace, Pause, Reply, Traffic, seconds, span};

/// Additive increase, multiplicative decrease: a little faster all the time, half as fast after a refusal.
///
/// # How it works
///
/// Its state is a rate, in requests per second. There is none at first: nothing is held back before the first refusal.
/// That one sets the rate to half of what was sent per second up to it, at most [`START`](Self::START). Then:
///
/// - each answer that is no refusal: `rate += RISE x time since the last answer`, but for no more than one interval and
///   a minute, so that a rest earns nothing;
/// - a refusal of a request that left after the last cut: `rate /= 2`, and a pause of one to two intervals.
///
/// A request leaves one interval, `1 / rate`, after the one before.
///
/// # Constants
///
/// The rise of 0.05 requests per second each second takes ten clients from nothing to one request per second and client
/// in 20 s: slow enough that refusals stay at some per cent, quick enough to find capacity that came back. Halving is what
/// TCP does; less lets those who came first keep what they have.
///
/// # What it is bad at
///
/// It needs refusals to know where the limit is, 3 to 4 % of all requests with ten clients; and whom they hit is chance,
/// so shares are even only over hours. It does not read what is left. [`Fair`](super::Fair) needs neither.
#[derive(Clone, Debug, Default)]
pub struct Aimd {
    /// Requests per second.
    rate: Option<f64>,
    first_sent: Option<Instant>,
    sent: f64,
    last_answer: Option<Instant>,
    last_cut: Option<Instant>,
}

impl Aimd {
    /// The highest rate after the first refusal, in requests per second.
    pub const START: f64 = 10.0;
    /// By how much the rate rises each second, in requests per second.
    pub const RISE: f64 = 0.05;
    /// The lowest rate: a request in five minutes.
    pub const LOWEST: f64 = 1.0 / 300.0;

    /// Without a rate up to the first refusal.
    pub fn new() -> Self {
        Aimd::default()
    }
}

impl Pace for Aimd {
    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        Some(traffic.last_sent? + span(1.0 / self.rate?))
    }

    fn sent(&mut self, traffic: &Traffic) {
        self.first_sent.get_or_insert(traffic.now);
        self.sent += 1.0;
    }

    fn passed(&mut self, _: &mut Reply<'_>, traffic: &Traffic, _: &mut Dice) {
        let since = self.last_answer.replace(traffic.now).map_or(0.0, |last| seconds(last, traffic.now));
        if let Some(rate) = &mut self.rate {
            *rate += Aimd::RISE * since.min(1.0 / *rate).min(60.0);
        }
    }

    fn refused(&mut self, reply: &mut Reply<'_>, traffic: &Traffic, dice: &mut Dice) -> Pause {
        self.last_answer = Some(traffic.now);
        let is_new = self.last_cut.is_none_or(|cut| reply.sent > cut);
        let rate = match self.rate {
            Some(rate) if is_new => rate / 2.0,
            Some(rate) => rate,
            None => {
                let span = self.first_sent.map_or(0.0, |first| seconds(first, traffic.now)).max(0.1);
                (self.sent / span / 2.0).min(Aimd::START)
            }
        };
        let rate = rate.max(Aimd::LOWEST);
        if is_new {
            self.last_cut = Some(traffic.now);
        }
        self.rate = Some(rate);
        Pause::of_all(span(dice.between(1.0, 2.0) / rate))
    }
}
