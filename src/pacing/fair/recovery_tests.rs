//! Recovery: a server refuses some requests in a row, and is healthy again.

use std::time::{Duration, Instant};

use http::StatusCode;

use super::super::{Dice, Pace, seconds, span};
use super::Fair;
use crate::clock;
use crate::signal::{ObservedQuota, Signal};
use crate::throttle::paced_queue::{Flight, PacedQueue};

const TRIP: Duration = Duration::from_millis(50);

/// A bucket of one second. From `begins` on it refuses the next `refusals` requests.
struct Server {
    rate: f64,
    tokens: f64,
    at: Instant,
    begins: Instant,
    refusals: u32,
    quota: Option<ObservedQuota>,
}

impl Server {
    fn judge(&mut self, now: Instant) -> Signal {
        self.tokens = (self.tokens + self.rate * seconds(self.at, now)).min(self.rate);
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

/// What the processes have to send.
#[derive(Clone, Copy, Debug)]
enum Demand {
    /// Each process has this many callers, who send a request when the one before has passed. The server
    /// allows 10 requests per second.
    Callers(usize),
    /// 25 requests per second arrive, in turn at each process. The server allows twice as much.
    Arrivals,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    demand: Demand,
    processes: usize,
    /// How long the server is healthy at first, in seconds.
    calm: f64,
    /// How many requests it refuses then.
    refusals: u32,
}

const ARRIVE: f64 = 25.0;

/// Returns the share of what can pass that passes from 30 to 60 seconds after the last refusal.
fn used_after(case: Case, pace: &Fair, quota: Option<ObservedQuota>) -> f64 {
    let Case {
        demand,
        processes,
        calm,
        refusals,
    } = case;
    let start = clock::now();
    let (rate, wanted) = match demand {
        Demand::Callers(_) => (10.0, 10.0),
        Demand::Arrivals => (2.0 * ARRIVE, ARRIVE),
    };
    let mut server = Server {
        rate,
        tokens: rate,
        at: start,
        begins: start + span(calm),
        refusals,
        quota,
    };
    let queue = |number: usize| {
        let pace: Box<dyn Pace> = Box::new(pace.clone());
        let dice = Dice::seeded(1 + number as u64);
        PacedQueue::new(pace, dice, Duration::from_secs(60), start)
    };
    let mut queues: Vec<_> = (0..processes).map(queue).collect();
    if let Demand::Callers(callers) = demand {
        for queue in &mut queues {
            (0..callers).for_each(|_| _ = queue.arrived(start));
        }
    }
    let mut in_flight: Vec<(Instant, usize, Flight)> = Vec::new();
    let (mut now, mut healthy, mut passed, mut arrived) = (start, None::<Instant>, 0, 0_u32);
    loop {
        for (number, queue) in queues.iter_mut().enumerate() {
            while let Some(flight) = queue.depart(now) {
                in_flight.push((now + TRIP, number, flight));
            }
        }
        let answer = in_flight.first().map(|(at, ..)| *at);
        let arrival = match demand {
            Demand::Callers(_) => None,
            Demand::Arrivals => Some(start + span(f64::from(arrived) / ARRIVE)),
        };
        let looks = queues.iter().filter_map(PacedQueue::look_at);
        now = looks
            .chain(answer)
            .chain(arrival)
            .min()
            .expect("callers never stop");
        if arrival == Some(now) {
            _ = queues[arrived as usize % processes].arrived(now);
            arrived += 1;
            continue;
        }
        if answer != Some(now) {
            continue;
        }
        let signal = server.judge(now);
        let (_, number, flight) = in_flight.remove(0);
        let queue = &mut queues[number];
        match (queue.answered(flight, &signal, now), demand) {
            (Some(refused), _) => queue.back(refused, now),
            (None, Demand::Callers(_)) => _ = queue.arrived(now),
            (None, Demand::Arrivals) => {}
        }
        if server.refusals == 0 && healthy.is_none() {
            healthy = Some(now);
        }
        let since = healthy.map_or(0.0, |healthy| seconds(healthy, now));
        if since > 60.0 {
            return f64::from(passed) / (30.0 * wanted);
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
    let demands = [
        (Demand::Callers(5), 1),
        (Demand::Arrivals, 1),
        (Demand::Arrivals, 5),
        (Demand::Arrivals, 20),
    ];
    for (demand, processes) in demands {
        for refusals in [1, 2, 3, 4, 6, 8, 11, 14, 17, 20] {
            for calm in [0.0, 20.0, 60.0] {
                let case = Case {
                    demand,
                    processes,
                    calm,
                    refusals,
                };
                for (name, pace, quota) in [
                    ("nothing", Fair::new(), None),
                    ("tokens", Fair::new(), Some(tokens.clone())),
                    ("sole", Fair::new().sole_client(), None),
                ] {
                    // An outage of just over a minute could be the end of a window, which a search waits for.
                    let is_like_window = (name, processes, refusals) == ("sole", 1, 17);
                    if is_like_window {
                        continue;
                    }
                    let used = used_after(case, &pace, quota);
                    if used < 0.5 {
                        bad.push(format!("{name}, {case:?}: {used:.2}"));
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
