//! The entrance: a request gets its permit at once, or a future that waits for it, or an error.

use std::sync::Arc;
use std::time::Instant;

use super::admission::{Admission, Entry, WaitFor};
use super::engine::Core;
use super::hosts::host_hold;
use super::in_flight_slot::InFlightSlot;
use super::limited::Request;
use super::reservation::{Reservation, WaitBound};
use super::waiter::Waiter;
use crate::clock;
use crate::error::{Limited, Reason};
use crate::events;
use crate::store::Refusal;

/// What a request gets when it enters.
pub(crate) enum Started {
    /// The request may leave. The slot is `None` if it costs nothing, or if rates are not limited.
    /// The in-flight slot is `None` if calls in flight are not limited.
    Granted(Option<Reservation>, Option<InFlightSlot>),
    Waiting(Box<Waiter>),
    Limited(Limited),
}

impl Core {
    /// Sends a request if a permit is at hand. Returns the time in both cases: `Ok` if the request
    /// was sent, `Err` if not.
    #[inline]
    pub(super) fn send_at_once(&self, entry: &Entry) -> Result<Instant, Instant> {
        let now = clock::now();
        let is_sent = entry.cost == 0
            || self.is_open(entry, now)
                && self
                    .states
                    .find(entry.key, |state| state.spend(entry.cost, now))
                    == Some(true);
        if is_sent { Ok(now) } else { Err(now) }
    }

    /// Takes a permit that is at hand. Returns `None` for a request that costs nothing.
    ///
    /// # Errors
    ///
    /// The time, if the request has to take the slow path.
    #[inline]
    pub(super) fn take_at_once(&self, entry: &Entry) -> Result<Option<Reservation>, Instant> {
        let now = clock::now();
        if entry.cost == 0 {
            return Ok(None);
        }
        if !self.is_open(entry, now) {
            return Err(now);
        }
        let taken = self
            .states
            .find(entry.key, |state| state.take(entry.cost, now))
            .flatten();
        taken.map(Some).ok_or(now)
    }

    /// Returns whether a request may leave as soon as it has a permit of its key. Then calls in
    /// flight are not limited, its host is known not to be on hold, and its deadline has not
    /// passed.
    #[inline]
    fn is_open(&self, entry: &Entry, now: Instant) -> bool {
        self.in_flight.is_none()
            && self.is_host_clear(entry.key, entry.host, now)
            && entry.deadline.is_none_or(|deadline| deadline >= now)
    }

    /// Enters a request for which no permit is at hand. `label` returns the name of its key.
    #[cold]
    pub(super) fn start_slow(
        self: &Arc<Self>,
        entry: &Entry,
        now: Instant,
        label: impl FnOnce() -> Box<str>,
    ) -> Started {
        let settings = &self.settings;
        let bound = WaitBound::new(entry.deadline, now, settings.max_wait);
        let refuse = |label, reason, refusal| {
            Started::Limited(Request::new(label, now).refuse(reason, refusal, now))
        };
        let largest = settings.spec.quota().largest_cost();
        if entry.cost > largest {
            let reason = Reason::CostAboveLimit {
                cost: entry.cost,
                largest,
            };
            return refuse(label(), reason, Refusal::NEVER);
        }
        if bound.latest < now {
            return refuse(label(), Reason::Deadline, Refusal::NEVER);
        }
        match self.admit(entry, bound, now) {
            Admission::Granted {
                slot,
                in_flight_slot,
            } => {
                let Some(left) =
                    host_hold(entry.key, entry.host).and_then(|hold| self.blocked(hold, now))
                else {
                    return Started::Granted(slot, in_flight_slot);
                };
                // Another request has become the probe of the host meanwhile.
                if let Some(slot) = slot {
                    self.give_back(entry.key, slot);
                }
                let wait = WaitFor::HostHold(clock::after(now, left));
                Started::Waiting(
                    Waiter::new(self, entry, bound, now, label()).waits(wait, None, now),
                )
            }
            Admission::Uncounted {
                cause,
                in_flight_slot,
            } => {
                events::passed(&label(), &cause);
                Started::Granted(None, in_flight_slot)
            }
            Admission::Waits {
                wait,
                in_flight_slot,
            } => {
                let label = label();
                events::waiting(&label, self.queued(entry.key, wait));
                Started::Waiting(Waiter::new(self, entry, bound, now, label).waits(
                    wait,
                    in_flight_slot,
                    now,
                ))
            }
            Admission::Refused(reason, refusal) => refuse(label(), reason, refusal),
            Admission::Failed(source) => {
                Started::Limited(Request::new(label(), now).fail(source, now))
            }
        }
    }
}
