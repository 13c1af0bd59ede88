//! The permits on their way to the tasks of their requests.
//!
//! A window's slots may all be due at one moment, and their permits expire at one moment, some milliseconds later. If all
//! waiters were woken at once, most would run too late. So only so many permits are on their way at one time, and each
//! task that comes has the next one handed out. How many follows from how fast the tasks run: one more for each that comes
//! in the first third of its permit's life, and one less for each that comes later. And no permit is handed out behind
//! others if it would expire before its task comes. Tried: always 256. Where a task takes 50 us until it has sent its request,
//! each fourth was too late.
//!
//! A task that does not come at all says nothing about the others: its future is not polled.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

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
        let first = self.valid(now).next()?;
        (self.room(now) == 0).then_some(first.until)
    }

    /// Returns how long a permit that is handed out at `now` is on its way, behind others.
    pub(super) fn takes(&self, now: Instant) -> Duration {
        self.valid(now).next().map_or(Duration::ZERO, |_| self.takes)
    }

    /// Adds a permit that expires at `until`.
    pub(super) fn add(&mut self, number: Number, until: Instant, now: Instant) {
        while let Some(first) = self.permits.front()
            && is_missed(first.until, now)
        {
            self.permits.pop_front();
        }
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
        self.most = match 2 * self.takes <= left {
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
