//! What would happen to a request under one of its keys, by what the store states. The store is asked only what it would
//! do ([`Store::peek`](crate::store::Store::peek)), so the way of a request cannot be followed from there on.

use std::time::{Duration, Instant};

use super::found::Found;
use crate::clock;
use crate::error::{Reason, StoreError};
use crate::limiter::explanation::{Because, Verdict};
use crate::limiter::part::NewPart;
use crate::limiter::request::cost_above_limit;
use crate::limiter::reservation::NoSlot;
use crate::quota::Limit;
use crate::store::Usage;
use crate::wait_queue::WaitBound;

/// A request under one of its keys, of which all is known that decides.
pub(super) struct KeyCase<'a> {
    pub(super) part: &'a NewPart,
    pub(super) found: &'a Found,
    /// Whether the request has no other key.
    pub(super) is_only: bool,
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
        let blocked = self.blocked();
        let wait = self.wait(usage);
        let because = match blocked {
            // After a short hold, it is the limits that make a request wait.
            Some((left, blocks)) if left >= wait / 2 => blocks,
            _ => self.because(usage),
        };
        let known = Some(wait).filter(|wait| *wait < Duration::MAX);
        if let Some(verdict) = self.blocked_too_long(known, because) {
            return Ok(verdict);
        }
        match &self.found.outlook.refused {
            Some(NoSlot::TooLate(refusal)) => {
                let limit = refusal.limit.map(Because::Limit);
                return Ok(self.late(refusal.wait, limit.unwrap_or(because)));
            }
            // The room for a request of several keys is that of its line.
            Some(NoSlot::Refused(reason, _)) if self.is_only => {
                return Ok(refused(reason.clone()));
            }
            _ => {}
        }
        if let Some(limit) = self.used_up_in_flight(usage) {
            let in_flight = Because::InFlight(limit);
            if self.bound.patience_ends(self.now).is_none() {
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

    /// Decides without what the store states of the limits, if that is possible.
    fn at_entrance(&self) -> Option<Verdict> {
        let NewPart { core, entry, .. } = self.part;
        if entry.cost == 0 {
            return Some(Verdict::Goes);
        }
        let largest = self.found.largest_cost();
        let largest = largest.unwrap_or_else(|| self.part.largest_cost());
        if let Some(reason) = cost_above_limit(core, entry.cost, largest) {
            return Some(refused(reason));
        }
        if !self.has_room() {
            return Some(refused(Reason::TooManyKeys(core.settings.max_keys)));
        }
        let goes = self.found.outlook.has_permit && core.in_flight.is_none();
        goes.then_some(Verdict::Goes)
    }

    /// Returns whether `max_keys` leaves room for the key.
    fn has_room(&self) -> bool {
        let NewPart { core, entry, .. } = self.part;
        let calls = core.in_flight.as_ref();
        (!core.has_rates() || core.states.has_room(entry.key, self.now))
            && calls.is_none_or(|calls| calls.has_room(core.whole(entry.key), self.now))
    }

    /// Decides if the store has failed.
    fn without_store(&self, error: &StoreError) -> Result<Verdict, StoreError> {
        let blocked = self.blocked();
        if let Some((left, blocks)) = blocked
            && let Some(verdict) = self.blocked_too_long(Some(left), blocks)
        {
            return Ok(verdict);
        }
        match blocked {
            _ if !self.part.core.fails_open_on(error) => Err(error.clone()),
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

    /// Decides on a request that a hold or a probe stops for longer than it can wait: for `wait`, if that is known. For the
    /// response to a probe, which may arrive at any time, it waits as long as it can.
    fn blocked_too_long(&self, wait: Option<Duration>, because: Because) -> Option<Verdict> {
        let (left, blocks) = self.blocked()?;
        if !self.bound.is_too_long(left, self.now) {
            return None;
        }
        let is_probe = matches!(blocks, Because::Probing);
        Some(
            match is_probe && self.bound.patience_ends(self.now).is_some() {
                true => waits(None, blocks),
                false => self.late(wait, because),
            },
        )
    }

    /// Returns the limit of calls in flight, if it is used up.
    fn used_up_in_flight(&self, usage: &Usage) -> Option<Limit> {
        let NewPart { core, entry, .. } = self.part;
        let calls = core.in_flight.as_ref()?;
        let limit = usage.limits.iter().find(|usage| usage.is_in_flight())?;
        let is_free = calls.is_free(core.whole(entry.key), limit.free);
        (!is_free).then_some(limit.limit)
    }

    /// Returns how long the request waits, if not for an in-flight slot.
    fn wait(&self, usage: &Usage) -> Duration {
        let blocked = self.blocked().map_or(Duration::ZERO, |(left, _)| left);
        let in_store = usage.next_slot.max(usage.recovering);
        in_store.max(blocked).max(self.found.outlook.least_wait)
    }

    fn is_too_late(&self, wait: Duration) -> bool {
        wait == Duration::MAX || clock::after(self.now, wait) > self.bound.latest
    }

    /// Refuses the request, which cannot wait for `wait`.
    fn late(&self, wait: Option<Duration>, because: Because) -> Verdict {
        let reason = match self.found.held() {
            Some(left) if self.bound.is_too_long(left, self.now) => self
                .found
                .outlook
                .hold_reason
                .clone()
                .unwrap_or(Reason::Held),
            _ => self.bound.reason(),
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
        let rates = usage.limits.iter().filter(|usage| !usage.is_in_flight());
        let last = rates.max_by_key(|usage| usage.wait);
        let before = self.found.outlook.waiting;
        match last {
            Some(last) if !last.wait.is_zero() || before == 0 => {
                let wanted = last.used + u64::from(self.part.entry.cost);
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
pub(super) fn queued(before: usize, bound: WaitBound, now: Instant) -> Verdict {
    let because = Because::Queue { before };
    if bound.latest > now {
        return waits(None, because);
    }
    Verdict::Refused {
        reason: bound.reason(),
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
