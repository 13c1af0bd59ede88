//! A custom strategy: one trait impl, and a name for it.

use std::time::{Duration, Instant};

use tollgate::__lab::{Dice, Pace, Pause, Reply, Traffic};
use tollgate_simulate::Strategy;

/// One interval for all requests: half as long again after a refusal, one hundredth shorter after
/// each success.
#[derive(Debug)]
struct Mine {
    interval: Duration,
}

impl Pace for Mine {
    fn slot(&self, traffic: &Traffic) -> Option<Instant> {
        Some(traffic.last_sent? + self.interval)
    }

    fn passed(&mut self, _: &mut Reply<'_>, _: &Traffic, _: &mut Dice) {
        self.interval = self.interval.mul_f64(0.99);
    }

    fn refused(&mut self, _: &mut Reply<'_>, _: &Traffic, dice: &mut Dice) -> Pause {
        self.interval = self
            .interval
            .mul_f64(1.5)
            .clamp(Duration::from_millis(10), Duration::from_secs(300));
        Pause::of_all(self.interval.mul_f64(dice.between(0.5, 1.0)))
    }
}

pub(crate) fn strategy() -> Strategy {
    Strategy::new("mine", |brief| Mine {
        interval: brief.start_interval,
    })
}
