//! The four strategies of Richard Schneeman, "A Fast Car Needs Good Brakes" (2020), as they were published.
//!
//! In all of them each call sleeps by itself: there is no line, no probe, and what a refusal says of waiting is not
//! read. In the last three the calls of a key share one number, how long to sleep before the first attempt; whoever
//! ends a call writes it, and the last one wins. Each sleep is up to a tenth longer than it should be, by chance, so that
//! those who were refused together do not come back together.

use std::time::Duration;

use super::reading::Told;
use super::{Call, Dice, Pace, Pause, Reply, Traffic, span};

/// What is published of the limit: 4500 requests in an hour, that of the API for which the four were made.
const LIMIT: f64 = 4500.0;
const WINDOW: f64 = 3600.0;
const JITTER: f64 = 0.1;
const MULTIPLIER: f64 = 1.2;

/// Sleeping longer is of no use to anyone, in seconds: a sleep that is multiplied for hours would leave all bounds.
const LONGEST_SLEEP: f64 = 1e6;

/// A sleep of so many seconds, and a bit.
fn asleep(seconds: f64, dice: &mut Dice) -> Duration {
    Duration::try_from_secs_f64(seconds * dice.between(1.0, 1.0 + JITTER)).unwrap_or_default()
}

/// What is noted in a call.
fn note(call: &mut Call, seconds: f64) {
    call.note = Duration::try_from_secs_f64(seconds.clamp(0.0, LONGEST_SLEEP)).unwrap_or_default();
}

/// Exponential backoff: a refused call sleeps, and longer each time.
///
/// The first sleep is one token time, window / limit, the next each `multiplier` times as long. No call learns from
/// another.
///
/// What it is bad at: everything. Each call begins by running into the limit, so 60 to 80 % of all requests are
/// refused; and who was refused often sleeps longest, up to a quarter of an hour, while others hog the bucket.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: f64,
    multiplier: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { first: WINDOW / LIMIT, multiplier: MULTIPLIER }
    }
}

impl Backoff {
    /// For an API of 4500 requests in an hour: the first sleep lasts 0.8 s, the next each 1.2 times as long.
    pub fn new() -> Self {
        Backoff::default()
    }

    /// For another limit: the first sleep lasts window / limit.
    pub fn limit(self, limit: u32, window: Duration) -> Self {
        Backoff { first: token_time(limit, window), ..self }
    }

    /// By how much each sleep is longer than the one before. Default: 1.2. Published as well: 2.
    pub fn multiplier(self, multiplier: f64) -> Self {
        Backoff { multiplier: if multiplier.is_finite() { multiplier.max(1.0) } else { MULTIPLIER }, ..self }
    }
}

impl Pace for Backoff {
    fn arrived(&mut self, call: &mut Call, _: &Traffic, _: &mut Dice) -> Duration {
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

/// What the last three have in common: all but how fast they let go.
#[derive(Clone, Debug)]
struct Shared {
    limit: f64,
    /// One token time: by so much a sleep grows at least.
    least: f64,
    /// How long a call sleeps before its first attempt, in seconds.
    sleep: f64,
}

impl Default for Shared {
    fn default() -> Self {
        Shared { limit: LIMIT, least: WINDOW / LIMIT, sleep: 0.0 }
    }
}

impl Shared {
    fn limited(self, limit: u32, window: Duration) -> Self {
        Shared { limit: f64::from(limit.max(1)), least: token_time(limit, window), ..self }
    }

    fn starting(self, sleep: Duration) -> Self {
        Shared { sleep: sleep.as_secs_f64(), ..self }
    }

    fn arrived(&self, call: &mut Call, dice: &mut Dice) -> Duration {
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

fn token_time(limit: u32, window: Duration) -> f64 {
    span(window.as_secs_f64() / f64::from(limit.max(1))).as_secs_f64()
}

/// One of the last three: `$less` of the shared state, the sleep and the answer is what a success takes off the sleep.
macro_rules! published {
    ($(#[$doc:meta])* $name:ident, $less:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default)]
        pub struct $name(Shared);

        impl $name {
            /// For an API of 4500 requests in an hour.
            pub fn new() -> Self {
                $name::default()
            }

            /// For another limit.
            pub fn limit(self, limit: u32, window: Duration) -> Self {
                $name(self.0.limited(limit, window))
            }

            /// How long the first calls sleep. Default: not at all.
            pub fn start_with(self, sleep: Duration) -> Self {
                $name(self.0.starting(sleep))
            }
        }

        impl Pace for $name {
            fn arrived(&mut self, call: &mut Call, _: &Traffic, dice: &mut Dice) -> Duration {
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
    /// With the token time t0 = window / limit: before its first attempt a call sleeps for `shared`. A refusal adds t0,
    /// sleeps for that, and then makes it 1.2 times as long; a success takes t0 off and writes `shared`.
    ///
    /// What it is bad at: it lets go so fast that nearly half of all requests are refused.
    Gradual, |shared, _, _| shared.least
}

published! {
    /// A sleep that shrinks by a share of itself: a success takes 1 / limit off it.
    ///
    /// As [`Gradual`], but what a success takes off a sleep of `s` is `s / limit`.
    ///
    /// What it is bad at: it lets go so slowly that a full bucket of 4500 takes 500 s to empty instead of 75 s; and chance
    /// decides who sleeps long.
    Proportional, |shared, sleep, _| sleep / shared.limit
}

published! {
    /// A sleep that shrinks the faster, the more is left: the winner of the published four.
    ///
    /// As [`Gradual`], but what a success takes off a sleep of `s` is `s x remaining / limit`. Where the answer does not
    /// say what is left, it is nothing.
    ///
    /// What it is bad at: it moves on refusals, so it needs 3 to 4 % of them to stay put, and chance decides who sleeps
    /// long; without the header it only ever becomes slower.
    Remaining, |shared, sleep, reply| {
        let remaining = Told::of(reply.signal).remaining.unwrap_or(0.0);
        sleep * remaining / shared.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal::{Observed, Signal};

    /// Checks what a call sleeps, but for the jitter: at first, after each refusal, and, once it passed with so much left,
    /// what the next call sleeps first.
    fn check(mut pace: impl Pace, left: u64, expected: &[f64]) {
        let now = crate::clock::now();
        let (traffic, mut dice, mut call) = (Traffic::at(now), Dice::seeded(1), Call::default());
        let mut sleeps = vec![pace.arrived(&mut call, &traffic, &mut dice)];
        let signal = Signal::default().with_quota(Observed::new().with_remaining(left));
        for _ in 2..expected.len() {
            let pause = pace.refused(&mut Reply::new(&signal, now, &mut call), &traffic, &mut dice);
            sleeps.push(pause.call);
        }
        pace.passed(&mut Reply::new(&signal, now, &mut call), &traffic, &mut dice);
        sleeps.push(pace.arrived(&mut Call::default(), &traffic, &mut dice));
        let fits = |(sleep, expected): (&Duration, &f64)| {
            (expected - 1e-6..=expected * 1.1 + 1e-6).contains(&sleep.as_secs_f64())
        };
        assert!(sleeps.iter().zip(expected).all(fits), "{pace:?}: {sleeps:?}, not {expected:?}");
    }

    #[test]
    fn each_sleeps_as_it_was_published() {
        check(Backoff::new(), 0, &[0.0, 0.8, 0.96, 1.152, 0.0]);
        check(Backoff::new().multiplier(2.0), 0, &[0.0, 0.8, 1.6, 3.2, 0.0]);
        // A refusal adds 0.8, and makes it 1.2 times as long once it is over.
        check(Gradual::new(), 0, &[0.0, 0.8, 1.76, 2.912, 2.6944]);
        check(Proportional::new(), 0, &[0.0, 0.8, 1.76, 2.912, 3.4936]);
        check(Remaining::new(), 2250, &[0.0, 0.8, 1.76, 2.912, 1.7472]);
        check(Remaining::new().start_with(Duration::from_secs(5)), 450, &[5.0, 4.5]);
    }
}
