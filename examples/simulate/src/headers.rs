//! The headers of a server's responses, true or not. Gates read them as they read any headers.

use std::collections::VecDeque;

use http::HeaderValue;

use super::scenario::{Headers, Lie};
use super::server::Verdict;
use tollgate::__lab::Dice;

/// Writes the headers that a scenario describes.
#[derive(Debug)]
pub(super) struct HeaderModel {
    headers: Headers,
    /// What was left at which time. `stale` needs the last value, `delayed` all that it may still
    /// show.
    seen: VecDeque<(f64, f64)>,
}

/// A response, and what its headers say is left.
#[derive(Debug)]
pub(super) struct ServerResponse {
    pub(super) response: http::Response<()>,
    pub(super) remaining: Option<f64>,
}

impl HeaderModel {
    pub(super) fn new(headers: &Headers) -> Self {
        HeaderModel {
            headers: headers.clone(),
            seen: VecDeque::new(),
        }
    }

    /// Returns the response to a request with this verdict.
    pub(super) fn respond(
        &mut self,
        verdict: &Verdict,
        now: f64,
        dice: &mut Dice,
    ) -> ServerResponse {
        let mut response = http::Response::new(());
        if !verdict.ok {
            *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
        }
        if self.headers.only_refusals && verdict.ok {
            let remaining = None;
            return ServerResponse {
                response,
                remaining,
            };
        }
        let shown = if self.headers.remaining {
            self.shown(verdict, now, dice)
        } else {
            Shown::Nothing
        };
        let headers = response.headers_mut();
        let mut number = |name: &'static str, value: f64| {
            headers.insert(name, HeaderValue::from(value.max(0.0) as u64));
        };
        let remaining = match shown {
            Shown::Number(value) => {
                number("ratelimit-remaining", value);
                Some(value)
            }
            _ => None,
        };
        if self.headers.limit {
            number("ratelimit-limit", verdict.limit);
        }
        if self.headers.reset {
            number("ratelimit-reset", verdict.reset.ceil());
        }
        if self.headers.retry_after && !verdict.ok {
            let seconds = match self.headers.retry_after_lie {
                Some(lie) => lie as f64,
                None if self.headers.rounds_down => verdict.wait.floor(),
                None => verdict.wait.ceil().max(1.0),
            };
            number("retry-after", seconds);
        }
        if self.headers.window {
            let policy = format!(
                "{};w={}",
                verdict.limit as u64,
                verdict.window.round() as u64
            );
            headers.insert(
                "ratelimit-policy",
                HeaderValue::try_from(policy).expect("digits are a valid header value"),
            );
        }
        if let Shown::Garbage(text) = shown {
            headers.insert("ratelimit-remaining", HeaderValue::from_static(text));
        }
        ServerResponse {
            response,
            remaining,
        }
    }

    /// Returns what the header says is left.
    fn shown(&mut self, verdict: &Verdict, now: f64, dice: &mut Dice) -> Shown {
        let Headers {
            lie,
            stale_s,
            sigma,
            value,
            p,
            ..
        } = self.headers;
        let left = verdict.remaining;
        Shown::Number(match lie {
            None => left,
            Some(Lie::StuckHigh) => value,
            Some(Lie::StuckZero) => 0.0,
            Some(Lie::Stale) => match self.seen.back() {
                Some((at, seen)) if now - at < stale_s => *seen,
                _ => {
                    self.seen = VecDeque::from([(now, left)]);
                    left
                }
            },
            Some(Lie::Delayed) => {
                self.seen.push_back((now, left));
                while self.seen.get(1).is_some_and(|(at, _)| *at <= now - stale_s) {
                    self.seen.pop_front();
                }
                self.seen.front().map_or(left, |(_, seen)| *seen)
            }
            Some(Lie::Noisy) => (left + sigma * normal(dice)).round().max(0.0),
            Some(Lie::MissingSometimes) if dice.roll() < p => return Shown::Nothing,
            Some(Lie::OnlyOn200) if !verdict.ok => return Shown::Nothing,
            Some(Lie::Garbage) if dice.roll() < p => {
                let garbage = ["-1", "-4000", "999999999", "NaN", "", "many"];
                let index = (dice.roll() * garbage.len() as f64) as usize;
                return Shown::Garbage(garbage[index]);
            }
            Some(_) => left,
        })
    }
}

/// The content of the header that says what is left.
enum Shown {
    Nothing,
    Number(f64),
    Garbage(&'static str),
}

/// Returns a normally distributed number with mean 0 and deviation 1 (Box-Muller).
fn normal(dice: &mut Dice) -> f64 {
    let radius = (-2.0 * (1.0 - dice.roll()).ln()).sqrt();
    radius * (std::f64::consts::TAU * dice.roll()).cos()
}
