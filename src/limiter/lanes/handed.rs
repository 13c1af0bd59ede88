//! The permits on their way to the tasks of their requests.
//!
//! A window's slots may all be due at one moment, and their permits expire at one moment, some milliseconds later. If all
//! waiters were woken at once, most would run too late. So only so many permits are on their way at one time, and each
//! task that comes has the next one handed out. How many follows from how fast the tasks run: one more for each that comes
//! in the first eighth of its permit's life, and one less for each that comes later. And no permit is handed out behind
//! others if it would expire before its task comes. Tried: always 256. Where a task takes 50 us until it has sent its request,
//! each fourth was too late.
//!
//! A task that does not come at all says nothing about the others: its future is not polled.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::clock;
use crate::tuning::MISSED;
use crate::wait_queue::{Number, is_missed};

/// How many permits are on their way at first, at least and at most.
const FIRST: usize = 64;
const LEAST: usize = 8;
const MOST: usize = 256;

/// A permit that was handed out and not collected.
#[derive(Debug)]
struct OnItsWay {
    number: Number,
    since: Instant,
    until: Instant,
}

/// The permits that were handed out and not collected.
#[derive(Debug)]
pub(super) struct Handed {
    permits: VecDeque<OnItsWay>,
    /// How many valid ones there may be.
    most: usize,
    /// How long the last one was on its way.
    takes: Duration,
}

impl Default for Handed {
    fn default() -> Self {
        Handed {
            permits: VecDeque::new(),
            most: FIRST,
            takes: Duration::ZERO,
        }
    }
}

impl Handed {
    /// Returns how many permits may be handed out at `now`.
    pub(super) fn room(&self, now: Instant) -> usize {
        self.most.saturating_sub(self.valid(now).count())
    }

    /// Returns when there is room again even if no task comes, if there is none.
    pub(super) fn has_room_at(&self, now: Instant) -> Option<Instant> {
        let first = self.valid(now).map(|permit| permit.until).min()?;
        (self.room(now) == 0).then_some(first)
    }

    /// Returns how long a permit that is handed out at `now` is on its way, behind others.
    pub(super) fn takes(&self, now: Instant) -> Duration {
        self.valid(now)
            .next()
            .map_or(Duration::ZERO, |_| self.takes)
    }

    /// Adds a permit that expires at `until`.
    pub(super) fn add(&mut self, number: Number, until: Instant, now: Instant) {
        while let Some(first) = self.permits.front()
            && is_missed(first.until, now)
        {
            self.permits.pop_front();
        }
        // A permit that lasts for long does not keep those of the others back for as long: its task is not polled.
        let until = until.min(clock::after(now, MISSED));
        self.permits.push_back(OnItsWay {
            number,
            since: now,
            until,
        });
    }

    /// Takes in that the task of a request has come.
    pub(super) fn collected(&mut self, number: Number, now: Instant) {
        let Some(permit) = self.take(number) else {
            return;
        };
        self.takes = now.saturating_duration_since(permit.since);
        let left = permit.until.saturating_duration_since(now);
        self.most = match 7 * self.takes <= left {
            true => MOST.min(self.most + 1),
            false => LEAST.max(self.most - 1),
        };
    }

    /// Takes in that a request has left. Its task may not have come for its permit.
    pub(super) fn left(&mut self, number: Number) {
        self.take(number);
    }

    fn take(&mut self, number: Number) -> Option<OnItsWay> {
        let mut numbers = self.permits.iter().map(|permit| permit.number);
        let place = numbers.position(|other| other == number)?;
        self.permits.remove(place)
    }

    fn valid(&self, now: Instant) -> impl Iterator<Item = &OnItsWay> {
        self.permits.iter().filter(move |permit| permit.until > now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock;

    #[test]
    fn fast_tasks_get_more_room_and_slow_ones_less() {
        let (mut handed, start) = (Handed::default(), clock::now());
        let life = Duration::from_millis(10);
        let mut pass = |count: u64, takes: Duration| {
            for number in 0..count {
                handed.add(number, start + life, start);
                handed.collected(number, start + takes);
            }
            (handed.room(start), handed.takes(start))
        };
        assert_eq!(
            pass(10_000, Duration::from_millis(1)),
            (MOST, Duration::ZERO)
        );
        assert_eq!(pass(10_000, Duration::from_millis(3)).0, LEAST);
    }

    /// Permits that were prefetched may last for minutes.
    #[test]
    fn tasks_that_do_not_come_take_room_for_a_short_time() {
        let (mut handed, start) = (Handed::default(), clock::now());
        let life = |number| Duration::from_secs(100 - number);
        (0..FIRST as u64).for_each(|number| handed.add(number, start + life(number), start));
        assert_eq!(handed.has_room_at(start), Some(start + MISSED));
        assert_eq!(handed.room(start + MISSED), FIRST);
    }
}
