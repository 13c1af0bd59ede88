//! Recovery: a server refuses some requests in a row, and is healthy again.

use std::time::{Duration, Instant};

use http::StatusCode;

use super::super::{Dice, Pace, seconds, span};
use super::Fair;
use crate::clock;
use crate::signal::{ObservedQuota, Signal};
use crate::throttle::{Flight, PacedQueue};

/// Requests per second of the server.
const RATE: f64 = 10.0;
const CALLERS: usize = 5;
const TRIP: Duration = Duration::from_millis(50);

/// A bucket of one second. From `begins` on it refuses the next `refusals` requests.
struct Server {
    tokens: f64,
    at: Instant,
    begins: Instant,
    refusals: u32,
    quota: Option<ObservedQuota>,
}

impl Server {
    fn judge(&mut self, now: Instant) -> Signal {
        self.tokens = (self.tokens + RATE * seconds(self.at, now)).min(RATE);
        self.at = now;
        let is_out = now >= self.begins && self.refusals > 0;
        self.refusals -= u32::from(is_out);
        let is_refused = is_out || self.tokens < 1.0;
        self.tokens -= f64::from(u8::from(!is_refused));
        let refusal = is_refused.then_some(StatusCode::TOO_MANY_REQUESTS);
        let signal = Signal::default().with_refusal(refusal);
        match &self.quota {
            Some(quota) => signal.with_quota(quota.clone()),
            None => signal,
        }
    }
}

/// Returns the share of the limit that callers use from 30 to 60 seconds after the last of
/// `refusals` refusals in a row, which begin after `calm` seconds.
fn used_after(refusals: u32, calm: f64, pace: Fair, quota: Option<ObservedQuota>) -> f64 {
    let start = clock::now();
    let mut server = Server {
        tokens: RATE,
        at: start,
        begins: start + span(calm),
        refusals,
        quota,
    };
    let pace: Box<dyn Pace> = Box::new(pace);
    let mut queue = PacedQueue::new(pace, Dice::seeded(1), Duration::from_secs(60), start);
    (0..CALLERS).for_each(|_| _ = queue.arrived(start));
    let mut in_flight: Vec<(Instant, Flight)> = Vec::new();
    let (mut now, mut healthy, mut passed) = (start, None::<Instant>, 0);
    loop {
        while let Some(flight) = queue.depart(now) {
            in_flight.push((now + TRIP, flight));
        }
        let answer = in_flight.first().map(|(at, _)| *at);
        now = answer
            .into_iter()
            .chain(queue.look_at())
            .min()
            .expect("callers never stop");
        if answer != Some(now) {
            continue;
        }
        let signal = server.judge(now);
        let (_, flight) = in_flight.remove(0);
        match queue.answered(flight, &signal, now) {
            Some(refused) => queue.back(refused, now),
            None => _ = queue.arrived(now),
        }
        if server.refusals == 0 && healthy.is_none() {
            healthy = Some(now);
        }
        let since = healthy.map_or(0.0, |healthy| seconds(healthy, now));
        if since > 60.0 {
            return f64::from(passed) / (30.0 * RATE);
        }
        passed += u32::from(since > 30.0 && signal.refusal().is_none());
    }
}

#[test]
fn half_of_the_rate_is_back_within_a_minute() {
    let tokens = ObservedQuota::new()
        .with_unit("tokens")
        .with_limit(1_000_000)
        .with_remaining(900_000);
    let mut bad = Vec::new();
    for refusals in [1, 2, 3, 4, 6, 8, 11, 14, 17, 20] {
        for calm in [0.0, 20.0, 60.0] {
            // Fewer refusals of the very first requests may be due to the limit.
            if calm == 0.0 && refusals < 4 {
                continue;
            }
            for (name, pace, quota) in [
                ("nothing", Fair::new(), None),
                ("tokens", Fair::new(), Some(tokens.clone())),
                ("sole", Fair::new().sole_client(), None),
            ] {
                let used = used_after(refusals, calm, pace, quota);
                if used < 0.5 {
                    bad.push(format!("{name} {refusals} after {calm} s: {used:.2}"));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
