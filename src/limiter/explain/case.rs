//! What would happen to a request under one of its keys. [`KeyCase`] follows the way of a request (`request` and
//! `key_state/ticket`) step by step, and takes nothing.

use std::time::{Duration, Instant};

use super::found::Found;
use crate::clock;
use crate::cost::Cost;
use crate::error::{Reason, StoreError};
use crate::limiter::engine::Core;
use crate::limiter::explanation::{Because, Verdict};
use crate::limiter::reservation::WaitBound;
use crate::quota::Limit;
use crate::stats::Gate;
use crate::store::{LimitUsage, Usage};

/// A request under one of its keys, of which all is known that decides.
pub(super) struct KeyCase<'a> {
    pub(super) core: &'a Core,
    pub(super) cost: u32,
    /// The largest cost that the quota allows.
    pub(super) largest: u32,
    pub(super) found: &'a Found,
    /// The shortest `max_wait` of the limiters of the request.
    pub(super) max_wait: Duration,
    pub(super) bound: WaitBound,
    pub(super) now: Instant,
}

impl KeyCase<'_> {
    /// Decides what would happen to the request.
    ///
    /// # Errors
    ///
    /// That of the store, if the request would fail with it.
    pub(super) fn verdict(&self) -> Result<Verdict, StoreError> {
        if let Some(verdict) = self.at_entrance() {
            return Ok(verdict);
        }
        let usage = match &self.found.usage {
            Ok(usage) => usage,
            Err(error) => return self.without_store(error),
        };
        let outlook = &self.found.outlook;
        let blocked = self.blocked();
        let wait = self.wait(usage);
        let because = match blocked {
            // After a short hold, it is the limits that make a request wait.
            Some((left, blocks)) if left >= wait / 2 => blocks,
            _ => self.because(usage),
        };
        let known = Some(wait).filter(|wait| *wait < Duration::MAX);
        if blocked.is_some_and(|(left, _)| self.is_too_late(left)) {
            return Ok(self.late(known, because));
        }
        if let Some(refusal) = outlook.refusal {
            let limit = refusal.limit.map(Because::Limit);
            return Ok(self.late(refusal.wait, limit.unwrap_or(because)));
        }
        if outlook.is_queue_full {
            return Ok(refused(Reason::QueueFull(self.core.settings.max_queue)));
        }
        if let Some(limit) = self.used_up_in_flight(usage) {
            let in_flight = Because::InFlight(limit);
            if self.bound.latest <= self.now {
                return Ok(self.late(None, in_flight));
            }
            let because = blocked.map_or(in_flight, |(_, blocks)| blocks);
            return Ok(waits(None, because));
        }
        if wait.is_zero() {
            return Ok(Verdict::Goes);
        }
        if self.is_too_late(wait) {
            return Ok(self.late(known, because));
        }
        // The response to a probe may arrive at any time.
        let known = known.filter(|_| because != Because::Probing);
        Ok(waits(known, because))
    }

    /// Decides as `Request::enter` does before it asks the store.
    fn at_entrance(&self) -> Option<Verdict> {
        let settings = &self.core.settings;
        if self.core.tally().is_draining() {
            return Some(refused(Reason::Draining));
        }
        if self.cost == 0 {
            return Some(Verdict::Goes);
        }
        let largest = self.largest;
        if self.cost > largest {
            return Some(refused(Reason::CostAboveLimit {
                cost: self.cost,
                largest,
                unit: self.core.unit().unwrap_or(Cost::REQUESTS),
            }));
        }
        if self.bound.latest < self.now {
            return Some(refused(Reason::Deadline));
        }
        let limits_calls = self.core.in_flight.is_some();
        if !self.found.has_room {
            return Some(refused(Reason::TooManyKeys(settings.max_keys)));
        }
        if self.found.outlook.has_permit && !limits_calls {
            return Some(Verdict::Goes);
        }
        let is_full = limits_calls && self.found.in_flight.waiting >= settings.max_queue;
        is_full.then(|| refused(Reason::QueueFull(settings.max_queue)))
    }

    /// Decides if the store has failed.
    fn without_store(&self, error: &StoreError) -> Result<Verdict, StoreError> {
        match self.blocked() {
            Some((left, blocks)) if self.is_too_late(left) => Ok(self.late(Some(left), blocks)),
            _ if !self.core.fails_open_on(error) => Err(error.clone()),
            Some((left, blocks)) => Ok(waits(Some(left), blocks)),
            None => Ok(Verdict::Goes),
        }
    }

    /// Returns for how long a hold or a probe stops all requests, and which of the two.
    fn blocked(&self) -> Option<(Duration, Because)> {
        match self.found.held() {
            Some(left) => Some((left, Because::Held)),
            None => Some((self.found.outlook.blocked?, Because::Probing)),
        }
    }

    /// Returns the limit of calls in flight, if it is used up.
    fn used_up_in_flight(&self, usage: &Usage) -> Option<Limit> {
        self.core.in_flight.as_ref()?;
        let is_in_flight = |usage: &&LimitUsage| matches!(usage.limit, Limit::InFlight { .. });
        let limit = usage.limits.iter().find(is_in_flight)?;
        let calls = &self.found.in_flight;
        let is_used_up = calls.waiting > 0 || limit.free == 0 && !calls.has_free;
        is_used_up.then_some(limit.limit)
    }

    /// Returns how long the request waits, if not for an in-flight slot.
    fn wait(&self, usage: &Usage) -> Duration {
        let outlook = &self.found.outlook;
        let blocked = self.blocked().map(|(left, _)| left);
        let others = [blocked, outlook.pause, outlook.last_slot];
        let longest = others.into_iter().flatten().max().unwrap_or_default();
        usage.next_slot.max(usage.recovering).max(longest)
    }

    fn is_too_late(&self, wait: Duration) -> bool {
        wait == Duration::MAX || clock::after(self.now, wait) > self.bound.latest
    }

    /// Refuses the request, which cannot wait for `wait`.
    fn late(&self, wait: Option<Duration>, because: Because) -> Verdict {
        let reason = match self.found.held() {
            Some(_) => Reason::Held,
            None => self.bound.reason(self.max_wait),
        };
        Verdict::Refused {
            reason,
            retry_after: wait,
            because: Some(because),
        }
    }

    /// Returns what the request waits for, if neither for a hold nor for a probe.
    fn because(&self, usage: &Usage) -> Because {
        if !usage.recovering.is_zero() {
            return Because::Recovering;
        }
        let is_rate = |usage: &&LimitUsage| !matches!(usage.limit, Limit::InFlight { .. });
        let last = usage
            .limits
            .iter()
            .filter(is_rate)
            .max_by_key(|usage| usage.wait);
        let before = self.found.outlook.waiting;
        match last {
            Some(last) if !last.wait.is_zero() || before == 0 => {
                let wanted = last.used + u64::from(self.cost);
                let has_room = wanted <= u64::from(last.limit.largest_cost());
                if last.reserved > 0 && has_room {
                    Because::Reserved(last.limit)
                } else {
                    Because::Limit(last.limit)
                }
            }
            _ => Because::Queue { before },
        }
    }
}

/// Decides about a request of several keys behind `before` others, if nothing else stops it.
pub(super) fn queued(before: usize, bound: WaitBound, max_wait: Duration, now: Instant) -> Verdict {
    let because = Because::Queue { before };
    if bound.latest > now {
        return waits(None, because);
    }
    Verdict::Refused {
        reason: bound.reason(max_wait),
        retry_after: None,
        because: Some(because),
    }
}

fn waits(wait: Option<Duration>, because: Because) -> Verdict {
    Verdict::Waits { wait, because }
}

/// Refuses a request for a reason that says all.
pub(super) fn refused(reason: Reason) -> Verdict {
    Verdict::Refused {
        reason,
        retry_after: None,
        because: None,
    }
}
