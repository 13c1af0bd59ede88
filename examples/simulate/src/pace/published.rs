//! The four strategies of Richard Schneeman, "A Fast Car Needs Good Brakes" (2020), as they were
//! published.
//!
//! In all of them each request sleeps by itself. There is no queue and no probe, and the wait that
//! a refusal asks for is ignored. In the last three the requests of a key share one number: how
//! long to sleep before the first attempt. Each request writes it when it ends, and the last one
//! wins. A random tenth is added to each sleep, so that requests that were refused together do not
//! retry together.

use std::time::Duration;

use tollgate::__lab::{CallState, Dice, Pace, Pause, Reply, Traffic};
use tollgate::Signal;
use tollgate::signal::ObservedQuota;

use super::span;

/// The limit of the API for which the four were made: 4500 requests in an hour.
const LIMIT: f64 = 4500.0;
const WINDOW: f64 = 3600.0;
const JITTER: f64 = 0.1;
const MULTIPLIER: f64 = 1.2;

/// The longest sleep, in seconds: without a bound, a sleep that is multiplied for hours would
/// overflow.
const LONGEST_SLEEP: f64 = 1e6;

/// Returns a sleep of `seconds` and up to a tenth more.
fn asleep(seconds: f64, dice: &mut Dice) -> Duration {
    Duration::try_from_secs_f64(seconds * dice.between(1.0, 1.0 + JITTER)).unwrap_or_default()
}

/// Notes the next sleep in the request.
fn note(call: &mut CallState, seconds: f64) {
    call.note = Duration::try_from_secs_f64(seconds.clamp(0.0, LONGEST_SLEEP)).unwrap_or_default();
}

/// Exponential backoff: a refused request sleeps, longer each time.
///
/// The first sleep is one token time, window / limit. Each further sleep is `multiplier` times as
/// long. Requests do not learn from each other.
///
/// What it is bad at: each request begins by running into the limit, so 60 to 80 % of all requests
/// are refused. A request that was refused often sleeps longest, up to a quarter of an hour, while
/// others take all tokens.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: f64,
    multiplier: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff {
            first: WINDOW / LIMIT,
            multiplier: MULTIPLIER,
        }
    }
}

impl Backoff {
    /// Creates a pace for 4500 requests in an hour: the first sleep lasts 0.8 s, each further one
    /// 1.2 times as long.
    pub fn new() -> Self {
        Backoff::default()
    }

    /// Sets another limit: the first sleep lasts window / limit.
    pub fn limit(self, limit: u32, window: Duration) -> Self {
        Backoff {
            first: token_time(limit, window),
            ..self
        }
    }

    /// Sets how many times as long as the one before each sleep is. Default: 1.2. The article also
    /// has 2.
    pub fn multiplier(self, multiplier: f64) -> Self {
        Backoff {
            multiplier: if multiplier.is_finite() {
                multiplier.max(1.0)
            } else {
                MULTIPLIER
            },
            ..self
        }
    }
}

impl Pace for Backoff {
    fn arrived(&mut self, call: &mut CallState, _: &Traffic, _: &mut Dice) -> Duration {
        note(call, self.first);
        Duration::ZERO
    }

    fn refused(&mut self, reply: &mut Reply<'_>, _: &Traffic, dice: &mut Dice) -> Pause {
        let sleep = reply.call.note.as_secs_f64();
        note(reply.call, sleep * self.multiplier);
        Pause::of_call(asleep(sleep, dice))
    }

    fn is_careful(&self) -> bool {
        false
    }
}

/// The common part of the last three: everything but how a success shortens the sleep.
#[derive(Clone, Debug)]
struct Shared {
    limit: f64,
    /// One token time, which each refusal adds to the sleep, in seconds.
    least: f64,
    /// How long a request sleeps before its first attempt, in seconds.
    sleep: f64,
}

impl Default for Shared {
    fn default() -> Self {
        Shared {
            limit: LIMIT,
            least: WINDOW / LIMIT,
            sleep: 0.0,
        }
    }
}

impl Shared {
    fn limited(self, limit: u32, window: Duration) -> Self {
        Shared {
            limit: f64::from(limit.max(1)),
            least: token_time(limit, window),
            ..self
        }
    }

    fn starting(self, sleep: Duration) -> Self {
        Shared {
            sleep: sleep.as_secs_f64(),
            ..self
        }
    }

    fn arrived(&self, call: &mut CallState, dice: &mut Dice) -> Duration {
        note(call, self.sleep);
        asleep(self.sleep, dice)
    }

    fn refused(&mut self, reply: &mut Reply<'_>, dice: &mut Dice) -> Pause {
        let sleep = reply.call.note.as_secs_f64() + self.least;
        note(reply.call, sleep * MULTIPLIER);
        Pause::of_call(asleep(sleep, dice))
    }

    fn passed(&mut self, reply: &Reply<'_>, less: impl FnOnce(&Shared, f64) -> f64) {
        let sleep = reply.call.note.as_secs_f64();
        self.sleep = (sleep - less(self, sleep)).max(0.0);
    }
}

/// Returns how many requests are left of the stated quota of which the smallest share is left.
fn least_remaining(signal: &Signal) -> Option<f64> {
    let share = |quota: &&ObservedQuota| match (quota.remaining(), quota.limit()) {
        (Some(remaining), Some(limit)) => remaining as f64 / limit.max(1) as f64,
        (Some(_), None) => 1.0,
        (None, _) => f64::INFINITY,
    };
    let quotas = signal.quotas().iter();
    quotas
        .filter(|quota| quota.unit() == "requests")
        .min_by(|one, other| share(one).total_cmp(&share(other)))
        .and_then(|quota| quota.remaining())
        .map(|count| count as f64)
}

fn token_time(limit: u32, window: Duration) -> f64 {
    span(window.as_secs_f64() / f64::from(limit.max(1))).as_secs_f64()
}

/// Defines one of the last three. `$less` returns what a success takes off the sleep.
macro_rules! published {
    ($(#[$doc:meta])* $name:ident, $less:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $name(Shared);

        impl $name {
            /// Creates a pace for 4500 requests in an hour.
            pub fn new() -> Self {
                $name::default()
            }

            /// Sets another limit.
            pub fn limit(self, limit: u32, window: Duration) -> Self {
                $name(self.0.limited(limit, window))
            }

            /// Sets how long the first requests sleep. Default: not at all.
            pub fn start_with(self, sleep: Duration) -> Self {
                $name(self.0.starting(sleep))
            }
        }

        impl Pace for $name {
            fn arrived(&mut self, call: &mut CallState, _: &Traffic, dice: &mut Dice) -> Duration {
                self.0.arrived(call, dice)
            }

            fn passed(&mut self, reply: &mut Reply<'_>, _: &Traffic, _: &mut Dice) {
                let less: fn(&Shared, f64, &Reply<'_>) -> f64 = $less;
                self.0.passed(reply, |shared, sleep| less(shared, sleep, reply));
            }

            fn refused(&mut self, reply: &mut Reply<'_>, _: &Traffic, dice: &mut Dice) -> Pause {
                self.0.refused(reply, dice)
            }

            fn is_careful(&self) -> bool {
                false
            }
        }
    };
}

published! {
    /// A sleep that shrinks by a constant: a success takes one token time off it.
    ///
    /// The token time is t0 = window / limit. Before its first attempt a request sleeps for
    /// `shared`. A refusal adds t0 to the sleep, and the sleep after it is 1.2 times as long. A
    /// success takes t0 off the sleep and writes it to `shared`.
    ///
    /// What it is bad at: it shortens the sleep so fast that nearly half of all requests are
    /// refused.
    Gradual, |shared, _, _| shared.least
}

published! {
    /// A sleep that shrinks in proportion: a success takes 1 / limit of it off.
    ///
    /// As [`Gradual`], but what a success takes off a sleep of `s` is `s / limit`.
    ///
    /// What it is bad at: it shortens the sleep so slowly that a full bucket of 4500 takes 500 s to
    /// empty instead of 75 s. Chance decides which requests sleep long.
    Proportional, |shared, sleep, _| sleep / shared.limit
}

published! {
    /// A sleep that shrinks faster the more is left: the best of the published four.
    ///
    /// As [`Gradual`], but what a success takes off a sleep of `s` is `s x remaining / limit`. If
    /// the answer does not state what is left, a success takes nothing off.
    ///
    /// What it is bad at: only refusals slow it down, so 3 to 4 % of all requests are refused.
    /// Chance decides which requests sleep long. Without the header it only becomes slower.
    Remaining, |shared, sleep, reply| {
        let remaining = least_remaining(reply.signal).unwrap_or(0.0);
        sleep * remaining / shared.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate::signal::{ObservedQuota, Signal};

    /// Checks the sleeps of a request without their jitter: the first, one after each refusal, and
    /// the first sleep of the next request after a success with `left` left.
    fn check(mut pace: impl Pace, left: u64, expected: &[f64]) {
        let now = std::time::Instant::now();
        let (traffic, mut dice, mut call) =
            (Traffic::at(now), Dice::seeded(1), CallState::default());
        let mut sleeps = vec![pace.arrived(&mut call, &traffic, &mut dice)];
        let signal = Signal::default().with_quota(ObservedQuota::new().with_remaining(left));
        for _ in 2..expected.len() {
            let pause = pace.refused(
                &mut Reply::new(&signal, now, &mut call),
                &traffic,
                &mut dice,
            );
            sleeps.push(pause.call);
        }
        pace.passed(
            &mut Reply::new(&signal, now, &mut call),
            &traffic,
            &mut dice,
        );
        sleeps.push(pace.arrived(&mut CallState::default(), &traffic, &mut dice));
        let fits = |(sleep, expected): (&Duration, &f64)| {
            (expected - 1e-6..=expected * 1.1 + 1e-6).contains(&sleep.as_secs_f64())
        };
        assert!(
            sleeps.iter().zip(expected).all(fits),
            "{pace:?}: {sleeps:?}, not {expected:?}"
        );
    }

    #[test]
    fn each_sleeps_as_it_was_published() {
        check(Backoff::new(), 0, &[0.0, 0.8, 0.96, 1.152, 0.0]);
        check(
            Backoff::new().multiplier(2.0),
            0,
            &[0.0, 0.8, 1.6, 3.2, 0.0],
        );
        // A refusal adds 0.8, and the sleep after it is 1.2 times as long.
        check(Gradual::new(), 0, &[0.0, 0.8, 1.76, 2.912, 2.6944]);
        check(Proportional::new(), 0, &[0.0, 0.8, 1.76, 2.912, 3.4936]);
        check(Remaining::new(), 2250, &[0.0, 0.8, 1.76, 2.912, 1.7472]);
        check(
            Remaining::new().start_with(Duration::from_secs(5)),
            450,
            &[5.0, 4.5],
        );
    }
}
